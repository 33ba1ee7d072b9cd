"""The figure of `thin_keys`: error against rank, with the rank that each law calls enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headwise.experiments.figure_parts import error_line
from headwise.experiments.points import groups
from headwise.show.figure import Line, LineFigure, LinePanel

if TYPE_CHECKING:
    from headwise.experiments.thin_keys import Point

SELECTS = "lookup"
LAWS = ("log2 N", "d/4", "d")


def figure(points: Sequence[Point]) -> LineFigure:
    """A panel per task, a line per number of candidates, the laws' ranks as crosses on them."""
    lengths, panels = sorted({p.candidates for p in points}), []
    for (task,), of_task in groups(points, "task").items():
        lines = []
        for (candidates,), same in groups(of_task, "candidates").items():
            known = sorted((p for p in same if p.held_out is not None), key=lambda p: p.rank)
            if known:
                text = [f"rank {p.rank}, rate {p.lr:g}, n={p.n}" for p in known]
                lines.append(
                    error_line(
                        f"N={candidates}",
                        lengths.index(candidates),
                        [p.rank for p in known],
                        known,
                        text,
                    )
                )
        for i, law in enumerate(LAWS):
            marked = [p for p in of_task if p.law and law in p.law.split(", ") and p.held_out]
            if marked:
                lines.append(_marks(law, len(lengths) + i, marked))
        if lines:
            lines.append(_zero_line(of_task))
            unit = "nats" if task == SELECTS else "squared error"
            what = "selects" if task == SELECTS else "compares"
            panels.append(LinePanel(title=f"{task} ({what}), {unit}", lines=lines))
    return LineFigure(
        title=f"Error against the rank of queries and keys (values {points[0].dim} wide)",
        x_label="rank of queries and keys",
        y_label="held-out error",
        y_scale="linear",
        share_y=False,
        panels=panels,
        columns=max(1, len(panels)),
    )


def _marks(law: str, colour: int, points: Sequence[Point]) -> Line:
    return Line(
        label=f"enough by {law}",
        colour=colour,
        style="dots",
        x=[p.rank for p in points],
        y=[p.held_out for p in points],
    )


def _zero_line(points: Sequence[Point]) -> Line:
    ends = sorted({p.rank for p in points})
    return Line(
        label="answering zero",
        colour=len(LAWS) + 6,
        style="dashed",
        x=[ends[0], ends[-1]],
        y=[points[0].zero] * 2,
    )
