"""headwise attention in Hugging Face models: any head_dim, grouped heads, windows.

    from headwise.integrations.transformers import register
    model = AutoModelForCausalLM.from_config(config, attn_implementation=register())

Masks that are causal, windowed or absent go to `attend`. Every other mask (padding, packed
sequences, 4D masks of one's own, static caches) is honoured exactly, with the scores written out a
block of queries at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headwise.errors import UsageError
from headwise.model import reference
from headwise.model.attention import attend
from headwise.model.reference import mask_of

NAME = "headwise"
_REFUSED = {
    "softcap": "a softcap of the scores",
    "s_aux": "an attention sink",
    "position_bias": "a learned bias of the scores",
    "head_mask": "a mask of heads",
    "cache": "a paged cache",
    "block_indices": "a choice of key blocks",
    "indices": "a choice of keys",
    "output_attentions": "returning the attention weights",
}


def register(name: str = NAME) -> str:
    """Make `attn_implementation=name` run on headwise; returns the name."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise UsageError(
            f"transformers with its attention interface is needed (5.0 or newer), got: {error}"
        ) from None
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask that transformers makes for SDPA; one that `attend` can make itself carries the
    arguments for that.

    What it carries is an attribute, so whoever cuts or copies the mask loses it: then the mask
    itself is taken.
    """
    from transformers.masking_utils import sdpa_mask

    seen_BHQN = sdpa_mask(*args, **kwargs)
    if isinstance(seen_BHQN, Tensor) and not torch.compiler.is_compiling():
        setattr(seen_BHQN, NAME, _known(seen_BHQN, kwargs.get("local_size") or 0))
    return seen_BHQN


def _known(seen_BHQN: Tensor, size: int) -> tuple[bool, int] | None:
    """`causal` and `window` of the `attend` that makes this mask, None if none does."""
    queries, keys = seen_BHQN.shape[-2:]
    forms = [(False, 0), (True, 0)] + (
        [(True, size), (False, size), (False, size + 1)] if size else []
    )
    for causal, window in forms if queries <= keys else forms[:1]:
        like_QN = mask_of(queries, keys, causal, window, seen_BHQN.device)
        if bool((seen_BHQN if like_QN is None else seen_BHQN == like_QN).all()):
            return causal, window
    return None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a layer calls: (batch, heads, tokens, width) in, (batch, tokens, heads, width) out, and
    no weights."""
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise UsageError(
                f"headwise attention has no place for {what}: {name} must be left out, or use "
                "attn_implementation='eager'"
            )
    if dropout:
        raise UsageError(
            f"headwise attention has no dropout: attention_dropout must be 0, got {dropout}"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    known = None if attention_mask is None else getattr(attention_mask, NAME, None)
    if attention_mask is not None and known is None:
        out = _masked(query, key, value, scale, attention_mask)
    else:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        causal, window = (causal and query.shape[2] > 1, 0) if known is None else known
        if (
            attention_mask is None and causal
        ):  # without a mask the first query stands at the first key
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        out = attend(query, key, value, causal=causal, window=window, scale=scale)
    return out.transpose(1, 2).contiguous(), None


def _masked(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    """Attention under a mask of (batch or 1, heads or 1, queries, keys): true where seen, or added
    to the scores.

    A query that sees nothing takes the mean of all values, as in transformers' own formula.
    """
    groups, keys = q.shape[1] // k.shape[1], k.shape[2]
    if mask.ndim != 4 or mask.shape[-2] not in (1, q.shape[2]) or mask.shape[-1] < keys:
        raise UsageError(
            f"a mask must be (batch, heads or 1, {q.shape[2]} queries, {keys} keys), got "
            f"{tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise UsageError(
            "a mask must be bool (true where seen) or floating (added to the scores), got "
            f"{mask.dtype}"
        )
    k, v = (t if groups == 1 else t.repeat_interleave(groups, 1) for t in (k, v))
    mask = mask[..., :keys].expand(*mask.shape[:2], q.shape[2], keys)
    block = max(
        1, reference.BLOCK_BYTES // (q.shape[0] * q.shape[1] * keys * max(4, q.dtype.itemsize))
    )

    def part(start: int) -> Tensor:
        scores, here = (
            q[..., start : start + block, :] @ k.mT * scale,
            mask[..., start : start + block, :],
        )
        scores = (
            scores.masked_fill(~here, torch.finfo(scores.dtype).min)
            if here.dtype == torch.bool
            else scores + here
        )
        return scores.softmax(-1).to(v.dtype) @ v

    return torch.cat(
        [checkpoint(part, start, use_reentrant=False) for start in range(0, q.shape[2], block)], -2
    )
