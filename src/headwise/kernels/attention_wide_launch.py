"""Attention of large rank in Triton: how each kernel is launched.

A program makes one tile of its kernel's result. The first axis of a grid counts tiles (those of one
head, or rows), the second heads of all sequences, the third the two results of `key_gradients`.
CUDA takes 65,535 programs along the second axis and 2^31 - 1 along the first.

The first launch of a layout goes through Triton's own; it gives a function that launches the
compiled kernel again with the same numbers on other tensors, and `Launches` remembers that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from headwise.kernels import attention_wide_triton_backward as backward_kernels
from headwise.kernels import attention_wide_triton_forward as forward_kernels
from headwise.kernels.attention_wide_span import TILE, Backward, Span, padded

MOST = 4096  # scores of a row that a program holds at once

Relaunch = Callable[..., None]  # the same launch on other tensors of the same layout


@dataclass(frozen=True)
class Tiling:
    """How a product is tiled: columns of the result, steps of the sum, warps, loads ahead."""

    columns: int
    step: int
    warps: int
    stages: int


HALF = Tiling(128, 64, 4, 3)  # 16-bit operands: two programs share a multiprocessor
REMADE = Tiling(128, 64, 8, 3)  # score gradients that make the scores again hold two tiles
SINGLE = Tiling(128, 32, 8, 3)  # float32 operands


class Launches:
    """Launches made before, by all that they depend on: to look at every argument anew takes longer
    than short calls do.

    A key holds sizes, strides, alignment, dtype, device and precision, no tensors. The cache lives
    as long as the process; beyond `limit` what was kept first gives way.
    """

    def __init__(self, limit: int = 1024) -> None:
        self.limit = limit
        self._known: dict[Any, tuple[Relaunch, ...]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Any) -> tuple[Relaunch, ...] | None:
        """The launches of this key, if they were made before."""
        return self._known.get(key)

    def keep(self, key: Any, *made: Relaunch) -> None:
        """For the next time."""
        while len(self._known) >= self.limit:
            self._known.pop(next(iter(self._known)), None)
        self._known[key] = made


launches = Launches()


class Launcher:
    """A kernel; launched, it gives what launches it again with the same numbers on other
    tensors."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[Any, ...],
        tiling: Tiling,
        **constants: Any,
    ) -> Relaunch:
        """`constants` in the order of the kernel's own."""
        # Triton's first launch compiles and gives the compiled kernel, which is then called without
        # looking at the arguments again.
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        found = self.kernel[grid](*tensors, *numbers, **constants, **options)
        run = (self.kernel if found is None else found)[grid]  # the interpreter gives nothing
        rest = *numbers, *constants.values()
        return lambda *others: run(*others, *rest)


_scores = Launcher(forward_kernels.scores)
_softmax_rows = Launcher(forward_kernels.softmax_rows)
_weighted_sums = Launcher(forward_kernels.weighted_sums)
_row_dots = Launcher(backward_kernels.row_dots)
_score_gradients = Launcher(backward_kernels.score_gradients)
_key_gradients = Launcher(backward_kernels.key_gradients)


def launch_scores(q: Tensor, k: Tensor, s: Tensor, span: Span) -> Relaunch:
    """s (batch, heads, rows, keys), float32, of q (batch, heads, rows, rank) and k (batch, KV
    heads, keys, rank)."""
    B, H, _, R = q.shape
    tiling, row_tiles = _tiling(q), span.padded_queries // TILE
    numbers = (
        *(H, H // k.shape[1]),
        *(span.queries, span.keys, R, span.offset, span.window),
        *_strides(q),
        *_strides(k),
        *s.stride()[1:3],
        row_tiles,
    )
    return _scores(
        (row_tiles * -(-span.padded_keys // tiling.columns), B * H, 1),
        (q, k, s),
        numbers,
        tiling,
        CAUSAL=span.causal,
        WINDOW=span.window > 0,
        COLUMNS=tiling.columns,
        STEP=tiling.step,
        EVEN=R % tiling.step == 0,
        PRECISION=_precision(q),
    )


def launch_softmax(s: Tensor, p: Tensor, lse: Tensor, scale: float, span: Span) -> Relaunch:
    """p and lse (batch, heads, rows) from scores."""
    # A program holds a row's scores at once where they fit; with a window that is the window and
    # the tiles at its ends.
    longest = span.padded_keys
    if span.window:
        seen = span.window * (1 if span.causal else 2)
        longest = min(longest, padded(seen + 3 * TILE))
    block = min(MOST, triton.next_power_of_2(longest))
    numbers = (
        scale,
        *(span.queries, span.keys, span.offset, span.window),
        *s.stride()[1:3],
        *p.stride()[1:3],
        lse.stride(1),
    )
    return _softmax_rows(
        (span.padded_queries, lse.shape[0] * lse.shape[1], 1),
        (s, p, lse),
        numbers,
        Tiling(0, 0, max(1, min(8, block // 512)), 3),
        CAUSAL=span.causal,
        WINDOW=span.window > 0,
        BLOCK=block,
        ONE=longest <= block,
    )


def launch_weighted_sums(
    table: Tensor, x: Tensor, out: Tensor, span: Span, add: bool = False
) -> Relaunch:
    """out (batch, heads, rows, width) from a table and x (batch, KV heads, keys, width)."""
    B, H, _, W = out.shape
    tiling, row_tiles = _tiling(table), span.padded_queries // TILE
    numbers = (
        *(H, H // x.shape[1]),
        *(span.queries, span.keys, W, span.offset, span.window),
        *table.stride()[1:3],
        *_strides(x),
        *_strides(out),
        row_tiles,
    )
    return _weighted_sums(
        (row_tiles * -(-W // tiling.columns), B * H, 1),
        (table, x, out),
        numbers,
        tiling,
        CAUSAL=span.causal,
        WINDOW=span.window > 0,
        ADD=add,
        COLUMNS=tiling.columns,
        STEP=tiling.step,
        EVEN=span.keys % TILE == 0,
        PRECISION=_precision(table),
    )


def launch_score_gradients(
    t: Backward, p: Tensor, ds: Tensor, scale: float, span: Span, kept: bool
) -> Relaunch:
    """ds, and p unless it is kept."""
    # Strides of all operands, then of the tables, in the order of the kernel's arguments.
    (B, H, _, R), V = t.q.shape, t.v.shape[3]
    tiling, row_tiles = _tiling(t.q, HALF if kept else REMADE), span.padded_queries // TILE
    numbers = (
        *(scale, H, H // t.k.shape[1]),
        *(span.queries, span.keys, R, V, span.offset, span.window),
        *_strides(t.q),
        *_strides(t.k),
        *_strides(t.v),
        *_strides(t.g),
        *p.stride()[1:3],
        *ds.stride()[1:3],
        t.lse.stride(1),
        row_tiles,
    )
    return _score_gradients(
        (row_tiles * -(-span.padded_keys // tiling.columns), B * H, 1),
        (t.q, t.k, t.v, t.g, p, ds, t.lse, t.delta),
        numbers,
        tiling,
        CAUSAL=span.causal,
        WINDOW=span.window > 0,
        KEPT=kept,
        COLUMNS=tiling.columns,
        STEP=tiling.step,
        EVEN_R=R % tiling.step == 0,
        EVEN_V=V % tiling.step == 0,
        PRECISION=_precision(t.q),
    )


def launch_key_gradients(t: Backward, p: Tensor, ds: Tensor, span: Span) -> Relaunch:
    """dk and dv (batch, KV heads, keys, rank or width) from the tables."""
    # Both results in one launch: the grid's third axis chooses.
    (B, KV, _, R), V, H = t.dk.shape, t.dv.shape[3], t.q.shape[1]
    tiling, key_tiles = _tiling(ds), span.padded_keys // TILE
    tensors = (ds, t.q, t.dk, p, t.g, t.dv)
    numbers = (
        *(H, H // KV),
        *(span.queries, span.keys, R, V, span.offset, span.window),
        *(stride for tensor in tensors for stride in _strides(tensor)),
        key_tiles,
    )
    return _key_gradients(
        (key_tiles * -(-max(R, V) // tiling.columns), B * KV, 2),
        tensors,
        numbers,
        tiling,
        CAUSAL=span.causal,
        WINDOW=span.window > 0,
        COLUMNS=tiling.columns,
        STEP=tiling.step,
        EVEN=span.queries % TILE == 0,
        PRECISION=_precision(t.q),
    )


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Inner products over the last axis of (batch, heads, rows, width) tensors: (batch, heads,
    rows), float32."""
    B, H, Q, W = a.shape
    out = torch.empty(B, H, Q, dtype=torch.float32, device=a.device)
    key = layout_of(a, b)
    if known := launches.get(key):
        known[0](a, b, out)
        return out
    numbers = H, Q, W, *_strides(a), *_strides(b), out.stride(1)
    block = min(1024, triton.next_power_of_2(W))
    made = _row_dots((B * H * Q, 1, 1), (a, b, out), numbers, Tiling(0, 0, 4, 3), BLOCK=block)
    launches.keep(key, made)
    return out


def layout_of(first: Tensor, *others: Tensor) -> tuple[Any, ...]:
    """All of tensors that a launch depends on: dtype and device are the first one's, and sizes
    beyond its own follow from the pass."""
    layouts = [(t.stride(), t.data_ptr() % 16) for t in (first, *others)]
    return first.shape, first.dtype, first.device, _precision(first), *layouts


def _strides(t: Tensor) -> tuple[int, ...]:
    """Over batch, heads and tokens."""
    return t.stride()[:3]


def _tiling(t: Tensor, half: Tiling = HALF) -> Tiling:
    return SINGLE if t.dtype == torch.float32 else half


def _precision(t: Tensor) -> str:
    """How operands are multiplied: float32 as torch is set to, the others know only one way."""
    return "tf32" if t.dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
