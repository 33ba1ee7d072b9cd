"""Attention over a handful of keys, for machines where a matrix product per head is all overhead.

Batch and heads become one innermost axis of lanes L, so that every operation is elementwise over
long contiguous rows whatever the rank; at rank 1 and 8 keys that is four to five times faster on a
CPU than a fused kernel per head. No operation reduces over lanes, so a lane's bits depend on
nothing but its own numbers. The plain twin is `headwise.model.attention.plain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise.kernels.attention_formula import batched, gradients

LANES = 4096  # at once, so that the (keys, keys, lanes) scores stay in cache


def short(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) v for (batch, heads, tokens, width) tensors of equal head count."""
    out: Tensor = _Short.apply(q, k, v, scale)  # type: ignore[assignment]
    return out


def short_packed(qkv_BNP: Tensor, heads: int, scale: float) -> Tensor:
    """The same on one projection's output, heads innermost so that whole rows of lanes are copied:
    (batch, tokens, 3 x rank x heads) -> (batch, tokens, rank x heads)."""
    out: Tensor = _ShortPacked.apply(qkv_BNP, heads, scale)  # type: ignore[assignment]
    return out


# ---- on lanes


def _products(a_RQL: Tensor, b_RNL: Tensor) -> Tensor:
    """The inner product over R of every pair: (R, Q, L), (R, N, L) -> (Q, N, L)."""
    # One pass over lanes for each of the R coordinates.
    out_QNL = a_RQL[0].unsqueeze(1) * b_RNL[0].unsqueeze(0)
    for a_QL, b_NL in zip(a_RQL[1:], b_RNL[1:], strict=True):
        out_QNL.addcmul_(a_QL.unsqueeze(1), b_NL.unsqueeze(0))
    return out_QNL


def _mix(weights_NQL: Tensor, x_RNL: Tensor, out_RQL: Tensor) -> None:
    """The weighted sum over N: (N, Q, L), (R, N, L) -> (R, Q, L)."""
    # One pass for each of the N keys, straight into the output.
    pairs = zip(weights_NQL.unsqueeze(1), x_RNL.transpose(0, 1).unsqueeze(2), strict=True)
    if torch.compiler.is_compiling():  # it takes no piece of a tensor as `out`, and joins these
        out_RQL.copy_(torch.mul(*next(pairs)))
    else:
        torch.mul(*next(pairs), out=out_RQL)
    for w_1QL, x_R1L in pairs:
        out_RQL.addcmul_(w_1QL, x_R1L)


def _forward(q_RQL: Tensor, k_RNL: Tensor, v_VNL: Tensor, o_VQL: Tensor) -> Tensor:
    """Writes the output, returns the attention weights (Q, N, L)."""
    # The scale is in q already.
    p_QNL = _products(q_RQL, k_RNL)
    p_QNL.sub_(p_QNL.amax(1, keepdim=True)).exp_()
    first_QL, *others = p_QNL.unbind(1)
    total_QL = first_QL.clone()
    for p_QL in others:  # not .sum(1): its order depends on where a lane lies
        total_QL.add_(p_QL)
    p_QNL.div_(total_QL.unsqueeze(1))
    _mix(p_QNL.transpose(0, 1), v_VNL, o_VQL)
    return p_QNL


def _backward(
    tensors: Sequence[Tensor], p_QNL: Tensor, grads: Sequence[Tensor], scale: float
) -> None:
    """Takes (q, k, v, o, gradient of o); writes the gradients of the unscaled q, of k and of v."""
    # dp = g v^T, and delta = g o: ds = p (dp - delta).
    q_RQL, k_RNL, v_VNL, o_VQL, g_VQL = tensors
    ds_QNL = _products(g_VQL, v_VNL)
    dot_QL = g_VQL[0] * o_VQL[0]
    for g_QL, o_QL in zip(g_VQL[1:], o_VQL[1:], strict=True):
        dot_QL.addcmul_(g_QL, o_QL)
    ds_QNL.sub_(dot_QL.unsqueeze(1)).mul_(p_QNL)
    # dq = ds k, times the scale since q came in scaled; dk = ds^T q has the scale from q; dv = p^T
    # g.
    _mix(ds_QNL.transpose(0, 1), k_RNL, grads[0])
    grads[0].mul_(scale)
    _mix(ds_QNL, q_RQL, grads[1])
    _mix(p_QNL, g_VQL, grads[2])


def _forward_all(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
    # LANES lanes at a time.
    o = v.new_empty(v.shape[0], q.shape[1], v.shape[2])
    return o, [_forward(*t) for t in zip(*(x.split(LANES, -1) for x in (q, k, v, o)), strict=True)]


def _backward_all(
    tensors: Sequence[Tensor], weights: Sequence[Tensor], grads: Sequence[Tensor], scale: float
) -> None:
    pieces = zip(*(x.split(LANES, -1) for x in tensors), strict=True)
    outs = zip(*(x.split(LANES, -1) for x in grads), strict=True)
    for piece, p, out in zip(pieces, weights, outs, strict=True):
        _backward(piece, p, out, scale)


# ---- into lanes and back


def _to_lanes(x_BHNR: Tensor) -> Tensor:
    return x_BHNR.permute(3, 2, 0, 1).reshape(x_BHNR.shape[3], x_BHNR.shape[2], -1)


def _from_lanes(x_RNL: Tensor, batch: int, heads: int) -> Tensor:
    return x_RNL.view(*x_RNL.shape[:2], batch, heads).permute(2, 3, 1, 0)


class _Short(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention on lanes; keeps operands, output and weights."""
        lanes = _to_lanes(q) * scale, _to_lanes(k), _to_lanes(v)
        o, weights = _forward_all(*lanes)
        ctx.save_for_backward(*lanes, o, *weights)
        ctx.scale, ctx.sizes = scale, q.shape[:2]
        return _from_lanes(o, *ctx.sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradients of q, k and v."""
        q, k, v, o, *weights = ctx.saved_tensors
        if batched(grad):  # the scale is in q already
            q, k, v = (_from_lanes(t, *ctx.sizes) for t in (q, k, v))
            dq, dk, dv = gradients(grad, q, k, v, 1.0)
            return dq * ctx.scale, dk, dv, None
        grads = [torch.empty_like(x) for x in (q, k, v)]
        _backward_all((q, k, v, o, _to_lanes(grad)), weights, grads, ctx.scale)
        return *(_from_lanes(g, *ctx.sizes) for g in grads), None


class _ShortPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_BNP: Tensor, heads: int, scale: float) -> Tensor:
        """Attention straight from one projection's output."""
        # (B, N, 3, R, H) to (3, R, N, B, H): batch and heads become the lanes, copied in whole rows
        # of heads, and q is scaled on the way.
        batch, tokens, packed = qkv_BNP.shape
        rank = packed // (3 * heads)
        parts = qkv_BNP.view(batch, tokens, 3, rank, heads).permute(2, 3, 1, 0, 4)
        lanes = qkv_BNP.new_empty(3, rank, tokens, batch, heads)
        torch.mul(parts[0], scale, out=lanes[0])
        lanes[1:].copy_(parts[1:])
        q, k, v = lanes.flatten(3)
        o, weights = _forward_all(q, k, v)
        ctx.save_for_backward(lanes, o, *weights)
        ctx.scale = scale
        return o.view(rank, tokens, batch, heads).permute(2, 1, 0, 3).reshape(batch, tokens, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradient of the projection's output."""
        lanes, o, *weights = ctx.saved_tensors
        _, rank, tokens, batch, heads = lanes.shape
        # The same order of axes there and back.
        g = grad.view(batch, tokens, rank, heads).permute(2, 1, 0, 3).reshape(rank, tokens, -1)
        grads = torch.empty_like(lanes)
        _backward_all((*lanes.flatten(3), o, g), weights, list(grads.flatten(3)), ctx.scale)
        return grads.permute(3, 2, 0, 1, 4).reshape(batch, tokens, -1), None, None
