"""Lines over panels for the page: means with intervals, their seeds, the paper's statistic, and
published values, each of which the page can hide."""

from __future__ import annotations

import math
from typing import Any

from headwise.show.colours import GREY, GRID, GROUND, colour_of
from headwise.show.figure import Line, LineFigure, fraction
from headwise.show.plotly_parts import Cell, Drawing, broken, raised


def add_lines(drawing: Drawing, figure: LineFigure) -> None:
    gap = 0.04 if figure.share_y else 0.08
    cells = drawing.grid(figure, gap, 240 if drawing.narrow else 280, 96 if drawing.narrow else 70)
    keys = _keys(figure)
    for cell, panel in zip(cells, figure.panels, strict=True):
        drawing.add_panel(cell, panel.title, _x_axis(drawing, figure, cell), _y_axis(figure, cell))
        # Where the y axis is shared, an interval that leaves one panel's picture would stretch all.
        seen = figure.panels if figure.share_y else [panel]
        if figure.y_scale == "log" and any(figure.leaves_picture(one) for one in seen):
            ends = {"minallowed": math.log10(figure.floor)}
            drawing.layout[f"yaxis{cell.suffix}"]["autorangeoptions"] = ends
        _add_reference(drawing, cell, figure)
        for line in panel.lines:
            key, name = keys[line.label]
            entry = {
                "label": raised(name),
                "colour": colour_of(line.colour),
                "style": line.style,
            }
            drawing.add_trace(cell, key, _kind(line), _trace(figure, line), entry)
            if any(len(values) > 1 for values in line.seeds):
                drawing.add_trace(cell, key, "seed", _seeds(line), entry)


PREFIXES = {"statistic": "the paper's statistic", "published": "published"}


def _kind(line: Line) -> str:
    """What the page can hide and show of all series at once; "line" has no button."""
    if line.style == "solid" and line.low:
        return "mean"
    kind = {"dots": "statistic", "dashed": "published"}.get(line.style, "")
    return kind if kind and line.label.startswith(PREFIXES[kind]) else "line"


def _keys(figure: LineFigure) -> dict[str, tuple[Any, str]]:
    """The legend's entry of every label and its name.

    Lines of one colour are one entry where they are the same thing, measured in several ways: held
    out, by the paper's statistic, as published. Else each label is an entry.
    """
    lines = [line for panel in figure.panels for line in panel.lines]
    own: dict[int, set[str]] = {}
    for line in lines:
        if _kind(line) in ("mean", "line"):
            own.setdefault(line.colour, set()).add(line.label)
    out: dict[str, tuple[Any, str]] = {}
    for line in lines:
        labels = own.get(line.colour, set())
        if len(labels) == 1:
            out[line.label] = (line.colour, next(iter(labels)).removeprefix("held out, "))
        else:
            out[line.label] = (line.label, line.label)
    return out


AXIS = {
    "gridcolor": GRID,
    "zeroline": False,
    "linecolor": GREY,
    "ticks": "outside",
    "tickcolor": GREY,
}


def _x_axis(drawing: Drawing, figure: LineFigure, cell: Cell) -> dict[str, Any]:
    title = {"text": figure.x_label if cell.lowest or drawing.narrow else "", "standoff": 6}
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
    return axis | ({"matches": "y"} if cell.suffix and figure.share_y else {})


def _add_reference(drawing: Drawing, cell: Cell, figure: LineFigure) -> None:
    """The reference line across a panel; the first panel has its name."""
    if figure.reference is None:
        return
    y = figure.reference.y
    # On a log axis Plotly takes an annotation's place as a logarithm, but a shape's as the value.
    if not cell.suffix:
        drawing.layout["annotations"].append(
            {
                "text": raised(figure.reference.label),
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
    drawing.layout["shapes"].append(
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
        "name": raised(line.label),
        "mode": "lines+markers",
        "line": {"color": colour, "width": 2},
        "marker": {"size": 7},
        "text": [_about(line, i) for i in range(len(line.x))],
        "customdata": [list(ids) for ids in line.runs],
        "hovertemplate": f"<b>{raised(line.label)}</b><br>%{{text}}<extra></extra>",
        **looks[line.style],
    }
    if any(line.single):
        inside = [GROUND if one else colour for one in line.single]
        trace["marker"] = {"size": 7, "color": inside, "line": {"color": colour, "width": 1.5}}
    if line.style == "solid" and line.has_interval:
        trace["error_y"] = _error_bars(figure, line)
    return trace


def _about(line: Line, i: int) -> str:
    """A point under the mouse: its value with the interval, and its settings."""
    y = line.y[i]
    if y is None:
        return ""
    low, high = (ends[i] if ends else None for ends in (line.low, line.high))
    known = low is not None and high is not None
    said = f"{y:.4g} ± {(high - low) / 2:.2g}" if known else f"{y:.4g}"
    return f"{said}<br>{broken(line.text[i])}" if line.text and line.text[i] else said


def _seeds(line: Line) -> dict[str, Any]:
    """Every seed of a line as a faint marker, hidden until it is asked for. What a marker says
    under the mouse the page makes from the run's row."""
    ids = line.runs or [[""] * len(values) for values in line.seeds]
    pairs = [(x, y) for x, values in zip(line.x, line.seeds, strict=True) for y in values]
    return {
        "x": [x for x, _ in pairs],
        "y": [y for _, y in pairs],
        "name": raised(line.label),
        "mode": "markers",
        "visible": False,
        "marker": {"size": 5, "symbol": "circle-open", "color": colour_of(line.colour)},
        "customdata": [[run] for runs in ids for run in runs],
    }


def _error_bars(figure: LineFigure, line: Line) -> dict[str, Any]:
    up: list[float | None] = []
    down: list[float | None] = []
    # Plotly takes distances from the point, not ends of the interval.
    for y, low, high in zip(line.y, line.low, line.high, strict=True):
        up.append(None if y is None or high is None else high - y)
        down.append(None if y is None or low is None else y - figure.drawn_low(low))
    bars = {"type": "data", "symmetric": False, "thickness": 1.2, "width": 3}
    return {**bars, "array": up, "arrayminus": down}
