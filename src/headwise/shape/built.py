"""Which shapes headwise's own modules build and train; the costs of all others are as exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise.shape.fields import Shape


def not_built(shape: Shape) -> str:
    """Why headwise has no module of this shape, in one line; empty: it has one."""
    if shape.num_experts:
        return _line("num_experts", 0, shape.num_experts, "experts")
    if shape.sinks:
        return _line("sinks", False, True, "sinks")
    if shape.positions == "alibi":
        return _line("positions", "none", "alibi", "scores that fall with distance")
    if shape.chunked:
        return _line("chunked", False, True, "chunks of keys")
    if shape.split_kv_cache:
        return _line("split_kv_cache", False, True, "two caches of one projection")
    if any(layer.reuses_kv for layer in shape.layers):
        return _line("reuses_kv", False, True, "keys and values of other layers")
    return ""


def _line(name: str, needed: Any, value: Any, what: str) -> str:
    return (
        f"needs {name}={needed!r}, this shape has {name}={value!r}: headwise counts the costs of "
        f"{what} but does not train them"
    )


def beyond_plain(shape: Shape) -> str:
    """What a shape has that fused kernels and theory of plain heads do not know, as they say it;
    empty: nothing. Plain: all layers equal; queries, keys and values by a projection each, or keys
    and values from a latent; outputs straight to dim."""
    found = [f"{name}={value!r}" for name, value in shape.later().items()]
    if shape.q_lora_rank and not shape.latent:
        found.append(f"q_lora_rank={shape.q_lora_rank} without a latent of keys and values")
    return ", ".join(found)
