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
TILE, BLOCK = 256, 64  # tokens that go forward together at most, columns of a block
ROW = 2 * WIDTH  # bytes of a row in shared memory
WEIGHTS = 4 * BLOCK * ROW + 1024  # a block's, with its biases
AHEAD = dict.fromkeys(RANKS, 16)  # warps that go forward together, by rank
WARPS = {1: 16, 2: 16, 4: 16, 8: 16, 16: 16, 32: 8, 64: 8}  # and back
BESIDE = {1, 2, 4, 8, 16, 32}  # ranks whose weights' gradients are summed beside the next tile
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
    return next(n for n in range(min(most, count // 128), 0, -1) if count // 128 % n == 0)


@functools.cache
def _module(rank: int, first: bool, device: int) -> cuda.Module:
    source = (Path(__file__).parent / "chain.cu").read_text()
    return cuda.Module(
        cuda.compiled(
            source, "sm_90a", {"R": rank, "AHEAD": AHEAD[rank], "WARPS": WARPS[rank], "BESIDE": int(rank in BESIDE), "FIRST": int(first)}
        )
    )


def forward(rank: int, models: int, count: int, *args: Any) -> None:
    """Layers' attention part for `count` tokens of each model; the arguments are those of the kernel."""
    warps = AHEAD[rank]
    _run("forward", rank, False, count // (16 * warps), models, warps, warps // 4 * WEIGHTS + warps * 16 * ROW, *args)


def backward(rank: int, first: bool, models: int, columns: int, parts: int, *args: Any) -> None:
    """Its gradients, tokens in `parts`; `first`: but that of the input."""
    tiles = 14 * 64 if rank in BESIDE else 8 * 128  # rows: of x and dz two each, of dq, dk, dv and o one; one more of each where beside
    _run("backward", rank, first, columns // BLOCK * parts, models, WARPS[rank], WEIGHTS + tiles * ROW + 1024, *args)


def _run(name: str, rank: int, first: bool, blocks: int, models: int, warps: int, shared: int, *args: Any) -> None:
    _module(rank, first, torch.cuda.current_device()).launch(name, (blocks, models), 32 * warps, shared, args)
