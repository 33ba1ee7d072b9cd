"""Learning rates are chosen on seed 0 and evaluated on other seeds.

The first round trains every shape at every rate on seed 0 alone. Where the best rate is the last to
a side, the next one to that side may be tried. The second round trains every shape at its best rate
on the seeds that count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar

from headwise.experiments.points import Tuned, check_one_model, gap_in_words, interval, signed
from headwise.lm.spec import Pretraining
from headwise.rows import Row
from headwise.stats import Mean, difference, mean
from headwise.training.run import Run

R = TypeVar("R", Run, Pretraining)


# ---- rounds


def next_round(first: Sequence[R], rows: list[Row], seeds: int, further: int = 0) -> list[R]:
    """The runs that follow from a tuning on seed 0: `seeds` other seeds of every shape, task and
    start at its best rate. Before that, where the best rate is the smallest or the largest tried,
    the next one to that side, `further` times at most."""
    # Runs that differ in their rate alone are the tuning of one shape: at a rate of 1 they are
    # equal.
    row_of = {row["id"]: row for row in rows}
    by_shape: dict[R, list[R]] = {}
    for run in first:
        by_shape.setdefault(at_rate(run, 1.0), []).append(run)
    out: list[R] = []
    for runs in by_shape.values():
        best = min(runs, key=lambda run: _by_loss(row_of[run.id]))
        more = None
        # A best rate at the edge is not tuned yet. A rate beyond it that was run counts like the
        # others; one that was not is the next run.
        for _ in range(further):
            more = _beyond(best, runs)
            if more is None or more.id not in row_of:
                break
            runs.append(more)
            best = min(runs, key=lambda run: _by_loss(row_of[run.id]))
            more = None
        # Tuned: the other seeds at the best rate. They are what is evaluated, so the tuning's seed
        # is not among them.
        if more is None:
            out += [dataclasses.replace(best, seed=seed) for seed in range(1, seeds + 1)]
        else:
            out.append(more)
    return out


def later_runs(first: Sequence[R], seeds: int, further: int = 0) -> tuple[int, int]:
    """How many runs follow a tuning in `next_round`, at least and at most: every shape may try
    `further` more rates."""
    shapes = len({at_rate(run, 1.0) for run in first})
    tries = further if len({_rate(run) for run in first}) > 1 else 0
    return shapes * seeds, shapes * (seeds + tries)


def at_rate(run: R, lr: float) -> R:
    """The same run at another rate."""
    if isinstance(run, Run):
        return dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, lr=lr))
    return dataclasses.replace(run, lr=lr)


def _rate(run: Run | Pretraining) -> float:
    return run.recipe.lr if isinstance(run, Run) else run.lr


def _by_loss(row: Row) -> tuple[float, float]:
    """What a rate is chosen by: held-out loss, then the rate, the smaller one where losses are
    equal or all diverged."""
    return (row["held_out"] if row["status"] == "done" else math.inf), row["lr"]


def _beyond(best: R, runs: list[R]) -> R | None:
    """The run at the next rate to the side at which the best one is the last, in the same steps."""
    rates = sorted(_rate(run) for run in runs)
    if len(rates) < 2 or rates[0] <= 0 or rates[0] < _rate(best) < rates[-1]:
        return None
    # The step beyond is the ratio of the last two rates. Six digits make the same id on every
    # machine.
    lower, higher = rates[0] ** 2 / rates[1], rates[-1] ** 2 / rates[-2]
    rate = lower if _rate(best) == rates[0] else higher
    return at_rate(best, float(f"{rate:.6g}"))


# ---- one shape's rows -> its numbers


def rows_at_best_rate(rows: list[Row]) -> list[Row]:
    """One shape's rows at its tuned rate: of the seeds it was not tuned on, or of seed 0 where
    there are no others."""
    tuning = [r for r in rows if r["seed"] == 0]
    rate = min(tuning, key=_by_loss)["lr"] if tuning else None
    others = [r for r in rows if r["seed"] > 0 and r["lr"] == rate]
    return others or [r for r in tuning if r["lr"] == rate]


def losses_of(rows: list[Row]) -> dict[str, Any]:
    """The fields of `Tuned`, but `edge`, from rows at one rate."""
    done = sorted((r for r in rows if r["status"] == "done"), key=lambda r: r["seed"])
    right = [r["held_out_accuracy"] for r in done if r.get("held_out_accuracy") is not None]
    return {
        "lr": rows[0]["lr"] if rows else None,
        "n": len(done),
        "diverged": len(rows) - len(done),
        "values": [r["held_out"] for r in done],
        "runs": [r.get("id", "") for r in done],
        "seeds": [r["seed"] for r in done],
        **interval([r["held_out"] for r in done]),
        "accuracy": mean(right).mean if right else None,
    }


def tuned(rows: list[Row]) -> dict[str, Any]:
    """The fields of `Tuned` from all rows of one shape. Of two rates one is always at the edge,
    which says nothing."""
    check_one_model(rows, "lr")
    best = rows_at_best_rate(rows)
    rates = sorted({r["lr"] for r in rows if r["seed"] == 0})
    at_edge = len(rates) > 2 and bool(best) and best[0]["lr"] in (rates[0], rates[-1])
    return {**losses_of(best), "edge": at_edge, "tuning": all(r["seed"] == 0 for r in best)}


def edge_warning(points: Sequence[Tuned], what: str) -> list[str]:
    """How many points might do better at a rate that was not tried, as a line or none."""
    return edge_line(sum(p.edge for p in points), len(points), what)


def edge_line(count: int, of: int, what: str) -> list[str]:
    """The line of `edge_warning` from its numbers."""
    line = (
        f"the best rate is the smallest or the largest tried in {count} of {of} {what}: "
        "a wider range may change them"
    )
    return [line] if count else []


def gap_between(
    rows: list[Row], base: list[Row], key: str = "held_out"
) -> tuple[Mean | None, str | None]:
    """How one tuned shape differs from another, as numbers and in words.

    Where only the tuning's seed is there, by which the rate was chosen, it is set beside the
    other's on that seed, in words alone.
    """
    # Like is compared with like: seeds that were not tuned on with such, or seed 0 with seed 0.
    ours, theirs = rows_at_best_rate(rows), rows_at_best_rate(base)
    tuning = all(r["seed"] == 0 for r in ours)
    if tuning:
        theirs = sorted((r for r in base if r["seed"] == 0), key=_by_loss)[:1]
    values = [
        [r[key] for r in these if r["status"] == "done" and r[key] is not None]
        for these in (ours, theirs)
    ]
    if not all(values):
        return None, None
    gap = difference(*values)
    if tuning:
        return None, f"{signed(gap.mean)} (the tuning's seed)"
    return gap, gap_in_words(gap)
