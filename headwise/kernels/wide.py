"""Attention of large rank: matrix products of whole blocks, where the library's are at their best, and one pass for each softmax.

Fused kernels keep a tile of queries, keys and sums of one head on the chip; beyond rank 256 it does not fit and they crawl. Then
scores are few beside the operands (one number for a pair of tokens against `rank` products), so they may as well be written
out, a block of queries at a time: scores = q k^T over the keys the block sees, p = softmax, o = p v. Where p of the whole is small
beside the operands it is kept for the backward pass; else that makes the scores again. Gradients of keys and values are sums over
queries: p and ds of as many queries as see a chunk of keys stand side by side, so that each is one product and no sum is rounded on
the way. When one chunk takes all keys, ds serves for the queries' gradient too; for longer sequences it is made once more.
Temporary memory is about `work` bytes, whatever the length.

Axes: Z batch x KV heads, G query heads that share keys, Q queries, N keys, R rank, V value width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 512  # queries and keys of a block
WORK = 1 << 30  # bytes of scores and what is made of them at one time; a quarter of it for LONG sequences
LONG = 8192
KEEP = 2.0  # p is kept if it is not larger than this many times q, k, v and o together


@dataclass(frozen=True)
class Span:
    """Which keys queries see: all, those up to their own place, those nearer than `window`. The last query stands at the last key."""

    queries: int
    keys: int
    causal: bool
    window: int
    block: int

    @property
    def shift(self) -> int:
        """The first query's place among the keys."""
        return self.keys - self.queries

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Queries, first and last, of each block."""
        return [(at, min(at + self.block, self.queries)) for at in range(0, self.queries, self.block)]

    def of(self, first: int, last: int) -> tuple[int, int]:
        """Keys that some query of [first, last) sees, in whole blocks of keys."""
        low = max(0, first + self.shift - self.window + 1) if self.window else 0
        high = self.keys
        if self.causal:
            high = last + self.shift
        elif self.window:
            high = min(self.keys, last + self.shift + self.window - 1)
        return low // self.block * self.block, min(self.keys, -(-high // self.block) * self.block)


def attend_wide(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool = False,
    window: int = 0,
    *,
    block: int = BLOCK,
    work: int = 0,
    keep: float = KEEP,
) -> Tensor:
    """softmax(scale q k^T) v for q (batch, heads, queries, rank), k (batch, KV heads, keys, rank), v (batch, KV heads, keys, width)."""
    keys = k.shape[2]
    span = Span(q.shape[2], keys, causal, window if 0 < window < keys else 0, block)
    work = work or (WORK if keys <= LONG else WORK // 4)
    out: Tensor = Wide.apply(q, k, v, scale, span, work, keep)  # type: ignore[assignment]
    return out


class Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, span: Span, work: int, keep: float) -> Tensor:
        B, H, Q, R = q.shape
        KV, N, V = k.shape[1], k.shape[2], v.shape[3]
        ctx.span, ctx.scale, ctx.work = span, scale, work
        q_ZGQR, k_ZNR, v_ZNV = q.reshape(B * KV, H // KV, Q, R), k.reshape(B * KV, N, R), v.reshape(B * KV, N, V)
        o_ZGQV = q.new_empty(B * KV, H // KV, Q, V)
        lse_ZGQ = torch.empty(B * KV, H // KV, Q, dtype=sums_type(q.dtype), device=q.device)
        kept = any(ctx.needs_input_grad) and keep * (q.numel() + k.numel() + v.numel() + o_ZGQV.numel()) >= B * H * Q * N
        p_ZQN = q.new_empty(B * KV, H // KV * Q, N) if kept else None
        for z in _pieces(B * KV, work // _bytes(span, H // KV, q.dtype, 1, 0 if kept else span.block, N)):
            _forward(q_ZGQR[z], k_ZNR[z], v_ZNV[z], o_ZGQV[z], lse_ZGQ[z], None if p_ZQN is None else p_ZQN[z], span, scale)
        ctx.save_for_backward(q_ZGQR, k_ZNR, v_ZNV, o_ZGQV, lse_ZGQ, p_ZQN)
        return o_ZGQV.view(B, H, Q, V)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse, p = ctx.saved_tensors
        span, (B, H), G = ctx.span, grad.shape[:2], q.shape[1]
        g = grad.reshape(o.shape).contiguous()
        delta = _dots(g, o)
        start = torch.zeros if span.window else torch.empty  # keys before every query's window stay at zero
        dq, dk, dv = (start(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        matrices = 1 if p is not None else 2
        most = ctx.work // _bytes(span, G, q.dtype, matrices, matrices * span.queries, span.keys)
        chunk = span.keys
        if not most and p is None:
            chunk = max(1, ctx.work // _bytes(span, G, q.dtype, 2, 2 * span.queries, span.block)) * span.block
        for z in _pieces(len(q), most):
            kept = None if p is None else p[z]
            _backward(q[z], k[z], v[z], g[z], lse[z], delta[z], dq[z], dk[z], dv[z], kept, span, ctx.scale, chunk)
        dk, dv = (t.view(B, H // G, *t.shape[1:]) for t in (dk, dv))
        return dq.view(B, H, *dq.shape[2:]), dk, dv, None, None, None, None


# ---- sizes


def sums_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _bytes(span: Span, group: int, dtype: torch.dtype, blocks: int, rows: int, keys: int) -> int:
    """Of one z: `blocks` blocks of scores, and `rows` rows a head of what is made of them, over `keys` keys."""
    return group * keys * (blocks * span.block * sums_type(dtype).itemsize + rows * dtype.itemsize)


def _pieces(count: int, most: int) -> list[slice]:
    """Slices of about equal length, none longer than `most` or one."""
    if not count:
        return []
    size = math.ceil(count / math.ceil(count / max(1, most)))
    return [slice(at, min(at + size, count)) for at in range(0, count, size)]


# ---- one piece


def _forward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, kept: Tensor | None, span: Span, scale: float) -> None:
    G = q.shape[1]
    for first, last in span.blocks:
        low, high = span.of(first, last)
        s = _scores(_rows(q, first, last), k[:, low:high])
        p = s.new_empty(s.shape, dtype=q.dtype) if kept is None else kept[:, G * first : G * last, low:high]
        _soften(s, p, lse[:, :, first:last], scale, first, low, span)
        _product(p, v[:, low:high], o[:, :, first:last])


def _backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, kept: Tensor | None,
    span: Span, scale: float, chunk: int,
) -> None:  # fmt: skip
    (Z, G, _, _), N = q.shape, span.keys
    whole = chunk >= N
    for start in range(0, N, chunk):
        stop = min(start + chunk, N)
        here = [(first, last) for first, last in span.blocks if _meets(span.of(first, last), start, stop)]
        if not here:
            continue
        top, rows = here[0][0], here[-1][1] - here[0][0]
        ds = q.new_empty(Z, G * rows, stop - start)
        p = q.new_empty(Z, G * rows, stop - start) if kept is None else kept[:, G * top : G * (top + rows)]
        for first, last in here:
            low, high = _common(span.of(first, last), start, stop)
            into = slice(G * (first - top), G * (last - top)), slice(low - start, high - start)
            _slopes(q, k, v, g, lse, delta, p[:, *into], ds[:, *into], first, last, low, high, span, scale, kept is not None)
            if whole:
                _product(ds[:, *into], k[:, low:high], dq[:, :, first:last])
        q_rows, g_rows = (torch.cat([_rows(t, *at) for at in here], 1) if G > 1 else t[:, 0, top : top + rows] for t in (q, g))
        for at in range(start, stop, span.block):
            end = min(at + span.block, stop)
            seeing = [(first, last) for first, last in here if _meets(span.of(first, last), at, end)]
            if not seeing:
                continue
            these = slice(G * (seeing[0][0] - top), G * (seeing[-1][1] - top))
            torch.bmm(p[:, these, at - start : end - start].mT, g_rows[:, these], out=dv[:, at:end])
            torch.bmm(ds[:, these, at - start : end - start].mT, q_rows[:, these], out=dk[:, at:end])
    if whole:
        return
    for first, last in span.blocks:
        low, high = span.of(first, last)
        ds = q.new_empty(Z, G * (last - first), high - low)
        _slopes(q, k, v, g, lse, delta, None, ds, first, last, low, high, span, scale, False)
        _product(ds, k[:, low:high], dq[:, :, first:last])


def _slopes(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, delta: Tensor, p: Tensor | None, ds: Tensor,
    first: int, last: int, low: int, high: int, span: Span, scale: float, kept: bool,
) -> None:  # fmt: skip
    """ds of a block of queries over keys [low, high), and p unless it is kept."""
    s = None if kept else _scores(_rows(q, first, last), k[:, low:high])
    dp = _scores(_rows(g, first, last), v[:, low:high])
    _slope(s, dp, lse[:, :, first:last], delta[:, :, first:last], p, ds, scale, first, low, span)


def _meets(keys: tuple[int, int], start: int, stop: int) -> bool:
    return keys[0] < stop and start < keys[1]


def _common(keys: tuple[int, int], start: int, stop: int) -> tuple[int, int]:
    return max(keys[0], start), min(keys[1], stop)


def _rows(t_ZGQR: Tensor, first: int, last: int) -> Tensor:
    """Queries [first, last) of all heads that share keys, one head after the other: (Z, G x queries, R)."""
    return t_ZGQR[:, :, first:last].flatten(1, 2)


def _product(a: Tensor, b: Tensor, out_ZGQR: Tensor) -> None:
    """a b into a block of queries."""
    if out_ZGQR.shape[1] == 1:
        torch.bmm(a, b, out=out_ZGQR[:, 0])
    else:
        out_ZGQR.copy_(torch.bmm(a, b).view(out_ZGQR.shape))


# ---- what is a kernel on a GPU and a few operations elsewhere


def _by_kernels(t: Tensor) -> bool:
    return t.device.type == "cuda" and t.dtype != torch.float64


def _scores(a: Tensor, b: Tensor) -> Tensor:
    """a b^T with sums that are not rounded to the operands' type."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.bmm(a, b.mT)
    if a.device.type == "cuda":
        return torch.bmm(a, b.mT, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float().mT)


def _dots(a: Tensor, b: Tensor) -> Tensor:
    if _by_kernels(a):
        from headwise.kernels.rows import dots_of

        return dots_of(a, b)
    return (a.to(sums_type(a.dtype)) * b).sum(-1)


def _unseen(span: Span, per: int, rows: int, query0: int, key0: int, n: int, device: torch.device) -> Tensor | None:
    """Which entries of (rows, n) are masked."""
    if not span.causal and not span.window:
        return None
    token = span.shift + query0 + torch.arange(rows, device=device).unsqueeze(1) % per
    key = key0 + torch.arange(n, device=device)
    out = key > token if span.causal else torch.zeros(rows, n, dtype=torch.bool, device=device)
    return out | ((key - token).abs() >= span.window) if span.window else out


def _soften(s: Tensor, p: Tensor, lse: Tensor, scale: float, query0: int, key0: int, span: Span) -> None:
    """p = softmax(scale s) and lse = log sum exp(scale s) over what each row sees, into views."""
    if _by_kernels(s):
        from headwise.kernels.rows import soften_rows

        soften_rows(s, p, lse, scale, span.shift + query0, key0, span.causal, span.window)
        return
    s = s * scale
    unseen = _unseen(span, lse.shape[2], s.shape[1], query0, key0, s.shape[2], s.device)
    if unseen is not None:
        s = s.masked_fill(unseen, -math.inf)
    lse.copy_(s.logsumexp(-1).view(lse.shape))
    p.copy_(s.softmax(-1))


def _slope(
    s: Tensor | None, dp: Tensor, lse: Tensor, delta: Tensor, p: Tensor | None, ds: Tensor,
    scale: float, query0: int, key0: int, span: Span,
) -> None:  # fmt: skip
    """ds = p (dp - delta) scale into a view; p is made from the scores, and written if there is a place, or there when there are none."""
    if _by_kernels(dp):
        from headwise.kernels.rows import slope_rows

        slope_rows(s, dp, lse, delta, p, ds, scale, span.shift + query0, key0, span.causal, span.window)
        return
    if s is None:
        assert p is not None
        e = p.to(dp.dtype)
    else:
        e = (s * scale - lse.flatten(1).unsqueeze(-1)).exp()
        unseen = _unseen(span, lse.shape[2], s.shape[1], query0, key0, s.shape[2], s.device)
        if unseen is not None:
            e = e.masked_fill(unseen, 0.0)
        if p is not None:
            p.copy_(e)
    ds.copy_(e * (dp - delta.flatten(1).unsqueeze(-1)) * scale)
