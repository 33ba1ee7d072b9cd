"""Every fact, theorem and conjecture of the rank paper as a check with a margin; nothing is trained
on a GPU.

    headwise theory                          all checks, table, page; 2 CPU cores, about a minute

Expected: every check holds. Closed forms agree with each other to 1e-10 and with samples within 4
standard errors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headwise.errors import UsageError, nearest
from headwise.experiments import base
from headwise.experiments.base import Computed, Experiment
from headwise.experiments.points import Point as BasePoint
from headwise.experiments.points import groups
from headwise.rows import Row
from headwise.show.figure import Line, LineFigure, LinePanel, Reference

CAPTION = (
    "By formula: left a lower bound on the error of hard rank-1 heads in one layer, which no layer "
    "is known to attain, right the error of random ones that vote in two layers; two points."
)
NAMES = (
    "full-rank-head",
    "kernels",
    "degrees",
    "floor",
    "growth",
    "subspace",
    "biased",
    "majority",
    "lengths",
    "plane",
    "continuum",
    "random-features",
)
VERSION = 2  # of the checks; another one makes them anew


@dataclass(frozen=True, kw_only=True)
class Settings(base.Settings):
    """Which checks, from which seed."""

    only: tuple[str, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in NAMES:
                raise UsageError(f"unknown check {name!r}; {nearest(name, NAMES)}")
        if not self.only:
            raise UsageError("only must not be empty")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"seed must lie between 0 and 2^63, got {self.seed}")


PRESETS = {"quick": Settings(only=NAMES), "paper": Settings(only=NAMES)}


@dataclass(frozen=True)
class Check(Computed):
    """One group of checks."""

    experiment = "theory"
    name: str
    seed: int
    version: int = VERSION


def runs(settings: Settings) -> list[Check]:
    """The groups of checks, in the paper's order."""
    return [Check(name, settings.seed) for name in NAMES if name in settings.only]


def make(check: Check, device: str) -> Row:
    """Run one group."""
    from headwise.theory.checks import CHECKS

    began = time.monotonic()
    rows = [found.row() for found in CHECKS[check.name](check.seed)]
    return {
        "id": check.id,
        "status": "done",
        **asdict(check),
        "checks": rows,
        "seconds": round(time.monotonic() - began, 3),
    }


@dataclass(frozen=True, kw_only=True)
class Point(BasePoint):
    """One check: `holds` says whether it does, `margin` how far it is from failing."""

    group: str
    statement: str
    what: str
    parameters: str
    kind: str
    bound: float
    measured: float
    margin: float
    holds: bool
    source: str
    low: float | None = None
    high: float | None = None
    allowed: float | None = None
    residual: float | None = None  # of the linear system that was solved


def summary(rows: list[Row]) -> list[Point]:
    """One point per check."""
    return [_point(row["name"], check) for row in rows for check in row["checks"]]


def _point(name: str, check: dict[str, Any]) -> Point:
    values: dict[str, Any] = {**check, "group": name, "parameters": _in_words(check["parameters"])}
    return Point(**values)


def _in_words(parameters: dict[str, Any]) -> str:
    return ", ".join(f"{key}={_value(v)}" for key, v in parameters.items())


def _value(v: Any) -> str:
    if isinstance(v, list):
        return f"{_value(v[0])}..{_value(v[-1])}"
    return f"{v:.4g}" if isinstance(v, float) else f"{v:,}"


def headline(points: Sequence[Point]) -> list[str]:
    """How many hold, by statement."""
    lines = []
    for (statement,), same in groups(points, "statement").items():
        bad = [p for p in same if not p.holds]
        closest = min(same, key=lambda p: p.margin)
        lines.append(
            f"{statement}: {len(same) - len(bad)} of {len(same)} hold, least margin "
            f"{closest.margin:.3g} ({closest.what})"
        )
        lines += [
            f"  FAILS: {p.what} at {p.parameters}: {p.measured:.6g} against {p.bound:.6g}"
            for p in bad
        ]
    return lines


def answer(points: Sequence[Point]) -> str:
    """Whether all of it holds."""
    bad = [p for p in points if not p.holds]
    if not bad:
        return f"All {len(points)} checks hold"
    statements = ", ".join(dict.fromkeys(p.statement for p in bad))
    return f"{len(bad)} of {len(points)} checks do not hold: {statements}"


def figure(points: Sequence[Point]) -> LineFigure:
    """One layer of rank-1 heads against two: the floor of the one, the votes of the other, over the
    number of heads."""
    from headwise.theory.constructions import vote_error
    from headwise.theory.harmonics import singular_floor

    def odd_vote(dim: int, heads: int) -> float:
        return vote_error(dim, heads + 1 - heads % 2)

    # A majority needs an odd number of heads. An error of zero has no place on a log axis.
    counts, panels = [4**i for i in range(9)], []
    for title, error in (
        ("one layer: lower bound for hard rank-1 heads", singular_floor),
        ("two layers: random rank-1 heads vote", odd_vote),
    ):
        lines = [
            Line(
                label=f"d={dim}",
                colour=colour,
                x=counts,
                y=[max(error(dim, heads), 1e-4) for heads in counts],
            )
            for colour, dim in enumerate((8, 16, 64))
        ]
        panels.append(LinePanel(title=title, lines=lines))
    return LineFigure(
        title="The nearest of two points by heads of rank 1",
        x_label="heads",
        y_label="squared error",
        reference=Reference(label="predicting the mean of the points", y=0.5),
        panels=panels,
        columns=2,
    )


EXPERIMENT: Experiment[Settings, Point] = Experiment(
    name="theory",
    question="Does what the paper states hold when it is computed?",
    about="every statement of the rank paper as a check with a margin",
    presets=PRESETS,
    columns=(
        ("statement", "statement"),
        ("what", "what is compared"),
        ("parameters", "at"),
        ("kind", "must be"),
        ("bound", "bound"),
        ("measured", "measured"),
        ("margin", "margin"),
        ("holds", "holds"),
        ("source", "whose"),
    ),
    main_columns=("what", "margin", "holds", "statement", "parameters", "measured", "bound"),
    runs=runs,
    make=make,
    summary=summary,
    headline=headline,
    answer=answer,
    figure=figure,
    caption=CAPTION,
    meanings={"only": "groups of checks", "seed": "of the samples"},
)
