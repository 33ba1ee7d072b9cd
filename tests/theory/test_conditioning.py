"""Condition numbers: every known value from its own draws, closed forms, properties, Jacobians by
differences, Lanczos, the experiment."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tolerance import STANDARD_ERRORS, close, examples, same, seeded
from torch import Tensor

from headwise.cli import main
from headwise.errors import UsageError
from headwise.experiments.common import published
from headwise.experiments.leaner_paper import conditioning
from headwise.experiments.legacy import EXPERIMENTS, PARTS, cell, settings_of
from headwise.model.attention import Attention
from headwise.model.init import initialise
from headwise.model.transformer import Decoder, Encoder, build
from headwise.shape import Shape
from headwise.show.matplotlib_figure import save
from headwise.show.plotly_figure import plotly_figure
from headwise.show.report import write_report
from headwise.store import Store
from headwise.theory import conditioning as C

GAUSSIAN, INIT, TOY = (
    published(f"leaner_kappa_{name}") for name in ("gaussian", "init_attention", "jacobian_toy")
)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=seeded(seed))


def with_weights(shape: Shape, seed: int = 0) -> Attention:
    """A layer of any form in float64, every parameter drawn."""
    layer = Attention(shape).double()
    with torch.no_grad():
        for i, weight in enumerate(layer.parameters()):
            weight.copy_(normal(*weight.shape, seed=1000 * seed + i) * shape.dim**-0.5)
    return layer


def known_draw(
    seed: int, tokens: int, dim: int, heads: int, head_dim: int, std: float
) -> tuple[Attention, Tensor]:
    """The layer and tokens behind a known value: NumPy's generator draws tokens, then by head W_Q,
    W_K, W_V, then W_O."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, dim))
    x = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    heads_3DR = np.stack(
        [[std * rng.standard_normal((dim, head_dim)) for _ in range(3)] for _ in range(heads)]
    )
    layer = Attention(Shape(dim=dim, depth=1, num_heads=heads, head_dim=head_dim)).double()
    with torch.no_grad():
        layer.qkv.weight.copy_(torch.from_numpy(heads_3DR.transpose(1, 0, 3, 2).reshape(-1, dim)))
        layer.out.weight.copy_(
            torch.from_numpy(std * rng.standard_normal((heads * head_dim, dim)).T)
        )
    return layer, torch.from_numpy(x)


def told(text: str) -> Any:
    """A number as it is printed: half a unit of its last digit either way."""
    digits = len(text.partition(".")[2])
    return pytest.approx(float(text), abs=0.5001 * 10.0**-digits, rel=1e-9)


def found(values: list[Tensor]) -> float:
    return C.geometric_mean(torch.stack(values))


# ---- Gaussian heads


@pytest.mark.parametrize("row", GAUSSIAN, ids=lambda r: f"{r['N']} x {r['width']}")
def test_the_closed_form_is_the_known_one(row: dict[str, str]) -> None:
    tokens, width = int(row["N"]), int(row["width"])
    assert width == int(row["heads"]) * int(row["head_dim"])
    assert f"{C.gaussian_kappa(tokens, width):.3f}" == row["closed_form"]
    assert C.gaussian_kappa(width, tokens) == C.gaussian_kappa(tokens, width)


def test_the_closed_form_peaks_where_the_width_is_the_number_of_tokens() -> None:
    values = [C.gaussian_kappa(197, width) for width in range(1, 800)]
    assert values[196] == math.inf
    assert values[:197] == sorted(values[:197])
    assert values[196:] == sorted(values[196:], reverse=True)
    assert C.gaussian_kappa(197, 10**9) == pytest.approx(1, abs=1e-3), "part (b) of the theorem"
    assert C.gaussian_kappa(197, 12 * 64) == C.gaussian_kappa(197, 48 * 16), (
        "split heads change nothing"
    )


def test_the_known_samples_from_their_own_draws() -> None:
    rng = np.random.default_rng(0)
    for row in GAUSSIAN:
        drawn = [
            torch.from_numpy(rng.standard_normal((int(row["N"]), int(row["width"]))))
            for _ in range(20)
        ]
        if int(row["width"]) > 400:
            continue
        kappa = C.spectrum(torch.stack(drawn)).kappa
        assert kappa.mean().item() == told(row["mc_mean"])
        assert kappa.std(correction=0).item() == told(row["mc_std"])


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 10, 11, 13, 15])
def test_samples_of_our_own(at: int) -> None:
    row = GAUSSIAN[at]
    kappa = C.sampled_gaussian_kappa(int(row["N"]), int(row["width"]), 8, seeded(at))
    assert kappa.shape == (8,)
    assert abs(kappa.mean().item() - float(row["mc_mean"])) < 3 * float(row["mc_std"])
    same(kappa[:3], C.sampled_gaussian_kappa(int(row["N"]), int(row["width"]), 3, seeded(at)))
    assert len(set(kappa.tolist())) == 8


# ---- a spectrum

matrices = st.tuples(st.integers(2, 11), st.integers(1, 11), st.integers(0, 2**20)).map(
    lambda t: normal(t[0], t[1], seed=t[2])
)


@examples(60)
@given(matrices, st.booleans())
def test_a_spectrum_by_numpy(A: Tensor, centred: bool) -> None:
    a = A.numpy() - A.numpy().mean(0) if centred else A.numpy()
    k = min(A.shape[0] - 1 if centred else A.shape[0], A.shape[1])
    s = np.linalg.svd(a, compute_uv=False)[:k]
    got, p = C.spectrum(A, centred=centred), s / s.sum()
    assert got.k == got.rank.item() == k
    for value, expected in (
        (got.largest, s[0]),
        (got.smallest, s[-1]),
        (got.stable_rank, (a**2).sum() / s[0] ** 2),
        (got.effective_rank, math.exp(-(p * np.log(p)).sum())),
    ):
        assert value.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert got.kappa.item() == pytest.approx(s[0] / s[-1], rel=1e-7)


@examples(60)
@given(matrices)
def test_what_lies_between_what(A: Tensor) -> None:
    s, room = C.spectrum(A), 1 + 1e-12
    assert s.kappa >= 1
    assert s.stable_rank * room >= 1
    assert s.stable_rank <= s.effective_rank * room
    assert s.effective_rank <= s.rank * room
    assert s.rank <= s.k == min(A.shape)


@examples(60)
@given(matrices, st.floats(-30, 30), st.integers(0, 2**20))
def test_rotations_and_scales_change_no_ratio(A: Tensor, power: float, seed: int) -> None:
    left, right = (torch.linalg.qr(normal(n, n, seed=seed + i))[0] for i, n in enumerate(A.shape))
    one, other, turned = (
        C.spectrum(A),
        C.spectrum(2.0**power * left @ A @ right),
        C.spectrum(A.T) if A.shape[1] > 1 else C.spectrum(A),
    )
    for name in ("kappa", "stable_rank", "effective_rank"):
        expected = getattr(one, name).item()
        loss = 1e-13 * one.kappa.item()
        assert getattr(other, name).item() == pytest.approx(expected, rel=1e-10 + loss)
        assert getattr(turned, name).item() == pytest.approx(expected, rel=1e-10 + loss)
    assert other.largest.item() == pytest.approx(2.0**power * one.largest.item(), rel=1e-10)


@examples(60)
@given(matrices, st.integers(0, 2**20))
def test_the_mean_token_is_removed_whatever_it_is(A: Tensor, seed: int) -> None:
    shifted = A + 10 * normal(1, A.shape[1], seed=seed)
    one, other = C.spectrum(A, centred=True), C.spectrum(shifted, centred=True)
    assert one.k == other.k == min(A.shape[0] - 1, A.shape[1])
    for name in ("largest", "smallest", "stable_rank", "effective_rank"):
        assert getattr(other, name).item() == pytest.approx(
            getattr(one, name).item(), rel=1e-9, abs=1e-12
        )
    inside = torch.linalg.svdvals(
        torch.linalg.qr(torch.eye(len(A), dtype=A.dtype) - 1 / len(A))[0][:, :-1].T @ A
    )
    assert one.kappa.item() == pytest.approx((inside[0] / inside[one.k - 1]).item(), rel=1e-7), (
        "in the space at right angles to ones"
    )


def test_known_spectra() -> None:
    s = C.spectrum(torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0])))
    assert (s.largest.item(), s.smallest.item(), s.kappa.item(), s.stable_rank.item(), s.k) == (
        4,
        1,
        4,
        22 / 16,
        4,
    )
    assert s.effective_rank.item() == pytest.approx(
        2 ** (0.5 * 1 + 0.25 * 2 + 2 * 0.125 * 3), rel=1e-12
    )
    eye = C.spectrum(torch.eye(5, 7))
    assert (eye.kappa.item(), eye.stable_rank.item(), eye.k) == (1, 5, 5)
    assert eye.effective_rank.item() == pytest.approx(5, rel=1e-12)
    assert C.spectrum(torch.ones(3, 1)).kappa.item() == 1


def test_less_than_full_rank_is_infinite_and_said() -> None:
    low = normal(13, 3) @ normal(3, 7, seed=1)
    s = C.spectrum(low)
    assert (s.kappa.item(), s.smallest.item(), s.rank.item(), s.k) == (math.inf, 0, 3, 7)
    assert s.effective_rank <= 3
    square = normal(7, 11)
    assert C.spectrum(square - square.mean(0)).kappa.item() == math.inf
    assert C.spectrum(square, centred=True).kappa.item() < 1e3
    flat = C.spectrum(torch.full((5, 3), 0.1), centred=True)
    assert (
        flat.kappa.item(),
        flat.rank.item(),
        flat.stable_rank.item(),
        flat.effective_rank.item(),
    ) == (math.inf, 0, 0, 0)
    rough = C.spectrum(normal(1, 3).expand(7, 3) * 1e3, centred=True)
    assert (rough.kappa.item(), rough.rank.item()) == (math.inf, 0), (
        "what rounding leaves of equal tokens is nothing"
    )
    assert C.spectrum(torch.zeros(5, 3)).kappa.item() == math.inf


def test_many_matrices_at_once_are_the_same_ones() -> None:
    many = normal(2, 3, 7, 5)
    for centred in (False, True):
        got = C.spectrum(many, centred=centred)
        assert got.kappa.shape == got.rank.shape == (2, 3)
        for i, j in itertools.product(range(2), range(3)):
            one = C.spectrum(many[i, j], centred=centred)
            for name in (*C.MEASURES, "rank"):
                close(getattr(got, name)[i, j].double(), getattr(one, name).double(), name)
    half = C.spectrum(many.float())
    assert half.kappa.dtype == torch.float64
    same(half.kappa, C.spectrum(many.float().double()).kappa)


# ---- heads' outputs of random layers


@pytest.mark.parametrize("at", [2, 8, 9, 18])
def test_the_known_outputs_from_their_own_draws(at: int) -> None:
    row = INIT[at]
    std = 768**-0.5 if row["weight_std"] == conditioning.INVERSE else float(row["weight_std"])
    plain, centred = [], []
    for seed in range(100, 105):
        A = C.layer_outputs(
            *known_draw(seed, 197, 768, int(row["heads"]), int(row["head_dim"]), std)
        )
        assert A.shape == (197, int(row["inner"]))
        plain.append(C.spectrum(A).kappa)
        centred.append(C.spectrum(A, centred=True).kappa)
    assert found(plain) == told(row["kappa"])
    assert found(centred) == told(row["kappa_centred"])


@pytest.mark.parametrize("at", [0, 3, 12])
def test_outputs_of_our_own_draws_are_within_a_fifth(at: int) -> None:
    row, plain, centred = INIT[at], [], []
    for seed in range(5):
        g = seeded(seed)
        x = C.random_tokens(197, 768, g)
        A = C.layer_outputs(
            C.random_attention(768, int(row["heads"]), int(row["head_dim"]), 0.02, g), x
        )
        plain.append(C.spectrum(A).kappa)
        centred.append(C.spectrum(A, centred=True).kappa)
    assert found(plain) == pytest.approx(float(row["kappa"]), rel=0.2)
    assert found(centred) == pytest.approx(float(row["kappa_centred"]), rel=0.2)


def test_drawn_tokens_and_weights_have_the_laws_they_say() -> None:
    x = C.random_tokens(31, 257, seeded(0))
    close(x.mean(1), torch.zeros(31, dtype=torch.float64))
    close(x.square().mean(1), torch.ones(31, dtype=torch.float64))
    raw = C.random_tokens(31, 257, seeded(0), normalised=False)
    assert abs(raw.mean()) < STANDARD_ERRORS / math.sqrt(raw.numel())
    assert abs(raw.square().mean() - 1) < STANDARD_ERRORS * math.sqrt(2 / raw.numel())
    before = torch.random.get_rng_state()
    layer = C.random_attention(29, 3, 5, 0.7, seeded(1))
    same(torch.random.get_rng_state(), before)
    assert [tuple(w.shape) for w in layer.parameters()] == [(45, 29), (29, 15)]
    for weight in layer.parameters():
        assert weight.dtype == torch.float64
        assert abs(weight.square().mean() / 0.49 - 1) < STANDARD_ERRORS * math.sqrt(
            2 / weight.numel()
        )
    same(layer.qkv.weight, C.random_attention(29, 3, 5, 0.7, seeded(1)).qkv.weight)


def test_outputs_are_softmax_averages_written_out() -> None:
    layer, x = (
        with_weights(Shape(dim=11, depth=1, num_heads=3, head_dim=2, v_head_dim=5)),
        normal(7, 11),
    )
    q, k, v = layer.qkv.weight.detach().split((6, 6, 15))
    heads = []
    for h in range(3):
        scores = (x @ q[2 * h : 2 * h + 2].T) @ (x @ k[2 * h : 2 * h + 2].T).T / math.sqrt(2)
        heads.append(torch.softmax(scores, -1) @ (x @ v[5 * h : 5 * h + 5].T))
    close(C.layer_outputs(layer, x), torch.cat(heads, 1))


SHAPES = {
    "encoder": Shape(dim=11, depth=3, num_heads=3, head_dim=2, v_head_dim=5, ffn_dim=13),
    "post-norm, positions": Shape(
        dim=11,
        depth=2,
        num_heads=2,
        head_dim=3,
        norm_at="post",
        norm="layer",
        positions="additive",
        num_positions=7,
        qkv_bias=True,
    ),
    "concatenated positions": Shape(
        dim=11,
        depth=1,
        num_heads=2,
        head_dim=3,
        positions="concatenated",
        num_positions=7,
        position_dim=4,
    ),
    "decoder": Shape(
        dim=12,
        depth=2,
        num_heads=4,
        head_dim=4,
        num_kv_heads=2,
        causal=True,
        vocab_size=17,
        qk_rope_head_dim=2,
    ),
    "latent": Shape(
        dim=12,
        depth=2,
        num_heads=3,
        head_dim=4,
        kv_lora_rank=5,
        qk_rope_head_dim=2,
        causal=True,
        vocab_size=17,
    ),
    "read in and out": Shape(
        dim=11, depth=2, num_heads=2, head_dim=3, input_dim=5, output_dim=1, causal=True
    ),
}


def model_and_inputs(name: str) -> tuple[Encoder | Decoder, Tensor]:
    shape = SHAPES[name]
    model = build(shape)
    initialise(model, "library", seeded(3))
    if shape.vocab_size:
        return model, torch.randint(17, (2, 7), generator=seeded(4))
    return model, normal(2, 7, shape.input_dim or shape.dim - shape.position_dim, seed=4).float()


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_of_a_model_are_those_of_its_layers(name: str) -> None:
    model, inputs = model_and_inputs(name)
    got = C.head_outputs(model, inputs)
    assert all(p.dtype == torch.float32 for p in model.parameters()), "the model is left as it was"
    seen: list[Tensor] = []
    exact = build(model.shape).double()
    exact.load_state_dict(model.state_dict())
    hooks = [
        block.attention.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
        for block in exact.blocks
    ]
    exact(inputs if model.shape.vocab_size else inputs.double())
    for hook in hooks:
        hook.remove()
    assert len(got) == len(seen) == model.shape.depth
    for A, x, block in zip(got, seen, exact.blocks, strict=True):
        assert A.shape == (2, 7, model.shape.num_heads * model.shape.v_head_dim)
        assert A.dtype == torch.float64
        for i in range(2):
            close(A[i], C.layer_outputs(block.attention, x[i]))
        y = A @ block.attention.out.weight.mT
        close(y, block.attention(x))
    rough = model(inputs, keep=True)[1]
    for i, A in enumerate(got):
        assert (A - C.side_by_side(rough[f"layer {i}"]["heads"])).abs().max() < 1e-5, (
            "what the model itself computes in float32"
        )


def test_a_models_spectra_are_geometric_means_over_inputs_then_means_over_layers() -> None:
    model, inputs = model_and_inputs("encoder")
    *layers, overall = C.attention_spectra(model, inputs)
    assert [row["layer"] for row in layers] == [0, 1, 2]
    assert overall["layer"] == "mean"
    for row, A in zip(layers, C.head_outputs(model, inputs), strict=True):
        assert (row["inputs"], row["tokens"], row["k"], row["k_centred"]) == (2, 7, 7, 6)
        s = np.linalg.svd(A.numpy(), compute_uv=False)
        c = np.linalg.svd(A.numpy() - A.numpy().mean(1, keepdims=True), compute_uv=False)
        assert row["largest"] == pytest.approx(math.sqrt(s[0, 0] * s[1, 0]), rel=1e-9)
        assert row["smallest"] == pytest.approx(math.sqrt(s[0, 6] * s[1, 6]), rel=1e-6)
        assert row["kappa"] == pytest.approx(
            math.sqrt(s[0, 0] / s[0, 6] * s[1, 0] / s[1, 6]), rel=1e-6
        )
        assert row["kappa_centred"] == pytest.approx(
            math.sqrt(c[0, 0] / c[0, 5] * c[1, 0] / c[1, 5]), rel=1e-6
        )
        assert row["stable_rank"] == pytest.approx(
            math.sqrt(math.prod((s**2).sum(1) / s[:, 0] ** 2)), rel=1e-9
        )
    for name in (*C.MEASURES, "kappa_centred"):
        assert overall[name] == pytest.approx(
            sum(float(row[name]) for row in layers) / 3, rel=1e-12
        )
    json.dumps([*layers, overall], allow_nan=False)


# ---- the Jacobian

FORMS = {
    "plain": Shape(dim=5, depth=1, num_heads=3, head_dim=2),
    "free value width": Shape(dim=7, depth=1, num_heads=2, head_dim=3, v_head_dim=5),
    "causal, shared keys": Shape(
        dim=5,
        depth=1,
        num_heads=4,
        head_dim=2,
        v_head_dim=3,
        num_kv_heads=2,
        causal=True,
        qkv_bias=True,
    ),
    "rotary, norms, average": Shape(
        dim=6,
        depth=1,
        num_heads=2,
        head_dim=4,
        qk_rope_head_dim=2,
        qk_norm="head",
        average=2,
        out_bias=True,
    ),
    "latent": Shape(
        dim=6, depth=1, num_heads=2, head_dim=4, kv_lora_rank=3, q_lora_rank=5, qk_rope_head_dim=2
    ),
}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_jacobian_by_central_differences(form: str, after: bool) -> None:
    layer, x, step = with_weights(FORMS[form]), normal(3, FORMS[form].dim, seed=9), 1e-6
    weights = [
        part.weight
        for name, part in layer.named_children()
        if hasattr(part, "bias") and "norm" not in name and name != "out"
    ]

    def output() -> Tensor:
        y, kept = layer(x.unsqueeze(0), keep=True)
        return (y[0] if after else torch.cat(kept["heads"][0].unbind(0), -1)).flatten()

    columns = []
    with torch.no_grad():
        for weight in weights:
            for i in range(weight.numel()):
                kept = weight.view(-1)[i].item()
                weight.view(-1)[i] = kept + step
                up = output()
                weight.view(-1)[i] = kept - step
                columns.append((up - output()) / (2 * step))
                weight.view(-1)[i] = kept
    J = C.jacobian(layer, x, after=after)
    assert J.shape == (
        3 * (layer.shape.dim if after else layer.shape.num_heads * layer.shape.v_head_dim),
        sum(w.numel() for w in weights),
    )
    assert (J - torch.stack(columns, 1)).abs().max() < 1e-8


def test_a_jacobian_by_its_formula() -> None:
    """dA_na/dW_Q,ir = c X_ni sum_m P_nm K_mr (V_ma - A_na); keys alike with Q_nr X_mi; values (P
    X)_ni."""
    layer, x = (
        with_weights(Shape(dim=7, depth=1, num_heads=2, head_dim=3, v_head_dim=5)),
        normal(11, 7),
    )
    W_Q, W_K, W_V = (w.detach().view(2, -1, 7) for w in layer.qkv.weight.split((6, 6, 10)))
    J = C.jacobian(layer, x, after=False).view(11, 2, 5, -1)
    q_at, k_at, v_at = J.split((2 * 3 * 7, 2 * 3 * 7, 2 * 5 * 7), -1)
    for h in range(2):
        Q, K, V = x @ W_Q[h].T, x @ W_K[h].T, x @ W_V[h].T
        P = torch.softmax(Q @ K.T / math.sqrt(3), -1)
        rest = V.unsqueeze(0) - (P @ V).unsqueeze(1)  # (n, m, a)
        by_q = torch.einsum("ni,nm,mr,nma->nari", x, P, K, rest) / math.sqrt(3)
        by_k = torch.einsum("nr,nm,mi,nma->nari", Q, P, x, rest) / math.sqrt(3)
        by_v = torch.einsum("ni,ab->nabi", P @ x, torch.eye(5, dtype=torch.float64))
        close(q_at[:, h].reshape(11, 5, 2, 3, 7)[:, :, h], by_q)
        close(k_at[:, h].reshape(11, 5, 2, 3, 7)[:, :, h], by_k)
        close(v_at[:, h].reshape(11, 5, 2, 5, 7)[:, :, h], by_v)


@pytest.mark.parametrize("row", TOY, ids=lambda r: f"{r['policy']} {r['heads']} x {r['head_dim']}")
def test_the_known_jacobians_from_their_own_draws(row: dict[str, str]) -> None:
    heads, head_dim = int(row["heads"]), int(row["head_dim"])
    outputs, before, after = [], [], []
    for seed in range(4):
        layer, x = known_draw(seed, 8, 16, heads, head_dim, 0.25)
        outputs.append(C.spectrum(C.layer_outputs(layer, x)).kappa)
        before.append(
            torch.tensor(C.block_kappa(C.head_blocks(layer, C.jacobian(layer, x, after=False))[0]))
        )
        after.append(C.spectrum(C.jacobian(layer, x, after=True)))
    assert found(outputs) == told(row["kappa_A"])
    assert found(before) == told(row["kappa_J_concat"])
    if heads * head_dim < 16:
        assert row["kappa_J_after_WO"] == "9.06e10", (
            "differences' rounding: the rank is at most N h d"
        )
        assert {(s.kappa.item(), s.rank.item(), s.k) for s in after} == {(math.inf, 64, 128)}
    else:
        assert found([s.kappa for s in after]) == told(row["kappa_J_after_WO"])


def test_before_the_output_projection_heads_are_blocks() -> None:
    layer, x = (
        with_weights(Shape(dim=7, depth=1, num_heads=3, head_dim=2, v_head_dim=5)),
        normal(5, 7),
    )
    J = C.jacobian(layer, x, after=False)
    blocks, outside = C.head_blocks(layer, J)
    assert outside == 0.0
    assert blocks.shape == (3, 5 * 5, 7 * (2 + 2 + 5))
    assert blocks.square().sum().item() == pytest.approx(J.square().sum().item(), rel=1e-12), (
        "nothing is left out"
    )
    whole = C.spectrum(J)
    assert C.block_kappa(blocks) == pytest.approx(whole.kappa.item(), rel=1e-9)
    assert whole.kappa >= C.spectrum(blocks).kappa.max() * (1 - 1e-9)
    merged = torch.cat([torch.linalg.svdvals(b) for b in blocks]).sort(descending=True).values
    close(torch.linalg.svdvals(J)[: len(merged)], merged)
    spoilt = J.clone()
    spoilt[0, 2 * 7] = -3.0  # the first head's output by the second head's query
    assert C.head_blocks(layer, spoilt)[1] == 3.0
    one = with_weights(Shape(dim=7, depth=1, num_heads=1, head_dim=2, v_head_dim=5))
    with torch.no_grad():
        q, k, v = layer.qkv.weight.split((6, 6, 15))
        one.qkv.weight.copy_(torch.cat((q[2:4], k[2:4], v[5:10])))
    close(C.jacobian(one, x, after=False), blocks[1], "the second head alone")


def test_a_head_more_lowers_nothing_before_the_output_projection() -> None:
    x, grown = normal(5, 7), []
    full = with_weights(Shape(dim=7, depth=1, num_heads=6, head_dim=2), seed=3)
    for heads in range(1, 7):
        layer = with_weights(Shape(dim=7, depth=1, num_heads=heads, head_dim=2))
        with torch.no_grad():
            parts = full.qkv.weight.view(3, 6, 2, 7)[:, :heads]
            layer.qkv.weight.copy_(parts.reshape(-1, 7))
        grown.append(C.spectrum(C.jacobian(layer, x, after=False)).kappa.item())
    assert all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(grown))


def test_after_the_output_projection_is_before_it_mixed() -> None:
    layer, x = with_weights(Shape(dim=7, depth=1, num_heads=3, head_dim=5)), normal(4, 7)
    mixed = torch.kron(torch.eye(4, dtype=torch.float64), layer.out.weight.detach()) @ C.jacobian(
        layer, x, after=False
    )
    close(C.jacobian(layer, x, after=True), mixed)


def test_queries_and_keys_leave_directions_without_effect() -> None:
    layer, x = with_weights(Shape(dim=5, depth=1, num_heads=2, head_dim=3)), normal(23, 5)
    J = C.jacobian(layer, x, after=False)
    s = C.spectrum(J)
    assert J.shape == (138, 90)
    assert (s.rank.item(), s.k, s.kappa.item()) == (90 - 2 * 9, 90, math.inf)


def test_a_jacobian_changes_nothing_of_its_layer() -> None:
    layer = Attention(Shape(dim=5, depth=1, num_heads=2, head_dim=3))
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    J = C.jacobian(layer, normal(3, 5).float(), after=True)
    assert J.dtype == torch.float64
    assert all(
        torch.equal(before[name], t) and t.dtype == torch.float32
        for name, t in layer.state_dict().items()
    )
    assert all(p.grad is None and p.requires_grad for p in layer.parameters())


# ---- extreme singular values by products alone


def products(
    J: Tensor, calls: list[str] | None = None
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], int, int]:
    def by(matrix: Tensor, name: str) -> Callable[[Tensor], Tensor]:
        def act(x: Tensor) -> Tensor:
            if calls is not None:
                calls.append(name)
            return matrix @ x

        return act

    return by(J, "J"), by(J.T, "J^T"), *J.shape


def with_values(rows: int, columns: int, values: Tensor, seed: int = 0) -> Tensor:
    k = min(rows, columns)
    left, right = (
        torch.linalg.qr(normal(rows, k, seed=seed))[0],
        torch.linalg.qr(normal(columns, k, seed=seed + 1))[0],
    )
    return left @ torch.diag(values) @ right.T


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("heads", "head_dim", "tokens", "dim"),
    [(1, 16, 8, 16), (2, 8, 8, 16), (3, 5, 7, 11), (2, 3, 23, 5), (1, 8, 8, 16)],
)
def test_products_find_what_the_written_out_jacobian_has(
    heads: int, head_dim: int, tokens: int, dim: int, after: bool
) -> None:
    g = seeded(heads)
    x, layer = (
        C.random_tokens(tokens, dim, g),
        C.random_attention(dim, heads, head_dim, dim**-0.5, g),
    )
    exact = C.spectrum(C.jacobian(layer, x, after=after))
    got = C.jacobian_extremes(layer, x, g, after=after)
    assert got.converged
    assert got.steps <= exact.k
    assert got.largest == pytest.approx(exact.largest.item(), rel=1e-10)
    assert got.kappa == pytest.approx(exact.kappa.item(), rel=1e-8)


@examples(25)
@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 5), st.integers(0, 2**20))
def test_any_matrix_is_done_after_as_many_steps_as_it_has_dimensions(
    rows: int, columns: int, decades: float, seed: int
) -> None:
    values = torch.logspace(0, -decades, min(rows, columns), dtype=torch.float64)
    J = with_values(rows, columns, values, seed)
    got = C.extreme_singular_values(*products(J), seeded(seed))
    assert got.converged
    assert got.largest == pytest.approx(1, rel=1e-9)
    assert got.smallest == pytest.approx(values[-1].item(), rel=1e-7)


def test_few_steps_bound_the_condition_number_from_below() -> None:
    values = torch.linspace(3, 1e-3, 200, dtype=torch.float64)
    J, before = with_values(200, 300, values), 0.0
    for steps in (1, 2, 5, 20, 60, 150):
        got = C.extreme_singular_values(*products(J), seeded(0), steps=steps)
        assert not got.converged
        assert (got.steps, before < got.kappa < 3000) == (steps, True)
        assert got.residual > 1e-8
        before = got.kappa
    whole = C.extreme_singular_values(*products(J), seeded(0), steps=200)
    assert (whole.steps, whole.converged) == (200, True)
    assert whole.kappa == pytest.approx(3000, rel=1e-9)


def test_the_residual_is_what_it_says_and_ends_the_search() -> None:
    values = torch.cat(
        (
            torch.linspace(2, 1, 198, dtype=torch.float64),
            torch.tensor([9.0, 0.1], dtype=torch.float64),
        )
    )
    J = with_values(200, 230, values.sort(descending=True).values)
    got = C.extreme_singular_values(*products(J), seeded(1), tolerance=1e-6)
    assert got.converged
    assert got.steps < 120, "two values stand far from the rest"
    assert 0 < got.residual <= 1e-6
    assert abs(got.smallest**2 - 0.01) <= got.residual * got.smallest**2 + 1e-14
    assert got.kappa == pytest.approx(90, rel=1e-6)
    loose = C.extreme_singular_values(*products(J), seeded(1), tolerance=0.5)
    assert loose.steps < got.steps
    assert 1e-6 < loose.residual <= 0.5


def test_a_step_is_a_step_in_the_space_of_powers() -> None:
    J = with_values(23, 29, torch.linspace(5, 0.5, 23, dtype=torch.float64))
    for steps in (2, 3, 7):
        powers = [normal(23, seed=4)]
        for _ in range(steps - 1):
            powers.append(J @ (J.T @ powers[-1]))
        Q = torch.linalg.qr(torch.stack([p / p.norm() for p in powers], 1))[0]
        values, vectors = torch.linalg.eigh(Q.T @ J @ J.T @ Q)
        u = Q @ vectors[:, 0]
        got = C.extreme_singular_values(*products(J), seeded(4), steps=steps)
        assert got.largest == pytest.approx(math.sqrt(values[-1]), rel=1e-9)
        assert got.smallest == pytest.approx(math.sqrt(values[0]), rel=1e-9)
        assert got.residual == pytest.approx(
            (J @ (J.T @ u) - values[0] * u).norm().item() / values[0].item(), rel=1e-7
        )


def test_special_matrices_end_at_once() -> None:
    eye = C.extreme_singular_values(*products(2 * torch.eye(9, 13, dtype=torch.float64)), seeded(0))
    assert (eye.steps, eye.converged) == (1, True)
    assert eye.kappa == pytest.approx(1, rel=1e-12)
    zero = C.extreme_singular_values(*products(torch.zeros(9, 13, dtype=torch.float64)), seeded(0))
    assert (zero.steps, zero.converged, zero.largest, zero.kappa) == (1, True, 0.0, math.inf)
    low = C.extreme_singular_values(*products(normal(50, 3) @ normal(3, 60, seed=1)), seeded(0))
    assert (low.converged, low.kappa, low.residual) == (True, math.inf, 0.0)
    assert low.steps <= 5


@pytest.mark.parametrize("size", [(31, 17), (17, 31)])
def test_the_basis_is_of_the_smaller_side_and_a_step_two_products(size: tuple[int, int]) -> None:
    calls: list[str] = []
    got = C.extreme_singular_values(*products(normal(*size), calls), seeded(0))
    assert got.steps == 17
    assert calls[:2] == (["J", "J^T"] if size == (31, 17) else ["J^T", "J"])
    assert len(calls) == 2 * 17
    again = C.extreme_singular_values(*products(normal(*size)), seeded(0))
    assert again == got


# ---- bad input

LAYER = Attention(Shape(dim=5, depth=1, num_heads=2, head_dim=3))
SHARED = Attention(Shape(dim=5, depth=1, num_heads=2, head_dim=3, num_kv_heads=1))
STACKED = Attention(Shape(dim=5, depth=1, num_heads=2, head_dim=3), models=4)
MODEL, READER = (
    Encoder(Shape(dim=5, depth=1, num_heads=1)),
    Decoder(Shape(dim=4, depth=1, num_heads=1, vocab_size=7, causal=True)),
)
NAN = torch.tensor([[0.0, math.nan], [1.0, 2.0]])
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: C.gaussian_kappa(1, 64), "tokens must be a whole number of at least 2, got 1"),
    (lambda: C.gaussian_kappa(197, 0), "width must be a whole number of at least 1, got 0"),
    (
        lambda: C.gaussian_kappa(197.0, 64),
        ("tokens must be a whole number of at least 2, got 197.0"),
    ),  # type: ignore[arg-type]
    (lambda: C.gaussian_kappa(197, True), "width must be a whole number of at least 1, got True"),
    (
        lambda: C.sampled_gaussian_kappa(1, 64, 2, seeded(0)),
        "tokens must be a whole number of at least 2, got 1",
    ),
    (lambda: C.sampled_gaussian_kappa(5, 4, 0, seeded(0)), "draws must be at least 1, got 0"),
    (lambda: C.spectrum(torch.ones(5)), "a matrix (..., tokens, width) is needed, got shape (5,)"),
    (
        lambda: C.spectrum(torch.ones(5, 0)),
        "a matrix (..., tokens, width) is needed, got shape (5, 0)",
    ),
    (lambda: C.spectrum(torch.ones(1, 5)), "tokens must be at least 2, got 1"),
    (lambda: C.spectrum(NAN), "a matrix of finite real numbers is needed, got NaN or infinity"),
    (
        lambda: C.spectrum(NAN.nan_to_num(math.inf), centred=True),
        "a matrix of finite real numbers is needed, got NaN or infinity",
    ),
    (
        lambda: C.spectrum(torch.ones(3, 3, dtype=torch.complex128)),
        "a matrix of finite real numbers is needed, got complex ones",
    ),
    (
        lambda: C.random_tokens(1, 5, seeded(0)),
        "tokens must be a whole number of at least 2, got 1",
    ),
    (lambda: C.random_attention(5, 0, 3, 1.0, seeded(0)), "num_heads must be at least 1, got 0"),
    (lambda: C.random_attention(5, 2, 3, 0.0, seeded(0)), "std must be positive, got 0.0"),
    (lambda: C.random_attention(5, 2, 3, math.nan, seeded(0)), "std must be positive, got nan"),
    (
        lambda: C.jacobian(LAYER, torch.ones(2, 3, 5), after=True),
        "one input of (tokens, dim 5) is needed, got shape (2, 3, 5)",
    ),
    (
        lambda: C.jacobian(LAYER, torch.ones(3, 4), after=True),
        "one input of (tokens, dim 5) is needed, got shape (3, 4)",
    ),
    (lambda: C.jacobian(LAYER, torch.ones(1, 5), after=False), "tokens must be at least 2, got 1"),
    (
        lambda: C.jacobian(LAYER, torch.full((3, 5), math.nan), after=False),
        "a matrix of finite real numbers is needed",
    ),
    (
        lambda: C.layer_outputs(STACKED, torch.ones(3, 5)),
        "one model at a time can be measured, got a stack of 4",
    ),
    (
        lambda: C.jacobian_extremes(LAYER, torch.ones(5), seeded(0), after=True),
        "one input of (tokens, dim 5) is needed, got shape (5,)",
    ),
    (
        lambda: C.jacobian_extremes(LAYER, normal(3, 5), seeded(0), after=True, steps=0),
        "sizes and steps must be positive and tolerance in",
    ),
    (
        lambda: C.jacobian_extremes(LAYER, normal(3, 5), seeded(0), after=True, tolerance=0),
        "sizes and steps must be positive and tolerance",
    ),
    (
        lambda: C.head_blocks(SHARED, torch.ones(18, 60)),
        "heads that share keys or values have no blocks of their own",
    ),
    (
        lambda: C.head_blocks(LAYER, torch.ones(15, 90)),
        "a Jacobian before W_O of 2 heads is needed, got shape (15, 90)",
    ),
    (
        lambda: C.head_blocks(LAYER, torch.ones(18, 60)),
        "a Jacobian before W_O of 2 heads is needed, got shape (18, 60)",
    ),
    (
        lambda: C.head_outputs(MODEL, torch.ones(3, 5)),
        "the model takes (inputs, tokens, 5) of real numbers, got (3, 5) of float32",
    ),
    (
        lambda: C.head_outputs(MODEL, torch.ones(3, 4, 6)),
        "the model takes (inputs, tokens, 5) of real numbers, got (3, 4, 6) of float32",
    ),
    (
        lambda: C.head_outputs(MODEL, torch.ones(0, 4, 5)),
        "the model takes (inputs, tokens, 5) of real numbers, got (0, 4, 5) of float32",
    ),
    (
        lambda: C.head_outputs(READER, torch.ones(3, 4)),
        "the model takes (inputs, tokens) of whole numbers, got (3, 4) of float32",
    ),
    (
        lambda: C.head_outputs(Encoder(MODEL.shape, models=3), torch.ones(3, 4, 5)),
        "one model at a time can be measured, got a stack of 3",
    ),
    (
        lambda: C.attention_spectra(MODEL, torch.full((2, 4, 5), math.nan)),
        "a matrix of finite real numbers is needed, got NaN",
    ),
    (lambda: C.attention_spectra(MODEL, torch.ones(2, 1, 5)), "tokens must be at least 2, got 1"),
    (
        lambda: settings_of(conditioning, "quick", ["heads=5"]),
        "heads must divide the width 768 where it is split, got 5",
    ),
    (
        lambda: settings_of(conditioning, "quick", ["small_heads=3"]),
        "small_heads must divide the width 16 where it is split, got 3",
    ),
    (lambda: settings_of(conditioning, "quick", ["heads=0"]), "heads must be at least 1, got 0"),
    (lambda: settings_of(conditioning, "quick", ["tokens=1"]), "tokens must be at least 2, got 1"),
    (
        lambda: settings_of(conditioning, "quick", ["policies=splt"]),
        "unknown policy 'splt'; did you mean split",
    ),
    (
        lambda: settings_of(conditioning, "quick", ["weights=big"]),
        "weights must be positive numbers or 1/sqrt(D), got 'big'",
    ),
    (
        lambda: settings_of(conditioning, "quick", ["weights=-1"]),
        "weights must be positive numbers or 1/sqrt(D), got '-1'",
    ),
    (
        lambda: settings_of(conditioning, "quick", ["weights=nan"]),
        "weights must be positive numbers or 1/sqrt(D), got 'nan'",
    ),
    (lambda: settings_of(conditioning, "quick", ["seeds=0"]), "seeds must be at least 1, got 0"),
]


@pytest.mark.parametrize(
    ("act", "text"), BAD, ids=[f"{i}: {text}" for i, (_, text) in enumerate(BAD)]
)
def test_bad_input_is_one_line_that_names_the_rule_and_the_value(
    act: Callable[[], Any], text: str
) -> None:
    with pytest.raises(UsageError) as caught:
        act()
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


def test_a_jacobian_too_large_to_write_out_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    J = C.jacobian(LAYER, normal(3, 5), after=False)
    monkeypatch.setattr(C, "MOST_BYTES", J.numel() * 8)
    C.jacobian(LAYER, normal(3, 5), after=False)
    monkeypatch.setattr(C, "MOST_BYTES", J.numel() * 8 - 1)
    monkeypatch.setattr(C, "jacrev", lambda f: pytest.fail("made"))
    with pytest.raises(
        UsageError,
        match=r"a Jacobian of 18 x 90 does not fit 0 GiB; jacobian_extremes needs no matrix",
    ):
        C.jacobian(LAYER, normal(3, 5), after=False)


# ---- the experiment

TINY = [
    "heads=1,2",
    "gaussian_heads=1,2,3",
    "tokens=7",
    "dim=6",
    "head_dim=3",
    "small_tokens=3",
    "small_dim=4",
    "small_head_dim=2",
]
TINY += ["small_heads=1,2,4", "weights=0.5,1/sqrt(D)"]


def rows_of(settings: conditioning.Settings) -> list[dict[str, Any]]:
    return [
        json.loads(json.dumps(conditioning.make(case, "cpu"), allow_nan=False))
        for case in conditioning.runs(settings)
    ]


def test_the_experiment_has_all_parts_and_says_how_it_is_made() -> None:
    assert EXPERIMENTS["conditioning"] is conditioning
    assert all(hasattr(conditioning, part) for part in (*PARTS, "make"))
    text = conditioning.__doc__ or ""
    assert "headwise run conditioning --preset paper" in text
    assert "Expected" in text
    assert conditioning.QUESTION.endswith("?")
    assert {heading for _, heading in conditioning.COLUMNS} >= {"known"}
    assert not any("published" in heading for _, heading in conditioning.COLUMNS), (
        "none of these numbers is the authors'"
    )


def test_presets_hold_the_known_sizes() -> None:
    known = conditioning._known()
    assert len(known) == 18 + 2 * 32 + 3 * 8
    keys = ("kind", "policy", "weights", "tokens", "dim", "heads", "head_dim")
    for preset, missing in (
        ("paper", 8),
        ("quick", 8 + 2 * 20),
    ):  # eight Gaussian rows are of 64 tokens
        cases = conditioning.runs(conditioning.PRESETS[preset])
        assert len({case.id for case in cases}) == len(cases)
        made = {tuple(getattr(case, key) for key in keys) for case in cases}
        assert len(set(known) - made) == missing
        assert made <= set(known)
        more = conditioning.runs(
            dataclasses.replace(
                conditioning.PRESETS[preset], seeds=conditioning.PRESETS[preset].seeds + 1
            )
        )
        assert {case.id for case in cases} < {case.id for case in more}, (
            "more seeds keep the rows that are there"
        )


def test_the_same_sizes_and_seed_are_the_same_draw() -> None:
    split, widen = (
        conditioning.Case("outputs", policy, "0.5", 7, 6, 2, 3, 0) for policy in ("split", "widen")
    )
    one, other = conditioning.make(split, "cpu"), conditioning.make(widen, "cpu")
    assert one["id"] != other["id"]
    assert one["kappa"] == other["kappa"]
    assert conditioning.make(dataclasses.replace(split, seed=1), "cpu")["kappa"] != one["kappa"]
    assert (
        conditioning.make(dataclasses.replace(split, kind="centred"), "cpu")["k"] == one["k"] == 6
    )


def test_points_headline_and_figure_of_other_sizes(tmp_path: Path) -> None:
    rows = rows_of(settings_of(conditioning, "quick", TINY, seeds=2))
    points = conditioning.summary(rows)
    json.dumps(points, allow_nan=False)
    assert conditioning.summary(rows[::-1]) == points
    assert sum(p["n"] for p in points) == len(rows)
    assert all(p["known"] is p["near"] is None for p in points), (
        "known values stand only beside their own sizes"
    )
    by = {(p["kind"], p["policy"], p["weights"], p["tokens"], p["heads"]): p for p in points}
    three = by["gaussian", "widen", "", 7, 3]
    assert (three["k"], three["n"], three["closed_form"]) == (
        7,
        8,
        pytest.approx(C.gaussian_kappa(7, 9)),
    )
    of = [r["kappa"] for r in rows if r["kind"] == "gaussian" and r["heads"] == 3]
    assert three["kappa"] == pytest.approx(sum(of) / 8)
    outputs = by["outputs", "split", "0.5", 7, 2]
    of = [
        r["kappa"]
        for r in rows
        if (r["kind"], r["policy"], r["weights"], r["tokens"], r["heads"])
        == ("outputs", "split", "0.5", 7, 2)
    ]
    assert outputs["kappa"] == pytest.approx(math.sqrt(of[0] * of[1]))
    assert outputs["low"] < outputs["kappa"] < outputs["high"]
    assert (outputs["k"], by["centred", "split", "0.5", 7, 2]["k"]) == (6, 6)
    low = by["after", "widen", "1/sqrt(D)", 3, 1]
    assert (low["kappa"], low["shown"], low["rank"], low["k"]) == (None, "infinite", 6, 12)
    for p in points:
        assert (p["worst_head"] is not None) == (p["kind"] == "before")
        assert all(isinstance(cell(p, key), str) for key, _ in conditioning.COLUMNS)
    for p in points:
        if p["kind"] == "before":
            assert p["worst_head"] <= p["kappa"] * (1 + 1e-9)
            if p["heads"] == 1:
                assert p["worst_head"] == pytest.approx(p["kappa"], rel=1e-9)
    lines = conditioning.headline(points)
    assert len(lines) == 1 + 2 * 2 * 2 + 3 * 2
    assert any(
        line.startswith(
            "Jacobian after W_O, 3 tokens, width 4, std 1/sqrt(D), widen: kappa infinite with 1 "
            "of 2, "
        )
        for line in lines
    )
    description = conditioning.figure(points)
    json.dumps(description, allow_nan=False)
    assert len(description["panels"]) == 6
    shown = {y for panel in description["panels"] for line in panel["lines"] for y in line["y"]}
    assert {p["kappa"] for p in points} <= shown
    save(description, tmp_path / "a.png")
    plotly_figure(description)
    assert conditioning.summary([]) == []
    assert conditioning.headline([]) == []


def test_known_values_stand_beside_their_sizes() -> None:
    settings = settings_of(
        conditioning,
        "paper",
        ["heads=12", "small_heads=4", "gaussian_heads=1,4", "weights=0.02"],
        seeds=2,
    )
    points = conditioning.summary(rows_of(settings))
    known = {(p["kind"], p["policy"], p["tokens"], p["heads"]): p for p in points}
    assert known["gaussian", "widen", 197, 4]["known"] == 14.368
    assert (
        known["outputs", "split", 197, 12]["known"]
        == known["outputs", "widen", 197, 12]["known"]
        == 143.3
    )
    assert known["centred", "split", 197, 12]["known"] == 7.45
    assert known["before", "widen", 8, 4]["known"] == 1792.3
    assert known["after", "split", 8, 4]["known"] == 1023.7
    assert known["outputs", "widen", 8, 4]["known"] == 13.2
    assert all(p["near"] is True for p in points)
    lines = conditioning.headline(points)
    assert (
        lines[-1]
        == f"{len(points)} of {len(points)} near the known values, 0 more within what draws scatter"
    )
    dashed = [
        line
        for panel in conditioning.figure(points)["panels"]
        for line in panel["lines"]
        if line["style"] == "dashed"
    ]
    assert {y for line in dashed for y in line["y"]} == {p["known"] for p in points}


def test_what_is_far_from_the_known_value_is_said() -> None:
    case = conditioning.Case("outputs", "widen", "0.02", 197, 768, 12, 64, 0)

    def rows(*kappas: float | None) -> list[dict[str, Any]]:
        size = {
            "stable_rank": 1.1,
            "effective_rank": 100.0,
            "rank": 197,
            "k": 197,
            "worst_head": None,
        }
        return [
            {**dataclasses.asdict(case), **size, "seed": i, "kappa": kappa}
            for i, kappa in enumerate(kappas)
        ]

    for kappa, near in ((143.3 * 1.19, True), (143.3 * 1.21, False), (143.3 * 0.79, False)):
        (point,) = conditioning.summary(rows(kappa, kappa * 1.0001))
        assert point["near"] is near
        assert len(conditioning.headline([point])) == (2 if near else 3)
    assert conditioning.headline(conditioning.summary(rows(200.0, 200.1)))[-1] == (
        "  farther: outputs of heads, 197 tokens, width 768, std 0.02, widen, 12 heads: 200 "
        "(199.4 to 200.7) against 143.3"
    )
    (wild,) = conditioning.summary(rows(100.0, 900.0))
    assert wild["near"] is False
    assert (
        conditioning.headline([wild])[-1]
        == "0 of 1 near the known values, 1 more within what draws scatter"
    )
    (once,) = conditioning.summary(rows(150.0, None))
    assert (once["kappa"], once["shown"], once["near"]) == (None, "infinite", None), (
        "one draw without full rank"
    )
    (alone,) = conditioning.summary(rows(150.0))
    assert (alone["near"], alone["low"], alone["spread"], alone["shown"]) == (
        True,
        None,
        None,
        "150",
    )


def test_the_experiment_from_the_command(tmp_path: Path) -> None:
    words = [
        "run",
        "conditioning",
        "--device",
        "cpu",
        "--seeds",
        "1",
        "--store",
        str(tmp_path / "s"),
        "--json",
        "--set",
        *TINY,
    ]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(words) == 0, err.getvalue()
    answer = json.loads(out.getvalue().splitlines()[-1])
    assert answer["made"] == answer["runs"] == 3 * 4 + 2 * 2 * 2 * 2 + 2 * 3 * 3 * 4
    assert Path(answer["figure"]).read_bytes().startswith(b"\x89PNG")
    assert conditioning.NOTE in out.getvalue()
    page = write_report(Store(tmp_path / "s"), tmp_path / "page.html").read_text()
    assert conditioning.QUESTION in page
    assert ">near known</th>" in page
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(words) == 0
    assert json.loads(out.getvalue().splitlines()[-1])["made"] == 0
