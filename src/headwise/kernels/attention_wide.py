"""Attention of large rank: scores written out, in memory that does not grow with the length's
square.

Fused kernels keep a tile of queries, keys and sums of one head on the chip. Beyond rank 256 it does
not fit, and they crawl. But then scores are few beside the operands: one number for a pair of
tokens against `rank` products. So they may as well be written out.

    forward    s = q k^T over the keys that a block of queries sees,  p = softmax(scale s),  o = p v
    backward   ds = scale p (g v^T - delta),  dq = ds k,  dk = ds^T q,  dv = p^T g

The weights p are kept for the backward pass where they are small beside the operands; else it makes
the scores again. Temporary memory is about `work` bytes, whatever the length.

Two ways compute this: attention_wide_triton.py by tiles on a GPU, and attention_wide_plain.py by
matrix products of whole blocks anywhere, the first one's twin. This file chooses between them,
allocates what they write, and makes them one operation for autograd and for torch.compile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise.kernels import attention_wide_plain, has_triton
from headwise.kernels.attention_formula import batched, gradients
from headwise.kernels.attention_wide_span import Span, padded, straight, sums_type

BLOCK = 512  # queries and keys of a block, without Triton
KEEP = 2.0  # p is kept if it is not larger than this many times q, k, v and o together


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
    v (batch, KV heads, keys, width).

    `work`: bytes of temporary memory, 0 for `Span.work`. `keep`: how large the weights may be to be
    kept for the backward pass, in sizes of all operands.
    """
    # Under torch.compile the whole pass is one operation, with its own formula for the gradient.
    if torch.compiler.is_compiling():
        keep = keep if torch.is_grad_enabled() else 0.0
        return _wide(q, k, v, scale, causal, window, block, work, keep)[0]
    span = Span.of(q, k, causal, window)
    out: Tensor = Wide.apply(q, k, v, float(scale), span, block, work, keep)  # type: ignore[assignment]
    return out


class Wide(torch.autograd.Function):
    """`attend_wide` and its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        span: Span,
        block: int,
        work: int,
        keep: float,
    ) -> Tensor:
        """Outputs; weights are kept only where a gradient is wanted."""
        ctx.options = scale, span, block, work
        keep = keep if any(ctx.needs_input_grad) else 0.0
        o, lse, p = _forward(q, k, v, scale, span, block, work, keep)
        ctx.save_for_backward(q, k, v, o, lse, p)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradients of q, k and v."""
        if batched(grad):
            q, k, v, *_ = ctx.saved_tensors
            scale, span, *_ = ctx.options
            found = gradients(grad, q, k, v, scale, span.seen(q.device))
        else:
            found = _backward(grad, *ctx.saved_tensors, *ctx.options)
        return *found, None, None, None, None, None


def runs_on_triton(t: Tensor) -> bool:
    """Whether attention_wide_triton computes it."""
    dtypes = torch.float32, torch.bfloat16, torch.float16
    return t.device.type == "cuda" and t.dtype in dtypes and has_triton()


def _allocate(q: Tensor, k: Tensor, v: Tensor, keep: float) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the heads' outputs, for the log sum exp of each query, and for the weights if they
    are small enough to be kept (else a tensor of no numbers)."""
    # Triton's kernels write weights in whole tiles, and outputs with heads beside each other, as
    # the output projection reads them. The twin has one table per KV head.
    B, H, Q, _ = q.shape
    KV, N, V = k.shape[1], k.shape[2], v.shape[3]
    operands = q.numel() + k.numel() + v.numel() + B * H * Q * V
    if runs_on_triton(q):
        weights: tuple[int, ...] = (B, H, padded(Q), padded(N))
        o = q.new_empty(B, Q, H, V).transpose(1, 2)
    else:
        weights = (B * KV, H // KV * Q, N)
        o = q.new_empty(B, H, Q, V)
    kept = keep * operands >= math.prod(weights)
    lse = torch.empty(B, H, Q, dtype=sums_type(q.dtype), device=q.device)
    return o, lse, q.new_empty(weights if kept else (0,))


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    span: Span,
    block: int,
    work: int,
    keep: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, log sums and, where they are kept, weights."""
    o, lse, p = _allocate(q, k, v, keep)
    weights = p if p.numel() else None
    work = work or span.work
    if runs_on_triton(q):
        from headwise.kernels import attention_wide_triton

        # Triton launches on the current device; in a backward pass it is the tensors'.
        with torch.cuda.device_of(q):
            attention_wide_triton.forward(q, k, v, o, lse, weights, scale, span, work)
    else:
        attention_wide_plain.forward(q, k, v, o, lse, weights, scale, span, work, block)
    return o, lse, p


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    p: Tensor,
    scale: float,
    span: Span,
    block: int,
    work: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    weights = p if p.numel() else None
    work = work or span.work
    if runs_on_triton(q):
        from headwise.kernels import attention_wide_triton

        return attention_wide_triton.backward(grad, q, k, v, o, lse, weights, scale, span, work)
    return attention_wide_plain.backward(grad, q, k, v, o, lse, weights, scale, span, work, block)


# ---- for torch.compile: one operation that it does not look into


@torch.library.custom_op("headwise::wide", mutates_args=())
def _wide(
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
    return _forward(q, k, v, scale, Span.of(q, k, causal, window), block, work, keep)


@_wide.register_fake
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
    return _allocate(q, k, v, keep)


@torch.library.custom_op("headwise::wide_backward", mutates_args=())
def _wide_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    p: Tensor,
    scale: float,
    causal: bool,
    window: int,
    block: int,
    work: int,
) -> tuple[Tensor, Tensor, Tensor]:
    span = Span.of(q, k, causal, window)
    return _backward(grad, q, k, v, o, lse, p, scale, span, block, work)


@_wide_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    p: Tensor,
    scale: float,
    causal: bool,
    window: int,
    block: int,
    work: int,
) -> tuple[Tensor, Tensor, Tensor]:
    if runs_on_triton(q):
        return (
            torch.empty_like(straight(q)),
            torch.empty_like(straight(k)),
            torch.empty_like(straight(v)),
        )
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.options = inputs[3:-1]


def _gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    found = _wide_backward(grad, *ctx.saved_tensors, *ctx.options)
    return *found, None, None, None, None, None, None


_wide.register_autograd(_gradients, setup_context=_save)
