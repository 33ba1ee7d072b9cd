"""Attention of given queries, keys and values: the function `attend`, on the fastest backend that
takes the sizes (backends.py).

Axes: B batch, N keys, Q queries, H heads, R rank, V value width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.kernels.attention_cpu import short
from headwise.kernels.attention_wide import attend_wide
from headwise.model import reference
from headwise.model.extras import Documents, Extras, check_tensors, with_tensors
from headwise.model.fused import KERNELS, fused
from headwise.model.masks import Terms
from headwise.model.plans import Operands, Plan, plans
from headwise.model.reference import blocked, repeat_kv, with_weights
from headwise.model.tracing import autocast_dtype, formula_wanted


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int = 0,
    scale: float | None = None,
    hard: bool = False,
    backend: str = "auto",
    graphed: bool = False,
    mask: Tensor | None = None,
    documents: Documents | None = None,
    offset: int | None = None,
    dropout: float = 0.0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v, or hardmax, on the fastest backend for these sizes.

    q is (batch, heads, queries, rank), k (batch, kv heads, keys, rank), v (batch, kv heads, keys,
    width), or all three without batch; fewer KV heads serve groups of query heads. `scale` is
    rank ** -0.5 unless given. `graphed`: the call is part of a CUDA graph, where launches cost
    nothing, so that the choice need not mind them.

    Query i stands at key i + `offset`; unless given, the last query stands at the last key. A query
    sees the keys that everything given lets it see, and one that sees none is answered with zeros:
    `causal`: no later key. `window` w > 0: keys nearer than w. `documents`: integer ids (batch,
    keys), or a pair (of queries, of keys): keys of its own document. `mask`: bool, true where seen,
    or floating, added to the scores; anything that broadcasts to (batch, heads, queries, keys).

    The weights are softmax(c tanh(scores / c) + alibi (key - query) + mask) with `softcap` c and
    the slopes `alibi` (heads,). `sinks` (heads,) are logits that join the softmax and take weight
    without a value. `dropout` is the probability that a weight is zero; the others grow.

    >>> attend(torch.zeros(2, 6, 5, 3), torch.zeros(2, 2, 5, 3), torch.ones(2, 2, 5, 7)).shape
    torch.Size([2, 6, 5, 7])
    """
    extras = None
    usual = mask is None and documents is None and offset is None and sinks is None
    if not usual or alibi is not None or dropout or softcap:
        extras = Extras.of(mask, documents, offset, dropout, softcap, sinks, alibi)
    # Everything that decides the kernel, gathered into one hashable value. Checking it and choosing
    # a backend take longer than a small attention, so the decision is kept as a plan. Under
    # torch.compile it is made once, while tracing, and the cache is left alone.
    try:
        operands = Operands(
            q.shape, k.shape, v.shape,
            q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device,
            causal, window, hard, backend, graphed,
            q.requires_grad or k.requires_grad or v.requires_grad,
            reference.BLOCK_BYTES,
            extras,
        )  # fmt: skip
        contiguous = _rows_contiguous(q, k, v)
    except (AttributeError, RuntimeError):  # no tensors with sizes and strides
        check_tensors(q, k, v)
        raise
    plan = None if torch.compiler.is_compiling() else plans.find(operands)
    # The usual call: torch picks the chosen kernel by itself, and the operands need no change.
    if plan is not None and plan.direct and contiguous:
        try:
            return F.scaled_dot_product_attention(
                q, k, v,
                is_causal=plan.causal, enable_gqa=plan.grouped,
                scale=plan.scale if scale is None else scale,
            )  # fmt: skip
        except NotImplementedError:  # forward derivatives: the formula has them
            return _by_formula(plan, q, k, v, plan.scale if scale is None else scale, plan.terms)
    # Under autocast all operands take its type, and nothing on the way takes another.
    dtype = autocast_dtype(q.device.type)
    if dtype is not None:
        q, k, v = _cast(dtype, q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            return attend(
                q, k, v,
                causal=causal, window=window, scale=scale, hard=hard,
                backend=backend, graphed=graphed,
                mask=mask, documents=documents, offset=offset,
                dropout=dropout, softcap=softcap, sinks=sinks, alibi=alibi,
            )  # fmt: skip
    if plan is None:
        check_tensors(q, k, v)
        plan = Plan.of(operands) if torch.compiler.is_compiling() else plans.get(operands)
    scale = plan.scale if scale is None else scale
    terms = plan.terms
    if extras is not None:
        terms = with_tensors(terms, mask, documents, sinks, alibi)
    if plan.unbatched:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    out = _reached(plan, q, k, v, scale, terms)
    return out.squeeze(0) if plan.unbatched else out


def attend_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int = 0,
    scale: float | None = None,
    hard: bool = False,
    mask: Tensor | None = None,
    documents: Documents | None = None,
    offset: int | None = None,
    dropout: float = 0.0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend` by the formula, and the weights (batch, heads, queries, keys) that it gave the
    values, after dropout."""
    check_tensors(q, k, v)
    dtype = autocast_dtype(q.device.type)
    if dtype is not None:
        q, k, v = _cast(dtype, q, k, v)
    extras = Extras.of(mask, documents, offset, dropout, softcap, sinks, alibi)
    operands = Operands(
        q.shape, k.shape, v.shape,
        q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device,
        causal, window, hard, "plain", False, False, reference.BLOCK_BYTES, extras,
    )  # fmt: skip
    plan = Plan.of(operands)
    scale = plan.scale if scale is None else scale
    terms = with_tensors(plan.terms, mask, documents, sinks, alibi)
    if plan.unbatched:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    if dtype is None:
        out, weights = with_weights(q, k, v, scale, terms.table(q.device), hard, terms)
    else:
        with torch.autocast(q.device.type, enabled=False):
            out, weights = with_weights(q, k, v, scale, terms.table(q.device), hard, terms)
    weights = weights.to(out.dtype)
    return (out.squeeze(0), weights.squeeze(0)) if plan.unbatched else (out, weights)


def _reached(plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float, terms: Terms) -> Tensor:
    """The call on what its queries can reach."""
    reach = plan.reach
    if reach is None:
        return _computed(plan, q, k, v, scale, terms)
    terms = reach.terms(terms, plan.call.hides)
    return reach.answer(_computed(plan, *reach.operands(q, k, v), scale, terms))


def _computed(plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float, terms: Terms) -> Tensor:
    """The call on the backend of its plan."""
    call, choice = plan.call, plan.choice
    # Torch's kernels first; they want padding and a layout of their own.
    if choice.backend in KERNELS:
        try:
            return fused(plan, q, k, v, scale, terms)
        except NotImplementedError:  # forward derivatives: the formula has them
            return _by_formula(plan, q, k, v, scale, terms)
    if choice.backend in ("plain", "blocked") or formula_wanted():
        return _by_formula(plan, q, k, v, scale, terms)
    # This one takes grouped KV heads and masks as they are.
    if choice.backend == "wide":
        return attend_wide(q, k, v, scale, call.causal, call.window)
    # The kernels for short sequences take one KV head per query head, and no mask.
    k, v = repeat_kv(k, call.heads), repeat_kv(v, call.heads)
    if choice.backend == "short":
        if call.half:  # it keeps scores in the type of its operands
            return short(q.float(), k.float(), v.float(), scale).to(q.dtype)
        return short(q, k, v, scale)
    from headwise.kernels.attention_short_triton import attend_heads

    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
    return attend_heads(q, k, v, scale, precision)


def _by_formula(plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float, terms: Terms) -> Tensor:
    """The call with its scores (B, H, Q, N) in memory, or a block of queries at a time."""
    call, choice = plan.call, plan.choice
    if choice.backend == "plain":
        return with_weights(q, k, v, scale, terms.table(q.device), call.hard, terms)[0]
    return blocked(q, k, v, scale, terms, call.hard)


def _cast(dtype: torch.dtype, *operands: Tensor) -> list[Tensor]:
    """Operands in the type of autocast, which leaves float64 alone."""
    return [t if t.dtype == torch.float64 else t.to(dtype) for t in operands]


def _rows_contiguous(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the numbers of each row lie side by side."""
    if q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
        return True
    return q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
