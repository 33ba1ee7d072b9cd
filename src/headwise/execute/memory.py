"""What a run needs at the least, beside what the machine has: a run that can never fit is refused
before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headwise.device import memory_of
from headwise.errors import UsageError
from headwise.lm.spec import Pretraining
from headwise.training.run import Run

if TYPE_CHECKING:
    import torch


def least_bytes(run: Run | Pretraining, parts: int = 1) -> int:
    """Bytes that no way to train a run does without.

    Counted are weights, gradients and two moments, the data of one step in `parts`, the table of
    learning rates while it is made, what each layer keeps of its input in 16 bits, and of a decoder
    the log-odds. Kernels, caches and whatever else a step needs come on top.
    """
    if isinstance(run, Pretraining):
        sequences = -(-run.rows // parts)
        tokens = sequences * run.length
        step = tokens * (8 + 4 * run.shape.vocab_size)
    else:
        tokens = run.recipe.batch * run.task.tokens
        step = 8 * tokens * max(1, run.task.in_dim) + 64 * run.recipe.steps
        if run.model is not None:
            return 16 * run.params + step
    return 16 * run.shape.params + step + 2 * tokens * run.shape.dim * run.shape.depth


def check_memory(runs: Sequence[Run | Pretraining], device: torch.device, parts: int = 1) -> None:
    """Refuse runs that need more memory than the device has."""
    if not runs:
        return
    need, largest = max(((least_bytes(run, parts), run) for run in runs), key=lambda pair: pair[0])
    shape = largest.shape
    sizes = "length, batch_tokens" if isinstance(largest, Pretraining) else "tokens, batch"
    check_fits(
        need,
        device,
        f"a run of {shape.params:,} parameters",
        f"dim {shape.dim}, depth {shape.depth}, ffn_dim {shape.ffn_dim}, {sizes} or steps",
    )


def check_fits(need: int, device: torch.device, what: str, smaller: str) -> None:
    """Refuse what needs more memory than the device has, and say what to make smaller."""
    there = memory_of(device)
    if need > there:
        raise UsageError(
            f"{what} needs at least {need / 2**30:,.1f} GiB of memory, {device} has "
            f"{there / 2**30:,.1f} GiB; smaller: {smaller}"
        )
