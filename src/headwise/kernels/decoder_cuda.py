"""The block of a narrow causal decoder as three kernels in CUDA C++ (decoder_cuda.cu): forward, and
back through each of its two parts.

For sequences of up to 96 tokens and widths up to 48, any number of heads; the residual stays in
registers from norm to norm. The plain twin is what `Trunk` does where they do not apply (pre.py and
heads.py), and each is tried on small models before it is trusted.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.kernels import nvrtc

COPIES = 64  # of the gradients, at most


class Sizes(NamedTuple):
    """What a compilation is for."""

    width: int
    hidden: int
    tokens: int
    rank: int

    @property
    def warps(self) -> int:
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
        """Warps that go back through the feed-forward together, 16 tokens each."""
        return self.width // 4

    @property
    def shared(self) -> dict[str, int]:
        """Bytes of shared memory of each kernel, as in decoder_cuda.cu."""
        row, heads = 2 * self.width + 16, self.width // self.rank
        matrix, qkv = 16 * self.warps * row, 3 * self.width * row
        feed = self.hidden * row + self.width * (2 * self.hidden + 16) + self.width * row
        tall, peaks, sums = (
            16 * self.warps * 4 * self.width,
            16 * self.warps * heads * 4,
            self.width * 4,
        )
        return {
            "forward": qkv + feed + 2 * self.groups * matrix,
            "backward": qkv + 5 * matrix + tall + 2 * peaks + 2 * self.warps * sums,
            "feed_back": feed + 6 * 16 * self.team * row + 4 * self.team * sums,
        }


def refusal(sizes: Sizes, columns: int, kind: torch.dtype) -> str:
    """Why these kernels cannot take a causal block with a GELU feed-forward and biases; empty when
    they can."""
    width, hidden, tokens, rank = sizes
    if kind != torch.float16 or width % 16 or width > 48 or columns != width or hidden != 4 * width:
        rule = "fp16, a width in 16s up to 48 that the heads fill, four times as many hidden units"
        return f"they take {rule}, got {kind}, {width}, {columns}, {hidden}"
    if rank != width and width // 2 % rank:
        return f"they take ranks that divide half the width or are all of it, got {rank} of {width}"
    if tokens > 96:
        return f"they take at most 96 tokens, got {tokens}"
    return ""


def pieces(sizes: Sizes, batch: int, models: int) -> tuple[int, int]:
    """How many parts a model's batch is cut into on the way back, through its feed-forward and
    through its attention part. Each has a copy of the gradients; there are more where models are
    few, so that they fill a GPU (measured with 5, 10 and 15 models)."""
    tiles, sequences = (
        max(1, models // 5),
        1 if models < 10 else 2,
    )  # that a block of threads takes one after another
    return min(COPIES, -(-batch * sizes.warps // (sizes.team * tiles))), min(
        COPIES, -(-batch // sequences)
    )


def proven(sizes: Sizes, device: torch.device) -> bool:
    """Whether the kernels, compiled here, compute a block of small models and its gradients as
    PyTorch does."""
    return _proven(sizes, nvrtc.numbered(device))


@functools.cache
def _proven(sizes: Sizes, device: torch.device) -> bool:
    return nvrtc.proven(
        f"a decoder's block of width {sizes.width} and rank {sizes.rank}",
        lambda: _trial(sizes, device),
        device,
    )


def _trial(sizes: Sizes, device: torch.device) -> float:
    """The largest relative error of two layers' outputs and gradients against float64: more
    sequences and tiles than pieces."""
    D, F, N, R = sizes
    M, batch, pieces, sharp, undo = (
        2,
        3 * max(sizes.groups, sizes.team // sizes.warps) - 1,
        2,
        R**-0.5,
        0.25,
    )
    draw = torch.Generator().manual_seed(R)

    def drawn(*size: int, spread: float = 1.0, around: float = 0.0) -> Tensor:
        return (torch.randn(M, *size, generator=draw) * spread + around).half().double().to(device)

    x, dx2 = drawn(batch * N, D), drawn(batch * N, D)
    sides = [(D,), (D,), (3 * D, D), (3 * D,), (D, D), (D,), (D,), (D,), (F, D), (F,), (D, F), (D,)]
    params = [
        [drawn(*size, spread=0.15, around=1.0 * (i in (0, 6))) for i, size in enumerate(sides)]
        for _ in range(2)
    ]  # gains about 1
    starts = [0, *torch.tensor([p[0].numel() for p in params[0]]).cumsum(0).tolist()][:-1]
    rows = [torch.cat([p.flatten(1) for p in layer], 1).float().contiguous() for layer in params]
    P, grads = (
        rows[0].shape[1],
        [torch.full((pieces, M, rows[0].shape[1]), torch.nan, device=device) for _ in params],
    )
    given = [
        [
            (row.half() if len(size) > 1 else row).view(-1)[at:]
            for size, at in zip(sides, starts, strict=True)
        ]
        for row in rows
    ]
    kept = [buffers(sizes, M, batch, device) for _ in params]
    y, dx, (dx1, give, between) = (
        x.float(),
        torch.empty_like(x, dtype=torch.float32),
        gradients(sizes, M, batch, device),
    )
    now = y
    for i, (weights, made) in enumerate(zip(given, kept, strict=True)):
        made = made if i == 0 else made._replace(x2=torch.empty_like(y))
        forward(sizes, M, now, *weights, *made, batch, P, sharp, i == 0, i == 1)
        now = made.x2
    out, back = now, dx2.float()
    for i in (1, 0):
        w, b, to = given[i], kept[i], [grads[i].view(-1)[at:] for at in starts]
        feed_back(
            sizes,
            M,
            pieces,
            back,
            b.x1,
            b.h2,
            w[6],
            *w[8:11],
            w[4],
            dx1,
            give,
            *to[6:12],
            to[5],
            batch,
            pieces,
            P,
            M * P,
            undo,
            i == 1,
        )
        back = between if i else dx
        before = kept[0].x2 if i else y
        backward(
            sizes,
            M,
            pieces,
            before,
            *w[:3],
            b.qkv,
            b.o,
            give,
            dx1,
            b.peaks,
            back,
            *to[:5],
            batch,
            pieces,
            P,
            M * P,
            sharp,
            undo,
            i == 0,
        )
    exact = [t.requires_grad_() for t in (x, *params[0], *params[1])]
    with torch.enable_grad():
        end = _block(_block(x, params[0], batch, R, sharp), params[1], batch, R, sharp)
        wanted = torch.autograd.grad(end, exact, dx2)
    sums = [
        part
        for g in grads
        for part in (g.sum(0).double() / undo).split([p[0].numel() for p in params[0]], 1)
    ]
    pairs = [
        (out, end),
        (dx, wanted[0]),
        *zip(sums, (g.flatten(1) for g in wanted[1:]), strict=True),
    ]
    return nvrtc.worst(pairs)


def _block(x: Tensor, params: list[Tensor], batch: int, rank: int, sharp: float) -> Tensor:
    """What the kernels compute, as one writes it."""
    gain, shift, w, b, out, out_bias, gain2, shift2, up, up_bias, down, down_bias = (
        p if p.ndim > 2 else p[:, None] for p in params
    )
    M, T, D = x.shape
    normed = torch.nn.functional.layer_norm(x, (D,), eps=1e-6) * gain + shift
    q, k, v = (
        t.view(M, batch, T // batch, D // rank, rank).transpose(2, 3)
        for t in (normed @ w.mT + b).split(D, -1)
    )
    later = torch.ones(T // batch, T // batch, dtype=torch.bool, device=x.device).triu(1)
    mixed = (
        (torch.softmax((q @ k.mT * sharp).masked_fill(later, -torch.inf), -1) @ v)
        .transpose(2, 3)
        .reshape(M, T, D)
    )
    x = x + mixed @ out.mT + out_bias
    second = torch.nn.functional.layer_norm(x, (D,), eps=1e-6) * gain2 + shift2
    return x + torch.nn.functional.gelu(second @ up.mT + up_bias) @ down.mT + down_bias


class Kept(NamedTuple):
    """What a block leaves for the way back, in the kernels' own order: the residual between its
    parts, the same normed, the residual after it, projections, heads, and the logarithms of the
    softmaxes' denominators."""

    x1: Tensor
    h2: Tensor
    x2: Tensor
    qkv: Tensor
    o: Tensor
    peaks: Tensor

    def of(self, models: slice) -> Kept:
        return Kept(*(t[models] for t in self))


def buffers(sizes: Sizes, models: int, batch: int, device: torch.device, heads: int = 0) -> Kept:
    """Room for one block; `heads` of the largest number where shapes differ."""
    D, T = sizes.width, batch * sizes.padded
    x1, x2, peaks = (
        torch.empty(models, T, width, device=device) for width in (D, D, heads or D // sizes.rank)
    )
    h2, qkv, o = (
        torch.empty(models, T, width, device=device, dtype=torch.half) for width in (D, 3 * D, D)
    )
    return Kept(x1, h2, x2, qkv, o, peaks)


def gradients(
    sizes: Sizes, models: int, batch: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the gradients of the residual between a block's parts, of the heads, and of the
    residual between two blocks."""
    kinds = (torch.float32, torch.half, torch.float32)
    dx1, give, dx = (
        torch.empty(models, batch * sizes.padded, sizes.width, device=device, dtype=kind)
        for kind in kinds
    )
    return dx1, give, dx


def forward(sizes: Sizes, models: int, *args: Any) -> None:
    """One block of each model; the arguments are those of the kernel."""
    batch = args[-5]
    _run("forward", sizes, (-(-batch // sizes.groups), models), sizes.groups * sizes.warps, *args)


def feed_back(sizes: Sizes, models: int, pieces: int, *args: Any) -> None:
    """Back through its feed-forward; no more pieces than tiles of `team` x 16 tokens."""
    _run("feed_back", sizes, (pieces, models), sizes.team, *args)


def backward(sizes: Sizes, models: int, pieces: int, *args: Any) -> None:
    """Back through its attention part; no more pieces than sequences."""
    _run("backward", sizes, (pieces, models), sizes.warps, *args)


def _run(name: str, sizes: Sizes, grid: tuple[int, int], warps: int, *args: Any) -> None:
    assert args[0].device.index == torch.cuda.current_device()
    _module(sizes, torch.cuda.current_device()).launch(
        name, grid, 32 * warps, sizes.shared[name], args
    )


@functools.cache
def _module(sizes: Sizes, device: int) -> nvrtc.Module:
    source = "".join(
        (Path(__file__).parent / name).read_text() for name in ("warp.cuh", "decoder_cuda.cu")
    )
    defined = {
        "WIDTH": sizes.width,
        "HIDDEN": sizes.hidden,
        "TOKENS": sizes.tokens,
        "R": sizes.rank,
    }
    return nvrtc.Module(nvrtc.compiled(source, "sm_90a", defined))
