"""Old names, until every experiment is converted."""

# ruff: noqa: F401
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwise.experiments.base import Computed
from headwise.experiments.points import check_one_model as check_alike
from headwise.experiments.points import errors_of, interval, plural, signed
from headwise.experiments.points import gap_in_words as change
from headwise.experiments.points import geometric_mean as logmean
from headwise.experiments.probes import condition_probe as how_conditioned
from headwise.experiments.probes import trained_model as trained
from headwise.experiments.published import published_values as published
from headwise.experiments.settings import (
    CHOICES,
    OverTasks,
    Training,
    check_fresh,
    check_lists,
)
from headwise.experiments.settings import without_effect as unused
from headwise.experiments.shapes import heads_in_words as name_of
from headwise.experiments.shapes import shape_for as shape_of
from headwise.experiments.shapes import shape_of_row as shape_in
from headwise.experiments.tuning import at_rate, edge_line, next_round, tuned
from headwise.experiments.tuning import gap_between as against
from headwise.experiments.tuning import losses_of as measured
from headwise.experiments.tuning import rows_at_best_rate as counted


def recipe_of(settings: Any, **changes: Any) -> Any:
    return settings.recipe(**changes)


def task_of(name: Any, settings: Any) -> Any:
    return settings.task(name)


def edges(points: list[dict[str, Any]], what: str) -> list[str]:
    return edge_line(sum(p["edge"] for p in points), len(points), what)


def whole(
    line: list[dict[str, Any]], places: list[int], along: str = "rank"
) -> list[dict[str, Any]]:
    there = {p[along]: p for p in line}
    gap = {"held_out": None, "low": None, "high": None, "train_best": None, "n": 0}
    return [there.get(place, gap) for place in places]


def beside(
    name: str,
    colour: int,
    shares: list[float],
    line: list[dict[str, Any]],
    theirs: Sequence[tuple[float, float]],
) -> list[Any]:
    ours = {
        "label": f"the paper's statistic, {name}",
        "colour": colour,
        "style": "dots",
        "x": shares,
        "y": [p["train_best"] for p in line],
    }
    there = {"x": [x for x, _ in theirs], "y": [y for _, y in theirs]}
    theirs_line = (
        [{"label": f"published, {name}", "colour": colour, "style": "dashed", **there}]
        if theirs
        else []
    )
    return [solid(f"held out, {name}", colour, shares, line), ours, *theirs_line]


def solid(label: str, colour: int, xs: list[float], points: list[dict[str, Any]]) -> dict[str, Any]:
    values = {
        key: [p[of] for p in points]
        for key, of in (("y", "held_out"), ("low", "low"), ("high", "high"))
    }
    return {"label": label, "colour": colour, "style": "solid", "x": xs, **values}
