"""Attention over 33 to 128 tokens under a causal mask, in Triton: blocks of tokens,
and of the products between blocks only those that are seen.

A program owns one head of one sequence and goes down its STEPS blocks of B tokens. Block i of
queries meets blocks 0 to i of keys, which lie in registers since their own turn; only the last of
these products has a mask. Backward the gradients of keys and values add up in registers until the
last block is done.

Arguments: q, k and v share the strides `seq` (from one sequence to the next) and `row` (from one
token to the next), the others have their own; heads lie side by side in a row, R numbers each.
N tokens of a sequence, `scale` the factor of the scores, IP how products of float32 are made.
RP columns of a block (a power of two).
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.kernels.attention_short_triton_packs import LOG2E


@triton.jit
def _climb(qt, ks, i: tl.constexpr, scale, B: tl.constexpr, IP: tl.constexpr):
    """The softmax of a block of queries over the blocks of keys up to its own, as a tuple."""
    # Scores against each block; only the block of the queries themselves has hidden keys.
    n = tl.arange(0, B)
    s = ()
    for j in tl.static_range(i + 1):
        sj = tl.dot(qt, tl.trans(ks[j]), input_precision=IP) * (scale * LOG2E)
        if j == i:
            sj = tl.where(n[:, None] >= n[None, :], sj, float("-inf"))
        s = s + (sj,)
    # The softmax runs over all blocks: one maximum, one sum, then the division.
    top = tl.max(s[0], 1)  # type: ignore[bad-index]
    for j in tl.static_range(1, i + 1):
        top = tl.maximum(top, tl.max(s[j], 1))
    e = ()
    for j in tl.static_range(i + 1):
        e = e + (tl.exp2(s[j] - top[:, None]),)
    total = tl.sum(e[0], 1)  # type: ignore[bad-index]
    for j in tl.static_range(1, i + 1):
        total += tl.sum(e[j], 1)
    p = ()
    for j in tl.static_range(i + 1):
        p = p + (e[j] / total[:, None],)
    return p


@triton.jit
def stairs_forward(
    q,
    k,
    v,
    o,
    seq,
    row,
    o_seq,
    o_row,
    scale,
    heads,
    N: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    B: tl.constexpr,
    STEPS: tl.constexpr,
    IP: tl.constexpr,
):
    """o of one head of one sequence."""
    # The sequence, and where its head begins in a row.
    b = (tl.program_id(0) // heads).to(tl.int64)
    r = tl.arange(0, RP)[None, :]
    at = b * seq + tl.program_id(0) % heads * R + r
    to = b * o_seq + tl.program_id(0) % heads * R + r
    ks = ()
    vs = ()
    for i in tl.static_range(STEPS):
        # Down one step: its keys and values stay for the steps below.
        t = i * B + tl.arange(0, B)[:, None]
        seen = (r < R) & (t < N)
        ks = ks + (tl.load(k + at + t * row, mask=seen, other=0.0),)
        vs = vs + (tl.load(v + at + t * row, mask=seen, other=0.0),)
        p = _climb(tl.load(q + at + t * row, mask=seen, other=0.0), ks, i, scale, B, IP)
        out = tl.dot(p[0].to(vs[0].dtype), vs[0], input_precision=IP)
        for j in tl.static_range(1, i + 1):
            out = tl.dot(p[j].to(vs[j].dtype), vs[j], out, input_precision=IP)
        tl.store(o + to + t * o_row, out.to(o.dtype.element_ty), mask=seen)


@triton.jit
def stairs_backward(
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
    scale,
    heads,
    N: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    B: tl.constexpr,
    STEPS: tl.constexpr,
    IP: tl.constexpr,
):
    """dq, dk and dv of one head of one sequence, from the gradient g of o."""
    b = (tl.program_id(0) // heads).to(tl.int64)
    r = tl.arange(0, RP)[None, :]
    at = b * seq + tl.program_id(0) % heads * R + r
    from_g = b * g_seq + tl.program_id(0) % heads * R + r
    to = b * d_seq + tl.program_id(0) % heads * R + r
    # One block of keys, of values and of their gradients for every step so far.
    ks = ()
    vs = ()
    dks = ()
    dvs = ()
    for i in tl.static_range(STEPS):
        t = i * B + tl.arange(0, B)[:, None]
        seen = (r < R) & (t < N)
        ks = ks + (tl.load(k + at + t * row, mask=seen, other=0.0),)
        vs = vs + (tl.load(v + at + t * row, mask=seen, other=0.0),)
        dks = dks + (tl.zeros([B, RP], tl.float32),)
        dvs = dvs + (tl.zeros([B, RP], tl.float32),)
        qt = tl.load(q + at + t * row, mask=seen, other=0.0)
        gt = tl.load(g + from_g + t * g_row, mask=seen, other=0.0)
        # dp = g v^T of each block, and delta = sum of p dp over all of them.
        p = _climb(qt, ks, i, scale, B, IP)
        dp = ()
        for j in tl.static_range(i + 1):
            dp = dp + (tl.dot(gt, tl.trans(vs[j]), input_precision=IP),)
        mean = tl.sum(p[0] * dp[0], 1)  # type: ignore[bad-index]
        for j in tl.static_range(1, i + 1):
            mean += tl.sum(p[j] * dp[j], 1)
        # ds = p (dp - delta) scale: dq is complete here, dk and dv grow until the last step.
        dqt = tl.zeros([B, RP], tl.float32)
        new_dks = ()
        new_dvs = ()
        for j in tl.static_range(i + 1):
            ds = (p[j] * (dp[j] - mean[:, None]) * scale).to(qt.dtype)
            dqt = tl.dot(ds, ks[j], dqt, input_precision=IP)
            new_dks = new_dks + (tl.dot(tl.trans(ds), qt, dks[j], input_precision=IP),)
            new_dvs = new_dvs + (
                tl.dot(tl.trans(p[j].to(gt.dtype)), gt, dvs[j], input_precision=IP),
            )
        dks = new_dks
        dvs = new_dvs
        tl.store(dq + to + t * d_row, dqt.to(dq.dtype.element_ty), mask=seen)
    for i in tl.static_range(STEPS):
        t = i * B + tl.arange(0, B)[:, None]
        seen = (r < R) & (t < N)
        tl.store(dk + to + t * d_row, dks[i].to(dk.dtype.element_ty), mask=seen)
        tl.store(dv + to + t * d_row, dvs[i].to(dv.dtype.element_ty), mask=seen)
