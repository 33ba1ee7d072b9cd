"""The attention part of short sequences as two kernels in CUDA C++ (encoder_attention_cuda.cu):
forward, and backward with the weights' gradients.

Every rank from 1 to 64 at the same traffic: neither projections nor scores go through memory. The
plain twin is what `Fused` does where these do not apply (layer.py and heads.py). They are compiled
where they run, by whatever compiler is there, so each is tried on a small layer before it is
trusted (`proven`).
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.kernels import nvrtc

RANKS = (1, 2, 4, 8, 16, 32, 64)
TOKENS, WIDTH = 16, 64  # of a sequence, of the model
TILE, BLOCK = 128, 64  # tokens of a tile, columns of a block
ROW = 2 * WIDTH  # bytes of a row in shared memory
WEIGHTS = 4 * BLOCK * ROW + 1024  # a block's, with its biases
FORWARD = 2 * WEIGHTS + TILE * ROW  # bytes there: two blocks' weights, a tile of x
BACKWARD = (
    WEIGHTS + 8 * TILE * ROW + 1024 + 2 * 64 * ROW + 32
)  # one block's, two tiles of x and dz, one of dq, dk, dv and o, ones, letters
WARPS = {
    1: 16,
    2: 16,
    4: 16,
    8: 16,
    16: 16,
    32: 8,
    64: 8,
}  # that go back together, by rank; 8 go forward
FILLED = 264  # programs forward at once: two on each of an H200's 132 multiprocessors


def refusal(dim: int, tokens: int, count: int, columns: int, rank: int, kind: torch.dtype) -> str:
    """Why these kernels cannot take models of this width, sequences of `tokens`, `count` tokens in
    all; empty when they can."""
    if (dim, tokens) != (WIDTH, TOKENS) or rank not in RANKS:
        return (
            f"they take width {WIDTH}, {TOKENS} tokens and ranks {', '.join(map(str, RANKS))}, "
            f"got {dim}, {tokens} and {rank}"
        )
    if count % TILE or columns % BLOCK or kind != torch.float16:
        return (
            f"they take fp16, tokens in {TILE}s and heads x rank in {BLOCK}s, got {kind}, {count} "
            f"and {columns}"
        )
    return ""


def pieces(models: int, count: int, columns: int) -> int:
    """In how many parts the columns go forward: few models would not fill a GPU with their tokens
    alone."""
    most = columns // BLOCK
    return next(
        (n for n in (1, 2, 4, 8, 16) if most % n == 0 and models * (count // TILE) * n >= FILLED),
        math.gcd(most, 16),
    )


def peers(columns: int) -> int:
    """How many programs backward, with a block of columns each, add their parts of the input's
    gradient up before they write it."""
    return 1 if columns // BLOCK % 2 else 2


def blocks(columns: int) -> int:
    """In how many parts that comes."""
    return columns // BLOCK // peers(columns)


def shares(models: int, count: int, columns: int) -> int:
    """In how many parts the tokens are taken for the weights' gradients: as few as fill a GPU,
    since each part brings weights and adds gradients of its own."""
    tiles = count // TILE
    each = [n for n in range(1, tiles + 1) if tiles % n == 0]
    return next((n for n in each if models * (columns // BLOCK) * n >= FILLED), each[-1])


def proven(rank: int, device: torch.device) -> bool:
    """Whether the kernels of a rank, compiled here, compute a small layer and its gradients as
    PyTorch does."""
    return _proven(rank, nvrtc.numbered(device))


@functools.cache
def _proven(rank: int, device: torch.device) -> bool:
    return nvrtc.proven(f"attention of rank {rank}", lambda: _trial(rank, device), device)


def _trial(rank: int, device: torch.device) -> float:
    """The largest relative error of a small layer's outputs and gradients against float64, of
    blocks that have peers and of some that have none: several tiles, so that every buffer is used
    again."""
    return (
        torch.tensor([_tried(rank, device, columns) for columns in (2 * BLOCK, 3 * BLOCK)])
        .max()
        .item()
    )  # NaN if one is


def _tried(rank: int, device: torch.device, C: int) -> float:
    M, T, D, share, average, scale, undo = 2, 6 * TILE, WIDTH, 2, 2, 0.6, 0.25
    draw = torch.Generator().manual_seed(rank)

    def drawn(*size: int, spread: float = 1.0) -> Tensor:
        return (torch.randn(M, *size, generator=draw) * spread).to(device)

    x, dz, u0 = drawn(T, D, spread=0.5).half(), drawn(T, D).half(), drawn(T, D)
    w, out = drawn(3 * C, D, spread=0.3).half(), drawn(D, C, spread=0.1).half()
    b, bias, scales = (
        drawn(3 * C),
        drawn(average, D),
        drawn(16).abs() + 0.5,
    )  # of the layer before and of this one first
    # one row a model, as stacks have them: every part starts at a multiple of 16 numbers
    row = torch.cat(
        [w.flatten(1).float(), b, out.flatten(1).float(), bias.flatten(1), scales], 1
    ).contiguous()
    half, P, at_b, at_out = row.half(), row.shape[1], 3 * C * D, 3 * C * D + 3 * C
    f, h, at_bias, at_scales = (
        row.view(-1),
        half.view(-1),
        at_out + C * D,
        at_out + C * D + average * D,
    )
    u, y, inv = torch.empty_like(u0), torch.empty_like(x), torch.empty(M, T, device=device)
    parts = torch.empty(M, blocks(C), T, D, dtype=torch.float16, device=device)
    sums, total = torch.empty(share, M, at_bias, device=device), torch.zeros(M, device=device)
    s = sums.view(-1)
    given = (
        x,
        h,
        f[at_b:],
        h[at_out:],
        f[at_bias:],
        f[at_scales:],
        u0,
        f[at_scales + 1 :],
        u,
        y,
        inv,
        T,
        C,
        P,
        1 / average,
        scale,
        average,
    )
    most = C // BLOCK
    partial = torch.empty(M, most, T, D, device=device)
    for n in (most, 1):
        forward(rank, M, T, *given, False, partial, n)
    backward(
        rank, M, C, share, x, dz, h, f[at_b:], h[at_out:], parts, s, s[at_b:], s[at_out:], total,
        T, C, P, 1 / average, scale, undo, False, M, share, at_bias,
    )  # fmt: skip
    exact = [t.double().requires_grad_() for t in (x, w, b, out)]
    with torch.enable_grad():
        qkv = exact[0] @ exact[1].mT + exact[2][:, None]
        q, k, v = (t.view(M, -1, TOKENS, C // rank, rank).transpose(2, 3) for t in qkv.split(C, -1))
        heads = (torch.softmax(q @ k.mT * scale, -1) @ v).transpose(2, 3).reshape(M, T, C)
        added = heads @ exact[3].mT / average
        dx, dw, db, dout = torch.autograd.grad(added, exact, dz.double())
    z = added.detach() + scales[:, :1, None] * u0 + bias.mean(1)[:, None]
    over = 1 / z.norm(dim=-1)
    i = torch.arange(D, device=device)
    got_dx = torch.empty_like(dx)
    got_dx[..., i % 16 // 2 * 8 + i // 16 * 2 + i % 2] = parts.double().sum(1)
    got = sums.sum(0).double().split([3 * C * D, 3 * C, C * D], 1)
    pairs = [
        (partial.sum(1) / average, added.detach()),
        (u, z * over[..., None]),
        (y, scales[:, 1:2, None] * z * over[..., None]),
        (inv, over),
        (got_dx, dx),
        (got[0], dw.flatten(1) * undo),
        (got[1], db * undo),
        (got[2], dout.flatten(1) * undo),
    ]
    return nvrtc.worst(pairs) if total.isfinite().all() else math.nan


def forward(rank: int, models: int, count: int, *args: Any) -> None:
    """The attention part of one layer for `count` tokens of each model; the arguments are those of
    the kernel, the last how many pieces."""
    _run("forward", rank, count // TILE * args[-1], models, 8, FORWARD, 1, *args)


def backward(rank: int, models: int, columns: int, parts: int, *args: Any) -> None:
    """Its gradients, tokens in `parts`."""
    _run(
        "backward",
        rank,
        columns // BLOCK * parts,
        models,
        WARPS[rank],
        BACKWARD,
        peers(columns),
        *args,
    )


def _run(
    name: str, rank: int, count: int, models: int, warps: int, shared: int, peers: int, *args: Any
) -> None:
    assert args[0].device.index == torch.cuda.current_device()
    _module(rank, torch.cuda.current_device()).launch(
        name, (count, models), 32 * warps, shared, args, peers
    )


@functools.cache
def _module(rank: int, device: int) -> nvrtc.Module:
    source = "".join(
        (Path(__file__).parent / name).read_text()
        for name in ("warp.cuh", "encoder.cuh", "encoder_attention_cuda.cu")
    )
    return nvrtc.Module(nvrtc.compiled(source, "sm_90a", {"R": rank, "WARPS": WARPS[rank]}))
