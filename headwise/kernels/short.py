"""Attention over a handful of keys, for machines where a matrix product per head is all overhead.

Batch and heads become one innermost axis of lanes, so that every operation is elementwise over
long contiguous rows whatever the rank; at rank 1 and 8 keys that is five times faster on a CPU
than a fused kernel per head. No operation reduces over lanes, so a lane's bits depend on nothing
but its own numbers. The plain twin is `headwise.attention.plain`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LANES = 4096  # at once, so that the (keys, keys, lanes) scores stay in cache


def short(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) v for (batch, heads, tokens, width) tensors of equal head count."""
    out: Tensor = _Short.apply(q, k, v, scale)  # type: ignore[assignment]
    return out


def _to_lanes(x_BHNR: Tensor) -> Tensor:
    return x_BHNR.permute(3, 2, 0, 1).reshape(x_BHNR.shape[3], x_BHNR.shape[2], -1)


def _from_lanes(x_RNL: Tensor, batch: int, heads: int) -> Tensor:
    return x_RNL.reshape(*x_RNL.shape[:2], batch, heads).permute(2, 3, 1, 0)


def _products(a_RQL: Tensor, b_RNL: Tensor) -> Tensor:
    """The inner product over R of every pair: (R, Q, L), (R, N, L) -> (Q, N, L)."""
    out_QNL = a_RQL[0].unsqueeze(1) * b_RNL[0].unsqueeze(0)
    for a_QL, b_NL in zip(a_RQL[1:], b_RNL[1:], strict=True):
        out_QNL.addcmul_(a_QL.unsqueeze(1), b_NL.unsqueeze(0))
    return out_QNL


def _mix(weights_NQL: Tensor, x_RNL: Tensor) -> Tensor:
    """The weighted sum over N: (N, Q, L), (R, N, L) -> (R, Q, L)."""
    out_RQL = weights_NQL[0].unsqueeze(0) * x_RNL[:, 0].unsqueeze(1)
    for n in range(1, weights_NQL.shape[0]):
        out_RQL.addcmul_(weights_NQL[n].unsqueeze(0), x_RNL[:, n].unsqueeze(1))
    return out_RQL


def _forward(q_RQL: Tensor, k_RNL: Tensor, v_VNL: Tensor) -> tuple[Tensor, Tensor]:
    p_QNL = _products(q_RQL, k_RNL)
    p_QNL.sub_(p_QNL.amax(1, keepdim=True)).exp_()
    total_QL = p_QNL[:, 0].clone()
    for n in range(1, p_QNL.shape[1]):  # not .sum(1): its order depends on where a lane lies
        total_QL.add_(p_QNL[:, n])
    p_QNL.div_(total_QL.unsqueeze(1))
    return p_QNL, _mix(p_QNL.transpose(0, 1), v_VNL)


def _backward(
    q_RQL: Tensor, k_RNL: Tensor, v_VNL: Tensor, o_VQL: Tensor, g_VQL: Tensor, p_QNL: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    ds_QNL = _products(g_VQL, v_VNL)
    dot_QL = g_VQL[0] * o_VQL[0]
    for g_QL, o_QL in zip(g_VQL[1:], o_VQL[1:], strict=True):
        dot_QL.addcmul_(g_QL, o_QL)
    ds_QNL.sub_(dot_QL.unsqueeze(1)).mul_(p_QNL)
    dq_RQL = _mix(ds_QNL.transpose(0, 1), k_RNL).mul_(scale)
    return dq_RQL, _mix(ds_QNL, q_RQL), _mix(p_QNL, g_VQL)


class _Short(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        batch, heads = q.shape[:2]
        tensors = _to_lanes(q) * scale, _to_lanes(k), _to_lanes(v)
        parts = [_forward(*t) for t in zip(*(x.split(LANES, -1) for x in tensors), strict=True)]
        o_VQL = torch.cat([o for _, o in parts], -1)
        ctx.save_for_backward(*tensors, o_VQL, *(p for p, _ in parts))
        ctx.scale, ctx.batch_heads = scale, (batch, heads)
        return _from_lanes(o_VQL, batch, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, *weights = ctx.saved_tensors
        tensors = [x.split(LANES, -1) for x in (q, k, v, o, _to_lanes(grad))]
        parts = [_backward(*t, ctx.scale) for t in zip(*tensors, weights, strict=True)]
        grads = (_from_lanes(torch.cat(g, -1), *ctx.batch_heads) for g in zip(*parts, strict=True))
        return (*grads, None)
