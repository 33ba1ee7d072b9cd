"""A call of `attend` on one of PyTorch's fused kernels: operands padded, repeated and laid out as
that kernel wants them.

Axes: B batch, H heads, N keys, Q queries, R rank, V value width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwise.kernels.attention_wide_span import straight
from headwise.model.plans import Plan
from headwise.model.reference import mask_of, repeat_kv

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def fused(plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One of torch's kernels, on operands padded, repeated and laid out as it wants them."""
    call, choice = plan.call, plan.choice
    if choice.repeat_kv:
        k, v = repeat_kv(k, call.heads), repeat_kv(v, call.heads)
    # Zeros behind the rank add nothing to a score. Zeros behind the value width give columns of
    # zeros, which are cut off at the end.
    pad_rank, pad_width = choice.pad
    if pad_rank:
        q, k = F.pad(q, (0, pad_rank)), F.pad(k, (0, pad_rank))
    if pad_width:
        v = F.pad(v, (0, pad_width))
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:  # no fused kernel takes these
        q, k, v = straight(q), straight(k), straight(v)
    # A causal mask with as many queries as keys is the kernel's own. Every other mask is a tensor
    # (Q, N).
    mask = None
    if call.masked:
        mask = mask_of(call.queries, call.keys, call.causal, call.window, q.device)
    causal = call.causal and mask is None
    grouped = k.shape[1] != q.shape[1]
    kernel = KERNELS[choice.backend]
    compiling = torch.compiler.is_compiling()
    # On the first call torch is asked which kernel it would take. Where it is the chosen one, later
    # calls need not name it: entering `sdpa_kernel` takes longer than a small attention.
    if plan.torch_agrees is None and not compiling:
        preferred = torch._fused_sdp_choice(
            q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped
        )
        plan.torch_agrees = preferred == kernel.value
        as_given = not (any(choice.pad) or choice.repeat_kv or call.masked)
        plan.direct = plan.torch_agrees and as_given
    if plan.torch_agrees and not compiling:
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    else:
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped
            )
    return out[..., : call.width] if pad_width else out
