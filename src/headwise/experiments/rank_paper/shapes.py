"""The rank paper's encoder as a shape, and its budgets as the paper writes them."""

from __future__ import annotations

import math

from headwise.errors import UsageError
from headwise.shape import WIDENING, Shape


def paper_shape(
    dim: int = 64,
    depth: int = 1,
    rank: int = 64,
    width: int = 1,
    ffn_dim: int = 2048,
    positions: str = "none",
    points: int = 16,
    position_dim: int = 64,
) -> Shape:
    """The rank paper's encoder: `width` modules of dim/rank heads, averaged.

    With concatenated positions or room the model is `position_dim` wider than the points.
    """
    # Heads cut the model's width, which concatenated positions make larger.
    wide = dim + (position_dim if positions in WIDENING else 0)
    for name, value, least in (("dim", dim, 2), ("width", width, 1)):
        if value < least:
            raise UsageError(f"{name} must be a whole number of at least {least}, got {value}")
    if rank < 1 or wide % rank:
        raise UsageError(f"rank must divide the width {wide}, got rank {rank}")
    return Shape(
        dim=wide,
        depth=depth,
        num_heads=width * (wide // rank),
        head_dim=rank,
        average=width,
        ffn_dim=ffn_dim,
        activation="relu",
        norm="scalar",
        norm_at="post",
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        positions=positions,
        num_positions=0 if positions in ("none", "room") else points,
        position_dim=wide - dim,
    )


def budget(width: int, dim: int) -> str:
    """A width as the paper writes it: the power of d that is the number of query/key parameters per
    layer.

    >>> budget(1, 64), budget(8, 64), budget(3, 64)
    ('d^2', 'd^2.5', '3 d^2')
    """
    # width d^2 parameters are d^(2 + log_d width). Only halves of a power are written as such.
    power = 2 + math.log(width) / math.log(dim)
    return f"d^{power:g}" if abs(power * 2 - round(power * 2)) < 1e-9 else f"{width} d^2"
