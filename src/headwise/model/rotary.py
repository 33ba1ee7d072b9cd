"""Rotary positions: pairs of a head's coordinates turn by an angle that grows with the position.

Which coordinates turn is `Shape.rope_at`, how they pair is `Shape.rope_interleaved`:

    halves      coordinate i turns with coordinate i + width / 2 (Llama, NeoX)
    interleaved neighbours 2 i and 2 i + 1 turn together (GPT-J, Cohere, GLM)
"""

from __future__ import annotations

import torch
from torch import Tensor

Rotary = tuple[Tensor, Tensor]  # cosines and sines, each (tokens, width / 2)


def rotary_table(tokens: int, width: int, theta: float, like: Tensor, start: int = 0) -> Rotary:
    """Cosines and sines of the angles p theta^(-2i/width), positions p from `start` on.

    Never below float32: half precision cannot tell large positions apart.
    """
    # One rate per pair of coordinates, fastest first; one angle per position and pair.
    exact = torch.promote_types(like.dtype, torch.float32)
    positions = torch.arange(start, start + tokens, device=like.device, dtype=exact)
    rates = theta ** (-torch.arange(0, width, 2, device=like.device, dtype=exact) / width)
    angles = torch.outer(positions, rates)
    return angles.cos(), angles.sin()


def rotary_at(positions: Tensor, width: int, theta: float, like: Tensor) -> Rotary:
    """The table of tokens that stand at `positions` (batch, tokens), with an axis for the heads:
    each (batch, 1, tokens, width / 2)."""
    exact = torch.promote_types(like.dtype, torch.float32)
    rates = theta ** (-torch.arange(0, width, 2, device=like.device, dtype=exact) / width)
    angles = positions.to(exact).unsqueeze(-2).unsqueeze(-1) * rates
    return angles.cos(), angles.sin()


def rotate(
    x: Tensor,
    width: int,
    theta: float,
    start: int = 0,
    table: Rotary | None = None,
    *,
    at: str = "last",
    interleaved: bool = False,
    back: bool = False,
) -> Tensor:
    """Rotary positions on the last `width` coordinates of x (..., tokens, rank), or the first:
    coordinate i turns with coordinate i + width / 2, or neighbours with each other; `back` the
    other way.

    `table` is `rotary_table(...)` of the same tokens, where the caller has it.
    """
    if not width:
        return x
    # The other coordinates pass by; these turn in pairs (a_i, b_i).
    table = table or rotary_table(x.shape[-2], width, theta, x, start)
    cos, sin = (t.to(x.dtype) for t in table)
    half, others = width // 2, x.shape[-1] - width
    if interleaved:
        sizes = (width, others) if at == "first" else (others, width)
        parts = x.split(sizes, -1)
        pairs, rest = parts if at == "first" else parts[::-1]
        a, b = pairs.unflatten(-1, (half, 2)).unbind(-1)
    elif at == "first":
        a, b, rest = x.split((half, half, others), -1)
    else:
        rest, a, b = x.split((others, half, half), -1)
    if back:
        turned = a * cos + b * sin, b * cos - a * sin
    else:
        turned = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        turned = (torch.stack(turned, -1).flatten(-2),)
    return torch.cat((*turned, rest) if at == "first" else (rest, *turned), -1)
