"""Each kernel against its plain twin: values, gradients, and bits that depend on nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tolerance import close, close_all, examples, same, seeded

from headwise.kernels import attention_cpu
from headwise.kernels.attention_cpu import LANES, short, short_packed
from headwise.model.layers import plain_unit, unit
from headwise.model.reference import plain

SCALE = 0.37  # not a power of two


def draw(seed, *sizes, dtype=torch.float32):
    generator = seeded(seed)
    return [torch.randn(size, generator=generator, dtype=dtype) for size in sizes]


def value_and_gradients(function, tensors, weighting):
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    y = function(*tensors)
    return y.detach(), torch.autograd.grad(y, tensors, weighting)


def unpacked(qkv, heads):
    """(batch, tokens, 3 x rank x heads), heads innermost, to q, k, v of (batch, heads, tokens,
    rank)."""
    batch, tokens, packed = qkv.shape
    rank = packed // (3 * heads)
    return [
        qkv.reshape(batch, tokens, 3, rank, heads)[:, :, i].permute(0, 3, 1, 2) for i in range(3)
    ]


def plain_packed(qkv, heads, scale):
    """The twin of `short_packed`."""
    return plain(*unpacked(qkv, heads), scale).permute(0, 2, 3, 1).flatten(2)


SIZES = st.tuples(
    *(
        st.sampled_from(sizes)
        for sizes in ((1, 2, 5), (1, 3, 7, 17), (1, 2, 5), (1, 3, 8, 31), (1, 2, 7), (1, 3, 5, 8))
    )
)


def check_short(dtype, sizes, seed, scale=SCALE):
    batch, heads, queries, keys, rank, width = sizes
    shapes = (
        (batch, heads, queries, rank),
        (batch, heads, keys, rank),
        (batch, heads, keys, width),
        (batch, heads, queries, width),
    )
    *tensors, weighting = draw(seed, *shapes, dtype=dtype)
    y, grads = value_and_gradients(lambda q, k, v: short(q, k, v, scale), tensors, weighting)
    expected, expected_grads = value_and_gradients(
        lambda q, k, v: plain(q, k, v, scale), tensors, weighting
    )
    close(y, expected)
    close_all(grads, expected_grads)


def check_packed(dtype, batch, tokens, rank, heads, seed, scale=SCALE):
    qkv, weighting = draw(
        seed, (batch, tokens, 3 * rank * heads), (batch, tokens, rank * heads), dtype=dtype
    )
    y, grads = value_and_gradients(lambda x: short_packed(x, heads, scale), [qkv], weighting)
    expected, expected_grads = value_and_gradients(
        lambda x: plain_packed(x, heads, scale), [qkv], weighting
    )
    close(y, expected)
    close_all(grads, expected_grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_short_equals_plain(dtype):
    @examples(80)
    @given(SIZES, st.integers(0, 2**16))
    def check(sizes, seed):
        check_short(dtype, sizes, seed)

    check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_short_packed_equals_plain(dtype):
    @examples(80)
    @given(
        st.sampled_from((1, 2, 5)),
        st.sampled_from((1, 3, 8, 31)),
        st.sampled_from((1, 2, 7)),
        st.sampled_from((1, 3, 17)),
        st.integers(0, 2**16),
    )
    def check(batch, tokens, rank, heads, seed):
        check_packed(dtype, batch, tokens, rank, heads, seed)

    check()


def test_short_gradients_equal_finite_differences():
    q, k, v = (
        t.requires_grad_()
        for t in draw(0, (2, 3, 2, 5), (2, 3, 7, 5), (2, 3, 7, 4), dtype=torch.float64)
    )
    assert torch.autograd.gradcheck(lambda *t: short(*t, SCALE), (q, k, v))
    (qkv,) = draw(1, (2, 5, 3 * 2 * 7), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: short_packed(x, 7, SCALE), (qkv.requires_grad_(),))
    x, s = draw(2, (3, 2, 5, 7), (3, 1, 1, 1), dtype=torch.float64)
    assert torch.autograd.gradcheck(unit, (x.requires_grad_(), s.requires_grad_()))


@pytest.mark.parametrize("lanes", [1, 4, 7, 10])
def test_short_pieces_of_lanes_equal_the_whole(monkeypatch, lanes):
    """10 lanes in pieces of 1, 4 and 7 (the last one ragged) and in one."""
    monkeypatch.setattr(attention_cpu, "LANES", lanes)
    check_short(torch.float64, (2, 5, 3, 7, 2, 4), seed=lanes)
    check_packed(torch.float64, 2, 7, 3, 5, seed=lanes)


def test_short_more_lanes_than_go_at_once():
    batch, heads = 19, 241
    assert LANES < batch * heads < 2 * LANES
    check_short(torch.float32, (batch, heads, 2, 3, 1, 2), seed=0)
    check_packed(torch.float32, batch, 3, 1, heads, seed=0)


# ---- bits


def parts_of(sizes, seed):
    """A batch through the kernel at once, and each of its elements alone."""
    batch, heads, queries, keys, rank, width = sizes
    shapes = (
        (batch, heads, queries, rank),
        (batch, heads, keys, rank),
        (batch, heads, keys, width),
        (batch, heads, queries, width),
    )
    *tensors, weighting = draw(seed, *shapes)

    def run(b):
        y, grads = value_and_gradients(
            lambda *t: short(*t, SCALE), [t[b] for t in tensors], weighting[b]
        )
        return y, *grads

    return run(slice(None)), [run(slice(b, b + 1)) for b in range(batch)]


@examples(60)
@given(SIZES.map(lambda sizes: (5, *sizes[1:])), st.integers(0, 2**16))
def test_short_bits_of_a_lane_do_not_depend_on_its_neighbours(sizes, seed):
    whole, alone = parts_of(sizes, seed)
    for b, one in enumerate(alone):
        for name, together, single in zip(("value", "q", "k", "v"), whole, one, strict=True):
            same(together[b : b + 1], single, f"{name} of element {b}")


@examples(60)
@given(
    st.sampled_from((1, 3, 8)),
    st.sampled_from((1, 2, 7)),
    st.sampled_from((1, 3, 16, 17)),
    st.integers(0, 2**16),
)
def test_short_bits_of_a_packed_lane_do_not_depend_on_its_neighbours(tokens, rank, heads, seed):
    qkv, weighting = draw(seed, (5, tokens, 3 * rank * heads), (5, tokens, rank * heads))

    def run(b):
        y, (grad,) = value_and_gradients(
            lambda x: short_packed(x, heads, SCALE), [qkv[b]], weighting[b]
        )
        return y, grad

    whole = run(slice(None))
    for b in range(5):
        for name, together, single in zip(
            ("value", "gradient"), whole, run(slice(b, b + 1)), strict=True
        ):
            same(together[b : b + 1], single, f"{name} of element {b}")


def test_short_bits_do_not_depend_on_the_piece(monkeypatch):
    whole, _ = parts_of((4, 5, 3, 7, 2, 4), seed=3)
    for lanes in (1, 3, 8):
        monkeypatch.setattr(attention_cpu, "LANES", lanes)
        pieces, _ = parts_of((4, 5, 3, 7, 2, 4), seed=3)
        for a, b in zip(pieces, whole, strict=True):
            same(a, b, f"pieces of {lanes}")


def test_short_packed_and_unpacked_give_the_same_bits():
    (qkv,) = draw(5, (3, 7, 3 * 2 * 11))
    q, k, v = unpacked(qkv, 11)
    same(short_packed(qkv, 11, SCALE), short(q, k, v, SCALE).permute(0, 2, 3, 1).flatten(2))
    same(
        short(q, k, v, SCALE),
        short(q.contiguous(), k.contiguous(), v.contiguous(), SCALE),
        "views and copies",
    )


# ---- the ends of the range


def test_short_huge_scores_choose_and_never_overflow():
    q, k, v = draw(0, (2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 2))
    y, grads = value_and_gradients(lambda *t: short(*t, 1e6), (q, k, v), torch.ones(2, 3, 5, 2))
    best = (q @ k.mT).argmax(-1)
    same(y, torch.gather(v, 2, best.unsqueeze(-1).expand(-1, -1, -1, 2)))
    assert all(g.isfinite().all() for g in grads)


def test_short_equal_scores_average():
    _, k, v = draw(0, (2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 2), dtype=torch.float64)
    y = short(torch.zeros(2, 3, 5, 4, dtype=torch.float64), k, v, SCALE)
    close(y, v.mean(2, keepdim=True).expand_as(y))


@pytest.mark.parametrize("function", ["short", "packed", "unit"])
def test_short_second_derivatives_are_refused_rather_than_wrong(function):
    x = torch.randn(2, 3, 6, generator=seeded(0), requires_grad=True)
    y = {
        "short": lambda: short(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1), SCALE),
        "packed": lambda: short_packed(x, 2, SCALE),
        "unit": lambda: unit(x, torch.ones(1, 1, 1)),
    }[function]()
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


# ---- the unit norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unit_equals_plain(dtype):
    @examples(80)
    @given(
        st.sampled_from((None, 1, 2, 5)),
        st.sampled_from((1, 3)),
        st.sampled_from((1, 7)),
        st.sampled_from((2, 5, 13)),
        st.integers(0, 2**16),
    )
    def check(models, batch, tokens, dim, seed):
        lead = () if models is None else (models,)
        size = (*lead, batch, tokens, dim)
        x, weighting, scale = draw(
            seed, size, size, (models or 1, *(1,) * (len(size) - 1)), dtype=dtype
        )
        y, grads = value_and_gradients(unit, (x, scale), weighting)
        expected, expected_grads = value_and_gradients(plain_unit, (x, scale), weighting)
        close(y, expected)
        close_all(grads, expected_grads)

    check()


def test_unit_has_the_length_of_its_scale_and_a_gradient_across():
    x, weighting = draw(0, (3, 2, 5, 7), (3, 2, 5, 7), dtype=torch.float64)
    scale = torch.tensor([0.5, 2.0, -3.0], dtype=torch.float64).view(3, 1, 1, 1)
    y, (d_x, d_scale) = value_and_gradients(unit, (x, scale), weighting)
    close(y.norm(dim=-1), scale.abs().squeeze(-1).expand(3, 2, 5))
    close((d_x * x).sum(-1), torch.zeros(3, 2, 5, dtype=torch.float64))
    close(d_scale, (weighting * y / scale).sum((1, 2, 3), keepdim=True))
    close(unit(x * 1e-3, scale), y)
