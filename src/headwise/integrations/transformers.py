"""headwise attention in Hugging Face models: any head_dim, grouped heads, windows, any mask.

    from headwise.integrations.transformers import register
    model = AutoModelForCausalLM.from_config(config, attn_implementation=register())

Padding, packed sequences, 4D masks of one's own, static caches, dropout, softcapped scores, sinks
and learned biases all go to `attend`. A model that is asked for its attention weights gets them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import UsageError
from headwise.model.dispatch import attend, attend_with_weights
from headwise.model.reference import mask_of

NAME = "headwise"  # of the implementation, and of the attribute that a known mask carries

# arguments of transformers' attention functions that have no counterpart here
_UNSUPPORTED = {
    "head_mask": "a mask of heads",
    "cache": "a paged cache, which transformers itself gives to its own attention alone",
    "block_indices": "a choice of key blocks",
    "indices": "a choice of keys",
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


# ---- masks


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask that transformers makes for SDPA; None where `is_causal` says it all.

    A mask that `attend` can make itself, from a window or from a prompt in parts, says so in an
    attribute. Whoever cuts or copies the mask loses the attribute, and then the mask itself is
    used. A compiled model neither writes nor reads it, so that no guard depends on it.
    """
    from transformers.masking_utils import sdpa_mask

    seen_BHQN = sdpa_mask(*args, **kwargs)
    if isinstance(seen_BHQN, Tensor) and not torch.compiler.is_compiling():
        padding = kwargs.get("attention_mask")
        if padding is None or bool(padding.all()):
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
    if seen_BHQN.stride(0) == 0:  # one mask for all sequences
        seen_BHQN = seen_BHQN[:1]
    for causal, window in forms:
        wanted_QN = mask_of(queries, keys, causal, window, seen_BHQN.device)
        same = seen_BHQN if wanted_QN is None else seen_BHQN == wanted_QN
        if bool(same.all()):
            return causal, window
    return None


# ---- attention


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a layer calls: (batch, heads, tokens, width) in, (batch, tokens, heads, width) out, and
    the attention weights (batch, heads, queries, keys) where they are asked for.

    position_bias is added to the scores, softcap bounds them, and each head's s_aux is a sink.
    """
    for name, what in _UNSUPPORTED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise UsageError(
                f"headwise attention has no place for {what}: {name} must be left out, or use "
                "attn_implementation='eager'"
            )
    queries, keys = query.shape[2], key.shape[2]
    causal, window, offset = False, 0, None
    if attention_mask is None:
        # transformers' rule: the layer says whether it is causal, and one query sees every key.
        # Without a mask the first query stands at the first key.
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        causal = bool(is_causal) and queries > 1
        if causal and queries != keys:
            offset = 0
    elif not torch.compiler.is_compiling() and (known := getattr(attention_mask, NAME, None)):
        attention_mask = None
        causal, window = known
    else:
        attention_mask = attention_mask[..., :keys]  # of a cache that is longer than what it holds
    seen = attention_mask if position_bias is None else _biased(position_bias, attention_mask, keys)
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "offset": offset,
        "mask": seen,
        "scale": scaling,
        "dropout": dropout,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
    }
    weights = None
    if _wants_weights(kwargs):
        _note()
        out, weights = attend_with_weights(query, key, value, **options)
    else:
        out = attend(query, key, value, **options)
    return out.transpose(1, 2).contiguous(), weights


def _biased(bias: Tensor, mask: Tensor | None, keys: int) -> Tensor:
    """A learned bias of the scores, and -inf where the mask hides a key."""
    bias = bias[..., :keys]
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


# ---- attention weights


def _wants_weights(kwargs: dict[str, Any]) -> bool:
    """Whether the model was asked for its attention weights."""
    if kwargs.get("output_attentions"):
        return True
    # Some models keep the question from their layers. The collector of their outputs knows it.
    collector = None if torch.compiler.is_compiling() else _collector()
    collected = collector.get() if collector is not None else None
    return bool(collected) and any(name.endswith("attentions") for name in collected)


@cache
def _collector() -> Any:
    """Where transformers says which outputs it collects; None in versions that say it elsewhere."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return None
    return _active_collector


def _note() -> None:
    """Say once that the weights are written out."""
    from transformers.utils import logging

    logging.get_logger(__name__).warning_once(
        "headwise writes the attention weights out because output_attentions=True asks for them; "
        "this takes more memory and time."
    )
