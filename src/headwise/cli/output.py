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
    from headwise.experiments.runner import Made


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
    print_table(experiment.table(points))


def print_made(made: Made, show: bool = False) -> dict[str, Any]:
    """The table, the claim and the files; returns what --json prints."""
    from headwise.experiments.points import plain_point

    print_points(made.experiment, made.points)
    state = [] if made.state.finished else [made.state.in_words]
    for line in (*state, *made.headline, *([made.note] if made.note else [])):
        print(line)
    files = {"figure": made.picture, "report": made.page}
    written = {what: str(path) for what, path in files.items() if path}
    for what, path in written.items():
        print(f"{what}: {path}")
    counts = made.counts
    if counts.failed:
        say(f"headwise: {counts.failed} of {len(made.points)} checks do not hold")
    return {
        "experiment": made.experiment.name,
        "preset": made.preset,
        "store": str(made.store.path),
        "runs": counts.runs,
        "made": counts.made,
        **({"missing": counts.missing} if show else {}),
        **({} if made.state.finished else {"later": made.state.later}),
        "taken": counts.taken,
        "points": [plain_point(point) for point in made.points],
        **({"failed": counts.failed} if counts.failed else {}),
        **written,
    }
