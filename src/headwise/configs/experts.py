"""Decoders with experts: one function each from a config to the fields of a `Shape`. Standard
library only."""

from __future__ import annotations

from collections.abc import Callable

from headwise.configs.decoders import exaone_windows, granite
from headwise.configs.stacks import (
    MULTI_HEAD,
    Changes,
    attention_bias,
    decoder,
    differing,
    experts,
    extras,
    ffn_bias,
    has_experts,
    one_window,
    optional_count,
    partly_rotary,
    typed_windows,
    unbiased,
    unrotated,
    where,
)
from headwise.configs.values import (
    Config,
    Fields,
    flag,
    kinds_of,
    layers,
    optional,
    rope_setting,
    table_of,
    tiled,
    whole,
    windows_of,
)
from headwise.errors import UsageError, shown

_KINDS = ("dense", "sparse")
_CHUNKS = ("full_attention", "chunked_attention")


def _indices(c: Config, name: str) -> frozenset[int]:
    """Layers that a config lists by number."""
    listed = c.get(name) or []
    if not isinstance(listed, list | tuple) or not all(isinstance(i, int) for i in listed):
        raise UsageError(f"{name} must be a list of layers, got {shown(listed)}")
    return frozenset(listed)


def _behind_dense(c: Config) -> Callable[[int], bool]:
    """Experts in all layers behind the first few, or as the config lists them."""
    first = optional_count(c, "first_k_dense_replace")
    kinds = kinds_of(c, lambda i: _KINDS[i >= first], _KINDS, "mlp_layer_types")
    return lambda layer: kinds[layer] == "sparse"


def _every_step(c: Config) -> Callable[[int], bool]:
    """Qwen's way: experts in every layer, or every few, that is not listed as dense."""
    dense, step = _indices(c, "mlp_only_layers"), whole(c, "decoder_sparse_step", 1)
    return lambda layer: layer not in dense and (layer + 1) % step == 0


def _shared(c: Config) -> int:
    """The width of all shared experts together."""
    number = optional_count(c, "n_shared_experts")
    return number * whole(c, "moe_intermediate_size") if number else 0


# ---- Mixtral's kin: every layer has experts as wide as a feed-forward


def mixtral(c: Config) -> Fields:
    return decoder(c) | one_window(c) | experts(c, whole(c, "intermediate_size"))


def minimax_m2(c: Config) -> Fields:
    fields = decoder(c) | {"qk_norm": "all"} | experts(c, whole(c, "intermediate_size"))
    share = 1.0
    if c.get("rotary_dim") is not None:
        share = min(1.0, whole(c, "rotary_dim") / fields["head_dim"])
    return fields | partly_rotary(c, fields, share)


def phimoe(c: Config) -> Fields:
    fields = decoder(c) | one_window(c) | attention_bias(c) | {"norm": "layer"}
    fields |= experts(c, whole(c, "intermediate_size"))
    bias = fields["vocab_size"] if flag(c, "lm_head_bias") else 0
    return fields | extras(("head bias", bias))


def olmoe(c: Config) -> Fields:
    fields = decoder(c) | attention_bias(c) | {"qk_norm": "all"}
    return fields | experts(c, whole(c, "intermediate_size"))


def flex_olmo(c: Config) -> Fields:
    return olmoe(c) | {"norm_at": "output"}


def granitemoe(c: Config) -> Fields:
    fields = granite({**c, "mlp_bias": None})
    shared = optional_count(c, "shared_intermediate_size")
    return fields | experts(c, whole(c, "intermediate_size"), shared)


def hunyuan_moe(c: Config) -> Fields:
    fields = decoder(c) | attention_bias(c) | {"qk_norm": "head"}
    for name in ("num_experts", "num_experts_per_tok"):
        if isinstance(c.get(name), list | tuple):
            raise UsageError(
                f"{name} by layer cannot be expressed in a hunyuan_v1_moe: give one number, got "
                f"{shown(c[name])}"
            )
    width = whole(c, "intermediate_size")
    return fields | experts(c, width, shared=width)


def dbrx(c: Config) -> Fields:
    attention, feed = table_of(c, "attn_config"), table_of(c, "ffn_config")
    heads = optional(attention, "kv_n_heads", 1)
    act = table_of(feed, "ffn_act_fn").get("name", "silu")
    sizes = {**c, **MULTI_HEAD, "num_key_value_heads": heads, "hidden_act": act}
    width = whole(feed, "ffn_hidden_size", 3584)
    inner = {
        "num_hidden_layers": c.get("num_hidden_layers"),
        "num_experts": feed.get("moe_num_experts", 4),
        "num_experts_per_tok": feed.get("moe_top_k", 1),
    }
    fields = decoder({**sizes, "intermediate_size": width}) | {"norm": "layer-nobias"}
    theta = rope_setting({**c, **attention}, "rope_theta", 10_000.0)
    return fields | {"rope_theta": theta} | experts(inner, width)


def gpt_oss(c: Config) -> Fields:
    fields = decoder(c) | {"sinks": True, "ffn_bias": True}
    fields |= attention_bias({"attention_bias": True, **c})
    fields |= typed_windows(c, lambda layer: layer % 2 == 0)
    return fields | experts(c, whole(c, "intermediate_size"), router_bias=True)


# ---- experts narrower than the dense layers' feed-forward


def qwen2_moe(c: Config) -> Fields:
    slides = flag(c, "use_sliding_window")
    last = whole(c, "max_window_layers", 28, least=0)
    window = {**c, "sliding_window": c.get("sliding_window", 4096) if slides else None}
    fields = decoder(c) | {"qkv_bias": flag(c, "qkv_bias", True)}
    fields |= typed_windows(window, lambda i: slides and i < last and (i + 1) % 2 > 0)
    shared = whole(c, "shared_expert_intermediate_size", 5632, least=0)
    width = whole(c, "moe_intermediate_size")
    return fields | experts(c, width, shared, _every_step(c), shared_gate=True)


def qwen3_moe(c: Config) -> Fields:
    window = c.get("sliding_window", 4096) if flag(c, "use_sliding_window") else None
    fields = decoder(c) | attention_bias(c) | one_window({"sliding_window": window})
    fields |= {"qk_norm": "head"}
    return fields | experts(c, whole(c, "moe_intermediate_size"), sparse=_every_step(c))


def glm4_moe(c: Config) -> Fields:
    """Where head_dim is not given it is rounded down."""
    if c.get("head_dim") is None:
        c = {**c, "head_dim": whole(c, "hidden_size") // whole(c, "num_attention_heads")}
    fields = decoder(c) | {"qkv_bias": flag(c, "attention_bias"), "out_bias": False}
    if flag(c, "use_qk_norm"):
        fields |= {"qk_norm": "head"}
    return fields | partly_rotary(c, fields, 0.5) | _routed(c)


def _routed(c: Config, *changes: Changes) -> Fields:
    """DeepSeek's way: dense layers first, then narrow experts and shared ones."""
    if not has_experts(c):
        return differing(layers(c, "num_hidden_layers"), *changes)
    width = whole(c, "moe_intermediate_size")
    return experts(c, width, _shared(c), _behind_dense(c), changes)


def dots1(c: Config) -> Fields:
    fields = decoder(c) | attention_bias(c) | {"qk_norm": "head"}
    slides = c.get("sliding_window") is not None
    first = whole(c, "max_window_layers", 62, least=0)
    windows = typed_windows(c, lambda layer: slides and layer >= first)
    return fields | windows | _routed({**c, "mlp_layer_types": None})


def exaone_moe(c: Config) -> Fields:
    """Windows, no positions where there are none, and experts: changes of three kinds."""
    fields = decoder(c) | {"qk_norm": "head"} | exaone_windows(c)
    windows = fields.get("windows", (0,))
    bare = unrotated(lambda layer: len(windows) > 1 and not windows[layer % len(windows)])
    return fields | _routed(c, bare)


def solar_open(c: Config) -> Fields:
    """Experts in every layer."""
    fields = decoder(c) | {"qkv_bias": flag(c, "attention_bias"), "out_bias": False}
    routed = _routed({**c, "first_k_dense_replace": 0, "mlp_layer_types": None})
    return fields | partly_rotary(c, fields) | routed


def ernie4_5_moe(c: Config) -> Fields:
    bias = flag(c, "use_bias")
    fields = decoder({"tie_word_embeddings": True, **c, "head_dim": None})
    fields |= {"qkv_bias": bias, "out_bias": bias, "ffn_bias": bias}
    depth = fields["depth"]
    start = whole(c, "moe_layer_start_index", 1, least=0)
    end = whole(c, "moe_layer_end_index", -1, least=-1)
    step, last = whole(c, "moe_layer_interval", 1), depth - 1 if end == -1 else end
    sparse = [(i + 1) % step == 0 and start <= i <= last for i in range(depth)]
    fields |= experts(c, whole(c, "moe_intermediate_size"), _shared(c), lambda i: sparse[i])
    corrections = sum(sparse) * optional_count(c, "num_experts")
    head = fields["vocab_size"] if bias else 0
    fields |= extras(("router corrections", corrections), ("head bias", head))
    return _biased_beside(fields)


# ---- latents


def latent(c: Config) -> Fields:
    """DeepSeek's attention: keys and values from one latent."""
    rope = whole(c, "qk_rope_head_dim", 64, least=0)
    fields = decoder({**c, "head_dim": whole(c, "qk_nope_head_dim", 128) + rope})
    fields |= attention_bias(c)
    fields |= {"qk_rope_head_dim": rope, "v_head_dim": whole(c, "v_head_dim", 128)}
    return fields | {
        "kv_lora_rank": whole(c, "kv_lora_rank", 512),
        "q_lora_rank": optional(c, "q_lora_rank", 1536) or 0,
        "num_kv_heads": None,
    }


def deepseek_v2(c: Config) -> Fields:
    return _biased_beside(deepseek_v3(c) | ffn_bias(c))


def _biased_beside(fields: Fields) -> Fields:
    """Biases of the dense and shared feed-forwards, where experts have none: counted apart."""
    if not fields["ffn_bias"] or not fields.get("num_experts"):
        return fields
    depth, rows = fields["depth"], fields.get("layers", ({},))
    dense = sum(rows[i % len(rows)].get("num_experts") == 0 for i in range(depth))
    dim, shared = fields["dim"], fields.get("shared_ffn_dim", 0)
    ffn = fields["ffn_dim"] or 4 * dim
    biases = dense * (2 * ffn + dim) + (depth - dense) * (2 * shared + dim if shared else 0)
    others = fields.get("extras", ())
    return fields | {"ffn_bias": False} | extras(*others, ("feed-forward biases", biases))


def glm4_moe_lite(c: Config) -> Fields:
    """One dense layer, whatever first_k_dense_replace says."""
    return deepseek_v3({**c, "first_k_dense_replace": 1})


def deepseek_v3(c: Config) -> Fields:
    return latent(c) | _routed(c)


# ---- layers that differ in their heads too


def mimo_v2(c: Config) -> Fields:
    """Twice the KV heads, and a sink for each head, in the windowed layers."""
    value = whole(c, "v_head_dim", 128)
    fields = decoder(c) | {"qkv_bias": flag(c, "attention_bias"), "v_head_dim": value}
    if c.get("sliding_window_size") is not None:
        c = {**c, "sliding_window": whole(c, "sliding_window_size") + 1}
    depth = fields["depth"]
    windows = windows_of(c, lambda i: i > 0 and (i + 1) % 6 > 0)
    slides = [bool(windows[i % len(windows)]) for i in range(depth)]
    kv_heads = fields["num_kv_heads"] or fields["num_heads"]
    wide = where(lambda layer: slides[layer], num_kv_heads=2 * kv_heads)
    dense_first = {"first_k_dense_replace": 1, **c}
    fields |= {"windows": windows} | partly_rotary(c, fields, 0.334)
    fields |= _routed(dense_first, wide)
    return fields | extras(("sinks", sum(slides) * fields["num_heads"]))


def step3p7(c: Config) -> Fields:
    """A gate for each head, and heads of their own number in the windowed layers."""
    if c.get("num_attention_groups") is not None:
        c = {**c, "num_key_value_heads": c["num_attention_groups"]}
    if isinstance(c.get("rope_theta"), list | tuple):  # by layer
        c = {**c, "rope_theta": next(iter(c["rope_theta"]), None)}
    fields = decoder(c) | unbiased(c) | {"qk_norm": "head", "attn_gate": "head"}
    fields |= {"windows": windows_of(c, lambda layer: False)}
    heads = optional(table_of(c, "attention_other_setting"), "num_attention_heads")
    heads = optional(c, "num_sliding_attention_heads") or heads or fields["num_heads"]
    slides = [bool(fields["windows"][i % len(fields["windows"])]) for i in range(fields["depth"])]
    own = where(lambda layer: slides[layer], num_heads=heads)
    shared = whole(c, "share_expert_dim", 1280, least=0)
    sparse = _behind_dense({"first_k_dense_replace": 3, **c})
    return fields | experts(c, whole(c, "moe_intermediate_size"), shared, sparse, [own])


def llama4(c: Config) -> Fields:
    """Experts in every layer or every other; chunks of keys, or all of them without positions."""
    depth, width = layers(c, "num_hidden_layers"), whole(c, "intermediate_size")
    interval = whole(c, "no_rope_layer_interval", 4)
    listed = c.get("no_rope_layers")
    if listed and (not isinstance(listed, list | tuple) or len(listed) != depth):
        raise UsageError(f"no_rope_layers must name each of {depth} layers, got {shown(listed)}")
    rotates = [bool(listed[i]) if listed else (i + 1) % interval > 0 for i in range(depth)]
    step = whole(c, "interleave_moe_layer_step", 1)
    sparse = _indices(c, "moe_layers") or frozenset(range(step - 1, depth, step))
    fields = decoder({**c, "intermediate_size": whole(c, "intermediate_size_mlp", 16384)})
    fields |= attention_bias(c)
    if flag(c, "use_qk_norm", True):
        fields |= {"qk_norm": "free"}
    kinds = kinds_of(c, lambda i: _CHUNKS[rotates[i]], _CHUNKS)
    chunk = whole(c, "attention_chunk_size", 8192)
    fields |= {"windows": tiled([chunk if kind == _CHUNKS[1] else 0 for kind in kinds])}
    fields |= {"chunked": any(fields["windows"])}
    bare = unrotated(lambda layer: not rotates[layer])
    return fields | experts(c, width, width, lambda i: i in sparse, [bare])
