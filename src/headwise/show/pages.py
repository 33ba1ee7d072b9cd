"""What every page is made of: templates, the drawing library, values that are safe in a script."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from typing import Any


def part(name: str) -> str:
    """A file of `templates/` as text."""
    return resources.files("headwise").joinpath(f"show/templates/{name}").read_text("utf-8")


def plotly() -> str:
    """Plotly's library: its build with two axes (scatter, heatmap, box and their like), a third of
    the whole one's size. It lies here as it was published, beside its licence, since the Python
    package carries the whole one only."""
    return part("plotly-cartesian.min.js")


def environment() -> Any:
    """Templates whose values are text, never markup."""
    from jinja2 import Environment, StrictUndefined

    return Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def embed(value: Any) -> str:
    """JSON that is safe inside a script element."""
    from markupsafe import Markup

    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))


def digest(script: str) -> str:
    """A script as a page's policy names it: no other script of the page is run.

    >>> digest("1")
    "'sha256-a4ayc/80/OGda4BO/1o/V0etpOqiLx1JwB5S3beHW0s='"
    """
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
