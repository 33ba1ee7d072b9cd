"""Attention of large rank: what both ways of computing it share.

`Span` says which queries see which keys, `Backward` names the tensors of a backward pass, and a few
functions count tiles and cut batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 128  # side of a tile; the Triton kernels keep weights in whole tiles
WORK = 1 << 30  # bytes of temporary memory: scores and what is made of them at one time
LONG = 8192  # sequences longer than this get a quarter of WORK


@dataclass(frozen=True)
class Span:
    """Which keys queries see: all, those up to their own place (causal), those nearer than
    `window`.

    Query i stands at key i + offset. The offset is negative where only later keys are passed.
    """

    queries: int
    keys: int
    offset: int
    causal: bool
    window: int  # 0: none

    @classmethod
    def of(cls, q: Tensor, k: Tensor, causal: bool, window: int) -> Span:
        """The last query stands at the last key."""
        queries, keys = q.shape[2], k.shape[2]
        return cls(queries, keys, keys - queries, causal, window if 0 < window < keys else 0)

    @property
    def padded_queries(self) -> int:
        """Queries in whole tiles."""
        return padded(self.queries)

    @property
    def padded_keys(self) -> int:
        """Keys in whole tiles."""
        return padded(self.keys)

    @property
    def work(self) -> int:
        """Bytes of temporary memory, unless another number is given."""
        return WORK if self.keys <= LONG else WORK // 4

    def seen(self, device: torch.device) -> Tensor | None:
        """Which query sees which key, (queries, keys), true where seen; None when all are seen."""
        if not self.causal and not self.window:
            return None
        query = torch.arange(self.queries, device=device).unsqueeze(1) + self.offset
        key = torch.arange(self.keys, device=device)
        seen = key <= query if self.causal else torch.ones_like(key - query, dtype=torch.bool)
        return seen & ((key - query).abs() < self.window) if self.window else seen

    def blocks(self, size: int) -> list[tuple[int, int]]:
        """Queries, [first, last), of each block."""
        return [(at, min(at + size, self.queries)) for at in range(0, self.queries, size)]

    def part(self, first: int, last: int) -> Span:
        """What queries [first, last) see."""
        return Span(last - first, self.keys, self.offset + first, self.causal, self.window)

    def keys_of(self, first: int, last: int, block: int) -> tuple[int, int]:
        """Keys that some query of [first, last) sees, in whole blocks of keys."""
        low, high = 0, self.keys
        if self.window:
            low = max(0, first + self.offset - self.window + 1)
        if self.causal:
            high = last + self.offset
        elif self.window:
            high = min(self.keys, last + self.offset + self.window - 1)
        return low // block * block, min(self.keys, -(-high // block) * block)

    def queries_of(self, first: int, last: int) -> tuple[int, int]:
        """Which queries see some of keys [first, last), in whole tiles; none when the second number
        is not the larger."""
        # The other way round: a causal mask hides the queries before the keys, a window those far
        # behind.
        low, high = 0, self.queries
        if self.causal:
            low = max(0, first - self.offset)
        elif self.window:
            low = max(0, first - self.offset - (self.window - 1))
        if self.window:
            high = min(self.queries, last - 1 - self.offset + self.window)
        return low // TILE * TILE, min(self.queries, padded(max(0, high)))


class Backward(NamedTuple):
    """The tensors of a backward pass; the first axes are those of the way that computes it."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor  # the gradient of the outputs
    lse: Tensor  # log sum exp of each query's scores
    delta: Tensor  # inner product of each query's output and its gradient
    dq: Tensor  # written
    dk: Tensor
    dv: Tensor

    def part(self, index: slice) -> Backward:
        """The same of some sequences."""
        return Backward(*(t[index] for t in self))


def padded(n: int) -> int:
    """Rows or columns of whole tiles."""
    return -(-n // TILE) * TILE


def straight(t: Tensor) -> Tensor:
    """The tensor, copied if the numbers of a row do not lie side by side.

    Not by `contiguous`, which leaves rows of one number as they are.
    """
    return t if t.stride(-1) == 1 else t.clone(memory_format=torch.contiguous_format)


def sums_type(dtype: torch.dtype) -> torch.dtype:
    """What scores and sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pieces(count: int, most: int) -> list[slice]:
    """Slices of about equal length, none longer than `most` or one."""
    if not count:
        return []
    size = math.ceil(count / math.ceil(count / max(1, most)))
    return [slice(at, min(at + size, count)) for at in range(0, count, size)]
