"""The attention part of short sequences as two kernels in CUDA C++ (chain.cu): forward, and backward with the weights' gradients.

Every rank from 1 to 64 at the same traffic: neither projections nor scores go through memory. The plain twin is what `Fused` does where
these do not apply (layer.py and heads.py).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from headwise.kernels import cuda

RANKS = (1, 2, 4, 8, 16, 32, 64)
TOKENS, WIDTH = 16, 64  # of a sequence, of the model
TILE, BLOCK = 128, 64  # tokens of a tile, columns of a block
ROW = 2 * WIDTH  # bytes of a row in shared memory
WEIGHTS = 4 * BLOCK * ROW + 1024  # a block's, with its biases
BACKWARD = WEIGHTS + 8 * TILE * ROW + 1024  # bytes there: a block's weights, two tiles of x and dz, one of dq, dk, dv and o, ones
AHEAD = dict.fromkeys(RANKS, 16)  # warps that go forward together, by rank
WARPS = {1: 16, 2: 16, 4: 16, 8: 16, 16: 16, 32: 16, 64: 8}  # that go back together, by rank
ENOUGH = 32  # programs a model, so that few models fill a GPU


def refusal(dim: int, tokens: int, count: int, columns: int, ranks: set[int], kind: torch.dtype) -> str:
    """Why these kernels cannot take models of this width, sequences of `tokens`, `count` tokens in all; empty when they can."""
    if (dim, tokens) != (WIDTH, TOKENS) or not ranks <= set(RANKS):
        return f"they take width {WIDTH}, {TOKENS} tokens and ranks {', '.join(map(str, RANKS))}, got {dim}, {tokens} and {sorted(ranks)}"
    if count % TILE or columns % BLOCK or kind != torch.float16:
        return f"they take fp16, tokens in {TILE}s and heads x rank in {BLOCK}s, got {kind}, {count} and {columns}"
    return ""


def missing(device: torch.device) -> str:
    """What they need that is not there; empty when nothing is."""
    if device.type != "cuda":
        return f"a GPU, the device is {device.type}"
    if torch.version.hip or torch.cuda.get_device_capability(device) != (9, 0):
        return "a GPU of compute capability 9.0 (H100, H200)"
    return "" if cuda.has_compiler() else "NVRTC, the compiler that comes with PyTorch"


def shares(count: int, columns: int) -> int:
    """In how many parts the tokens are taken for the weights' gradients."""
    most = max(1, ENOUGH * BLOCK // columns)
    return next(n for n in range(min(most, count // TILE), 0, -1) if count // TILE % n == 0)


@functools.cache
def _module(rank: int, device: int) -> cuda.Module:
    source = (Path(__file__).parent / "chain.cu").read_text()
    return cuda.Module(cuda.compiled(source, "sm_90a", {"R": rank, "AHEAD": AHEAD[rank], "WARPS": WARPS[rank]}))


def forward(rank: int, models: int, count: int, *args: Any) -> None:
    """Layers' attention part for `count` tokens of each model; the arguments are those of the kernel."""
    warps = AHEAD[rank]
    _run("forward", rank, count // (16 * warps), models, warps, warps // 4 * WEIGHTS + warps * 16 * ROW, *args)


def backward(rank: int, models: int, columns: int, parts: int, *args: Any) -> None:
    """Its gradients, tokens in `parts`."""
    _run("backward", rank, columns // BLOCK * parts, models, WARPS[rank], BACKWARD, *args)


def _run(name: str, rank: int, blocks: int, models: int, warps: int, shared: int, *args: Any) -> None:
    _module(rank, torch.cuda.current_device()).launch(name, (blocks, models), 32 * warps, shared, args)
