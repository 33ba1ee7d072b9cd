"""Published values, as they were read off the papers' figures: `published/*.csv`."""

from __future__ import annotations

import csv
from importlib import resources


def published_values(name: str) -> list[dict[str, str]]:
    """The rows of one of the files of published values; lines with # are comments."""
    text = resources.files("headwise").joinpath(f"experiments/published/{name}.csv").read_text()
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
