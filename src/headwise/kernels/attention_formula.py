"""The gradients of attention by the formula, made of operations that every transform of PyTorch
takes: what a kernel's backward pass falls back on when PyTorch hands it a batch of gradients.

Axes: B batch, K KV heads, G query heads that share keys, Q queries, N keys, R rank, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def batched(grad: Tensor) -> bool:
    """Whether a gradient stands for many at once: `is_grads_batched`, or vmap around a backward
    pass."""
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(grad) or functorch.is_legacy_batchedtensor(grad)


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, seen_QN: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values; operands as in `attend`, `seen_QN` true where a
    query sees a key."""
    # p = softmax(scale q k^T), dp = g v^T, ds = p (dp - sum p dp); sums in 32 bits at least.
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    B, H, Q, R = q.shape
    K = k.shape[1]
    q_BKGQR = q.to(exact).view(B, K, H // K, Q, R)
    g_BKGQV = grad.to(exact).reshape(B, K, H // K, Q, v.shape[-1])
    k_BK1NR, v_BK1NV = k.to(exact).unsqueeze(2), v.to(exact).unsqueeze(2)
    s_BKGQN = q_BKGQR @ k_BK1NR.mT * scale
    if seen_QN is not None:
        s_BKGQN = s_BKGQN.masked_fill(~seen_QN, float("-inf"))
    p_BKGQN = s_BKGQN.softmax(-1)
    dp_BKGQN = g_BKGQV @ v_BK1NV.mT
    ds_BKGQN = p_BKGQN * (dp_BKGQN - (p_BKGQN * dp_BKGQN).sum(-1, keepdim=True)) * scale
    dq = (ds_BKGQN @ k_BK1NR).reshape(q.shape)
    dk = (ds_BKGQN.mT @ q_BKGQR).sum(2)
    dv = (p_BKGQN.mT @ g_BKGQV).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
