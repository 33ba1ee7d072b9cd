"""The block of a narrow causal decoder as three kernels in CUDA C++ (decoder_cuda.cu): forward, and
backward through each of its two parts.

For sequences of up to 96 tokens and widths up to 48, any number of heads; the residual stays in
registers from norm to norm. The plain twin is decoder_triton.py with attention_short_triton.py, and
the kernels are tried on small models before they are trusted.

How the work is cut: forward a program has some sequences, `groups` at a time. Backward a model's
batch is split over several programs (`token_splits`), each of which goes through its share and then
writes partial sums of all weights' gradients into rows of its own; sum_splits
(encoder_norm_triton.py) adds them up. Nobody else sums anything, so the order is fixed.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.kernels import nvrtc

SOURCES = ("warp.cuh", "decoder_cuda.cuh", "decoder_cuda.cu")  # compiled as one
MOST_SPLITS = 64  # of a model's batch, backward


class Sizes(NamedTuple):
    """What a compilation is for."""

    width: int
    hidden: int
    tokens: int
    rank: int

    @property
    def warps(self) -> int:
        """Warps that share a sequence, 16 tokens each."""
        return -(-self.tokens // 16)

    @property
    def padded(self) -> int:
        """Tokens of a sequence in the kernels' own order."""
        return 16 * self.warps

    @property
    def groups(self) -> int:
        """Sequences that one block of threads has at once, forward."""
        return min(15, 18 // self.warps)

    @property
    def team(self) -> int:
        """Warps that work on the feed-forward's gradients together, 16 tokens each."""
        return self.width // 4

    @property
    def shared(self) -> dict[str, int]:
        """Bytes of shared memory of each kernel, as in decoder_cuda.cuh."""
        # A row of D halves has 16 bytes more, so that rows begin in different banks.
        row, heads = 2 * self.width + 16, self.width // self.rank
        matrix, qkv = 16 * self.warps * row, 3 * self.width * row
        feed = self.hidden * row + self.width * (2 * self.hidden + 16) + self.width * row
        tall, sums = 16 * self.warps * 4 * self.width, self.width * 4
        peaks = 16 * self.warps * heads * 4
        return {
            "forward": qkv + feed + 2 * self.groups * matrix,
            "backward": qkv + 5 * matrix + tall + 2 * peaks + 2 * self.warps * sums,
            "feed_back": feed + 6 * 16 * self.team * row + 4 * self.team * sums,
        }


class Call(NamedTuple):
    """What all three kernels know of an ensemble."""

    models: int
    batch: int
    row: int  # numbers from one model's weights to the next one's
    scale: float  # of scores


class BlockWeights(NamedTuple):
    """A block's parameters, or their gradients: each from where it starts in the first model's
    row. Matrices are half, everything else float32."""

    gain1: Tensor
    shift1: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    out_bias: Tensor
    gain2: Tensor
    shift2: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor


class Splits(NamedTuple):
    """How a kernel backward splits a model's batch, and where its partial sums go."""

    programs: int
    apart: int  # numbers from one split's rows to the next one's
    unscale: float  # gradients of weights are written times this


def refusal(sizes: Sizes, columns: int, dtype: torch.dtype) -> str:
    """What these kernels need that a causal block with a GELU feed-forward and biases has not;
    empty when they take it. `columns`: heads x rank."""
    width, hidden = sizes.width, sizes.hidden
    tokens, rank = sizes.tokens, sizes.rank
    full = columns == width and hidden == 4 * width
    if dtype != torch.float16 or width % 16 or width > 48 or not full:
        return (
            "needs fp16, a width in 16s up to 48 that the heads fill, and four times as many "
            f"hidden units; this shape has {dtype}, width {width}, heads of {columns} in all and "
            f"{hidden} hidden units"
        )
    if rank != width and width // 2 % rank:
        return (
            "needs a rank that divides half the width or is all of it, this shape has rank "
            f"{rank} and width {width}"
        )
    if tokens > 96:
        return f"needs at most 96 tokens, this shape has {tokens}"
    return ""


def token_splits(sizes: Sizes, batch: int, models: int) -> tuple[int, int]:
    """Over how many programs a model's batch is split backward, through its feed-forward and
    through its attention part: more where models are few, so that they fill a GPU (measured with 5,
    10 and 15 models)."""
    tiles = max(1, models // 5)  # token tiles that a program takes one after another
    sequences = 1 if models < 10 else 2  # the same of sequences
    mlp = -(-batch * sizes.warps // (sizes.team * tiles))
    attention = -(-batch // sequences)
    return min(MOST_SPLITS, mlp), min(MOST_SPLITS, attention)


class Kept(NamedTuple):
    """What a block leaves for the backward pass, in the kernels' own order."""

    x1: Tensor  # the residual between its parts
    h2: Tensor  # the same normed
    x2: Tensor  # the residual after it
    qkv: Tensor
    o: Tensor  # heads
    peaks: Tensor  # logarithms of the softmaxes' denominators

    def of(self, models: slice) -> Kept:
        """The same of some models."""
        return Kept(*(t[models] for t in self))


class Between(NamedTuple):
    """What the backward pass leaves between the two parts of a block, in the kernels' own order."""

    dx1: Tensor  # the gradient of the residual
    d_heads: Tensor  # the gradient of the heads

    def of(self, models: slice) -> Between:
        """The same of some models."""
        return Between(*(t[models] for t in self))


def buffers(sizes: Sizes, models: int, batch: int, device: torch.device, heads: int = 0) -> Kept:
    """Room for what one block keeps; `heads` of the largest number where shapes differ."""
    D, T = sizes.width, batch * sizes.padded

    def empty(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(models, T, width, device=device, dtype=dtype)

    return Kept(
        x1=empty(D),
        h2=empty(D, torch.half),
        x2=empty(D),
        qkv=empty(3 * D, torch.half),
        o=empty(D, torch.half),
        peaks=empty(heads or D // sizes.rank),
    )


def gradients(
    sizes: Sizes, models: int, batch: int, device: torch.device
) -> tuple[Between, Tensor]:
    """Room for the gradients within a block, and of the residual between two blocks."""
    size = (models, batch * sizes.padded, sizes.width)
    d_heads = torch.empty(size, device=device, dtype=torch.half)
    dx1, dx = (torch.empty(size, device=device) for _ in range(2))
    return Between(dx1, d_heads), dx


# ---- the kernels


def forward(
    sizes: Sizes,
    call: Call,
    x: Tensor,
    weights: BlockWeights,
    kept: Kept,
    *,
    lowest: bool,
    highest: bool,
) -> None:
    """One block of each model. The lowest reads the residual, and the highest writes it, in the
    usual order; those between in the kernels' own."""
    grid = (-(-call.batch // sizes.groups), call.models)
    arguments = (x, *weights, *kept, call.batch, call.row, call.scale, lowest, highest)
    _run("forward", sizes, grid, sizes.groups * sizes.warps, *arguments)


def feed_back(
    sizes: Sizes,
    call: Call,
    dx2: Tensor,
    kept: Kept,
    weights: BlockWeights,
    between: Between,
    grads: BlockWeights,
    splits: Splits,
    *,
    highest: bool,
) -> None:
    """Backward through its feed-forward, from dx2 to `between`; no more splits than tiles of `team`
    x 16 tokens."""
    arguments = (
        *(dx2, kept.x1, kept.h2, weights.gain2, weights.up, weights.up_bias, weights.down),
        *(weights.out, between.dx1, between.d_heads),
        *(grads.gain2, grads.shift2, grads.up, grads.up_bias, grads.down, grads.down_bias),
        *(grads.out_bias, call.batch, splits.programs, call.row, splits.apart),
        *(splits.unscale, highest),
    )
    _run("feed_back", sizes, (splits.programs, call.models), sizes.team, *arguments)


def backward(
    sizes: Sizes,
    call: Call,
    x: Tensor,
    kept: Kept,
    weights: BlockWeights,
    between: Between,
    dx: Tensor,
    grads: BlockWeights,
    splits: Splits,
    *,
    lowest: bool,
) -> None:
    """Backward through its attention part, from `between` to dx (written); no more splits than
    sequences."""
    arguments = (
        *(x, weights.gain1, weights.shift1, weights.qkv, kept.qkv, kept.o),
        *(between.d_heads, between.dx1, kept.peaks, dx),
        *(grads.gain1, grads.shift1, grads.qkv, grads.qkv_bias, grads.out),
        *(call.batch, splits.programs, call.row, splits.apart, call.scale, splits.unscale, lowest),
    )
    _run("backward", sizes, (splits.programs, call.models), sizes.warps, *arguments)


def _run(name: str, sizes: Sizes, grid: tuple[int, int], warps: int, *arguments: Any) -> None:
    assert arguments[0].device.index == torch.cuda.current_device()
    _module(sizes, torch.cuda.current_device()).launch(
        name, grid, 32 * warps, sizes.shared[name], arguments
    )


@functools.cache
def _module(sizes: Sizes, device: int) -> nvrtc.Module:
    defined = {
        "WIDTH": sizes.width,
        "HIDDEN": sizes.hidden,
        "TOKENS": sizes.tokens,
        "R": sizes.rank,
    }
    return nvrtc.Module(nvrtc.compiled(SOURCES, "sm_90a", defined))


# ---- the trial


def proven(sizes: Sizes, device: torch.device) -> bool:
    """Whether the kernels, compiled here, compute a block of small models and its gradients as
    PyTorch does."""
    return _proven(sizes, nvrtc.numbered(device))


@functools.cache
def _proven(sizes: Sizes, device: torch.device) -> bool:
    return nvrtc.proven(
        f"a decoder's block of width {sizes.width} and rank {sizes.rank}",
        lambda: trial(sizes, device),
        device,
    )


def trial(sizes: Sizes, device: torch.device) -> float:
    """The largest relative error of two layers' outputs and gradients against float64: of more
    sequences and tiles than splits."""
    # Two models and two layers; more sequences and more tiles than splits, and not in even shares.
    D, F = sizes.width, sizes.hidden
    N, R = sizes.tokens, sizes.rank
    M, splits, unscale = 2, 2, 0.25
    batch = 3 * max(sizes.groups, sizes.team // sizes.warps) - 1
    draw = torch.Generator().manual_seed(R)

    def drawn(*size: int, spread: float = 1.0, around: float = 0.0) -> Tensor:
        return (torch.randn(M, *size, generator=draw) * spread + around).half().double().to(device)

    # Parameters in BlockWeights' order, drawn in half so that float64 begins from the same numbers;
    # gains are about 1.
    x, dx2 = drawn(batch * N, D), drawn(batch * N, D)
    sides = [(D,), (D,), (3 * D, D), (3 * D,), (D, D), (D,), (D,), (D,), (F, D), (F,), (D, F), (D,)]
    params = [
        [drawn(*size, spread=0.15, around=1.0 * (i in (0, 6))) for i, size in enumerate(sides)]
        for _ in range(2)
    ]  # gains about 1
    # One flat row per model and layer, as ensembles have them. Every parameter is then a view that
    # starts in the first model's row.
    counts = [p[0].numel() for p in params[0]]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    rows = [torch.cat([p.flatten(1) for p in layer], 1).float().contiguous() for layer in params]
    P = rows[0].shape[1]
    call, split = Call(M, batch, P, scale=R**-0.5), Splits(splits, M * P, unscale)
    grads = [torch.full((splits, M, P), torch.nan, device=device) for _ in params]
    weights = []
    for row in rows:
        half = row.half().view(-1)
        places = zip(sides, starts, strict=True)
        of_type = [(half if len(size) > 1 else row.view(-1))[at:] for size, at in places]
        weights.append(BlockWeights(*of_type))

    # Two layers, so that both orders of the residual are used: the lowest reads the usual one, the
    # highest writes it.
    lower, upper = (buffers(sizes, M, batch, device) for _ in params)
    out, dx = torch.empty_like(x, dtype=torch.float32), torch.empty_like(x, dtype=torch.float32)
    between, dx_between = gradients(sizes, M, batch, device)
    forward(sizes, call, x.float(), weights[0], lower, lowest=True, highest=False)
    upper = upper._replace(x2=out)
    forward(sizes, call, lower.x2, weights[1], upper, lowest=False, highest=True)
    # Backward from the highest to the lowest; gradients begin as NaN, so that a place nobody writes
    # is seen.
    to = [BlockWeights(*(g.view(-1)[at:] for at in starts)) for g in grads]
    d_out = dx2.float()
    feed_back(sizes, call, d_out, upper, weights[1], between, to[1], split, highest=True)
    backward(
        sizes, call, lower.x2, upper, weights[1], between, dx_between, to[1], split, lowest=False
    )
    feed_back(sizes, call, dx_between, lower, weights[0], between, to[0], split, highest=False)
    backward(sizes, call, x.float(), lower, weights[0], between, dx, to[0], split, lowest=True)

    # The same block in float64, by autograd.
    exact = [t.requires_grad_() for t in (x, *params[0], *params[1])]
    with torch.enable_grad():
        end = _block(_block(x, params[0], batch, R, call.scale), params[1], batch, R, call.scale)
        wanted = torch.autograd.grad(end, exact, dx2)
    # Outputs, the input's gradient, and each parameter's, splits added up.
    pairs = [(out, end), (dx, wanted[0])]
    ours = [g for rows in grads for g in (rows.sum(0).double() / unscale).split(counts, 1)]
    pairs += [(a, b.flatten(1)) for a, b in zip(ours, wanted[1:], strict=True)]
    return nvrtc.worst(pairs)


def _block(x: Tensor, params: list[Tensor], batch: int, rank: int, scale: float) -> Tensor:
    """What the kernels compute, as one writes it."""
    # Biases and gains (M, width) get a token axis.
    p = BlockWeights(*(t if t.ndim > 2 else t[:, None] for t in params))
    M, T, D = x.shape
    normed = torch.nn.functional.layer_norm(x, (D,), eps=1e-6) * p.gain1 + p.shift1
    q, k, v = (
        t.view(M, batch, T // batch, D // rank, rank).transpose(2, 3)
        for t in (normed @ p.qkv.mT + p.qkv_bias).split(D, -1)
    )
    # Heads (M, batch, heads, N, R) under a causal mask, joined again to (M, T, D).
    later = torch.ones(T // batch, T // batch, dtype=torch.bool, device=x.device).triu(1)
    scores = (q @ k.mT * scale).masked_fill(later, -torch.inf)
    heads = torch.softmax(scores, -1) @ v
    mixed = heads.transpose(2, 3).reshape(M, T, D)
    x = x + mixed @ p.out.mT + p.out_bias
    second = torch.nn.functional.layer_norm(x, (D,), eps=1e-6) * p.gain2 + p.shift2
    return x + torch.nn.functional.gelu(second @ p.up.mT + p.up_bias) @ p.down.mT + p.down_bias
