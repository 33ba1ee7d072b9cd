"""What comes out of making an experiment: `Made`."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.experiments.base import Experiment, Settings
from headwise.experiments.pages import remarked
from headwise.experiments.points import Point
from headwise.experiments.state import State
from headwise.rows import Row
from headwise.show.report import answer_of
from headwise.store import Store

if TYPE_CHECKING:
    from headwise.show.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How many runs there are, and where their rows came from."""

    runs: int
    made: int  # now
    taken: int  # from files of rows
    missing: int  # not made, because only what is there was asked for
    failed: int  # checks that do not hold


@dataclass(frozen=True, kw_only=True)
class Made:
    """An experiment that was made: its rows, its points, and where its figure and page are."""

    experiment: Experiment[Any, Any]
    preset: str
    settings: Settings
    store: Store
    rows: list[Row]
    points: Sequence[Point]
    headline: list[str]
    counts: Counts
    state: State  # how much of what was asked for is there
    remarks: list[str]  # what to know of its rows, such as that other code made them
    picture: Path | None = None  # the figure as an image
    page: Path | None = None  # the store's page, report.html

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.experiment.name

    @property
    def figure(self) -> Figure:
        """The figure as a description, which `headwise.show` draws."""
        return remarked(self.experiment.figure(self.points), self.remarks)

    @property
    def table(self) -> list[list[str]]:
        """The headings, then a line per point."""
        return self.experiment.table(self.points)

    @property
    def answer(self) -> str:
        """What the points say to the question, in a sentence: the page begins with it."""
        return answer_of(self.experiment.answered(self.points), self.headline)

    @property
    def note(self) -> str:
        """What to bear in mind about the preset in these settings; empty: nothing."""
        return self.experiment.note(self.preset, self.settings.plain())

    def __repr__(self) -> str:
        where = f", page {self.page}" if self.page else ""
        counts = self.state.in_words.rstrip(".")
        return "\n".join([f"{self.name} ({self.preset}): {counts}{where}", *self.headline])

    def _repr_html_(self) -> str:
        """The headline and the table, for a notebook."""
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in self.headline)
        head, *body = self.table
        cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in body
        )
        question = html.escape(self.experiment.question)
        return f"<b>{question}</b><ul>{lines}</ul><table><tr>{cells}</tr>{rows}</table>"
