"""The main figure and its two views: by rank and by depth, as published against held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwise.experiments.figure_parts import (
    error_line,
    published_line,
    published_values,
    statistic_line,
)
from headwise.experiments.points import groups, plural
from headwise.experiments.rank_paper.shapes import budget
from headwise.show.colours import ORDERED, SECOND
from headwise.show.figure import Line, LineFigure, LinePanel, Reference
from headwise.training.run import REPLAYED

if TYPE_CHECKING:
    from headwise.experiments.rank_paper.fig1 import Point

BY_RANK = (
    "Left: the rank paper's statistic, the smallest training loss of any epoch of any seed on "
    "replayed data; dashed, as published. Right: error on fresh data of models trained on fresh "
    "data, mean over seeds with its 95 % interval; hollow: one seed."
)
BY_LAYERS = (
    "What more layers do at each rank. Left: the rank paper's statistic on replayed data; dashed, "
    "as published. Right: error on fresh data of models trained on fresh data, mean over seeds "
    "with its 95 % interval; where several learning rates were tried on the first seed, at the one "
    "that is best there, over the other seeds; hollow: one seed, which flatters where it chose its "
    "own rate."
)
ZERO = Reference(label="predicting zero", y=1.0)
PAPER_DIM = 64
PAPER_WIDTHS = {"2": 1, "2.5": 8, "3": 64}  # by the power of d


def published_errors() -> dict[tuple[int, int, int], float]:
    """The paper's values by (layers, width, rank), d=64 and N=16: smallest training loss of any
    epoch of any seed."""
    return {
        (int(r["layers"]), PAPER_WIDTHS[r["params_power"]], int(r["rank"])): float(r["mse"])
        for r in published_values("fig1")
    }


def _about(p: Point | None) -> str:
    """What is shown for a point under the mouse."""
    if p is None:
        return ""
    rate = f", rate {p.lr:g} of {p.rates}" if p.rates > 1 else ""
    return f"rank {p.rank}, {plural(p.heads, 'head')}, {p.params:,} parameters, n={p.n}{rate}"


def _task_in_title(points: Sequence[Point]) -> str:
    name = points[0].task
    return "Farthest neighbour" if name == "farthest" else name


def _baseline(p: Point) -> Reference | None:
    """The lowest error of an answer that needs no training."""
    return None if p.baseline is None else Reference(label=p.answer, y=p.baseline)


# ---- the figure


def figure(points: Sequence[Point]) -> LineFigure:
    """A panel per depth and protocol, a line per budget, the published values dashed."""
    # Budgets are named by the power of d, so the paper's at d = 64 and ours at another d have one
    # colour where the power is the same.
    dim, ranks = points[0].dim, sorted({p.rank for p in points})
    own_task = points[0].task != "farthest"
    theirs = {} if own_task else {budget(w, PAPER_DIM): w for w in PAPER_WIDTHS.values()}
    ours = {p.width: p.budget for p in points}
    colours = list(dict.fromkeys([*theirs, *(ours[width] for width in sorted(ours))]))
    several = len({p.protocol for p in points}) > 1
    panels, title = [], _task_in_title(points)
    for (protocol, layers), same in groups(points, "protocol", "layers").items():
        lines, published = list[Line](), list[Line]()
        for name in sorted({p.budget for p in same} & theirs.keys()):
            published += _published(layers, theirs[name], name, colours.index(name))
        for line in groups(same, "width").values():
            lines += _budget_lines(line, ranks, colours.index(line[0].budget))
        place = plural(layers, "layer") + (f", {protocol}" if several else "")
        panels.append(LinePanel(title=place, lines=[*lines, *published]))
    return LineFigure(
        title=f"{title}: error against rank at equal parameters (d={dim})",
        x_label="rank of a head / d",
        y_label="held-out loss" if own_task else "squared error",
        reference=_baseline(points[0]) if own_task else ZERO,
        panels=panels,
        columns=len({p.layers for p in points}),
    )


def _budget_lines(line: Sequence[Point], ranks: list[int], colour: int) -> list[Line]:
    """One budget's held-out errors and the paper's statistic, with gaps where nothing was run."""
    name, dim = line[0].budget, line[0].dim
    # All lines have a place for every rank, so a rank without a run is a gap.
    by_rank = {p.rank: p for p in line if p.held_out is not None}
    at = [by_rank.get(rank) for rank in ranks]
    shares = [rank / dim for rank in ranks]
    return [
        error_line(f"held out, {name}", colour, shares, at, [_about(p) for p in at]),
        statistic_line(f"the paper's statistic, {name}", colour, shares, at),
    ]


def _published(layers: int, width: int, name: str, colour: int) -> list[Line]:
    known = sorted(
        (rank, error)
        for (depth, w, rank), error in published_errors().items()
        if (depth, w) == (layers, width)
    )
    label = f"published (training, replay), d={PAPER_DIM}, {name}"
    values = [(rank / PAPER_DIM, error) for rank, error in known]
    text = [f"rank {rank}" for rank, _ in known]
    return [published_line(label, colour, values, text)] if known else []


# ---- two views: left as published, right held out; a row per budget


@dataclass(frozen=True)
class _Axes:
    """What a view has along its axis and what its lines are."""

    along: str  # the field along the axis: rank or layers
    by: str  # the field that a line has one value of: the other one
    unit: int  # of the axis
    label: str
    title: str
    caption: str

    def name(self, value: int) -> str:
        """A line's name."""
        return plural(value, "layer") if self.by == "layers" else f"rank {value}"


@dataclass(frozen=True)
class _Row:
    """One budget: its lines of published and of held-out errors."""

    budget: str
    left: list[Line]
    right: list[Line]


def by_rank(points: Sequence[Point]) -> LineFigure:
    """As published against held out by rank, a line per depth. Empty for fresh data alone, which
    the figure itself shows."""
    axes = _Axes(
        along="rank",
        by="layers",
        unit=points[0].dim,
        label="rank of a head / d",
        title="Does depth repair low rank?",
        caption=BY_RANK,
    )
    rows = _rows(points, axes)
    return _view(points, axes, rows if any(row.left for row in rows) else [])


def by_layers(points: Sequence[Point]) -> LineFigure:
    """The same by depth, a line per rank, for budgets with several depths. Of fresh data alone only
    where rates were tuned, since a rate that suits one depth may be too high for another."""
    axes = _Axes(
        along="layers",
        by="rank",
        unit=1,
        label="layers",
        title="What more layers do, by rank.",
        caption=BY_LAYERS,
    )
    several = [s for s in groups(points, "width").values() if len({p.layers for p in s}) > 1]
    shown = [p for same in several for p in same]
    rows = _rows(shown, axes)
    both = any(row.left for row in rows) and any(row.right for row in rows)
    tuned = any(p.rates > 1 for p in shown)
    return _view(points, axes, rows if both or tuned else [])


def _rows(points: Sequence[Point], axes: _Axes) -> list[_Row]:
    # Colours go by the value of the line's field, so they are the same on both sides and in all
    # rows.
    protocols = {p.protocol for p in points}
    replayed = next((name for name in REPLAYED if name in protocols), "")
    places = sorted({getattr(p, axes.along) for p in points})
    values = sorted({getattr(p, axes.by) for p in points}, reverse=axes.by == "rank")
    out = []
    for same in groups(points, "width").values():
        row = _Row(same[0].budget, [], [])
        for colour, value in enumerate(values, ORDERED if axes.by == "rank" else SECOND):
            here = [p for p in same if getattr(p, axes.by) == value]
            row.left.extend(_left(here, replayed, places, colour, axes))
            row.right.extend(_right(here, places, colour, axes))
        out.append(row)
    return out


def _left(
    here: list[Point], replayed: str, places: list[int], colour: int, axes: _Axes
) -> list[Line]:
    """The paper's statistic under replay, and what was published."""
    if not here:
        return []
    name, lines = axes.name(getattr(here[0], axes.by)), []
    seen = {
        getattr(p, axes.along): p.train_best
        for p in here
        if p.protocol == replayed and p.train_best is not None
    }
    if seen:
        xs, ys = [place / axes.unit for place in places], [seen.get(place) for place in places]
        lines.append(Line(label=name, colour=colour, x=xs, y=ys))
    known = _published_along(here[0], axes)
    if known:
        lines.append(published_line(f"published, {name}", colour, known))
    return lines


def _published_along(p: Point, axes: _Axes) -> list[tuple[float, float]]:
    """The published values of a point's width and line."""
    if p.dim != PAPER_DIM or p.task != "farthest":
        return []
    # A published value belongs to the line that has its width and, by axis, its depth or rank.
    fields = ("layers", "width", "rank")
    found = []
    for place, error in sorted(published_errors().items()):
        at = dict(zip(fields, place, strict=True))
        if (at["width"], at[axes.by]) == (p.width, getattr(p, axes.by)):
            found.append((at[axes.along] / axes.unit, error))
    return found


def _right(here: list[Point], places: list[int], colour: int, axes: _Axes) -> list[Line]:
    """Held-out errors of models trained on fresh data."""
    fresh = [p for p in here if p.protocol == "stream" and p.held_out is not None]
    if not fresh:
        return []
    by_place = {getattr(p, axes.along): p for p in fresh}
    at = [by_place.get(place) for place in places]
    xs, name = [place / axes.unit for place in places], axes.name(getattr(fresh[0], axes.by))
    return [error_line(name, colour, xs, at, [_about(p) for p in at])]


def _view(points: Sequence[Point], axes: _Axes, rows: list[_Row]) -> LineFigure:
    left = "as published: training error, replayed data"
    right = "held out: trained and evaluated on fresh data"
    # A side that is empty in every row is left out.
    sides = [
        (title, side)
        for title, side in ((left, "left"), (right, "right"))
        if any(getattr(row, side) for row in rows)
    ]
    return LineFigure(
        title=f"{axes.title} {_task_in_title(points)}, d={points[0].dim}",
        x_label=axes.label,
        y_label="squared error",
        reference=ZERO if points[0].task == "farthest" else _baseline(points[0]),
        columns=max(1, len(sides)),
        caption=axes.caption,
        panels=[
            LinePanel(title=f"{title} ({row.budget})", lines=getattr(row, side))
            for row in rows
            for title, side in sides
        ],
    )
