"""Which shapes headwise's own modules build and train; the costs of all others are as exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwise.shape.fields import Shape


def not_built(shape: Shape) -> str:
    """Why headwise has no module of this shape, in one line; empty: it has one."""
    for name, needed, what in (
        ("num_experts", 0, "experts"),
        ("sinks", False, "learned scores beside those of the keys"),
    ):
        value = getattr(shape, name)
        if value != needed:
            return _line(name, needed, value, what)
    if shape.positions == "alibi":
        return _line("another positions", "", "alibi", "scores that fall with distance")
    for name, choices in (
        ("layers", ((),)),
        ("shared_kv", (False,)),
        ("o_lora_rank", (0,)),
        ("attn_gate", ("none",)),
        ("rope_at", ("last",)),
        ("lm_head", (True,)),
        ("qk_norm", ("none", "head", "free")),
        ("norm_at", ("post", "pre", "sandwich", "parallel")),
    ):
        if getattr(shape, name) not in choices:
            return _line(name, choices[0], getattr(shape, name), name)
    if shape.q_lora_rank and not shape.latent:
        return _line("q_lora_rank", 0, shape.q_lora_rank, "low-rank queries without a latent")
    if any(layer.reuses_kv for layer in shape.layers):
        return _line("layers with reuses_kv", False, True, "keys and values of other layers")
    return ""


def _line(name: str, needed: object, value: object, what: str) -> str:
    return (
        f"needs {name}={needed!r}, this shape has {name}={value!r}: headwise counts the costs of "
        f"{what} but does not train them"
    )
