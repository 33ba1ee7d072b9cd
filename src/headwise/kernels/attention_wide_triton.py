"""Attention of large rank on a GPU: products of tiles that skip what a mask hides, each with what
follows it done on the way.

A head of rank 448 or 1792 does not fit a fused kernel, but its scores are few beside its operands.
So each product of the two passes is one launch over all heads, and its tiles are those that some
query sees: scores = q k^T; p = softmax of rows; o = p v; backward ds = p (g v^T - delta) at the end
of the product's own tile, with p from what was kept or from q k^T in the same tile; dq = ds k; dk =
ds^T q and dv = p^T g, which sum over the heads that share keys.

Weights p and slopes ds lie in tables of SQUARE x SQUARE tiles, (batch, head, row, column), rows and
columns padded to whole tiles; a tile that is seen at all is written whole, zeros where it is
hidden, so that products need no mask. Operands are (batch, head, token, width) with any strides but
the last. Row 0 stands at key `at`; key 0 of the table is key 0 of what is passed. Sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.kernels.attention_wide import TILE as SQUARE
from headwise.kernels.attention_wide import padded, pieces, straight

MOST = 4096  # scores of a row that a program holds at once
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
SIDE: tl.constexpr = tl.constexpr(SQUARE)


@dataclass(frozen=True)
class Way:
    """How a product is tiled: columns of the result, steps of the sum, warps, loads ahead."""

    columns: int
    step: int
    warps: int
    stages: int


HALF = Way(128, 64, 4, 3)  # two programs share a multiprocessor
AGAIN = Way(128, 64, 8, 3)  # slopes that make the scores again hold two tiles
SINGLE = Way(128, 32, 8, 3)  # float32 operands


@dataclass(frozen=True)
class Seen:
    """Which of `keys` keys each of `rows` queries sees: all, those up to its own place, those
    nearer than `window`. The first query stands at key `at`, which may be before the first key."""

    rows: int
    keys: int
    at: int
    causal: bool
    window: int  # 0: none

    @property
    def tall(self) -> int:
        return padded(self.rows)

    @property
    def long(self) -> int:
        return padded(self.keys)

    def below(self, first: int, last: int) -> Seen:
        """What queries [first, last) see."""
        return Seen(last - first, self.keys, self.at + first, self.causal, self.window)

    def rows_of(self, first: int, last: int) -> tuple[int, int]:
        """Which queries see some of keys [first, last), in whole tiles; none when the second is not
        the larger."""
        low = (
            max(0, first - self.at - (0 if self.causal else self.window - 1))
            if self.causal or self.window
            else 0
        )
        high = min(self.rows, last - 1 - self.at + self.window) if self.window else self.rows
        return low // SQUARE * SQUARE, min(self.rows, padded(max(0, high)))


# ---- what a block of queries sees, and what sees a block of keys


@triton.jit
def _keys_of(first, rows, keys, at, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Columns of the tiles that some row of [first, first + SIDE) sees: first and behind the last,
    multiples of SIDE."""
    last = tl.minimum(first + SIDE, rows) + at
    low = tl.minimum(first, 0)
    high = low + keys
    if CAUSAL:
        high = tl.minimum(last, keys)
    elif WINDOW:
        high = tl.minimum(last + window - 1, keys)
    if WINDOW:
        low = tl.maximum(first + at - window + 1, 0)
    return low // SIDE * SIDE, tl.maximum((high + SIDE - 1) // SIDE * SIDE, 0)


@triton.jit
def _rows_of(first, rows, keys, at, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Rows of the tiles that see some key of [first, first + SIDE): first and behind the last,
    multiples of SIDE."""
    last = tl.minimum(first + SIDE, keys) - 1
    low = tl.minimum(first, 0)
    high = low + rows
    reach = first - at  # the first row that stands at or behind the block's first key
    if WINDOW and not CAUSAL:
        reach -= window - 1
    if CAUSAL or WINDOW:
        low = tl.maximum(reach, 0)
    if WINDOW:
        high = tl.minimum(last - at + window, high)
    high = tl.where(low < rows, high, 0)
    return low // SIDE * SIDE, tl.maximum((high + SIDE - 1) // SIDE * SIDE, 0)


@triton.jit
def _hidden(row, key, rows, keys, at, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which of (row, key) is not seen."""
    out = (row >= rows) | (key >= keys)
    if CAUSAL:
        out = out | (key > row + at)
    if WINDOW:
        out = out | (tl.abs(key - row - at) >= window)
    return out


# ---- products


@triton.jit
def _across(
    acc,
    a,
    b,
    row,
    col,
    rows,
    cols,
    a_step,
    b_step,
    width,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    BY: tl.constexpr,
):
    """acc + a b^T over the width; rows of both that are not there count as zeros. EVEN: the width
    is a multiple of STEP."""
    r = tl.arange(0, STEP)
    a += row[:, None] * a_step + r[None, :]
    b += col[:, None] * b_step + r[None, :]
    for at in range(0, width, STEP):
        some_a = (row < rows)[:, None]
        some_b = (col < cols)[:, None]
        if not EVEN:
            some_a = some_a & (r < width - at)[None, :]
            some_b = some_b & (r < width - at)[None, :]
        acc = tl.dot(
            tl.load(a, mask=some_a, other=0.0),
            tl.trans(tl.load(b, mask=some_b, other=0.0)),
            acc,
            input_precision=BY,
        )
        a += STEP
        b += STEP
    return acc


@triton.jit
def scores(
    q,
    k,
    s,
    heads,
    group,
    rows,
    keys,
    width,
    at,
    window,
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    s_h,
    s_n,
    row_tiles,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    BY: tl.constexpr,
):
    """Tiles of q k^T that are seen, float32."""
    z = tl.program_id(1)
    b, h = (
        (z // heads).to(tl.int64),
        (z % heads).to(tl.int64),
    )  # a sequence may have more than 2^31 numbers
    first = tl.program_id(0) % row_tiles * SIDE
    start = tl.program_id(0) // row_tiles * COLUMNS
    low, high = _keys_of(first, rows, keys, at, window, CAUSAL, WINDOW)
    if start < high and start + COLUMNS > low:
        i, j = tl.arange(0, SIDE), tl.arange(0, COLUMNS)
        acc = tl.zeros([SIDE, COLUMNS], tl.float32)
        q += b * q_b + h * q_h + first.to(tl.int64) * q_n
        k += b * k_b + h // group * k_h + start.to(tl.int64) * k_n
        acc = _across(acc, q, k, i, j, rows - first, keys - start, q_n, k_n, width, STEP, EVEN, BY)
        s += z.to(tl.int64) * s_h + first.to(tl.int64) * s_n + start
        tl.store(s + i[:, None] * s_n + j[None, :], acc, mask=(start + j < s_n)[None, :])


@triton.jit
def soften(
    s, p, lse, scale, rows, keys, at, window, s_h, s_n, p_h, p_n, lse_h,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """p = softmax(scale s) of one row over the tiles it lies in, zeros where it is hidden; lse =
    log sum exp(scale s)."""
    row, z = tl.program_id(0), tl.program_id(1).to(tl.int64)
    low, high = _keys_of(row // SIDE * SIDE, rows, keys, at, window, CAUSAL, WINDOW)
    s += z * s_h + row.to(tl.int64) * s_n
    p += z * p_h + row.to(tl.int64) * p_n
    c = low + tl.arange(0, BLOCK)
    steep = scale * LOG2E
    if ONE:
        hidden = _hidden(row, c, rows, keys, at, window, CAUSAL, WINDOW) | (c >= high)
        x = tl.where(hidden, -float("inf"), tl.load(s + c, mask=c < high, other=0.0) * steep)
        top = tl.maximum(tl.max(x, 0), -1e30)  # rows that are padding see nothing
        e = tl.exp2(x - top)
        total = tl.sum(e, 0)
        tl.store(p + c, (e / tl.maximum(total, 1e-30)).to(p.dtype.element_ty), mask=c < high)
    else:
        tops = tl.full([BLOCK], -1e30, tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        for _ in range(low, high, BLOCK):
            hidden = _hidden(row, c, rows, keys, at, window, CAUSAL, WINDOW) | (c >= high)
            x = tl.where(hidden, -float("inf"), tl.load(s + c, mask=c < high, other=0.0) * steep)
            higher = tl.maximum(tops, x)
            sums = sums * tl.exp2(tl.maximum(tops - higher, -999.0)) + tl.exp2(x - higher)
            tops = higher
            c += BLOCK
        top = tl.max(tops, 0)
        total = tl.sum(sums * tl.exp2(tl.maximum(tops - top, -999.0)), 0)
        part = 1.0 / tl.maximum(total, 1e-30)
        c = low + tl.arange(0, BLOCK)
        for _ in range(low, high, BLOCK):
            hidden = _hidden(row, c, rows, keys, at, window, CAUSAL, WINDOW) | (c >= high)
            x = tl.where(hidden, -float("inf"), tl.load(s + c, mask=c < high, other=0.0) * steep)
            tl.store(p + c, (tl.exp2(x - top) * part).to(p.dtype.element_ty), mask=c < high)
            c += BLOCK
    if row < rows:
        tl.store(lse + z * lse_h + row, (top + tl.log2(total)) / LOG2E)


@triton.jit
def slopes(
    q,
    k,
    v,
    g,
    p,
    ds,
    lse,
    delta,
    scale,
    heads,
    group,
    rows,
    keys,
    rank,
    width,
    at,
    window,
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    g_b,
    g_h,
    g_n,
    p_h,
    p_n,
    ds_h,
    ds_n,
    lse_h,
    row_tiles,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    KEPT: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    EVEN_R: tl.constexpr,
    EVEN_V: tl.constexpr,
    BY: tl.constexpr,
):
    """Tiles of ds = p (g v^T - delta) scale; p is there (KEPT), or made from q k^T and written
    too."""
    z = tl.program_id(1)
    b, h = (z // heads).to(tl.int64), (z % heads).to(tl.int64)
    first = tl.program_id(0) % row_tiles * SIDE
    start = tl.program_id(0) // row_tiles * COLUMNS
    low, high = _keys_of(first, rows, keys, at, window, CAUSAL, WINDOW)
    if start < high and start + COLUMNS > low:
        i, j = tl.arange(0, SIDE), tl.arange(0, COLUMNS)
        n, m = rows - first, keys - start
        p_at = (
            p
            + z.to(tl.int64) * p_h
            + first.to(tl.int64) * p_n
            + start
            + i[:, None] * p_n
            + j[None, :]
        )
        ds_at = (
            ds
            + z.to(tl.int64) * ds_h
            + first.to(tl.int64) * ds_n
            + start
            + i[:, None] * ds_n
            + j[None, :]
        )
        inside = (start + j < ds_n)[None, :]
        kept = z.to(tl.int64) * lse_h + first + i
        g += b * g_b + h * g_h + first.to(tl.int64) * g_n
        v += b * v_b + h // group * v_h + start.to(tl.int64) * v_n
        acc = tl.zeros([SIDE, COLUMNS], tl.float32)
        if KEPT:
            acc = _across(acc, g, v, i, j, n, m, g_n, v_n, width, STEP, EVEN_V, BY)
            e = tl.load(p_at, mask=inside, other=0.0).to(tl.float32)
        else:
            q += b * q_b + h * q_h + first.to(tl.int64) * q_n
            k += b * k_b + h // group * k_h + start.to(tl.int64) * k_n
            acc = _across(acc, q, k, i, j, n, m, q_n, k_n, rank, STEP, EVEN_R, BY)
            sums = tl.load(lse + kept, mask=i < n, other=0.0)
            hidden = _hidden(
                (first + i)[:, None], (start + j)[None, :], rows, keys, at, window, CAUSAL, WINDOW
            )
            e = tl.exp2(
                tl.where(hidden, -float("inf"), acc * (scale * LOG2E) - (sums * LOG2E)[:, None])
            )
            tl.store(p_at, e.to(p.dtype.element_ty), mask=inside)
            acc = _across(
                tl.zeros([SIDE, COLUMNS], tl.float32),
                g,
                v,
                i,
                j,
                n,
                m,
                g_n,
                v_n,
                width,
                STEP,
                EVEN_V,
                BY,
            )
        less = tl.load(delta + kept, mask=i < n, other=0.0)
        tl.store(ds_at, (e * (acc - less[:, None]) * scale).to(ds.dtype.element_ty), mask=inside)


@triton.jit
def weighted(
    a,
    b,
    out,
    heads,
    group,
    rows,
    keys,
    width,
    at,
    window,
    a_h,
    a_n,
    b_b,
    b_h,
    b_n,
    out_b,
    out_h,
    out_n,
    row_tiles,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    ADD: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    BY: tl.constexpr,
):
    """a b for a table a: what its rows make of keys or values; added to what is there (ADD), or
    instead of it."""
    z = tl.program_id(1)
    n, h = (z // heads).to(tl.int64), (z % heads).to(tl.int64)
    first = (row_tiles - 1 - tl.program_id(0) % row_tiles) * SIDE  # the longest sums first
    start = tl.program_id(0) // row_tiles * COLUMNS
    low, high = _keys_of(first, rows, keys, at, window, CAUSAL, WINDOW)
    i, j, r = tl.arange(0, SIDE), start + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    a += z.to(tl.int64) * a_h + first.to(tl.int64) * a_n + low + i[:, None] * a_n + r[None, :]
    b += n * b_b + h // group * b_h + low.to(tl.int64) * b_n + r[:, None] * b_n + j[None, :]
    acc = tl.zeros([SIDE, COLUMNS], tl.float32)
    for key in range(low, high, STEP):
        some = (j < width)[None, :]
        if not EVEN:
            some = some & (r < keys - key)[:, None]
        acc = tl.dot(tl.load(a), tl.load(b, mask=some, other=0.0), acc, input_precision=BY)
        a += STEP
        b += STEP * b_n
    out += n * out_b + h * out_h + first.to(tl.int64) * out_n + i[:, None] * out_n + j[None, :]
    there = (first + i < rows)[:, None] & (j < width)[None, :]
    if ADD:
        acc += tl.load(out, mask=there, other=0.0)
    tl.store(out, acc.to(out.dtype.element_ty), mask=there)


@triton.jit
def collected(
    ds,
    q,
    dk,
    p,
    g,
    dv,
    heads,
    group,
    rows,
    keys,
    rank,
    width,
    at,
    window,
    ds_b,
    ds_h,
    ds_n,
    q_b,
    q_h,
    q_n,
    dk_b,
    dk_h,
    dk_n,
    p_b,
    p_h,
    p_n,
    g_b,
    g_h,
    g_n,
    dv_b,
    dv_h,
    dv_n,
    key_tiles,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    BY: tl.constexpr,
):
    """dk = ds^T q, and for the second half of the grid dv = p^T g, over the rows of all heads that
    share keys."""
    z = tl.program_id(1)
    kv = heads // group
    n, one, h = (z // kv).to(tl.int64), (z % kv).to(tl.int64), z % kv * group
    first = tl.program_id(0) % key_tiles * SIDE
    start = tl.program_id(0) // key_tiles * COLUMNS
    a = ds + n * ds_b
    b = q + n * q_b
    out = dk + n * dk_b + one * dk_h
    second = tl.program_id(2) == 1
    a_h, a_n, b_h, b_n = (
        tl.where(second, p_h, ds_h),
        tl.where(second, p_n, ds_n),
        tl.where(second, g_h, q_h),
        tl.where(second, g_n, q_n),
    )
    out_n, wide = tl.where(second, dv_n, dk_n), tl.where(second, width, rank)
    if second:
        a = p + n * p_b
        b = g + n * g_b
        out = dv + n * dv_b + one * dv_h
    if start < wide:
        low, high = _rows_of(first, rows, keys, at, window, CAUSAL, WINDOW)
        i, j, r = tl.arange(0, SIDE), start + tl.arange(0, COLUMNS), tl.arange(0, STEP)
        acc = tl.zeros([SIDE, COLUMNS], tl.float32)
        steps = tl.maximum(high - low, 0) // STEP
        for step in range(0, group * steps):
            head = h + step // steps
            row = low + step % steps * STEP
            some = (j < wide)[None, :]
            if not EVEN:
                some = some & (r < rows - row)[:, None]
            x = tl.load(
                a
                + first
                + head.to(tl.int64) * a_h
                + row.to(tl.int64) * a_n
                + r[:, None] * a_n
                + i[None, :]
            )
            y = tl.load(
                b
                + head.to(tl.int64) * b_h
                + row.to(tl.int64) * b_n
                + r[:, None] * b_n
                + j[None, :],
                mask=some,
                other=0.0,
            )
            acc = tl.dot(tl.trans(x), y, acc, input_precision=BY)
        place = out + first.to(tl.int64) * out_n + i[:, None] * out_n + j[None, :]
        tl.store(
            place,
            acc.to(out.dtype.element_ty),
            mask=(first + i < keys)[:, None] & (j < wide)[None, :],
        )


@triton.jit
def dots(a, b, out, heads, rows, width, a_b, a_h, a_n, b_b, b_h, b_n, out_h, BLOCK: tl.constexpr):
    """The inner product of each row of a with that of b."""
    row, z = tl.program_id(0) % rows, tl.program_id(0) // rows
    n, h = (z // heads).to(tl.int64), (z % heads).to(tl.int64)
    a += n * a_b + h * a_h + row.to(tl.int64) * a_n
    b += n * b_b + h * b_h + row.to(tl.int64) * b_n
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        c = first + tl.arange(0, BLOCK)
        sums += tl.load(a + c, mask=c < width, other=0.0).to(tl.float32) * tl.load(
            b + c, mask=c < width, other=0.0
        ).to(tl.float32)
    tl.store(out + z.to(tl.int64) * out_h + row, tl.sum(sums, 0))


# ---- launching


Again = Callable[..., None]


class Launcher:
    """A kernel; launched, it gives what launches it again with the same numbers on other
    tensors."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[Any, ...],
        way: Way,
        **constants: Any,
    ) -> Again:
        """`constants` in the order of the kernel's own."""
        found = self.kernel[grid](
            *tensors, *numbers, **constants, num_warps=way.warps, num_stages=way.stages
        )
        run, rest = (
            (self.kernel if found is None else found)[grid],
            (*numbers, *constants.values()),
        )  # the interpreter gives nothing
        return lambda *others: run(*others, *rest)


_scores, _soften, _slopes, _weighted, _collected, _dots = map(
    Launcher, (scores, soften, slopes, weighted, collected, dots)
)
_known: dict[
    Any, tuple[Again, ...]
] = {}  # by all that they depend on: to look at every argument anew takes longer than short calls


def _keep(key: Any, *launches: Again) -> None:
    """For the next time; what was kept first gives way."""
    if len(_known) >= 1024:
        _known.pop(next(iter(_known)), None)
    _known[key] = launches


def _kind(first: Tensor, *others: Tensor) -> tuple[Any, ...]:
    """All of tensors that a launch depends on: types and device are the first one's, sizes beyond
    its own follow from the pass."""
    return (
        first.shape,
        first.dtype,
        first.device,
        _by(first),
        *[(t.stride(), t.data_ptr() % 16) for t in (first, *others)],
    )


def _heads(t: Tensor) -> tuple[int, ...]:
    return t.stride()[:3]


def _way(t: Tensor, half: Way = HALF) -> Way:
    return SINGLE if t.dtype == torch.float32 else half


def _tiling(seen: Seen, way: Way) -> dict[str, Any]:
    return {
        "CAUSAL": seen.causal,
        "WINDOW": seen.window > 0,
        "COLUMNS": way.columns,
        "STEP": way.step,
    }


def _by(t: Tensor) -> str:
    """How operands are multiplied: float32 as torch is told to, the others know only one way."""
    return "tf32" if t.dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def make_scores(q: Tensor, k: Tensor, s: Tensor, seen: Seen) -> Again:
    """Scores (batch, heads, rows, keys), float32, of q (batch, heads, rows, rank) and k (batch, KV
    heads, keys, rank)."""
    (B, H, _, R), tiles, way = q.shape, seen.tall // SQUARE, _way(q)
    numbers = (
        H,
        H // k.shape[1],
        seen.rows,
        seen.keys,
        R,
        seen.at,
        seen.window,
        *_heads(q),
        *_heads(k),
        s.stride(1),
        s.stride(2),
        tiles,
    )
    grid = (tiles * -(-seen.long // way.columns), B * H, 1)
    return _scores(
        grid, (q, k, s), numbers, way, **_tiling(seen, way), EVEN=R % way.step == 0, BY=_by(q)
    )


def soften_scores(s: Tensor, p: Tensor, lse: Tensor, scale: float, seen: Seen) -> Again:
    """p and lse (batch, heads, rows) from scores."""
    longest = (
        min(seen.long, padded(seen.window * (1 if seen.causal else 2) + 3 * SQUARE))
        if seen.window
        else seen.long
    )
    block = min(MOST, triton.next_power_of_2(longest))
    numbers = (
        scale,
        seen.rows,
        seen.keys,
        seen.at,
        seen.window,
        s.stride(1),
        s.stride(2),
        p.stride(1),
        p.stride(2),
        lse.stride(1),
    )
    return _soften(
        (seen.tall, lse.shape[0] * lse.shape[1], 1),
        (s, p, lse),
        numbers,
        Way(0, 0, max(1, min(8, block // 512)), 3),
        CAUSAL=seen.causal,
        WINDOW=seen.window > 0,
        BLOCK=block,
        ONE=longest <= block,
    )


def make_slopes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    p: Tensor,
    ds: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    seen: Seen,
    kept: bool,
) -> Again:
    """ds, and p unless it is kept, from the queries, keys and values and the gradients g of the
    outputs."""
    (B, H, _, R), V, tiles, way = (
        q.shape,
        v.shape[3],
        seen.tall // SQUARE,
        _way(q, HALF if kept else AGAIN),
    )
    numbers = (
        scale,
        H,
        H // k.shape[1],
        seen.rows,
        seen.keys,
        R,
        V,
        seen.at,
        seen.window,
        *_heads(q),
        *_heads(k),
        *_heads(v),
        *_heads(g),
        p.stride(1),
        p.stride(2),
        ds.stride(1),
        ds.stride(2),
        lse.stride(1),
        tiles,
    )
    masks = {
        "CAUSAL": seen.causal,
        "WINDOW": seen.window > 0,
        "KEPT": kept,
        "COLUMNS": way.columns,
        "STEP": way.step,
    }
    grid = (tiles * -(-seen.long // way.columns), B * H, 1)
    return _slopes(
        grid,
        (q, k, v, g, p, ds, lse, delta),
        numbers,
        way,
        **masks,
        EVEN_R=R % way.step == 0,
        EVEN_V=V % way.step == 0,
        BY=_by(q),
    )


def make_weighted(a: Tensor, b: Tensor, out: Tensor, seen: Seen, add: bool = False) -> Again:
    """out (batch, heads, rows, width) from a table and b (batch, KV heads, keys, width)."""
    (B, H, _, W), tiles, way = out.shape, seen.tall // SQUARE, _way(a)
    numbers = (
        H,
        H // b.shape[1],
        seen.rows,
        seen.keys,
        W,
        seen.at,
        seen.window,
        a.stride(1),
        a.stride(2),
        *_heads(b),
        *_heads(out),
        tiles,
    )
    return _weighted(
        (tiles * -(-W // way.columns), B * H, 1),
        (a, b, out),
        numbers,
        way,
        CAUSAL=seen.causal,
        WINDOW=seen.window > 0,
        ADD=add,
        COLUMNS=way.columns,
        STEP=way.step,
        EVEN=seen.keys % SQUARE == 0,
        BY=_by(a),
    )


def make_collected(
    ds: Tensor, q: Tensor, dk: Tensor, p: Tensor, g: Tensor, dv: Tensor, seen: Seen
) -> Again:
    """dk and dv (batch, KV heads, keys, rank or width) from the tables and q and g (batch, heads,
    rows, rank or width)."""
    (B, KV, _, R), W, H, tiles, way = (
        dk.shape,
        dv.shape[3],
        q.shape[1],
        seen.long // SQUARE,
        _way(ds),
    )
    strides = (stride for t in (ds, q, dk, p, g, dv) for stride in _heads(t))
    numbers = (H, H // KV, seen.rows, seen.keys, R, W, seen.at, seen.window, *strides, tiles)
    return _collected(
        (tiles * -(-max(R, W) // way.columns), B * KV, 2),
        (ds, q, dk, p, g, dv),
        numbers,
        way,
        **_tiling(seen, way),
        EVEN=seen.rows % SQUARE == 0,
        BY=_by(q),
    )


def make_dots(a: Tensor, b: Tensor) -> Tensor:
    """Inner products over the last axis of (batch, heads, rows, width) tensors: (batch, heads,
    rows), float32."""
    B, H, Q, W = a.shape
    out = torch.empty(B, H, Q, dtype=torch.float32, device=a.device)
    key = _kind(a, b)
    if again := _known.get(key):
        again[0](a, b, out)
        return out
    numbers = (H, Q, W, *_heads(a), *_heads(b), out.stride(1))
    _keep(
        key,
        _dots(
            (B * H * Q, 1, 1),
            (a, b, out),
            numbers,
            Way(0, 0, 4, 3),
            BLOCK=min(1024, triton.next_power_of_2(W)),
        ),
    )
    return out


# ---- both passes


def _tables(like: Tensor, count: int, batch: int, seen: Seen) -> Tensor:
    """Room for `count` tables of weights or slopes of so many sequences."""
    return like.new_empty(count * batch * like.shape[1] * seen.tall * seen.long)


def _table(room: Tensor, index: int, batch: int, heads: int, seen: Seen) -> Tensor:
    size = batch * heads * seen.tall * seen.long
    return room[index * size : (index + 1) * size].view(batch, heads, seen.tall, seen.long)


def ahead(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    p: Tensor | None,
    scale: float,
    seen: Seen,
    work: int,
) -> None:
    """The forward pass into o, lse and, where there is room for it, p; with temporary memory of
    about `work` bytes."""
    (B, H, Q, _), q, k, v = q.shape, straight(q), straight(k), straight(v)
    row = H * seen.long * (4 if p is not None else 4 + q.itemsize)
    most = work // (row * seen.tall)
    if most >= B:
        _ahead(q, k, v, o, lse, p, scale, seen)
        return
    rows = Q if most else max(1, work // row // SQUARE) * SQUARE
    for at in pieces(B, most):
        for first in range(0, Q, rows):
            some = (at, slice(None), slice(first, min(first + rows, Q)))
            weights = None if p is None else p[at, :, first:]
            _ahead(
                q[some],
                k[at],
                v[at],
                o[some],
                lse[some],
                weights,
                scale,
                seen.below(first, min(first + rows, Q)),
            )


def _ahead(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    p: Tensor | None,
    scale: float,
    seen: Seen,
) -> None:
    B, H = q.shape[:2]
    s = torch.empty(B, H, seen.tall, seen.long, dtype=torch.float32, device=q.device)
    p = q.new_empty(B, H, seen.tall, seen.long) if p is None else p
    key = (scale, seen, k.shape[1], v.shape[3], _kind(q, k, v, o, lse, p))
    if again := _known.get(key):
        again[0](q, k, s)
        again[1](s, p, lse)
        again[2](p, v, o)
        return
    _keep(
        key,
        make_scores(q, k, s, seen),
        soften_scores(s, p, lse, scale, seen),
        make_weighted(p, v, o, seen),
    )


def back(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    p: Tensor | None,
    scale: float,
    seen: Seen,
    work: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    g, q, k, v = (straight(t) for t in (g, q, k, v))
    (B, H), delta, matrices = q.shape[:2], make_dots(g, o), 2 if p is None else 1
    column = H * seen.tall * q.itemsize * matrices
    most = work // (column * seen.long)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    if not most:
        total = _back_by_keys(
            g,
            q,
            k,
            v,
            delta,
            lse,
            p,
            dk,
            dv,
            scale,
            seen,
            max(1, work // column // SQUARE) * SQUARE,
        )
        return torch.empty_like(q).copy_(total), dk, dv
    parts = pieces(B, most)
    dq, room = (
        torch.empty_like(q),
        _tables(q, matrices, parts[0].stop if parts else 0, seen),
    )  # one for all pieces
    for at in parts:
        size = at.stop - at.start
        q_, k_, v_, g_, lse_, delta_, dq_, dk_, dv_ = (
            t if size == B else t[at] for t in (q, k, v, g, lse, delta, dq, dk, dv)
        )
        weights = _table(room, 1, size, H, seen) if p is None else p if size == B else p[at]
        ds = _table(room, 0, size, H, seen)
        _back(q_, k_, v_, g_, lse_, delta_, dq_, dk_, dv_, weights, ds, scale, seen, p is not None)
    return dq, dk, dv


def _back(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    p: Tensor,
    ds: Tensor,
    scale: float,
    seen: Seen,
    kept: bool,
    add: bool = False,
) -> None:
    key = (
        scale,
        seen,
        kept,
        add,
        k.shape[1],
        v.shape[3],
        _kind(q, k, v, g, lse, delta, dq, dk, dv, p, ds),
    )
    if again := _known.get(key):
        again[0](q, k, v, g, p, ds, lse, delta)
        again[1](ds, k, dq)
        again[2](ds, q, dk, p, g, dv)
        return
    slopes = make_slopes(q, k, v, g, p, ds, lse, delta, scale, seen, kept)
    _keep(
        key, slopes, make_weighted(ds, k, dq, seen, add), make_collected(ds, q, dk, p, g, dv, seen)
    )


def _back_by_keys(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    lse: Tensor,
    p: Tensor | None,
    dk: Tensor,
    dv: Tensor,
    scale: float,
    seen: Seen,
    chunk: int,
) -> Tensor:
    """A sequence and a chunk of keys at a time: the gradients of these are whole; those of queries,
    returned, are added up in float32."""
    B, H, Q, R = q.shape
    room = _tables(q, 2 if p is None else 1, 1, Seen(Q, min(chunk, seen.keys), 0, False, 0))
    total = torch.zeros(B, H, Q, R, dtype=torch.float32, device=q.device)
    for n in range(B):
        one = slice(n, n + 1)
        for start in range(0, seen.keys, chunk):
            stop = min(start + chunk, seen.keys)
            first, last = seen.rows_of(start, stop)
            if last <= first:
                dk[one, :, start:stop] = dv[one, :, start:stop] = 0
                continue
            here = Seen(
                last - first, stop - start, seen.at + first - start, seen.causal, seen.window
            )
            rows, keys = (
                (one, slice(None), slice(first, last)),
                (one, slice(None), slice(start, stop)),
            )
            weights = _table(room, 1, 1, H, here) if p is None else p[one, :, first:, start:]
            _back(
                q[rows],
                k[keys],
                v[keys],
                g[rows],
                lse[rows],
                delta[rows],
                total[rows],
                dk[keys],
                dv[keys],
                weights,
                _table(room, 0, 1, H, here),
                scale,
                here,
                p is not None,
                add=True,
            )
    return total
