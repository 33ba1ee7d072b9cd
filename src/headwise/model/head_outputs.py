"""From the heads' outputs to the layer's: gates, and the projection by groups of heads.

Axes: M models, T tokens of all sequences, G groups, I inputs of a group, O its outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.model.layers import Linear, Rotary, rotate
from headwise.shape import Shape


class GroupedLinear(Linear):
    """y_g = W_g x_g for each of `groups` equal cuts of x, side by side (DeepSeek-V4's output).

    Parameters have the layout of DeepSeek-V4's: W_g are rows of one weight (G O, I).

    >>> GroupedLinear(12, 5, groups=3)(torch.zeros(2, 7, 12)).shape
    torch.Size([2, 7, 15])
    """

    def __init__(self, inputs: int, outputs: int, groups: int, models: int | None = None) -> None:
        super().__init__(inputs // groups, groups * outputs, False, models)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """All W_g x_g, (..., G O)."""
        x_MTGI = x.flatten(1, -2) if self.weight.ndim == 3 else x.reshape(1, -1, x.shape[-1])
        x_MTGI = x_MTGI.unflatten(-1, (self.groups, -1))
        M, T, G, _ = x_MTGI.shape
        # One batched product over models and groups; without models the groups are a view.
        x_BTI = x_MTGI.transpose(1, 2).reshape(M * G, T, -1)
        w_BOI = self.weight.reshape(M * G, -1, self.weight.shape[-1])
        y_BTO = torch.bmm(x_BTI, w_BOI.mT)
        y_MTGO = y_BTO.view(M, G, T, -1).transpose(1, 2)
        return y_MTGO.reshape(*x.shape[:-1], -1)


def gated(heads: Tensor, gate: Tensor, num_heads: int) -> Tensor:
    """The heads' outputs (..., H V) times the sigmoid of a gate per head or per value."""
    if gate.shape[-1] == heads.shape[-1]:
        return heads * gate.sigmoid()
    by_head = heads.unflatten(-1, (num_heads, -1)) * gate.sigmoid().unsqueeze(-1)
    return by_head.flatten(-2)


def turned_back(heads: Tensor, s: Shape, start: int, rotary: Rotary | None) -> Tensor:
    """Outputs of heads whose values are rotated keys, turned back by the query's position.

    A value that was turned by its position p, seen from position t, is then turned by p - t: like
    the scores, it depends on distances only (DeepSeek-V4).
    """
    by_head = heads.unflatten(-1, (s.num_heads, -1)).transpose(-3, -2)
    width, theta = s.qk_rope_head_dim, s.rope_theta
    y = rotate(by_head, width, theta, start, rotary, at=s.rope_at, back=True)
    return y.transpose(-3, -2).flatten(-2)
