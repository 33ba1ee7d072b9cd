"""The attention part of a post-norm layer as two kernels in CUDA C++ (encoder_attention_cuda*.cu):
forward, and backward with the weights' gradients.

Every rank from 1 to 64 has the same traffic: neither projections nor scores go through memory. The
plain twin is encoder_attention_triton.py. They are compiled where they run, by whatever compiler is
there, so each rank is tried on a small layer before it is trusted (`proven`).

How the work is cut, in words that encoder.py defines:

forward   A program has a token tile of 128 tokens, eight sequences, and goes through its column
          tiles of 64 columns of heads x rank. Few models do not fill a card with token tiles alone;
          then the columns are split over several programs, each of which leaves a partial sum of
          the output (`column_splits`), and encoder_norm_triton.sum_outputs adds them and takes the
          norm. With one split the kernel does both itself.
backward  A program has one column tile and one of `token_splits` runs of token tiles. It holds the
          tile's weights and the sums of their gradients on the chip, and writes its partial sum of
          the input's gradient; two neighbours in a cluster add theirs before (`dx_partials`).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.kernels import nvrtc
from headwise.kernels.encoder import AttentionWeights, End, Gradients, from_lane_order

SOURCES = (  # in the order in which they are compiled as one
    "warp.cuh",
    "encoder.cuh",
    "encoder_attention_cuda.cuh",
    "encoder_attention_cuda_forward.cu",
    "encoder_attention_cuda_backward.cu",
)
RANKS = (1, 2, 4, 8, 16, 32, 64)
TOKENS = 16  # of a sequence
WIDTH = 64  # of the model
TOKEN_TILE = 128
COLUMN_TILE = 64
ROW = 2 * WIDTH  # bytes of a row in shared memory
WEIGHT_BYTES = 4 * COLUMN_TILE * ROW + 1024  # a column tile's, with its biases
FORWARD_BYTES = 2 * WEIGHT_BYTES + TOKEN_TILE * ROW  # two tiles' weights, a tile of x
# one tile's weights; two tiles of x and dz, one of dq, dk, dv and o; ones; what a cluster exchanges
BACKWARD_BYTES = WEIGHT_BYTES + 8 * TOKEN_TILE * ROW + 1024 + 2 * 64 * ROW + 32
FORWARD_WARPS = 8
WARPS = {1: 16, 2: 16, 4: 16, 8: 16, 16: 16, 32: 8, 64: 8}  # backward, by rank
FILLED = 264  # programs at once: two on each of an H200's 132 multiprocessors


class Layer(NamedTuple):
    """One layer's attention part, without its tensors."""

    models: int
    tokens: int  # of all sequences of a model
    columns: int  # heads x rank
    rank: int
    row: int  # numbers from one model's weights to the next one's
    scale: float  # of scores
    average: int  # modules whose mean the part is; it has as many biases


def refusal(
    dim: int, tokens: int, all_tokens: int, columns: int, rank: int, dtype: torch.dtype
) -> str:
    """What these kernels need that such models have not (sequences of `tokens`, `all_tokens` in a
    batch); empty when they take them."""
    if (dim, tokens) != (WIDTH, TOKENS) or rank not in RANKS:
        return (
            f"needs dim {WIDTH}, {TOKENS} tokens and a rank of {', '.join(map(str, RANKS))}, this "
            f"shape has dim {dim}, {tokens} tokens and rank {rank}"
        )
    if all_tokens % TOKEN_TILE or columns % COLUMN_TILE or dtype != torch.float16:
        return (
            f"needs fp16, batch x tokens in {TOKEN_TILE}s and heads x rank in {COLUMN_TILE}s, this "
            f"shape has {dtype}, {all_tokens} and {columns}"
        )
    return ""


def column_splits(models: int, tokens: int, columns: int) -> int:
    """Over how many programs the columns of a token tile are split forward: as few as fill a
    GPU."""
    tiles = columns // COLUMN_TILE
    for splits in (1, 2, 4, 8, 16):
        if tiles % splits == 0 and models * (tokens // TOKEN_TILE) * splits >= FILLED:
            return splits
    return math.gcd(tiles, 16)


def cluster_size(columns: int) -> int:
    """How many programs backward add up their partial sums of the input's gradient: a cluster of
    two, or each on its own where the number of column tiles is odd."""
    return 1 if columns // COLUMN_TILE % 2 else 2


def dx_partials(columns: int) -> int:
    """Partial sums in which the input's gradient comes: one per cluster."""
    return columns // COLUMN_TILE // cluster_size(columns)


def token_splits(models: int, tokens: int, columns: int) -> int:
    """Over how many programs the tokens of a column tile are split backward: as few as fill a GPU,
    since each brings the weights again and leaves partial sums of their gradients."""
    tiles = tokens // TOKEN_TILE
    divisors = [n for n in range(1, tiles + 1) if tiles % n == 0]
    for splits in divisors:
        if models * (columns // COLUMN_TILE) * splits >= FILLED:
            return splits
    return divisors[-1]


# ---- the kernels


def forward(
    layer: Layer,
    x: Tensor,
    weights: AttentionWeights,
    end: End,
    partials: Tensor,
    splits: int,
    *,
    first: bool,
) -> None:
    """The attention part of one layer; `first`: of the network, so its input has no scale.

    With more than one column split the output goes to `partials` (models, splits, T, D), and of
    `end` nothing is written.
    """
    # The order is that of the kernel's parameters: tensors, sizes, factors, flags.
    arguments = (
        *(x, *weights, *end),
        *(layer.tokens, layer.columns, layer.row, 1 / layer.average, layer.scale, layer.average),
        *(first, partials, splits),
    )
    programs = layer.tokens // TOKEN_TILE * splits
    _run("forward", layer.rank, programs, layer.models, FORWARD_WARPS, FORWARD_BYTES, 1, *arguments)


def backward(
    layer: Layer,
    x: Tensor,
    dz: Tensor,
    weights: AttentionWeights,
    gradients: Gradients,
    *,
    first: bool,
) -> None:
    """Its gradients from dz, the gradient of what is normed; `first`: nobody needs the input's."""
    splits = gradients.token_splits
    arguments = (
        *(x, dz, *weights, gradients.dx_partials, *gradients.weights, gradients.total),
        *(layer.tokens, layer.columns, layer.row, 1 / layer.average, layer.scale),
        *(gradients.unscale, first, layer.models, splits, gradients.row),
    )
    programs = layer.columns // COLUMN_TILE * splits
    warps, cluster = WARPS[layer.rank], cluster_size(layer.columns)
    _run("backward", layer.rank, programs, layer.models, warps, BACKWARD_BYTES, cluster, *arguments)


def _run(
    name: str,
    rank: int,
    programs: int,
    models: int,
    warps: int,
    shared: int,
    cluster: int,
    *arguments: Any,
) -> None:
    device = torch.cuda.current_device()
    assert arguments[0].device.index == device
    _module(rank, device).launch(name, (programs, models), 32 * warps, shared, arguments, cluster)


@functools.cache
def _module(rank: int, device: int) -> nvrtc.Module:
    return nvrtc.Module(nvrtc.compiled(SOURCES, "sm_90a", {"R": rank, "WARPS": WARPS[rank]}))


# ---- the trial


def proven(rank: int, device: torch.device) -> bool:
    """Whether the kernels of a rank, compiled here, compute a small layer and its gradients as
    PyTorch does."""
    return _proven(rank, nvrtc.numbered(device))


@functools.cache
def _proven(rank: int, device: torch.device) -> bool:
    return nvrtc.proven(f"attention of rank {rank}", lambda: trial(rank, device), device)


def trial(rank: int, device: torch.device) -> float:
    """The largest relative error of a small layer's outputs and gradients against float64, of
    programs in clusters of two and of single ones."""
    columns = (2 * COLUMN_TILE, 3 * COLUMN_TILE)
    return torch.tensor([_error(rank, device, c) for c in columns]).max().item()  # NaN if one is


def _error(rank: int, device: torch.device, C: int) -> float:
    """The same for C columns; of several token tiles, so that every buffer is used again."""
    # Two models and six token tiles.
    M, T, D = 2, 6 * TOKEN_TILE, WIDTH
    average, splits, unscale = 2, 2, 0.25
    draw = torch.Generator().manual_seed(rank)

    def drawn(*size: int, spread: float = 1.0) -> Tensor:
        return (torch.randn(M, *size, generator=draw) * spread).to(device)

    # The layer's parts as encoder.py names them.
    x, dz, u0 = drawn(T, D, spread=0.5).half(), drawn(T, D).half(), drawn(T, D)
    qkv, out = drawn(3 * C, D, spread=0.3).half(), drawn(D, C, spread=0.1).half()
    qkv_bias, bias = drawn(3 * C), drawn(average, D)
    scales = drawn(16).abs() + 0.5  # of the layer before and of this one first

    # one row per model, as ensembles have them: every parameter starts at a multiple of 16 numbers
    parameters = (qkv.float(), qkv_bias, out.float(), bias, scales)
    row = torch.cat([p.flatten(1) for p in parameters], 1).contiguous()
    sizes = [p[0].numel() for p in parameters]
    at_qkv_bias, at_out = sizes[0], sizes[0] + sizes[1]
    at_bias = at_out + sizes[2]
    at_scales = at_bias + sizes[3]
    # Matrices come from the half copy of the rows, everything else from the float32 one.
    exact, half = row.view(-1), row.half().view(-1)
    weights = AttentionWeights(half, exact[at_qkv_bias:], half[at_out:])
    u, y = torch.empty_like(u0), torch.empty_like(x)
    inv = torch.empty(M, T, device=device)
    scale0, scale = exact[at_scales:], exact[at_scales + 1 :]
    end = End(exact[at_bias:], scale0, u0, scale, u, y, inv)
    layer = Layer(M, T, C, rank, row.shape[1], scale=0.6, average=average)

    # Once with the columns split, which fills `partials`, and once whole, which writes u, y and
    # inv.
    tiles = C // COLUMN_TILE
    partials = torch.empty(M, tiles, T, D, device=device)
    for n in (tiles, 1):
        forward(layer, x, weights, end, partials, n, first=False)
    # Backward into partial sums: dx per cluster, weights per token split.
    dx_sums = torch.empty(M, dx_partials(C), T, D, dtype=torch.float16, device=device)
    sums, total = torch.empty(splits, M, at_bias, device=device), torch.zeros(M, device=device)
    flat = sums.view(-1)
    grads = AttentionWeights(flat, flat[at_qkv_bias:], flat[at_out:])
    gradients = Gradients(dx_sums, grads, total, splits, at_bias, unscale)
    backward(layer, x, dz, weights, gradients, first=False)

    # The same in float64, by autograd: scores (M, sequences, heads, N, N).
    wanted = [t.double().requires_grad_() for t in (x, qkv, qkv_bias, out)]
    with torch.enable_grad():
        projected = wanted[0] @ wanted[1].mT + wanted[2][:, None]
        q, k, v = (
            t.view(M, -1, TOKENS, C // rank, rank).transpose(2, 3) for t in projected.split(C, -1)
        )
        mixed = torch.softmax(q @ k.mT * layer.scale, -1) @ v
        heads = mixed.transpose(2, 3).reshape(M, T, C)
        added = heads @ wanted[3].mT / average
        d_x, *d_weights = torch.autograd.grad(added, wanted, dz.double())
    # What the norm sees, and what the kernels must have written of it.
    z = added.detach() + scales[:, :1, None] * u0 + bias.mean(1)[:, None]
    over = 1 / z.norm(dim=-1)
    pairs = [
        (partials.sum(1) / average, added.detach()),
        (u, z * over[..., None]),
        (y, scales[:, 1:2, None] * z * over[..., None]),
        (inv, over),
        (from_lane_order(dx_sums.double().sum(1)), d_x),
    ]
    for ours, theirs in zip(sums.sum(0).double().split(sizes[:3], 1), d_weights, strict=True):
        pairs.append((ours, theirs.flatten(1) * unscale))
    return nvrtc.worst(pairs) if total.isfinite().all() else math.nan
