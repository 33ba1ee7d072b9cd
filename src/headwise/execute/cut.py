"""Which runs are trained at once: cut by ensembles, by arithmetic, memory and time."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from headwise.execute.memory import least_bytes
from headwise.lm.spec import Pretraining
from headwise.store import Store
from headwise.training.run import Run, ensemble_key

MOST_RUNS = 128  # in a chunk, each an open lock file; twice the largest ensemble
LONGEST = 1800.0  # seconds of a group, so that a lost one is no day's work
MOST_MEASURED = 200  # rows that a speed is taken from


def cost(run: Run) -> float:
    """Arithmetic of a whole run, for dealing work out."""
    return (
        run.shape.flops(run.task.tokens, batch=run.recipe.batch, training=True) * run.recipe.steps
    )


def chunks_of(runs: Sequence[Run], workers: int) -> list[list[Run]]:
    """Runs of one ensemble go together, split until none is more than half of a worker's share or
    MOST_RUNS; the longest first."""
    most = sum(map(cost, runs)) / workers / (2 if workers > 1 else 1)
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(ensemble_key(run), []).append(run)
    chunks = []
    for group in groups.values():
        parts = min(len(group), max(1, math.ceil(sum(map(cost, group)) / most - 0.01)))
        size = min(math.ceil(len(group) / parts), MOST_RUNS)
        chunks += [group[i : i + size] for i in range(0, len(group), size)]
    return sorted(chunks, key=lambda chunk: -sum(map(cost, chunk)))


def steps_of(run: Run | Pretraining) -> int:
    """Steps of a run."""
    return run.steps if isinstance(run, Pretraining) else run.recipe.steps


def groups_of(
    runs: Sequence[Any], slots: int, store: Store, memory: float = math.inf
) -> list[tuple[list[Any], float]]:
    """Groups with the FLOPs of each: runs of one ensemble go together, until a group is more than
    half of a worker's share, would take longer than LONGEST at the speed of the store's rows, or
    needs more than `memory`; the longest first. A decoder is alone."""
    decoders = [run for run in runs if isinstance(run, Pretraining)]
    rest = [run for run in runs if not isinstance(run, Pretraining)]
    speed = speed_of(store)
    groups: list[tuple[list[Any], float]] = [([run], run.flops * run.steps) for run in decoders]
    for chunk in chunks_of(rest, slots):
        total = sum(map(cost, chunk))
        parts = max(
            math.ceil(total / (speed * LONGEST)) if speed else 1,
            math.ceil(sum(map(least_bytes, chunk)) / memory),
        )
        size = math.ceil(len(chunk) / min(parts, len(chunk)))
        for i in range(0, len(chunk), size):
            part = chunk[i : i + size]
            groups.append((part, sum(map(cost, part))))
    return sorted(groups, key=lambda group: -group[1])


def speed_of(store: Store) -> float:
    """FLOPs per second as the store's latest rows measured them, the median; 0: there are none."""
    speeds = []
    for folder in itertools.islice(store.runs_path.glob("*"), MOST_MEASURED):
        row: dict[str, Any] = store.row(folder.name) or {}
        numbers = [row.get(key) or 0 for key in ("flops", "steps", "seconds")]
        if all(isinstance(number, int | float) and number > 0 for number in numbers):
            speeds.append(numbers[0] * numbers[1] / numbers[2])
    return statistics.median(speeds) if speeds else 0.0
