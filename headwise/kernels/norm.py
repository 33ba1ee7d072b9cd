"""The layer norm of stacked narrow models on a GPU, one pass over the rows in each direction: PyTorch's takes a block of threads a row
of 48 numbers, and gains of several models are passes of their own. The plain twin is `attention.Norm` without it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

EPS, MOST, TILE = 1e-6, 128, 64  # of the norm; numbers of a row; rows a program


def layer_norm(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """(x - mean)/std g + s over the last axis of x (models, ..., D); gain and shift (models, D)."""
    out: Tensor = _Norm.apply(x, gain, shift)  # type: ignore[assignment]
    return out


def _grid(x: Tensor) -> tuple[int, tuple[int, int], dict[str, int]]:
    """Rows of a model, programs, and the kernels' sizes."""
    models, D = x.shape[0], x.shape[-1]
    rows = x.numel() // (models * D)
    return rows, (-(-rows // TILE), models), {"D": D, "BD": max(16, 1 << (D - 1).bit_length()), "BT": TILE}


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        from headwise.kernels import pre

        x = x.contiguous()
        y, (rows, grid, sizes) = torch.empty_like(x), _grid(x)
        pre.norm[grid](x, gain.contiguous(), shift.contiguous(), y, rows, **sizes)
        ctx.save_for_backward(x, gain)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        from headwise.kernels import pre

        x, gain = ctx.saved_tensors
        dx, (rows, grid, sizes) = torch.empty_like(x), _grid(x)
        parts = torch.empty(grid[1], grid[0], 2, sizes["BD"], device=x.device)
        pre.norm_back[grid](x, gain.contiguous(), grad.contiguous(), dx, parts, rows, **sizes)
        sums = parts.sum(1)[..., : sizes["D"]]
        return dx, sums[:, 0], sums[:, 1]
