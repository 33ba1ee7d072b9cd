"""What commands say: answers on standard output, the rest on standard error, one process speaking
for all."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise.experiments.base import Experiment
    from headwise.experiments.points import Point


def first() -> bool:
    """Whether this is the first, or the only one, of the processes that torchrun started: it speaks
    for all."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    if first():
        print(text, file=sys.stderr, flush=True)


def print_table(table: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    words = [
        i == 0 or any(row[i][:1].isalpha() and " " in row[i] for row in table[1:])
        for i in range(len(widths))
    ]  # prose stands left
    for row in table:
        cells = (
            cell.ljust(w) if left else cell.rjust(w)
            for cell, w, left in zip(row, widths, words, strict=True)
        )
        print("  ".join(cells).rstrip())


def print_points(experiment: Experiment[Any, Any], points: Sequence[Point]) -> None:
    """An experiment's table: a line per point."""
    headings = [heading for _, heading in experiment.columns]
    print_table([headings, *([p.cell(key) for key, _ in experiment.columns] for p in points)])
