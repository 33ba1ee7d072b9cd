"""Dense decoders: one function each from a config to the fields of a `Shape`. Standard library
only."""

from __future__ import annotations

from collections.abc import Callable

from headwise.configs.stacks import (
    BIASED,
    MULTI_HEAD,
    attention_bias,
    decoder,
    differing,
    extras,
    ffn_bias,
    one_window,
    partly_rotary,
    plain,
    plain_decoder,
    rotated_first,
    scaled,
    stack,
    typed_windows,
    unrotated,
)
from headwise.configs.values import (
    LAYER_TYPES,
    PLAIN,
    Config,
    Fields,
    activation,
    flag,
    kinds_of,
    layers,
    number,
    optional,
    rope_setting,
    table_of,
    whole,
    windows_of,
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
    kinds = kinds_of(
        c, lambda i: ("global", "local")[i % 2], ("global", "local"), "attention_layers"
    )
    table = {**c, "layer_types": [LAYER_TYPES[kind == "local"] for kind in kinds]}
    windows = windows_of({**table, "sliding_window": c.get("window_size")}, lambda layer: False)
    fields = _learned_positions({**c, **MULTI_HEAD}) | {"norm_at": "pre", "windows": windows}
    return fields | {"qkv_bias": False, "logit_scale": 1.0}


def openai_gpt(c: Config) -> Fields:
    return _learned_positions({**c, **MULTI_HEAD, "intermediate_size": None}) | {"norm_at": "post"}


def biogpt(c: Config) -> Fields:
    return _learned_positions({**c, **MULTI_HEAD}, more=2) | {"norm_at": "pre"}


def opt(c: Config) -> Fields:
    width = optional(c, "word_embed_proj_dim")
    if width is not None and width != whole(c, "hidden_size"):
        raise UsageError(
            "embeddings of another width than the stack cannot be expressed: word_embed_proj_dim "
            f"must be hidden_size {c['hidden_size']}, got {width}; with it, the stack alone is told"
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
    fields = plain_decoder({**c, **MULTI_HEAD, "tie_word_embeddings": _tied(c)})
    return fields | {"qk_rope_head_dim": 0, "positions": "alibi"}


def _tied(c: Config) -> bool:
    return flag(c, "tie_word_embeddings", True)


def falcon(c: Config) -> Fields:
    new, parallel = flag(c, "new_decoder_architecture"), flag(c, "parallel_attn", True)
    heads = whole(c, "num_attention_heads")
    kv_heads = 1 if flag(c, "multi_query", True) else heads
    if new:
        kv_heads = optional(c, "num_kv_heads") or heads
    sizes = {"num_key_value_heads": kv_heads, "head_dim": None, "tie_word_embeddings": _tied(c)}
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


# ---- attention and feed-forward side by side


def gpt_neox(c: Config) -> Fields:
    fields = plain_decoder({**c, **MULTI_HEAD}) | attention_bias({"attention_bias": True, **c})
    side = flag(c, "use_parallel_residual", True)
    fields |= {"ffn_bias": True, "norm_at": "parallel-2" if side else "pre"}
    return fields | _by_percent(c, fields)


def _by_percent(c: Config, fields: Fields) -> Fields:
    """The rotated share, under the name of older configs too."""
    share = c.get("rotary_pct", 0.25)
    if c.get("rotary_emb_base") is not None:
        fields |= {"rope_theta": number("rotary_emb_base", c["rotary_emb_base"])}
    return partly_rotary({"partial_rotary_factor": share, **c}, fields, 0.25)


def gptj(c: Config) -> Fields:
    fields = plain_decoder({**c, **MULTI_HEAD}, "gelu_new") | {"norm_at": "parallel"}
    rope = optional(c, "rotary_dim", 64) or fields["head_dim"]
    fields |= {"ffn_bias": True, "qk_rope_head_dim": rope}
    fields |= rotated_first(rope, fields["head_dim"])
    if fields["ffn_dim"] is None:
        fields |= {"ffn_dim": 4 * fields["dim"]}
    return fields | extras(("head bias", fields["vocab_size"]))


def phi(c: Config) -> Fields:
    fields = plain_decoder(c, "gelu_new") | BIASED | {"norm_at": "parallel"}
    fields |= partly_rotary(c, fields, 0.5)
    gains = 4 * fields["head_dim"] * fields["depth"] if flag(c, "qk_layernorm") else 0
    return fields | extras(("head bias", fields["vocab_size"]), ("query and key norms", gains))


def cohere(c: Config) -> Fields:
    fields = _cohere(c)
    heads = fields["num_heads"] + (fields["num_kv_heads"] or fields["num_heads"])
    gains = heads * fields["head_dim"] * fields["depth"] if flag(c, "use_qk_norm") else 0
    return fields | extras(("query and key norms", gains))


def _cohere(c: Config) -> Fields:
    fields = decoder({**c, "tie_word_embeddings": _tied(c)}) | attention_bias(c)
    return fields | {"norm": "layer-nobias", "norm_at": "parallel"}


def cohere2(c: Config) -> Fields:
    pattern = whole(c, "sliding_window_pattern", 4)
    windows = windows_of(c, lambda layer: (layer + 1) % pattern > 0)
    return _cohere({**c, "head_dim": None}) | _windows_rotate(c, windows)


def _windows_rotate(c: Config, windows: tuple[int, ...]) -> Fields:
    """Positions in the windowed layers alone."""
    depth = layers(c, "num_hidden_layers")
    bare = unrotated(lambda layer: not windows[layer % len(windows)])
    return {"windows": windows} | differing(depth, bare)


# ---- layer norms, a feed-forward without a gate


def persimmon(c: Config) -> Fields:
    fields = plain_decoder({**c, **MULTI_HEAD}, "relu2") | BIASED
    fields |= partly_rotary(c, fields, 0.5)
    gains = 4 * fields["head_dim"] * fields["depth"] if flag(c, "qk_layernorm", True) else 0
    return fields | extras(("query and key norms", gains))


def starcoder2(c: Config) -> Fields:
    bias = flag(c, "use_bias", True)
    fields = plain_decoder({"tie_word_embeddings": True, **c}, "gelu_pytorch_tanh")
    return fields | one_window(c) | {"qkv_bias": bias, "out_bias": bias, "ffn_bias": bias}


def nemotron(c: Config) -> Fields:
    fields = plain_decoder(c, "relu2") | attention_bias(c) | ffn_bias(c)
    return fields | partly_rotary(c, fields, 0.5)


def jais2(c: Config) -> Fields:
    return plain_decoder(c, "relu2") | attention_bias(c) | ffn_bias(c)


def stablelm(c: Config) -> Fields:
    fields = decoder({**c, "head_dim": None}) | {"norm": "layer", "out_bias": False}
    fields |= {"qkv_bias": flag(c, "use_qkv_bias")}
    if flag(c, "use_parallel_residual"):
        fields |= {"norm_at": "parallel"}
    heads = fields["num_heads"] + (fields["num_kv_heads"] or fields["num_heads"])
    gains = heads * fields["head_dim"] * fields["depth"] if flag(c, "qk_layernorm") else 0
    return fields | partly_rotary(c, fields, 0.25) | extras(("query and key norms", gains))


def arcee(c: Config) -> Fields:
    fields = llama({**c, "hidden_act": "silu"})
    return fields | {"activation": plain(c, "relu2")}


def apertus(c: Config) -> Fields:
    """xIELU grows with the square like ReLU squared, and is counted as that."""
    fields = decoder({**c, "hidden_act": "silu"}) | attention_bias(c) | {"qk_norm": "head"}
    table = {**PLAIN, "xielu": "relu2"}
    fields |= {"activation": activation(c, "hidden_act", "xielu", table)}
    slopes = 2 * fields["depth"] if c.get("hidden_act") == "xielu" else 0
    return fields | extras(("slopes of xIELU", slopes))


# ---- Llama's block and its kin


def llama(c: Config) -> Fields:
    return decoder(c) | attention_bias(c) | ffn_bias(c)


def granite(c: Config) -> Fields:
    fields = llama(c)
    return fields | scaled(c, fields)


def granite_swa(c: Config) -> Fields:
    fields = granite(c) | {"sinks": True}
    bases = c.get("layer_rope_theta")
    if bases is not None and (not isinstance(bases, list | tuple) or len(bases) != fields["depth"]):
        raise UsageError(f"layer_rope_theta must name each layer, got {shown(bases)}")
    bare = unrotated(lambda layer: bases is not None and not bases[layer])
    return fields | typed_windows(c, lambda i: i % 4 > 0) | differing(fields["depth"], bare)


def hyperclovax(c: Config) -> Fields:
    fields = granite({"attention_multiplier": decoder(c)["head_dim"] ** -0.5, **c})
    return fields | ({"norm_at": "sandwich"} if flag(c, "use_post_norm", True) else {})


def ernie4_5(c: Config) -> Fields:
    bias = flag(c, "use_bias")
    fields = decoder({"tie_word_embeddings": True, **c})
    return fields | {"qkv_bias": bias, "out_bias": bias, "ffn_bias": bias}


def seed_oss(c: Config) -> Fields:
    fields = llama(c) | {"qkv_bias": flag(c, "attention_bias", True)}
    return fields | {"out_bias": flag(c, "attention_out_bias")}


def helium(c: Config) -> Fields:
    fields = llama(c) | {"out_bias": False}
    if fields["num_heads"] * fields["head_dim"] != fields["dim"]:
        raise UsageError(
            "a helium needs num_attention_heads * head_dim equal to hidden_size "
            f"{fields['dim']}, got {fields['num_heads']} * {fields['head_dim']}"
        )
    return fields


def hunyuan(c: Config) -> Fields:
    return decoder(c) | attention_bias(c) | {"qk_norm": "head"}


def mistral(c: Config) -> Fields:
    return decoder(c) | one_window(c)


def ministral(c: Config) -> Fields:
    return decoder(c) | typed_windows(c, lambda layer: c.get("sliding_window") is not None)


def cwm(c: Config) -> Fields:
    fields = decoder(c) | ffn_bias(c)
    return fields | typed_windows(c, lambda layer: layer % 4 > 0)


def smollm3(c: Config) -> Fields:
    depth, interval = layers(c, "num_hidden_layers"), whole(c, "no_rope_layer_interval", 4)
    rotates = _listed(c, "no_rope_layers", depth, lambda i: (i + 1) % interval > 0)
    slides = flag(c, "use_sliding_window") and c.get("sliding_window") is not None
    windows = windows_of(c, lambda layer: slides and not rotates[layer]) if slides else (0,)
    bare = unrotated(lambda layer: not rotates[layer])
    return llama({"tie_word_embeddings": True, **c}) | {"windows": windows} | differing(depth, bare)


def _listed(c: Config, name: str, depth: int, default: Callable[[int], bool]) -> list[bool]:
    """One flag a layer, as 0 and 1."""
    values = c.get(name) or [default(layer) for layer in range(depth)]
    if not isinstance(values, list | tuple) or len(values) != depth:
        raise UsageError(f"{name} must name each of {depth} layers, got {shown(values)}")
    return [bool(value) for value in values]


def qwen2(c: Config) -> Fields:
    window = c.get("sliding_window", 4096) if flag(c, "use_sliding_window") else None
    first = whole(c, "max_window_layers", 28, least=0)
    windows = windows_of(
        {**c, "sliding_window": window}, lambda layer: window is not None and layer >= first
    )
    return decoder(c) | {"qkv_bias": True, "windows": windows}


def qwen3(c: Config) -> Fields:
    return qwen2(c) | attention_bias(c) | {"qk_norm": "head"}


def qwen3_vl(c: Config) -> Fields:
    return decoder(c) | attention_bias(c) | {"qk_norm": "head"}


def phi3(c: Config) -> Fields:
    fields = decoder(c) | one_window(c)
    return fields | partly_rotary(c, fields)


# ---- norms after the branch, or on both sides


def glm(c: Config) -> Fields:
    fields = decoder(c) | {"qkv_bias": flag(c, "attention_bias", True), "out_bias": False}
    return fields | partly_rotary(c, fields, 0.5)


def glm4(c: Config) -> Fields:
    return glm(c) | {"norm_at": "sandwich"}


def glm4v(c: Config) -> Fields:
    """Its biases do not depend on the config, and its rotary positions take a whole head unless it
    says so."""
    return glm4({"partial_rotary_factor": 1.0, **c, "attention_bias": True})


def olmo(c: Config) -> Fields:
    return decoder(c) | attention_bias(c) | {"norm": "layer-free"}


def olmo2(c: Config) -> Fields:
    return decoder(c) | attention_bias(c) | {"qk_norm": "all", "norm_at": "output"}


def olmo3(c: Config) -> Fields:
    return olmo2(c) | typed_windows(c, lambda layer: (layer + 1) % 4 > 0)


def exaone4(c: Config) -> Fields:
    fields = decoder(c) | {"qk_norm": "head", "norm_at": "output"}
    return fields | exaone_windows(c)


def exaone_windows(c: Config) -> Fields:
    """Windows in all but every fourth layer, which then has no positions either."""
    if c.get("sliding_window") is None:
        return {}
    pattern = whole(c, "sliding_window_pattern", 4, least=0)
    return _windows_rotate(c, windows_of(c, lambda i: pattern > 0 and (i + 1) % pattern > 0))


def gemma(c: Config) -> Fields:
    causal = not flag(c, "use_bidirectional_attention")
    return decoder(c) | attention_bias(c) | {"causal": causal}


def gemma2(c: Config) -> Fields:
    if flag(c, "use_bidirectional_attention"):
        raise UsageError(
            "a gemma2 without its causal mask cannot be expressed: use_bidirectional_attention "
            "must be false, got True"
        )
    return _own_scale(c, lambda layer: layer % 2 == 0) | {"norm_at": "sandwich"}


def vaultgemma(c: Config) -> Fields:
    return _own_scale(c, lambda layer: layer % 2 == 0)


def _own_scale(c: Config, slides: Callable[[int], bool]) -> Fields:
    """What Gemma 2 and 3 share: windows, and a scale of the scores."""
    c = {"sliding_window": 4096, **c, "hidden_act": c.get("hidden_activation", "gelu_pytorch_tanh")}
    fields = gemma(c) | typed_windows(c, slides)
    scalar = number("query_pre_attn_scalar", c.get("query_pre_attn_scalar", 256))
    return fields if scalar == fields["head_dim"] else fields | {"logit_scale": scalar**-0.5}


def gemma3_text(c: Config) -> Fields:
    pattern = whole(c, "sliding_window_pattern", 6)
    if flag(c, "use_bidirectional_attention"):
        half = whole(c, "sliding_window", 4096) // 2 + 1  # half of it to each side
        c = {**c, "sliding_window": half}
    fields = _own_scale(c, lambda layer: (layer + 1) % pattern > 0) | {"norm_at": "sandwich"}
    return fields | {"qk_norm": "head", "rope_theta": rope_setting(c, "rope_theta", 1e6)}
