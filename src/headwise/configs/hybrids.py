"""Families of which a `Shape` describes the attention layers alone: one function each from a config
to those, where they lie, and what else there is. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headwise.configs import decoders, experts
from headwise.configs.stacks import (
    Changes,
    attention_bias,
    decoder,
    differing,
    extras,
    gated,
    optional_count,
    partly_rotary,
    typed_windows,
    unbiased,
)
from headwise.configs.values import (
    LAYER_TYPES,
    Config,
    Fields,
    flag,
    kinds_of,
    layers,
    number,
    optional,
    rope_setting,
    tiled,
    whole,
)
from headwise.errors import UsageError, shown

# Other names of layers that attend to all keys, or to none.
FULL = ("full_attention", "attention", "indexed_attention", "hybrid")
OTHER = ("linear_attention", "mamba", "conv", "moe", "mlp", "recurrent")
_LINEAR = "linear attention"


@dataclass(frozen=True)
class Attention:
    """Attention layers of a model that has other things too."""

    fields: Fields  # as if every layer of the model were one of them
    where: Sequence[int]  # which layers they are
    missing: str  # what the model has beside them; empty: nothing, and the fields are the model


def alone(fields: Fields, where: Sequence[int]) -> Fields:
    """Fields of the attention layers alone: no feed-forward, no experts, no tables."""
    kept = {name: value for name, value in fields.items() if name in _OF_ATTENTION}
    windows, rows = fields.get("windows", (0,)), fields.get("layers", ({},))
    picked = [
        {k: v for k, v in rows[i % len(rows)].items() if k in (*_OF_ATTENTION, "reuses_kv")}
        for i in where
    ]
    kept |= {"depth": len(where), "windows": tiled([windows[i % len(windows)] for i in where])}
    kept |= {"ffn_dim": 0, "vocab_size": 0}
    if kept.get("positions") != "alibi":
        kept |= {"positions": "none"}
    return kept | ({"layers": tiled(picked)} if any(picked) else {})


_OF_ATTENTION = (
    *("dim", "num_heads", "head_dim", "v_head_dim", "num_kv_heads", "kv_lora_rank"),
    *("q_lora_rank", "qk_rope_head_dim", "rope_theta", "causal", "norm", "norm_at", "qk_norm"),
    *("logit_scale", "qkv_bias", "out_bias", "positions", "shared_kv", "o_lora_rank", "o_groups"),
    *("attn_gate", "sinks", "rope_at", "rope_interleaved", "split_kv_cache", "chunked"),
)


def _of_kinds(c: Config, fields: Fields, default: Callable[[int], str], what: str) -> Attention:
    """Attention where `layer_types` says so."""
    kinds = kinds_of(c, default, FULL + OTHER)
    where = [layer for layer, kind in enumerate(kinds) if kind in FULL]
    others = len(kinds) - len(where)
    missing = f"{others} of {len(kinds)} layers are {what}" if others else ""
    return Attention(fields, where, missing)


def _every(step: int) -> Callable[[int], str]:
    return _where(lambda layer: (layer + 1) % step == 0)


def _where(full: Callable[[int], bool]) -> Callable[[int], str]:
    return lambda layer: "full_attention" if full(layer) else "linear_attention"


# ---- linear attention and state spaces between attention layers


def qwen3_next(c: Config) -> Attention:
    """Gated attention: a second map as wide as the queries."""
    step = whole(c, "full_attention_interval", 4)
    fields = decoder({**c, "intermediate_size": None}) | attention_bias(c)
    fields |= {"qk_norm": "head", "attn_gate": "value"}
    fields |= partly_rotary(c, fields, 0.25)
    return _never_whole(_of_kinds(c, fields, _every(step), _LINEAR))


def _never_whole(found: Attention) -> Attention:
    """Without another kind of layer, there still is a feed-forward that is not described here."""
    beside = found.missing or "its feed-forwards are of another kind"
    return Attention(found.fields, found.where, beside)


def kimi_linear(c: Config) -> Attention:
    fields = experts.latent({**c, "intermediate_size": None})
    listed = c.get("linear_attn_config")
    if isinstance(listed, Mapping) and c.get("layer_types") is None:
        full = listed.get("full_attn_layers")
        if not isinstance(full, list) or not all(isinstance(i, int) for i in full):
            raise UsageError(f"full_attn_layers must list layers from 1, got {shown(full)}")
        return _never_whole(_of_kinds(c, fields, _where(lambda i: i + 1 in full), _LINEAR))
    return _never_whole(_of_kinds(c, fields, _where(lambda i: i > 0 and i % 4 == 0), _LINEAR))


def olmo_hybrid(c: Config) -> Attention:
    found = _of_kinds(c, decoders.olmo2(c), _every(4), _LINEAR)
    return _never_whole(found)


def minimax(c: Config) -> Attention:
    """Lightning attention in every other layer."""
    fields = decoder(c)
    return _never_whole(_of_kinds(c, fields, _where(lambda i: i % 2 == 0), _LINEAR))


def lfm2(c: Config) -> Attention:
    listed = c.get("full_attn_idxs")
    if listed is not None and not isinstance(listed, list | tuple):
        raise UsageError(f"full_attn_idxs must be a list of layers, got {shown(listed)}")
    chosen = _where(lambda i: listed is None or i in listed)
    fields = decoder({**c, "hidden_act": "silu", "head_dim": None}) | {"qk_norm": "head"}
    return _never_whole(_of_kinds(c, fields, chosen, "convolutions"))


def jamba(c: Config) -> Attention:
    period, offset = whole(c, "attn_layer_period", 8), whole(c, "attn_layer_offset", 4, least=0)
    fields = decoder({**c, "head_dim": None}) | {"qk_rope_head_dim": 0}
    depth = fields["depth"]
    kinds = ["full_attention" if i % period == offset else "mamba" for i in range(depth)]
    return _never_whole(_of_kinds({**c, "layer_types": kinds}, fields, _every(1), "Mamba"))


def bamba(c: Config) -> Attention:
    listed = c.get("attn_layer_indices") or ()
    if not isinstance(listed, list | tuple):
        raise UsageError(f"attn_layer_indices must be a list of layers, got {shown(listed)}")
    fields = decoder(c) | attention_bias(c)
    fields |= partly_rotary({**c, "partial_rotary_factor": 0.5}, fields)
    kinds = ["full_attention" if i in listed else "mamba" for i in range(fields["depth"])]
    return _never_whole(_of_kinds({**c, "layer_types": kinds}, fields, _every(1), "Mamba"))


def nemotron_h(c: Config) -> Attention:
    """Every layer is one of attention, Mamba, feed-forward or experts; no positions."""
    pattern = c.get("hybrid_override_pattern")
    letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    if isinstance(pattern, str) and pattern and not set(pattern) - set(letters):
        c = {**c, "layer_types": [letters[letter] for letter in pattern]}
    kinds = c.get("layer_types")
    if not isinstance(kinds, list | tuple) or not kinds:
        raise UsageError(f"layers_block_type of a nemotron_h must list layers, got {shown(kinds)}")
    c = {**c, "num_hidden_layers": len(kinds)}
    fields = decoder(c) | attention_bias(c) | {"qk_rope_head_dim": 0}
    return _never_whole(_of_kinds(c, fields, _every(1), "Mamba, feed-forward or experts"))


def falcon_h1(c: Config) -> Attention:
    fields = decoder(c) | attention_bias(c)
    return Attention(fields, range(fields["depth"]), "each layer has Mamba beside its attention")


def granitemoehybrid(c: Config) -> Attention:
    """Without Mamba layers it is a Granite with shared experts, or with those alone."""
    shared = optional_count(c, "shared_intermediate_size")
    if optional_count(c, "num_experts"):
        fields = experts.granitemoe(c)
    else:
        fields = decoders.granite({**c, "mlp_bias": None, "intermediate_size": shared})
    if c.get("position_embedding_type") != "rope":
        fields |= {"qk_rope_head_dim": 0}
    return _of_kinds(c, fields, lambda layer: "mamba", "Mamba")


# ---- attention that a Shape describes, beside something that it does not


def indexed(c: Config) -> Attention:
    """DeepSeek's sparse attention: an indexer picks the keys of each query."""
    fields = experts.latent({**c, "intermediate_size": None})
    depth, picked = fields["depth"], whole(c, "index_topk", 2048)
    missing = f"an indexer picks {picked} keys for each query in each of its {depth} layers"
    return Attention(fields, range(depth), missing)


def glm5_next(c: Config) -> Attention:
    fields = experts.latent({**c, "intermediate_size": None})
    return _never_whole(_of_kinds(c, fields, _every(4), _LINEAR))


def muse_spark(c: Config) -> Attention:
    """Gated, windowed attention; its experts read a narrower stream."""
    depth = layers(c, "num_hidden_layers")
    fields = decoder(c) | unbiased(c) | {"qk_norm": "free", "attn_gate": "value"}
    fields |= {"rope_theta": number("rope_theta", c.get("rope_theta", 500_000.0))}
    fields |= typed_windows(c, lambda layer: (depth - 1 - layer) % 4 > 0)
    return Attention(fields, range(depth), "its experts read a narrower stream of their own")


def gemma3n(c: Config) -> Attention:
    """Layers at the end read the keys and values of the last ones of their kind before them."""
    fields = _gemma(c, lambda layer: (layer + 1) % 5 > 0)
    depth = fields["depth"]
    fields |= differing(depth, _reading(c, depth, 15))
    return Attention(fields, range(depth), "each layer has low-rank maps and a table beside it")


def _reading(c: Config, depth: int, default: int) -> Changes:
    """The last layers read keys and values of earlier ones."""
    own = depth - whole(c, "num_kv_shared_layers", default, least=0)
    return lambda layer: {"reuses_kv": True} if layer >= own > 0 else {}


def gemma4(c: Config) -> Attention:
    """Wider heads in the layers that see all keys, maybe with one map for keys and values; experts
    beside the feed-forward."""
    kinds = kinds_of(c, lambda i: LAYER_TYPES[(i + 1) % 6 > 0], LAYER_TYPES)
    kinds[-1] = LAYER_TYPES[0]
    both = c.get("use_bidirectional_attention") == "all"
    if both:
        c = {**c, "sliding_window": whole(c, "sliding_window") // 2 + 1}
    fields = _gemma({**c, "layer_types": kinds}, lambda layer: False) | {"causal": not both}
    depth, full = fields["depth"], [kind == LAYER_TYPES[0] for kind in kinds]
    same, wide = flag(c, "attention_k_eq_v"), flag(c, "use_double_wide_mlp")
    own, width = _own_heads(c, full, same), whole(c, "intermediate_size")
    reads = _reading(c, depth, 0)
    share = rope_setting(c, "partial_rotary_factor", 0.25)

    def heads(layer: int) -> Fields:
        sizes = own(layer)
        if full[layer]:
            rotated = int(sizes.get("head_dim", fields["head_dim"]) * share)
            sizes = {**sizes, "qk_rope_head_dim": rotated, "shared_kv": same}
        return sizes

    def feed(layer: int) -> Fields:
        return {"ffn_dim": 2 * width} if wide and reads(layer) else {}

    fields |= {"ffn_dim": width, "rope_at": "first"} | ({"split_kv_cache": True} if same else {})
    if flag(c, "enable_moe_block"):
        chosen = {**c, "num_experts_per_tok": c.get("top_k_experts")}
        inner = whole(c, "moe_intermediate_size")
        fields |= experts.experts(chosen, inner, shared=width, changes=[heads, reads])
        scales = fields["dim"] + whole(c, "num_experts")
        norms = ("norms of experts", 3 * fields["dim"] * depth)
        fields |= extras(norms, ("router scales", scales * depth))
    else:
        fields |= differing(depth, heads, reads, feed)
    beside = optional_count(c, "hidden_size_per_layer_input")
    missing = f"each layer reads a table of its own, {beside} wide" if beside else ""
    return Attention(fields, range(depth), missing)


def _own_heads(c: Config, full: Sequence[bool], same: bool) -> Changes:
    """Heads of the layers that see all keys, as the config names them: at once or by layer."""
    listed = c.get("per_layer_config")
    if listed is None:
        sizes = {"head_dim": whole(c, "global_head_dim", 512)}
        kv_heads = optional(c, "num_global_key_value_heads") if same else None
        if kv_heads is not None:
            sizes["num_kv_heads"] = kv_heads
        return lambda layer: dict(sizes) if full[layer] else {}
    if not isinstance(listed, Mapping):
        raise UsageError(f"per_layer_config must be a mapping, got {shown(listed)}")
    rows: dict[int, Fields] = {}
    for key, changes in listed.items():
        if not str(key).isdecimal() or not isinstance(changes, Mapping) or set(changes) - set(_OWN):
            raise UsageError(
                f"per_layer_config takes {' and '.join(_OWN)} by layer, got {shown(listed)}"
            )
        rows[int(key)] = {_OWN[name]: whole(changes, name) for name in changes}
    return lambda layer: dict(rows.get(layer, {}))


_OWN = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}


def _gemma(c: Config, slides: Callable[[int], bool]) -> Fields:
    fields = (
        decoder({**c, "intermediate_size": None, "hidden_act": "gelu"})
        | attention_bias(c)
        | {"qk_norm": "head"}
    )
    fields |= {"norm_at": "sandwich", "logit_scale": 1.0}
    act = {"hidden_act": c.get("hidden_activation", "gelu_pytorch_tanh")}
    return fields | typed_windows(c, slides) | {"activation": gated(act)}
