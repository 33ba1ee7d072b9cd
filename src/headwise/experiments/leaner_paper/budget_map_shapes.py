"""The grid of `map`: its settings, and every shape of it at one exact budget."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwise.errors import UsageError, nearest
from headwise.experiments.leaner_paper.shared import PAPER, QUICK
from headwise.experiments.settings import OverTasks, check_lists
from headwise.experiments.shapes import shape_for
from headwise.shape import Shape
from headwise.training.run import Recipe, Run

if TYPE_CHECKING:
    from headwise.model.own import Model
    from headwise.tasks.task import Task

BUDGETS = ("params", "flops")


@dataclass(frozen=True, kw_only=True)
class MapSettings(OverTasks):
    """The grid, and the base shape that sets the budget."""

    heads: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]
    base: tuple[int, ...]  # layers, heads, rank, feed-forward: all others meet its budget
    budget: str = "params"
    init: str = "normal"
    ffn_dim: int = 0  # follows from the budget

    def idle(self) -> dict[str, str]:
        return {**super().idle(), "ffn_dim": "it follows from base and budget"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lists(self, ("heads", "ranks", "depths"))
        if self.budget not in BUDGETS:
            raise UsageError(f"unknown budget {self.budget!r}; {nearest(self.budget, BUDGETS)}")
        if len(self.base) != 4 or min(self.base) < 1:
            raise UsageError(
                f"base must be layers,heads,rank,feed-forward, got {','.join(map(str, self.base))}"
            )


PRESETS = {
    "quick": MapSettings(
        **QUICK,
        tasks=("farthest",),
        heads=(1, 2, 4, 8),
        ranks=(4, 8, 16, 32),
        depths=(1, 2),
        base=(2, 4, 8, 128),
    ),
    "paper": MapSettings(
        **PAPER,
        tasks=("farthest",),
        heads=(1, 2, 4, 8, 16),
        ranks=(4, 8, 16, 32, 64),
        depths=(1, 2, 4),
        base=(4, 4, 16, 256),
    ),
}


# ---- shapes at one budget


def cost(shape: Shape, task: Task, budget: str) -> int:
    """What the budget counts."""
    return shape.params if budget == "params" else shape.flops(task.tokens)


def cells(task: Task, s: MapSettings) -> list[Shape]:
    """Every shape of the grid at the base's cost.

    Its feed-forward is the whole number whose cost comes nearest. A shape with less than a quarter
    of the width left for the feed-forward is left out.
    """
    target = cost(shape_for(task, s.dim, *s.base), task, s.budget)
    grid = [(depth, heads, rank) for depth in s.depths for heads in s.heads for rank in s.ranks]
    out = []
    for depth, heads, rank in grid:
        narrow = shape_for(task, s.dim, depth, heads, rank, 1)
        least = cost(narrow, task, s.budget)
        step = cost(narrow.replace(ffn_dim=2), task, s.budget) - least
        ffn_dim = round(1 + (target - least) / step)
        if ffn_dim >= max(1, s.dim // 4):
            out.append(shape_for(task, s.dim, depth, heads, rank, ffn_dim))
    if not out:
        raise UsageError(
            "no shape of heads, ranks and depths meets the base's budget with a feed-forward of "
            f"{s.dim // 4}; base {','.join(map(str, s.base))}"
        )
    return out


def distinct(task: Task, s: MapSettings, shapes: Sequence[Shape]) -> list[Shape]:
    """The shapes for which a model of one's own builds something else than for those before. All
    of them where the model is headwise's."""
    if s.model is None:
        return list(shapes)
    return list(_distinct(s.model, task, s.run(shapes[0], task, 0).recipe, tuple(shapes)))


@functools.lru_cache(64)  # a map asks for its runs again after every round
def _distinct(
    model: Model, task: Task, recipe: Recipe, shapes: tuple[Shape, ...]
) -> tuple[Shape, ...]:
    from headwise.training.own import module_digest

    first: dict[str, Shape] = {}
    for shape in shapes:
        first.setdefault(module_digest(Run(shape, task, recipe, 0, model)), shape)
    return tuple(first.values())
