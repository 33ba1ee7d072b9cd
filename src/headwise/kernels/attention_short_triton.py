"""Attention over short sequences on a GPU: every head whole in one program, scores never written to
memory.

Four kernels, all with heads innermost so that loads coalesce, all with exact softmax over whole
rows:

lanes   rank 1 and 2, at most 16 tokens: a thread owns one head of one sequence, its keys and values in registers. No
        tensor cores, so nothing is padded.
packs   rank 4 to 32, at most 16 tokens: heads that share a line of memory side by side, one small product each.
tiles   any rank up to 64, at most 256 tokens: a few warps own a sequence and walk over heads with matrix products.
stairs  the same under a causal mask, 33 to 128 tokens: blocks of 32, and of those only the ones that are seen.

Tensors are (sequences, tokens, heads, rank) by strides, so a slice of one wide projection is taken
as it lies. The plain twin is `headwise.model.attention.plain`. Programs stand in one line, blocks
of heads innermost: a grid's other axes end at 65,535.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


# ---- lanes: one thread a head


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
    b = (tl.program_id(0) // blocks).to(tl.int64)
    h = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at = h[:, None] * R + tl.arange(0, R)[None, :]
    seen = (h < heads)[:, None]
    ks = _rows(k + b * seq + at, row, N, seen)
    vs = _rows(v + b * seq + at, row, N, seen)
    high, low = _extremes(ks, N)
    next_q = tl.load(q + b * seq + at, mask=seen, other=0.0)
    for i in range(N):
        qi = next_q.to(tl.float32) * (scale * LOG2E)
        ahead = tl.minimum(i + 1, N - 1)  # the next row is on its way while this one is worked on
        next_q = tl.load(q + b * seq + ahead * row + at, mask=seen, other=0.0)
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
    q, k, v, g, dq, dk, dv, seq, row, g_seq, g_row, d_seq, d_row, heads, scale, blocks,
    N: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // blocks).to(tl.int64)
    h = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at = h[:, None] * R + tl.arange(0, R)[None, :]
    seen = (h < heads)[:, None]
    ks = _rows(k + b * seq + at, row, N, seen)
    vs = _rows(v + b * seq + at, row, N, seen)
    high, low = _extremes(ks, N)
    zero = tl.zeros([BLOCK, R], tl.float32)
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
        e = _exponents(qi * LOG2E, ks, high, low, N, R)
        total = e[0]
        out = e[0][:, None] * vs[0]
        for j in tl.static_range(1, N):
            total += e[j]
            out += e[j][:, None] * vs[j]
        inverse = 1.0 / total
        gi = gi * inverse[:, None]
        mean = tl.sum(gi * out, 1) * inverse  # sum_j p_j g.v_j = g.o, over the total once more
        dqi = tl.zeros_like(qi)
        new_dks = ()
        new_dvs = ()
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


# ---- packs: a few heads of one sequence side by side, one small product each


@triton.jit
def _pack(ptr, at, seen, HEADS: tl.constexpr, NP: tl.constexpr, R: tl.constexpr):
    """(tokens, heads x rank) from memory, whole lines at a time, as (heads, tokens, rank)."""
    x = tl.load(ptr + at, mask=seen, other=0.0)
    return tl.permute(tl.reshape(x, (NP, HEADS, R)), (1, 0, 2))


@triton.jit
def _unpack(x, HEADS: tl.constexpr, NP: tl.constexpr, R: tl.constexpr):
    return tl.reshape(tl.permute(x, (1, 0, 2)), (NP, HEADS * R))


@triton.jit
def _fill(x, HEADS: tl.constexpr, NP: tl.constexpr, R: tl.constexpr):
    return tl.reshape(tl.join(x, tl.zeros_like(x)), (HEADS, NP, 2 * R))


@triton.jit
def inner(a, b, HEADS: tl.constexpr, NP: tl.constexpr, R: tl.constexpr, IP: tl.constexpr):
    """a b^T a head; a rank below 16 is filled up with zeros in registers to the 16 that a product
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
    b = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * HEADS * R + tl.arange(0, HEADS * R)[None, :]
    n = tl.arange(0, NP)[:, None]
    seen = (c < width) & (n < ROWS)
    at = b * seq + n * row + c
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
    b = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * HEADS * R + tl.arange(0, HEADS * R)[None, :]
    n = tl.arange(0, NP)[:, None]
    seen = (c < width) & (n < ROWS)
    at = b * seq + n * row + c
    qt = _pack(q, at, seen, HEADS, NP, R)
    kt = _pack(k, at, seen, HEADS, NP, R)
    vt = _pack(v, at, seen, HEADS, NP, R)
    gt = _pack(g, b * g_seq + n * g_row + c, seen, HEADS, NP, R)
    p = softmax(inner(qt, kt, HEADS, NP, R, IP) * (scale * LOG2E), N, NP)
    dp = inner(gt, vt, HEADS, NP, R, IP)
    ds = (p * (dp - tl.sum(p * dp, 2)[:, :, None]) * scale).to(kt.dtype)
    to = b * d_seq + n * d_row + c
    dqt = tl.dot(ds, kt, input_precision=IP)
    tl.store(dq + to, _unpack(dqt.to(dq.dtype.element_ty), HEADS, NP, R), mask=seen)
    dkt = tl.dot(tl.permute(ds, (0, 2, 1)), qt, input_precision=IP)
    tl.store(dk + to, _unpack(dkt.to(dk.dtype.element_ty), HEADS, NP, R), mask=seen)
    dvt = tl.dot(tl.permute(p.to(gt.dtype), (0, 2, 1)), gt, input_precision=IP)
    tl.store(dv + to, _unpack(dvt.to(dv.dtype.element_ty), HEADS, NP, R), mask=seen)


# ---- tiles: a few warps a sequence


@triton.jit
def _softmax(s, keys, queries, N: tl.constexpr, NP: tl.constexpr, CAUSAL: tl.constexpr):
    if CAUSAL:
        s = tl.where(keys <= queries[:, None], s, float("-inf"))
    elif N < NP:
        s = tl.where(keys // N == queries[:, None] // N, s, float("-inf"))
    e = tl.exp2(s - tl.max(s, 1)[:, None])
    return e / tl.sum(e, 1)[:, None]


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
    b = (tl.program_id(0) // blocks).to(tl.int64)
    r = tl.arange(0, RP)[None, :]
    n = tl.arange(0, NP)
    keys = n[None, :]
    for g in range(GROUP):
        h = tl.program_id(0) % blocks * GROUP + g
        live = tl.where(h < heads, ROWS, 0)
        seen = (r < R) & (n < live)[:, None]
        at = b * seq + h * R + r
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
    b = (tl.program_id(0) // blocks).to(tl.int64)
    r = tl.arange(0, RP)[None, :]
    n = tl.arange(0, NP)
    keys = n[None, :]
    for turn in range(GROUP):
        h = tl.program_id(0) % blocks * GROUP + turn
        live = tl.where(h < heads, ROWS, 0)
        seen = (r < R) & (n < live)[:, None]
        at = b * seq + h * R + r
        kt = tl.load(k + at + n[:, None] * row, mask=seen, other=0.0)
        vt = tl.load(v + at + n[:, None] * row, mask=seen, other=0.0)
        dkt = tl.zeros([NP, RP], tl.float32)
        dvt = tl.zeros([NP, RP], tl.float32)
        for i in range(0, NP, BQ):
            nq = i + tl.arange(0, BQ)
            some = (r < R) & (nq < live)[:, None]
            qt = tl.load(q + at + nq[:, None] * row, mask=some, other=0.0)
            gt = tl.load(g + b * g_seq + nq[:, None] * g_row + h * R + r, mask=some, other=0.0)
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


# ---- stairs: blocks of tokens under a causal mask


@triton.jit
def _climb(qt, ks, i: tl.constexpr, scale, B: tl.constexpr, IP: tl.constexpr):
    """The softmax of a block of queries over the blocks of keys up to its own, as a tuple."""
    n = tl.arange(0, B)
    s = ()
    for j in tl.static_range(i + 1):
        sj = tl.dot(qt, tl.trans(ks[j]), input_precision=IP) * (scale * LOG2E)
        if j == i:
            sj = tl.where(n[:, None] >= n[None, :], sj, float("-inf"))
        s = s + (sj,)
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
    b = (tl.program_id(0) // heads).to(tl.int64)
    r = tl.arange(0, RP)[None, :]
    at = b * seq + tl.program_id(0) % heads * R + r
    to = b * o_seq + tl.program_id(0) % heads * R + r
    ks = ()
    vs = ()
    for i in tl.static_range(STEPS):
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
    b = (tl.program_id(0) // heads).to(tl.int64)
    r = tl.arange(0, RP)[None, :]
    at = b * seq + tl.program_id(0) % heads * R + r
    from_g = b * g_seq + tl.program_id(0) % heads * R + r
    to = b * d_seq + tl.program_id(0) % heads * R + r
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
        p = _climb(qt, ks, i, scale, B, IP)
        dp = ()
        for j in tl.static_range(i + 1):
            dp = dp + (tl.dot(gt, tl.trans(vs[j]), input_precision=IP),)
        mean = tl.sum(p[0] * dp[0], 1)  # type: ignore[bad-index]
        for j in tl.static_range(1, i + 1):
            mean += tl.sum(p[j] * dp[j], 1)
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


# ---- launching


def kind_of(tokens: int, rank: int, causal: bool = False) -> str:
    """Which of the kernels takes this size: lanes, packs, tiles or stairs; tiles and stairs have a
    mask."""
    if causal:
        return "stairs" if 32 < tokens <= 128 else "tiles"
    if tokens > 16:
        return "tiles"
    return "lanes" if rank in (1, 2) else "packs" if rank in (4, 8, 16, 32) else "tiles"


def _tiles(tokens: int, rows: int, rank: int, causal: bool, kind: torch.dtype) -> dict[str, Any]:
    padded, wide = max(16, triton.next_power_of_2(rows)), max(16, triton.next_power_of_2(rank))
    queries = padded if padded <= 128 else 16 if kind == torch.float32 else 32
    return {
        "N": tokens,
        "R": rank,
        "NP": padded,
        "ROWS": rows,
        "RP": wide,
        "BQ": queries,
        "GROUP": max(1, 64 // wide),
        "num_warps": min(8, padded // 16),
        "num_stages": 2,
        "CAUSAL": causal,
    }


def _stairs(tokens: int, rank: int) -> dict[str, int]:
    wide = max(16, triton.next_power_of_2(rank))
    return {
        "N": tokens,
        "R": rank,
        "RP": wide,
        "B": 32,
        "STEPS": triton.cdiv(tokens, 32),
        "num_warps": 4 if wide > 32 else 2,
    }


def _packs(tokens: int, rows: int, rank: int) -> dict[str, int]:
    return {
        "N": tokens,
        "R": rank,
        "NP": 16,
        "ROWS": rows,
        "HEADS": 64 // rank,
        "num_warps": 1 if rank == 32 else 4,
    }


def _rows_at_once(sequences: int, tokens: int, together: bool, *strides: tuple[int, ...]) -> int:
    """How many rows a program takes: a sequence, or as many short ones as fill the 16 rows of a
    product where they lie end to end."""
    whole = together and tokens < 16 and 16 % tokens == 0 and sequences * tokens % 16 == 0
    return 16 if whole and all(seq == tokens * row for seq, row, *_ in strides) else tokens


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    heads: int,
    rank: int,
    scale: float,
    dot: str,
    causal: bool = False,
    together: bool = False,
) -> None:
    """o = softmax(scale q k^T) v; tensors are (sequences, tokens, heads x rank) views, q, k and v
    with the same strides.

    `together`: short sequences may share a product, 16 rows of them, in which a number that is not
    finite reaches them all.
    """
    sequences, tokens, _ = q.shape
    kind = kind_of(tokens, rank, causal)
    rows = _rows_at_once(
        sequences, tokens, together and kind != "lanes" and not causal, q.stride(), o.stride()
    )
    args = (
        q,
        k,
        v,
        o,
        rows // tokens * q.stride(0),
        q.stride(1),
        rows // tokens * o.stride(0),
        o.stride(1),
    )
    programs = sequences * tokens // rows
    match kind:
        case "lanes":
            blocks = triton.cdiv(heads, 64)
            lanes_forward[blocks * programs,](
                *args, heads, scale, blocks, N=tokens, R=rank, BLOCK=64, num_warps=2
            )
        case "packs":
            blocks = triton.cdiv(heads * rank, 64)
            packs_forward[blocks * programs,](
                *args, heads * rank, scale, blocks, IP=dot, **_packs(tokens, rows, rank)
            )
        case "stairs":
            stairs_forward[heads * programs,](*args, scale, heads, IP=dot, **_stairs(tokens, rank))
        case _:
            sizes = _tiles(tokens, rows, rank, causal, q.dtype)
            blocks = triton.cdiv(heads, sizes["GROUP"])
            tiles_forward[blocks * programs,](*args, heads, scale, blocks, IP=dot, **sizes)


def backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    heads: int, rank: int, scale: float, dot: str, causal: bool = False, together: bool = False,
) -> None:  # fmt: skip
    """Gradients of q, k and v from that of the output; they may be written over q, k and v.
    `together` as in `forward`."""
    sequences, tokens, _ = q.shape
    kind = kind_of(tokens, rank, causal)
    rows = _rows_at_once(
        sequences,
        tokens,
        together and kind != "lanes" and not causal,
        *(t.stride() for t in (q, g, dq)),
    )
    steps = (step for t in (q, g, dq) for step in (rows // tokens * t.stride(0), t.stride(1)))
    args, programs = (q, k, v, g, dq, dk, dv, *steps), sequences * tokens // rows
    match kind:
        case "lanes":
            blocks = triton.cdiv(heads, 32)
            lanes_backward[blocks * programs,](
                *args, heads, scale, blocks, N=tokens, R=rank, BLOCK=32, num_warps=1
            )
        case "packs":
            blocks = triton.cdiv(heads * rank, 64)
            packs_backward[blocks * programs,](
                *args, heads * rank, scale, blocks, IP=dot, **_packs(tokens, rows, rank)
            )
        case "stairs":
            stairs_backward[heads * programs,](*args, scale, heads, IP=dot, **_stairs(tokens, rank))
        case _:
            sizes = _tiles(tokens, rows, rank, causal, q.dtype)
            blocks = triton.cdiv(heads, sizes["GROUP"])
            tiles_backward[blocks * programs,](*args, heads, scale, blocks, IP=dot, **sizes)


# ---- for autograd


def attend_heads(
    q: Tensor, k: Tensor, v: Tensor, scale: float, dot: str, causal: bool = False
) -> Tensor:
    """softmax(scale q k^T) v for (batch, heads, tokens, rank) tensors of equal sizes; dot is how
    products of float32 are made."""
    out: Tensor = _Heads.apply(q, k, v, scale, dot, causal)  # type: ignore[assignment]
    return out


def _rows_of(*tensors: Tensor) -> list[Tensor]:
    """(batch, tokens, heads x rank) views with equal strides, copied only where the tensors do not
    lie so."""
    rows = [t.transpose(1, 2) for t in tensors]
    if any(t.stride()[2:] != (t.shape[3], 1) or t.stride() != rows[0].stride() for t in rows):
        rows = [t.contiguous() for t in rows]
    return [t.flatten(2) for t in rows]


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, dot: str, causal: bool
    ) -> Tensor:
        _, ctx.heads, _, ctx.rank = q.shape
        ctx.scale, ctx.dot, ctx.causal = scale, dot, causal
        q, k, v = _rows_of(q, k, v)
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        forward(q, k, v, o, ctx.heads, ctx.rank, scale, dot, causal)
        ctx.save_for_backward(q, k, v)
        return o.unflatten(2, (ctx.heads, ctx.rank)).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v = ctx.saved_tensors
        dq, dk, dv = (torch.empty(q.shape, dtype=grad.dtype, device=grad.device) for _ in range(3))
        backward(
            q,
            k,
            v,
            _rows_of(grad)[0],
            dq,
            dk,
            dv,
            ctx.heads,
            ctx.rank,
            ctx.scale,
            ctx.dot,
            ctx.causal,
        )
        return (
            *(g.unflatten(2, (ctx.heads, ctx.rank)).transpose(1, 2) for g in (dq, dk, dv)),
            None,
            None,
            None,
        )
