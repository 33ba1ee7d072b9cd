"""Short attention on a GPU against float64: every kernel of heads, in place and through autograd.
Without a GPU in Triton's interpreter."""

import dataclasses
import math

import pytest
import torch
from support.tolerance import same, seeded

pytest.importorskip("triton", reason="the kernels are written in triton")
from support.gpu import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    INTERPRETED,
    NAN,
    near,
    normal,
)

from headwise.device import numerics
from headwise.kernels import attention_short_triton
from headwise.kernels.attention_short_triton import attend_heads, kind_of
from headwise.model import backends
from headwise.model.dispatch import attend
from headwise.model.reference import plain

pytestmark = pytest.mark.usefixtures("products_as_on_a_gpu")
HEADS = {
    FP32: 1e-5,
    FP16: 2e-3,
    BF16: 1.6e-2,
}  # the largest error of one kernel, of the largest entry

# ---- heads


GUARD = 777.0


class Arena:
    """A (batch, tokens, width) view of NaN inside a larger tensor of `guard`.

    Beside an input that is NaN, which spoils the result where it is read; beside an output a
    number, which shows any writing.
    """

    def __init__(self, batch, tokens, width, dtype, guard=NAN):
        self.whole = torch.full(
            (batch + 1, tokens + 3, width + 7), guard, dtype=dtype, device=DEVICE
        )
        self.view = self.whole[:batch, 1 : tokens + 1, 2 : width + 2].fill_(NAN)

    def check(self, what):
        """All of the view is numbers, and nothing else is written."""
        assert self.view.isfinite().all(), (
            f"{what}: not all is written, or something beyond the inputs was read"
        )
        beside = self.whole.clone()
        beside[:-1, 1:-2, 2:-5] = GUARD
        assert (beside == GUARD).all(), f"{what}: written beyond its end"


def by_head(x, count):
    """(batch, tokens, heads x rank) -> (batch, heads, tokens, rank)."""
    return x.unflatten(2, (count, -1)).transpose(1, 2)


def reference(q, k, v, g, count, scale, causal=False):
    """Output and gradients in float64, by the sums; (batch, tokens, heads x rank) as the kernels
    have them."""
    q, k, v, g = (by_head(t.double(), count) for t in (q, k, v, g))
    scores = torch.einsum("bhir,bhjr->bhij", q, k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    p = p / p.sum(-1, keepdim=True)
    dp = torch.einsum("bhir,bhjr->bhij", g, v)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    found = (
        torch.einsum("bhij,bhjr->bhir", p, v),
        torch.einsum("bhij,bhjr->bhir", ds, k),
        torch.einsum("bhij,bhir->bhjr", ds, q),
        torch.einsum("bhij,bhir->bhjr", p, g),
    )
    return [t.transpose(1, 2).flatten(2) for t in found]


def packed(tokens, rank, count, dtype, seed, batch=2):
    """q, k, v as slices of one projection, and the gradient of the output."""
    width = count * rank
    qkv, g = Arena(batch, tokens, 3 * width, dtype), Arena(batch, tokens, width, dtype)
    qkv.view.copy_(normal(seed, batch, tokens, 3 * width) * 1.5)
    g.view.copy_(normal(seed + 1, batch, tokens, width))
    return qkv, g


LANES = [
    (1, 2, 7),
    (3, 1, 3),
    (3, 1, 70),
    (5, 2, 35),
    (11, 2, 5),
    (13, 1, 5),
    (16, 1, 3),
    (6, 2, 1),
]
PACKS = [
    (1, 8, 1),
    (2, 32, 1),
    (3, 4, 17),
    (11, 8, 9),
    (13, 16, 5),
    (13, 4, 7),
    (16, 4, 1),
    (16, 8, 3),
    (16, 16, 7),
    (16, 32, 3),
]
TILES = [
    (1, 3, 5),
    (2, 64, 1),
    (3, 3, 7),
    (11, 5, 7),
    (13, 24, 3),
    (16, 64, 1),
    (17, 1, 5),
    (17, 16, 5),
    (33, 2, 3),
    (33, 24, 1),
    (33, 64, 3),
    (65, 8, 3),
    (130, 5, 2),
    (256, 13, 1),
]


STEPS = [
    (33, 3, 5),
    (64, 16, 2),
    (65, 24, 1),
    (82, 48, 1),
    (97, 6, 2),
    (128, 12, 1),
    (128, 64, 1),
]  # causal


def check_heads(tokens, rank, count, dtype, dot="tf32x3", bound=None, scale=None, causal=False):
    scale = 0.83 * rank**-0.5 if scale is None else scale
    qkv, g = packed(tokens, rank, count, dtype, seed=tokens * rank + count)
    width = count * rank
    out, grads = Arena(2, tokens, width, dtype, GUARD), Arena(2, tokens, 3 * width, dtype, GUARD)
    kept = qkv.view.clone()
    q, k, v = qkv.view.split(width, -1)
    attention_short_triton.forward(q, k, v, out.view, count, rank, scale, dot, causal)
    attention_short_triton.backward(
        q, k, v, g.view, *grads.view.split(width, -1), count, rank, scale, dot, causal
    )
    same(qkv.view, kept, "the inputs")
    out.check("output")
    grads.check("gradients")
    expected = reference(q, k, v, g.view, count, scale, causal)
    most = max(e.abs().max().item() for e in expected)
    for name, a, e in zip(
        ("output", "dq", "dk", "dv"),
        (out.view, *grads.view.split(width, -1)),
        expected,
        strict=True,
    ):
        near(
            a, e, HEADS[dtype] if bound is None else bound, name, most if tokens == 1 else None
        )  # one key: q and k do nothing
    return qkv, g, grads


@pytest.mark.parametrize(("tokens", "rank", "count"), LANES + PACKS + TILES)
def test_short_triton_heads_equal_the_sums_and_touch_nothing_else(tokens, rank, count):
    qkv, g, grads = check_heads(tokens, rank, count, FP32)
    parts = qkv.view.split(count * rank, -1)
    attention_short_triton.backward(
        *parts, g.view, *parts, count, rank, 0.83 * rank**-0.5, "tf32x3"
    )
    assert qkv.whole.isfinite().sum().item() == qkv.view.numel(), "written beyond its end"
    same(qkv.view, grads.view, "in place")


@pytest.mark.parametrize(
    ("tokens", "rank", "count"), [*LANES[:4], *PACKS, *TILES[:-3], (256, 33, 1)]
)
def test_short_triton_heads_take_float16(tokens, rank, count):
    check_heads(tokens, rank, count, FP16)


@pytest.mark.parametrize(
    ("tokens", "batch", "rows"),
    [(1, 16, 16), (2, 24, 16), (4, 12, 16), (8, 6, 16), (4, 7, 4), (3, 16, 3), (16, 3, 16)],
    ids=str,
)
@pytest.mark.parametrize(
    ("rank", "count", "dtype"),
    [(1, 5, FP32), (8, 9, FP32), (32, 3, FP16), (64, 1, FP32), (5, 3, FP16)],
)
def test_short_sequences_that_lie_end_to_end_share_a_product(
    tokens, batch, rows, rank, count, dtype
):
    width, scale = count * rank, 0.83 * rank**-0.5
    whole, g = (
        normal(tokens * rank, batch, tokens, 3 * width).to(dtype).to(DEVICE),
        normal(3, batch, tokens, width).to(dtype).to(DEVICE),
    )
    out, grads = torch.full_like(g, NAN), torch.full_like(whole, NAN)
    q, k, v = whole.split(width, -1)
    assert (
        attention_short_triton._rows_at_once(batch, tokens, True, q.stride(), out.stride()) == rows
    )
    attention_short_triton.forward(q, k, v, out, count, rank, scale, "tf32x3", together=True)
    attention_short_triton.backward(
        q, k, v, g, *grads.split(width, -1), count, rank, scale, "tf32x3", together=True
    )
    expected = reference(q, k, v, g, count, scale)
    most = max(e.abs().max().item() for e in expected)
    for name, a, e in zip(
        ("output", "dq", "dk", "dv"), (out, *grads.split(width, -1)), expected, strict=True
    ):
        near(a, e, HEADS[dtype], name, most if tokens == 1 else None)


def test_short_triton_rows_are_shared_only_where_that_changes_nothing():
    assert attention_short_triton._rows_at_once(4, 4, False, (24, 6)) == 4, "not asked for"
    assert attention_short_triton._rows_at_once(4, 4, True, (24, 6), (30, 6)) == 4, (
        "a gap between sequences"
    )
    assert attention_short_triton._rows_at_once(5, 4, True, (24, 6)) == 4, "rows left over"
    assert attention_short_triton._rows_at_once(4, 4, True, (24, 6), (8, 2)) == 16


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("bad", [NAN, math.inf])
@pytest.mark.parametrize(("tokens", "rank"), [(4, 8), (2, 32), (8, 3), (4, 1)])
def test_short_triton_sequence_that_is_not_finite_stays_alone(tokens, rank, bad):
    """Sequences may be those of different models, whose tiles are not shared."""
    q, k, v = (normal(i, 8, 3, tokens, rank).to(DEVICE).requires_grad_() for i in range(3))
    with torch.no_grad():
        v[2, 1] = bad
        k[5] = bad
    out = attend_heads(q, k, v, 0.5, "tf32x3")
    out.backward(torch.ones_like(out))
    for tensor in (out, q.grad, k.grad, v.grad):
        for i in (0, 1, 3, 4, 6, 7):
            assert tensor[i].isfinite().all()


@pytest.mark.skipif(
    INTERPRETED, reason="needs a GPU: so many programs take the interpreter minutes"
)
@pytest.mark.parametrize(("tokens", "rank"), [(2, 1), (3, 8), (5, 3)])
def test_short_triton_takes_more_sequences_than_a_grid_has_rows(tokens, rank):
    q, k, v = (normal(i, 70_001, 2, tokens, rank).to(DEVICE).requires_grad_() for i in range(3))
    out = attend_heads(q, k, v, 0.5, "tf32x3")
    out.sum().backward()
    near(out, plain(q.double(), k.double(), v.double(), 0.5), HEADS[FP32], "output")
    assert all(t.grad.isfinite().all() for t in (q, k, v))


@pytest.mark.parametrize(
    ("tokens", "rank", "count"),
    [*STEPS, (1, 2, 3), (3, 1, 7), (11, 8, 5), (16, 16, 3), (17, 3, 5), (130, 5, 2)],
)
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])
def test_short_triton_causal_heads_equal_the_sums(tokens, rank, count, dtype):
    assert kind_of(tokens, rank, causal=True) == (
        "stairs" if (tokens, rank, count) in STEPS else "tiles"
    )
    check_heads(tokens, rank, count, dtype, causal=True)


@pytest.mark.parametrize(
    ("tokens", "rank", "count"), [(11, 2, 5), (13, 4, 7), (16, 16, 7), (17, 24, 3)]
)
def test_short_triton_heads_take_bfloat16(tokens, rank, count):
    check_heads(tokens, rank, count, BF16)


@pytest.mark.parametrize(("tokens", "rank", "count"), [(13, 4, 7), (16, 32, 3), (33, 24, 1)])
def test_short_triton_heads_take_tf32_products(tokens, rank, count):
    check_heads(tokens, rank, count, FP32, dot="tf32", bound=1e-2)


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    ("tokens", "rank", "count"),
    [(11, 1, 5), (7, 2, 3), (13, 4, 5), (16, 16, 3), (17, 5, 3), (33, 64, 1)],
)
def test_short_triton_huge_scores_choose_and_never_overflow(tokens, rank, count, dtype):
    """Small whole numbers: their products are exact in every type, so that ties are ties."""
    qkv, g = packed(tokens, rank, count, dtype, seed=3)
    width = count * rank
    qkv.view.copy_(torch.randint(-3, 4, qkv.view.shape, generator=seeded(5)).to(DEVICE))
    q, k, v = qkv.view.split(width, -1)
    scale = 1000 / (by_head(q.double(), count) @ by_head(k.double(), count).mT).abs().max().item()
    out, grads = Arena(2, tokens, width, dtype, GUARD), Arena(2, tokens, 3 * width, dtype, GUARD)
    attention_short_triton.forward(q, k, v, out.view, count, rank, scale, "tf32x3")
    attention_short_triton.backward(
        q, k, v, g.view, *grads.view.split(width, -1), count, rank, scale, "tf32x3"
    )
    out.check("output")
    grads.check("gradients")
    expected, *expected_grads = reference(q, k, v, g.view, count, scale)
    near(out.view, expected, HEADS[dtype], "output")
    most = max(
        scale, max(e.abs().max().item() for e in expected_grads)
    )  # dq is a sum of terms as large as the scale
    for name, a, e in zip(
        ("dq", "dk", "dv"), grads.view.split(width, -1), expected_grads, strict=True
    ):
        near(a, e, HEADS[dtype], name, most)


def test_short_triton_every_size_has_a_kernel_and_every_kernel_is_tested():
    for tokens in range(1, 257):
        for rank in range(1, 65):
            short = tokens <= 16
            expected = (
                "lanes"
                if short and rank <= 2
                else "packs"
                if short and rank in (4, 8, 16, 32)
                else "tiles"
            )
            assert kind_of(tokens, rank) == expected
    for kind, cases in (("lanes", LANES), ("packs", PACKS), ("tiles", TILES)):
        assert {kind_of(tokens, rank) for tokens, rank, _ in cases} == {kind}
    assert {rank for _, rank, _ in LANES} == {1, 2}
    assert {rank for _, rank, _ in PACKS} == {4, 8, 16, 32}


# ---- heads through autograd


def laid(x, layout):
    """The same numbers, (batch, heads, tokens, rank), lying differently in memory."""
    order = {
        "rows": (0, 2, 1, 3),
        "heads first": (0, 1, 2, 3),
        "heads innermost": (0, 2, 3, 1),
        "tokens innermost": (0, 1, 3, 2),
    }[layout]
    y = x.permute(order).contiguous()
    return y.permute([order.index(axis) for axis in range(4)])


@pytest.mark.parametrize(
    "layouts",
    [
        ("rows", "rows", "rows"),
        ("heads first", "heads first", "heads first"),
        ("heads innermost", "heads innermost", "heads innermost"),
        ("rows", "heads first", "tokens innermost"),
    ],
    ids="/".join,
)
@pytest.mark.parametrize(("tokens", "rank", "count"), [(5, 2, 3), (7, 4, 3), (17, 5, 3)])
def test_short_triton_autograd_equals_plain_for_every_layout(tokens, rank, count, layouts):
    given = [
        laid(normal(i, 2, count, tokens, rank), layout).requires_grad_()
        for i, layout in enumerate(layouts)
    ]
    weighting = laid(normal(9, 2, count, tokens, rank), layouts[0])
    y = attend_heads(*given, 0.37, "tf32x3")
    grads = torch.autograd.grad(y, given, weighting)
    exact = [t.detach().double().requires_grad_() for t in given]
    expected = plain(*exact, 0.37)
    near(y, expected, HEADS[FP32], "output")
    for name, a, e in zip(
        "qkv", grads, torch.autograd.grad(expected, exact, weighting.double()), strict=True
    ):
        near(a, e, HEADS[FP32], name)


@pytest.mark.parametrize(("tokens", "rank", "count"), [(5, 1, 3), (7, 8, 3), (17, 3, 5)])
def test_short_triton_autograd_takes_slices_of_one_projection_and_broadcast_gradients(
    tokens, rank, count
):
    qkv = normal(0, 2, tokens, 3 * count * rank + 5).requires_grad_()
    exact = qkv.detach().double().requires_grad_()

    def loss(x, function):
        q, k, v = (by_head(t, count) for t in x[..., 3:-2].split(count * rank, -1))
        return function(q, k, v).sum(), function(q[:1].expand(2, -1, -1, -1), k, v).square().sum()

    for i in range(2):
        value = loss(qkv, lambda q, k, v: attend_heads(q, k, v, 0.37, "tf32x3"))[i]
        expected = loss(exact, lambda q, k, v: plain(q, k, v, 0.37))[i]
        near(value, expected, HEADS[FP32])
        near(
            torch.autograd.grad(value, qkv)[0], torch.autograd.grad(expected, exact)[0], HEADS[FP32]
        )


def test_short_triton_second_derivatives_are_refused_rather_than_wrong():
    x = normal(0, 1, 2, 3, 2).requires_grad_()
    (first,) = torch.autograd.grad(
        attend_heads(x, x, x, 0.5, "tf32x3").square().sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_short_triton_by_name_repeats_keys_and_values(kv_heads, monkeypatch):
    allowed = backends._heads
    monkeypatch.setitem(
        backends._ATTEMPTS,
        "heads",
        lambda call: allowed(dataclasses.replace(call, device="cuda")),
    )
    given = [
        normal(i, 2, count, 7, 4).requires_grad_()
        for i, count in enumerate((6, kv_heads, kv_heads))
    ]
    exact = [t.detach().double().requires_grad_() for t in given]
    y, expected = attend(*given, backend="heads"), plain(*exact, 0.5)
    near(y, expected, HEADS[FP32])
    for a, e in zip(
        torch.autograd.grad(y.sum(), given), torch.autograd.grad(expected.sum(), exact), strict=True
    ):
        near(a, e, HEADS[FP32], largest=1.0)


@pytest.mark.parametrize(("allow", "dot"), [(True, "tf32"), (False, "tf32x3")])
def test_short_triton_rounds_products_only_where_torch_may(allow, dot, monkeypatch):
    calls = []
    monkeypatch.setitem(
        backends._ATTEMPTS, "heads", lambda call: backends.Choice("heads", "asked for")
    )
    monkeypatch.setattr(
        attention_short_triton,
        "attend_heads",
        lambda q, k, v, scale, how: calls.append((scale, how)),
    )
    with numerics("tf32" if allow else "fp32", DEVICE):
        attend(*(normal(i, 1, 2, 3, 4) for i in range(3)), backend="heads")
        attend(*(normal(i, 1, 2, 3, 4) for i in range(3)), backend="heads", scale=0.7)
    assert calls == [(0.5, dot), (0.7, dot)]
