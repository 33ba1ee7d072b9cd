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
TILE, BLOCK, WARPS = 128, 64, 8  # tokens of a tile, columns of a block
ROW = 2 * WIDTH + 16  # bytes of a row in shared memory
FORWARD = 2 * 4 * BLOCK * ROW  # bytes there: two blocks' weights
BACKWARD = 4 * BLOCK * ROW + 8 * TILE * ROW  # one block's, two tiles of x and dz, one of dq, dk, dv and o
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
    if torch.cuda.get_device_properties(device).shared_memory_per_block_optin < BACKWARD:
        return f"{BACKWARD} bytes of shared memory"
    return "" if cuda.has_compiler() else "NVRTC, the compiler that comes with PyTorch"


def shares(count: int, columns: int) -> int:
    """In how many parts the tokens are taken for the weights' gradients."""
    most = max(1, ENOUGH * BLOCK // columns)
    return next(n for n in range(min(most, count // TILE), 0, -1) if count // TILE % n == 0)


@functools.cache
def _module(rank: int, device: int) -> cuda.Module:
    major, minor = torch.cuda.get_device_capability(device)
    source = (Path(__file__).parent / "chain.cu").read_text()
    return cuda.Module(cuda.compiled(source, f"sm_{major}{minor}", {"R": rank}))


def run(name: str, rank: int, blocks: int, models: int, shared: int, *args: Any) -> None:
    """One kernel on the current GPU."""
    _module(rank, torch.cuda.current_device()).launch(name, (blocks, models), 32 * WARPS, shared, args)
