"""A finished row as trackers see a run: configuration, history, summary. Standard library only."""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from headwise.rows import MEASURED, Row, columns_of

CURVES = ("curve", "held_out_curve")


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A finished run: what it was, its curves, and what came out.

    id         the run's id, the same in every store and tracker
    name       readable, and different for every run
    group      the experiment it was asked for under; empty: none
    config     the run's specification, by the names of a row's columns
    history    (step, values) in rising order; a step is how many were made until then
    summary    the row's other values: results, speed, where it ran
    finished   when, in seconds since 1970; 0: the row does not say
    """

    id: str
    name: str
    group: str
    config: Mapping[str, Any]
    history: tuple[tuple[int, Mapping[str, float]], ...]
    summary: Mapping[str, Any]
    finished: float

    @property
    def last_step(self) -> int:
        """Where the history ends; 0: there is none."""
        return self.history[-1][0] if self.history else 0

    @property
    def results(self) -> dict[str, float]:
        """The numbers of the summary, for trackers that keep nothing else."""
        return {key: float(v) for key, v in self.summary.items() if _is_number(v)}


class Tracker(Protocol):
    """Whatever takes a finished run: a function, or an object that can be called."""

    def __call__(self, run: TrackedRun, /) -> bool | None:
        """Keep a run. False says that the tracker has it already."""
        ...


def tracked(row: Row, spec: Mapping[str, Any] | None = None, group: str = "") -> TrackedRun:
    """A row as a tracked run. Without the run's specification, as where the row was taken from a
    file, its plain values are configuration and summary both.

    >>> row = {"id": "7b", "seed": 3, "epoch": 50, "curve": [0.9, 0.5], "held_out": 0.4}
    >>> run = tracked(row | {"held_out_curve": [[2, 0.4]]})
    >>> run.history
    ((50, {'train_loss': 0.9}), (100, {'train_loss': 0.5, 'held_out': 0.4}))
    """
    try:
        known = columns_of(spec) if spec else {}
    except (KeyError, AttributeError):  # of a class of one's own that is computed
        known = {}
    config = {key: row[key] for key in row if key in known}
    summary = {key: row[key] for key in row if key not in ("id", *CURVES, *config)}
    if not known:
        plain = (str, int, float, type(None))
        config = {
            key: value
            for key, value in summary.items()
            if isinstance(value, plain) and key not in MEASURED | {"status"}
        }
    return TrackedRun(
        id=str(row["id"]),
        name=_name(row),
        group=group,
        config=config,
        history=_history(row),
        summary=summary,
        finished=_time(row.get("finished")),
    )


def _history(row: Row) -> tuple[tuple[int, dict[str, float]], ...]:
    """Training loss and held-out error by the number of steps made.

    A run of many small models notes its training loss once per epoch, as the mean over it, and
    counts its evaluations in epochs too. A decoder's points are means over `curve_every` steps, and
    its evaluations count steps. The mean over steps a to b stands at b.
    """
    decoder = "curve_every" in row
    every = _count(row.get("curve_every" if decoder else "epoch"))
    curve, evaluations = (row.get(key) for key in CURVES)
    if not every or not isinstance(curve, list) or not isinstance(evaluations, list | tuple):
        return ()
    # The last point of a decoder's curve may be of fewer steps.
    most = _count(row.get("steps_done")) if decoder else 0
    steps: dict[int, dict[str, float]] = {}
    for i, loss in enumerate(curve):
        if _is_number(loss):  # None where it was not finite
            end = min((i + 1) * every, most or sys.maxsize)
            steps.setdefault(end, {})["train_loss"] = loss
    error, unit = ("bits_per_byte", 1) if decoder else ("held_out", every)
    for count, value in evaluations:
        if _count(count) and _is_number(value):
            steps.setdefault(count * unit, {})[error] = value
    return tuple(sorted(steps.items()))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: Any) -> int:
    """A count of steps; 0 where there is none."""
    return value if isinstance(value, int) and value > 0 else 0


def _name(row: Row) -> str:
    """Task, shape, seed and the id's beginning, such as farthest-d64-l1-h8-r8-s0-1a2b3c4d; letters,
    digits, points, dashes and underscores, so that it can be a file's name."""
    keys = {"dim": "d", "depth": "l", "num_heads": "h", "head_dim": "r", "seed": "s"}
    sizes = [f"{letter}{row[key]}" for key, letter in keys.items() if _is_number(row.get(key))]
    words = [str(row.get("task") or "run")[:40], *sizes, str(row["id"])]
    name = re.sub(r"[^0-9A-Za-z_.-]+", "_", "-".join(words))
    return name.lstrip(".-") or "run"


def _time(finished: Any) -> float:
    try:
        when = datetime.datetime.fromisoformat(finished)
        return when.replace(tzinfo=when.tzinfo or datetime.UTC).timestamp()
    except (TypeError, ValueError, OverflowError):
        return 0.0
