"""Attention of large rank: blocks and chunks against the formula in float64, and the kernels over rows against plain operations."""

import itertools
import math

import pytest
import torch
from gpu import DEVICE, FP32, FP64, INTERPRETED, near, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise import Shape, attend
from headwise.attention import mask_of, plain
from headwise.kernels import rows, wide
from headwise.kernels.wide import Span, attend_wide

HALF = torch.bfloat16


def both(q, k, v, scale, causal, window, **sizes):
    """Output and gradients by blocks and by the formula, in the operands' type and in float64."""
    given_, exact = ([t.detach().to(kind).requires_grad_() for t in (q, k, v)] for kind in (q.dtype, FP64))
    o = attend_wide(*given_, scale, causal, window, **sizes)
    mask = mask_of(q.shape[2], k.shape[2], causal, window, q.device)
    truth = plain(*exact, scale, mask)
    g = normal(7, *o.shape, dtype=q.dtype)
    return (o, *torch.autograd.grad(o, given_, g)), (truth, *torch.autograd.grad(truth, exact, g.double()))


@settings(max_examples=150, deadline=None)
@given(
    batch=st.integers(1, 3), kv=st.integers(1, 3), group=st.integers(1, 3), queries=st.integers(1, 29), more=st.sampled_from((0, 0, 1, 8)),
    rank=st.sampled_from((1, 3, 11)), width=st.sampled_from((1, 5, 7)), causal=st.booleans(), window=st.sampled_from((0, 0, 1, 4, 9, 100)),
    block=st.sampled_from((1, 4, 8, 13, 64)), work=st.sampled_from((1, 3_000, 20_000, 1 << 28)),
)  # fmt: skip
def test_blocks_and_chunks_of_any_size_compute_the_formula(batch, kv, group, queries, more, rank, width, causal, window, block, work):
    keys = queries + more
    q, k, v = (
        normal(i, *size, dtype=FP64)
        for i, size in enumerate(((batch, kv * group, queries, rank), (batch, kv, keys, rank), (batch, kv, keys, width)))
    )
    ours, theirs = both(q, k, v, 0.37, causal, window, block=block, work=work)
    for name, a, b in zip(("o", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max().item() <= 1e-11, name


@pytest.mark.parametrize(("dtype", "bound"), [(FP32, 2e-5), (HALF, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("window", [0, 21])
def test_it_is_as_exact_as_its_operands(dtype, bound, window):
    q, k, v = (normal(i, 2, 3, 53, r, dtype=dtype) for i, r in enumerate((300, 300, 17)))
    ours, theirs = both(q, k, v, 300**-0.5, True, window, block=16, work=1 << 20)
    for name, a, b in zip(("o", "dq", "dk", "dv"), ours, theirs, strict=True):
        near(a, b, bound, name)


def test_scores_are_not_rounded_to_half_precision():
    """Two keys whose scores differ by less than a bfloat16 can tell at that size."""
    q = torch.full((1, 1, 1, 4), 16.0, dtype=HALF, device=DEVICE)
    k = torch.tensor([[[[16.0] * 4, [16.0, 16.0, 16.0, 16.125]]]], dtype=HALF, device=DEVICE)
    v = torch.tensor([[[[0.0], [1.0]]]], dtype=HALF, device=DEVICE)
    assert attend_wide(q, k, v, 1.0).item() == pytest.approx(1 / (1 + math.exp(-2.0)), rel=1e-2)


def test_what_is_not_contiguous_and_shared_keys_get_their_gradients():
    q = normal(0, 2, 9, 4, 5, dtype=FP64).transpose(1, 2).requires_grad_()
    k = normal(1, 2, 9, 2, 5, dtype=FP64).transpose(1, 2).requires_grad_()
    v = normal(2, 2, 2, 9, 1, dtype=FP64).expand(2, 2, 9, 3).requires_grad_()
    out = attend_wide(q, k, v, 0.5, True, block=4)
    truth = plain(q, k, v, 0.5, mask_of(9, 9, True, 0, DEVICE))
    weights = normal(3, *out.shape, dtype=FP64).transpose(2, 3).contiguous().transpose(2, 3)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), weights), torch.autograd.grad(truth, (q, k, v), weights), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_no_sequences_is_no_error():
    q, k, v = (torch.zeros(0, 2, 3, 5, requires_grad=True) for _ in range(3))
    out = attend_wide(q, k, v, 1.0, True)
    assert out.shape == (0, 2, 3, 5)
    out.sum().backward()
    assert q.grad is not None


@given(
    queries=st.integers(1, 60), more=st.integers(0, 20), causal=st.booleans(), window=st.integers(0, 70), block=st.integers(1, 70),
)  # fmt: skip
def test_a_block_is_given_every_key_it_sees_and_whole_blocks_of_keys(queries, more, causal, window, block):
    span = Span(queries, queries + more, causal, window if window < queries + more else 0, block)
    seen = mask_of(queries, queries + more, causal, span.window)
    assert [at for first, last in span.blocks for at in range(first, last)] == list(range(queries))
    before = (0, 0)
    for first, last in span.blocks:
        low, high = span.of(first, last)
        assert low % block == 0
        assert high % block == 0 or high == span.keys
        if seen is not None:
            there = seen[first:last].any(0).nonzero().flatten()
            assert low <= there[0]
            assert there[-1] < high
            assert there[0] - low < block, "no block of keys too many"
            assert high - there[-1] <= block
        assert before[0] <= low
        assert before[1] <= high
        before = low, high


@pytest.mark.parametrize("work", [10_000, 100_000, 1_000_000])
@pytest.mark.parametrize("tokens", [64, 256])
def test_temporary_memory_stays_within_bounds_whatever_the_length(work, tokens):
    """Live bytes above operands, results and gradients, by counting what every operation returns."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        """The largest sum of live storages that operations made."""

        def __init__(self):
            super().__init__()
            self.alive, self.most = {}, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            import weakref

            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else (out,):
                if isinstance(t, torch.Tensor):
                    store = t.untyped_storage()
                    if store.data_ptr() and store.data_ptr() not in self.alive:
                        key = store.data_ptr()
                        self.alive[key] = store.nbytes()
                        weakref.finalize(store, self.alive.pop, key, None)
            self.most = max(self.most, sum(self.alive.values()))
            return out

    q, k, v = (normal(i, 1, 2, tokens, 40) for i in range(3))
    with Watch() as watch:
        attend_wide(q, k, v, 0.1, True, block=8, work=work)
    assert watch.most <= q.nbytes + 4 * work + 20 * tokens * 8 * 4


# ---- the kernels over rows


CASES = list(itertools.product((1, 5, 16, 33, 130), (False, True), (0, 3, 20)))


@pytest.mark.parametrize(("n", "causal", "window"), CASES)
def test_the_kernels_over_rows_equal_the_plain_operations(n, causal, window, monkeypatch):
    span, per, first, key0 = Span(190, 200, causal, window, 64), 7, 20, 20
    key0 = min(key0, 28)
    s, dp, delta = 3 * normal(0, 2, 14, n), normal(1, 2, 14, n), normal(2, 2, 14)
    unseen = wide._unseen(span, per, first, key0, n, 14, DEVICE)
    if unseen is not None:  # rows that see nothing are never asked for
        s = s[:, ~unseen.all(1)] if not unseen.all(1).any() else s
        if unseen.all(1).any():
            pytest.skip("a row sees nothing here")
    p, lse = torch.empty(2, 14, n, device=DEVICE), torch.empty(2, 2, 7, device=DEVICE)
    x = s.double() * 0.7
    x = x if unseen is None else x.masked_fill(unseen, -math.inf)
    place = first + span.keys - span.queries
    for block in (4096, 16):  # a row at once, and piece by piece
        monkeypatch.setattr(rows, "MOST", block)
        rows.soften_rows(s, p, lse, 0.7, per, place, key0, causal, window)
        near(p, x.softmax(-1), 2e-6, "p")
        near(lse.view(2, 14), x.logsumexp(-1), 2e-6, "lse")
    room = torch.full((2, 2, 16, n + 3), math.nan, device=DEVICE)
    e, there = x.softmax(-1), (slice(None), slice(None), slice(1, 15), slice(2, n + 2))
    sums = x.logsumexp(-1).float()
    rows.slope_rows(s, dp, sums, delta, room[0][there[1:]], room[1][there[1:]], 0.7, per, place, key0, causal, window)
    near(room[there][0], e, 2e-5, "p")
    near(room[there][1], e * (dp.double() - delta.double().unsqueeze(-1)) * 0.7, 2e-5, "ds")
    room[there] = math.nan
    assert room.isnan().all(), "nothing beside it is written"
    rows.slope_rows(s, dp, sums, delta, None, room[1][there[1:]], 0.7, per, place, key0, causal, window)
    assert room[0].isnan().all()
    a, b = normal(3, 3, 5, n), normal(4, 3, 5, n)
    near(rows.dots_of(a, b), (a.double() * b.double()).sum(-1), 1e-5, "dots", largest=float(n))


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize(("rank", "width", "kv"), [(448, 448, 4), (1792, 1792, 1), (512, 128, 2), (300, 20, 4)])
def test_on_a_gpu_it_is_as_exact_as_bfloat16(rank, width, kv):
    heads = max(kv, 4 if rank < 1000 else 1)
    q, k, v = (normal(i, 2, h, 700, r, dtype=HALF) for i, (h, r) in enumerate(((heads, rank), (kv, rank), (kv, width))))
    ours, theirs = both(q, k, v, rank**-0.5, True, 0)
    for name, a, b in zip(("o", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert (a.double() - b).norm() <= 8e-3 * b.norm(), name


# ---- as a backend


def test_it_can_be_asked_for_by_name_and_is_chosen_beyond_width_256_on_a_gpu():
    q, k, v = normal(0, 1, 4, 6, 5), normal(1, 1, 2, 6, 5), normal(2, 1, 2, 6, 3)
    near(attend(q, k, v, causal=True, backend="wide"), attend(q, k, v, causal=True, backend="plain").double(), 1e-6)
    from headwise import explain

    shape = Shape(dim=1792, depth=1, num_heads=4, head_dim=448, causal=True)
    told = explain(shape, 2048, device="cuda", dtype=HALF)
    assert told.backend == "wide"
    assert "beyond width 256" in str(told)
