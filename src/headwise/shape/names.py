"""Names of sizes as people type them, and the fields of a `Shape` that they mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headwise.errors import UsageError

_TYPED = {
    "dim": "hidden_size d_model n_embd model_dim embed_dim",
    "depth": "num_hidden_layers num_layers n_layers n_layer",
    "num_heads": "num_attention_heads n_heads n_head heads",
    "num_kv_heads": "num_key_value_heads n_kv_heads n_kv_head kv_heads num_query_groups",
    "head_dim": "d_head head_size attention_head_size kv_channels qk_head_dim",
    "v_head_dim": "d_value v_head_size",
    "ffn_dim": "intermediate_size d_ff n_inner ffn_hidden_size ffn_size",
    "vocab_size": "n_vocab",
    "tied": "tie_word_embeddings",
    "kv_lora_rank": "d_latent kv_latent_dim",
    "rope_theta": "rotary_base",
    "num_experts": "n_experts num_local_experts n_routed_experts",
    "num_experts_per_tok": "num_experts_per_token experts_per_token experts_per_tok top_k",
    "expert_ffn_dim": "moe_intermediate_size expert_dim",
    "shared_ffn_dim": "shared_expert_intermediate_size",
}
ALIASES = {typed: field for field, names in _TYPED.items() for typed in names.split()}


def fields_of(typed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values by field, and the names under which they were typed where those are others."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in typed.items():
        field = field_of(name, value)
        if field in values:
            first, second = names.get(field, field), name
            raise UsageError(f"{first} and {second} are two names of one size: give one of them")
        values[field] = value
        if field != name:
            names[field] = name
    return values, names


def field_of(name: str, value: Any = None) -> str:
    """The field that a typed name means; `layers` with a number is the depth."""
    if name == "layers" and isinstance(value, int):
        return "depth"
    return ALIASES.get(name, name)


def as_typed(message: str, names: Mapping[str, str]) -> str:
    """A message about fields in the names under which they were typed."""
    for field, typed in names.items():
        message = re.sub(rf"\b{field}\b", typed, message)
    return message
