"""How much shared memory a block of threads has on the card that Triton compiles for, and launches
that mind it.

Sizes of tiles and the number of loads in flight were chosen on cards of compute capability 9.0.
Where a kernel takes more than the card has, `launch` takes the first of the given alternatives that
fits: fewer loads in flight first, then smaller tiles. What a kernel takes is read off the compiled
kernel, once per kernel, sizes and types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

# KiB that one block may have, by compute capability (CUDA C++ programming guide, table of technical
# specifications, less the one that CUDA keeps).
LIMITS = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
LEAST = 99  # of cards from 8.0 on
CHOSEN = 227 << 10  # what the sizes were chosen for

Changes = dict[str, int]  # of a kernel's sizes, by argument


def limit() -> int:
    """Bytes that a block may have on the current card; in the interpreter as on a 9.0.

    Other makers' cards keep the sizes as they are.
    """
    if knobs.runtime.interpret:
        return CHOSEN
    target = driver.active.get_current_target()
    return LIMITS.get(target.arch, LEAST) << 10 if target.backend == "cuda" else CHOSEN


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    alternatives: Sequence[Changes],
    *args: Any,
    **constants: Any,
) -> None:
    """Launch a kernel, with the first of the alternatives that fits where its sizes do not."""
    if (most := limit()) < CHOSEN:
        constants |= _fitting(kernel, grid, alternatives, most, args, constants)
    kernel[grid](*args, **constants)


_found: dict[Any, Changes] = {}  # changes by all that shared memory depends on


def _fitting(
    kernel: Any,
    grid: tuple[int, ...],
    alternatives: Sequence[Changes],
    most: int,
    args: tuple[Any, ...],
    constants: dict[str, Any],
) -> Changes:
    given = (_kind(value) for value in (*args, *constants.values()))
    key = kernel.__module__, kernel.__name__, most, *given
    if key in _found:
        return _found[key]
    least = 0
    for changes in ({}, *alternatives):
        if any(constants.get(name, size) < size for name, size in changes.items()):
            continue  # no size grows: tiles divide what they tile
        made = kernel.warmup(*args, grid=grid, **{**constants, **changes})
        if made.metadata.shared <= most:
            _found[key] = changes
            return changes
        least = made.metadata.shared
    raise RuntimeError(
        f"kernel {kernel.__name__} needs {least:,} bytes of shared memory, this card has {most:,}"
    )


def _kind(value: Any) -> Any:
    """What compiling sees of an argument."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    return value
