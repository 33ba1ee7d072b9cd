"""What `map` makes of rows: a cell per shape and task, and what is asked of cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headwise.experiments.leaner_paper.budget_map_shapes import BUDGETS
from headwise.experiments.leaner_paper.shared import Conditioned, kappas
from headwise.experiments.points import Against, baseline_of, groups, labelled, plural
from headwise.experiments.tuning import rows_at_best_rate, tuned
from headwise.rows import Row
from headwise.stats import Mean, group, rank_correlation

PATHS = ("split", "widen", "trade")
# What the loss may go with, within one depth: over all depths heads that help in four layers and
# hurt in one cancel. A condition number is not among them: cells of another min(tokens, heads x
# rank) have matrices of another size, and its order is then that size's.
PREDICTORS = ("rank", "heads")


FEWEST = 8  # cells of a rank correlation


@dataclass(frozen=True, kw_only=True)
class Cell(Conditioned, Against):
    """One shape on one task: its tuned rate, its loss over the other seeds, and where it stands."""

    task: str
    depth: int
    heads: int
    rank: int
    ffn: int
    dim: int
    params: int
    flops: int | None
    model: str | None = None  # of one's own; its parameters are as many as it has
    off: float | None = None  # how far off the budget
    paths: str | None = None  # which of PATHS it lies on
    advice: str | None = None  # whose advice it is

    @property
    def name(self) -> str:
        return f"{self.heads} x {self.rank} in {plural(self.depth, 'layer')}"


def summary(rows: list[Row]) -> list[Cell]:
    """One point per task and cell."""
    out = []
    shapes = group(labelled(rows), "task", "depth", "num_heads", "head_dim")
    for (task, depth, heads, rank), rows_of_point in shapes.items():
        first = rows_of_point[0]
        out.append(
            Cell(
                task=task,
                depth=depth,
                heads=heads,
                rank=rank,
                ffn=first["ffn_dim"],
                dim=first["dim"],
                params=first["params"],
                flops=first["flops"],
                model=first.get("model"),
                **baseline_of(rows_of_point),
                **tuned(rows_of_point),
                **kappas(rows_at_best_rate(rows_of_point)),
            )
        )
    return [cell for of_task in groups(out, "task").values() for cell in _placed(of_task)]


def _placed(cells: list[Cell]) -> list[Cell]:
    """The cells of one task with how far each is off the budget that most of them share, the paths
    it lies on, and whose advice it is.

    The base of the paths is the deepest cell whose heads have the model's width between them and
    whose rank is nearest to 16.
    """
    if cells[0].model:  # it is as large as it is, and what it does with heads is its own business
        return cells
    budget = _budget_of(cells)
    target = sorted(getattr(cell, budget) for cell in cells)[len(cells) // 2]
    deepest = max(cell.depth for cell in cells)
    dim = cells[0].dim
    square = [cell for cell in cells if cell.depth == deepest and cell.heads * cell.rank == dim]
    base = min(square, key=lambda cell: abs(cell.rank - min(16, dim // 4)), default=None)
    out = []
    for cell in cells:
        paths = [] if base is None else _paths_through(cell, base)
        advice = None
        if (cell.depth, cell.heads, cell.rank) == (deepest, 1, dim):
            advice = "the rank paper"
        elif "trade" in paths and 2 * cell.depth == deepest:
            advice = "the leaner paper"
        off = getattr(cell, budget) / target - 1
        out.append(replace(cell, off=off, paths=", ".join(paths) or None, advice=advice))
    return out


def _budget_of(cells: list[Cell]) -> str:
    """The budget that the cells share: the count in which they differ least."""
    counts = {key: [getattr(cell, key) for cell in cells] for key in BUDGETS}
    return min(counts, key=lambda key: max(counts[key]) / min(counts[key]))


def _paths_through(cell: Cell, base: Cell) -> list[str]:
    """Which ways to add heads to the base lead to a cell, or from it to the base."""
    out = []
    if cell.depth == base.depth and cell.heads * cell.rank == cell.dim:
        out.append("split")
    if cell.depth == base.depth and cell.rank == base.rank:
        out.append("widen")
    if cell.rank == base.rank and cell.heads * cell.depth == base.heads * base.depth:
        out.append("trade")
    return out


# ---- what is asked of cells


def loss_of(cell: Cell) -> float:
    """The loss of a cell that has one."""
    return math.inf if cell.held_out is None else cell.held_out


def ends_of(cells: Sequence[Cell], path: str) -> tuple[Cell, Cell] | None:
    """A path's cells of fewest and of most heads."""
    found = along(cells, path)
    return (found[0], found[-1]) if len(found) > 1 else None


def along(cells: Sequence[Cell], path: str) -> list[Cell]:
    """A path's cells by heads."""
    there = [cell for cell in cells if cell.paths and path in cell.paths]
    return sorted(there, key=lambda cell: cell.heads)


def goes_with(cells: Sequence[Cell], field: str) -> Mean:
    """The rank correlation of the loss with a field of the cells; of few cells none, since an
    interval over so few says nothing."""
    if len(cells) < FEWEST:
        return Mean(math.nan, None, None, len(cells))
    return rank_correlation([getattr(c, field) for c in cells], [loss_of(c) for c in cells])


def bare_task(cell: Cell) -> str:
    """A task's name without the model's."""
    return cell.task.removesuffix(f" with {cell.model}")
