"""Public model configs as shapes. Standard library only.

The parameter count is that of the class people mean by the family's name: `GPT2LMHeadModel`,
`LlamaForCausalLM` and the `ForCausalLM` of every other decoder, `BertModel` (with its pooler),
`ViTForImageClassification`, and `GPT` for nanochat's own config. A key that config.json leaves out
takes the default of the transformers library.

Ignored, because neither the shape nor its costs depend on them: dropout, softcaps, rope scaling
(with its factor on the scores), epsilons, embedding scales, nanochat's norm of the embeddings, and
the rope base of Gemma 3's windowed layers. Whatever else a `Shape` has no field for is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headwise.errors import UsageError, nearest

Config = Mapping[str, Any]
Fields = dict[str, Any]

_GELUS = (
    "gelu",
    "gelu_accurate",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "gelu_python_tanh",
    "gelu_pytorch_tanh",
    "quick_gelu",
)
_PLAIN = {"relu": "relu", "relu2": "relu2", **dict.fromkeys(_GELUS, "gelu")}
_GATED = {"silu": "swiglu", "swish": "swiglu", **dict.fromkeys(_GELUS, "geglu")}
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
_LAYER_TYPES = ("full_attention", "sliding_attention")
_NANOCHAT_KEYS = (
    "n_layer",
    "n_head",
    "n_kv_head",
    "n_embd",
    "sequence_len",
    "vocab_size",
    "window_pattern",
)
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


def read_config(config: str | Path | Config) -> dict[str, Any]:
    """The config as a dict, from a config.json, the folder that holds it, or a mapping."""
    found = dict(config) if isinstance(config, Mapping) else _read_json(config)
    if found.get("model_type") is None and not _is_nanochat(found):
        keys = ", ".join(_NANOCHAT_KEYS)
        raise UsageError(
            f"the config has no model_type, nor nanochat's own keys ({keys}); "
            f"{nearest('', FAMILIES)}"
        )
    return found


def to_shape_fields(config: Config) -> Fields:
    """The keyword arguments of the `Shape` that a config describes."""
    name = config.get("model_type")
    if name is None and _is_nanochat(config):
        return _nanochat_own(config)
    if isinstance(name, str) and name in _NOT_EXPRESSED:
        raise UsageError(f"{name} cannot be expressed: {_NOT_EXPRESSED[name]}")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UsageError(f"unknown model_type {name!r}; {nearest(str(name), FAMILIES)}")
    for key, what in _REFUSED.items():
        if config.get(key):
            raise UsageError(
                f"{what} cannot be expressed: {key} must be false or left out, got {config[key]!r}"
            )
    sizes = dict(zip(_SIZES, _DEFAULTS.get(name, ()), strict=False))
    fields = FAMILIES[name]({**sizes, **config})
    if fields.get("causal") and config.get("is_causal") is False:
        raise UsageError(
            f"a {name} without its causal mask cannot be expressed: is_causal must be true or "
            "left out, got False"
        )
    return fields


def _read_json(source: str | Path) -> dict[str, Any]:
    if not isinstance(source, str | Path):
        raise UsageError(
            f"a config must be a config.json, its folder or a mapping, got {type(source).__name__}"
        )
    path = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {str(path)!r} ({error.strerror}); give a config.json or the folder that "
            "holds it"
        ) from None
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{str(path)!r} must hold a JSON object, got {type(found).__name__}")
    return found


def _is_nanochat(config: Config) -> bool:
    return all(key in config for key in _NANOCHAT_KEYS)


# ---- one value of a config


def _whole(c: Config, name: str, default: Any = None, least: int = 1) -> int:
    value = c.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value


def _optional(c: Config, name: str, default: int | None = None) -> int | None:
    return None if c.get(name, default) is None else _whole(c, name, default)


def _number(name: str, value: Any) -> float:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 < value < float("inf")
    ):
        raise UsageError(f"{name} must be a positive number, got {value!r}")
    return value


def _flag(c: Config, name: str, default: bool = False) -> bool:
    value = default if c.get(name) is None else c[name]
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false, got {value!r}")
    return value


def _pair(c: Config, name: str, default: int) -> tuple[int, int]:
    value = c.get(name, default)
    sides = value if isinstance(value, list | tuple) else (value, value)
    if len(sides) != 2:
        raise UsageError(f"{name} must be one whole number or two, got {value!r}")
    return _whole({name: sides[0]}, name), _whole({name: sides[1]}, name)


def _rope(c: Config, name: str, default: float) -> float:
    """A rotary setting, where transformers 5 keeps it (by layer type or not) or where its older
    versions did."""
    for key in ("rope_scaling", "rope_parameters"):
        table = c.get(key) or {}
        table = (table.get("full_attention") or table) if isinstance(table, Mapping) else table
        if not isinstance(table, Mapping):
            raise UsageError(f"{key} must be a mapping, got {c[key]!r}")
        if table.get(name) is not None:
            return _number(name, table[name])
    return _number(name, c.get(name, default))


def _activation(c: Config, name: str, default: str, table: dict[str, str]) -> str:
    value, kind = c.get(name, default), "gated" if table is _GATED else "plain"
    if not isinstance(value, str) or value not in table:
        raise UsageError(
            f"{name} {value!r} cannot be expressed in a {kind} feed-forward; "
            f"{nearest(str(value), table)}"
        )
    return table[value]


def _head_dim(c: Config, dim: str = "hidden_size", heads: str = "num_attention_heads") -> int:
    if c.get("head_dim") is not None:
        return _whole(c, "head_dim")
    if _whole(c, dim) % _whole(c, heads):
        raise UsageError(
            f"{dim} must be a multiple of {heads} where head_dim is not given, got {dim} "
            f"{c[dim]}, {heads} {c[heads]}"
        )
    return c[dim] // c[heads]


def _windows(c: Config, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """The windows of the layers, cut to the shortest run that tiles them."""
    depth = _whole(c, "num_hidden_layers")
    kinds = c.get("layer_types") or [_LAYER_TYPES[slides(i)] for i in range(depth)]
    if not isinstance(kinds, list | tuple) or len(kinds) != depth:
        raise UsageError(
            f"layer_types must name each of num_hidden_layers {depth} layers, got {kinds!r}"
        )
    for kind in kinds:
        if kind not in _LAYER_TYPES:
            raise UsageError(f"unknown layer type {kind!r}; {nearest(str(kind), _LAYER_TYPES)}")
    full = [_whole(c, "sliding_window") if kind == "sliding_attention" else 0 for kind in kinds]
    period = next(
        p for p in range(1, depth + 1) if all(full[i] == full[i % p] for i in range(depth))
    )
    return tuple(full[:period])


# ---- parts that families share


def _long_names(c: Config) -> Fields:
    return {**c, **{long: c[short] for short, long in _LONG_NAMES.items() if short in c}}


def _stack(c: Config) -> Fields:
    """Sizes, heads and vocabulary."""
    fields = {
        "dim": _whole(c, "hidden_size"),
        "depth": _whole(c, "num_hidden_layers"),
        "vocab_size": _whole(c, "vocab_size", least=0),
    }
    fields |= {
        "num_heads": _whole(c, "num_attention_heads"),
        "num_kv_heads": _optional(c, "num_key_value_heads"),
        "head_dim": _head_dim(c),
    }
    return fields | {"ffn_dim": _optional(c, "intermediate_size")}


def _decoder(c: Config) -> Fields:
    """Llama's block: RMS norms first, rotary positions, a gated feed-forward, no bias."""
    fields = _stack(c) | {
        "causal": True,
        "norm": "rms",
        "norm_at": "pre",
        "tied": _flag(c, "tie_word_embeddings"),
    }
    fields |= {
        "qk_rope_head_dim": fields["head_dim"],
        "rope_theta": _rope(c, "rope_theta", 10_000.0),
    }
    return fields | {"activation": _activation(c, "hidden_act", "silu", _GATED)}


def _attention_bias(c: Config) -> Fields:
    bias = _flag(c, "attention_bias")
    return {"qkv_bias": bias, "out_bias": bias}


def _sandwich(c: Config, slides: Callable[[int], bool]) -> Fields:
    """What Gemma 2 and 3 share: norms before and after, windows, and a scale of the scores."""
    c = {"sliding_window": 4096, **c, "hidden_act": c.get("hidden_activation", "gelu_pytorch_tanh")}
    fields = _gemma(c) | {"norm_at": "sandwich", "windows": _windows(c, slides)}
    scalar = _number("query_pre_attn_scalar", c.get("query_pre_attn_scalar", 256))
    return fields if scalar == fields["head_dim"] else fields | {"logit_scale": scalar**-0.5}


# ---- families


def _gpt2(c: Config) -> Fields:
    if _flag(c, "scale_attn_by_inverse_layer_idx"):
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
            "tied": _flag(c, "tie_word_embeddings", True),
        }
    )
    fields |= {"positions": "additive", "num_positions": _whole(c, "max_position_embeddings", 1024)}
    fields |= {"activation": _activation(c, "activation_function", "gelu_new", _PLAIN)}
    return fields if _flag(c, "scale_attn_weights", True) else fields | {"logit_scale": 1.0}


def _llama(c: Config) -> Fields:
    return _decoder(c) | _attention_bias(c) | {"ffn_bias": _flag(c, "mlp_bias")}


def _mistral(c: Config) -> Fields:
    return _decoder(c) | {"windows": (_optional(c, "sliding_window", 4096) or 0,)}


def _qwen2(c: Config) -> Fields:
    window = c.get("sliding_window", 4096) if _flag(c, "use_sliding_window") else None
    first = _whole(c, "max_window_layers", 28, least=0)
    windows = _windows(
        {**c, "sliding_window": window}, lambda layer: window is not None and layer >= first
    )
    return _decoder(c) | {"qkv_bias": True, "windows": windows}


def _qwen3(c: Config) -> Fields:
    return _qwen2({"head_dim": 128, **c}) | _attention_bias(c) | {"qk_norm": "head"}


def _gemma(c: Config) -> Fields:
    c = {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, **c}
    return (
        _decoder(c) | _attention_bias(c) | {"causal": not _flag(c, "use_bidirectional_attention")}
    )


def _gemma2(c: Config) -> Fields:
    if _flag(c, "use_bidirectional_attention"):
        raise UsageError(
            "a gemma2 without its causal mask cannot be expressed: use_bidirectional_attention "
            "must be false, got True"
        )
    return _sandwich(c, lambda layer: layer % 2 == 0)


def _gemma3_text(c: Config) -> Fields:
    pattern = _whole(c, "sliding_window_pattern", 6)
    if _flag(c, "use_bidirectional_attention"):
        c = {
            **c,
            "sliding_window": _whole(c, "sliding_window", 4096) // 2 + 1,
        }  # half of it to each side
    return _sandwich(c, lambda layer: (layer + 1) % pattern > 0) | {
        "qk_norm": "head",
        "rope_theta": _rope(c, "rope_theta", 1e6),
    }


def _gemma3(c: Config) -> Fields:
    if c.get("vision_config") is not None:
        raise UsageError(
            "the vision tower of a gemma3 cannot be expressed: pass its text_config, or leave "
            "vision_config out"
        )
    if not isinstance(c.get("text_config"), Mapping):
        raise UsageError(f"text_config of a gemma3 must be a mapping, got {c.get('text_config')!r}")
    return to_shape_fields({**c["text_config"], "model_type": "gemma3_text"})


def _phi(c: Config) -> Fields:
    if _flag(c, "qk_layernorm"):
        raise UsageError(
            "a layer norm of queries and keys cannot be expressed: qk_layernorm must be false, "
            "got True"
        )
    fields = (
        _decoder({**c, "hidden_act": "silu"}) | _BIASED | {"norm": "layer", "norm_at": "parallel"}
    )
    fields |= {"qk_rope_head_dim": int(fields["head_dim"] * _rope(c, "partial_rotary_factor", 0.5))}
    return fields | {
        "activation": _activation(c, "hidden_act", "gelu_new", _PLAIN),
        "extras": (("head bias", fields["vocab_size"]),),
    }


def _phi3(c: Config) -> Fields:
    fields = _decoder(c) | {"windows": (_optional(c, "sliding_window") or 0,)}
    return fields | {
        "qk_rope_head_dim": int(fields["head_dim"] * _rope(c, "partial_rotary_factor", 1.0))
    }


def _deepseek_v2(c: Config) -> Fields:
    return _deepseek_v3({"n_routed_experts": 64, "first_k_dense_replace": 0, **c}) | {
        "ffn_bias": _flag(c, "mlp_bias")
    }


def _deepseek_v3(c: Config) -> Fields:
    c = {"n_routed_experts": 256, "first_k_dense_replace": 3, **c}
    experts, dense, depth = (
        c["n_routed_experts"],
        c["first_k_dense_replace"],
        _whole(c, "num_hidden_layers"),
    )
    if experts is not None and _whole(c, "first_k_dense_replace", least=0) < depth:
        rule = "n_routed_experts must be null or first_k_dense_replace at least num_hidden_layers"
        raise UsageError(
            f"routed experts cannot be expressed: {rule}, got {experts!r}, {dense} and {depth}"
        )
    rope = _whole(c, "qk_rope_head_dim", 64)
    fields = _decoder(
        {**c, "head_dim": _whole(c, "qk_nope_head_dim", 128) + rope}
    ) | _attention_bias(c)
    fields |= {"qk_rope_head_dim": rope, "v_head_dim": _whole(c, "v_head_dim", 128)}
    return fields | {
        "kv_lora_rank": _whole(c, "kv_lora_rank", 512),
        "q_lora_rank": _optional(c, "q_lora_rank", 1536) or 0,
    }


def _bert(c: Config) -> Fields:
    kind = c.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise UsageError(
            "relative positions cannot be expressed: position_embedding_type must be absolute, "
            f"got {kind!r}"
        )
    fields = _stack({**c, "num_key_value_heads": None, "head_dim": None}) | _BIASED
    fields |= {
        "norm": "layer",
        "norm_at": "post",
        "activation": _activation(c, "hidden_act", "gelu", _PLAIN),
    }
    fields |= {
        "causal": _flag(c, "is_decoder"),
        "positions": "additive",
        "num_positions": _whole(c, "max_position_embeddings", 512),
    }
    dim, types = fields["dim"], _whole(c, "type_vocab_size", 2, least=0)
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
        | {"qkv_bias": _flag(c, "qkv_bias", True)}
    )
    fields |= {
        "norm": "layer",
        "norm_at": "pre",
        "activation": _activation(c, "hidden_act", "gelu", _PLAIN),
    }
    image, patch = _pair(c, "image_size", 224), _pair(c, "patch_size", 16)
    fields |= {
        "positions": "additive",
        "num_positions": (image[0] // patch[0]) * (image[1] // patch[1]) + 1,
    }
    dim, pixels = fields["dim"], _whole(c, "num_channels", 3) * patch[0] * patch[1]
    names = c.get("id2label")
    labels = len(names) if isinstance(names, Mapping) else _whole(c, "num_labels", 2, least=0)
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
    return fields | {"activation": _activation(c, "hidden_act", "relu2", _PLAIN)}


def _nanochat_own(c: Config) -> Fields:
    """nanochat's GPTConfig: value embeddings in every other layer, the last one included.

    `head_dim`, `v_head_dim` and `logit_scale` are what `headwise.integrations.nanochat` adds to it.
    """
    head_dim, depth, kv_heads = (
        _head_dim(c, "n_embd", "n_head"),
        _whole(c, "n_layer"),
        _whole(c, "n_kv_head"),
    )
    width, scale = _optional(c, "v_head_dim") or head_dim, c.get("logit_scale")
    pattern = str(c["window_pattern"]).upper()
    if not pattern or set(pattern) - set("SL"):
        raise UsageError(
            f"window_pattern must be made of S (short) and L (long), got {c['window_pattern']!r}"
        )
    short = (
        -(-_whole(c, "sequence_len") // 512) * 128 + 1
    )  # a quarter, rounded up to whole tiles, and the query's own key
    windows = [short if pattern[layer % len(pattern)] == "S" else 0 for layer in range(depth)]
    vocab, valued = -(-_whole(c, "vocab_size") // 64) * 64, (depth + 1) // 2
    extras = [
        ("value embeddings", valued * vocab * kv_heads * width),
        ("value gates", valued * 12 * kv_heads),
    ]
    extras += [("residual scalars", 2 * depth), ("smear", 24 + 1), ("backout", 1)]
    fields = _nanochat(
        {
            **_long_names({key: c[key] for key in _NANOCHAT_KEYS}),
            "vocab_size": vocab,
            "head_dim": head_dim,
        }
    )
    fields |= {
        "rope_theta": 1e5,
        "logit_scale": 1.2 * 1.2 * head_dim**-0.5
        if scale is None
        else _number("logit_scale", scale),
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
