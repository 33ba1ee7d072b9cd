"""Attention of large rank: matrix products of whole blocks, where the library's are at their best, and one pass for each softmax.

Fused kernels keep a tile of queries, keys and sums of one head on the chip; beyond rank 256 it does not fit and they crawl. Then
scores are few beside the operands (one number for a pair of tokens against `rank` products), so they may as well be written
out, a block of queries at a time: scores = q k^T over the keys the block sees, p = softmax, o = p v. The backward pass makes the
scores again. Gradients of keys and values are sums over queries: p and ds of as many queries as see a chunk of keys are kept
side by side, so that each is one product and no sum is rounded on the way. When one chunk takes all keys, ds serves for the
queries' gradient too; for longer sequences it is made once more. Temporary memory is `work` bytes, whatever the length.

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
WORK = 256 << 20  # bytes of scores and what is made of them at one time


@dataclass(frozen=True)
class Span:
    """Which keys queries see: all, those up to their own place, those nearer than `window`. The last query stands at the last key."""

    queries: int
    keys: int
    causal: bool
    window: int
    block: int

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Queries, first and last, of each block."""
        return [(at, min(at + self.block, self.queries)) for at in range(0, self.queries, self.block)]

    def of(self, first: int, last: int) -> tuple[int, int]:
        """Keys that some query of [first, last) sees, in whole blocks of keys."""
        shift = self.keys - self.queries
        low = max(0, first + shift - self.window + 1) if self.window else 0
        high = self.keys
        if self.causal:
            high = last + shift
        elif self.window:
            high = min(self.keys, last + shift + self.window - 1)
        return low // self.block * self.block, min(self.keys, -(-high // self.block) * self.block)


def attend_wide(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, window: int = 0, *, block: int = BLOCK, work: int = WORK
) -> Tensor:
    """softmax(scale q k^T) v for q (batch, heads, queries, rank), k (batch, KV heads, keys, rank), v (batch, KV heads, keys, width)."""
    out: Tensor = _Wide.apply(q, k, v, scale, causal, window if 0 < window < k.shape[2] else 0, block, work)  # type: ignore[assignment]
    return out


class _Wide(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int, block: int, work: int
    ) -> Tensor:  # fmt: skip
        B, H, Q, R = q.shape
        KV, N, V = k.shape[1], k.shape[2], v.shape[3]
        ctx.span, ctx.scale, ctx.work = Span(Q, N, causal, window, block), scale, work
        q_ZGQR, k_ZNR, v_ZNV = q.reshape(B * KV, H // KV, Q, R), k.reshape(B * KV, N, R), v.reshape(B * KV, N, V)
        o_ZGQV = q.new_empty(B * KV, H // KV, Q, V)
        lse_ZGQ = torch.empty(B * KV, H // KV, Q, dtype=_sums(q.dtype), device=q.device)
        for z in _pieces(B * KV, _most(ctx.span, H // KV, q.dtype, work, 1)):
            _forward(q_ZGQR[z], k_ZNR[z], v_ZNV[z], o_ZGQV[z], lse_ZGQ[z], ctx.span, scale)
        ctx.save_for_backward(q_ZGQR, k_ZNR, v_ZNV, o_ZGQV, lse_ZGQ)
        return o_ZGQV.view(B, H, Q, V)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse = ctx.saved_tensors
        B, H = grad.shape[:2]
        g = grad.reshape(o.shape).contiguous()
        delta = _dots(g, o)
        start = torch.zeros if ctx.span.window else torch.empty  # keys before every query's window stay at zero
        dq, dk, dv = (start(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        most = _most(ctx.span, q.shape[1], q.dtype, ctx.work, 2)
        chunk = ctx.span.keys if most else _chunk(ctx.span, q.shape[1], q.dtype, ctx.work)
        for z in _pieces(len(q), max(1, most)):
            _backward(q[z], k[z], v[z], g[z], lse[z], delta[z], dq[z], dk[z], dv[z], ctx.span, ctx.scale, chunk)
        return dq.view(B, H, *dq.shape[2:]), dk.view(B, -1, *dk.shape[1:]), dv.view(B, -1, *dv.shape[1:]), None, None, None, None, None


# ---- sizes


def _sums(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _bytes(span: Span, group: int, dtype: torch.dtype, rows: int, keys: int) -> int:
    """Of one z: scores and their gradient for a block, p and ds for `rows` queries a head."""
    return group * keys * (2 * span.block * _sums(dtype).itemsize + 2 * rows * dtype.itemsize)


def _most(span: Span, group: int, dtype: torch.dtype, work: int, passes: int) -> int:
    """How many z are worked on at once; 0 where the backward pass's rows of one do not fit."""
    rows = span.queries if passes == 2 else span.block
    each = _bytes(span, group, dtype, rows, span.keys)
    return work // each if passes == 2 else max(1, work // each)


def _chunk(span: Span, group: int, dtype: torch.dtype, work: int) -> int:
    """Keys whose p and ds of all queries fit, in whole blocks."""
    each = _bytes(span, group, dtype, span.queries, span.block)
    return max(1, work // each) * span.block


def _pieces(count: int, most: int) -> list[slice]:
    """Slices of about equal length, none longer than `most`."""
    if not count:
        return []
    size = math.ceil(count / math.ceil(count / most))
    return [slice(at, min(at + size, count)) for at in range(0, count, size)]


# ---- one piece


def _forward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, span: Span, scale: float) -> None:
    Z, G = q.shape[:2]
    for first, last in span.blocks:
        low, high = span.of(first, last)
        s = _scores(_rows(q, first, last), k[:, low:high])
        p, sums = s.new_empty(s.shape, dtype=q.dtype), s.new_empty(Z, G, last - first)
        _soften(s, p, sums, scale, last - first, first, low, span)
        lse[:, :, first:last] = sums
        o[:, :, first:last] = torch.bmm(p, v[:, low:high]).view(Z, G, last - first, -1)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    span: Span, scale: float, chunk: int,
) -> None:  # fmt: skip
    (Z, G, _, R), N = q.shape, span.keys
    whole = chunk >= N
    for start in range(0, N, chunk):
        stop = min(start + chunk, N)
        here = [(first, last) for first, last in span.blocks if _meets(span.of(first, last), start, stop)]
        if not here:
            continue
        top, rows = here[0][0], here[-1][1] - here[0][0]
        p, ds = (q.new_empty(Z, G * rows, stop - start) for _ in range(2))
        for first, last in here:
            low, high = _common(span.of(first, last), start, stop)
            into = slice(G * (first - top), G * (last - top)), slice(low - start, high - start)
            _slopes(q, k, v, g, lse, delta, p[:, *into], ds[:, *into], first, last, low, high, span, scale)
            if whole:
                dq[:, :, first:last] = torch.bmm(ds[:, *into], k[:, low:high]).view(Z, G, last - first, R)
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
        _slopes(q, k, v, g, lse, delta, None, ds, first, last, low, high, span, scale)
        dq[:, :, first:last] = torch.bmm(ds, k[:, low:high]).view(Z, G, last - first, R)


def _slopes(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, delta: Tensor, p: Tensor | None, ds: Tensor,
    first: int, last: int, low: int, high: int, span: Span, scale: float,
) -> None:  # fmt: skip
    """p and ds of a block of queries over keys [low, high)."""
    s, dp = _scores(_rows(q, first, last), k[:, low:high]), _scores(_rows(g, first, last), v[:, low:high])
    sums, deltas = (t[:, :, first:last].reshape(len(q), -1) for t in (lse, delta))
    _slope(s, dp, sums, deltas, p, ds, scale, last - first, first, low, span)


def _meets(keys: tuple[int, int], start: int, stop: int) -> bool:
    return keys[0] < stop and start < keys[1]


def _common(keys: tuple[int, int], start: int, stop: int) -> tuple[int, int]:
    return max(keys[0], start), min(keys[1], stop)


def _rows(t_ZGQR: Tensor, first: int, last: int) -> Tensor:
    """Queries [first, last) of all heads that share keys, one head after the other: (Z, G x queries, R)."""
    return t_ZGQR[:, :, first:last].flatten(1, 2)


# ---- what is a kernel on a GPU and a few operations elsewhere


def _scores(a: Tensor, b: Tensor) -> Tensor:
    """a b^T with sums that are not rounded to the operands' type."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.bmm(a, b.mT)
    if a.device.type == "cuda":
        return torch.bmm(a, b.mT, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float().mT)


def _dots(a: Tensor, b: Tensor) -> Tensor:
    if a.device.type == "cuda" and a.dtype != torch.float64:
        from headwise.kernels.rows import dots_of

        return dots_of(a, b)
    return (a.to(_sums(a.dtype)) * b).sum(-1)


def _unseen(span: Span, per: int, query0: int, key0: int, n: int, rows: int, device: torch.device) -> Tensor | None:
    """Which entries of (rows, n) are masked."""
    if not span.causal and not span.window:
        return None
    token = span.keys - span.queries + query0 + torch.arange(rows, device=device).unsqueeze(1) % per
    key = key0 + torch.arange(n, device=device)
    out = key > token if span.causal else torch.zeros(rows, n, dtype=torch.bool, device=device)
    return out | ((key - token).abs() >= span.window) if span.window else out


def _soften(s: Tensor, p: Tensor, lse: Tensor, scale: float, per: int, query0: int, key0: int, span: Span) -> None:
    if s.device.type == "cuda" and s.dtype != torch.float64:
        from headwise.kernels.rows import soften_rows

        soften_rows(s, p, lse, scale, per, query0 + span.keys - span.queries, key0, span.causal, span.window)
        return
    s = s * scale
    unseen = _unseen(span, per, query0, key0, s.shape[2], s.shape[1], s.device)
    if unseen is not None:
        s = s.masked_fill(unseen, -math.inf)
    lse.copy_(s.logsumexp(-1).view(lse.shape))
    p.copy_(s.softmax(-1))


def _slope(
    s: Tensor, dp: Tensor, lse: Tensor, delta: Tensor, p: Tensor | None, ds: Tensor,
    scale: float, per: int, query0: int, key0: int, span: Span,
) -> None:  # fmt: skip
    if s.device.type == "cuda" and s.dtype != torch.float64:
        from headwise.kernels.rows import slope_rows

        slope_rows(s, dp, lse, delta, p, ds, scale, per, query0 + span.keys - span.queries, key0, span.causal, span.window)
        return
    e = (s * scale - lse.unsqueeze(-1)).exp()
    unseen = _unseen(span, per, query0, key0, s.shape[2], s.shape[1], s.device)
    if unseen is not None:
        e = e.masked_fill(unseen, 0.0)
    if p is not None:
        p.copy_(e)
    ds.copy_(e * (dp - delta.unsqueeze(-1)) * scale)
