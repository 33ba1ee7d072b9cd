"""The feed-forward of a post-norm layer of width 64 as two kernels in CUDA C++
(encoder_mlp_cuda.cu): forward, and backward with the weights' gradients.

The plain twin is encoder_mlp_triton.py. They are compiled where they run, so they are tried on a
small layer before they are trusted (`proven`).

How the work is cut, in words that encoder.py defines:

forward   A program has 256 tokens, all hidden units and the norm behind them; nothing is summed by
          anybody else.
backward  A program has a column tile of 128 hidden units and one of `token_splits` runs of token
          tiles. The tile's weights stay in registers, the sums of their gradients too. Its partial
          sum of the input's gradient is added to its neighbour's in a cluster of two, and the
          clusters' sums are added where the gradient passes the norm below (encoder_norm_triton).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.kernels import nvrtc
from headwise.kernels.encoder import End, Gradients, MlpWeights, from_lane_order

SOURCES = ("warp.cuh", "encoder.cuh", "encoder_mlp_cuda.cu")  # compiled as one
WIDTH = 64  # of the model
FORWARD_TOKENS = 256  # of a program forward
TOKEN_TILE = 128
COLUMN_TILE = 128  # hidden units
CLUSTER = 2
ROW = 2 * WIDTH  # bytes of a row in shared memory
# four column tiles of both weights and their biases, the tokens
FORWARD_BYTES = 4 * (2 * COLUMN_TILE * ROW + 4 * COLUMN_TILE) + FORWARD_TOKENS * ROW
# four tiles of x and dz, slopes of two tiles and a tile of weights; ones; what a cluster exchanges
BACKWARD_BYTES = (4 * 2 * TOKEN_TILE + 5 * COLUMN_TILE) * ROW + 1024 + 2 * 64 * ROW + 32
FORWARD_WARPS, BACKWARD_WARPS = 16, 12
REGISTERS = 168  # of a thread backward, before four warps give some to the other eight
ENOUGH = 96  # column tiles of all models, so that they fill a GPU


class Layer(NamedTuple):
    """One layer's feed-forward, without its tensors."""

    models: int
    tokens: int  # of all sequences of a model
    hidden: int
    row: int  # numbers from one model's weights to the next one's


def refusal(dim: int, tokens: int, hidden: int, dtype: torch.dtype) -> str:
    """What these kernels need that such models have not (`tokens` in a batch); empty when they take
    them."""
    if (
        dim != WIDTH
        or hidden % (CLUSTER * COLUMN_TILE)
        or tokens % FORWARD_TOKENS
        or dtype != torch.float16
    ):
        return (
            f"needs fp16, dim {WIDTH}, ffn_dim in {CLUSTER * COLUMN_TILE}s and batch x tokens in "
            f"{FORWARD_TOKENS}s, this shape has {dtype}, dim {dim}, ffn_dim {hidden} and {tokens}"
        )
    return ""


def fills(models: int, hidden: int) -> bool:
    """Whether so many models have enough column tiles for a GPU."""
    return models * hidden >= ENOUGH * COLUMN_TILE


def dx_partials(hidden: int) -> int:
    """Partial sums in which the input's gradient comes: one per cluster."""
    return hidden // COLUMN_TILE // CLUSTER


# ---- the kernels


def forward(layer: Layer, x: Tensor, weights: MlpWeights, end: End) -> None:
    """The feed-forward of one layer."""
    arguments = (x, *weights, *end, layer.tokens, layer.hidden, layer.row)
    programs = layer.tokens // FORWARD_TOKENS
    _run("feed", programs, layer.models, FORWARD_WARPS, FORWARD_BYTES, 1, *arguments)


def backward(
    layer: Layer, x: Tensor, dz: Tensor, weights: MlpWeights, gradients: Gradients
) -> None:
    """Its gradients from dz, the gradient of what is normed."""
    splits = gradients.token_splits
    assert layer.tokens % (2 * TOKEN_TILE * splits) == 0, "tiles are taken two at a time"
    arguments = (
        *(x, dz, *weights, gradients.dx_partials, *gradients.weights, gradients.total),
        *(layer.tokens, layer.hidden, layer.row, gradients.unscale),
        *(layer.models, splits, gradients.row),
    )
    programs = layer.hidden // COLUMN_TILE * splits
    _run("feed_back", programs, layer.models, BACKWARD_WARPS, BACKWARD_BYTES, CLUSTER, *arguments)


def _run(
    name: str, programs: int, models: int, warps: int, shared: int, cluster: int, *arguments: Any
) -> None:
    device = torch.cuda.current_device()
    assert arguments[0].device.index == device
    _module(device).launch(name, (programs, models), 32 * warps, shared, arguments, cluster)


@functools.cache
def _module(device: int) -> nvrtc.Module:
    made = nvrtc.Module(nvrtc.compiled(SOURCES, "sm_90a", {}))
    found = made.registers("feed_back", BACKWARD_BYTES)
    if found < REGISTERS:  # its warps would wait for registers that are not there
        raise RuntimeError(f"feed_back needs {REGISTERS} registers per thread, it has {found}")
    return made


# ---- the trial


def proven(device: torch.device) -> bool:
    """Whether the kernels, compiled here, compute a small layer and its gradients as PyTorch
    does."""
    return _proven(nvrtc.numbered(device))


@functools.cache
def _proven(device: torch.device) -> bool:
    return nvrtc.proven("feed-forward of width 64", lambda: trial(device), device)


def trial(device: torch.device) -> float:
    """The largest relative error of a small layer's outputs and gradients against float64: of more
    tiles than lie in shared memory at once."""
    # Two models; more column tiles and token tiles than shared memory holds at once.
    M, T = 2, 6 * FORWARD_TOKENS
    F, D = 6 * COLUMN_TILE, WIDTH
    splits, unscale = 2, 0.25
    draw = torch.Generator().manual_seed(1)

    def drawn(*size: int, spread: float = 1.0) -> Tensor:
        return (torch.randn(M, *size, generator=draw) * spread).to(device)

    x, dz, u0 = drawn(T, D).half(), drawn(T, D).half(), drawn(T, D)
    up, up_bias = drawn(F, D, spread=0.1).half(), drawn(F)
    down, bias = drawn(D, F, spread=0.1).half(), drawn(D)
    scales = drawn(16).abs() + 0.5  # of the part before and of this one first

    # One flat row per model, as ensembles have them. Every parameter is then a view that starts in
    # the first model's row.
    parameters = (up.float(), up_bias, down.float(), bias, scales)
    row = torch.cat([p.flatten(1) for p in parameters], 1).contiguous()
    sizes = [p[0].numel() for p in parameters]
    at_up_bias, at_down = sizes[0], sizes[0] + sizes[1]
    at_bias = at_down + sizes[2]
    at_scales = at_bias + sizes[3]
    exact, half = row.view(-1), row.half().view(-1)
    weights = MlpWeights(half, exact[at_up_bias:], half[at_down:])
    u, y = torch.empty_like(u0), torch.empty_like(x)
    inv = torch.empty(M, T, device=device)
    scale0, scale = exact[at_scales:], exact[at_scales + 1 :]
    layer = Layer(M, T, F, row.shape[1])
    forward(layer, x, weights, End(exact[at_bias:], scale0, u0, scale, u, y, inv))

    # Backward into partial sums: dx per cluster, weights per token split.
    dx_sums = torch.empty(M, dx_partials(F), T, D, dtype=torch.float16, device=device)
    sums, total = torch.empty(splits, M, at_bias, device=device), torch.zeros(M, device=device)
    flat = sums.view(-1)
    grads = MlpWeights(flat, flat[at_up_bias:], flat[at_down:])
    backward(layer, x, dz, weights, Gradients(dx_sums, grads, total, splits, at_bias, unscale))

    # The same in float64, written out.
    hidden = x.double() @ up.double().mT + up_bias.double()[:, None]
    active, slope = hidden.clamp_min(0), (dz.double() @ down.double()) * (hidden > 0)
    z = active @ down.double().mT + bias[:, None] + scales[:, :1, None] * u0
    over = 1 / z.norm(dim=-1)
    d_weights = (slope.mT @ x.double(), slope.sum(1), dz.double().mT @ active)
    pairs = [
        (u, z * over[..., None]),
        (y, scales[:, 1:2, None] * z * over[..., None]),
        (inv, over),
        (from_lane_order(dx_sums.double().sum(1)), slope @ up.double()),
    ]
    for ours, theirs in zip(sums.sum(0).double().split(sizes[:3], 1), d_weights, strict=True):
        pairs.append((ours, theirs.flatten(1) * unscale))
    return nvrtc.worst(pairs) if total.isfinite().all() else math.nan
