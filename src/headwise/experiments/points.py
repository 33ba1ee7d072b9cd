"""Points: what an experiment makes of the rows of one place in its figure, and the words for it.

A point is a frozen dataclass. Its fields are the table's columns, the markers of the figure and
what `--json` prints. Standard library only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from headwise.errors import UsageError
from headwise.lm.spec import Pretraining
from headwise.rows import Row
from headwise.shape import Shape
from headwise.stats import Mean, mean
from headwise.tasks import TASKS
from headwise.training.run import Recipe

P = TypeVar("P", bound="Point")
ZERO = "predicting zero"
COLLAPSED = 2e-3  # a run this close to the zero predictor's error has learned to answer nothing
BEATEN = 0.99  # of the best answer that needs no training; what is better lies below this share
# Rows of one point may differ in these: `held_out` is a count in a recipe and an error in a row.
PER_SEED = ("seed", "held_out", "evals")
ONE_MODEL = [
    f.name
    for kind in (Shape, Recipe, Pretraining)
    for f in dataclasses.fields(kind)
    if f.name not in PER_SEED
]


# ---- what points hold


@dataclass(frozen=True, kw_only=True)
class Point:
    """The base of every experiment's points."""

    def cell(self, key: str) -> str:
        """One of its values for people; a missing value is a dash."""
        value = getattr(self, key)
        if value is None:
            return "-"
        if isinstance(value, bool):
            return "yes" if value else "NO"
        if key == "off":  # how far off a budget
            return f"{value:+.2%}"
        if isinstance(value, float) and abs(value) >= 10_000:
            return f"{value:,.0f}"
        if isinstance(value, float):
            return f"{value:.4f}" if key in ("held_out", "train_best") else f"{value:.4g}"
        return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True, kw_only=True)
class Measured(Point):
    """A point with a held-out error: its mean over `n` seeds and the 95 % interval of the mean."""

    n: int = 0
    diverged: int = 0
    held_out: float | None = None
    low: float | None = None
    high: float | None = None
    values: list[float] = dataclasses.field(default_factory=list)  # by seed
    runs: list[str] = dataclasses.field(default_factory=list)  # the ids of these runs
    tuning: bool = False  # whether only the seed is there by which its learning rate was chosen

    @property
    def one_seed(self) -> bool:
        """Whether its error is a single run's, which has no interval."""
        return self.held_out is not None and (self.low is None or self.high is None)

    @property
    def error(self) -> str:
        """The held-out error in words, with its interval and how many seeds it is of."""
        if self.held_out is None or self.one_seed:
            return self.cell("held_out")
        return f"{self.cell('held_out')} ({plural(self.n, 'seed')})"

    def cell(self, key: str) -> str:
        """As `Point.cell`; the held-out error has its interval behind it, or that it is of one
        seed, and a count of runs has their number."""
        if key == "diverged":
            return f"{self.diverged} of {self.n + self.diverged}"
        if key != "held_out":
            return super().cell(key)
        if self.held_out is None:
            return "diverged"
        if self.low is None or self.high is None:
            return f"{self.held_out:.4f} ({'tuning' if self.tuning else 'one seed'})"
        return f"{self.held_out:.4f} ± {(self.high - self.low) / 2:.4f}"


@dataclass(frozen=True, kw_only=True)
class Errors(Measured):
    """A point of a rank-paper figure: also how many runs predict zero, and the paper's statistic,
    the smallest training loss of any epoch of any seed. `errors_of` fills it."""

    zero: int = 0
    train_best: float | None = None

    def cell(self, key: str) -> str:
        """As `Measured.cell`; how many of the runs that were evaluated predict zero."""
        return f"{self.zero} of {self.n}" if key == "zero" else super().cell(key)


@dataclass(frozen=True, kw_only=True)
class Tuned(Measured):
    """A point whose learning rate was tuned: the rate, and the seeds of its losses. `tuning.tuned`
    fills it."""

    lr: float | None = None
    seeds: list[int] = dataclasses.field(default_factory=list)
    accuracy: float | None = None
    edge: bool = False  # whether the best rate is the smallest or the largest of those tried


@dataclass(frozen=True, kw_only=True)
class Against(Point):
    """A point with the lowest error of an answer that needs no training, and what answer that is.
    `baseline_of` fills it."""

    baseline: float | None = None
    baseline_name: str | None = None  # of a task of one's own

    @property
    def answer(self) -> str:
        """That answer in words."""
        return ZERO if self.baseline_name in (None, "zero") else str(self.baseline_name)


def plain_point(point: Point) -> dict[str, Any]:
    """A point as plain values, as `--json` prints it."""
    return dataclasses.asdict(point)


def groups(points: Iterable[P], *names: str) -> dict[tuple[Any, ...], list[P]]:
    """Points by the values of some fields, in order of those values (`stats.group` for points)."""
    out: dict[tuple[Any, ...], list[P]] = {}
    for point in points:
        out.setdefault(tuple(getattr(point, name) for name in names), []).append(point)
    return dict(sorted(out.items()))


# ---- rows of one point -> its numbers


def check_one_model(rows: list[Row], *but: str) -> None:
    """Refuse rows of one point that differ in more than seeds, and what `but` names: files of
    several experiments, given together."""
    # Fields of the task and of a user's model are columns too, named task_... and model_...
    columns = {key for row in rows for key in row}
    own = sorted(k for k in columns if k in ("task", "model") or k.startswith(("task_", "model_")))
    for key in (*own, *ONE_MODEL):
        found = sorted({str(row[key]) for row in rows if key in row}) if key not in but else []
        if len(found) > 1:
            raise UsageError(
                f"runs of one point may differ in their seeds only, these differ in {key}: "
                f"{', '.join(found)}"
            )


def labelled(rows: Sequence[Row]) -> list[Row]:
    """Rows whose task says which it is: of tasks of one's own with one name the fields that differ,
    and behind it the model of one's own, if it is one's.

    >>> rows = [{"task": "Kth", "task_k": k, "task_n": 8} for k in (1, 2)]
    >>> [row["task"] for row in labelled([*rows, {"task": "text", "model": "Pool"}])]
    ['Kth(k=1)', 'Kth(k=2)', 'text with Pool']
    """
    tasks = _told_apart(rows, "task", built_in=TASKS)
    models = _told_apart(rows, "model")
    out = []
    for row, task, model in zip(rows, tasks, models, strict=True):
        name = {"task": f"{task} with {model}" if model else task} if task else {}
        out.append({**row, **name})
    return out


def _told_apart(rows: Sequence[Row], part: str, built_in: Iterable[str] = ()) -> list[str]:
    """The name of each row's task or model, with those of its fields in which others of its name
    differ; empty where a row has none."""
    fields = [
        {"version": 1} | {k[len(part) + 1 :]: v for k, v in row.items() if k.startswith(f"{part}_")}
        for row in rows
    ]
    known: dict[tuple[str, str], set[str]] = {}
    for row, of_row in zip(rows, fields, strict=True):
        for key, value in of_row.items():
            known.setdefault((str(row.get(part)), key), set()).add(repr(value))
    names = []
    for row, of_row in zip(rows, fields, strict=True):
        name = str(row.get(part) or "")
        differ = [key for key in of_row if len(known[name or "None", key]) > 1]
        text = ", ".join(f"{key}={of_row[key]!r}" for key in differ)
        names.append(f"{name}({text})" if text and name and name not in built_in else name)
    return names


def baseline_of(rows: Sequence[Row]) -> dict[str, Any]:
    """The fields of `Against` from one point's rows. Rows of built-in tasks have the error of
    predicting zero alone."""
    row = rows[0]
    name = row.get("baseline_name")
    return {"baseline": row["baseline"] if name else row.get("zero_error"), "baseline_name": name}


def interval(
    values: Sequence[float], names: tuple[str, str, str] = ("held_out", "low", "high")
) -> dict[str, Any]:
    """The mean and its 95 % interval under three names; None of no values."""
    found = mean(values)[:3] if values else (None, None, None)
    return dict(zip(names, found, strict=True))


def errors_of(rows: list[Row]) -> dict[str, Any]:
    """The fields of `Errors` from one point's rows."""
    check_one_model(rows)
    # A diverged run has no held-out error but may have a smallest training loss, which the paper's
    # statistic counts.
    done = [r for r in rows if r["status"] == "done"]
    trained = [r["train_best"] for r in rows if r["train_best"] is not None]
    return {
        "n": len(done),
        "diverged": len(rows) - len(done),
        "zero": sum(abs(r["held_out"] - r["zero_error"]) < COLLAPSED for r in done),
        "values": [r["held_out"] for r in sorted(done, key=lambda r: r["seed"])],
        "runs": [r.get("id", "") for r in sorted(done, key=lambda r: r["seed"])],
        **interval([r["held_out"] for r in done]),
        "train_best": min(trained, default=None),
    }


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of the values that are there and finite."""
    logs = [math.log(v) for v in values if v is not None and 0 < v < math.inf]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


# ---- words


def plural(n: int, word: str) -> str:
    """A number of things.

    >>> plural(1, "layer"), plural(3, "head")
    ('1 layer', '3 heads')
    """
    return f"{n} {word}" + "s" * (n != 1)


def signed(x: float) -> str:
    """A difference to four places, or to two digits where those would all be zero."""
    return f"{x:+.4f}" if abs(x) >= 0.001 or x == 0 else f"{x:+.1e}"


def gap_in_words(gap: Mean) -> str:
    """A difference with its interval; where that covers zero, none is found."""
    if gap.low is None or gap.high is None:
        return f"{signed(gap.mean)} (one seed)"
    words = f"{signed(gap.mean)} ± {signed((gap.high - gap.low) / 2)[1:]}"
    return f"none found ({words})" if gap.low <= 0 <= gap.high else words
