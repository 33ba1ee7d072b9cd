"""Every fact, theorem and conjecture of the rank paper as a check with a margin; nothing is trained
on a GPU.

    headwise theory                          all checks, table, page; 2 CPU cores, about a minute

Expected: every check holds. Closed forms agree with each other to 1e-10 and with samples within 4
standard errors.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from headwise.errors import UsageError, nearest
from headwise.experiments import base
from headwise.experiments.common import Computed
from headwise.rows import Row
from headwise.stats import group

QUESTION = "Does what the paper states hold when it is computed?"
CAPTION = (
    "Exact: left the least error that any hard rank-1 heads in one layer can have, right the "
    "error of random ones that vote in two "
    "layers; two points."
)
COLUMNS = (
    ("statement", "statement"),
    ("what", "what is compared"),
    ("parameters", "at"),
    ("kind", "must be"),
    ("bound", "bound"),
    ("measured", "measured"),
    ("margin", "margin"),
    ("holds", "holds"),
    ("source", "whose"),
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


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """One point a check."""
    return [
        {"group": r["name"], **check, "parameters": _told(check["parameters"])}
        for r in rows
        for check in r["checks"]
    ]


def _told(parameters: dict[str, Any]) -> str:
    def value(v: Any) -> str:
        if isinstance(v, list):
            return f"{value(v[0])}..{value(v[-1])}"
        return f"{v:.4g}" if isinstance(v, float) else f"{v:,}"

    return ", ".join(f"{key}={value(v)}" for key, v in parameters.items())


def headline(points: list[dict[str, Any]]) -> list[str]:
    """How many hold, by statement."""
    lines = []
    for (statement,), same in group(points, "statement").items():
        bad = [p for p in same if not p["holds"]]
        closest = min(same, key=lambda p: p["margin"])
        lines.append(
            f"{statement}: {len(same) - len(bad)} of {len(same)} hold, least margin "
            f"{closest['margin']:.3g} ({closest['what']})"
        )
        lines += [
            f"  FAILS: {p['what']} at {p['parameters']}: {p['measured']:.6g} against "
            f"{p['bound']:.6g}"
            for p in bad
        ]
    return lines


def figure(points: list[dict[str, Any]]) -> dict[str, Any]:
    """One layer of rank-1 heads against two: the floor of the one, the votes of the other, over the
    number of heads."""
    from headwise.theory.constructions import vote_error
    from headwise.theory.harmonics import singular_floor

    counts, panels = [4**i for i in range(9)], []
    for title, error in (
        ("one layer: the least error of any hard rank-1 heads", singular_floor),
        (
            "two layers: random rank-1 heads vote",
            lambda dim, heads: vote_error(dim, heads + 1 - heads % 2),
        ),
    ):
        lines = []
        for colour, dim in enumerate((8, 16, 64)):
            none = [None] * len(counts)
            values = [max(error(dim, heads), 1e-4) for heads in counts]
            lines.append(
                {
                    "label": f"d={dim}",
                    "colour": colour,
                    "style": "solid",
                    "x": counts,
                    "y": values,
                    "low": none,
                    "high": none,
                }
            )
        panels.append({"title": title, "lines": lines})
    return {
        "title": (
            "The nearest of two points by heads of rank 1"
        ), "x_label": "heads", "y_label": "squared error",
        "reference": {"label": (
            "predicting the mean of the points"
        ), "y": 0.5}, "panels": panels, "columns": 2,
    }  # fmt: skip
