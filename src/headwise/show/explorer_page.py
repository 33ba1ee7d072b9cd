"""The page of the explorer: one self-contained HTML file. Its formulas are JavaScript, held equal
to Shape's by tests/show/test_explorer_costs.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from headwise import __version__
from headwise.files import write_whole
from headwise.show.pages import embed

# In the order in which they need each other.
SCRIPTS = ("costs", "rules", "backends", "settings", "neighbours", "controls", "map", "page")


def write_explorer_page(path: Path, page: Mapping[str, Any], name: str = "") -> None:
    """Write the page of plain values: defaults and shape (fields), at (context, batch, dtype), and
    tasks, each a measured map."""
    write_whole(path, made_explorer_page(page, name))


def made_explorer_page(page: Mapping[str, Any], name: str = "") -> str:
    """The page as text, for a file of its own or for a frame of another page."""
    from jinja2 import Environment, StrictUndefined

    folder = resources.files("headwise").joinpath("show/templates/explorer")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(folder.joinpath("page.html").read_text()).render(
        version=__version__,
        name=name,
        embed=embed,
        page=dict(page),
        tasks=len(page["tasks"]),
        style=folder.joinpath("style.css").read_text(),
        scripts=[folder.joinpath(f"{script}.js").read_text() for script in SCRIPTS],
    )


def scripts_of(page: str) -> list[str]:
    """The scripts of the page, for a policy that lets a browser run these and no others."""
    return re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
