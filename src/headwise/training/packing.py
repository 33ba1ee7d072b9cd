"""Which runs train together, and how many: states -> ensembles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from headwise.model.transformer import build
from headwise.training.data import block_steps
from headwise.training.ensemble import family_of
from headwise.training.flat import ALIGN
from headwise.training.run import Run, ensemble_key
from headwise.training.state import State

LARGEST = 64  # models
CPU_CACHE = 32 << 20  # bytes of a step's activations and weights on a CPU
GPU_SHARE, GPU_BYTES = 0.4, 56 << 30  # of the free memory, and at most


def pack(states: Sequence[State], device: torch.device) -> list[list[State]]:
    """States that can be trained together: equal keys, equal epochs, the same kernels, no more than
    fit. Equal shapes come side by side."""
    groups: dict[Any, list[State]] = {}
    for state in states:
        key = (ensemble_key(state.run), state.epoch, family_of(state.run, device))
        groups.setdefault(key, []).append(state)
    ensembles = []
    for group in groups.values():
        group.sort(key=lambda state: state.run.shape.num_heads)
        count = math.ceil(len(group) / most_models(group[0].run, device))
        size = math.ceil(len(group) / count)
        ensembles += [group[i : i + size] for i in range(0, len(group), size)]
    return ensembles


def most_models(run: Run, device: torch.device) -> int:
    """How many models of this kind are trained together at most.

    On a CPU as many as keep a step's activations near the cache, and one alone when its bits would
    depend on its place. On a GPU as many as fit 40 % of the free memory and 56 GiB: a model's step
    was never slower in a larger ensemble. A model of a user's own is always alone.
    """
    if run.model is not None:
        return 1
    recipe, tokens = run.recipe, run.task.tokens
    step = run.shape.activation_bytes(tokens, batch=recipe.batch) + 20 * run.shape.params
    if device.type == "cpu":
        return max(1, min(LARGEST, CPU_CACHE // step)) if _fills_lines(run) else 1
    free, _ = torch.cuda.mem_get_info(device)
    # what an earlier ensemble left to us
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    family = family_of(run, device)
    model = 4 * step if family is None else family.model_bytes(run)
    block = block_steps(run.task, recipe) * recipe.batch * tokens * max(2, run.task.in_dim) * 4
    data = 4 * block  # drawn, and in place
    return max(1, min(LARGEST, int(min(GPU_SHARE * free, GPU_BYTES)) // (model + data)))


def _fills_lines(run: Run) -> bool:
    """Whether one model's activations and gradients fill whole cache lines, so that its neighbours'
    start on one: the matrix library takes another path, with other bits, where they do not, and for
    a matrix of one row or column (the read-out is padded)."""
    with torch.device("meta"):
        matrices = [
            p
            for name, p in build(run.shape).named_parameters()
            if name.endswith("weight") and p.ndim == 2 and "read_out" not in name
        ]
    sizes = [run.recipe.batch * run.task.tokens, *(p.numel() for p in matrices)]
    return not any(size % ALIGN for size in sizes) and all(min(p.shape) > 1 for p in matrices)
