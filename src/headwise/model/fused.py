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
from headwise.model.masks import Terms
from headwise.model.plans import Plan
from headwise.model.reference import repeat_kv
from headwise.model.tracing import formula_wanted

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def fused(plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float, terms: Terms) -> Tensor:
    """One of torch's kernels, on operands padded, repeated and laid out as it wants them."""
    call, choice = plan.call, plan.choice
    # A causal mask with as many queries as keys is the kernel's own. Every other mask is a tensor.
    mask = _mask(terms, q) if plan.masked else None
    causal = plan.causal
    if terms.sinks is not None:
        q, k, v, mask = _with_sinks(q, k, v, mask, terms.sinks, scale, call.sink_ranks, causal)
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
    grouped = plan.grouped and not choice.repeat_kv
    kernel = KERNELS[choice.backend]
    # On the first call torch is asked which kernel it would take (it cannot be while it compiles or
    # transforms). Where it is the chosen one, later calls need not name it: entering `sdpa_kernel`
    # takes longer than a small attention.
    can_ask = plan.torch_agrees is None and not torch.compiler.is_compiling()
    if can_ask and not formula_wanted():
        preferred = torch._fused_sdp_choice(
            q, k, v, mask, terms.dropout, causal, scale=scale, enable_gqa=grouped
        )
        plan.torch_agrees = preferred == kernel.value
        as_given = not (any(choice.pad) or choice.repeat_kv or plan.masked or plan.unbatched)
        as_given = as_given and plan.reach is None
        plan.direct = plan.torch_agrees and as_given and not call.beyond
    if plan.torch_agrees:
        out = F.scaled_dot_product_attention(
            q, k, v, mask, terms.dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    else:
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(
                q, k, v, mask, terms.dropout, is_causal=causal, scale=scale, enable_gqa=grouped
            )
    if terms.sinks is not None and causal:
        out = out[..., 1:, :]
    return out[..., : call.width] if pad_width else out


def _mask(terms: Terms, q: Tensor) -> Tensor | None:
    """The table of a call as a kernel takes it: two or four axes, bool or the operands' type or
    float32."""
    table = terms.table(q.device)
    if table is None or table.dtype in (torch.bool, q.dtype, torch.float32):
        return table
    return table.to(q.dtype)


def _with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks_H: Tensor,
    scale: float,
    ranks: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Operands with one more key, before all others, whose score is the sink of the head and whose
    value is zero.

    The score is carried by coordinates of its own: the sink over the scale in every query, one in
    the new key, zero in all other keys. In 16 bits a second coordinate carries what the first one's
    rounding leaves. A causal mask stays the kernel's own: one more query, before all others and
    left out of the answer, keeps queries and keys equally many.
    """
    carried = sinks_H.to(torch.float64 if q.dtype == torch.float64 else torch.float32) / scale
    first = carried.to(q.dtype)
    parts = [first] if ranks == 1 else [first, (carried - first).to(q.dtype)]
    columns = torch.stack(parts, -1)[:, None].expand(*q.shape[:-1], ranks)
    q = torch.cat((q, columns), -1)
    k = F.pad(F.pad(k, (0, ranks)), (0, 0, 1, 0))
    k = torch.cat((k[..., :-ranks], _first_row_ones(k[..., -ranks:])), -1)
    v = F.pad(v, (0, 0, 1, 0))
    if causal:
        q = F.pad(q, (0, 0, 1, 0))
    if mask is not None:
        mask = mask.expand(*mask.shape[:-1], v.shape[-2] - 1)
        mask = F.pad(mask, (1, 0), value=1.0 if mask.dtype == torch.bool else 0.0)
    return q, k, v, mask


def _first_row_ones(t: Tensor) -> Tensor:
    rows = torch.arange(t.shape[-2], device=t.device).unsqueeze(-1)
    return (rows == 0).to(t.dtype).expand_as(t)
