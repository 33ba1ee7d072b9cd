"""The feed-forward of width 64 as two kernels in CUDA C++ (encoder_mlp_cuda.cu): forward, and
backward with the weights' gradients.

The plain twin is what `Fused` does where these do not apply (`feed`, `feed_back` and `feed_weights`
in layer.py). They are compiled where they run, so they are tried on a small layer before they are
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

WIDTH = 64  # of the model
EACH, TILE, BLOCK = 256, 128, 128  # tokens of a program forward, of a tile, hidden units of a block
ROW = 2 * WIDTH  # bytes of a row in shared memory
FORWARD = (
    4 * (2 * BLOCK * ROW + 4 * BLOCK) + EACH * ROW
)  # bytes there: four blocks of both weights and their biases, tokens
BACK = (
    (4 * 2 * TILE + 5 * BLOCK) * ROW + 1024 + 2 * 64 * ROW + 32
)  # four tiles of x and dz, slopes of two tiles, a block of weights, ones, letters
REGISTERS = 168  # of a thread back, before four warps give some to the other eight
ENOUGH = 96  # programs, so that they fill a GPU


def refusal(dim: int, count: int, hidden: int, kind: torch.dtype) -> str:
    """Why these kernels cannot take models of this width and hidden width, `count` tokens in all;
    empty when they can."""
    if dim != WIDTH or hidden % (2 * BLOCK) or count % EACH or kind != torch.float16:
        wants = f"they take fp16, width {WIDTH}, hidden units in {2 * BLOCK}s and tokens in {EACH}s"
        return f"{wants}, got {kind}, {dim}, {hidden} and {count}"
    return ""


def blocks(hidden: int) -> int:
    """In how many parts the input's gradient comes: two programs that are peers make one."""
    return hidden // BLOCK // 2


def proven(device: torch.device) -> bool:
    """Whether the kernels, compiled here, compute a small layer and its gradients as PyTorch
    does."""
    return _proven(nvrtc.numbered(device))


@functools.cache
def _proven(device: torch.device) -> bool:
    return nvrtc.proven("feed-forward of width 64", lambda: _trial(device), device)


def _trial(device: torch.device) -> float:
    """The largest relative error of a small layer's outputs and gradients against float64: more
    tiles of tokens and blocks of hidden units than lie in shared memory at once."""
    M, T, F, D, share, undo = 2, 6 * EACH, 6 * BLOCK, WIDTH, 2, 0.25
    draw = torch.Generator().manual_seed(1)

    def drawn(*size: int, spread: float = 1.0) -> Tensor:
        return (torch.randn(M, *size, generator=draw) * spread).to(device)

    x, dz, u0 = drawn(T, D).half(), drawn(T, D).half(), drawn(T, D)
    up, b, down, shift = (
        drawn(F, D, spread=0.1).half(),
        drawn(F),
        drawn(D, F, spread=0.1).half(),
        drawn(D),
    )
    scales = drawn(16).abs() + 0.5  # of the part before and of this one first
    row = torch.cat(
        [up.flatten(1).float(), b, down.flatten(1).float(), shift, scales], 1
    ).contiguous()
    half, P, at_b, at_down = row.half(), row.shape[1], F * D, F * D + F
    f, h, at_shift, at_scales = row.view(-1), half.view(-1), at_down + F * D, at_down + F * D + D
    u, y, inv = torch.empty_like(u0), torch.empty_like(x), torch.empty(M, T, device=device)
    forward(
        M,
        T,
        x,
        h,
        f[at_b:],
        h[at_down:],
        f[at_shift:],
        f[at_scales:],
        u0,
        f[at_scales + 1 :],
        u,
        y,
        inv,
        T,
        F,
        P,
    )
    parts = torch.empty(M, blocks(F), T, D, dtype=torch.float16, device=device)
    sums, total = torch.empty(share, M, at_shift, device=device), torch.zeros(M, device=device)
    s = sums.view(-1)
    back(
        M,
        F,
        share,
        x,
        dz,
        h,
        f[at_b:],
        h[at_down:],
        parts,
        s,
        s[at_b:],
        s[at_down:],
        total,
        T,
        F,
        P,
        undo,
        M,
        share,
        at_shift,
    )
    hidden = x.double() @ up.double().mT + b.double()[:, None]
    active, slope = hidden.clamp_min(0), (dz.double() @ down.double()) * (hidden > 0)
    z = active @ down.double().mT + shift[:, None] + scales[:, :1, None] * u0
    over = 1 / z.norm(dim=-1)
    i = torch.arange(D, device=device)
    got_dx = torch.empty(M, T, D, dtype=torch.float64, device=device)
    got_dx[..., i % 16 // 2 * 8 + i // 16 * 2 + i % 2] = parts.double().sum(1)
    got = sums.sum(0).double().split([F * D, F, F * D], 1)
    exact = slope.mT @ x.double(), slope.sum(1), dz.double().mT @ active
    pairs = [
        (u, z * over[..., None]),
        (y, scales[:, 1:2, None] * z * over[..., None]),
        (inv, over),
        (got_dx, slope @ up.double()),
        *[(a, e.flatten(1) * undo) for a, e in zip(got, exact, strict=True)],
    ]
    return nvrtc.worst(pairs) if total.isfinite().all() else math.nan


def forward(models: int, count: int, *args: Any) -> None:
    """One layer for `count` tokens of each model; the arguments are those of the kernel."""
    _run("feed", count // EACH, models, 16, FORWARD, *args)


def back(models: int, hidden: int, shares: int, *args: Any) -> None:
    """Gradients of one layer, tokens in `shares`; the arguments are those of the kernel, T the
    eleventh."""
    assert args[10] % (2 * TILE * shares) == 0, "tiles are taken two at a time"
    _run("feed_back", hidden // BLOCK * shares, models, 12, BACK, *args)


def _run(name: str, blocks: int, models: int, warps: int, shared: int, *args: Any) -> None:
    assert args[0].device.index == torch.cuda.current_device()
    _module(torch.cuda.current_device()).launch(
        name, (blocks, models), 32 * warps, shared, args, 2 if name == "feed_back" else 1
    )


@functools.cache
def _module(device: int) -> nvrtc.Module:
    source = "".join(
        (Path(__file__).parent / name).read_text()
        for name in ("warp.cuh", "encoder.cuh", "encoder_mlp_cuda.cu")
    )
    made = nvrtc.Module(nvrtc.compiled(source, "sm_90a", {}))
    if (
        found := made.registers("feed_back", BACK)
    ) < REGISTERS:  # its warps would wait for registers that are not there
        raise RuntimeError(f"feed_back has {found} registers a thread, it needs {REGISTERS}")
    return made
