"""A figure for the page: Plotly's data and layout as plain values. The page carries the library, so
nothing is imported here."""

from __future__ import annotations

import html
import math
import re
from dataclasses import dataclass
from typing import Any

from headwise.show.figure import (
    BELOW,
    FRAME,
    GREY,
    ONE_SEED,
    Figure,
    HeatFigure,
    HeatPanel,
    Line,
    LineFigure,
    RangeFigure,
    colour_of,
    drawn_names,
    fraction,
    has_hollow,
)


def plotly_figure(figure: Figure) -> dict[str, Any]:
    """A figure as Plotly's `data` and `layout`."""
    if isinstance(figure, LineFigure):
        page = _lines(figure)
    elif isinstance(figure, HeatFigure):
        page = _heat(figure)
    else:
        page = _ranges(figure)
    return {"data": page.data, "layout": page.layout}


# ---- what the three kinds share: a grid of axes, titles, a legend that has each label once


@dataclass(frozen=True)
class Cell:
    """Where a panel stands: the suffix of its axes' names, its ends across and up as shares of the
    page, and whether it is the lowest of its column and the first of its row."""

    suffix: str
    across: tuple[float, float]
    up: tuple[float, float]
    lowest: bool
    first: bool

    @property
    def axes(self) -> dict[str, str]:
        """The axes that a trace or a shape is drawn on."""
        return {"xaxis": f"x{self.suffix}", "yaxis": f"y{self.suffix}"}


class _Page:
    """The data and the layout while they grow."""

    def __init__(self, title: str, height: float) -> None:
        self.data: list[dict[str, Any]] = []
        self.labels: set[str] = set()
        self.layout: dict[str, Any] = {
            "title": {"text": title, "x": 0, "xref": "paper", "font": {"size": 15}},
            "font": {"family": "system-ui, sans-serif", "size": 12},
            "plot_bgcolor": "white",
            "height": height,
            "margin": {"l": 60, "r": 10, "t": 80, "b": 60},
            "hovermode": "closest",
            "annotations": [],
            "shapes": [],
            "legend": {"orientation": "v", "x": 1.02, "y": 1, "font": {"size": 11}},
        }

    def add_panel(self, cell: Cell, title: str, x: dict[str, Any], y: dict[str, Any]) -> None:
        """A panel's two axes, and its title in the middle above it."""
        # Plotly has no panels: a pair of axes has its domain on the page, and traces name their
        # axes.
        place = {"domain": list(cell.across), "anchor": f"y{cell.suffix}"}
        self.layout[f"xaxis{cell.suffix}"] = place | x
        place = {"domain": list(cell.up), "anchor": f"x{cell.suffix}"}
        self.layout[f"yaxis{cell.suffix}"] = place | y
        left, right = cell.across
        self.layout["annotations"].append(
            {
                "text": _raised(title),
                "x": left + (right - left) / 2,
                "y": cell.up[1],
                "xref": "paper",
                "yref": "paper",
                "xanchor": "center",
                "yanchor": "bottom",
                "showarrow": False,
                "font": {"size": 13},
            }
        )

    def add_trace(self, cell: Cell, label: str, trace: dict[str, Any], group: str = "") -> None:
        """A trace, which the legend names if no other of its group was there before."""
        group = group or label
        legend = {"legendgroup": group, "showlegend": group not in self.labels}
        self.data.append({"type": "scatter", **trace, **legend, **cell.axes})
        self.labels.add(group)

    def explain_hollow(self, cell: Cell) -> None:
        """A line of the legend about hollow markers."""
        look = {"size": 7, "color": "white", "line": {"color": GREY, "width": 1.5}}
        marker = {"mode": "markers", "x": [None], "y": [None], "marker": look}
        self.add_trace(cell, ONE_SEED, {**marker, "name": ONE_SEED, "hoverinfo": "skip"})


def _grid(figure: Figure, gap: float, drop: float) -> list[Cell]:
    """The cells of a figure's panels, `gap` between columns and `drop` between rows, all as shares
    of the page."""
    count = len(figure.panels)
    columns, rows = _size(figure)
    # Panels fill the page from the top left. Plotly's domains run from the bottom up.
    width = (1 - gap * (columns - 1)) / columns
    height = (1 - drop * (rows - 1)) / rows
    cells = []
    for i in range(count):
        left = (i % columns) * (width + gap)
        bottom = 1 - height - (i // columns) * (height + drop)
        across, up = (left, left + width), (bottom, bottom + height)
        suffix = "" if i == 0 else str(i + 1)
        cells.append(Cell(suffix, across, up, i + columns >= count, i % columns == 0))
    return cells


def _size(figure: Figure) -> tuple[int, int]:
    """Columns and rows."""
    columns = min(figure.columns, len(figure.panels)) or 1
    return columns, max(1, -(-len(figure.panels) // columns))


def _raised(text: str) -> str:
    """d^2.5 with its exponent raised, as the HTML that Plotly reads."""
    return re.sub(r"\^([\d.]+)", r"<sup>\1</sup>", html.escape(text, quote=False))


# ---- lines


def _lines(figure: LineFigure) -> _Page:
    _, rows = _size(figure)
    page = _Page(figure.title, 140 + 320 * rows)
    gap = 0.04 if figure.share_y else 0.08
    drop = 0.28 / rows if rows > 1 else 0.0  # as many pixels for any number of rows
    for cell, panel in zip(_grid(figure, gap, drop), figure.panels, strict=True):
        page.add_panel(cell, panel.title, _x_axis(figure, cell), _y_axis(figure, cell))
        # Where the y axis is shared, an interval that leaves one panel's picture would stretch all.
        seen = figure.panels if figure.share_y else [panel]
        if figure.y_scale == "log" and any(figure.leaves_picture(one) for one in seen):
            ends = {"minallowed": math.log10(figure.floor)}
            page.layout[f"yaxis{cell.suffix}"]["autorangeoptions"] = ends
        _add_reference(page, cell, figure)
        for line in panel.lines:
            page.add_trace(cell, line.label, _trace(figure, line))
    if has_hollow(figure):
        page.explain_hollow(_grid(figure, gap, drop)[0])
    return page


AXIS = {
    "gridcolor": "#eceef1",
    "zeroline": False,
    "linecolor": GREY,
    "ticks": "outside",
    "tickcolor": GREY,
}


def _x_axis(figure: LineFigure, cell: Cell) -> dict[str, Any]:
    title = {"text": figure.x_label if cell.lowest else ""}
    axis: dict[str, Any] = {**AXIS, "showgrid": False, "type": figure.x_scale, "title": title}
    if figure.x_scale == "log":
        names = [fraction(x) for x in figure.ticks]
        axis |= {"tickvals": figure.ticks, "ticktext": names}
    return axis | ({"matches": "x"} if cell.suffix else {})


def _y_axis(figure: LineFigure, cell: Cell) -> dict[str, Any]:
    axis: dict[str, Any] = {
        **AXIS,
        "showticklabels": cell.first or not figure.share_y,
        "type": figure.y_scale,
        "exponentformat": "power",
        "title": {"text": figure.y_label if cell.first else "", "standoff": 8},
        "automargin": True,
    }
    if figure.y_scale == "log" and figure.floor > 1e-6:
        axis["dtick"] = 1
    return axis | ({"matches": "y"} if cell.suffix and figure.share_y else {})


def _add_reference(page: _Page, cell: Cell, figure: LineFigure) -> None:
    """The reference line across a panel; the first panel has its name."""
    if figure.reference is None:
        return
    y = figure.reference.y
    # On a log axis Plotly takes an annotation's place as a logarithm, but a shape's as the value.
    if not cell.suffix:
        page.layout["annotations"].append(
            {
                "text": _raised(figure.reference.label),
                "x": 0.01,
                "xref": "x domain",
                "xanchor": "left",
                "yref": "y",
                "y": math.log10(y) if figure.y_scale == "log" else y,
                "yanchor": "bottom",
                "showarrow": False,
                "font": {"size": 11, "color": GREY},
            }
        )
    page.layout["shapes"].append(
        {
            "type": "line",
            "x0": 0,
            "x1": 1,
            "y0": y,
            "y1": y,
            "xref": f"x{cell.suffix} domain",
            "yref": f"y{cell.suffix}",
            "line": {"color": GREY, "width": 1, "dash": "dot"},
        }
    )


def _trace(figure: LineFigure, line: Line) -> dict[str, Any]:
    colour = colour_of(line.colour)
    # What the styles differ in is laid over what all lines have.
    looks: dict[str, dict[str, Any]] = {
        "solid": {},
        "line": {"mode": "lines"},
        "dots": {
            "mode": "markers",
            "marker": {"symbol": "x-thin", "size": 11, "line": {"width": 2, "color": colour}},
        },
        "dashed": {
            "opacity": 0.5,
            "line": {"color": colour, "width": 1, "dash": "dash"},
            "marker": {"size": 5, "symbol": "square"},
        },
    }
    trace = {
        "x": list(line.x),
        "y": list(line.y),
        "name": _raised(line.label),
        "mode": "lines+markers",
        "line": {"color": colour, "width": 2},
        "marker": {"size": 7},
        "text": list(line.text) or [""] * len(line.x),
        "hovertemplate": f"%{{y:.4f}}<br>%{{text}}<extra>{_raised(line.label)}</extra>",
        **looks[line.style],
    }
    if any(line.single):
        inside = ["white" if one else colour for one in line.single]
        trace["marker"] = {"size": 7, "color": inside, "line": {"color": colour, "width": 1.5}}
    if line.style == "solid" and line.has_interval:
        trace["error_y"] = _error_bars(figure, line)
    return trace


def _error_bars(figure: LineFigure, line: Line) -> dict[str, Any]:
    up: list[float | None] = []
    down: list[float | None] = []
    # Plotly takes distances from the point, not ends of the interval.
    for y, low, high in zip(line.y, line.low, line.high, strict=True):
        up.append(None if y is None or high is None else high - y)
        down.append(None if y is None or low is None else y - figure.drawn_low(low))
    bars = {"type": "data", "symmetric": False, "thickness": 1.2, "width": 3}
    return {**bars, "array": up, "arrayminus": down}


# ---- heat


def _heat(figure: HeatFigure) -> _Page:
    _, rows = _size(figure)
    page = _Page(figure.title, 140 + 300 * rows)
    for cell, panel in zip(_grid(figure, 0.06, 0.14), figure.panels, strict=True):
        x_axis = _name_axis(figure.x_label, figure.x_names)
        y_axis = _name_axis(figure.y_label, figure.y_names)
        page.add_panel(cell, panel.title, x_axis, y_axis)
        _add_cells(page, cell, figure, panel)
        _add_paths(page, cell, panel)
    return page


def _name_axis(label: str, names: Any) -> dict[str, Any]:
    return {
        "showgrid": False,
        "zeroline": False,
        "ticks": "",
        "tickvals": list(range(len(names))),
        "ticktext": list(names),
        "range": [-0.5, len(names) - 0.5],
        "title": {"text": label},
    }


def _add_cells(page: _Page, cell: Cell, figure: HeatFigure, panel: HeatPanel) -> None:
    """Colours with their numbers, and frames around the best."""
    place = f"{figure.y_label} %{{y}}, {figure.x_label} %{{x}}"
    page.data.append(
        {
            "type": "heatmap",
            "z": [list(row) for row in panel.cells],
            "x": list(range(len(figure.x_names))),
            "y": list(range(len(figure.y_names))),
            "zmin": panel.least,
            "zmax": panel.most,
            "colorscale": "Viridis",
            "showscale": False,
            "text": [
                [panel.number(x, y) for x in range(len(row))] for y, row in enumerate(panel.cells)
            ],
            "texttemplate": "%{text}<br> ",  # above the paths
            "hovertemplate": f"{place}: %{{z:.4f}}<extra></extra>",
            "hoverongaps": False,
            **cell.axes,
        }
    )
    dashed = {"color": FRAME, "width": 2, "dash": "dot"}
    for places, line in ((panel.alike, dashed), (panel.best, {"color": FRAME, "width": 3})):
        for x, y in places:
            page.layout["shapes"].append(
                {
                    "type": "rect",
                    "x0": x - 0.47,
                    "x1": x + 0.47,
                    "y0": y - 0.46,
                    "y1": y + 0.46,
                    "xref": cell.axes["xaxis"],
                    "yref": cell.axes["yaxis"],
                    "line": line,
                }
            )


def _add_paths(page: _Page, cell: Cell, panel: HeatPanel) -> None:
    """Paths from cell to cell below the numbers, marks in the upper right of their cells."""
    for path in panel.paths:
        trace = {
            "mode": "lines+markers",
            "x": [x + path.shift for x in path.x],
            "y": [y + BELOW for y in path.y],
            "name": path.label,
            "hoverinfo": "skip",
            "line": {"color": colour_of(path.colour), "width": 2},
            "marker": {"size": 7, "line": {"color": "white", "width": 1}},
        }
        page.add_trace(cell, path.label, trace)
    for mark in panel.marks:
        outline = {"color": "black", "width": 1}
        trace = {
            "mode": "markers",
            "x": [mark.x + 0.33],
            "y": [mark.y + 0.28],
            "name": mark.label,
            "hoverinfo": "name",
            "marker": {"symbol": mark.symbol, "size": 13, "color": "white", "line": outline},
        }
        page.add_trace(cell, mark.label, trace)


# ---- ranges


def _ranges(figure: RangeFigure) -> _Page:
    """24 pixels per interval, 90 between rows of panels, and as many to the legend below."""
    _, rows = _size(figure)
    height = rows * 24 * figure.longest + 90 * (rows - 1)
    drop = 90 / (height + 60)
    page = _Page(figure.title, 300 + height)
    page.layout["legend"] |= {"orientation": "h", "x": 0, "y": -drop, "yanchor": "top"}
    page.layout["margin"] |= {"b": 180}
    for cell, panel in zip(_grid(figure, 0.12, drop), figure.panels, strict=True):
        names = [_raised(row.name) for row in panel.ranges]
        x_axis = {
            "gridcolor": "#eceef1",
            "zeroline": True,
            "zerolinecolor": GREY,
            "title": {"text": panel.x_label},
        }
        y_axis = {
            "range": [len(names) - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
            "tickvals": list(range(len(names))),
            "ticktext": drawn_names(names),
            "automargin": True,
        }
        page.add_panel(cell, panel.title, x_axis, y_axis)
        # One trace per interval, so that each has its own colour and text under the mouse.
        for y, (row, name) in enumerate(zip(panel.ranges, names, strict=True)):
            colour = colour_of(row.colour)
            bar: dict[str, Any] = {"array": [0]}
            if row.low is not None and row.high is not None:
                bar = {"array": [row.high - row.mean], "arrayminus": [row.mean - row.low]}
            look = {"thickness": 2, "width": 0, "color": colour}
            inside = "white" if row.hollow else colour
            trace = {
                "mode": "markers",
                "x": [row.mean],
                "y": [y],
                "name": row.label,
                "marker": {"size": 9, "color": inside, "line": {"color": colour, "width": 1.5}},
                "error_x": {"type": "data", "symmetric": False, **bar, **look},
                "hovertemplate": f"{name}, {row.label}: %{{x:.3g}}<extra></extra>",
            }
            page.add_trace(cell, row.label, trace, f"{row.label} of {'; '.join(panel.meaning)}")
    if has_hollow(figure):
        page.explain_hollow(_grid(figure, 0.12, drop)[0])
    return page
