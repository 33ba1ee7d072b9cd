"""The page of a plan: one self-contained HTML file with every row, filters, and a scatter of two
costs with the rows that no other beats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise import __version__
from headwise.files import write_whole
from headwise.show.pages import embed, environment, part, plotly


def write_plan_page(path: Path, values: Mapping[str, Any]) -> None:
    """Write the page of plain values: command, lines, columns, rows, axes, same, total and
    like."""
    # Plotly's library goes into the page, so the page needs no network.
    page = (
        environment()
        .from_string(part("plan.html"))
        .render(version=__version__, plotly=plotly(), embed=embed, **values)
    )
    write_whole(path, page)
