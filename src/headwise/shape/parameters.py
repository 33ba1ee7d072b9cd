"""Parameters of a `Shape`, exact, by part. Functions of `s` take one layer: a shape of which only
the sizes of its layers are read (`Shape.layer`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwise.shape.fields import Shape

# what lies inside layers, in a table of parameters
LAYER_PARTS = (
    *("attention", "gates", "sinks", "feed-forward"),
    *("router", "experts", "shared experts", "norms"),
)
Matrix = tuple[int, int, bool]  # inputs, outputs, whether it has a bias


def table(shape: Shape, active: bool = False) -> dict[str, int]:
    """Parameters by part; with `active` those that one token uses."""
    D, vocab = shape.dim, shape.vocab_size
    counts = {
        "embedding": vocab * D,
        "read-in": (shape.input_dim > 0) * (shape.input_dim + 1) * (D - shape.position_dim),
        "positions": shape.position_rows * (shape.position_dim or D),
        **dict.fromkeys(LAYER_PARTS, 0),
    }
    for s, _, layers in shape.kinds():
        for name, count in _layer(s, active).items():
            counts[name] += layers * count
    if shape.norm_at != "post":  # post-norm blocks end in a norm already
        counts["norms"] += norm_params(shape)
    own_head = shape.lm_head and not shape.tied and not shape.output_dim
    counts["head"] = vocab * D if own_head else 0
    counts["read-out"] = (D + 1) * shape.output_dim
    for name, count in shape.extras:
        counts[name] = counts.get(name, 0) + count
    return {name: count for name, count in counts.items() if count}


def _layer(s: Shape, active: bool) -> dict[str, int]:
    counts = {
        "attention": _attention(s),
        "gates": _numbers(gate_matrices(s)),
        "sinks": s.num_heads if s.sinks else 0,
        "norms": norms_per_layer(s) * norm_params(s),
    }
    if not s.num_experts:
        return counts | {"feed-forward": feed_forward(s, s.ffn_dim)}
    used = s.num_experts_per_tok if active else s.num_experts
    return counts | {
        "router": s.num_experts * (s.dim + s.router_bias),
        "experts": used * feed_forward(s, s.expert_ffn_dim),
        "shared experts": feed_forward(s, s.shared_ffn_dim),
    }


# ---- attention


def attention_matrices(s: Shape) -> list[Matrix]:
    """Every matrix of a layer's attention but its gate; the output's bias is counted apart, one for
    each averaged module."""
    H, R, KV, D = s.num_heads, s.head_dim, s.num_kv_heads, s.dim
    # Queries, straight or through a latent of their own.
    Q = s.q_lora_rank
    biased = s.qkv_bias and not s.latent
    found = [(D, Q, s.qkv_bias), (Q, H * R, False)] if Q else [(D, H * R, biased)]
    # Keys and values: from one latent, made by another layer, or by a projection for both or each.
    if s.latent:
        nope, C, rope = R - s.qk_rope_head_dim, s.kv_lora_rank, s.qk_rope_head_dim
        found += [(D, C + rope, s.qkv_bias), (C, H * (nope + s.v_head_dim), False)]
    elif not s.reuses_kv:
        widths = (KV * R,) if s.shared_kv else (KV * R, KV * s.v_head_dim)
        found += [(D, width, s.qkv_bias) for width in widths]
    return found + output_matrices(s)


def output_matrices(s: Shape) -> list[Matrix]:
    """The heads' outputs to dim: at once, or each group of heads to a latent and all of those."""
    inner = s.num_heads * s.v_head_dim
    if not s.o_lora_rank:
        return [(inner, s.dim, False)]
    width = s.o_groups * s.o_lora_rank
    return [(inner // s.o_groups, width, False), (width, s.dim, False)]


def gate_matrices(s: Shape) -> list[Matrix]:
    """Gates on the heads' outputs, and on the shared experts."""
    gates = {"none": 0, "head": s.num_heads, "value": s.num_heads * s.v_head_dim}[s.attn_gate]
    found = [(s.dim, gates, s.qkv_bias)] if gates else []
    return [*found, (s.dim, 1, False)] if s.shared_gate else found


def _attention(s: Shape) -> int:
    out_bias = s.average * s.dim if s.out_bias else 0
    latent_norms = s.kv_lora_rank + s.q_lora_rank  # one RMS gain per coordinate
    return _numbers(attention_matrices(s)) + out_bias + latent_norms + _qk_norm(s)


def _qk_norm(s: Shape) -> int:
    """Gains of queries and keys; keys of another layer are normalised there."""
    if s.qk_norm not in ("head", "all"):
        return 0
    query, key = (1, 1) if s.qk_norm == "head" else (s.num_heads, s.num_kv_heads)
    return s.head_dim * (query + key * (not s.reuses_kv))


def _numbers(matrices: list[Matrix]) -> int:
    return sum(a * b + b * bias for a, b, bias in matrices)


# ---- feed-forward, norms


def feed_forward(s: Shape, width: int) -> int:
    """Parameters of one feed-forward of this hidden width; 0: none."""
    hidden = width * (2 if s.gated else 1)
    bias = hidden + s.dim if s.ffn_bias and width else 0
    return s.dim * (hidden + width) + bias


def feed_forward_weights(s: Shape) -> int:
    """Weights of the feed-forward that one token meets, without biases."""
    width = s.ffn_dim
    router = 0
    if s.num_experts:
        width = s.num_experts_per_tok * s.expert_ffn_dim + s.shared_ffn_dim
        router = s.dim * s.num_experts
    return s.dim * width * (3 if s.gated else 2) + router


def norm_params(s: Shape) -> int:
    """Parameters of one norm of the width of the model."""
    D = s.dim
    gains = {"layer": 2 * D, "layer-nobias": D, "rms": D, "scalar": 1}
    return gains.get(s.norm, 0)


def norms_per_layer(s: Shape) -> int:
    """Norms of one layer."""
    if s.norm_at == "parallel":
        return 1
    count = 4 if s.norm_at == "sandwich" else 2
    return count if s.ffn_dim or s.num_experts else count // 2
