"""What a store's page shows of an experiment, besides its rows.

A built-in experiment's is computed from its rows. That of an experiment of one's own is kept in the
store as plain values when it is made, so that the page can be written again without its file: a
store is data, and nothing that it names is ever imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.errors import UsageError
from headwise.experiments.base import Experiment
from headwise.experiments.points import Point
from headwise.show.figure import Figure, from_json, has_panels, to_json


@dataclass(frozen=True, kw_only=True)
class Page:
    """The words, the table and the figures of one experiment."""

    question: str
    about: str
    caption: str
    note: str
    trains: bool
    headline: Sequence[str]
    headings: Sequence[str]
    table: Sequence[Sequence[str]]
    figures: Sequence[Figure]  # the figure, and its views that have something in every panel

    def plain(self) -> dict[str, Any]:
        """The page as values that JSON has; `Page.of` is its inverse."""
        figures = [to_json(figure) for figure in self.figures]
        rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**rest, "figures": figures}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Page:
        """A page from `plain()`, also after a round trip through JSON."""
        try:
            return cls(**{**plain, "figures": [from_json(f) for f in plain["figures"]]})
        except (TypeError, KeyError, ValueError, AttributeError) as e:
            raise UsageError(f"its page in the store cannot be read: {e}") from None


def page_of(experiment: Experiment[Any, Any], preset: str, points: Sequence[Point]) -> Page:
    """An experiment's page from its points."""
    views = [view(points) for view in experiment.views.values()] if points else []
    return Page(
        question=experiment.question,
        about=experiment.about,
        caption=experiment.caption,
        note=experiment.notes.get(preset, ""),
        trains=experiment.trains,
        headline=experiment.headline(points),
        headings=[heading for _, heading in experiment.columns],
        table=[[point.cell(key) for key, _ in experiment.columns] for point in points],
        figures=[experiment.figure(points), *filter(has_panels, views)] if points else [],
    )
