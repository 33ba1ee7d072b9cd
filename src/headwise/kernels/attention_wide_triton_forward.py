"""Attention of large rank in Triton: the kernels of the forward pass, and what all kernels share.

Weights p and their scores' gradients ds lie in tables (batch, head, row, column) of SIDE x SIDE
tiles, rows and columns padded to whole tiles. A tile that is seen at all is written whole, zeros
where it is hidden, so that products of tables need no mask. A program computes one tile of its
result; `add_product` and the loops of the kernels sum over what is seen, in float32.

Operands are (batch, head, token, width) with any strides but the last, which is 1. Arguments: x_b,
x_h and x_n are the strides of x over batch, heads and tokens; `rows` queries, of which the first
stands at key `offset`, see `keys` keys; `group` heads share keys; EVEN says that a sum is a
multiple of STEP long, so that its loads need no mask; PRECISION is how float32 is multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.kernels.attention_wide_span import TILE

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
SIDE: tl.constexpr = tl.constexpr(TILE)


# ---- what a block of queries sees, and what sees a block of keys


@triton.jit
def keys_of(first, rows, keys, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Columns of the tiles that some row of [first, first + SIDE) sees: first and behind the last,
    multiples of SIDE."""
    # `first` is at least 0, so minimum(first, 0) is a zero, as a tensor: `low` keeps its type.
    last = tl.minimum(first + SIDE, rows) + offset
    low = tl.minimum(first, 0)
    high = low + keys
    if CAUSAL:
        high = tl.minimum(last, keys)
    elif WINDOW:
        high = tl.minimum(last + window - 1, keys)
    if WINDOW:
        low = tl.maximum(first + offset - window + 1, 0)
    return low // SIDE * SIDE, tl.maximum((high + SIDE - 1) // SIDE * SIDE, 0)


@triton.jit
def queries_of(first, rows, keys, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Rows of the tiles that see some key of [first, first + SIDE): first and behind the last,
    multiples of SIDE."""
    last = tl.minimum(first + SIDE, keys) - 1
    low = tl.minimum(first, 0)
    high = low + rows
    reach = first - offset  # the first row at or behind the block's first key
    if WINDOW and not CAUSAL:
        reach -= window - 1
    if CAUSAL or WINDOW:
        low = tl.maximum(reach, 0)
    if WINDOW:
        high = tl.minimum(last - offset + window, high)
    high = tl.where(low < rows, high, 0)
    return low // SIDE * SIDE, tl.maximum((high + SIDE - 1) // SIDE * SIDE, 0)


@triton.jit
def hidden_in(row, key, rows, keys, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which of (row, key) is not seen."""
    out = (row >= rows) | (key >= keys)
    if CAUSAL:
        out = out | (key > row + offset)
    if WINDOW:
        out = out | (tl.abs(key - row - offset) >= window)
    return out


# ---- products


@triton.jit
def add_product(
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
    PRECISION: tl.constexpr,
):
    """acc + a b^T over the width; rows of both that are not there count as zeros. EVEN: the width
    is a multiple of STEP."""
    # STEP columns of both operands at a time.
    r = tl.arange(0, STEP)
    a += row[:, None] * a_step + r[None, :]
    b += col[:, None] * b_step + r[None, :]
    for done in range(0, width, STEP):
        a_inside = (row < rows)[:, None]
        b_inside = (col < cols)[:, None]
        if not EVEN:
            a_inside = a_inside & (r < width - done)[None, :]
            b_inside = b_inside & (r < width - done)[None, :]
        acc = tl.dot(
            tl.load(a, mask=a_inside, other=0.0),
            tl.trans(tl.load(b, mask=b_inside, other=0.0)),
            acc,
            input_precision=PRECISION,
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
    offset,
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
    PRECISION: tl.constexpr,
):
    """Tiles of q k^T that are seen, float32."""
    # The head of a sequence, and the tile's first query and key.
    z = tl.program_id(1)
    b = (z // heads).to(tl.int64)  # 64 bits: a sequence may have more than 2^31 numbers
    h = (z % heads).to(tl.int64)
    first = tl.program_id(0) % row_tiles * SIDE
    start = tl.program_id(0) // row_tiles * COLUMNS
    low, high = keys_of(first, rows, keys, offset, window, CAUSAL, WINDOW)
    # Tiles that no query sees are not made.
    if start < high and start + COLUMNS > low:
        i, j = tl.arange(0, SIDE), tl.arange(0, COLUMNS)
        acc = tl.zeros([SIDE, COLUMNS], tl.float32)
        q += b * q_b + h * q_h + first.to(tl.int64) * q_n
        k += b * k_b + h // group * k_h + start.to(tl.int64) * k_n
        acc = add_product(
            acc, q, k, i, j, rows - first, keys - start, q_n, k_n, width, STEP, EVEN, PRECISION
        )
        s += z.to(tl.int64) * s_h + first.to(tl.int64) * s_n + start
        tl.store(s + i[:, None] * s_n + j[None, :], acc, mask=(start + j < s_n)[None, :])


@triton.jit
def softmax_rows(
    s, p, lse, scale, rows, keys, offset, window, s_h, s_n, p_h, p_n, lse_h,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """p = softmax(scale s) of one row over the tiles it lies in, zeros where it is hidden; lse =
    log sum exp(scale s)."""
    # A program per row, over the tiles that its block of queries sees.
    row, z = tl.program_id(0), tl.program_id(1).to(tl.int64)
    low, high = keys_of(row // SIDE * SIDE, rows, keys, offset, window, CAUSAL, WINDOW)
    s += z * s_h + row.to(tl.int64) * s_n
    p += z * p_h + row.to(tl.int64) * p_n
    c = low + tl.arange(0, BLOCK)
    steep = scale * LOG2E
    # The whole row at once.
    if ONE:
        hidden = hidden_in(row, c, rows, keys, offset, window, CAUSAL, WINDOW) | (c >= high)
        x = tl.where(hidden, -float("inf"), tl.load(s + c, mask=c < high, other=0.0) * steep)
        top = tl.maximum(tl.max(x, 0), -1e30)  # rows that are padding see nothing
        e = tl.exp2(x - top)
        total = tl.sum(e, 0)
        tl.store(p + c, (e / tl.maximum(total, 1e-30)).to(p.dtype.element_ty), mask=c < high)
    else:
        # A long row in blocks, read twice: first a maximum and a sum for each lane, put together at
        # the end, then the weights.
        tops = tl.full([BLOCK], -1e30, tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        for _ in range(low, high, BLOCK):
            hidden = hidden_in(row, c, rows, keys, offset, window, CAUSAL, WINDOW) | (c >= high)
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
            hidden = hidden_in(row, c, rows, keys, offset, window, CAUSAL, WINDOW) | (c >= high)
            x = tl.where(hidden, -float("inf"), tl.load(s + c, mask=c < high, other=0.0) * steep)
            tl.store(p + c, (tl.exp2(x - top) * part).to(p.dtype.element_ty), mask=c < high)
            c += BLOCK
    if row < rows:
        tl.store(lse + z * lse_h + row, (top + tl.log2(total)) / LOG2E)


@triton.jit
def weighted_sums(
    a,
    b,
    out,
    heads,
    group,
    rows,
    keys,
    width,
    offset,
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
    PRECISION: tl.constexpr,
):
    """a b for a table a: what its rows make of keys or values; added to what is there (ADD), or
    instead of it."""
    # The head of a sequence, and the tile's first row and column.
    z = tl.program_id(1)
    n, h = (z // heads).to(tl.int64), (z % heads).to(tl.int64)
    first = (row_tiles - 1 - tl.program_id(0) % row_tiles) * SIDE  # the longest sums first
    start = tl.program_id(0) // row_tiles * COLUMNS
    low, high = keys_of(first, rows, keys, offset, window, CAUSAL, WINDOW)
    i, j, r = tl.arange(0, SIDE), start + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    # The table's tiles need no mask; rows of b beyond the last key do.
    a += z.to(tl.int64) * a_h + first.to(tl.int64) * a_n + low + i[:, None] * a_n + r[None, :]
    b += n * b_b + h // group * b_h + low.to(tl.int64) * b_n + r[:, None] * b_n + j[None, :]
    acc = tl.zeros([SIDE, COLUMNS], tl.float32)
    for key in range(low, high, STEP):
        inside = (j < width)[None, :]
        if not EVEN:
            inside = inside & (r < keys - key)[:, None]
        acc = tl.dot(tl.load(a), tl.load(b, mask=inside, other=0.0), acc, input_precision=PRECISION)
        a += STEP
        b += STEP * b_n
    out += n * out_b + h * out_h + first.to(tl.int64) * out_n + i[:, None] * out_n + j[None, :]
    there = (first + i < rows)[:, None] & (j < width)[None, :]
    if ADD:
        acc += tl.load(out, mask=there, other=0.0)
    tl.store(out, acc.to(out.dtype.element_ty), mask=there)
