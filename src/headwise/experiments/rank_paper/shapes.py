"""The rank paper's encoder as a shape."""

from __future__ import annotations

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
