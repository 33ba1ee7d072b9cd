"""Attention over at most 16 tokens at rank 1 and 2, in Triton: a thread owns one head of one
sequence.

A program takes BLOCK heads of a sequence. Their keys and values stay in registers; queries come one
after the other, the next one loaded while this one is worked on, and see the whole softmax at once.
Heads are innermost in memory, so that neighbouring threads load neighbouring numbers. There are no
matrix products, hence no tensor cores and no padding.

Arguments: q, k and v share the strides `seq` (from one sequence to the next) and `row` (from one
token to the next), the others have their own; heads lie side by side in a row, R numbers each.
N tokens of a sequence, `scale` the factor of the scores, IP how products of float32 are made.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.kernels.attention_short_triton_packs import LOG2E


@triton.jit
def _rows(ptr, row, N: tl.constexpr, seen):
    """N rows as a tuple of float32 tensors."""
    out = ()
    for j in tl.static_range(N):
        out = out + (tl.load(ptr + j * row, mask=seen, other=0.0).to(tl.float32),)
    return out


@triton.jit
def _exponents(q, ks, high, low, N: tl.constexpr, R: tl.constexpr):
    """e_j = 2^(q k_j - max), as a tuple. At rank 1 the maximum is at the largest or the smallest
    key."""
    if R == 1:
        top = tl.maximum(q * high, q * low)
        e = ()
        for j in tl.static_range(N):
            e = e + (tl.exp2(tl.sum(q * ks[j] - top, 1)),)
        return e
    else:
        s = (tl.sum(q * ks[0], 1),)
        top = s[0]
        for j in tl.static_range(1, N):
            s = s + (tl.sum(q * ks[j], 1),)
            top = tl.maximum(top, s[j])
        e = ()
        for j in tl.static_range(N):
            e = e + (tl.exp2(s[j] - top),)
        return e


@triton.jit
def _extremes(ks, N: tl.constexpr):
    """The largest and the smallest of the keys."""
    high = ks[0]
    low = ks[0]
    for j in tl.static_range(1, N):
        high = tl.maximum(high, ks[j])
        low = tl.minimum(low, ks[j])
    return high, low


@triton.jit
def lanes_forward(
    q,
    k,
    v,
    o,
    seq,
    row,
    o_seq,
    o_row,
    heads,
    scale,
    blocks,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """o of BLOCK heads of one sequence."""
    # The sequence, and this block's heads: one per thread.
    b = (tl.program_id(0) // blocks).to(tl.int64)
    h = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at = h[:, None] * R + tl.arange(0, R)[None, :]
    seen = (h < heads)[:, None]
    # Keys and values of all N tokens, in registers; queries go by.
    ks = _rows(k + b * seq + at, row, N, seen)
    vs = _rows(v + b * seq + at, row, N, seen)
    high, low = _extremes(ks, N)
    next_q = tl.load(q + b * seq + at, mask=seen, other=0.0)
    for i in range(N):
        qi = next_q.to(tl.float32) * (scale * LOG2E)
        ahead = tl.minimum(i + 1, N - 1)  # the next row is on its way while this one is worked on
        next_q = tl.load(q + b * seq + ahead * row + at, mask=seen, other=0.0)
        # The output is divided by the softmax's sum at the end, once per query.
        e = _exponents(qi, ks, high, low, N, R)
        total = e[0]
        out = e[0][:, None] * vs[0]
        for j in tl.static_range(1, N):
            total += e[j]
            out += e[j][:, None] * vs[j]
        out = out / total[:, None]
        tl.store(o + b * o_seq + i * o_row + at, out.to(o.dtype.element_ty), mask=seen)


@triton.jit
def lanes_backward(
    q,
    k,
    v,
    g,
    dq,
    dk,
    dv,
    seq,
    row,
    g_seq,
    g_row,
    d_seq,
    d_row,
    heads,
    scale,
    blocks,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dq, dk and dv of BLOCK heads of one sequence, from the gradient g of o."""
    b = (tl.program_id(0) // blocks).to(tl.int64)
    h = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at = h[:, None] * R + tl.arange(0, R)[None, :]
    seen = (h < heads)[:, None]
    ks = _rows(k + b * seq + at, row, N, seen)
    vs = _rows(v + b * seq + at, row, N, seen)
    high, low = _extremes(ks, N)
    zero = tl.zeros([BLOCK, R], tl.float32)
    # Gradients of keys and values grow in registers while queries go by.
    dks = ()
    dvs = ()
    for j in tl.static_range(N):
        dks = dks + (zero,)
        dvs = dvs + (zero,)
    next_q = tl.load(q + b * seq + at, mask=seen, other=0.0)
    next_g = tl.load(g + b * g_seq + at, mask=seen, other=0.0)
    for i in range(N):
        qi = next_q.to(tl.float32) * scale
        gi = next_g.to(tl.float32)
        ahead = tl.minimum(i + 1, N - 1)
        next_q = tl.load(q + b * seq + ahead * row + at, mask=seen, other=0.0)
        next_g = tl.load(g + b * g_seq + ahead * g_row + at, mask=seen, other=0.0)
        # The weights again, undivided: e_j and their sum.
        e = _exponents(qi * LOG2E, ks, high, low, N, R)
        total = e[0]
        out = e[0][:, None] * vs[0]
        for j in tl.static_range(1, N):
            total += e[j]
            out += e[j][:, None] * vs[j]
        inverse = 1.0 / total
        # The division goes into g once, instead of into each e_j.
        gi = gi * inverse[:, None]
        mean = tl.sum(gi * out, 1) * inverse  # sum_j p_j g.v_j = g.o, over the total once more
        dqi = tl.zeros_like(qi)
        new_dks = ()
        new_dvs = ()
        # ds_j = p_j (g.v_j - g.o).
        for j in tl.static_range(N):
            new_dvs = new_dvs + (dvs[j] + e[j][:, None] * gi,)
            ds = (e[j] * (tl.sum(gi * vs[j], 1) - mean))[:, None]
            dqi += ds * ks[j]
            new_dks = new_dks + (dks[j] + ds * qi,)
        dks = new_dks
        dvs = new_dvs
        tl.store(dq + b * d_seq + i * d_row + at, (dqi * scale).to(dq.dtype.element_ty), mask=seen)
    for j in tl.static_range(N):
        tl.store(dk + b * d_seq + j * d_row + at, dks[j].to(dk.dtype.element_ty), mask=seen)
        tl.store(dv + b * d_seq + j * d_row + at, dvs[j].to(dv.dtype.element_ty), mask=seen)
