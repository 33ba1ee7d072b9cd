"""Runs that no experiment of a store asked for, side by side: those trained in Python and added to
it, and those of an experiment's earlier settings.

    rows = train([Run(shape, task, recipe, seed) for seed in range(3)])
    for row in rows: Store("mine").add(row)
    headwise report --store mine

Nothing is held equal but what you held equal: each shape is named by what sets it apart. Seeds of
one are a point with an interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwise.experiments.base import Experiment, Settings
from headwise.experiments.best import TOGETHER, best_in_words
from headwise.experiments.points import (
    ONE_MODEL,
    Measured,
    errors_of,
    groups,
    labelled,
    plural,
)
from headwise.experiments.pretrained import IN_HEADS, WORDS
from headwise.experiments.shapes import heads_in_words, shape_of_row
from headwise.rows import Row, Specified
from headwise.show.figure import Range, RangeFigure, RangePanel

MOST_DRAWN = 40  # shapes of a task, the best first


@dataclass(frozen=True, kw_only=True)
class Other(Measured):
    """One shape trained one way on one task."""

    task: str
    name: str
    params: int | None
    train_best: float | None = None
    zero: int = 0


def specification(row: Row) -> dict[str, str]:
    """The columns that say what a run is but for its seed, as text."""
    own = [c for c in row if c.startswith(("task_", "model_")) or c in ("model", "positions")]
    return {c: repr(row[c]) for c in dict.fromkeys((*ONE_MODEL, *own)) if c in row}


def summary(rows: list[Row]) -> list[Other]:
    """One point per task and specification, the best of a task first."""
    by_task: dict[str, dict[str, list[Row]]] = {}
    for row in labelled([row for row in rows if "task" in row and "held_out" in row]):
        key = repr(sorted(specification(row).items()))
        by_task.setdefault(row["task"], {}).setdefault(key, []).append(row)
    out: list[Other] = []
    for task, found in sorted(by_task.items()):
        points = _points(task, list(found.values()))
        out += sorted(points, key=lambda p: (p.held_out is None, p.held_out, p.name))
    return out


def _points(task: str, same: list[list[Row]]) -> list[Other]:
    first = [rows[0] for rows in same]
    known = [specification(row) for row in first]
    differ = [c for c in known[0] if len({one.get(c) for one in known}) > 1]
    # What the heads' words say anyhow is not said again.
    further = [c for c in differ if c not in IN_HEADS]
    return [
        Other(
            task=task,
            name=_in_words(rows[0], further),
            params=rows[0].get("params"),
            **errors_of(rows),
        )
        for rows in same
    ]


def _in_words(row: Row, columns: Sequence[str]) -> str:
    said = [WORDS.get(c, f"{c} {{}}").format(row.get(c)) for c in columns]
    return ", ".join([heads_in_words(shape_of_row(row)), *said])


def _named(point: Other) -> str:
    return point.name


def answer(points: Sequence[Other]) -> str:
    """The best of every task."""
    said = []
    for (task,), of_task in groups(points, "task").items():
        if len(of_task) == 1:
            said.append(f"on {task} {of_task[0].name} has an error of {of_task[0].error}")
        else:
            said.append(f"on {task}: {best_in_words(of_task, _named, 'shapes', 'error')}")
    return "; ".join(said[:2]) + (f"; and {len(said) - 2} more tasks" if len(said) > 2 else "")


def headline(points: Sequence[Other]) -> list[str]:
    """How many there are of every task."""
    return [
        f"{task}: {plural(len(of_task), 'shape')}, {plural(sum(p.n for p in of_task), 'run')}"
        for (task,), of_task in groups(points, "task").items()
    ]


def figure(points: Sequence[Other]) -> RangeFigure:
    """A panel per task: the errors of its shapes, the smallest first."""
    panels = []
    for (task,), of_task in groups(points, "task").items():
        known = [p for p in of_task if p.held_out is not None][:MOST_DRAWN]
        drawn = [_range(p) for p in known if p.held_out is not None]
        left = len(of_task) - len(drawn)
        more = f", the best {len(drawn)} of {len(of_task)}" if left > 0 else ""
        panels.append(RangePanel(title=f"{task}{more}", x_label="held-out error", ranges=drawn))
    return RangeFigure(title="Runs that no experiment asked for", panels=panels)


def _range(p: Other) -> Range:
    return Range(
        name=p.name,
        label="held out",
        colour=0,
        mean=p.held_out or 0.0,
        low=p.low,
        high=p.high,
        hollow=p.one_seed,
        text=f"{plural(p.n, 'seed')}, {p.cell('params')} parameters",
    )


def _no_runs(settings: Settings) -> list[Specified]:
    """They were made elsewhere."""
    return []


EXPERIMENT = Experiment(
    name="other_runs",
    question="Which of the runs that no experiment asked for has the smallest error?",
    about="runs made in Python, and those of an experiment's earlier settings",
    presets={},
    columns=(
        ("task", "task"),
        ("name", "what sets it apart"),
        ("params", "parameters"),
        ("held_out", "held-out error"),
        ("n", "n"),
        ("diverged", "diverged"),
        ("zero", "runs at zero"),
        ("train_best", "smallest training loss"),
    ),
    main_columns=("name", "held_out", "params", "task"),
    caption=(
        "Held-out error, mean over seeds with its 95 % interval; hollow: one seed. "
        f"{TOGETHER} Budgets differ unless you made them equal: see the table."
    ),
    runs=_no_runs,
    summary=summary,
    headline=headline,
    answer=answer,
    figure=figure,
)
