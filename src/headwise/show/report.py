"""One self-contained HTML page from rows and descriptions of figures.

The same sections give the same bytes. The page is only written: delete it and nothing else changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise import __version__
from headwise.errors import UsageError
from headwise.files import write_whole
from headwise.progress import clock
from headwise.rows import Row
from headwise.show import figure as figures
from headwise.show.figure import Figure
from headwise.show.pages import embed, environment, part, plotly
from headwise.show.plotly_figure import plotly_figure

HIDDEN = {  # long columns: in the store, not in the table
    "command",
    "curve",
    "held_out_curve",
    "angle",
    "size",
    "checks",
    "score_angle",
    "score_norm",
    "score_angle_transposed",
    "score_norm_transposed",
}
MOST_POINTS = 200  # of a learning curve


# ---- what a section is made of


@dataclass(frozen=True, kw_only=True)
class Page:
    """What the page says about an experiment besides its rows. A store keeps it as plain values, so
    that the page of an experiment of one's own needs no code."""

    question: str
    about: str = ""
    headline: Sequence[str] = ()  # the claim in numbers
    note: str = ""  # what to bear in mind
    caption: str = ""  # of the first figure
    figures: Sequence[Figure] = ()
    headings: Sequence[str] = ()
    cells: Sequence[Sequence[str]] = ()  # a row per point
    trains: bool = True  # otherwise its rows are computed

    def to_json(self) -> dict[str, Any]:
        """As values that JSON has."""
        return {
            "question": self.question,
            "about": self.about,
            "headline": list(self.headline),
            "note": self.note,
            "caption": self.caption,
            "figures": [figures.to_json(one) for one in self.figures],
            "headings": list(self.headings),
            "cells": [list(row) for row in self.cells],
            "trains": self.trains,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Page:
        """What `to_json` gave these values for; refused if they are something else."""
        # The page of a user's experiment comes from a file, so its types are checked before the
        # template sees them.
        texts = ("question", "about", "note", "caption")
        cells = [cell for row in value["cells"] for cell in row]
        lines = [*value["headline"], *value["headings"], *cells]
        if not all(isinstance(text, str) for text in [*(value[name] for name in texts), *lines]):
            raise UsageError("what a page says must be text")
        if {len(row) for row in value["cells"]} - {len(value["headings"])}:
            raise UsageError("a table needs a cell per heading in every row")
        known = {name: part for name, part in value.items() if name in Page.__dataclass_fields__}
        drawn: Any = tuple(figures.from_json(one) for one in value["figures"])
        return Page(**dict(known, figures=drawn))


@dataclass(frozen=True, kw_only=True)
class Section:
    """One experiment of a store: what was asked for, its rows, and what the page says of them."""

    name: str
    command: str
    preset: str
    state: str  # how far it is
    rows: Sequence[Row]
    page: Page


# ---- the page


def write_page(path: Path, sections: Sequence[Section], lost: Sequence[str] = ()) -> None:
    """Write the page of these sections; `lost` says in a line each what cannot be page."""
    # Plotly's library goes into the page, so the page needs no network.
    made = environment()
    made.filters["number"] = _number
    made.filters["raised"] = _raised
    page = made.from_string(part("report.html")).render(
        version=__version__,
        sections=[_values(section) for section in sections],
        lost=lost,
        plotly=plotly(),
        embed=embed,
    )
    write_whole(path, page)


def _values(section: Section) -> dict[str, Any]:
    """A section as the template takes it."""
    rows, page = section.rows, section.page
    # Columns that are equal in all rows stand once above the table, the others in it.
    columns = list(dict.fromkeys(c for row in rows for c in row if c not in HIDDEN))
    # Rows of several versions may have different columns.
    same = {c: rows[0][c] for c in columns if all(c in r and r[c] == rows[0][c] for r in rows)}
    return {
        "name": section.name,
        "question": page.question,
        "about": page.about,
        "command": section.command,
        "preset": section.preset,
        "headline": page.headline,
        "note": page.note,
        "figures": [{**plotly_figure(one), "caption": one.caption} for one in page.figures],
        "caption": page.caption,
        "trained": page.trains,
        "headings": page.headings,
        "points": page.cells,
        "prose": [_is_prose(page.cells, i) for i in range(len(page.headings))],
        "rows": rows,
        "varying": [c for c in columns if c not in same],
        "same": same,
        "state": section.state,
        "time": clock(sum(r["seconds"] for r in rows)),
        "protocols": sorted({r["protocol"] for r in rows if "protocol" in r}),
        "commits": sorted({r["commit"] or "unknown" for r in rows}),
        "devices": sorted({r["device"] for r in rows}),
        "curves": _curves([r for r in rows if "curve" in r]),
    }


def _is_prose(cells: Sequence[Sequence[str]], column: int) -> bool:
    """Whether a column of the table is text: the first one, and any with a cell of several
    words."""
    return column == 0 or any(row[column][:1].isalpha() and " " in row[column] for row in cells)


# ---- learning curves


def _curves(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every run's learning curve."""
    several_rates = len({row.get("lr") for row in rows}) > 1
    out = []
    for row in rows:
        # At most 200 points of a curve are kept; rounding them keeps the page small.
        every = max(1, len(row["curve"]) // MOST_POINTS)
        # A language model's curve is by steps and in nats per token, its error in bits per byte.
        steps = row.get("epoch", 1)
        nats = row["held_out"] / row["bits_per_byte"] if row.get("bits_per_byte") else 1.0
        out.append(
            {
                "label": _label(row, several_rates),
                "id": row["id"],
                "every": every * row.get("curve_every", steps),
                "train": [_short(v) for v in row["curve"][::every]],
                "held_out": [
                    [epoch * steps, None if v is None else _short(v * nats)]
                    for epoch, v in row["held_out_curve"]
                ],
                "mean": "training, mean of an epoch" if "epoch" in row else "training",
                "loss": "loss, nats per token" if "bits_per_byte" in row else "loss",
            }
        )
    return out


def _label(row: Row, several_rates: bool) -> str:
    """A run in words."""
    depth, heads = row["depth"], row["num_heads"]
    words = [
        f"{depth} layer" + "s" * (depth != 1),
        f"{heads} head" + "s" * (heads != 1) + f" of rank {row['head_dim']}",
    ]
    if "protocol" in row:
        words.append(row["protocol"])
    if several_rates and "lr" in row:
        words.append(f"rate {row['lr']:g}")
    return ", ".join([*words, f"seed {row['seed']}"])


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


# ---- what the template calls


def _raised(text: str) -> Any:
    """d^2.5 with its exponent raised."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"\^([\d.]+)", r"<sup>\1</sup>", str(escape(text))))


def _number(value: Any) -> str:
    """A value of a row for people."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_number, value)) or "–"
    return str(value)
