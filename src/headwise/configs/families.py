"""Public model families: one function each from its config to the fields of a `Shape`, and the
table of them, `FAMILIES`. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headwise.configs.values import (
    GATED,
    NANOCHAT_KEYS,
    PLAIN,
    Config,
    Fields,
    activation,
    flag,
    head_dim_of,
    is_nanochat,
    layers,
    number,
    optional,
    pair,
    rope_setting,
    whole,
    windows_of,
)
from headwise.errors import UsageError, nearest, shown

_BIASED = {"qkv_bias": True, "out_bias": True, "ffn_bias": True}
_LONG_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
}
_LONG_NAMES |= {
    "n_kv_head": "num_key_value_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
}
_REFUSED = {
    "is_encoder_decoder": "an encoder-decoder",
    "add_cross_attention": "cross-attention",
    "per_layer_config": "sizes that differ between layers",
}

_NOT_EXPRESSED = {
    "xcit": (
        "attention over channels, convolutions between patches, a gain on every branch, "
        "class-attention layers"
    ),
    "tnt": "a second stack over the pixels of each patch, folded into the outer one in every layer",
    "davit": (
        "four stages of different widths, attention over channels in every other block, "
        "convolutions for positions"
    ),
}

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_DEFAULTS = {
    "gpt2": (50257, 768, None, 12, 12, None),
    "llama": (32000, 4096, 11008, 32, 32, None),
    "mistral": (32000, 4096, 14336, 32, 32, 8),
    "qwen2": (151936, 4096, 22016, 32, 32, 32),
    "qwen3": (151936, 4096, 22016, 32, 32, 32),
    "gemma": (256000, 3072, 24576, 28, 16, 16),
    "gemma2": (256000, 2304, 9216, 26, 8, 4),
    "gemma3_text": (262208, 2304, 9216, 26, 8, 4),
    "phi": (51200, 2048, 8192, 24, 32, None),
    "phi3": (32064, 3072, 8192, 32, 32, None),
    "deepseek_v2": (102400, 4096, 11008, 32, 32, None),
    "deepseek_v3": (129280, 7168, 18432, 61, 128, None),
    "bert": (30522, 768, 3072, 12, 12, None),
    "vit": (0, 768, 3072, 12, 12, None),
    "nanochat": (50304, 768, 8192, 12, 6, None),
}


def to_shape_fields(config: Config) -> Fields:
    """The keyword arguments of the `Shape` that a config describes."""
    name = config.get("model_type")
    if name is None and is_nanochat(config):
        return _nanochat_own(config)
    if isinstance(name, str) and name in _NOT_EXPRESSED:
        raise UsageError(f"{name} cannot be expressed: {_NOT_EXPRESSED[name]}")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UsageError(f"unknown model_type {name!r}; {nearest(str(name), FAMILIES)}")
    for key, what in _REFUSED.items():
        if config.get(key):
            raise UsageError(
                f"{what} cannot be expressed: {key} must be false or left out, got "
                f"{shown(config[key])}"
            )
    sizes = dict(zip(_SIZES, _DEFAULTS.get(name, ()), strict=False))
    fields = FAMILIES[name]({**sizes, **config})
    if fields.get("causal") and config.get("is_causal") is False:
        raise UsageError(
            f"a {name} without its causal mask cannot be expressed: is_causal must be true or "
            "left out, got False"
        )
    return fields


# ---- parts that families share


def _long_names(c: Config) -> Fields:
    return {**c, **{long: c[short] for short, long in _LONG_NAMES.items() if short in c}}


def _stack(c: Config) -> Fields:
    """Sizes, heads and vocabulary."""
    fields = {
        "dim": whole(c, "hidden_size"),
        "depth": layers(c, "num_hidden_layers"),
        "vocab_size": whole(c, "vocab_size", least=0),
    }
    fields |= {
        "num_heads": whole(c, "num_attention_heads"),
        "num_kv_heads": optional(c, "num_key_value_heads"),
        "head_dim": head_dim_of(c),
    }
    return fields | {"ffn_dim": optional(c, "intermediate_size")}


def _decoder(c: Config) -> Fields:
    """Llama's block: RMS norms first, rotary positions, a gated feed-forward, no bias."""
    fields = _stack(c) | {
        "causal": True,
        "norm": "rms",
        "norm_at": "pre",
        "tied": flag(c, "tie_word_embeddings"),
    }
    fields |= {
        "qk_rope_head_dim": fields["head_dim"],
        "rope_theta": rope_setting(c, "rope_theta", 10_000.0),
    }
    return fields | {"activation": activation(c, "hidden_act", "silu", GATED)}


def _attention_bias(c: Config) -> Fields:
    bias = flag(c, "attention_bias")
    return {"qkv_bias": bias, "out_bias": bias}


def _sandwich(c: Config, slides: Callable[[int], bool]) -> Fields:
    """What Gemma 2 and 3 share: norms before and after, windows, and a scale of the scores."""
    c = {"sliding_window": 4096, **c, "hidden_act": c.get("hidden_activation", "gelu_pytorch_tanh")}
    fields = _gemma(c) | {"norm_at": "sandwich", "windows": windows_of(c, slides)}
    scalar = number("query_pre_attn_scalar", c.get("query_pre_attn_scalar", 256))
    return fields if scalar == fields["head_dim"] else fields | {"logit_scale": scalar**-0.5}


# ---- families


def _gpt2(c: Config) -> Fields:
    if flag(c, "scale_attn_by_inverse_layer_idx"):
        raise UsageError(
            "a scale of the scores by layer cannot be expressed: scale_attn_by_inverse_layer_idx "
            "must be false, got True"
        )
    c = _long_names({**c, "intermediate_size": None}) | {
        "num_key_value_heads": None,
        "head_dim": None,
    }
    fields = (
        _stack(c)
        | _BIASED
        | {
            "causal": True,
            "norm": "layer",
            "norm_at": "pre",
            "tied": flag(c, "tie_word_embeddings", True),
        }
    )
    fields |= {"positions": "additive", "num_positions": whole(c, "max_position_embeddings", 1024)}
    fields |= {"activation": activation(c, "activation_function", "gelu_new", PLAIN)}
    return fields if flag(c, "scale_attn_weights", True) else fields | {"logit_scale": 1.0}


def _llama(c: Config) -> Fields:
    return _decoder(c) | _attention_bias(c) | {"ffn_bias": flag(c, "mlp_bias")}


def _mistral(c: Config) -> Fields:
    return _decoder(c) | {"windows": (optional(c, "sliding_window", 4096) or 0,)}


def _qwen2(c: Config) -> Fields:
    window = c.get("sliding_window", 4096) if flag(c, "use_sliding_window") else None
    first = whole(c, "max_window_layers", 28, least=0)
    windows = windows_of(
        {**c, "sliding_window": window}, lambda layer: window is not None and layer >= first
    )
    return _decoder(c) | {"qkv_bias": True, "windows": windows}


def _qwen3(c: Config) -> Fields:
    return _qwen2({"head_dim": 128, **c}) | _attention_bias(c) | {"qk_norm": "head"}


def _gemma(c: Config) -> Fields:
    c = {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, **c}
    return _decoder(c) | _attention_bias(c) | {"causal": not flag(c, "use_bidirectional_attention")}


def _gemma2(c: Config) -> Fields:
    if flag(c, "use_bidirectional_attention"):
        raise UsageError(
            "a gemma2 without its causal mask cannot be expressed: use_bidirectional_attention "
            "must be false, got True"
        )
    return _sandwich(c, lambda layer: layer % 2 == 0)


def _gemma3_text(c: Config) -> Fields:
    pattern = whole(c, "sliding_window_pattern", 6)
    if flag(c, "use_bidirectional_attention"):
        c = {
            **c,
            "sliding_window": whole(c, "sliding_window", 4096) // 2 + 1,
        }  # half of it to each side
    return _sandwich(c, lambda layer: (layer + 1) % pattern > 0) | {
        "qk_norm": "head",
        "rope_theta": rope_setting(c, "rope_theta", 1e6),
    }


def _gemma3(c: Config) -> Fields:
    if c.get("vision_config") is not None:
        raise UsageError(
            "the vision tower of a gemma3 cannot be expressed: pass its text_config, or leave "
            "vision_config out"
        )
    if not isinstance(c.get("text_config"), Mapping):
        raise UsageError(
            f"text_config of a gemma3 must be a mapping, got {shown(c.get('text_config'))}"
        )
    return to_shape_fields({**c["text_config"], "model_type": "gemma3_text"})


def _phi(c: Config) -> Fields:
    if flag(c, "qk_layernorm"):
        raise UsageError(
            "a layer norm of queries and keys cannot be expressed: qk_layernorm must be false, "
            "got True"
        )
    fields = (
        _decoder({**c, "hidden_act": "silu"}) | _BIASED | {"norm": "layer", "norm_at": "parallel"}
    )
    fields |= {
        "qk_rope_head_dim": int(fields["head_dim"] * rope_setting(c, "partial_rotary_factor", 0.5))
    }
    return fields | {
        "activation": activation(c, "hidden_act", "gelu_new", PLAIN),
        "extras": (("head bias", fields["vocab_size"]),),
    }


def _phi3(c: Config) -> Fields:
    fields = _decoder(c) | {"windows": (optional(c, "sliding_window") or 0,)}
    return fields | {
        "qk_rope_head_dim": int(fields["head_dim"] * rope_setting(c, "partial_rotary_factor", 1.0))
    }


def _deepseek_v2(c: Config) -> Fields:
    return _deepseek_v3({"n_routed_experts": 64, "first_k_dense_replace": 0, **c}) | {
        "ffn_bias": flag(c, "mlp_bias")
    }


def _deepseek_v3(c: Config) -> Fields:
    c = {"n_routed_experts": 256, "first_k_dense_replace": 3, **c}
    experts, dense, depth = (
        c["n_routed_experts"],
        c["first_k_dense_replace"],
        whole(c, "num_hidden_layers"),
    )
    if experts is not None and whole(c, "first_k_dense_replace", least=0) < depth:
        rule = "n_routed_experts must be null or first_k_dense_replace at least num_hidden_layers"
        raise UsageError(
            f"routed experts cannot be expressed: {rule}, got {shown(experts)}, {dense} and {depth}"
        )
    rope = whole(c, "qk_rope_head_dim", 64)
    fields = _decoder(
        {**c, "head_dim": whole(c, "qk_nope_head_dim", 128) + rope}
    ) | _attention_bias(c)
    fields |= {"qk_rope_head_dim": rope, "v_head_dim": whole(c, "v_head_dim", 128)}
    return fields | {
        "kv_lora_rank": whole(c, "kv_lora_rank", 512),
        "q_lora_rank": optional(c, "q_lora_rank", 1536) or 0,
    }


def _bert(c: Config) -> Fields:
    kind = c.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise UsageError(
            "relative positions cannot be expressed: position_embedding_type must be absolute, "
            f"got {shown(kind)}"
        )
    fields = _stack({**c, "num_key_value_heads": None, "head_dim": None}) | _BIASED
    fields |= {
        "norm": "layer",
        "norm_at": "post",
        "activation": activation(c, "hidden_act", "gelu", PLAIN),
    }
    fields |= {
        "causal": flag(c, "is_decoder"),
        "positions": "additive",
        "num_positions": whole(c, "max_position_embeddings", 512),
    }
    dim, types = fields["dim"], whole(c, "type_vocab_size", 2, least=0)
    return fields | {
        "extras": (
            ("token types", types * dim),
            ("embedding norm", 2 * dim),
            ("pooler", dim * dim + dim),
        )
    }


def _vit(c: Config) -> Fields:
    fields = (
        _stack({**c, "vocab_size": 0, "num_key_value_heads": None})
        | _BIASED
        | {"qkv_bias": flag(c, "qkv_bias", True)}
    )
    fields |= {
        "norm": "layer",
        "norm_at": "pre",
        "activation": activation(c, "hidden_act", "gelu", PLAIN),
    }
    image, patch = pair(c, "image_size", 224), pair(c, "patch_size", 16)
    fields |= {
        "positions": "additive",
        "num_positions": (image[0] // patch[0]) * (image[1] // patch[1]) + 1,
    }
    dim, pixels = fields["dim"], whole(c, "num_channels", 3) * patch[0] * patch[1]
    names = c.get("id2label")
    labels = len(names) if isinstance(names, Mapping) else whole(c, "num_labels", 2, least=0)
    return fields | {
        "extras": (
            ("patch embedding", (pixels + 1) * dim),
            ("class token", dim),
            ("classifier", (dim + 1) * labels),
        )
    }


def _nanochat(c: Config) -> Fields:
    """The port in transformers."""
    fields = (
        _decoder({**c, "hidden_act": "silu"})
        | _attention_bias(c)
        | {"norm": "rms-free", "qk_norm": "free"}
    )
    return fields | {"activation": activation(c, "hidden_act", "relu2", PLAIN)}


def _nanochat_own(c: Config) -> Fields:
    """nanochat's GPTConfig: value embeddings in every other layer, the last one included.

    `head_dim`, `v_head_dim` and `logit_scale` are what `headwise.integrations.nanochat` adds to it.
    """
    head_dim, depth, kv_heads = (
        head_dim_of(c, "n_embd", "n_head"),
        layers(c, "n_layer"),
        whole(c, "n_kv_head"),
    )
    width, scale = optional(c, "v_head_dim") or head_dim, c.get("logit_scale")
    pattern = str(c["window_pattern"]).upper()
    if not pattern or set(pattern) - set("SL"):
        raise UsageError(
            "window_pattern must be made of S (short) and L (long), got "
            f"{shown(c['window_pattern'])}"
        )
    short = (
        -(-whole(c, "sequence_len") // 512) * 128 + 1
    )  # a quarter, rounded up to whole tiles, and the query's own key
    windows = [short if pattern[layer % len(pattern)] == "S" else 0 for layer in range(depth)]
    vocab, valued = -(-whole(c, "vocab_size") // 64) * 64, (depth + 1) // 2
    extras = [
        ("value embeddings", valued * vocab * kv_heads * width),
        ("value gates", valued * 12 * kv_heads),
    ]
    extras += [("residual scalars", 2 * depth), ("smear", 24 + 1), ("backout", 1)]
    fields = _nanochat(
        {
            **_long_names({key: c[key] for key in NANOCHAT_KEYS}),
            "vocab_size": vocab,
            "head_dim": head_dim,
        }
    )
    fields |= {
        "rope_theta": 1e5,
        "logit_scale": 1.2 * 1.2 * head_dim**-0.5
        if scale is None
        else number("logit_scale", scale),
    }
    return fields | {"v_head_dim": width, "windows": (*windows[:-1], 0), "extras": tuple(extras)}


FAMILIES: dict[str, Callable[[Config], Fields]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3_text,
    "phi": _phi,
    "phi3": _phi3,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "bert": _bert,
    "vit": _vit,
    "nanochat": _nanochat,
}
