"""What is before and after the blocks of an ensemble of narrow models on a GPU, one pass over the
tokens in each direction: vectors read in with added positions, layer norms, and the last of them
with a read-out to one number. PyTorch takes a block of threads for a row of 48 numbers, sums over
all tokens of a model in one block, and has passes of their own for gains, shifts and positions.

The plain twins are the modules without these: `attention.Norm`, and `enter` and `leave` of
`models`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise.kernels import has_triton

EPS = 1e-6  # of the norm
MOST = 128  # numbers of a row
TILE = 64  # rows of a program
INPUTS, WIDTH, TOKENS = 64, 64, 128  # the largest of what is read in
SPLITS = 32  # programs over which the gradient of what is read in is summed


def possible(x: Tensor) -> bool:
    """Whether these kernels are for such a tensor."""
    return (
        x.is_cuda
        and x.dtype == torch.float32
        and not torch.is_autocast_enabled("cuda")
        and has_triton()
    )


def layer_norm(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """(x - mean)/std g + s over the last axis of x (models, ..., D); gain and shift (models, D)."""
    out: Tensor = _Norm.apply(x, gain, shift)  # type: ignore[assignment]
    return out


def enter(x: Tensor, weight: Tensor, bias: Tensor, table: Tensor) -> Tensor:
    """x W^T + b + table for x (models, batch, tokens, inputs), which has no gradient; table
    (models, tokens or more, D)."""
    out: Tensor = _Enter.apply(x, weight, bias, table)  # type: ignore[assignment]
    return out


def leave(x: Tensor, gain: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """n(x).w + b for x (models, ..., D), with a last axis of one; weight (models, 1, D), bias
    (models, 1)."""
    out: Tensor = _Leave.apply(x, gain, shift, weight, bias)  # type: ignore[assignment]
    return out


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _grid(x: Tensor) -> tuple[int, tuple[int, int], dict[str, int]]:
    """Rows of a model, programs, and the kernels' sizes."""
    models, D = x.shape[0], x.shape[-1]
    rows = x.numel() // (models * D)
    return rows, (-(-rows // TILE), models), {"D": D, "BD": _padded(D), "BT": TILE}


def _rows(*params: Tensor) -> list[Tensor | int]:
    """Parameters and the steps from one model's to the next, without copies of those that lie in
    flat rows."""
    whole = [p if p[0].is_contiguous() else p.contiguous() for p in params]
    return [item for p in whole for item in (p, p.stride(0))]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        """One kernel for norm, gain and shift; the input is kept."""
        from headwise.kernels import embed_readout_triton

        x = x.contiguous()
        y, (rows, grid, sizes) = torch.empty_like(x), _grid(x)
        embed_readout_triton.norm[grid](x, *_rows(gain, shift), y, rows, **sizes)
        ctx.save_for_backward(x, gain)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """dx, and the gradients of gain and shift from one set of sums per program."""
        from headwise.kernels import embed_readout_triton

        x, gain = ctx.saved_tensors
        dx, (rows, grid, sizes) = torch.empty_like(x), _grid(x)
        # Two sums of BD numbers for each program: of dy hat and of dy.
        tile_sums = x.new_empty(grid[1], grid[0], 2, sizes["BD"])
        embed_readout_triton.norm_back[grid](
            x, *_rows(gain), grad.contiguous(), dx, tile_sums, rows, **sizes
        )
        sums = tile_sums.sum(1)[..., : sizes["D"]]
        return dx, sums[:, 0], sums[:, 1]


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        """The norm and the read-out in one pass; n(x) is not written."""
        from headwise.kernels import embed_readout_triton

        x = x.contiguous()
        y, (rows, grid, sizes) = x.new_empty(*x.shape[:-1], 1), _grid(x)
        embed_readout_triton.leave[grid](x, *_rows(gain, shift, weight, bias), y, rows, **sizes)
        ctx.save_for_backward(x, gain, shift, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """dx, and the gradients of gain, shift, weight and bias from one set of sums per
        program."""
        from headwise.kernels import embed_readout_triton

        x, gain = ctx.saved_tensors[:2]
        shift, weight = ctx.saved_tensors[2:]
        dx, (rows, grid, sizes) = torch.empty_like(x), _grid(x)
        # Four sums of BD numbers for each program, in the order of the parameters; the bias has one
        # number, so its sum stands in every place.
        tile_sums = x.new_empty(grid[1], grid[0], 4, sizes["BD"])
        embed_readout_triton.leave_back[grid](
            x, *_rows(gain, shift, weight), grad.contiguous(), dx, tile_sums, rows, **sizes
        )
        sums = tile_sums.sum(1)[..., : sizes["D"]]
        return dx, sums[:, 0], sums[:, 1], sums[:, 2:3], sums[:, 3, :1]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, table: Tensor) -> Tensor:
        """One product of K inputs, with bias and positions added in the same pass."""
        from headwise.kernels import embed_readout_triton

        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], weight.shape[1])
        rows, grid, sizes = _grid(y)
        K = x.shape[-1]
        embed_readout_triton.enter[grid](
            x,
            *_rows(weight, bias, table),
            y,
            rows,
            x.shape[-2],
            **sizes,
            K=K,
            BK=_padded(K),
            num_warps=8,
        )
        ctx.save_for_backward(x)
        ctx.positions = table.shape[1]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Gradients of weight, bias and positions; the input has none."""
        from headwise.kernels import embed_readout_triton

        (x,) = ctx.saved_tensors
        (M, batch, N, K), D = x.shape, grad.shape[-1]
        # Each split sums over its sequences: for every position (N, D), and for the weight (D, K).
        splits = min(SPLITS, batch)
        tile_sums = x.new_empty(M, splits, D * (N + K))
        embed_readout_triton.enter_back[(splits, M)](
            x,
            grad.contiguous(),
            tile_sums,
            batch,
            N,
            D=D,
            BD=_padded(D),
            BN=_padded(N),
            K=K,
            BK=_padded(K),
            num_warps=8,
            num_stages=1,
        )
        table, weight = tile_sums.sum(1).split((N * D, D * K), 1)
        # The bias is added at every place, so its gradient is the places' sum. Positions beyond N
        # had no part in it.
        table = table.view(M, N, D)
        bias = table.sum(1)
        if ctx.positions > N:
            table = torch.nn.functional.pad(table, (0, 0, 0, ctx.positions - N))
        return None, weight.view(M, D, K), bias, table
