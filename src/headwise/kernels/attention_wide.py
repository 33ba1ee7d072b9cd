"""Attention of large rank: scores written out a block of queries at a time, in memory that does not
grow with the length's square.

Fused kernels keep a tile of queries, keys and sums of one head on the chip; beyond rank 256 it does
not fit and they crawl. Then scores are few beside the operands (one number for a pair of tokens
against `rank` products), so they may as well be written out: scores = q k^T over the keys a block
sees, p = softmax, o = p v. Where p of the whole is small beside the operands it is kept for the
backward pass; else that makes the scores again. On a GPU the kernels of `tiles` do it; here is the
way around them, their twin: matrix products of whole blocks. Gradients of keys and values are sums
over queries: p and ds of as many queries as see a chunk of keys stand side by side, so that each is
one product and no sum is rounded on the way. When one chunk takes all keys, ds serves for the
queries' gradient too; for longer sequences it is made once more. Temporary memory is about `work`
bytes, whatever the length.

Axes: Z batch x KV heads, G query heads that share keys, Q queries, N keys, R rank, V value width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise.kernels import has_triton

BLOCK = 512  # queries and keys of a block
WORK = (
    1 << 30
)  # bytes of scores and what is made of them at one time; a quarter of it for LONG sequences
LONG = 8192
# rows and columns of a tile, of whole ones the tables of weights that are kept for `tiles` consist
TILE = 128
KEEP = 2.0  # p is kept if it is not larger than this many times q, k, v and o together


@dataclass(frozen=True)
class Span:
    """Which keys queries see: all, those up to their own place, those nearer than `window`. The
    last query stands at the last key."""

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
    def work(self) -> int:
        """Bytes of temporary memory, unless another number is given."""
        return WORK if self.keys <= LONG else WORK // 4

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Queries, first and last, of each block."""
        return [
            (at, min(at + self.block, self.queries)) for at in range(0, self.queries, self.block)
        ]

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
    """softmax(scale q k^T) v for q (batch, heads, queries, rank), k (batch, KV heads, keys, rank),
    v (batch, KV heads, keys, width)."""
    if torch.compiler.is_compiling():
        return _whole(
            q, k, v, scale, causal, window, block, work, keep if torch.is_grad_enabled() else 0.0
        )[0]
    out: Tensor = Wide.apply(
        q, k, v, float(scale), span_of(q, k, causal, window, block), work, keep
    )  # type: ignore[assignment]
    return out


def span_of(q: Tensor, k: Tensor, causal: bool, window: int, block: int) -> Span:
    return Span(q.shape[2], k.shape[2], causal, window if 0 < window < k.shape[2] else 0, block)


class Wide(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, span: Span, work: int, keep: float
    ) -> Tensor:
        ctx.span, ctx.scale, ctx.work = span, scale, work
        o, lse, p = _ahead(q, k, v, scale, span, work, keep if any(ctx.needs_input_grad) else 0.0)
        ctx.save_for_backward(q, k, v, o, lse, p)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse, p = ctx.saved_tensors
        return (
            *_back(grad, q, k, v, o, lse, p, ctx.scale, ctx.span, ctx.work),
            None,
            None,
            None,
            None,
        )


def _by_tiles(t: Tensor) -> bool:
    """Whether the kernels of `tiles` do all of it."""
    return (
        t.device.type == "cuda"
        and t.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and has_triton()
    )


def _room(q: Tensor, k: Tensor, v: Tensor, keep: float) -> tuple[Tensor, Tensor, Tensor]:
    """For the heads' outputs, the logarithm of each softmax's sum, and the weights if they are
    small enough to be kept."""
    (B, H, Q, _), (KV, N, V) = q.shape, (k.shape[1], k.shape[2], v.shape[3])
    tiles = _by_tiles(q)
    size = (B, H, padded(Q), padded(N)) if tiles else (B * KV, H // KV * Q, N)
    kept = keep * (q.numel() + k.numel() + v.numel() + B * H * Q * V) >= math.prod(size)
    o = q.new_empty(B, Q, H, V).transpose(1, 2) if tiles else q.new_empty(B, H, Q, V)
    return (
        o,
        torch.empty(B, H, Q, dtype=sums_type(q.dtype), device=q.device),
        q.new_empty(size if kept else (0,)),
    )


def _ahead(
    q: Tensor, k: Tensor, v: Tensor, scale: float, span: Span, work: int, keep: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Outputs, log sums and, where they are kept, weights."""
    (B, H, Q, R), (KV, N, V) = q.shape, (k.shape[1], k.shape[2], v.shape[3])
    o, lse, p = _room(q, k, v, keep)
    work = work or span.work
    if _by_tiles(q):
        from headwise.kernels import attention_wide_triton

        seen = attention_wide_triton.Seen(Q, N, span.shift, span.causal, span.window)
        with torch.cuda.device_of(
            q
        ):  # triton launches on the current device; in a backward pass it is the tensors'
            attention_wide_triton.ahead(
                q, k, v, o, lse, p if p.numel() else None, scale, seen, work
            )
        return o, lse, p
    q_ZGQR, k_ZNR, v_ZNV = (
        q.reshape(B * KV, H // KV, Q, R),
        k.reshape(B * KV, N, R),
        v.reshape(B * KV, N, V),
    )
    o_ZGQV, lse_ZGQ = o.view(B * KV, H // KV, Q, V), lse.view(B * KV, H // KV, Q)
    for z in pieces(
        B * KV, work // _bytes(span, H // KV, q.dtype, 1, 0 if p.numel() else span.block, N)
    ):
        _forward(
            q_ZGQR[z],
            k_ZNR[z],
            v_ZNV[z],
            o_ZGQV[z],
            lse_ZGQ[z],
            p[z] if p.numel() else None,
            span,
            scale,
        )
    return o, lse, p


def _back(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    p: Tensor,
    scale: float,
    span: Span,
    work: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    work = work or span.work
    if _by_tiles(q):
        from headwise.kernels import attention_wide_triton

        seen = attention_wide_triton.Seen(
            span.queries, span.keys, span.shift, span.causal, span.window
        )
        return attention_wide_triton.back(
            grad, q, k, v, o, lse, p if p.numel() else None, scale, seen, work
        )
    (B, H, Q, _), KV = q.shape, k.shape[1]
    Z, G = B * KV, H // KV
    q_ZGQR, g, o = (t.reshape(Z, G, Q, t.shape[-1]) for t in (q, grad.contiguous(), o))
    k_ZNR, v_ZNV = (t.reshape(Z, *t.shape[2:]) for t in (k, v))
    lse, delta = lse.view(Z, G, Q), (g.to(lse.dtype) * o).sum(-1)
    start = (
        torch.zeros if span.window else torch.empty
    )  # keys before every query's window stay at zero
    dq, dk, dv = (start(t.shape, dtype=t.dtype, device=t.device) for t in (q_ZGQR, k_ZNR, v_ZNV))
    matrices = 1 if p.numel() else 2
    most = work // _bytes(span, G, q.dtype, matrices, matrices * span.queries, span.keys)
    chunk = span.keys
    if not most and not p.numel():
        chunk = (
            max(1, work // _bytes(span, G, q.dtype, 2, 2 * span.queries, span.block)) * span.block
        )
    for z in pieces(Z, most):
        kept = p[z] if p.numel() else None
        _backward(
            q_ZGQR[z],
            k_ZNR[z],
            v_ZNV[z],
            g[z],
            lse[z],
            delta[z],
            dq[z],
            dk[z],
            dv[z],
            kept,
            span,
            scale,
            chunk,
        )
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


# ---- for torch.compile: one operation that it does not look into


@torch.library.custom_op("headwise::wide", mutates_args=())
def _whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    window: int,
    block: int,
    work: int,
    keep: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _ahead(q, k, v, scale, span_of(q, k, causal, window, block), work, keep)


@_whole.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    window: int,
    block: int,
    work: int,
    keep: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _room(q, k, v, keep)


@torch.library.custom_op("headwise::wide_backward", mutates_args=())
def _whole_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, p: Tensor,
    scale: float, causal: bool, window: int, block: int, work: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _back(grad, q, k, v, o, lse, p, scale, span_of(q, k, causal, window, block), work)


@_whole_back.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, p: Tensor,
    scale: float, causal: bool, window: int, block: int, work: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (
        torch.empty_like(straight(t)) if _by_tiles(q) else t.new_empty(t.shape) for t in (q, k, v)
    )
    return dq, dk, dv


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.rest = inputs[3:-1]


def _gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *_whole_back(grad, *ctx.saved_tensors, *ctx.rest), *(None,) * 6


_whole.register_autograd(_gradients, setup_context=_remember)


# ---- sizes


def padded(n: int) -> int:
    """Rows or columns of whole tiles."""
    return -(-n // TILE) * TILE


def straight(t: Tensor) -> Tensor:
    """The tensor, copied if the numbers of a row do not lie side by side."""
    return (
        t if t.stride(-1) == 1 else t.clone(memory_format=torch.contiguous_format)
    )  # `contiguous` leaves rows of one number


def sums_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _bytes(span: Span, group: int, dtype: torch.dtype, blocks: int, rows: int, keys: int) -> int:
    """Of one z: `blocks` blocks of scores, and `rows` rows a head of what is made of them, over
    `keys` keys."""
    return group * keys * (blocks * span.block * sums_type(dtype).itemsize + rows * dtype.itemsize)


def pieces(count: int, most: int) -> list[slice]:
    """Slices of about equal length, none longer than `most` or one."""
    if not count:
        return []
    size = math.ceil(count / math.ceil(count / max(1, most)))
    return [slice(at, min(at + size, count)) for at in range(0, count, size)]


# ---- one piece


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    kept: Tensor | None,
    span: Span,
    scale: float,
) -> None:
    G = q.shape[1]
    for first, last in span.blocks:
        low, high = span.of(first, last)
        s = _scores(_rows(q, first, last), k[:, low:high])
        p = (
            s.new_empty(s.shape, dtype=q.dtype)
            if kept is None
            else kept[:, G * first : G * last, low:high]
        )
        _soften(s, p, lse[:, :, first:last], scale, first, low, span)
        _product(p, v[:, low:high], o[:, :, first:last])


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    kept: Tensor | None,
    span: Span,
    scale: float,
    chunk: int,
) -> None:
    (Z, G, _, _), N = q.shape, span.keys
    whole = chunk >= N
    for start in range(0, N, chunk):
        stop = min(start + chunk, N)
        here = [
            (first, last)
            for first, last in span.blocks
            if _meets(span.of(first, last), start, stop)
        ]
        if not here:
            continue
        top, rows = here[0][0], here[-1][1] - here[0][0]
        ds = q.new_empty(Z, G * rows, stop - start)
        p = (
            q.new_empty(Z, G * rows, stop - start)
            if kept is None
            else kept[:, G * top : G * (top + rows)]
        )
        for first, last in here:
            low, high = _common(span.of(first, last), start, stop)
            into = slice(G * (first - top), G * (last - top)), slice(low - start, high - start)
            _slopes(
                q,
                k,
                v,
                g,
                lse,
                delta,
                p[:, *into],
                ds[:, *into],
                first,
                last,
                low,
                high,
                span,
                scale,
                kept is not None,
            )
            if whole:
                _product(ds[:, *into], k[:, low:high], dq[:, :, first:last])
        q_rows, g_rows = (
            torch.cat([_rows(t, *at) for at in here], 1) if G > 1 else t[:, 0, top : top + rows]
            for t in (q, g)
        )
        for at in range(start, stop, span.block):
            end = min(at + span.block, stop)
            seeing = [
                (first, last) for first, last in here if _meets(span.of(first, last), at, end)
            ]
            if not seeing:
                continue
            these = slice(G * (seeing[0][0] - top), G * (seeing[-1][1] - top))
            torch.bmm(p[:, these, at - start : end - start].mT, g_rows[:, these], out=dv[:, at:end])
            torch.bmm(
                ds[:, these, at - start : end - start].mT, q_rows[:, these], out=dk[:, at:end]
            )
    if whole:
        return
    for first, last in span.blocks:
        low, high = span.of(first, last)
        ds = q.new_empty(Z, G * (last - first), high - low)
        _slopes(q, k, v, g, lse, delta, None, ds, first, last, low, high, span, scale, False)
        _product(ds, k[:, low:high], dq[:, :, first:last])


def _slopes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    lse: Tensor,
    delta: Tensor,
    p: Tensor | None,
    ds: Tensor,
    first: int,
    last: int,
    low: int,
    high: int,
    span: Span,
    scale: float,
    kept: bool,
) -> None:
    """ds of a block of queries over keys [low, high), and p unless it is kept."""
    s = None if kept else _scores(_rows(q, first, last), k[:, low:high])
    dp = _scores(_rows(g, first, last), v[:, low:high])
    _slope(s, dp, lse[:, :, first:last], delta[:, :, first:last], p, ds, scale, first, low, span)


def _meets(keys: tuple[int, int], start: int, stop: int) -> bool:
    return keys[0] < stop and start < keys[1]


def _common(keys: tuple[int, int], start: int, stop: int) -> tuple[int, int]:
    return max(keys[0], start), min(keys[1], stop)


def _rows(t_ZGQR: Tensor, first: int, last: int) -> Tensor:
    """Queries [first, last) of all heads that share keys, one head after the other: (Z, G x
    queries, R)."""
    return t_ZGQR[:, :, first:last].flatten(1, 2)


def _product(a: Tensor, b: Tensor, out_ZGQR: Tensor) -> None:
    """a b into a block of queries."""
    if out_ZGQR.shape[1] == 1:
        torch.bmm(a, b, out=out_ZGQR[:, 0])
    else:
        out_ZGQR.copy_(torch.bmm(a, b).view(out_ZGQR.shape))


# ---- rows of scores


def _scores(a: Tensor, b: Tensor) -> Tensor:
    """a b^T with sums that are not rounded to the operands' type."""
    kind = sums_type(a.dtype)
    return torch.bmm(a.to(kind), b.to(kind).mT)


def _unseen(
    span: Span, per: int, rows: int, query0: int, key0: int, n: int, device: torch.device
) -> Tensor | None:
    """Which entries of (rows, n) are masked."""
    if not span.causal and not span.window:
        return None
    token = span.shift + query0 + torch.arange(rows, device=device).unsqueeze(1) % per
    key = key0 + torch.arange(n, device=device)
    out = key > token if span.causal else torch.zeros(rows, n, dtype=torch.bool, device=device)
    return out | ((key - token).abs() >= span.window) if span.window else out


def _soften(
    s: Tensor, p: Tensor, lse: Tensor, scale: float, query0: int, key0: int, span: Span
) -> None:
    """p = softmax(scale s) and lse = log sum exp(scale s) over what each row sees, into views."""
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
    """ds = p (dp - delta) scale into a view; p is made from the scores, and written if there is a
    place, or there when there are none."""
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
