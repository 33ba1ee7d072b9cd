"""y = s x/||x|| with its gradient written out: half the passes of the composed form. The plain twin
is `plain_unit`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def plain_unit(x: Tensor, scale: Tensor) -> Tensor:
    """The formula itself."""
    return scale * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def unit(x: Tensor, scale: Tensor) -> Tensor:
    """s x/||x|| over the last axis; `scale` has x's axes, all of length 1 but a leading model
    axis."""
    out: Tensor = _Unit.apply(x, scale)  # type: ignore[assignment]
    return out


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).reciprocal_()
        direction = x * inverse
        ctx.save_for_backward(direction, inverse, scale)
        return direction * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        direction, inverse, scale = ctx.saved_tensors
        along = (grad * direction).sum(-1, keepdim=True)
        d_x = torch.addcmul(grad, direction, along, value=-1).mul_(inverse * scale)
        lead = scale.shape[0] if scale.shape[0] != 1 or scale.ndim == 1 else 1
        d_scale = along.reshape(lead, -1).sum(-1).view(scale.shape)
        return d_x, d_scale
