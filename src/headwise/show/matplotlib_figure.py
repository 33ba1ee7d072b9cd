"""A figure as an image, drawn by matplotlib: the same figure gives the same bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.show.colours import FRAME, GREY, colour_of
from headwise.show.figure import (
    ABOVE,
    BELOW,
    ONE_SEED,
    Figure,
    HeatFigure,
    HeatPanel,
    Line,
    LineFigure,
    LinePanel,
    RangeFigure,
    RangePanel,
    drawn_names,
    fraction,
    has_hollow,
)

COLOUR_MAP = "viridis"
GRID = {"color": "#e6e8eb", "lw": 0.6}
SYMBOLS = {"star": "*", "diamond": "D"}
HOLLOW = {"ls": "none", "marker": "o", "ms": 4, "mfc": "white"}  # a point of one seed
DATELESS = {  # metadata without a date, so that the same rows give the same file
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None},
    ".svg": {"Date": None},
}


@dataclass(frozen=True)
class Look:
    """What an image looks like besides what it shows. A fixed font and a fixed salt for ids in svg
    make the same bytes on every machine."""

    rc: Mapping[str, Any]
    width: float | None = None  # inches, where it is one of a page's


SCREEN = Look({"font.family": "DejaVu Sans", "axes.titlesize": 9.5, "svg.hashsalt": "headwise"})
PAPER = Look(
    {
        "font.family": "STIXGeneral",  # cut for the same page as Times
        "mathtext.fontset": "stix",
        "pdf.fonttype": 42,  # whole letters, as conferences ask for, not their outlines
        "font.size": 8,
        "axes.titlesize": 8,
        "axes.linewidth": 0.6,
        "svg.hashsalt": "headwise",
    },
    width=5.5,  # of the text of a page with one column
)
PAPER_COLUMNS = {"lines": 3, "heat": 2, "ranges": 1}  # of panels that a page has room for


def save(figure: Figure, path: Path, paper: bool = False) -> None:
    """Write a figure as an image; the ending decides (png, pdf, svg). For a `paper` it is as wide
    as its text, and title and caption are left to the paper."""
    look = SCREEN
    if paper:
        look, columns = PAPER, min(figure.columns, PAPER_COLUMNS[figure.kind])
        figure = dataclasses.replace(figure, title="", caption="", columns=columns)
    if isinstance(figure, LineFigure):
        _save_lines(figure, path, look)
    elif isinstance(figure, HeatFigure):
        _save_heat(figure, path, look)
    else:
        _save_ranges(figure, path, look)


# ---- what the three kinds share: a grid of axes, the title, the legend


@contextlib.contextmanager
def _canvas(
    figure: Figure,
    path: Path,
    look: Look,
    size: Callable[[int, int], tuple[float, float]],
    style: dict[str, Any],
    share: tuple[bool, bool] = (False, False),
) -> Iterator[tuple[Any, list[Any]]]:
    """The figure and one pair of axes per panel, to draw into; it is titled and written when the
    block ends. `size` takes columns and rows and gives inches."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(figure.columns, len(figure.panels)) or 1
    rows = max(1, -(-len(figure.panels) // columns))
    width, height = size(columns, rows)
    if look.width is not None and width > look.width:
        # Half of what the panels lose in width they lose in height, so that lines stay apart.
        height, width = height * (1 + look.width / width) / 2, look.width
    with plt.rc_context({**style, **look.rc}):
        canvas, grid = plt.subplots(
            rows,
            columns,
            figsize=(width, height),
            sharex=share[0],
            sharey=share[1],
            squeeze=False,
        )
        axes = list(grid.flat)
        # The last row may have more axes than panels.
        for ax in axes[len(figure.panels) :]:
            ax.remove()
        yield canvas, axes[: len(figure.panels)]
        if figure.title:
            canvas.suptitle(figure.title, x=0.01, ha="left", fontweight="bold", fontsize=10)
        canvas.tight_layout()
        _add_caption(canvas, figure.caption)
        canvas.savefig(
            path, format=path.suffix[1:], dpi=160, bbox_inches="tight",
            metadata=DATELESS.get(path.suffix, {}),
        )  # fmt: skip
        plt.close(canvas)


def _add_caption(canvas: Any, caption: str) -> None:
    """The caption below the axes, wrapped to the figure's width."""
    if caption:
        columns = int(19 * canvas.get_size_inches()[0])  # of letters of 7 points
        text = _raised("\n".join(textwrap.wrap(caption, columns)))
        canvas.text(0.01, -0.01, text, va="top", fontsize=7, color="#5b626b", linespacing=1.35)


def _label_axes(figure: LineFigure | HeatFigure, axes: Sequence[Any]) -> None:
    """The x label below the lowest panel of each column, the y label at the first of each row."""
    columns = min(figure.columns, len(axes)) or 1
    for i, ax in enumerate(axes):
        if i + columns >= len(axes):
            ax.set_xlabel(figure.x_label)
        if i % columns == 0:
            ax.set_ylabel(figure.y_label)


def _handles(axes: Sequence[Any]) -> dict[str, Any]:
    """What the legend shows by its label, each label once."""
    return {
        label: handle
        for ax in axes
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }


def _hollow_handle(wanted: bool) -> dict[str, Any]:
    """What the legend says about hollow markers, where there are any."""
    from matplotlib.lines import Line2D

    return {ONE_SEED: Line2D([], [], color=GREY, **HOLLOW)} if wanted else {}


def _add_legend(canvas: Any, handles: dict[str, Any], look: Look) -> None:
    """Beside the panels; below them where their width is a page's."""
    if handles and look.width is not None:
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.01), "ncols": 3}
        canvas.legend(handles.values(), handles.keys(), frameon=False, fontsize=7, **below)
    elif handles:
        canvas.legend(
            handles.values(),
            handles.keys(),
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            frameon=False,
            fontsize=8,
        )


def _raised(text: str) -> str:
    """d^2.5 with its exponent raised; a dollar is a dollar."""
    return re.sub(r"(\w)\^([\d.]+)", r"$\1^{\2}$", text.replace("$", r"\$"))


# ---- lines


def _save_lines(figure: LineFigure, path: Path, look: Look) -> None:
    def size(columns: int, rows: int) -> tuple[float, float]:
        return 3.6 * columns + 2.2, 3.0 * rows + 0.7

    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with _canvas(figure, path, look, size, style, (True, figure.share_y)) as (canvas, axes):
        for ax, panel in zip(axes, figure.panels, strict=True):
            _draw_line_panel(ax, figure, panel)
        _label_axes(figure, axes)
        columns = min(figure.columns, len(axes))
        # Shared axes have tick labels in the last row of the grid only, which may be partly empty.
        for ax in axes[-columns:]:
            ax.tick_params(labelbottom=True)
        if figure.reference and axes:
            _name_reference(axes, figure)
        _add_legend(canvas, _handles(axes) | _hollow_handle(has_hollow(figure)), look)


def _draw_line_panel(ax: Any, figure: LineFigure, panel: LinePanel) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    for line in panel.lines:
        _draw_line(ax, figure, line)
    if figure.reference:
        ax.axhline(figure.reference.y, color=GREY, lw=0.8, ls=(0, (1, 2)))
    ax.set(xscale=figure.x_scale, yscale=figure.y_scale, title=_raised(panel.title))
    # An interval that reaches zero would stretch a log axis without end.
    if figure.y_scale == "log" and figure.leaves_picture(panel):
        ax.set_ylim(bottom=figure.floor)
    if figure.x_scale == "log":
        ax.xaxis.set_major_locator(FixedLocator(figure.ticks))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FixedFormatter([fraction(x) for x in figure.ticks]))
    ax.grid(axis="y", **GRID)
    ax.set_axisbelow(True)


def _draw_line(ax: Any, figure: LineFigure, line: Line) -> None:
    """Markers and line by the style, then the interval: a band, or a bar where a point has no
    neighbour with an interval."""
    from matplotlib import patheffects

    styles: dict[str, dict[str, Any]] = {
        "solid": {"lw": 1.8, "marker": "o", "ms": 4},
        "line": {"lw": 1.2},
        "dashed": {"ls": "--", "lw": 1, "marker": "s", "ms": 2.5, "alpha": 0.45},
        "dots": {"ls": "none", "marker": "x", "ms": 6, "mew": 1.2, "zorder": 4},
    }
    if line.style == "dots":  # a cross stands out on a circle of its colour
        edge = [patheffects.withStroke(linewidth=2.8, foreground="white")]
        styles["dots"]["path_effects"] = edge
    values, label = _gaps(line.y), _raised(line.label)
    colour = colour_of(line.colour)
    ax.plot(line.x, values, color=colour, label=label, **styles[line.style])
    if any(line.single):
        alone = [(x, y) for x, y, one in zip(line.x, values, line.single, strict=True) if one]
        ax.plot(*zip(*alone, strict=True), color=colour, **HOLLOW)
    if line.style in ("dashed", "dots") or not line.has_interval:
        return
    # A band needs two neighbouring intervals; one alone is a bar.
    low = _gaps([None if v is None else figure.drawn_low(v) for v in line.low])
    high = _gaps(line.high)
    ax.fill_between(line.x, low, high, color=colour, alpha=0.18, lw=0)
    for i, (x, bottom, top) in enumerate(zip(line.x, low, high, strict=True)):
        neighbours = low[max(i - 1, 0) : i] + low[i + 1 : i + 2]
        if all(math.isnan(v) for v in neighbours):
            ax.vlines(x, bottom, top, color=colour, alpha=0.4, lw=1.2)


def _gaps(values: Sequence[float | None]) -> list[float]:
    """Values as matplotlib takes them: a missing one is a gap."""
    return [math.nan if v is None else v for v in values]


def _name_reference(axes: Sequence[Any], figure: LineFigure) -> None:
    """The reference line's name, above it in the first panel. A log axis is made to have room."""
    assert figure.reference is not None
    if figure.y_scale == "log":
        for ax in axes:
            ax.set_ylim(top=max(ax.get_ylim()[1], 2 * figure.reference.y))
    axes[0].annotate(
        figure.reference.label,
        (0.02, figure.reference.y),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        color=GREY,
        fontsize=8,
    )


# ---- heat


def _save_heat(figure: HeatFigure, path: Path, look: Look) -> None:
    width = 0.62 * len(figure.x_names) + 0.5
    height = 0.46 * len(figure.y_names) + 0.7

    def size(columns: int, rows: int) -> tuple[float, float]:
        return width * columns + 1.2, height * rows + 0.6

    with _canvas(figure, path, look, size, {"font.size": 8}) as (canvas, axes):
        for ax, panel in zip(axes, figure.panels, strict=True):
            _draw_cells(ax, panel)
            _draw_paths(ax, panel)
            places = {"xticks": range(len(figure.x_names)), "yticks": range(len(figure.y_names))}
            ax.set(title=panel.title, **places)
            ax.set_xticklabels(figure.x_names)
            ax.set_yticklabels(figure.y_names)
            ax.tick_params(length=0)
        _label_axes(figure, axes)
        # The legend lists paths by colour and marks after them.
        order = {path.label: path.colour for panel in figure.panels for path in panel.paths}
        handles = _handles(axes)
        by_colour = sorted(handles, key=lambda label: (order.get(label, len(order) + 99), label))
        _add_legend(canvas, {label: handles[label] for label in by_colour}, look)


def _draw_cells(ax: Any, panel: HeatPanel) -> None:
    """Colours, the numbers on them, and frames around the best."""
    from matplotlib import colormaps, patheffects
    from matplotlib.patches import Rectangle

    colour_map = colormaps[COLOUR_MAP]
    colours = [_gaps(row) for row in panel.cells]
    ends = {"vmin": panel.least, "vmax": panel.most}
    ax.imshow(colours, origin="lower", cmap=COLOUR_MAP, aspect="auto", **ends)
    for x, y, value in panel.values:
        ink = _ink(value, panel)
        number = panel.number(x, y)
        text = ax.text(x, y + ABOVE, number, ha="center", va="center", fontsize=6.5, color=ink)
        under = colour_map(_share(value, panel))  # a path behind a number does not cross it
        text.set_path_effects([patheffects.withStroke(linewidth=1.6, foreground=under)])
    for places, width, style in ((panel.alike, 1.3, (0, (2, 1.5))), (panel.best, 2, "-")):
        for x, y in places:
            frame = Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fill=False, ec=FRAME, lw=width)
            frame.set_linestyle(style)
            ax.add_patch(frame)


def _draw_paths(ax: Any, panel: HeatPanel) -> None:
    """Paths from cell to cell below the numbers, marks in the upper right of their cells."""
    for path in panel.paths:
        ax.plot(
            [x + path.shift for x in path.x],
            [y + BELOW for y in path.y],
            "-o",
            color=colour_of(path.colour),
            mec="white",
            mew=0.5,
            ms=4,
            lw=1.3,
            label=path.label,
        )
    for mark in panel.marks:
        ax.plot(
            mark.x + 0.33,
            mark.y + 0.28,
            SYMBOLS[mark.symbol],
            color="white",
            mec="black",
            mew=0.7,
            ms=7,
            ls="none",
            label=mark.label,
        )


def _ink(value: float, panel: HeatPanel) -> str:
    """White on dark cells, which are the better ones."""
    return "white" if _share(value, panel) <= 0.45 else "black"


def _share(value: float, panel: HeatPanel) -> float:
    """How far a value is from the least to the most; 0 where all are equal."""
    assert panel.least is not None
    assert panel.most is not None
    width = panel.most - panel.least
    return (value - panel.least) / width if width else 0.0


# ---- ranges


def _save_ranges(figure: RangeFigure, path: Path, look: Look) -> None:
    height = max(1.8, 0.24 * figure.longest + 0.3)

    def size(columns: int, rows: int) -> tuple[float, float]:
        return 4.4 * columns + 0.6, (height + 0.7) * rows + 0.4

    style = {f"axes.spines.{side}": False for side in ("top", "right", "left")}
    explained: set[tuple[str, ...]] = set()
    with _canvas(figure, path, look, size, {"font.size": 8.5, **style}) as (_, axes):
        for ax, panel in zip(axes, figure.panels, strict=True):
            _draw_ranges(ax, panel)
            # Panels whose colours mean the same share the first one's legend.
            if panel.meaning not in explained:
                handles = _handles([ax]) | _hollow_handle(has_hollow(figure))
                ax.legend(
                    handles.values(),
                    handles.keys(),
                    loc="upper left",
                    bbox_to_anchor=(0.0, -0.6 / height),
                    frameon=False,
                    fontsize=8,
                )
            explained.add(panel.meaning)


def _draw_ranges(ax: Any, panel: RangePanel) -> None:
    from matplotlib.ticker import MaxNLocator

    names = [row.name for row in panel.ranges]
    for y, row in enumerate(panel.ranges):
        colour = colour_of(row.colour)
        inside = {"mfc": "white", "mew": 1.2} if row.hollow else {}
        ax.plot(row.mean, y, "o", ms=4.5, color=colour, label=row.label, **inside)
        if row.low is not None:
            ends = [row.low, row.high]
            ax.plot(ends, [y, y], "-", lw=1.8, color=colour, solid_capstyle="butt")
        # A thin line parts the groups of intervals that have one name.
        if y and row.name != names[y - 1]:
            ax.axhline(y - 0.5, color="#e6e8eb", lw=0.8)
    ax.axvline(0, color=GREY, lw=0.8)
    ax.set(title=_raised(panel.title), xlabel=panel.x_label, yticks=range(len(names)))
    ax.set_yticklabels(drawn_names([_raised(name) for name in names]))
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.grid(axis="x", **GRID)
    ax.set_axisbelow(True)
