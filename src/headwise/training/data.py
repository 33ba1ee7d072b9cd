"""The data a run sees: a pure function of its seed and the block of steps; and what it is evaluated
on."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.seeds import derive, generator_of
from headwise.tasks.task import Task
from headwise.training.run import Recipe, Run

HELD_OUT_SEED = 0x48454C44  # one held-out set per task, the same for every run
HELD_OUT_BATCH = 128  # its sequences at a time; a multiple of flat.ALIGN, whatever is trained on


def block_steps(task: Task, recipe: Recipe) -> int:
    """How many steps' data are drawn at once: a divisor of the epoch and of a stage of the task, at
    most 25 and at most 64 MiB."""
    per_step = 8 * recipe.batch * task.tokens * max(1, task.in_dim)
    most = max(1, min(25, (64 << 20) // per_step))
    return max(k for k in range(1, most + 1) if math.gcd(recipe.epoch, task.stage) % k == 0)


def draw_block(
    run: Run, block: int, device: torch.device, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one block of steps of one run: (steps, batch, tokens, dim); written to
    tensors of that size, if there are."""
    recipe, steps = run.recipe, block_steps(run.task, run.recipe)
    first = block * steps
    if recipe.protocol == "replay":
        block %= recipe.epoch // steps
    if recipe.protocol == "original":
        drawn = run.task.original(
            run.seed, recipe.batch, recipe.epoch, first % recipe.epoch, steps, device
        )
    else:
        generator = generator_of(device, derive(run.seed, "data", block))
        if into is not None:
            run.task.fill(*into, generator, first)
            return into
        drawn = run.task.sample(generator, steps * recipe.batch, first)
    x, target = (t.unflatten(0, (steps, -1)) for t in drawn)
    return (x, target) if into is None else (into[0].copy_(x), into[1].copy_(target))


def held_out_batches(
    task: Task, count: int, device: torch.device, evaluated_on: str = ""
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of at least `count` held-out sequences, batch by batch; of the draw that
    all runs share, or of another one by its name."""
    purpose = ("held out", evaluated_on) if evaluated_on else ("held out",)
    for batch in range(math.ceil(count / HELD_OUT_BATCH)):
        generator = generator_of(device, derive(HELD_OUT_SEED, *purpose, batch))
        yield task.sample(generator, HELD_OUT_BATCH)
