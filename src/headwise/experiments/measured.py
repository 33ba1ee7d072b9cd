"""Rows as measured maps for the explorer: for each task the held-out loss over heads, rank and
depth, as plain values. Standard library only."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from headwise.errors import UsageError
from headwise.experiments.best import Ranking, ranking
from headwise.experiments.leaner_paper.budget_map_points import Cell, summary
from headwise.experiments.points import ONE_MODEL, labelled
from headwise.experiments.shapes import shape_of_row
from headwise.rows import Row
from headwise.shape import Shape
from headwise.stats import group

MOST_CONTEXT = 2048  # tokens, unless asked for or fewer positions
PLACE = ("depth", "num_heads", "head_dim")
# What makes no other model: its place on the map, and the rate, which is tuned.
ASIDE = {*PLACE, "lr"}
# What a field is unless it is given; None where it must be given or follows from others.
DEFAULTS: dict[str, Any] = {
    f.name: None if f.default is dataclasses.MISSING else f.default
    for f in dataclasses.fields(Shape)
}
TOLD_APART = (
    "Framed: the best; with dashes: not told apart from it (95 %, all comparisons together)."
)
MOST_CELLS = 2_000  # of a report's explorer: the largest maps up to so many


TOKENS = ("task_points", "task_tokens", "length")  # columns that say how long a sequence was


def measured_page(named: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """What the explorer shows of the rows of several experiments, by name: the largest maps first,
    and the best shape of the first, in sequences as long as those it was trained on. Refused where
    there is none."""
    found = []
    for name, rows in named.items():
        # What differs between experiments would stand in the name of every map.
        with contextlib.suppress(UsageError):
            found += [
                {**task, "name": f"{name}: {task['name']}", "tokens": _tokens(rows)}
                for task in measured(rows)
            ]
    found.sort(key=lambda task: -len(task["cells"]))
    if not found:
        raise UsageError("there is no measured shape in these experiments")
    shown, cells = found[:1], len(found[0]["cells"])
    for task in found[1:]:
        cells += len(task["cells"])
        shown += [task] if cells <= MOST_CELLS else []
    return page_values(best_shape(shown[0]), shown, shown[0]["tokens"])


def _tokens(rows: Sequence[Row]) -> int | None:
    """How many tokens a sequence of these rows has; None: they do not say, or differ."""
    known = {row[column] for row in rows for column in TOKENS if isinstance(row.get(column), int)}
    return known.pop() if len(known) == 1 else None


def page_values(
    shape: Shape,
    tasks: Sequence[dict[str, Any]],
    context: int | None = None,
    batch: int = 1,
    dtype: str = "bf16",
) -> dict[str, Any]:
    """What the explorer's page is made of: a shape, what its costs are counted at, and maps."""
    most = min(MOST_CONTEXT, shape.num_positions or MOST_CONTEXT)
    return {
        "defaults": DEFAULTS,
        "shape": DEFAULTS | plain(shape),
        "at": {"context": most if context is None else context, "batch": batch, "dtype": dtype},
        "tasks": list(tasks),
    }


def measured(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A map per task and setting, those with most cells first; refused where rows hold none."""
    known = [row for row in rows if row.get("task") and "dim" in row and "held_out" in row]
    if not known:
        raise UsageError("there is no measured shape among these rows: they need task and held_out")
    maps = [
        _map(name, of_setting)
        for (task,), of_task in group(labelled(known), "task").items()
        for name, of_setting in _settings(task, of_task).items()
    ]
    return sorted(maps, key=lambda found: -len(found["cells"]))


def _settings(task: str, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of a task by what differs between runs at one place beside seed and rate, in words:
    one map shows one of those."""
    names = {*ONE_MODEL, *(key for row in rows for key in row if key.startswith("task_"))}
    names = {name for name in names - ASIDE if any(name in row for row in rows)}
    by_place = group(list(rows), *PLACE).values()
    differing = sorted(
        name
        for name in names
        if any(len({str(row.get(name)) for row in at_place}) > 1 for at_place in by_place)
    )
    found: dict[str, list[Row]] = {}
    for row in rows:
        words = [f"{name.removeprefix('task_')} {row.get(name)}" for name in differing]
        found.setdefault(", ".join([task, *words]), []).append(row)
    return found


def _map(name: str, rows: list[Row]) -> dict[str, Any]:
    """One map as plain values: its cells, and what it is in a sentence."""
    cells = summary(rows)
    first = {place: of_place[0] for place, of_place in group(rows, *PLACE).items()}
    order = ranking(cells)
    widths = sorted({cell.dim for cell in cells})
    single = any(cell.one_seed for cell in cells)
    note = f"Width {' and '.join(map(str, widths))}, {len(cells)} shapes, {len(rows):,} runs."
    note += f" {TOLD_APART}" if order.best else " No best can be told apart."
    note += " In brackets: one seed." if single else ""
    return {
        "name": name,
        "note": note,
        "cells": [
            _cell(cell, shape_of_row(first[cell.depth, cell.heads, cell.rank]), order)
            for cell in cells
        ],
    }


def _cell(cell: Cell, shape: Shape, order: Ranking[Cell]) -> dict[str, Any]:
    """One cell as plain values."""
    mark = ""
    if order.best is not None:
        alike = cell in order.alike
        mark = "best" if cell is order.best else "alike" if alike else ""
    half = None if cell.low is None or cell.high is None else (cell.high - cell.low) / 2
    return {
        "num_heads": cell.heads,
        "head_dim": cell.rank,
        "depth": cell.depth,
        "dim": cell.dim,
        "ffn_dim": cell.ffn,
        "params": cell.params,
        "loss": cell.held_out,
        "half": half,
        "n": cell.n,
        "mark": mark,
        "shape": plain(shape),
    }


def plain(shape: Shape) -> dict[str, Any]:
    """The fields of a shape that are not as their defaults, as plain values."""
    return {name: value for name, value in shape.spec().items() if value != DEFAULTS[name]}


def best_shape(task: dict[str, Any]) -> Shape:
    """The shape with the smallest loss of a map."""
    known = [cell for cell in task["cells"] if cell["loss"] is not None] or task["cells"]
    return Shape.of(min(known, key=lambda cell: cell["loss"] or 0.0)["shape"])
