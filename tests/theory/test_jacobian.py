"""Jacobians of a layer: by differences, by formula, of known draws; their extremes by products."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention_layers import geometric_mean_of, known_draw, normal, printed, with_weights
from support.tolerance import close, examples, seeded
from torch import Tensor

from headwise.errors import UsageError
from headwise.experiments.figure_parts import published_values
from headwise.model.attention import Attention
from headwise.shape import Shape
from headwise.theory import jacobian as jacobians
from headwise.theory.conditioning import layer_outputs, random_attention, random_tokens
from headwise.theory.jacobian import (
    extreme_singular_values,
    head_blocks,
    jacobian,
    jacobian_extremes,
)
from headwise.theory.spectrum import spectrum

TOY = published_values("leaner_kappa_jacobian_toy")


def block_kappa(blocks: Tensor) -> float:
    """kappa of the block-diagonal matrix of these equally large blocks: max_h s_1 / min_h s_k."""
    of_blocks = spectrum(blocks)
    return (of_blocks.largest.max() / of_blocks.smallest.min()).item()


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
def test_jacobian_by_central_differences(form: str, after: bool) -> None:
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
    J = jacobian(layer, x, after=after)
    assert J.shape == (
        3 * (layer.shape.dim if after else layer.shape.num_heads * layer.shape.v_head_dim),
        sum(w.numel() for w in weights),
    )
    assert (J - torch.stack(columns, 1)).abs().max() < 1e-8


def test_jacobian_by_its_formula() -> None:
    """dA_na/dW_Q,ir = c X_ni sum_m P_nm K_mr (V_ma - A_na); keys alike with Q_nr X_mi; values (P
    X)_ni."""
    layer, x = (
        with_weights(Shape(dim=7, depth=1, num_heads=2, head_dim=3, v_head_dim=5)),
        normal(11, 7),
    )
    W_Q, W_K, W_V = (w.detach().view(2, -1, 7) for w in layer.qkv.weight.split((6, 6, 10)))
    J = jacobian(layer, x, after=False).view(11, 2, 5, -1)
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
def test_jacobian_of_the_known_draws(row: dict[str, str]) -> None:
    heads, head_dim = int(row["heads"]), int(row["head_dim"])
    outputs, before, after = [], [], []
    for seed in range(4):
        layer, x = known_draw(seed, 8, 16, heads, head_dim, 0.25)
        outputs.append(spectrum(layer_outputs(layer, x)).kappa)
        before.append(
            torch.tensor(block_kappa(head_blocks(layer, jacobian(layer, x, after=False))[0]))
        )
        after.append(spectrum(jacobian(layer, x, after=True)))
    assert geometric_mean_of(outputs) == printed(row["kappa_A"])
    assert geometric_mean_of(before) == printed(row["kappa_J_concat"])
    if heads * head_dim < 16:
        assert row["kappa_J_after_WO"] == "9.06e10", (
            "differences' rounding: the rank is at most N h d"
        )
        assert {(s.kappa.item(), s.rank.item(), s.k) for s in after} == {(math.inf, 64, 128)}
    else:
        assert geometric_mean_of([s.kappa for s in after]) == printed(row["kappa_J_after_WO"])


def test_head_blocks_are_all_of_a_jacobian_before_the_output_projection() -> None:
    layer, x = (
        with_weights(Shape(dim=7, depth=1, num_heads=3, head_dim=2, v_head_dim=5)),
        normal(5, 7),
    )
    J = jacobian(layer, x, after=False)
    blocks, outside = head_blocks(layer, J)
    assert outside == 0.0
    assert blocks.shape == (3, 5 * 5, 7 * (2 + 2 + 5))
    assert blocks.square().sum().item() == pytest.approx(J.square().sum().item(), rel=1e-12), (
        "nothing is left out"
    )
    whole = spectrum(J)
    assert block_kappa(blocks) == pytest.approx(whole.kappa.item(), rel=1e-9)
    assert whole.kappa >= spectrum(blocks).kappa.max() * (1 - 1e-9)
    merged = torch.cat([torch.linalg.svdvals(b) for b in blocks]).sort(descending=True).values
    close(torch.linalg.svdvals(J)[: len(merged)], merged)
    spoilt = J.clone()
    spoilt[0, 2 * 7] = -3.0  # the first head's output by the second head's query
    assert head_blocks(layer, spoilt)[1] == 3.0
    one = with_weights(Shape(dim=7, depth=1, num_heads=1, head_dim=2, v_head_dim=5))
    with torch.no_grad():
        q, k, v = layer.qkv.weight.split((6, 6, 15))
        one.qkv.weight.copy_(torch.cat((q[2:4], k[2:4], v[5:10])))
    close(jacobian(one, x, after=False), blocks[1], "the second head alone")


def test_jacobian_before_the_output_projection_gains_nothing_from_a_head_more() -> None:
    x, grown = normal(5, 7), []
    full = with_weights(Shape(dim=7, depth=1, num_heads=6, head_dim=2), seed=3)
    for heads in range(1, 7):
        layer = with_weights(Shape(dim=7, depth=1, num_heads=heads, head_dim=2))
        with torch.no_grad():
            parts = full.qkv.weight.view(3, 6, 2, 7)[:, :heads]
            layer.qkv.weight.copy_(parts.reshape(-1, 7))
        grown.append(spectrum(jacobian(layer, x, after=False)).kappa.item())
    assert all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(grown))


def test_jacobian_after_the_output_projection_is_the_one_before_it_mixed() -> None:
    layer, x = with_weights(Shape(dim=7, depth=1, num_heads=3, head_dim=5)), normal(4, 7)
    mixed = torch.kron(torch.eye(4, dtype=torch.float64), layer.out.weight.detach()) @ jacobian(
        layer, x, after=False
    )
    close(jacobian(layer, x, after=True), mixed)


def test_jacobian_has_directions_without_effect() -> None:
    layer, x = with_weights(Shape(dim=5, depth=1, num_heads=2, head_dim=3)), normal(23, 5)
    J = jacobian(layer, x, after=False)
    s = spectrum(J)
    assert J.shape == (138, 90)
    assert (s.rank.item(), s.k, s.kappa.item()) == (90 - 2 * 9, 90, math.inf)


def test_jacobian_leaves_its_layer_unchanged() -> None:
    layer = Attention(Shape(dim=5, depth=1, num_heads=2, head_dim=3))
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    J = jacobian(layer, normal(3, 5).float(), after=True)
    assert J.dtype == torch.float64
    assert all(
        torch.equal(before[name], t) and t.dtype == torch.float32
        for name, t in layer.state_dict().items()
    )
    assert all(p.grad is None and p.requires_grad for p in layer.parameters())


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
def test_jacobian_extremes_are_those_of_the_written_out_one(
    heads: int, head_dim: int, tokens: int, dim: int, after: bool
) -> None:
    g = seeded(heads)
    x, layer = (
        random_tokens(tokens, dim, g),
        random_attention(dim, heads, head_dim, dim**-0.5, g),
    )
    exact = spectrum(jacobian(layer, x, after=after))
    got = jacobian_extremes(layer, x, g, after=after)
    assert got.converged
    assert got.steps <= exact.k
    assert got.largest == pytest.approx(exact.largest.item(), rel=1e-10)
    assert got.kappa == pytest.approx(exact.kappa.item(), rel=1e-8)


@examples(25)
@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 5), st.integers(0, 2**20))
def test_extremes_are_exact_after_as_many_steps_as_dimensions(
    rows: int, columns: int, decades: float, seed: int
) -> None:
    values = torch.logspace(0, -decades, min(rows, columns), dtype=torch.float64)
    J = with_values(rows, columns, values, seed)
    got = extreme_singular_values(*products(J), seeded(seed))
    assert got.converged
    assert got.largest == pytest.approx(1, rel=1e-9)
    assert got.smallest == pytest.approx(values[-1].item(), rel=1e-7)


def test_extremes_after_few_steps_bound_kappa_from_below() -> None:
    values = torch.linspace(3, 1e-3, 200, dtype=torch.float64)
    J, before = with_values(200, 300, values), 0.0
    for steps in (1, 2, 5, 20, 60, 150):
        got = extreme_singular_values(*products(J), seeded(0), steps=steps)
        assert not got.converged
        assert (got.steps, before < got.kappa < 3000) == (steps, True)
        assert got.residual > 1e-8
        before = got.kappa
    whole = extreme_singular_values(*products(J), seeded(0), steps=200)
    assert (whole.steps, whole.converged) == (200, True)
    assert whole.kappa == pytest.approx(3000, rel=1e-9)


def test_extremes_residual_ends_the_search() -> None:
    values = torch.cat(
        (
            torch.linspace(2, 1, 198, dtype=torch.float64),
            torch.tensor([9.0, 0.1], dtype=torch.float64),
        )
    )
    J = with_values(200, 230, values.sort(descending=True).values)
    got = extreme_singular_values(*products(J), seeded(1), tolerance=1e-6)
    assert got.converged
    assert got.steps < 120, "two values stand far from the rest"
    assert 0 < got.residual <= 1e-6
    assert abs(got.smallest**2 - 0.01) <= got.residual * got.smallest**2 + 1e-14
    assert got.kappa == pytest.approx(90, rel=1e-6)
    loose = extreme_singular_values(*products(J), seeded(1), tolerance=0.5)
    assert loose.steps < got.steps
    assert 1e-6 < loose.residual <= 0.5


def test_extremes_steps_span_the_space_of_powers() -> None:
    J = with_values(23, 29, torch.linspace(5, 0.5, 23, dtype=torch.float64))
    for steps in (2, 3, 7):
        powers = [normal(23, seed=4)]
        for _ in range(steps - 1):
            powers.append(J @ (J.T @ powers[-1]))
        Q = torch.linalg.qr(torch.stack([p / p.norm() for p in powers], 1))[0]
        values, vectors = torch.linalg.eigh(Q.T @ J @ J.T @ Q)
        u = Q @ vectors[:, 0]
        got = extreme_singular_values(*products(J), seeded(4), steps=steps)
        assert got.largest == pytest.approx(math.sqrt(values[-1]), rel=1e-9)
        assert got.smallest == pytest.approx(math.sqrt(values[0]), rel=1e-9)
        assert got.residual == pytest.approx(
            (J @ (J.T @ u) - values[0] * u).norm().item() / values[0].item(), rel=1e-7
        )


def test_extremes_of_special_matrices_end_at_once() -> None:
    eye = extreme_singular_values(*products(2 * torch.eye(9, 13, dtype=torch.float64)), seeded(0))
    assert (eye.steps, eye.converged) == (1, True)
    assert eye.kappa == pytest.approx(1, rel=1e-12)
    zero = extreme_singular_values(*products(torch.zeros(9, 13, dtype=torch.float64)), seeded(0))
    assert (zero.steps, zero.converged, zero.largest, zero.kappa) == (1, True, 0.0, math.inf)
    low = extreme_singular_values(*products(normal(50, 3) @ normal(3, 60, seed=1)), seeded(0))
    assert (low.converged, low.kappa, low.residual) == (True, math.inf, 0.0)
    assert low.steps <= 5


@pytest.mark.parametrize("size", [(31, 17), (17, 31)])
def test_extremes_basis_is_of_the_smaller_side(size: tuple[int, int]) -> None:
    calls: list[str] = []
    got = extreme_singular_values(*products(normal(*size), calls), seeded(0))
    assert got.steps == 17
    assert calls[:2] == (["J", "J^T"] if size == (31, 17) else ["J^T", "J"])
    assert len(calls) == 2 * 17
    again = extreme_singular_values(*products(normal(*size)), seeded(0))
    assert again == got


LAYER = Attention(Shape(dim=5, depth=1, num_heads=2, head_dim=3))
SHARED = Attention(Shape(dim=5, depth=1, num_heads=2, head_dim=3, num_kv_heads=1))


BAD: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: jacobian(LAYER, torch.ones(2, 3, 5), after=True),
        "one input of (tokens, dim 5) is needed, got shape (2, 3, 5)",
    ),
    (
        lambda: jacobian(LAYER, torch.ones(3, 4), after=True),
        "one input of (tokens, dim 5) is needed, got shape (3, 4)",
    ),
    (lambda: jacobian(LAYER, torch.ones(1, 5), after=False), "tokens must be at least 2, got 1"),
    (
        lambda: jacobian(LAYER, torch.full((3, 5), math.nan), after=False),
        "a matrix of finite real numbers is needed",
    ),
    (
        lambda: jacobian_extremes(LAYER, torch.ones(5), seeded(0), after=True),
        "one input of (tokens, dim 5) is needed, got shape (5,)",
    ),
    (
        lambda: jacobian_extremes(LAYER, normal(3, 5), seeded(0), after=True, steps=0),
        "sizes and steps must be positive and tolerance in",
    ),
    (
        lambda: jacobian_extremes(LAYER, normal(3, 5), seeded(0), after=True, tolerance=0),
        "sizes and steps must be positive and tolerance",
    ),
    (
        lambda: head_blocks(SHARED, torch.ones(18, 60)),
        "heads that share keys or values have no blocks of their own",
    ),
    (
        lambda: head_blocks(LAYER, torch.ones(15, 90)),
        "a Jacobian before W_O of 2 heads is needed, got shape (15, 90)",
    ),
    (
        lambda: head_blocks(LAYER, torch.ones(18, 60)),
        "a Jacobian before W_O of 2 heads is needed, got shape (18, 60)",
    ),
]


@pytest.mark.parametrize(
    ("act", "text"), BAD, ids=[f"{i}: {text}" for i, (_, text) in enumerate(BAD)]
)
def test_mistake_is_one_line_with_rule_and_value(act: Callable[[], Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        act()
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


def test_jacobian_too_large_to_write_out_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    J = jacobian(LAYER, normal(3, 5), after=False)
    monkeypatch.setattr(jacobians, "MOST_BYTES", J.numel() * 8)
    jacobian(LAYER, normal(3, 5), after=False)
    monkeypatch.setattr(jacobians, "MOST_BYTES", J.numel() * 8 - 1)
    monkeypatch.setattr(jacobians, "jacrev", lambda f: pytest.fail("made"))
    with pytest.raises(
        UsageError,
        match=r"a Jacobian of 18 x 90 does not fit 0 GiB; jacobian_extremes needs no matrix",
    ):
        jacobian(LAYER, normal(3, 5), after=False)
