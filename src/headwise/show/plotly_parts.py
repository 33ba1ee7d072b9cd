"""What every figure of a page is made of: a grid of panels, and texts as Plotly reads them."""

from __future__ import annotations

import html
import re
import textwrap
from dataclasses import dataclass
from typing import Any

from headwise.show.colours import GROUND, INK
from headwise.show.figure import Figure


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


class Drawing:
    """The data and the layout while they grow."""

    def __init__(self, figure: Figure, narrow: bool) -> None:
        self.data: list[dict[str, Any]] = []
        self.series: dict[Any, dict[str, Any]] = {}  # entries of the legend
        self.kinds: set[str] = set()  # mean, seed, statistic, published: what is there
        self.narrow = narrow
        self.columns = min(figure.columns, len(figure.panels)) or 1
        self.rows = max(1, -(-len(figure.panels) // self.columns))
        self.layout: dict[str, Any] = {
            "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
            "plot_bgcolor": GROUND,
            "paper_bgcolor": GROUND,
            "margin": {"l": 52 if narrow else 60, "r": 10, "t": 34, "b": 56},
            "hovermode": "closest",
            "hoverlabel": {"align": "left", "namelength": -1},
            "dragmode": False if narrow else "zoom",  # a finger scrolls the page
            "showlegend": False,
            "annotations": [],
            "shapes": [],
        }

    def grid(self, figure: Figure, gap: float, tall: float, drop: float) -> list[Cell]:
        """The cells of a figure's panels: `gap` between columns is a share of the page, `tall` of a
        panel and `drop` between rows are pixels."""
        height = self.rows * tall + (self.rows - 1) * drop
        margin = self.layout["margin"]
        self.layout["height"] = round(height + margin["t"] + margin["b"])
        # Panels fill the page from the top left. Plotly's domains run from the bottom up.
        width = (1 - gap * (self.columns - 1)) / self.columns
        share, step = tall / height, (tall + drop) / height
        cells = []
        for i in range(len(figure.panels)):
            left = (i % self.columns) * (width + gap)
            bottom = max(0.0, 1 - share - (i // self.columns) * step)
            across, up = (left, left + width), (bottom, bottom + share)
            suffix = "" if i == 0 else str(i + 1)
            lowest = i + self.columns >= len(figure.panels)
            cells.append(Cell(suffix, across, up, lowest, i % self.columns == 0))
        return cells

    def add_panel(self, cell: Cell, title: str, x: dict[str, Any], y: dict[str, Any]) -> None:
        """A panel's two axes, and its title in the middle above it."""
        # Plotly has no panels: a pair of axes has its domain on the page, and traces name their
        # axes.
        place = {"domain": list(cell.across), "anchor": f"y{cell.suffix}"}
        self.layout[f"xaxis{cell.suffix}"] = place | x
        place = {"domain": list(cell.up), "anchor": f"x{cell.suffix}"}
        self.layout[f"yaxis{cell.suffix}"] = place | y
        left, right = cell.across
        letters = 44 if self.narrow else 150 // self.columns
        for axis in (self.layout[f"xaxis{cell.suffix}"], self.layout[f"yaxis{cell.suffix}"]):
            axis["title"]["text"] = broken(axis["title"]["text"], letters)
        self.layout["annotations"].append(
            {
                "text": broken(title, letters),
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

    def add_trace(
        self, cell: Cell, key: Any, kind: str, trace: dict[str, Any], entry: dict[str, Any]
    ) -> None:
        """A trace of a kind, which belongs to the legend's entry of that key."""
        found = self.series.setdefault(key, {"number": len(self.series), **entry})
        meta = {"series": found["number"], "kind": kind}
        self.data.append({"type": "scatter", **trace, "meta": meta, **cell.axes})
        self.kinds.add(kind)


def raised(text: str) -> str:
    """d^2.5 with its exponent raised, as the HTML that Plotly reads."""
    return re.sub(r"\^([\d.]+)", r"<sup>\1</sup>", html.escape(text, quote=False))


def broken(text: str, width: int = 46) -> str:
    """Text under the mouse: as the HTML that Plotly reads, in lines that a phone has room for."""
    return "<br>".join(raised(line) for line in textwrap.wrap(text, width))
