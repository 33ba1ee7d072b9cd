"""What a figure is: three frozen dataclasses, `LineFigure`, `HeatFigure` and `RangeFigure`, and
their parts.

An experiment describes its figure with them. `matplotlib_figure.py` draws one as an image and
`plotly_figure.py` as a part of the page. A store keeps it as plain values: `to_json` gives them and
`from_json` reads them back. Standard library only.

In titles and labels `d^2.5` has its exponent raised. A colour is a number: its place in
`colours.COLOURS`, counted around.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from headwise.errors import UsageError, nearest

ABOVE, BELOW = 0.17, -0.2  # the middle of a cell of a heat panel: its number, and paths through it
ONE_SEED = "hollow: one seed"
Scale = Literal["log", "linear"]
Symbol = Literal["star", "diamond"]
Style = Literal["solid", "line", "dashed", "dots"]
STYLES = ("solid", "line", "dashed", "dots")
SCALES = ("log", "linear")


# ---- lines over one or several panels


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points along an axis, with an interval around each where `low` and `high` are given.

    A missing `y` is a gap. `solid` has markers and a band, `line` a band only, `dashed` and `dots`
    are drawn without intervals. A point of a `solid` line without an interval is of one seed and
    drawn hollow. `text` is shown for a point under the mouse. `seeds` are the values that each
    point is the mean of, and `runs` the ids of their runs; the page can show them.

    >>> Line(label="held out", colour=0, x=[1, 2], y=[0.5, None]).y
    (0.5, None)
    """

    label: str
    colour: int
    x: Sequence[float]
    y: Sequence[float | None]
    style: Style = "solid"
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    text: Sequence[str] = ()
    seeds: Sequence[Sequence[float]] = ()
    runs: Sequence[Sequence[str]] = ()

    def __post_init__(self) -> None:
        _freeze(self, "x", "y", "low", "high", "text")
        _freeze_rows(self, "seeds", "runs")
        _check_choice("style", self.style, STYLES)
        for name in ("y", "low", "high", "text", "seeds", "runs"):
            values = getattr(self, name)
            if len(values) != len(self.x) and (values or name == "y"):
                raise UsageError(
                    f"{name} of line {self.label!r} needs a value per x: {len(self.x)}, "
                    f"got {len(values)}"
                )

    @property
    def has_interval(self) -> bool:
        """Whether any point has one."""
        return any(v is not None for v in self.low)

    @property
    def single(self) -> tuple[bool, ...]:
        """Which points are of one seed: they have a value, and no interval where the line may have
        them."""
        if self.style != "solid" or not self.low:
            return (False,) * len(self.x)
        points = zip(self.y, self.low, strict=True)
        return tuple(y is not None and low is None for y, low in points)


@dataclass(frozen=True, kw_only=True)
class LinePanel:
    """One pair of axes with its lines."""

    title: str
    lines: Sequence[Line]

    def __post_init__(self) -> None:
        _freeze(self, "lines")

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not self.lines


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A labelled horizontal line across every panel."""

    label: str
    y: float


@dataclass(frozen=True, kw_only=True)
class LineFigure:
    """Lines over panels, `columns` of them in a row. The panels share their x axis, and their y
    axis too unless `share_y` is False."""

    kind: ClassVar[str] = "lines"

    title: str
    x_label: str
    y_label: str
    panels: Sequence[LinePanel]
    columns: int = 1
    x_scale: Scale = "log"
    y_scale: Scale = "log"
    share_y: bool = True
    reference: Reference | None = None
    caption: str = ""

    def __post_init__(self) -> None:
        _freeze(self, "panels")
        _check_choice("x_scale", self.x_scale, SCALES)
        _check_choice("y_scale", self.y_scale, SCALES)

    @property
    def floor(self) -> float:
        """Half of the smallest value above or below zero: where the picture ends if an interval
        reaches zero, which a log axis does not have."""
        # Zeros are no values of a log axis.
        values = [y for panel in self.panels for line in panel.lines for y in line.y if y]
        return min(values, default=1.0) / 2

    @property
    def ticks(self) -> list[float]:
        """Where the lines have points. Every second place when there are many."""
        places = sorted({x for panel in self.panels for line in panel.lines for x in line.x})
        return places[::2] if len(places) > 9 else places

    def leaves_picture(self, panel: LinePanel) -> bool:
        """Whether an interval of the panel ends below the floor."""
        floor = self.floor
        return any(v is not None and v < floor for line in panel.lines for v in line.low)

    def drawn_low(self, value: float) -> float:
        """The lower end of an interval as it is drawn: on a log axis not far below the picture."""
        return max(value, self.floor / 10) if self.y_scale == "log" else value


# ---- a table of colours


@dataclass(frozen=True, kw_only=True)
class Path:
    """A line from cell to cell of a heat panel. `x` and `y` count cells from the lower left."""

    label: str
    colour: int
    x: Sequence[int]
    y: Sequence[int]

    def __post_init__(self) -> None:
        _freeze(self, "x", "y")

    @property
    def shift(self) -> float:
        """How far it stands aside, so that paths through the same cells stay apart."""
        return 0.16 * (self.colour - 1)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A symbol in one cell of a heat panel."""

    label: str
    symbol: Symbol
    x: int
    y: int


@dataclass(frozen=True, kw_only=True)
class HeatPanel:
    """A grid of numbers, drawn as colours from `least` to `most`: rows from the bottom up, a
    missing cell is None.

    Places are (column, row), counted from the lower left. The `best` cell is framed, and with
    dashes those that are `alike`: they cannot be told apart from it. The numbers of `single` ones,
    of one seed, stand in brackets. `text` is shown for a cell under the mouse.
    """

    title: str
    cells: Sequence[Sequence[float | None]]
    least: float | None
    most: float | None
    paths: Sequence[Path] = ()
    marks: Sequence[Mark] = ()
    best: Sequence[tuple[int, int]] = ()
    alike: Sequence[tuple[int, int]] = ()
    single: Sequence[tuple[int, int]] = ()
    text: Sequence[Sequence[str]] = ()

    def __post_init__(self) -> None:
        _freeze_rows(self, "cells", "best", "alike", "single", "text")
        _freeze(self, "paths", "marks")

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not self.cells

    @property
    def values(self) -> list[tuple[int, int, float]]:
        """The cells that have a value: column, row, value."""
        return [
            (x, y, value)
            for y, row in enumerate(self.cells)
            for x, value in enumerate(row)
            if value is not None
        ]

    def number(self, x: int, y: int) -> str:
        """What stands on a cell."""
        value = self.cells[y][x]
        if value is None:
            return ""
        text = f"{value:.3f}" if value < 10 else f"{value:.3g}"
        return f"({text})" if (x, y) in self.single else text


@dataclass(frozen=True, kw_only=True)
class HeatFigure:
    """Grids of colours. Every panel has the same columns (`x_names`) and rows (`y_names`)."""

    kind: ClassVar[str] = "heat"

    title: str
    x_label: str
    y_label: str
    x_names: Sequence[str]
    y_names: Sequence[str]
    panels: Sequence[HeatPanel]
    columns: int = 1
    caption: str = ""

    def __post_init__(self) -> None:
        _freeze(self, "x_names", "y_names", "panels")
        for panel in self.panels:
            # Every panel is a full grid over the figure's names; what was not measured is None.
            sizes = {len(row) for row in panel.cells}
            if len(panel.cells) != len(self.y_names) or sizes - {len(self.x_names)}:
                raise UsageError(
                    f"cells of panel {panel.title!r} must be {len(self.y_names)} rows of "
                    f"{len(self.x_names)}, got {len(panel.cells)} of "
                    f"{', '.join(map(str, sorted(sizes))) or 'none'}"
                )


# ---- intervals beside their names


@dataclass(frozen=True, kw_only=True)
class Range:
    """A mean, with its interval where it has one; its marker is `hollow` where it is of one seed.
    `name` stands at the axis, `label` says what the colour means."""

    name: str
    label: str
    colour: int
    mean: float
    low: float | None = None
    high: float | None = None
    hollow: bool = False
    text: str = ""  # shown under the mouse


@dataclass(frozen=True, kw_only=True)
class RangePanel:
    """Intervals from top to bottom."""

    title: str
    x_label: str
    ranges: Sequence[Range]

    def __post_init__(self) -> None:
        _freeze(self, "ranges")

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not self.ranges

    @property
    def meaning(self) -> tuple[str, ...]:
        """What its colours mean; panels that mean the same share one legend."""
        return tuple(sorted({row.label for row in self.ranges}))


@dataclass(frozen=True, kw_only=True)
class RangeFigure:
    """Lists of intervals beside their names, with a line at zero."""

    kind: ClassVar[str] = "ranges"

    title: str
    panels: Sequence[RangePanel]
    columns: int = 1
    caption: str = ""

    def __post_init__(self) -> None:
        _freeze(self, "panels")

    @property
    def longest(self) -> int:
        """How many intervals the longest panel has."""
        return max((len(panel.ranges) for panel in self.panels), default=1)


Figure = LineFigure | HeatFigure | RangeFigure


def has_hollow(figure: Figure) -> bool:
    """Whether any of its markers is hollow."""
    if isinstance(figure, LineFigure):
        return any(any(line.single) for panel in figure.panels for line in panel.lines)
    if isinstance(figure, RangeFigure):
        return any(row.hollow for panel in figure.panels for row in panel.ranges)
    return False


def drawn_names(names: Sequence[str]) -> list[str]:
    """A name that stands for several intervals is written at the first of them.

    >>> drawn_names(["a", "a", "b"])
    ['a', '', 'b']
    """
    return [name if i == 0 or name != names[i - 1] else "" for i, name in enumerate(names)]


def fraction(x: float) -> str:
    """A tick of a log axis.

    >>> fraction(0.25), fraction(1), fraction(64)
    ('1/4', '1', '64')
    """
    if x == 1:
        return "1"
    return f"1/{round(1 / x)}" if x < 1 else f"{x:g}"


def has_panels(figure: Figure) -> bool:
    """Whether the figure has panels and something in every one."""
    return bool(figure.panels) and not any(panel.empty for panel in figure.panels)


# ---- as plain values


def to_json(figure: Figure) -> dict[str, Any]:
    """The figure as values that JSON has."""
    return {"kind": figure.kind, **_plain(figure)}


def from_json(value: Mapping[str, Any]) -> Figure:
    """The figure that `to_json` gave these values for.

    >>> figure = RangeFigure(title="t", panels=[RangePanel(title="", x_label="x", ranges=[])])
    >>> from_json(to_json(figure)) == figure
    True
    """
    fields = {name: part for name, part in value.items() if name not in ("kind", "panels")}
    # Parts are built from the inside out: lines, then panels, then the figure with its other
    # fields.
    panels, kind = value["panels"], value["kind"]
    _check_choice("kind of figure", kind, ("lines", "heat", "ranges"))
    if kind == "heat":
        return HeatFigure(panels=[_heat_panel(panel) for panel in panels], **fields)
    if kind == "ranges":
        return RangeFigure(panels=[_range_panel(panel) for panel in panels], **fields)
    if fields.get("reference"):
        fields["reference"] = Reference(**fields["reference"])
    return LineFigure(panels=[_line_panel(panel) for panel in panels], **fields)


def _line_panel(value: Mapping[str, Any]) -> LinePanel:
    lines: Any = [Line(**line) for line in value["lines"]]
    return LinePanel(**dict(value, lines=lines))


def _heat_panel(value: Mapping[str, Any]) -> HeatPanel:
    paths: Any = [Path(**path) for path in value["paths"]]
    marks: Any = [Mark(**mark) for mark in value["marks"]]
    return HeatPanel(**dict(value, paths=paths, marks=marks))


def _range_panel(value: Mapping[str, Any]) -> RangePanel:
    ranges: Any = [Range(**row) for row in value["ranges"]]
    return RangePanel(**dict(value, ranges=ranges))


def _plain(value: Any) -> Any:
    """Dataclasses as dicts and tuples as lists, all the way down."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def _freeze(value: Any, *names: str) -> None:
    """Keep these fields as tuples, whatever sequence they were given as."""
    for name in names:
        object.__setattr__(value, name, tuple(getattr(value, name)))


def _freeze_rows(value: Any, *names: str) -> None:
    """The same for rows of values."""
    for name in names:
        object.__setattr__(value, name, tuple(tuple(row) for row in getattr(value, name)))


def _check_choice(what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UsageError(f"unknown {what} {value!r}; {nearest(value, choices)}")
