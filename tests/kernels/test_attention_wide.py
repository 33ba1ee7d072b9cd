"""Attention of large rank: blocks, chunks and the kernels over tiles against the formula in
float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gpu import DEVICE, FP32, FP64, INTERPRETED, near, normal

from headwise import Shape, attend
from headwise.kernels import attention_wide, attention_wide_plain
from headwise.kernels.attention_wide import attend_wide
from headwise.kernels.attention_wide_span import TILE, Span
from headwise.model.reference import mask_of, plain

HALF = torch.bfloat16


def both(q, k, v, scale, causal, window, **sizes):
    """Output and gradients by blocks and by the formula, in the operands' type and in float64."""
    given_, exact = (
        [t.detach().to(kind).requires_grad_() for t in (q, k, v)] for kind in (q.dtype, FP64)
    )
    o = attend_wide(*given_, scale, causal, window, **sizes)
    mask = mask_of(q.shape[2], k.shape[2], causal, window, q.device)
    truth = plain(*exact, scale, mask)
    g = normal(7, *o.shape, dtype=q.dtype)
    return (o, *torch.autograd.grad(o, given_, g)), (
        truth,
        *torch.autograd.grad(truth, exact, g.double()),
    )


@settings(max_examples=150, deadline=None)
@given(
    batch=st.integers(1, 3),
    kv=st.integers(1, 3),
    group=st.integers(1, 3),
    queries=st.integers(1, 29),
    more=st.sampled_from((0, 0, 1, 8)),
    rank=st.sampled_from((1, 3, 11)),
    width=st.sampled_from((1, 5, 7)),
    causal=st.booleans(),
    window=st.sampled_from((0, 0, 1, 4, 9, 100)),
    block=st.sampled_from((1, 4, 8, 13, 64)),
    work=st.sampled_from((1, 3_000, 20_000, 1 << 28)),
    keep=st.sampled_from((0.0, 2.0, 1e9)),
)
def test_attend_wide_in_blocks_and_chunks_of_any_size_computes_the_formula(
    batch, kv, group, queries, more, rank, width, causal, window, block, work, keep
):
    keys = queries + more
    q, k, v = (
        normal(i, *size, dtype=FP64)
        for i, size in enumerate(
            ((batch, kv * group, queries, rank), (batch, kv, keys, rank), (batch, kv, keys, width))
        )
    )
    ours, theirs = both(q, k, v, 0.37, causal, window, block=block, work=work, keep=keep)
    for name, a, b in zip(("o", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max().item() <= 1e-11, name


@pytest.mark.parametrize(("dtype", "bound"), [(FP32, 2e-5), (HALF, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("keep", [0.0, 1e9])
@pytest.mark.parametrize("window", [0, 21])
def test_attend_wide_is_as_exact_as_its_operands(dtype, bound, window, keep):
    q, k, v = (normal(i, 2, 3, 53, r, dtype=dtype) for i, r in enumerate((300, 300, 17)))
    ours, theirs = both(q, k, v, 300**-0.5, True, window, block=16, work=1 << 20, keep=keep)
    for name, a, b in zip(("o", "dq", "dk", "dv"), ours, theirs, strict=True):
        near(a, b, bound, name)


def test_scores_are_not_rounded_to_half_precision():
    """Two keys whose scores differ by less than a bfloat16 can tell at that size."""
    q = torch.full((1, 1, 1, 4), 16.0, dtype=HALF, device=DEVICE)
    k = torch.tensor([[[[16.0] * 4, [16.0, 16.0, 16.0, 16.125]]]], dtype=HALF, device=DEVICE)
    v = torch.tensor([[[[0.0], [1.0]]]], dtype=HALF, device=DEVICE)
    assert attend_wide(q, k, v, 1.0).item() == pytest.approx(1 / (1 + math.exp(-2.0)), rel=1e-2)


def test_gradients_reach_shared_keys_and_tensors_that_are_not_contiguous():
    q = normal(0, 2, 9, 4, 5, dtype=FP64).transpose(1, 2).requires_grad_()
    k = normal(1, 2, 9, 2, 5, dtype=FP64).transpose(1, 2).requires_grad_()
    v = normal(2, 2, 2, 9, 1, dtype=FP64).expand(2, 2, 9, 3).requires_grad_()
    out = attend_wide(q, k, v, 0.5, True, block=4)
    truth = plain(q, k, v, 0.5, mask_of(9, 9, True, 0, DEVICE))
    weights = normal(3, *out.shape, dtype=FP64).transpose(2, 3).contiguous().transpose(2, 3)
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), weights),
        torch.autograd.grad(truth, (q, k, v), weights),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-12)


def test_attend_wide_takes_no_sequences():
    q, k, v = (torch.zeros(0, 2, 3, 5, requires_grad=True) for _ in range(3))
    out = attend_wide(q, k, v, 1.0, True)
    assert out.shape == (0, 2, 3, 5)
    out.sum().backward()
    assert q.grad is not None


@given(
    queries=st.integers(1, 60),
    more=st.integers(0, 20),
    causal=st.booleans(),
    window=st.integers(0, 70),
    block=st.integers(1, 70),
)
def test_span_gives_a_block_every_key_it_sees_in_whole_blocks_of_keys(
    queries, more, causal, window, block
):
    keys = queries + more
    span = Span(queries, keys, more, causal, window if window < keys else 0)
    seen = mask_of(queries, keys, causal, span.window)
    assert [at for first, last in span.blocks(block) for at in range(first, last)] == list(
        range(queries)
    )
    before = (0, 0)
    for first, last in span.blocks(block):
        low, high = span.keys_of(first, last, block)
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


def test_attend_wide_temporary_memory_stays_within_bounds_whatever_the_length(monkeypatch):
    """The sum of what is made at one time, by counting the tensors that the passes ask for."""
    monkeypatch.setattr(attention_wide, "runs_on_triton", lambda t: False)
    asked, empty = [], torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda t, *size, **kind: (
            asked.append(empty(t, *size, **kind).nbytes) or empty(t, *size, **kind)
        ),
    )
    scores, made = attention_wide_plain._scores, []
    monkeypatch.setattr(
        attention_wide_plain,
        "_scores",
        lambda a, b: made.append(4 * a.shape[0] * a.shape[1] * b.shape[1]) or scores(a, b),
    )
    work, block = 200_000, 8
    for tokens in (64, 256, 1024):
        q, k, v = (normal(i, 3, 1, tokens, 4).requires_grad_() for i in range(3))
        asked.clear()
        made.clear()
        out = attend_wide(q, k, v, 0.1, True, block=block, work=work, keep=0)
        out.sum().backward()
        own = [q.nbytes]
        assert max(asked) <= max(work, *own, 8 * block * tokens)
        assert max(made) <= max(work, 4 * block * tokens)
        assert max(made) + 2 * max(x for x in asked if x not in own) <= max(
            1.5 * work, 24 * block * tokens
        )


# ---- the kernels over tiles


# batch, KV heads, group, queries, keys, rank, width, causal, window, bytes of work: enough for all,
# for pieces, for the least
CASES = [
    (1, 2, 1, 150, 150, 70, 20, True, 0, 1 << 30),
    (1, 1, 3, 130, 270, 64, 9, True, 0, 300_000),
    (2, 1, 1, 140, 140, 33, 40, True, 50, 1),
    (1, 2, 1, 129, 300, 20, 7, True, 3, 300_000),
    (1, 1, 2, 131, 131, 64, 64, False, 0, 1),
    (1, 2, 2, 40, 45, 130, 7, False, 30, 1 << 30),
    (1, 1, 1, 260, 260, 20, 17, False, 100, 200_000),
    (3, 1, 1, 1, 131, 64, 5, True, 0, 1 << 30),
]


@pytest.fixture
def by_tiles(monkeypatch):
    """On a CPU in the interpreter, with everything that is not written left undefined."""
    from headwise.kernels import attention_wide_launch, attention_wide_triton

    monkeypatch.setattr(attention_wide, "runs_on_triton", lambda t: t.dtype != FP64)
    empty, like = torch.Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda t, *size, **kind: empty(t, *size, **kind).fill_(math.nan)
    )
    monkeypatch.setattr(torch, "empty_like", lambda t, **kind: like(t, **kind).fill_(math.nan))
    monkeypatch.setattr(attention_wide_launch.launches, "_known", {})
    return attention_wide_triton


KEPT = [
    (case, keep)
    for i, case in enumerate(CASES)
    for j, keep in enumerate((0.0, 1e9))
    if not INTERPRETED or (i + j) % 2 == 0
]


@pytest.mark.parametrize(("case", "keep"), KEPT, ids=str)
def test_wide_tiles_compute_the_formula(case, keep, by_tiles):
    batch, kv, group, queries, keys, rank, width, causal, window, work = case
    sizes = ((batch, queries, kv * group, rank), (batch, keys, kv, rank), (batch, keys, kv, width))
    q, k, v = (
        normal(i, *size).transpose(1, 2) for i, size in enumerate(sizes)
    )  # as a projection leaves them: heads side by side
    ours, theirs = both(q, k, v, 0.3, causal, window, work=work, keep=keep)
    for name, a, b in zip(("o", "dq", "dk", "dv"), ours, theirs, strict=True):
        near(a, b, 2e-5, name)


def test_wide_launches_that_are_kept_are_those_of_this_call(by_tiles):
    """One thing changes at a time: what is known of the call before must not serve it; then two
    come again, from what is known."""
    first = {
        "kv": 2,
        "width": 9,
        "causal": True,
        "window": 0,
        "scale": 0.3,
        "keep": 1e9,
        "aside": False,
    }
    changes = [
        {},
        {"kv": 1},
        {"width": 20},
        {"causal": False},
        {"window": 5},
        {"scale": 0.7},
        {"keep": 0.0},
        {"aside": True},
    ]
    seen = []
    for turn, change in enumerate([*changes, *changes[:2]]):
        s = {**first, **change}
        sizes = ((2, 12), (s["kv"], 12), (s["kv"], s["width"]))
        q, k, v = (
            normal(10 * turn + i, 1, 20, heads, width).transpose(1, 2)
            for i, (heads, width) in enumerate(sizes)
        )
        q, k, v = (
            t if s["aside"] else t.clone(memory_format=torch.contiguous_format) for t in (q, k, v)
        )
        ours, theirs = both(q, k, v, s["scale"], s["causal"], s["window"], keep=s["keep"])
        for name, a, b in zip(("o", "dq", "dk", "dv"), ours, theirs, strict=True):
            near(a, b, 2e-5, f"{name}, {change}")
        seen.append(len(by_tiles.launches))
    assert seen[len(changes) - 1] == seen[-1], "nothing new the second time"
    assert sorted(set(seen)) == seen[: len(changes)], "something new the first"


def test_wide_tiles_of_rows_too_long_to_hold_at_once(by_tiles, monkeypatch):
    monkeypatch.setattr("headwise.kernels.attention_wide_launch.MOST", 64)
    q, k, v = (3 * normal(i, 1, 1, 150, 8) for i in range(3))
    for window in (0, 40):
        ours, theirs = both(q, k, v, 0.7, True, window)
        for name, a, b in zip(("o", "dq", "dk", "dv"), ours, theirs, strict=True):
            near(a, b, 2e-5, name)


def test_wide_tiles_of_heads_farther_apart_than_32_bits_can_tell(by_tiles):
    """Three heads of one sequence, 2^30 numbers from one to the next; what lies between is never
    touched."""
    room = torch.empty(3, 1 << 30, dtype=torch.float16, device=DEVICE)
    q, k, v = (
        room[:, 64 * i : 64 * (i + 1)].view(1, 3, 8, 8).copy_(normal(i, 1, 3, 8, 8))
        for i in range(3)
    )
    assert q.stride(1) == 1 << 30
    o, lse = (
        torch.empty(1, 3, 8, 8, dtype=q.dtype, device=DEVICE),
        torch.empty(1, 3, 8, device=DEVICE),
    )
    seen = Span(8, 8, 0, True, 0)
    by_tiles.forward(q, k, v, o, lse, None, 0.3, seen, 1 << 20)
    g = room[:, 192:256].view(1, 3, 8, 8).copy_(normal(3, 1, 3, 8, 8))
    found = o, *by_tiles.backward(g, q, k, v, o, lse, None, 0.3, seen, 1 << 20)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    truth = plain(*exact, 0.3, mask_of(8, 8, True, 0, DEVICE))
    for name, a, b in zip(
        ("o", "dq", "dk", "dv"),
        found,
        (truth, *torch.autograd.grad(truth, exact, g.double())),
        strict=True,
    ):
        near(a, b, 3e-3, name)


def test_wide_launch_of_more_heads_and_sequences_than_a_grid_is_high(by_tiles, monkeypatch):
    """CUDA takes 65,535 programs along the second axis, 2^31 - 1 along the first."""
    grids = []
    monkeypatch.setattr(
        "headwise.kernels.attention_wide_launch._row_dots",
        lambda grid, *_, **__: grids.append(grid) or print,
    )
    by_tiles.row_dots(*torch.zeros(2, 1 << 15, 3, 2, 1))
    assert grids == [(6 << 15, 1, 1)]


def test_wide_backward_of_sequences_in_pieces_shares_one_buffer(by_tiles, monkeypatch):
    """A second one beside it would be twice the memory that was granted."""
    asked, tables = [], by_tiles._tables
    monkeypatch.setattr(
        by_tiles, "_tables", lambda *given: asked.append(tables(*given)) or asked[-1]
    )
    q, k, v = (normal(i, 5, 1, 9, 4) for i in range(3))
    work = 5 * 128 * 128 * 4  # two sequences, or five of slopes alone
    for keep, sequences in ((0.0, 2), (1e9, 5)):
        asked.clear()
        ours, theirs = both(q, k, v, 0.3, True, 0, work=work, keep=keep)
        for name, a, b in zip(("o", "dq", "dk", "dv"), ours, theirs, strict=True):
            near(a, b, 2e-5, name)
        assert [room.nbytes for room in asked] == [
            sequences * 128 * 128 * 4 * (2 if not keep else 1)
        ]


def test_wide_scale_that_is_a_whole_number_is_launched_as_a_float(by_tiles, monkeypatch):
    """Equal numbers are one key of a launcher, but not one type of an argument."""
    from headwise.kernels import attention_wide_launch

    scales, softmax = [], attention_wide_launch._softmax_rows

    def spy(grid, tensors, numbers, *rest, **constants):
        scales.append(numbers[0])
        return softmax(grid, tensors, numbers, *rest, **constants)

    monkeypatch.setattr(attention_wide_launch, "_softmax_rows", spy)
    attend(*(normal(i, 1, 1, 5, 3) for i in range(3)), scale=2, backend="wide")
    assert [type(scale) for scale in scales] == [float]


@given(
    rows=st.integers(1, 700),
    keys=st.integers(1, 700),
    at=st.integers(-300, 600),
    causal=st.booleans(),
    window=st.sampled_from((0, 1, 9, 130, 500)),
    first=st.integers(0, 5),
    count=st.integers(1, 3),
)
def test_span_gives_keys_in_pieces_every_query_that_sees_them(
    rows, keys, at, causal, window, first, count
):
    start, stop = first * TILE, min(keys, (first + count) * TILE)
    if start >= stop:
        return
    token, key = at + torch.arange(rows).unsqueeze(1), torch.arange(start, stop)
    seen = key <= token if causal else torch.ones(rows, stop - start, dtype=torch.bool)
    seen = seen & ((key - token).abs() < window) if window else seen
    low, high = Span(rows, keys, at, causal, window).queries_of(start, stop)
    there = seen.any(1).nonzero().flatten()
    if len(there):
        assert low % TILE == 0
        assert low <= there[0] < low + TILE
        assert there[-1] < high <= min(rows, int(there[-1]) // TILE * TILE + TILE)
    else:
        assert high - low <= TILE, "at most a tile too many"


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize(
    ("rank", "width", "kv"), [(448, 448, 4), (1792, 1792, 1), (512, 128, 2), (300, 20, 4)]
)
def test_wide_backend_on_a_gpu_is_as_exact_as_bfloat16(rank, width, kv):
    heads = max(kv, 4 if rank < 1000 else 1)
    q, k, v = (
        normal(i, 2, h, 700, r, dtype=HALF)
        for i, (h, r) in enumerate(((heads, rank), (kv, rank), (kv, width)))
    )
    ours, theirs = both(q, k, v, rank**-0.5, True, 0)
    for name, a, b in zip(("o", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert (a.double() - b).norm() <= 8e-3 * b.norm(), name


# ---- as a backend


def test_wide_backend_by_name_and_beyond_width_256_on_a_gpu():
    q, k, v = normal(0, 1, 4, 6, 5), normal(1, 1, 2, 6, 5), normal(2, 1, 2, 6, 3)
    near(
        attend(q, k, v, causal=True, backend="wide"),
        attend(q, k, v, causal=True, backend="plain").double(),
        1e-6,
    )
    from headwise import explain

    shape = Shape(dim=1792, depth=1, num_heads=4, head_dim=448, causal=True)
    choice = explain(shape, 2048, device="cuda", dtype=HALF)
    assert choice.backend == "wide"
    assert "beyond width 256" in str(choice)
