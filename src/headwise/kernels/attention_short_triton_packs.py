"""Attention over at most 16 tokens at rank 4 to 32, in Triton: heads side by side, one small
product each.

A program takes the 64 / R heads that share a line of memory (64 numbers) of one sequence, loads the
line of each token whole, and turns (tokens, heads x rank) into (heads, tokens, rank) in registers.
Then every head is one product of a batched `dot`, 16 rows high. Short sequences that lie end to end
may share those rows (ROWS of them); the softmax then hides the other sequences' keys.

Arguments: q, k and v share the strides `seq` (from one sequence to the next) and `row` (from one
token to the next), the others have their own; heads lie side by side in a row, R numbers each.
N tokens of a sequence, `scale` the factor of the scores, IP how products of float32 are made.
NP rows of a product, ROWS of them used, HEADS heads of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _pack(ptr, at, seen, HEADS: tl.constexpr, NP: tl.constexpr, R: tl.constexpr):
    """(tokens, heads x rank) from memory, whole lines at a time, as (heads, tokens, rank)."""
    x = tl.load(ptr + at, mask=seen, other=0.0)
    return tl.permute(tl.reshape(x, (NP, HEADS, R)), (1, 0, 2))


@triton.jit
def _unpack(x, HEADS: tl.constexpr, NP: tl.constexpr, R: tl.constexpr):
    """The inverse of _pack."""
    return tl.reshape(tl.permute(x, (1, 0, 2)), (NP, HEADS * R))


@triton.jit
def _fill(x, HEADS: tl.constexpr, NP: tl.constexpr, R: tl.constexpr):
    """Twice the rank, zeros between the numbers."""
    return tl.reshape(tl.join(x, tl.zeros_like(x)), (HEADS, NP, 2 * R))


@triton.jit
def inner(a, b, HEADS: tl.constexpr, NP: tl.constexpr, R: tl.constexpr, IP: tl.constexpr):
    """a b^T per head; a rank below 16 is filled up with zeros in registers to the 16 that a product
    sums over."""
    if R < 16:
        return inner(_fill(a, HEADS, NP, R), _fill(b, HEADS, NP, R), HEADS, NP, 2 * R, IP)
    else:
        return tl.dot(a, tl.permute(b, (0, 2, 1)), input_precision=IP)


@triton.jit
def softmax(s, N: tl.constexpr, NP: tl.constexpr):
    """Over the keys of a query's own N tokens, of NP that lie in one tile."""
    if N < NP:
        own = tl.arange(0, NP) // N
        s = tl.where((own[:, None] == own[None, :])[None, :, :], s, float("-inf"))
    e = tl.exp2(s - tl.max(s, 2)[:, :, None])
    return e / tl.sum(e, 2)[:, :, None]


@triton.jit
def packs_forward(
    q,
    k,
    v,
    o,
    seq,
    row,
    o_seq,
    o_row,
    width,
    scale,
    blocks,
    N: tl.constexpr,
    R: tl.constexpr,
    NP: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    IP: tl.constexpr,
):
    """o of HEADS heads of one sequence, or of as many sequences as make ROWS rows."""
    # The sequence, its heads in this line of memory, and the rows of a product.
    b = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * HEADS * R + tl.arange(0, HEADS * R)[None, :]
    n = tl.arange(0, NP)[:, None]
    seen = (c < width) & (n < ROWS)
    at = b * seq + n * row + c
    # Scores (heads, NP, NP), softmax over the query's own sequence, outputs (heads, NP, R).
    s = inner(
        _pack(q, at, seen, HEADS, NP, R), _pack(k, at, seen, HEADS, NP, R), HEADS, NP, R, IP
    ) * (scale * LOG2E)
    vt = _pack(v, at, seen, HEADS, NP, R)
    out = tl.dot(softmax(s, N, NP).to(vt.dtype), vt, input_precision=IP)
    tl.store(
        o + b * o_seq + n * o_row + c, _unpack(out.to(o.dtype.element_ty), HEADS, NP, R), mask=seen
    )


@triton.jit
def packs_backward(
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
    width,
    scale,
    blocks,
    N: tl.constexpr,
    R: tl.constexpr,
    NP: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    IP: tl.constexpr,
):
    """dq, dk and dv of the same, from the gradient g of o."""
    b = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * HEADS * R + tl.arange(0, HEADS * R)[None, :]
    n = tl.arange(0, NP)[:, None]
    seen = (c < width) & (n < ROWS)
    at = b * seq + n * row + c
    # All operands as (heads, NP, R).
    qt = _pack(q, at, seen, HEADS, NP, R)
    kt = _pack(k, at, seen, HEADS, NP, R)
    vt = _pack(v, at, seen, HEADS, NP, R)
    gt = _pack(g, b * g_seq + n * g_row + c, seen, HEADS, NP, R)
    # ds = p (dp - sum of p dp) scale, per head.
    p = softmax(inner(qt, kt, HEADS, NP, R, IP) * (scale * LOG2E), N, NP)
    dp = inner(gt, vt, HEADS, NP, R, IP)
    ds = (p * (dp - tl.sum(p * dp, 2)[:, :, None]) * scale).to(kt.dtype)
    # dq = ds k, dk = ds^T q, dv = p^T g.
    to = b * d_seq + n * d_row + c
    dqt = tl.dot(ds, kt, input_precision=IP)
    tl.store(dq + to, _unpack(dqt.to(dq.dtype.element_ty), HEADS, NP, R), mask=seen)
    dkt = tl.dot(tl.permute(ds, (0, 2, 1)), qt, input_precision=IP)
    tl.store(dk + to, _unpack(dkt.to(dk.dtype.element_ty), HEADS, NP, R), mask=seen)
    dvt = tl.dot(tl.permute(p.to(gt.dtype), (0, 2, 1)), gt, input_precision=IP)
    tl.store(dv + to, _unpack(dvt.to(dv.dtype.element_ty), HEADS, NP, R), mask=seen)
