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

from headwise.errors import UsageError
from headwise.model.dispatch import attend
from headwise.model.reference import in_query_blocks, mask_of, repeat_kv

NAME = "headwise"  # of the implementation, and of the attribute that a known mask carries

# arguments of transformers' attention functions that have no counterpart here
_UNSUPPORTED = {
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
    """The mask that transformers makes for SDPA.

    A mask that `attend` can make itself carries `causal` and `window` as an attribute. Whoever cuts
    or copies the mask loses the attribute, and then the mask itself is used.
    """
    from transformers.masking_utils import sdpa_mask

    seen_BHQN = sdpa_mask(*args, **kwargs)
    if isinstance(seen_BHQN, Tensor) and not torch.compiler.is_compiling():
        setattr(seen_BHQN, NAME, _known(seen_BHQN, kwargs.get("local_size") or 0))
    return seen_BHQN


def _known(seen_BHQN: Tensor, size: int) -> tuple[bool, int] | None:
    """`causal` and `window` of the `attend` that makes this mask, None if none does; `size` is the
    model's own window."""
    queries, keys = seen_BHQN.shape[-2:]
    forms = [(False, 0)]
    if queries <= keys:
        forms += [(True, 0)]
    if queries <= keys and size:
        forms += [(True, size), (False, size), (False, size + 1)]
    for causal, window in forms:
        wanted_QN = mask_of(queries, keys, causal, window, seen_BHQN.device)
        same = seen_BHQN if wanted_QN is None else seen_BHQN == wanted_QN
        if bool(same.all()):
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
    for name, what in _UNSUPPORTED.items():
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
    if attention_mask is None:
        # transformers' rule: the layer says whether it is causal, and one query sees every key.
        if is_causal is None:
            is_causal = bool(getattr(module, "is_causal", True))
        queries = query.shape[2]
        causal = is_causal and queries > 1
        if causal:  # without a mask the first query stands at the first key
            key, value = key[:, :, :queries], value[:, :, :queries]
        out = attend(query, key, value, causal=causal, window=0, scale=scale)
    elif known := getattr(attention_mask, NAME, None):
        causal, window = known
        out = attend(query, key, value, causal=causal, window=window, scale=scale)
    else:
        out = _masked(query, key, value, scale, attention_mask)
    return out.transpose(1, 2).contiguous(), None


def _masked(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    """Attention under a mask of (batch or 1, heads or 1, queries or 1, keys): true where seen, or
    added to the scores.

    A query that sees nothing takes the mean of all values, as in transformers' own formula.
    """
    queries, keys = q.shape[2], k.shape[2]
    if mask.ndim != 4 or mask.shape[-2] not in (1, queries) or mask.shape[-1] < keys:
        raise UsageError(
            f"a mask must be (batch, heads or 1, {queries} queries, {keys} keys), got "
            f"{tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise UsageError(
            "a mask must be bool (true where seen) or floating (added to the scores), got "
            f"{mask.dtype}"
        )
    k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    mask = mask[..., :keys].expand(*mask.shape[:2], queries, keys)

    def attend_block(start: int, stop: int) -> Tensor:
        scores = q[..., start:stop, :] @ k.mT * scale
        block = mask[..., start:stop, :]
        if block.dtype == torch.bool:
            scores = scores.masked_fill(~block, torch.finfo(scores.dtype).min)
        else:
            scores = scores + block
        return scores.softmax(-1).to(v.dtype) @ v

    return in_query_blocks(attend_block, q, keys)
