"""The page of a plan: one self-contained HTML file with every row, filters, and a scatter of two
costs with the rows that no other beats."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from headwise import __version__
from headwise.files import write_whole
from headwise.show.report import embed


def write_plan_page(path: Path, values: Mapping[str, Any]) -> None:
    """Write the page of plain values: command, lines, columns, rows, axes, same, total and
    like."""
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    # Plotly's library goes into the page, so the page needs no network.
    template = resources.files("headwise").joinpath("show/templates/plan.html").read_text()
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(template).render(
        version=__version__, plotly=get_plotlyjs(), embed=embed, **values
    )
    write_whole(path, page)
