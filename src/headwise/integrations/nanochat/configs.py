"""GPTConfig and Shape: nanochat's names of the sizes, and ours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from headwise.errors import UsageError
from headwise.shape import Shape, beyond_plain

ADDED = ("head_dim", "v_head_dim", "logit_scale")  # fields that free heads add to GPTConfig
HEADS = ("num_heads", "head_dim", "v_head_dim", "num_kv_heads", "logit_scale", "max_logit")
SHARP = 1.2  # nanochat's factor of queries and of keys


def shape_of(config: Any) -> Shape:
    """The shape of a GPTConfig, or of its fields as a mapping."""
    fields = config if isinstance(config, Mapping) else vars(config)
    # Checkpoints from before there were windows have no pattern.
    return Shape.from_hf({"window_pattern": "L", **fields})


def config_of(shape: Shape, sequence_len: int = 2048) -> dict[str, Any]:
    """GPTConfig's fields for a shape of nanochat's form, with those that free heads add; the
    inverse of `shape_of`."""
    short = -(-sequence_len // 512) * 128 + 1
    letters = {short: "S", 0: "L"}
    windows = [shape.window(layer) for layer in range(shape.depth)]
    if windows[-1] or set(windows) - set(letters):
        raise UsageError(
            f"nanochat's windows are 0 or {short} at sequence_len {sequence_len}, 0 in the last "
            f"layer, got {tuple(windows)}"
        )
    config = {
        "sequence_len": sequence_len,
        "vocab_size": shape.vocab_size,
        "n_layer": shape.depth,
        "n_head": shape.num_heads,
        "n_kv_head": shape.num_kv_heads,
        "n_embd": shape.dim,
        "window_pattern": "".join(letters[w] for w in windows),
        "head_dim": shape.head_dim,
        "v_head_dim": shape.v_head_dim,
        "logit_scale": unless_stock(shape.scale, shape.head_dim),
    }
    if special := beyond_plain(shape):
        raise UsageError(f"nanochat's layers are equal and plain, this shape has {special}")
    wanted, made = dataclasses.asdict(shape), dataclasses.asdict(shape_of(config))
    wanted |= {"windows": made["windows"], "max_logit": None, "logit_scale": shape.scale}
    for name, value in made.items():
        if wanted[name] != value:
            raise UsageError(
                f"{name} of a nanochat model of these sizes is {value!r}, got {wanted[name]!r}"
            )
    return without_stock_sizes(config)


def unless_stock(scale: float | None, head_dim: int) -> float | None:
    """The scale of the scores, None where it is nanochat's own."""
    stock = SHARP**2 * head_dim**-0.5
    if scale is None or math.isclose(scale, stock, rel_tol=1e-12):
        return None
    return scale


def without_stock_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without added fields where its sizes are nanochat's own, so that nanochat reads it
    by itself."""
    stock = (None, config["n_embd"] / config["n_head"])
    widths_are_stock = config.get("head_dim") in stock and config.get("v_head_dim") in stock
    if widths_are_stock and config.get("logit_scale") is None:
        return {name: value for name, value in config.items() if name not in ADDED}
    return dict(config)


def with_heads(base: Shape, heads: Mapping[str, Any]) -> Shape:
    """A shape with other heads. What is not given stays, but ranks follow the number of heads as in
    `Shape`."""
    fields: dict[str, Any] = {
        "dim": base.dim,
        "depth": base.depth,
        "num_heads": base.num_heads,
        "head_dim": None if "num_heads" in heads else base.head_dim,
        "num_kv_heads": None if base.num_kv_heads == base.num_heads else base.num_kv_heads,
        "qk_norm": "free",
        **heads,
    }
    shape = Shape.of(fields)
    return shape.replace(qk_rope_head_dim=shape.head_dim)


def heads_of(shape: Shape) -> dict[str, Any]:
    """The part of a shape that the hook takes; what nanochat cannot have is refused."""
    if special := beyond_plain(shape):
        raise UsageError(f"nanochat's layers are equal and plain, this shape has {special}")
    fixed = {
        "kv_lora_rank": 0,
        "average": 1,
        "qkv_bias": False,
        "out_bias": False,
        "ffn_bias": False,
        "ffn_dim": 4 * shape.dim,
    }
    for name, value in fixed.items():
        if getattr(shape, name) != value:
            raise UsageError(
                f"{name} of a nanochat model must be {value}, got {getattr(shape, name)}"
            )
    return {name: getattr(shape, name) for name in HEADS if getattr(shape, name) is not None}
