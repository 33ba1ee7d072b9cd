"""From the heads' outputs to the layer's: gates, and values that turn back."""

from __future__ import annotations

from torch import Tensor

from headwise.model.rotary import Rotary, rotate
from headwise.shape import Shape


def gated(heads: Tensor, gate: Tensor) -> Tensor:
    """The heads' outputs (..., H V) times the sigmoid of a gate per head or per value."""
    if gate.shape[-1] == heads.shape[-1]:
        return heads * gate.sigmoid()
    by_head = heads.unflatten(-1, (gate.shape[-1], -1)) * gate.sigmoid().unsqueeze(-1)
    return by_head.flatten(-2)


def turned_back(heads: Tensor, s: Shape, start: int, rotary: Rotary | None) -> Tensor:
    """Outputs of heads whose values are rotated keys, turned back by the query's position.

    A value that was turned by its position p, seen from position t, is then turned by p - t: like
    the scores, it depends on distances only (DeepSeek-V4).
    """
    by_head = heads.unflatten(-1, (-1, s.v_head_dim)).transpose(-3, -2)
    y = rotate(
        by_head, s.qk_rope_head_dim, s.rope_theta, start, rotary,
        at=s.rope_at, interleaved=s.rope_interleaved, back=True,
    )  # fmt: skip
    return y.transpose(-3, -2).flatten(-2)
