"""The page of the explorer: one self-contained HTML file. Its formulas are JavaScript, held equal
to Shape's by tests/show/test_explorer_costs.py."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from headwise import __version__
from headwise.files import write_whole
from headwise.show.report import embed

# In the order in which they need each other.
SCRIPTS = ("costs", "rules", "backends", "settings", "neighbours", "controls", "map", "page")


def write_explorer_page(path: Path, page: Mapping[str, Any], name: str = "") -> None:
    """Write the page of plain values: defaults and shape (fields), at (context, batch, dtype), and
    tasks, each a measured map."""
    from jinja2 import Environment, StrictUndefined

    folder = resources.files("headwise").joinpath("show/templates/explorer")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.from_string(folder.joinpath("page.html").read_text()).render(
        version=__version__,
        name=name,
        embed=embed,
        page=dict(page),
        tasks=len(page["tasks"]),
        style=folder.joinpath("style.css").read_text(),
        scripts=[folder.joinpath(f"{script}.js").read_text() for script in SCRIPTS],
    )
    write_whole(path, text)
