"""`attend` by every backend against sums written out in float64, its masks, and its mistakes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention_sums import reference_attend, sees
from support.tolerance import close, close_all, examples, same, seeded
from torch.overrides import TorchFunctionMode

from headwise.errors import UsageError
from headwise.model import reference
from headwise.model.dispatch import attend
from headwise.model.reference import mask_of


def with_gradients(function, tensors, generator_seed=7):
    """The function's value and its gradients under one random weighting of the value; hardmax sends
    none into q and k."""
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    y = function(*tensors)
    weighting = torch.randn(y.shape, generator=seeded(generator_seed), dtype=torch.float64).to(
        y.dtype
    )
    return y.detach(), torch.autograd.grad(
        (y * weighting).sum(), tensors, allow_unused=True, materialize_grads=True
    )


# ---- the function


@st.composite
def calls(draw, mask=True):
    """q, k, v sizes and mask of one call; fewer queries than keys now and then."""
    kv, keys = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2, 3, 5, 7, 13)))
    queries = draw(st.sampled_from([n for n in (1, 2, 3, 5, 7, 13) if n <= keys]))
    rank = draw(st.sampled_from((1, 3, 5, 8, 11)))
    width = draw(st.sampled_from((rank, 1, 2, 7, 13)))
    sizes = (
        draw(st.sampled_from((1, 2))),
        kv * draw(st.sampled_from((1, 2, 5))),
        kv,
        queries,
        keys,
        rank,
        width,
    )
    causal, window = (
        (draw(st.booleans()), draw(st.sampled_from((0, 1, 2, 4, 20)))) if mask else (False, 0)
    )
    return sizes, causal, window


def tensors_of(sizes, dtype, seed):
    batch, heads, kv, queries, keys, rank, width = sizes
    generator = seeded(seed)
    shapes = (batch, heads, queries, rank), (batch, kv, keys, rank), (batch, kv, keys, width)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def check_attend(backend, case, dtype, seed, hard=False):
    """Value and gradients of one call against the sums in float64."""
    sizes, causal, window = case
    tensors, scale = tensors_of(sizes, dtype, seed), 0.6
    options = {"causal": causal, "window": window, "hard": hard}
    y, grads = with_gradients(
        lambda q, k, v: attend(q, k, v, scale=scale, backend=backend, **options), tensors
    )
    exact = [t.double() for t in tensors]
    expected, expected_grads = with_gradients(
        lambda q, k, v: reference_attend(q, k, v, scale, **options), exact
    )
    close(y, expected, f"{backend} value")
    close_all(grads, expected_grads, f"{backend} gradients")


@pytest.mark.parametrize("backend", ["auto", "flash", "plain", "blocked"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_backends_equal_the_sums(backend, dtype):
    @examples(60)
    @given(calls(), st.integers(0, 2**16))
    def check(case, seed):
        check_attend(backend, case, dtype, seed)

    check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_short_backend_equals_the_sums(dtype):
    @examples(60)
    @given(calls(mask=False).filter(lambda c: c[0][4] <= 8 and c[0][5] <= 8), st.integers(0, 2**16))
    def check(case, seed):
        check_attend("short", case, dtype, seed)

    check()


@pytest.mark.parametrize("backend", ["auto", "plain", "blocked"])
def test_attention_hardmax_backends_equal_the_sums(backend):
    @examples(30)
    @given(calls(), st.integers(0, 2**16))
    def check(case, seed):
        check_attend(backend, case, torch.float64, seed, hard=True)

    check()


@pytest.mark.parametrize("block_bytes", [1, 300, 2000])
@pytest.mark.parametrize("hard", [False, True])
def test_attention_many_small_blocks_equal_the_sums(monkeypatch, block_bytes, hard):
    """One byte: a block a query; the others: several queries, the last block ragged."""
    monkeypatch.setattr(reference, "BLOCK_BYTES", block_bytes)

    @examples(40)
    @given(calls(), st.integers(0, 2**16))
    def check(case, seed):
        check_attend("blocked", case, torch.float64, seed, hard=hard)

    check()


class Scores(TorchFunctionMode):
    """Records the bytes of every tensor that goes through a softmax."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.softmax:
            self.bytes.append(args[0].nbytes)
        return func(*args, **kwargs or {})


def test_attention_blocks_never_hold_more_scores_than_allowed(monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_BYTES", 4000)
    q, k, v = tensors_of((2, 3, 3, 37, 37, 5, 5), torch.float32, 0)
    with Scores() as seen:
        attend(q, k, v, backend="blocked")
    assert len(seen.bytes) == math.ceil(37 / (4000 // (2 * 3 * 37 * 4)))
    assert max(seen.bytes) <= 4000
    assert sum(seen.bytes) == 2 * 3 * 37 * 37 * 4


@pytest.mark.parametrize("backend", ["flash", "plain", "blocked"])
def test_attention_half_precision_backends_are_close(backend):
    for seed, case in enumerate(
        (
            ((2, 6, 3, 7, 7, 5, 5), True, 0),
            ((1, 3, 3, 13, 13, 11, 2), False, 0),
            ((1, 2, 1, 3, 13, 8, 8), True, 4),
        )
    ):
        check_attend(backend, case, torch.bfloat16, seed)


@pytest.mark.parametrize("backend", ["auto", "flash", "plain", "blocked"])
@pytest.mark.parametrize("window", [0, 4])
def test_attention_last_queries_alone_are_the_end_of_the_whole(backend, window):
    """Decoding: m queries against n keys stand at the last m of them."""
    q, k, v = tensors_of((2, 6, 2, 13, 13, 5, 7), torch.float64, 0)
    whole = attend(q, k, v, causal=True, window=window, backend="plain")
    for m in (1, 2, 5, 12, 13):
        close(
            attend(q[:, :, -m:], k, v, causal=True, window=window, backend=backend),
            whole[:, :, -m:],
            f"{m} queries",
        )


def test_attention_scale_is_the_inverse_root_of_the_rank_unless_given():
    q, k, v = tensors_of((2, 3, 3, 5, 5, 7, 2), torch.float64, 0)
    close(attend(q, k, v), reference_attend(q, k, v, 7**-0.5))
    close(attend(q, k, v, scale=0.3), reference_attend(q, k, v, 0.3))


@examples(100)
@given(st.integers(1, 9), st.integers(0, 6), st.booleans(), st.integers(0, 11))
def test_mask_equals_the_truth_table(queries, more, causal, window):
    keys = queries + more
    mask = mask_of(queries, keys, causal, window)
    same(
        torch.ones(queries, keys, dtype=torch.bool) if mask is None else mask,
        sees(queries, keys, causal, window),
    )


# ---- mistakes


def ones(*size, dtype=torch.float32):
    return torch.ones(size, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "options", "parts"),
    [
        (
            (ones(2, 3, 4), ones(1, 2, 3, 4), ones(1, 2, 3, 4)),
            {},
            ("(batch, heads, tokens, width)", "q (2, 3, 4)"),
        ),
        (
            (ones(2, 3, 5, 7), ones(2, 3, 5, 6), ones(2, 3, 5, 7)),
            {},
            ("q and k must share batch and rank", "k (2, 3, 5, 6)"),
        ),
        (
            (ones(1, 3, 5, 7), ones(2, 3, 5, 7), ones(2, 3, 5, 7)),
            {},
            ("q and k must share batch", "q (1, 3, 5, 7)"),
        ),
        (
            (ones(2, 3, 5, 7), ones(2, 3, 5, 7), ones(2, 3, 4, 7)),
            {},
            ("k and v batch, heads and tokens", "v (2, 3, 4, 7)"),
        ),
        (
            (ones(2, 5, 5, 7), ones(2, 3, 5, 7), ones(2, 3, 5, 7)),
            {},
            ("query heads must be a multiple of KV heads", "got 5 and 3"),
        ),
        (
            (ones(2, 3, 5, 7), ones(2, 0, 5, 7), ones(2, 0, 5, 7)),
            {},
            ("query heads must be a multiple of KV heads", "got 3 and 0"),
        ),
        ((ones(2, 3, 5, 7),) * 3, {"window": -1}, ("window must not be negative", "got -1")),
        (
            (ones(2, 3, 5, 7), ones(2, 3, 5, 7), ones(2, 3, 5, 7, dtype=torch.float64)),
            {},
            ("share dtype", "v float64 on cpu"),
        ),
        (
            (ones(2, 3, 5, 7),) * 3,
            {"backend": "flsh"},
            ("unknown backend 'flsh'", "did you mean flash", "blocked"),
        ),
        (
            (ones(2, 3, 5, 7),) * 3,
            {"backend": "cudnn"},
            ("backend cudnn cannot run this call", "needs a GPU, the device is cpu"),
        ),
        (
            (ones(2, 3, 5, 7),) * 3,
            {"backend": "heads"},
            ("backend heads cannot run this call", "needs a GPU, the device is cpu"),
        ),
        (
            (ones(2, 3, 5, 7),) * 3,
            {"backend": "efficient"},
            ("backend efficient cannot run this call", "needs a GPU"),
        ),
        (
            (ones(2, 3, 5, 7),) * 3,
            {"backend": "short", "causal": True},
            ("backend short cannot run this call", "without a mask"),
        ),
        (
            (ones(2, 3, 5, 9),) * 3,
            {"backend": "short"},
            ("backend short cannot run this call", "5 keys at rank 9"),
        ),
        (
            (ones(2, 3, 5, 7),) * 3,
            {"backend": "flash", "hard": True},
            ("flash does not compute hardmax", "plain, blocked"),
        ),
        (
            (ones(2, 3, 5, 7),) * 3,
            {"backend": "heads", "hard": True},
            ("heads does not compute hardmax", "plain, blocked"),
        ),
    ],
)
def test_attention_bad_calls_die_with_one_line(arguments, options, parts):
    with pytest.raises(UsageError) as caught:
        attend(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
