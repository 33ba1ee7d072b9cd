"""What a `Shape` may be: each rule yields what is wrong, in one line."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headwise.errors import (
    LARGEST,
    MOST_COUNT,
    MOST_LAYERS,
    MOST_SIZE,
    UsageError,
    nearest,
    shown,
)
from headwise.shape.layers import unread

if TYPE_CHECKING:
    from headwise.shape.fields import Shape

ACTIVATIONS = ("relu", "relu2", "gelu", "swiglu", "geglu")
GATED = ("swiglu", "geglu")
NORMS = ("layer", "layer-nobias", "layer-free", "rms", "rms-free", "scalar")
NORM_PLACES = ("post", "pre", "sandwich", "output", "parallel", "parallel-2")
QK_NORMS = ("none", "head", "free", "all")
POSITIONS = ("none", "additive", "concatenated", "room", "alibi")
WIDENING = ("concatenated", "room")  # positions beside the vectors
ATTN_GATES = ("none", "head", "value")
ROPE_PLACES = ("last", "first")

_CHOICES = {
    "activation": ACTIVATIONS,
    "norm": NORMS,
    "norm_at": NORM_PLACES,
    "qk_norm": QK_NORMS,
    "positions": POSITIONS,
    "attn_gate": ATTN_GATES,
    "rope_at": ROPE_PLACES,
}
_POSITIVE = (
    *("dim", "depth", "num_heads", "head_dim", "v_head_dim", "num_kv_heads", "average"),
    "o_groups",
)
_OF_EXPERTS = ("num_experts_per_tok", "expert_ffn_dim", "shared_ffn_dim")
SMALL = 1 << 14  # where no size is larger, parameters can be counted in 64 bits


def check(shape: Shape) -> None:
    """Refuse what is wrong with a shape, with the first fault."""
    for rule in (_types, _sizes, _heads_of_layers, _split, _reuse, _experts, _positions, _counts):
        for fault in rule(shape):
            raise UsageError(fault)


@functools.cache
def _names(kind: type[Any], of: str) -> tuple[str, ...]:
    """The fields of a type."""
    return tuple(f.name for f in dataclasses.fields(kind) if f.type == of)


def _types(s: Shape) -> Iterator[str]:
    for name in _names(type(s), "int"):
        value = getattr(s, name)
        if type(value) is not int and not is_int(value):
            yield f"{name} must be a whole number, got {shown(value)}"
    for name in _names(type(s), "bool"):
        value = getattr(s, name)
        if not isinstance(value, bool):
            yield f"{name} must be true or false, got {shown(value)}"
    for name in ("rope_theta", "logit_scale", "max_logit"):
        value = getattr(s, name)
        given = value is not None or name == "rope_theta"
        if given and not (isinstance(value, float) and 0 < value <= LARGEST):
            yield f"{name} must be a positive number up to {LARGEST:g}, got {shown(value)}"
    for name, choices in _CHOICES.items():
        value = getattr(s, name)
        if value not in choices:
            yield f"unknown {name} {shown(value)}; {nearest(str(value), choices)}"


def _sizes(s: Shape) -> Iterator[str]:
    for name in _names(type(s), "int"):
        value = getattr(s, name)
        if 1 <= value <= MOST_SIZE:
            continue
        if name in _POSITIVE and value < 1:
            yield f"{name} must be at least 1, got {shown(value)}"
        if value < 0:
            yield f"{name} must not be negative, got {shown(value)}"
        if value > MOST_SIZE:
            yield f"{name} must be at most {MOST_SIZE:,} (32 bits), got {shown(value)}"
    if s.depth > MOST_LAYERS:
        yield f"depth must be at most {MOST_LAYERS:,} layers, got {s.depth}"
    if s.vocab_size and s.input_dim:
        got = f"got vocab_size {s.vocab_size}, input_dim {s.input_dim}"
        yield f"a shape takes tokens or vectors: vocab_size excludes input_dim, {got}"
    if not s.lm_head and not s.vocab_size:
        yield "lm_head must be true where no tokens come in, got lm_head False, vocab_size 0"
    if s.chunked and not s.causal:
        yield "chunked needs a causal shape, got chunked True, causal False"
    ok = isinstance(s.windows, tuple) and all(is_int(w) and 0 <= w <= MOST_SIZE for w in s.windows)
    if not ok or not 1 <= len(s.windows) <= s.depth:
        yield (
            f"windows must be 1 to depth ({s.depth}) numbers, each 0 (all keys) or more, "
            f"got {shown(s.windows)}"
        )
    if not isinstance(s.extras, tuple) or not all(map(_is_extra, s.extras)):
        rule = "extras must be pairs of a name and a number of parameters, 0 or more"
        yield f"{rule}, got {shown(s.extras)}"


# ---- attention


def _heads_of_layers(s: Shape) -> Iterator[str]:
    if not s.layers:
        yield from _heads(s)
        return
    seen = set()
    for i, layer in enumerate(s.layers):
        if layer in seen:
            continue
        seen.add(layer)
        view = s.layer(i)
        for name in ("num_heads", "num_kv_heads", "head_dim", "v_head_dim"):
            if getattr(view, name) < 1:
                yield f"layer {i}: {name} must be at least 1, got {getattr(view, name)}"
        for fault in _heads(view):
            yield f"layer {i}: {fault}"
        if layer.reuses_kv and s.latent:
            latent = f"kv_lora_rank {s.kv_lora_rank}"
            yield f"layer {i}: reuses_kv goes with keys and values, not with a latent ({latent})"


def _heads(s: Shape) -> Iterator[str]:
    """Rules about the heads of one layer."""
    H, KV, R = s.num_heads, s.num_kv_heads, s.head_dim
    rope = s.qk_rope_head_dim
    if H % KV:
        yield f"num_heads must be a multiple of num_kv_heads, got num_heads {H}, num_kv_heads {KV}"
    if rope % 2:
        what = "head_dim" if rope == R else "qk_rope_head_dim"
        yield f"{what} must be even for rotary positions, got {rope}"
    if rope > R:
        got = f"qk_rope_head_dim {rope}, head_dim {R}"
        yield f"qk_rope_head_dim must not exceed head_dim, got {got}"
    if H % s.average:
        yield f"num_heads must be a multiple of average, got num_heads {H}, average {s.average}"
    if s.max_logit is not None and (s.qk_norm not in ("head", "free") or s.logit_scale is not None):
        got = f"qk_norm {s.qk_norm}, logit_scale {s.logit_scale}"
        yield f"max_logit needs qk_norm head or free and replaces logit_scale, got {got}"
    if s.latent:
        yield from _latent(s)
    if s.shared_kv and s.v_head_dim != R:
        got = f"head_dim {R}, v_head_dim {s.v_head_dim}"
        yield f"shared_kv makes the keys the values, so v_head_dim must be head_dim, got {got}"
    yield from _output(s)


def _latent(s: Shape) -> Iterator[str]:
    latent = f"kv_lora_rank {s.kv_lora_rank}"
    if s.num_kv_heads != s.num_heads:
        rule = f"num_kv_heads must equal num_heads {s.num_heads} when a latent ({latent})"
        yield f"{rule} replaces grouped heads, got {s.num_kv_heads}"
    if s.qk_norm not in ("none", "free"):
        yield f"qk_norm must be none or free with a latent ({latent}), got {s.qk_norm}"
    if s.shared_kv:
        yield f"shared_kv must be false with a latent ({latent}), which keys and values share"
    if s.rope_at == "first":
        yield f"rope_at must be last with a latent ({latent}), got first"


def _output(s: Shape) -> Iterator[str]:
    if s.o_groups > 1 and not s.o_lora_rank:
        yield f"o_groups needs o_lora_rank above 0, got o_groups {s.o_groups}, o_lora_rank 0"
    if s.num_heads % s.o_groups:
        got = f"num_heads {s.num_heads}, o_groups {s.o_groups}"
        yield f"num_heads must be a multiple of o_groups, got {got}"


def _split(s: Shape) -> Iterator[str]:
    if s.split_kv_cache and not any(s.layer(i).shared_kv for i in range(len(s.layers) or 1)):
        yield "split_kv_cache needs shared_kv, got split_kv_cache True, shared_kv False"


def _reuse(s: Shape) -> Iterator[str]:
    if s.depth == 1 or not any(layer.reuses_kv for layer in s.layers):
        return
    own = s.own_sizes()
    i = unread([(own | layer.given(), layer.reuses_kv) for layer in s.layers])
    if i is not None:
        rule = "reuses_kv needs a layer before with keys and values of its own in the same sizes"
        yield f"layer {i}: {rule}"


# ---- feed-forward


def _experts(s: Shape) -> Iterator[str]:
    if not s.num_experts:
        for name in _OF_EXPERTS:
            if getattr(s, name):
                got = f"got {name} {getattr(s, name)}, num_experts 0"
                yield f"{name} needs num_experts above 0, {got}"
        for name in ("shared_gate", "router_bias"):
            if getattr(s, name):
                yield f"{name} needs num_experts above 0, got {name} True, num_experts 0"
        return
    if not s.expert_ffn_dim:
        got = f"num_experts {s.num_experts}, expert_ffn_dim 0"
        yield f"expert_ffn_dim must be given with experts, got {got}"
    if s.shared_gate and not s.shared_ffn_dim:
        yield "shared_gate needs shared_ffn_dim above 0, got shared_gate True, shared_ffn_dim 0"
    for i in range(len(s.layers) or 1):
        view = s.layer(i)
        E, k = view.num_experts, view.num_experts_per_tok
        if E and not 1 <= k <= E:
            where = f"layer {i}: " if s.layers else ""
            got = f"num_experts_per_tok {k}, num_experts {E}"
            yield f"{where}num_experts_per_tok must be from 1 to num_experts, got {got}"


# ---- positions, and all of it


def _positions(s: Shape) -> Iterator[str]:
    width = s.position_dim
    if s.positions in ("additive", "concatenated") and not s.position_rows:
        yield f"num_positions must be given for {s.positions} positions, got 0"
    if s.positions == "room" and s.num_positions:
        rule = "num_positions must be 0 with room, which is the same at every place"
        yield f"{rule}, got {s.num_positions}"
    if s.positions == "alibi" and s.num_positions:
        yield f"num_positions must be 0 with alibi, which has no table, got {s.num_positions}"
    if (s.positions in WIDENING) != (width > 0):
        got = f"position_dim {width}, positions {s.positions}"
        yield f"position_dim goes with concatenated positions and room, got {got}"
    if width and s.vocab_size:
        rule = "concatenated positions go with vectors, not with tokens"
        yield f"{rule}, got vocab_size {s.vocab_size}"
    if width >= s.dim:
        yield f"position_dim must be below dim, got position_dim {width}, dim {s.dim}"


def _counts(s: Shape) -> Iterator[str]:
    sizes = [getattr(s, name) for name in _names(type(s), "int")]
    sizes += [size for layer in s.layers for size in layer.given().values()]
    counts = [count for _, count in s.extras]
    # Most shapes are small, and counting takes longer than all other rules.
    many = s.num_experts and s.num_experts * s.expert_ffn_dim > SMALL
    if (many or max(*sizes, *counts) > SMALL) and s.params > MOST_COUNT:
        counted = shown(s.params)
        yield f"a shape must have at most {MOST_COUNT:,} parameters (64 bits), got {counted}"


def is_int(value: Any) -> bool:
    """Whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_extra(pair: Any) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    return isinstance(pair[0], str) and is_int(pair[1]) and pair[1] >= 0
