"""Attention of large rank in Triton: the kernels of the backward pass.

    row_dots         delta = the inner product of each query's output and its gradient
    score_gradients  ds = scale p (g v^T - delta), with p kept, or from q k^T in the same tile
    weighted_sums    dq = ds k, the forward pass's kernel
    key_gradients    dk = ds^T q and dv = p^T g, summed over the heads that share keys

Tables, strides and arguments are those of attention_wide_triton_forward.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.kernels.attention_wide_triton_forward import (
    LOG2E,
    SIDE,
    add_product,
    hidden_in,
    keys_of,
    queries_of,
)


@triton.jit
def row_dots(
    a, b, out, heads, rows, width, a_b, a_h, a_n, b_b, b_h, b_n, out_h, BLOCK: tl.constexpr
):
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


@triton.jit
def score_gradients(
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
    offset,
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
    PRECISION: tl.constexpr,
):
    """Tiles of ds = p (g v^T - delta) scale; p is there (KEPT), or made from q k^T and written
    too."""
    # The head of a sequence, and the tile's first query and key.
    z = tl.program_id(1)
    b, h = (z // heads).to(tl.int64), (z % heads).to(tl.int64)
    first = tl.program_id(0) % row_tiles * SIDE
    start = tl.program_id(0) // row_tiles * COLUMNS
    low, high = keys_of(first, rows, keys, offset, window, CAUSAL, WINDOW)
    # Tiles that no query sees are not made.
    if start < high and start + COLUMNS > low:
        i, j = tl.arange(0, SIDE), tl.arange(0, COLUMNS)
        n, m = rows - first, keys - start
        # Where the tile lies in both tables, and how much of it is inside them.
        p_tile = (
            p
            + z.to(tl.int64) * p_h
            + first.to(tl.int64) * p_n
            + start
            + i[:, None] * p_n
            + j[None, :]
        )
        ds_tile = (
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
        # dp = g v^T. With p kept that is all; else p is made from q k^T and the log sum first, and
        # written for dv = p^T g.
        if KEPT:
            acc = add_product(acc, g, v, i, j, n, m, g_n, v_n, width, STEP, EVEN_V, PRECISION)
            e = tl.load(p_tile, mask=inside, other=0.0).to(tl.float32)
        else:
            q += b * q_b + h * q_h + first.to(tl.int64) * q_n
            k += b * k_b + h // group * k_h + start.to(tl.int64) * k_n
            acc = add_product(acc, q, k, i, j, n, m, q_n, k_n, rank, STEP, EVEN_R, PRECISION)
            sums = tl.load(lse + kept, mask=i < n, other=0.0)
            hidden = hidden_in(
                (first + i)[:, None],
                (start + j)[None, :],
                rows,
                keys,
                offset,
                window,
                CAUSAL,
                WINDOW,
            )
            e = tl.exp2(
                tl.where(hidden, -float("inf"), acc * (scale * LOG2E) - (sums * LOG2E)[:, None])
            )
            tl.store(p_tile, e.to(p.dtype.element_ty), mask=inside)
            acc = add_product(
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
                PRECISION,
            )
        less = tl.load(delta + kept, mask=i < n, other=0.0)
        tl.store(ds_tile, (e * (acc - less[:, None]) * scale).to(ds.dtype.element_ty), mask=inside)


@triton.jit
def key_gradients(
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
    offset,
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
    PRECISION: tl.constexpr,
):
    """dk = ds^T q, and for the second half of the grid dv = p^T g, over the rows of all heads that
    share keys."""
    # A KV head of a sequence, the first of its query heads, and the tile's first key and column.
    z = tl.program_id(1)
    kv = heads // group
    n, one, h = (z // kv).to(tl.int64), (z % kv).to(tl.int64), z % kv * group
    first = tl.program_id(0) % key_tiles * SIDE
    start = tl.program_id(0) // key_tiles * COLUMNS
    # The third axis of the grid chooses the result: its table a, its operand b, its output and
    # their strides.
    a = ds + n * ds_b
    b = q + n * q_b
    out = dk + n * dk_b + one * dk_h
    second = tl.program_id(2) == 1
    a_h = tl.where(second, p_h, ds_h)
    a_n = tl.where(second, p_n, ds_n)
    b_h = tl.where(second, g_h, q_h)
    b_n = tl.where(second, g_n, q_n)
    out_n = tl.where(second, dv_n, dk_n)
    wide = tl.where(second, width, rank)
    if second:
        a = p + n * p_b
        b = g + n * g_b
        out = dv + n * dv_b + one * dv_h
    # Queries that see these keys, over all heads of the group: one loop of `group` x steps.
    if start < wide:
        low, high = queries_of(first, rows, keys, offset, window, CAUSAL, WINDOW)
        i, j, r = tl.arange(0, SIDE), start + tl.arange(0, COLUMNS), tl.arange(0, STEP)
        acc = tl.zeros([SIDE, COLUMNS], tl.float32)
        steps = tl.maximum(high - low, 0) // STEP
        for step in range(0, group * steps):
            head = h + step // steps
            row = low + step % steps * STEP
            inside = (j < wide)[None, :]
            if not EVEN:
                inside = inside & (r < rows - row)[:, None]
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
                mask=inside,
                other=0.0,
            )
            acc = tl.dot(tl.trans(x), y, acc, input_precision=PRECISION)
        place = out + first.to(tl.int64) * out_n + i[:, None] * out_n + j[None, :]
        tl.store(
            place,
            acc.to(out.dtype.element_ty),
            mask=(first + i < keys)[:, None] & (j < wide)[None, :],
        )
