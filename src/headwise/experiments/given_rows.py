"""Rows made before, from files: read, checked, and taken into a store (`--rows`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headwise.errors import UsageError
from headwise.experiments.base import Experiment
from headwise.rows import Row, Specified, check_row
from headwise.store import Store, rows_by_id


def given_rows(files: Sequence[str | Path], runs: Sequence[Specified]) -> dict[str, Row]:
    """The rows of some files by id, at least one of them a row of these runs."""
    given = rows_by_id([Path(name) for name in files])
    if given and not any(run.id in given for run in runs):
        raise UsageError(
            f"none of the {len(given)} rows of {', '.join(map(str, files))} is one of these "
            f"{len(runs)} runs; see --set and --seeds, or show them as they are with "
            "headwise draw"
        )
    return given


def take_rows(
    given: dict[str, Row],
    runs: Sequence[Specified],
    store: Store,
    experiment: Experiment[Any, Any],
) -> int:
    """Put the rows that are given into the store where it has none of its own, if the experiment
    can show them; returns how many."""
    # A row that the store has already is its own; what is given fills the gaps.
    taken = [(run, given[run.id]) for run in store.missing(runs) if run.id in given]
    for run, row in taken:
        if why := check_row(row, run):
            raise UsageError(f"the given row of run {run.id} does not fit the run: {why}")
    if taken:
        # The rows are shown once before they are stored: what an experiment cannot show must not
        # spoil the store.
        with readable("--rows", experiment.name):
            points = experiment.summary([row for _, row in taken])
            experiment.headline(points)
            experiment.figure(points)
    for _, row in taken:
        store.add(row)
    return len(taken)


@contextlib.contextmanager
def readable(where: str, name: str) -> Iterator[None]:
    """Rows of files may hold anything: what an experiment can make nothing of is one line."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError) as e:
        what = f"no {e}" if isinstance(e, KeyError) else " ".join(str(e).split())[:80]
        raise UsageError(
            f"{where} does not hold rows of {name}, one JSON object per line: {what}"
        ) from None
