"""`attend` for models that are compiled: heads beyond width 256 are one operation that torch.compile does not look into."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.attention import attend
from headwise.kernels.wide import BLOCK, LONG, WORK, Span, Wide, sums_type


def attend_compiled(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int, scale: float) -> Tensor:
    """`attend`, whether it is being compiled or not."""
    if torch.compiler.is_compiling() and max(q.shape[-1], v.shape[-1]) > 256:
        return _whole(q, k, v, causal, window, scale)[0]
    return attend(q, k, v, causal=causal, window=window, scale=scale)


class _Context:
    """What the wide kernels keep between the passes; weights are not kept, as an operation's outputs have sizes known before."""

    needs_input_grad = (True, True, True)

    def __init__(self, q: Tensor, k: Tensor, causal: bool, window: int, scale: float) -> None:
        keys = k.shape[2]
        self.span = Span(q.shape[2], keys, causal, window if 0 < window < keys else 0, BLOCK)
        self.scale, self.work = scale, WORK if keys <= LONG else WORK // 4
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


@torch.library.custom_op("headwise::attend", mutates_args=())
def _whole(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """The heads' outputs, and the logarithm of each softmax's sum for the backward pass."""
    ctx = _Context(q, k, causal, window, scale)
    out = Wide.forward(ctx, q, k, v, scale, ctx.span, ctx.work, 0.0)
    return out, ctx.saved_tensors[4]


@_whole.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, scale: float) -> tuple[Tensor, Tensor]:
    (B, H, Q, _), KV = q.shape, k.shape[1]
    return q.new_empty(B, H, Q, v.shape[3]), q.new_empty(B * KV, H // KV, Q, dtype=sums_type(q.dtype))


@torch.library.custom_op("headwise::attend_backward", mutates_args=())
def _back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    ctx, (_, G, Q) = _Context(q, k, causal, window, scale), lse.shape
    q_ZGQR, o_ZGQV = (t.reshape(-1, G, Q, t.shape[-1]) for t in (q, out))
    ctx.save_for_backward(q_ZGQR, k.flatten(0, 1), v.flatten(0, 1), o_ZGQV, lse, None)
    with torch.no_grad():
        gradients: Any = Wide.backward(ctx, grad)
    dq, dk, dv = gradients[:3]
    return dq, dk, dv


@_back.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.rest = inputs[3:]


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_back(grad, *ctx.saved_tensors, *ctx.rest), None, None, None


_whole.register_autograd(_gradients, setup_context=_keep)
