"""Muon and AdamW against independent ones; schedules by their closed forms."""

import math
from typing import Any

import pytest
import torch
from support.tolerance import close, seeded

from headwise.lm import optim
from headwise.lm.optim import (
    MARGIN,
    POLYNOMIALS,
    UPDATE_RMS,
    Optimiser,
    is_matrix,
    lr_multiplier,
    map_rows,
    orthogonalise,
)
from headwise.lm.spec import SCHEDULES
from headwise.model.init import initialise
from headwise.model.transformer import Decoder
from headwise.shape import Shape

COMMON: dict[str, Any] = {"causal": True, "vocab_size": 13}
WIDE: dict[str, Any] = {
    "dim": 22,
    "depth": 2,
    "num_heads": 3,
    "head_dim": 10,
    "v_head_dim": 6,
    **COMMON,
}
BIASES: dict[str, Any] = {
    "qkv_bias": True,
    "out_bias": True,
    "ffn_bias": True,
    "positions": "additive",
    "num_positions": 5,
}
SHAPES = {
    "plain": Shape(**WIDE, num_kv_heads=1, ffn_dim=26, activation="swiglu"),
    "latent": Shape(**WIDE, kv_lora_rank=7, q_lora_rank=5, qk_rope_head_dim=4),
    "biases": Shape(
        dim=12, depth=1, num_heads=4, average=2, norm="layer", tied=False, **BIASES, **COMMON
    ),
    "modern": Shape(
        **WIDE | {"num_heads": (4, 2), "v_head_dim": (10, 6), "depth": 3},
        shared_kv=(True, False),
        attn_gate="head",
        o_lora_rank=3,
        o_groups=2,
        ffn_dim=(13, 26),
    ),
    "low-rank queries": Shape(**WIDE, q_lora_rank=5),
    "no vectors": Shape(dim=12, depth=1, num_heads=4, ffn_dim=0, norm="rms-free", **COMMON),
}
MATRICES = {"plain": 4, "latent": 7, "biases": 4, "no vectors": 2}
MATRICES |= {"modern": 6, "low-rank queries": 6}  # of a block


def model_of(shape: Shape, seed: int = 0) -> Decoder:
    model = Decoder(shape)
    initialise(model, "normal", seeded(seed))
    return model


def pushed(model: Decoder, seed: int) -> None:
    """Gradients out of nowhere."""
    generator = seeded(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


# ---- orthogonalisation


@pytest.mark.parametrize("size", [(7, 7), (5, 13), (13, 5), (1, 11), (31, 23)])
def test_orthogonalise_against_the_singular_value_decomposition(size: tuple[int, int]) -> None:
    """U p(S) V^T with the polynomials one after another, and p(S) within 15 % of 1 from a
    thousandth of the norm on."""
    matrices = torch.randn(3, *size, generator=seeded(1), dtype=torch.float64)
    u, s, vt = torch.linalg.svd(matrices, full_matrices=False)
    low = torch.logspace(0, -2.5, s.shape[-1], dtype=torch.float64)
    matrices = u * low @ vt
    x = low / (low.norm() * MARGIN)
    for a, b, c in POLYNOMIALS:
        x = a * x + b * x**3 + c * x**5
    found = orthogonalise(matrices, torch.float64)
    close(found, u * x @ vt)
    singular = torch.linalg.svdvals(found)
    assert 0.85 < singular.min() <= singular.max() < 1.15
    assert (orthogonalise(matrices.float()) - found).abs().max() < 1e-4


def test_orthogonalise_in_bfloat16_is_good_enough() -> None:
    matrices = torch.randn(5, 17, 29, generator=seeded(4))
    off = torch.linalg.matrix_norm(
        orthogonalise(matrices, torch.bfloat16).float() - orthogonalise(matrices), 2
    )
    assert off.max() < 0.25, off  # of singular values that are right to 0.15


def test_orthogonalise_ignores_scale_neighbours_and_orientation() -> None:
    matrices = torch.randn(4, 6, 11, generator=seeded(2))
    together = orthogonalise(matrices)
    for one, alone in zip(matrices, together, strict=True):
        close(orthogonalise(one), alone)
        close(orthogonalise(one * 1e-15), alone)
        close(orthogonalise(one * 1e15), alone)
        close(orthogonalise(one.mT), alone.mT)
    assert (orthogonalise(torch.zeros(2, 3, 5)) == 0).all()


def test_orthogonalise_fails_with_another_polynomial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "POLYNOMIALS", ((1.0, 0.0, 0.0), *POLYNOMIALS[1:]))
    u, _, vt = torch.linalg.svd(torch.randn(9, 9, generator=seeded(3)))
    found = torch.linalg.svdvals(orthogonalise(u * torch.logspace(0, -2.5, 9) @ vt))
    assert found.min() < 0.85


# ---- Muon


@pytest.mark.parametrize("name", SHAPES)
def test_map_rows_are_all_of_a_matrix(name: str) -> None:
    shape, found = SHAPES[name], 0
    for at, p in model_of(shape).named_parameters():
        if is_matrix(at, p):
            found += 1
            assert sum(map_rows(shape, at, p.shape[0])) == p.shape[0], at
        else:
            assert (
                p.ndim == 1 or at in ("embedding", "head", "positions") or at.endswith("out_bias")
            ), at
    assert found == shape.depth * MATRICES[name]


def by_hand(
    model: Decoder, shape: Shape, rates: list[float], decay: float
) -> dict[str, torch.Tensor]:
    """Muon on every map of every block apart, in float64, the maps found by the projections' own
    sizes."""
    H, R, V, KV = shape.num_heads, shape.head_dim, shape.v_head_dim, shape.num_kv_heads
    cuts = {
        "attention.qkv": [H * R, KV * R, KV * V],
        "attention.out": [shape.dim],
        "feed.up": [shape.ffn_dim] * 2,
        "feed.down": [shape.dim],
    }
    weights = {
        name: p.detach().double().clone()
        for name, p in model.named_parameters()
        if name.startswith("blocks.") and p.ndim == 2
    }
    mean = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step, lr in enumerate(rates):
        pushed(model, step)
        for name, p in model.named_parameters():
            if name not in weights:
                continue
            assert p.grad is not None
            grad = p.grad.double()
            mean[name] = 0.95 * mean[name] + 0.05 * grad
            ahead = 0.05 * grad + 0.95 * mean[name]
            (cut,) = (sizes for part, sizes in cuts.items() if part in name)
            moved = []
            for piece in ahead.split(cut):
                u, s, vt = torch.linalg.svd(piece, full_matrices=False)
                x = s / (s.norm() * MARGIN)
                for a, b, c in POLYNOMIALS:
                    x = a * x + b * x**3 + c * x**5
                moved.append(u * x @ vt * 0.2 * math.sqrt(max(piece.shape)))
            weights[name] = weights[name] * (1 - lr * decay) - lr * torch.cat(moved)
    return weights


def test_muon_step_by_step() -> None:
    shape, rates = SHAPES["plain"], [0.01, 0.03, 0.02]
    expected = by_hand(model_of(shape), shape, rates, decay=0.1)
    model = model_of(shape)
    optimiser = Optimiser(dict(model.named_parameters()), shape, "muon", 0.1)
    for step, lr in enumerate(rates):
        pushed(model, step)
        optimiser.step(lr)
    named = dict(model.named_parameters())
    assert set(optimiser.matrices) == set(expected)
    for name, weights in expected.items():
        close(named[name].detach(), weights.float(), name)
        assert (
            named[name].detach() - dict(model_of(shape).named_parameters())[name].detach()
        ).abs().max() > 0.005


def test_muon_update_is_as_large_as_adamws_whatever_the_shape() -> None:
    for name in ("plain", "latent", "biases"):
        model = model_of(SHAPES[name])
        before = {k: p.detach().clone() for k, p in model.named_parameters()}
        optimiser = Optimiser(dict(model.named_parameters()), SHAPES[name], "muon")
        pushed(model, 0)
        optimiser.step(1.0)
        for k in optimiser.matrices:
            size = (
                (dict(model.named_parameters())[k].detach() - before[k])
                .square()
                .mean()
                .sqrt()
                .item()
            )
            assert size == pytest.approx(UPDATE_RMS, rel=0.15), k


def test_muon_as_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same optimiser with torch's polynomial, in bfloat16 as torch has it."""
    monkeypatch.setattr(optim, "POLYNOMIALS", ((3.4445, -4.7750, 2.0315),) * 5)
    monkeypatch.setattr(optim, "MARGIN", 1.0)
    shape = Shape(dim=24, depth=1, num_heads=2, ffn_dim=40, causal=True, vocab_size=13)
    ours, theirs = model_of(shape), model_of(shape)
    names = [
        "blocks.0.attention.out.weight",
        "blocks.0.feed.up.weight",
        "blocks.0.feed.down.weight",
    ]
    optimiser = Optimiser(dict(ours.named_parameters()), shape, "muon", 0.2, dtype=torch.bfloat16)
    stock = torch.optim.Muon(
        [dict(theirs.named_parameters())[n] for n in names],
        lr=0.1,
        weight_decay=0.2,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(3):
        pushed(ours, step)
        pushed(theirs, step)
        optimiser.step(0.1)
        stock.step()
    start = dict(model_of(shape).named_parameters())
    for name in names:
        a, b = (
            dict(m.named_parameters())[name].detach() - start[name].detach() for m in (ours, theirs)
        )
        assert (a - b).norm() < 0.05 * b.norm(), name


# ---- AdamW


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_adamw_is_torchs(name: str, kind: str) -> None:
    shape = SHAPES[name]
    ours, theirs = model_of(shape), model_of(shape)
    stock = torch.optim.AdamW(
        [
            {
                "params": [
                    p for n, p in theirs.named_parameters() if p.ndim > 1 and "bias" not in n
                ],
                "weight_decay": 0.1,
            },
            {
                "params": [p for n, p in theirs.named_parameters() if p.ndim == 1 or "bias" in n],
                "weight_decay": 0.0,
            },
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
        foreach=False,
    )
    optimiser = Optimiser(dict(ours.named_parameters()), shape, kind, 0.1)
    assert bool(optimiser.matrices) == (kind == "muon")
    for step, lr in enumerate((0.1, 0.03, 0.02)):
        pushed(ours, step)
        pushed(theirs, step)
        optimiser.step(lr)
        for group in stock.param_groups:
            group["lr"] = lr
        stock.step()
    for (n, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if n not in optimiser.matrices:
            close(a.detach(), b.detach(), n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_grad_scale_divides_the_gradient(kind: str, dtype: torch.dtype) -> None:
    shape, found = SHAPES["plain"], []
    for over in (None, torch.tensor(3.7)):
        model = model_of(shape).to(dtype)
        optimiser = Optimiser(dict(model.named_parameters()), shape, kind, 0.1)
        for step in range(3):
            pushed(model, step)
            for p in model.parameters():
                assert p.grad is not None
                p.grad = p.grad if over is not None else p.grad / 3.7
            if step == 1:  # so that an update depends on how large each gradient was
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad *= 5
            optimiser.step(0.1, over)
        found.append([p.detach() for p in model.parameters()] + list(optimiser.moments.values()))
    for expected, divided in zip(*found, strict=True):
        torch.testing.assert_close(divided, expected, rtol=1e-4, atol=1e-6)


def test_optimiser_state_is_moments_and_steps() -> None:
    """A new optimiser with the old one's moments continues as the old one."""
    shape = SHAPES["plain"]
    model = model_of(shape)
    one: dict[str, Any] = {}
    first = Optimiser(dict(model.named_parameters()), shape, "muon", 0.1)
    for step in range(4):
        if step == 2:
            one = {name: p.detach().clone() for name, p in model.named_parameters()}
            moments = {name: m.clone() for name, m in first.moments.items()}
        pushed(model, step)
        first.step(0.05)
    other = model_of(shape, seed=9)
    second = Optimiser(dict(other.named_parameters()), shape, "muon", 0.1)
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(one[name])
    for name, m in second.moments.items():
        m.copy_(moments[name])
    second.set_steps(2)
    for step in (2, 3):
        pushed(other, step)
        second.step(0.05)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


# ---- schedules


def test_lr_multiplier_of_a_trapezoid_by_its_corners() -> None:
    rates = [lr_multiplier("trapezoid", step, 1000, 0.1, 0.3) for step in range(1000)]
    assert rates[:100] == pytest.approx([(i + 1) / 100 for i in range(100)])
    assert rates[100:701] == [1.0] * 601
    assert rates[700:] == pytest.approx([1 - i / 300 for i in range(300)])
    assert [lr_multiplier("trapezoid", step, 5, 0.0, 0.0) for step in range(5)] == [1.0] * 5


def test_lr_multiplier_of_a_cosine_by_its_closed_form() -> None:
    rates = [lr_multiplier("cosine", step, 1000, 0.1, 0.3) for step in range(1000)]
    assert rates[:100] == pytest.approx([(i + 1) / 100 for i in range(100)])
    assert rates[100:] == pytest.approx([math.cos(math.pi * i / 1800) ** 2 for i in range(900)])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 3, 19, 20])
@pytest.mark.parametrize(("warmup", "warmdown"), [(0.0, 0.0), (0.5, 0.5), (1.0, 0.0), (0.0, 1.0)])
def test_lr_multiplier_is_above_0_and_at_most_1(
    schedule: str, steps: int, warmup: float, warmdown: float
) -> None:
    rates = [lr_multiplier(schedule, step, steps, warmup, warmdown) for step in range(steps)]
    assert all(0 < r <= 1 for r in rates)
