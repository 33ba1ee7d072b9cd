"""Which point has the smallest error, and which others cannot be told apart from it.

The smallest mean of several is smaller than it will be again, and with few seeds many others may be
as good. So a best point is never named without them. Every other point is compared with it, and the
intervals of all these comparisons hold together: in 95 of 100 cases the truly best point is among
those that are named or counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from headwise.experiments.points import Measured, plural
from headwise.stats import told_apart

M = TypeVar("M", bound=Measured)
TOGETHER = (
    "Told apart: the 95 % intervals of the differences from the best leave out zero, all of them "
    "together (Welch, Bonferroni); any other interval is for itself."
)


@dataclass(frozen=True, kw_only=True)
class Ranking(Generic[M]):
    """Points by their error: the one with the smallest, those that cannot be told apart from it,
    and those that are worse."""

    first: M | None  # None: no point is measured
    alike: Sequence[M]
    worse: Sequence[M]
    tuning: int  # points of which only the seed is there by which the rate was chosen

    @property
    def measured(self) -> int:
        """How many points are compared."""
        return 0 if self.first is None else 1 + len(self.alike) + len(self.worse)

    @property
    def best(self) -> M | None:
        """The first, if it can be told apart from any other."""
        return self.first if self.worse else None


def ranking(points: Sequence[M]) -> Ranking[M]:
    """Points in the order of their errors. Those of the tuning's seed alone are only counted: their
    errors chose their rates."""
    tuning = sum(p.tuning for p in points)
    known = sorted((p for p in points if p.values and not p.tuning), key=_mean)
    if not known:
        return Ranking(first=None, alike=(), worse=(), tuning=tuning)
    first, *others = known
    apart = [told_apart(p.values, first.values, len(others)) for p in others]
    return Ranking(
        first=first,
        alike=[p for p, is_apart in zip(others, apart, strict=True) if not is_apart],
        worse=[p for p, is_apart in zip(others, apart, strict=True) if is_apart],
        tuning=tuning,
    )


def _mean(p: Measured) -> float:
    return sum(p.values) / len(p.values)


def best_in_words(
    points: Sequence[M], name: Callable[[M], str], things: str, error: str = "held-out loss"
) -> str:
    """The best point with its error and what cannot be told apart from it, or that there is
    none."""
    found = ranking(points)
    first, of = found.first, found.measured
    if first is None:
        if found.tuning:
            return (
                f"tuning only, no best yet: every {error} is of seed 0, by which rates are chosen"
            )
        return "no best: all diverged"
    said = f"{name(first)}, {error} {first.error}"
    waiting = f"; tuning only in {found.tuning} more" if found.tuning else ""
    if of == 1:
        return f"{said}; nothing to compare it with{waiting}"
    if found.best is None:
        seeds = {p.n for p in (first, *found.alike)}
        n = f" at n={max(seeds)}" if len(seeds) == 1 else ""
        return f"no best: none of the {of} {things} can be told apart{n}; smallest: {said}{waiting}"
    if not found.alike:
        return f"best {said}; told apart from all {of - 1} others{waiting}"
    others = f"{plural(len(found.alike), 'other')} of {of} {things}"
    return f"best {said}; cannot be told apart from {others}{_listed(found.alike, name)}{waiting}"


def _listed(points: Sequence[M], name: Callable[[M], str]) -> str:
    """Up to three points by name, or how many of more are of one seed."""
    if len(points) > 3:
        single = sum(p.one_seed for p in points)
        return f" ({single} of them of one seed)" if single else ""
    names = [name(p) + (", one seed" if p.one_seed else "") for p in points]
    return f" ({'; '.join(names)})"
