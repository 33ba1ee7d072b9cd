"""Kernels in Triton that mind how much shared memory a card has.

Sizes of tiles and the number of loads in flight were chosen on cards of compute capability 9.0,
whose blocks have 227 KiB; others have 99 or 163. Where a kernel takes more than the card has, it is
launched with the first of the given alternatives that fits: fewer loads in flight first, then
smaller tiles. What it takes is read off the compiled kernel, once per kernel, sizes and types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

from headwise.kernels.cards import shared_bytes

CHOSEN = shared_bytes((9, 0))  # what the sizes were chosen for
Changes = dict[str, int]  # of a kernel's sizes, by argument
Grid = tuple[int, ...] | Callable[[Any], tuple[int, ...]]

FEWER_LOADS: tuple[Changes, ...] = ({"STAGES": 2}, {"STAGES": 1})  # of loops that say how many
FEWER_STAGES: tuple[Changes, ...] = ({"num_stages": 2}, {"num_stages": 1})  # of all others


def smaller(fewer: tuple[Changes, ...], name: str, *sizes: int) -> tuple[Changes, ...]:
    """Fewer loads, then with the fewest one size made smaller.

    >>> smaller(FEWER_STAGES, "BC", 32)
    ({'num_stages': 2}, {'num_stages': 1}, {'num_stages': 1, 'BC': 32})
    """
    return *fewer, *({**fewer[-1], name: size} for size in sizes)


def limit() -> int:
    """Bytes that a block may have on the current card; in the interpreter, and on other makers'
    cards, what the sizes were chosen for."""
    if knobs.runtime.interpret:
        return CHOSEN
    target = driver.active.get_current_target()
    return shared_bytes(divmod(target.arch, 10)) if target.backend == "cuda" else CHOSEN


def gives_way(alternatives: Sequence[Changes]) -> Callable[[Any], Fitted]:
    """A kernel that is launched with one of these where its sizes take more than the card has."""
    return lambda kernel: Fitted(kernel, alternatives)


class Fitted:
    """A kernel and its alternatives, launched as any: `kernel[grid](...)`. A grid that depends on a
    size that may give way is a function of the sizes."""

    def __init__(self, kernel: Any, alternatives: Sequence[Changes]) -> None:
        self.kernel, self.alternatives = kernel, alternatives
        self.found: dict[Any, Changes] = {}  # by all that shared memory depends on

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Grid, *args: Any, **constants: Any) -> None:
        if (most := limit()) < CHOSEN:
            constants |= self._changes(grid, most, args, constants)
        self.kernel[grid](*args, **constants)

    def _changes(
        self, grid: Grid, most: int, args: tuple[Any, ...], constants: dict[str, Any]
    ) -> Changes:
        key = most, *(_kind(value) for value in args), *map(_kind, constants.values())
        if key in self.found:
            return self.found[key]
        least = 0
        for changes in ({}, *self.alternatives):
            if any(constants.get(name, size) < size for name, size in changes.items()):
                continue  # no size grows: tiles divide what they tile
            made = self.kernel.warmup(*args, grid=grid, **{**constants, **changes})
            least = made.metadata.shared
            if least <= most:
                self.found[key] = changes
                return changes
        raise RuntimeError(
            f"kernel {self.kernel.__name__} needs {least:,} bytes of shared memory per block, this "
            f"card has {most:,}"
        )


def _kind(value: Any) -> Any:
    """What compiling sees of an argument."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    return value
