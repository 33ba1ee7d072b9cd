"""A figure for the page: Plotly's data and layout as plain values. The page carries the library, so
nothing is imported here."""

from __future__ import annotations

import dataclasses
from typing import Any

from headwise.show.colours import FRAME, GREY, GRID, GROUND, colour_of
from headwise.show.figure import (
    BELOW,
    Figure,
    HeatFigure,
    HeatPanel,
    LineFigure,
    Range,
    RangeFigure,
    drawn_names,
    has_hollow,
)
from headwise.show.plotly_lines import add_lines
from headwise.show.plotly_parts import Cell, Drawing, broken, raised


def plotly_figure(figure: Figure) -> dict[str, Any]:
    """A figure as Plotly's `data`, a `layout` for wide windows and one for `narrow` ones with its
    panels under each other, and the `legend` that the page makes of buttons."""
    wide = _drawn(figure)
    one_column = _drawn(dataclasses.replace(figure, columns=1), narrow=True)
    return {
        "title": figure.title,
        "data": wide.data,
        "layout": wide.layout,
        "narrow": one_column.layout,
        "legend": {"series": list(wide.series.values()), "kinds": sorted(wide.kinds)},
        "hollow": has_hollow(figure),
    }


def _drawn(figure: Figure, narrow: bool = False) -> Drawing:
    drawing = Drawing(figure, narrow)
    if isinstance(figure, LineFigure):
        add_lines(drawing, figure)
    elif isinstance(figure, HeatFigure):
        _add_heat(drawing, figure)
    else:
        _add_ranges(drawing, figure)
    return drawing


# ---- heat


def _add_heat(drawing: Drawing, figure: HeatFigure) -> None:
    tall = max(200, 34 * len(figure.y_names))
    for cell, panel in zip(drawing.grid(figure, 0.06, tall, 84), figure.panels, strict=True):
        x_axis = _name_axis(figure.x_label, figure.x_names)
        y_axis = _name_axis(figure.y_label, figure.y_names)
        drawing.add_panel(cell, panel.title, x_axis, y_axis)
        _add_cells(drawing, cell, figure, panel)
        _add_paths(drawing, cell, panel)


def _name_axis(label: str, names: Any) -> dict[str, Any]:
    return {
        "showgrid": False,
        "zeroline": False,
        "ticks": "",
        "tickvals": list(range(len(names))),
        "ticktext": list(names),
        "range": [-0.5, len(names) - 0.5],
        "title": {"text": label, "standoff": 6},
    }


def _add_cells(drawing: Drawing, cell: Cell, figure: HeatFigure, panel: HeatPanel) -> None:
    """Colours with their numbers, and frames around the best."""
    drawing.data.append(
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
                [_number(panel, x, y) for x in range(len(row))] for y, row in enumerate(panel.cells)
            ],
            "texttemplate": "%{text}<br> ",  # above the paths
            "customdata": _of_cells(figure, panel),
            "hovertemplate": "%{customdata}<extra></extra>",
            "hoverongaps": False,
            **cell.axes,
        }
    )
    dashed = {"color": FRAME, "width": 2, "dash": "dot"}
    for places, line in ((panel.alike, dashed), (panel.best, {"color": FRAME, "width": 3})):
        for x, y in places:
            drawing.layout["shapes"].append(
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


def _number(panel: HeatPanel, x: int, y: int) -> str:
    """What stands on a cell: white on dark ones, which are the better ones, black on others."""
    value = panel.cells[y][x]
    if value is None or panel.least is None or panel.most is None:
        return ""
    dark = value - panel.least <= 0.45 * (panel.most - panel.least)
    return f'<span style="color:{"white" if dark else "black"}">{panel.number(x, y)}</span>'


def _of_cells(figure: HeatFigure, panel: HeatPanel) -> list[list[str]]:
    """What is shown for each cell under the mouse."""
    return [
        [
            f"<b>{raised(figure.y_label)} {raised(row)}, {raised(figure.x_label)} "
            f"{raised(column)}: {panel.number(x, y)}</b>"
            + (f"<br>{broken(panel.text[y][x])}" if panel.text and panel.text[y][x] else "")
            for x, column in enumerate(figure.x_names)
        ]
        for y, row in enumerate(figure.y_names)
    ]


def _add_paths(drawing: Drawing, cell: Cell, panel: HeatPanel) -> None:
    """Paths from cell to cell below the numbers, marks in the upper right of their cells."""
    for path in panel.paths:
        colour = colour_of(path.colour)
        trace = {
            "mode": "lines+markers",
            "x": [x + path.shift for x in path.x],
            "y": [y + BELOW for y in path.y],
            "name": raised(path.label),
            "hoverinfo": "skip",
            "line": {"color": colour, "width": 2},
            "marker": {"size": 7, "line": {"color": GROUND, "width": 1}},
        }
        entry = {"label": raised(path.label), "colour": colour, "style": "solid"}
        drawing.add_trace(cell, path.label, "line", trace, entry)
    for mark in panel.marks:
        outline = {"color": "black", "width": 1}
        look = {"symbol": mark.symbol, "size": 13, "color": "white", "line": outline}
        trace = {
            "mode": "markers",
            "x": [mark.x + 0.33],
            "y": [mark.y + 0.28],
            "name": raised(mark.label),
            "hoverinfo": "name",
            "marker": look,
        }
        entry = {"label": raised(mark.label), "colour": GREY, "style": mark.symbol}
        drawing.add_trace(cell, mark.label, "line", trace, entry)


# ---- ranges


def _add_ranges(drawing: Drawing, figure: RangeFigure) -> None:
    """24 pixels per interval and 90 between rows of panels. On a phone names stand above their
    intervals instead of beside them, 40 pixels each."""
    each = 40 if drawing.narrow else 24
    for cell, panel in zip(
        drawing.grid(figure, 0.12, max(60, each * figure.longest), 96), figure.panels, strict=True
    ):
        names = [raised(row.name) for row in panel.ranges]
        x_axis = {
            "gridcolor": GRID,
            "zeroline": True,
            "zerolinecolor": GREY,
            "rangemode": "tozero",
            "title": {"text": panel.x_label, "standoff": 6},
        }
        y_axis = {
            "range": [len(names) - 0.5, -0.5 - 0.3 * drawing.narrow],
            "showgrid": False,
            "zeroline": False,
            "tickvals": list(range(len(names))),
            "ticktext": [""] * len(names) if drawing.narrow else drawn_names(names),
            "automargin": True,
            "title": {"text": ""},
        }
        drawing.add_panel(cell, panel.title, x_axis, y_axis)
        if drawing.narrow:
            _add_names(drawing, cell, drawn_names(names))
        for y, (row, name) in enumerate(zip(panel.ranges, names, strict=True)):
            key = f"{row.label} of {'; '.join(panel.meaning)}"
            entry = {"label": raised(row.label), "colour": colour_of(row.colour), "style": "solid"}
            drawing.add_trace(cell, key, "line", _range(row, name, y), entry)


def _add_names(drawing: Drawing, cell: Cell, names: list[str]) -> None:
    """Names of intervals above them, at the left."""
    drawing.layout["margin"]["l"] = 14
    for y, name in enumerate(names):
        drawing.layout["annotations"].append(
            {
                "text": name,
                "x": 0,
                "xref": f"x{cell.suffix} domain",
                "xanchor": "left",
                "yref": f"y{cell.suffix}",
                "y": y - 0.2,
                "yanchor": "bottom",
                "showarrow": False,
                "font": {"size": 11},
            }
        )


def _range(row: Range, name: str, y: int) -> dict[str, Any]:
    """One interval: a trace of its own, so that it has its own colour and text under the mouse."""
    colour = colour_of(row.colour)
    bar: dict[str, Any] = {"array": [0]}
    said = f"{row.mean:.3g}"
    if row.low is not None and row.high is not None:
        bar = {"array": [row.high - row.mean], "arrayminus": [row.mean - row.low]}
        said += f" ({row.low:.3g} to {row.high:.3g})"
    look = {"thickness": 2, "width": 0, "color": colour}
    more = f"<br>{broken(row.text)}" if row.text else ""
    inside = GROUND if row.hollow else colour
    return {
        "mode": "markers",
        "x": [row.mean],
        "y": [y],
        "cliponaxis": False,
        "name": raised(row.label),
        "marker": {"size": 9, "color": inside, "line": {"color": colour, "width": 1.5}},
        "error_x": {"type": "data", "symmetric": False, **bar, **look},
        "text": [f"{said}{more}"],
        "hovertemplate": f"<b>{name}</b><br>{raised(row.label)}: %{{text}}<extra></extra>",
    }
