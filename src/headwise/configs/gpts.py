"""Decoders with learned positions or a bias by distance: one function each from a config to the
fields of a `Shape`. Standard library only."""

from __future__ import annotations

from typing import Any

from headwise.configs.stacks import (
    BIASED,
    MULTI_HEAD,
    extras,
    plain,
    plain_decoder,
    stack,
    tied_unless_said,
)
from headwise.configs.values import (
    Config,
    Fields,
    flag,
    kinds_of,
    number,
    optional,
    table_of,
    tiled,
    whole,
)
from headwise.errors import UsageError, shown

# ---- learned positions, or a bias by distance


def gpt2(c: Config) -> Fields:
    if flag(c, "scale_attn_by_inverse_layer_idx"):
        raise UsageError(
            "a scale of the scores by layer cannot be expressed: scale_attn_by_inverse_layer_idx "
            "must be false, got True"
        )
    fields = _learned_positions({**c, **MULTI_HEAD}) | {"norm_at": "pre"}
    return fields if flag(c, "scale_attn_weights", True) else fields | {"logit_scale": 1.0}


def _learned_positions(c: Config, more: int = 0) -> Fields:
    """Layer norms, biases, and a table of positions with some unused rows."""
    fields = (
        stack(c)
        | BIASED
        | {"causal": True, "norm": "layer", "tied": flag(c, "tie_word_embeddings", True)}
    )
    rows = whole(c, "max_position_embeddings", 1024)
    fields |= {"positions": "additive", "num_positions": rows + more}
    return fields | {"activation": plain(c)}


def gpt_bigcode(c: Config) -> Fields:
    one = 1 if flag(c, "multi_query", True) else None
    return gpt2({**c, "scale_attn_by_inverse_layer_idx": None}) | {"num_kv_heads": one}


def gpt_neo(c: Config) -> Fields:
    listed = c.get("attention_layers") or _repeated(c.get("attention_types"))
    names = ("global", "local")
    kinds = kinds_of({**c, "layers": listed}, lambda i: names[i % 2], names, "layers")
    window = whole(c, "window_size")
    fields = _learned_positions({**c, **MULTI_HEAD}) | {"norm_at": "pre", "qkv_bias": False}
    windows = tiled([window if kind == "local" else 0 for kind in kinds])
    return fields | {"windows": windows, "logit_scale": 1.0}


def _repeated(types: Any) -> Any:
    """Kinds of layers from runs and how often each comes: [[["global", "local"], 12]]."""
    try:
        return [kind for run, times in types or () for kind in run * times]
    except (TypeError, ValueError):
        raise UsageError(f"attention_types must be runs of layers, got {shown(types)}") from None


def openai_gpt(c: Config) -> Fields:
    return _learned_positions({**c, **MULTI_HEAD, "intermediate_size": None}) | {"norm_at": "post"}


def biogpt(c: Config) -> Fields:
    return _learned_positions({**c, **MULTI_HEAD}, more=2) | {"norm_at": "pre"}


def opt(c: Config) -> Fields:
    width = optional(c, "word_embed_proj_dim")
    if width is not None and width != whole(c, "hidden_size"):
        raise UsageError(
            "embeddings of another width than the stack cannot be expressed: word_embed_proj_dim "
            f"must be hidden_size {c['hidden_size']}, got {width}; set so, it gives the stack alone"
        )
    if not flag(c, "layer_norm_elementwise_affine", True):
        raise UsageError(
            "layer norms without gains cannot be expressed: layer_norm_elementwise_affine must be "
            "true, got False"
        )
    first = flag(c, "do_layer_norm_before", True)
    if first and flag(c, "_remove_final_layer_norm"):
        raise UsageError(
            "a stack without its last norm cannot be expressed: _remove_final_layer_norm must be "
            "false, got True"
        )
    bias = flag(c, "enable_bias", True)
    fields = _learned_positions({**c, **MULTI_HEAD}, more=2)
    fields |= {"qkv_bias": bias, "out_bias": bias, "ffn_bias": bias}
    return fields | {"norm_at": "pre" if first else "post"}


def bloom(c: Config) -> Fields:
    dim = whole(c, "hidden_size")
    fields = _by_distance({**c, "intermediate_size": 4 * dim, "hidden_act": "gelu"})
    return fields | BIASED | extras(("embedding norm", 2 * dim))


def mpt(c: Config) -> Fields:
    inner = table_of(c, "attn_config")
    if not flag(inner, "alibi", True):
        raise UsageError("mpt needs attn_config.alibi true, got False")
    width = 4 * whole(c, "hidden_size")  # whatever its expansion_ratio
    fields = _by_distance({**c, "intermediate_size": width, "hidden_act": "gelu"})
    fields |= {"norm": "layer-nobias"}
    scale = inner.get("softmax_scale")
    return fields if scale is None else fields | {"logit_scale": number("softmax_scale", scale)}


def _by_distance(c: Config) -> Fields:
    """Positions as a bias of the scores that falls with distance (ALiBi), layer norms first."""
    fields = plain_decoder({**c, **MULTI_HEAD, "tie_word_embeddings": tied_unless_said(c)})
    return fields | {"qk_rope_head_dim": 0, "positions": "alibi"}


def falcon(c: Config) -> Fields:
    new, parallel = flag(c, "new_decoder_architecture"), flag(c, "parallel_attn", True)
    heads = whole(c, "num_attention_heads")
    kv_heads = 1 if flag(c, "multi_query", True) else heads
    if new:
        kv_heads = optional(c, "num_kv_heads") or heads
    sizes = {
        "num_key_value_heads": kv_heads,
        "head_dim": None,
        "tie_word_embeddings": tied_unless_said(c),
    }
    if c.get("intermediate_size") is None:
        sizes["intermediate_size"] = 4 * whole(c, "hidden_size")
    fields = plain_decoder({**c, **sizes})
    bias = flag(c, "bias")
    fields |= {"qkv_bias": bias, "out_bias": bias, "ffn_bias": bias}
    if flag(c, "alibi"):
        fields |= {"qk_rope_head_dim": 0, "positions": "alibi"}
    norms = optional(c, "num_ln_in_parallel_attn") or (2 if new else 1)
    place = ("parallel-2" if norms == 2 else "parallel") if parallel or new else "pre"
    if new and not parallel:
        raise UsageError("a falcon with new_decoder_architecture needs parallel_attn, got False")
    return fields | {"norm_at": place}
