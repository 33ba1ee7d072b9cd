"""What families share: the sizes of a stack, Llama's block, windows, experts, and layers that
differ. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headwise.configs.values import (
    GATED,
    PLAIN,
    Config,
    Fields,
    activation,
    flag,
    head_dim_of,
    layers,
    number,
    optional,
    rope_setting,
    tiled,
    whole,
    windows_of,
)
from headwise.errors import UsageError

BIASED = {"qkv_bias": True, "out_bias": True, "ffn_bias": True}
MULTI_HEAD = {"num_key_value_heads": None, "head_dim": None}  # keys that GPT-2 and BERT do not have
Changes = Callable[[int], Fields]  # what is other in one layer


def stack(c: Config) -> Fields:
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


def decoder(c: Config) -> Fields:
    """Llama's block: RMS norms first, rotary positions, a gated feed-forward, no bias."""
    fields = stack(c) | {
        "causal": True,
        "norm": "rms",
        "norm_at": "pre",
        "tied": flag(c, "tie_word_embeddings"),
    }
    return fields | rotary(c, fields["head_dim"]) | {"activation": gated(c)}


def plain_decoder(c: Config, default: str = "gelu") -> Fields:
    """The same with layer norms, and a feed-forward without a gate."""
    fields = decoder({**c, "hidden_act": "silu"}) | {"norm": "layer"}
    return fields | {"activation": plain(c, default)}


def gated(c: Config) -> str:
    return activation(c, "hidden_act", "silu", GATED)


def plain(c: Config, default: str = "gelu") -> str:
    return activation(c, "hidden_act", default, PLAIN)


def rotary(c: Config, head_dim: int) -> Fields:
    """Rotary positions over all of a head."""
    return {"qk_rope_head_dim": head_dim, "rope_theta": rope_setting(c, "rope_theta", 10_000.0)}


def partly_rotary(c: Config, fields: Fields, share: float = 1.0) -> Fields:
    """Rotary positions over the first share of a head."""
    rope = int(fields["head_dim"] * rope_setting(c, "partial_rotary_factor", share))
    return {"qk_rope_head_dim": rope, **rotated_first(rope, fields["head_dim"])}


def rotated_first(rope: int, head_dim: int) -> Fields:
    return {"rope_at": "first"} if 0 < rope < head_dim else {}


def attention_bias(c: Config) -> Fields:
    bias = flag(c, "attention_bias")
    return {"qkv_bias": bias, "out_bias": bias}


def unbiased(c: Config) -> Fields:
    """For gated heads: biases of the projections that the gate does not have are not described."""
    if flag(c, "attention_bias"):
        raise UsageError(
            f"a {c.get('model_type')} whose gates have no biases but its projections do cannot be "
            "expressed: attention_bias must be false, got True"
        )
    return {}


def ffn_bias(c: Config) -> Fields:
    return {"ffn_bias": flag(c, "mlp_bias")}


def one_window(c: Config) -> Fields:
    """The same window in all layers, or none."""
    return {"windows": (optional(c, "sliding_window") or 0,)}


def typed_windows(c: Config, slides: Callable[[int], bool] = lambda layer: False) -> Fields:
    """Windows in the layers that `layer_types` calls sliding."""
    return {"windows": windows_of(c, slides)}


def scaled(c: Config, fields: Fields, name: str = "attention_multiplier") -> Fields:
    """A factor of the scores of its own."""
    scale = number(name, c.get(name, 1.0))
    return {} if scale == fields["head_dim"] ** -0.5 else {"logit_scale": scale}


def extras(*counts: tuple[str, int]) -> Fields:
    return {"extras": tuple(pair for pair in counts if pair[1])}


# ---- layers that differ


def differing(depth: int, *changes: Changes) -> Fields:
    """The layers' own sizes, cut to the shortest run that tiles them."""
    rows: list[Fields] = [{} for _ in range(depth)]
    for change in changes:
        for layer, row in enumerate(rows):
            row |= change(layer)
    return {"layers": tiled(rows)} if any(rows) else {}


def where(chosen: Callable[[int], bool], **sizes: int | bool) -> Changes:
    """Other sizes in some layers."""
    return lambda layer: dict(sizes) if chosen(layer) else {}


def unrotated(chosen: Callable[[int], bool]) -> Changes:
    """No positions in some layers."""
    return where(chosen, qk_rope_head_dim=0)


# ---- experts


def has_experts(c: Config) -> bool:
    return bool(optional_count(c, "num_experts"))


def optional_count(c: Config, name: str) -> int:
    """A whole number, zero where it is left out."""
    return 0 if c.get(name) is None else whole(c, name, least=0)


def experts(
    c: Config,
    width: int,
    shared: int = 0,
    sparse: Callable[[int], bool] = lambda layer: True,
    changes: Iterable[Changes] = (),
    router_bias: bool = False,
    shared_gate: bool = False,
) -> Fields:
    """Experts of this width in the sparse layers, `shared` wide ones beside them; the other layers
    keep their feed-forward."""
    depth, number = layers(c, "num_hidden_layers"), optional_count(c, "num_experts")
    dense = [not (number and sparse(layer)) for layer in range(depth)]
    if all(dense):
        return differing(depth, *changes)
    fields: Fields = {
        "num_experts": number,
        "num_experts_per_tok": whole(c, "num_experts_per_tok"),
        "expert_ffn_dim": width,
    }
    if shared:
        fields |= {"shared_ffn_dim": shared}
    if shared and shared_gate:
        fields |= {"shared_gate": True}
    if router_bias:
        fields |= {"router_bias": True}
    no_experts = where(lambda layer: dense[layer], num_experts=0)
    return fields | differing(depth, no_experts, *changes)
