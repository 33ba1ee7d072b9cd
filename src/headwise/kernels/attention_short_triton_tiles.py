"""Attention over at most 256 tokens at any rank up to 64, in Triton: a few warps own a sequence and
walk over its heads.

For each of its GROUP heads a program loads all keys and values, and takes the queries in blocks of
BQ: one product for their scores, a softmax over whole rows, one product for their outputs. Backward
it makes the weights again in the same way; the gradients of keys and values add up in registers
over the blocks of queries.

Arguments: q, k and v share the strides `seq` (from one sequence to the next) and `row` (from one
token to the next), the others have their own; heads lie side by side in a row, R numbers each.
N tokens of a sequence, `scale` the factor of the scores, IP how products of float32 are made.
NP rows and RP columns of a tile (powers of two), ROWS of the rows used.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.kernels.attention_short_triton_packs import LOG2E
from headwise.kernels.shared_memory_triton import FEWER_STAGES, gives_way, smaller


@triton.jit
def _softmax(s, keys, queries, N: tl.constexpr, NP: tl.constexpr, CAUSAL: tl.constexpr):
    """Over the keys that each query of a block sees: earlier ones, or those of its own sequence."""
    if CAUSAL:
        s = tl.where(keys <= queries[:, None], s, float("-inf"))
    elif N < NP:
        s = tl.where(keys // N == queries[:, None] // N, s, float("-inf"))
    e = tl.exp2(s - tl.max(s, 1)[:, None])
    return e / tl.sum(e, 1)[:, None]


@gives_way(smaller(FEWER_STAGES, "BQ", 64, 32, 16))
@triton.jit
def tiles_forward(
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
    NP: tl.constexpr,
    ROWS: tl.constexpr,
    RP: tl.constexpr,
    BQ: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    IP: tl.constexpr,
):
    """o of GROUP heads of one sequence, or of as many sequences as make ROWS rows."""
    # The sequence, or the first of those that share a tile.
    b = (tl.program_id(0) // blocks).to(tl.int64)
    r = tl.arange(0, RP)[None, :]
    n = tl.arange(0, NP)
    keys = n[None, :]
    for g in range(GROUP):
        h = tl.program_id(0) % blocks * GROUP + g
        # A head beyond the last one has no rows.
        live = tl.where(h < heads, ROWS, 0)
        seen = (r < R) & (n < live)[:, None]
        at = b * seq + h * R + r
        # All keys and values of the head stay; blocks of queries go by.
        kt = tl.load(k + at + n[:, None] * row, mask=seen, other=0.0)
        vt = tl.load(v + at + n[:, None] * row, mask=seen, other=0.0)
        for i in range(0, NP, BQ):
            nq = i + tl.arange(0, BQ)
            some = (r < R) & (nq < live)[:, None]
            qt = tl.load(q + at + nq[:, None] * row, mask=some, other=0.0)
            s = tl.dot(qt, tl.trans(kt), input_precision=IP) * (scale * LOG2E)
            p = _softmax(s, keys, nq, N, NP, CAUSAL).to(vt.dtype)
            out = tl.dot(p, vt, input_precision=IP)
            tl.store(
                o + b * o_seq + nq[:, None] * o_row + h * R + r,
                out.to(o.dtype.element_ty),
                mask=some,
            )


@gives_way(smaller(FEWER_STAGES, "BQ", 64, 32, 16))
@triton.jit
def tiles_backward(
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
    NP: tl.constexpr,
    ROWS: tl.constexpr,
    RP: tl.constexpr,
    BQ: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    IP: tl.constexpr,
):
    """dq, dk and dv of the same, from the gradient g of o."""
    b = (tl.program_id(0) // blocks).to(tl.int64)
    r = tl.arange(0, RP)[None, :]
    n = tl.arange(0, NP)
    keys = n[None, :]
    for turn in range(GROUP):
        h = tl.program_id(0) % blocks * GROUP + turn
        live = tl.where(h < heads, ROWS, 0)
        seen = (r < R) & (n < live)[:, None]
        at = b * seq + h * R + r
        # Keys, values and their gradients stay; blocks of queries go by.
        kt = tl.load(k + at + n[:, None] * row, mask=seen, other=0.0)
        vt = tl.load(v + at + n[:, None] * row, mask=seen, other=0.0)
        dkt = tl.zeros([NP, RP], tl.float32)
        dvt = tl.zeros([NP, RP], tl.float32)
        for i in range(0, NP, BQ):
            nq = i + tl.arange(0, BQ)
            some = (r < R) & (nq < live)[:, None]
            qt = tl.load(q + at + nq[:, None] * row, mask=some, other=0.0)
            gt = tl.load(g + b * g_seq + nq[:, None] * g_row + h * R + r, mask=some, other=0.0)
            # The weights again, then ds = p (dp - sum of p dp) scale.
            s = tl.dot(qt, tl.trans(kt), input_precision=IP) * (scale * LOG2E)
            p = _softmax(s, keys, nq, N, NP, CAUSAL)
            dp = tl.dot(gt, tl.trans(vt), input_precision=IP)
            ds = p * (dp - tl.sum(p * dp, 1)[:, None]) * scale
            ds = ds.to(kt.dtype)
            dqt = tl.dot(ds, kt, input_precision=IP)
            dkt = tl.dot(tl.trans(ds), qt, dkt, input_precision=IP)
            dvt = tl.dot(tl.trans(p.to(gt.dtype)), gt, dvt, input_precision=IP)
            tl.store(
                dq + b * d_seq + nq[:, None] * d_row + h * R + r,
                dqt.to(dq.dtype.element_ty),
                mask=some,
            )
        to = b * d_seq + n[:, None] * d_row + h * R + r
        tl.store(dk + to, dkt.to(dk.dtype.element_ty), mask=seen)
        tl.store(dv + to, dvt.to(dv.dtype.element_ty), mask=seen)
