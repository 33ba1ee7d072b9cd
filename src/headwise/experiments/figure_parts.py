"""Lines that the figures of several experiments are made of, and the values beside them that were
read off the papers' figures (`published/*.csv`)."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from importlib import resources

from headwise.experiments.points import Errors, Measured
from headwise.show.figure import Line


def error_line(
    label: str,
    colour: int,
    xs: Sequence[float],
    points: Sequence[Measured | None],
    text: Sequence[str] = (),
) -> Line:
    """Held-out errors with their intervals; a gap where there is no point."""
    found = [[] if p is None else p.values for p in points]
    runs = [[] if p is None else p.runs for p in points]
    # Points of experiments that do not say which runs they are of have their values alone.
    known = all(len(a) == len(b) for a, b in zip(found, runs, strict=True))
    return Line(
        label=label,
        colour=colour,
        x=xs,
        y=[None if p is None else p.held_out for p in points],
        low=[None if p is None else p.low for p in points],
        high=[None if p is None else p.high for p in points],
        text=text,
        seeds=found,
        runs=runs if known else (),
    )


def statistic_line(
    label: str, colour: int, xs: Sequence[float], points: Sequence[Errors | None]
) -> Line:
    """The paper's statistic of the same runs, as crosses."""
    values = [None if p is None else p.train_best for p in points]
    return Line(label=label, colour=colour, style="dots", x=xs, y=values)


def published_values(name: str) -> list[dict[str, str]]:
    """The rows of one of the files of published values; lines with # are comments."""
    text = resources.files("headwise").joinpath(f"experiments/published/{name}.csv").read_text()
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def published_line(
    label: str, colour: int, values: Sequence[tuple[float, float]], text: Sequence[str] = ()
) -> Line:
    """Published (x, y) values, dashed."""
    xs, ys = [x for x, _ in values], [y for _, y in values]
    return Line(label=label, colour=colour, style="dashed", x=xs, y=ys, text=text)


def lines_beside(
    name: str,
    colour: int,
    xs: Sequence[float],
    points: Sequence[Errors | None],
    published: Sequence[tuple[float, float]],
) -> list[Line]:
    """Held-out errors, the paper's statistic of the same runs, and what was published, as lines of
    one colour."""
    lines = [
        error_line(f"held out, {name}", colour, xs, points),
        statistic_line(f"the paper's statistic, {name}", colour, xs, points),
    ]
    if published:
        lines.append(published_line(f"published, {name}", colour, published))
    return lines
