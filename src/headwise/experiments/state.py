"""How far an experiment is: which of its runs are there, and how many are still to come.

Runs of later rounds depend on the rows so far, so they have no ids yet. Their number, or its
bounds, is known before anything is trained; a store notes it beside the ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.experiments.points import Measured, Point

Bounds = tuple[int, int]  # at least, at most


@dataclass(frozen=True, kw_only=True)
class State:
    """How many runs there are, of how many that were asked for, and how many are not known by id
    yet."""

    there: int
    asked: int  # of the rounds so far
    later: Bounds | None = (0, 0)  # of the rounds to come; None: not known
    tuning: bool = False  # whether no point has more than the seed that rates are chosen by
    trains: bool = True
    made: bool = True  # whether what is missing was to be made; otherwise only what is there shown

    @property
    def finished(self) -> bool:
        """Whether everything that was asked for is there."""
        return self.there == self.asked and self.later == (0, 0)

    @property
    def in_words(self) -> str:
        """For the page and the terminal, a line."""
        what = "runs" if self.trains else "rows"
        missing = self.asked - self.there
        if not self.made and missing:
            return (
                f"{self.there} {what} are shown of the {_range(self.asked, self.later)} that these "
                f"settings ask for; the others are not here{self._tuning}."
            )
        if self.later is None:
            rounds = f"{self.there} of {self.asked} {what} of the first rounds finished"
            return f"{rounds}; how many follow is not known{self._tuning}."
        total = _range(self.asked, self.later)
        return f"{self.there} of {total} {what} finished{self._tuning or self._left}."

    @property
    def _left(self) -> str:
        waiting = _range(self.asked - self.there, self.later)
        return "" if self.finished else f"; {waiting} still to be made"

    @property
    def _tuning(self) -> str:
        return ": tuning only" if self.tuning and self.there else ""


def _range(so_far: int, later: Bounds | None) -> str:
    """A number of runs with those of later rounds, as a number or its bounds."""
    if later is None:
        return f"at least {so_far:,}"
    least, most = so_far + later[0], so_far + later[1]
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def announced(first: int, later: Bounds | None) -> str:
    """What is said about later rounds before anything is made; empty: there are none."""
    if later == (0, 0):
        return ""
    if later is None:
        return "; more follow, how many depends on these"
    return f"; {_range(0, later)} more follow these, {_range(first, later)} in all"


def after_round(later: Bounds | None, made: int) -> Bounds | None:
    """What is left for later rounds after one of so many runs."""
    return later and (max(0, later[0] - made), max(0, later[1] - made))


def tuning_only(points: Sequence[Point]) -> bool:
    """Whether no point has more than the seed by which its rate was chosen."""
    return bool(points) and all(isinstance(p, Measured) and p.tuning for p in points)


def noted_later(asked: Mapping[str, Any], tuning: bool) -> Bounds | None:
    """The number of later runs that a store notes, None where it is not known. Stores of before
    note nothing: there rounds are to come where there is the tuning only."""
    found = asked.get("later")
    if isinstance(found, list) and len(found) == 2 and all(type(n) is int for n in found):
        return max(0, found[0]), max(0, found[1])
    return None if tuning or "later" in asked else (0, 0)
