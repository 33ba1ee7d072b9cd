"""An experiment is a value: a question, the runs that answer it, and how their rows are shown.

Every module of an experiment ends in `EXPERIMENT = Experiment(...)`. A file of your own that does
so is run by its path: `headwise run my_experiment.py`, or `headwise.run("my_experiment.py")`.

    settings --runs--> runs --(made elsewhere)--> rows --summary--> points --> headline, figure

All of it is plain Python over plain values. Nothing here trains, draws or writes: `runner.make`
does.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from headwise.errors import (
    MOST_COUNT,
    MOST_SIZE,
    UsageError,
    check_instance,
    check_most,
    nearest,
    shown,
)
from headwise.rows import Row, Specified, Work, columns_of, id_of

if TYPE_CHECKING:
    from typing import Self

    from headwise.experiments.points import Point
    from headwise.model.own import Model
    from headwise.show.figure import Figure
    from headwise.tasks.task import Task
    from headwise.training.run import Run

ERRORS = (
    "Solid lines: error on fresh data that no run has seen, mean over seeds with its 95 % "
    "interval; a hollow marker is one seed, and a band that falls out of the picture reaches zero, "
    "as those of two seeds often do. Crosses: the rank paper's statistic, the smallest "
    "training loss of any epoch of any seed. Dashed: the values published in the paper (that "
    "statistic on replayed data, read off its figure). The interval is over seeds; all runs of a "
    "task are evaluated on one held-out set. Budget: query/key parameters per layer."
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an experiment varies and what it holds: derive from it, one field per setting.

    A field is a number, a word, or a tuple of them, so that `--set key=value` can change it.
    """

    def idle(self) -> dict[str, str]:
        """Settings that would have no effect beside the others, each with the reason."""
        return {}

    def changed(self, **changes: Any) -> Self:
        """The same settings with some changed. Unknown names are refused with the nearest ones,
        and settings that would have no effect with the reason."""
        # Names are checked here, values by __post_init__ of the new settings.
        known = [f.name for f in dataclasses.fields(self)]
        for key in changes:
            if key not in known:
                raise UsageError(f"unknown setting {shown(key)}; {nearest(key, known)}")
        given = {key: typed(key, value, getattr(self, key)) for key, value in changes.items()}
        for key, value in given.items():
            _check_sizes(key, value)
        settings = dataclasses.replace(self, **given)
        # Only what was asked for is refused; a preset may hold settings that its tasks do not use.
        for key, reason in settings.idle().items():
            if key in changes:
                raise UsageError(f"{key} has no effect here: {reason}")
        return settings

    def check_number(self) -> None:
        """Refuse lists that would make more runs together than a store should hold, before the
        runs are listed."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        lists = {name: len(value) for name, value in values.items() if isinstance(value, tuple)}
        seeds = values.get("seeds", 1)
        number = math.prod(max(1, length) for length in lists.values()) * seeds
        if number > 5 * MOST_RUNS:  # not every list is combined with every other one
            longest = max(lists, key=lambda name: lists[name], default="seeds")
            raise UsageError(
                f"an experiment has at most {MOST_RUNS:,} runs, these lists and {seeds:,} seeds "
                f"combine to {number:,}; the longest list is {longest}"
            )

    def with_tasks(self, tasks: Sequence[str | Task]) -> Self:
        """The same settings for other tasks, built-in ones by name; refused unless overridden."""
        raise UsageError(
            "this experiment has a task of its own; tasks go with fig1, leaner, map, removable"
        )

    def with_model(self, model: Model) -> Self:
        """The same settings with a model of one's own in every run; refused unless overridden."""
        raise UsageError("this experiment trains no model that another could take the place of")

    def plain(self) -> dict[str, Any]:
        """The settings as plain values; tasks and models by their `spec()`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: _plain(value) for name, value in fields.items() if value is not None}


def typed(key: str, value: Any, like: Any) -> Any:
    """A setting as a value of the same kind as the preset's, which is a number, a word, or a tuple
    of them. Text is read as it is typed after --set; one number or word stands for a list of one.

    >>> typed("lrs", 0.01, (0.1, 0.3)), typed("heads", "4,8", (1,)), typed("steps", 1e2, 5)
    ((0.01,), (4, 8), 100)
    """
    if isinstance(like, tuple):
        one = like[0] if like and isinstance(like[0], str | int | float) else ""
        if isinstance(value, str):
            value = [part for part in value.split(",") if part]
        elif not isinstance(value, Iterable):
            value = [value]
        return tuple(typed(key, part, one) for part in value)
    if isinstance(like, bool):
        return _typed_bool(key, value)
    if isinstance(like, int | float):
        return _typed_number(key, value, like)
    # A word, or where there is one of the user's own, a task or a model.
    check_instance(key, value)
    if isinstance(value, int | float | list | tuple | dict):
        raise UsageError(f"{key} must be text, got {shown(value)}")
    return value


def _typed_bool(key: str, value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise UsageError(f"{key} must be true or false, got {shown(value)}")
    return text == "true"


def _typed_number(key: str, value: Any, like: float) -> float:
    """A number of the same type. A number with a point may stand for a whole one that it equals."""
    kind = "a whole number" if isinstance(like, int) else "a number"
    try:
        if isinstance(value, bool):
            raise ValueError
        number = type(like)(value.replace("_", "") if isinstance(value, str) else value)
        if not isinstance(value, str) and number != value and not math.isnan(number):
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise UsageError(f"{key} must be {kind}, got {shown(value)}") from None
        raise UsageError(f"{key} must be {kind}, not a list, got {shown(value)}") from None
    return number


MOST_SEEDS = 10_000  # per point: an interval that is a hundredth of the spread
MOST_RUNS = 20_000  # of an experiment: each has a folder in the store


def _check_sizes(key: str, value: Any) -> None:
    """Refuse whole numbers that no size, seed or count of seeds can be."""
    numbers = value if isinstance(value, tuple | list) else (value,)
    most = {"seed": MOST_COUNT, "seeds": MOST_SEEDS}.get(key, MOST_SIZE)
    for number in numbers:
        if isinstance(number, int):
            check_most(key, number, most)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value if isinstance(value, str | int | float) or value is None else value.spec()


@dataclass(frozen=True)
class Note:
    """What to bear in mind about a preset, as long as these settings are the preset's own."""

    text: str
    settings: tuple[str, ...] = ()


S = TypeVar("S", bound=Settings)
P = TypeVar("P", bound="Point")


@dataclass(frozen=True, kw_only=True)
class Experiment(Generic[S, P]):
    """A question and everything that answers it.

    >>> from headwise.experiments import find
    >>> find("fig1").preset("quick", seeds=1).seeds
    1
    """

    name: str  # of its rows' page in a store; letters, digits, - and _
    question: str  # one sentence
    about: str  # one line, for `headwise list`
    presets: Mapping[str, S]  # name -> settings: "quick" for a laptop, "paper" for a GPU
    columns: Sequence[tuple[str, str]]  # the table: a point's field and its heading
    runs: Callable[[S], Sequence[Specified]]  # the first, or the only, round
    summary: Callable[[list[Row]], Sequence[P]]  # rows -> points, in any order of rows
    headline: Callable[[Sequence[P]], list[str]]  # the claim in numbers, a sentence per line
    figure: Callable[[Sequence[P]], Figure]
    # What the points say to the question, in a sentence for somebody who has not seen the project;
    # without it, or where it is empty, the first line of the claim.
    answer: Callable[[Sequence[P]], str] | None = None
    # Columns that a narrow terminal shows longest, the most important first.
    main_columns: Sequence[str] = ()
    # Preset -> what to bear in mind. It is said where the settings that it names are the preset's,
    # and a plain text where all but the number of seeds are.
    notes: Mapping[str, str | Note] = field(default_factory=dict)
    caption: str = ERRORS  # what the figure's lines are
    views: Mapping[str, Callable[[Sequence[P]], Figure]] = field(default_factory=dict)
    # Runs that depend on the rows so far, asked until there are no new ones.
    then: Callable[[S, list[Row]], Sequence[Specified]] | None = None
    # How many runs those will be, at least and at most, known before anything is trained.
    later: Callable[[S], tuple[int, int]] | None = None
    keep_weights: bool = False  # of the first round, for the next one to start from
    # Columns to add to a trained run's row, from its weights; it travels to worker processes.
    probe: Callable[[Run, dict[str, Any]], Row] | None = None
    # The row of a value that is computed instead of trained, on a device.
    make: Callable[[Any, str], Row] | None = None
    meanings: Mapping[str, str] = field(default_factory=dict)  # setting -> one line

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", self.name):
            raise UsageError(
                f"an experiment's name has at most 100 letters, digits, - and _, got {self.name!r}"
            )
        keys = [key for key, _ in self.columns]
        for key in self.main_columns:
            if key not in keys:
                raise UsageError(f"unknown main column {key!r}; {nearest(key, keys)}")

    @property
    def trains(self) -> bool:
        """Whether its rows are trained; otherwise they are computed by `make`."""
        return self.make is None

    def answered(self, points: Sequence[P]) -> str:
        """The answer in a sentence; empty: it has none of its own."""
        return self.answer(points) if self.answer and points else ""

    def count(self, runs: Sequence[Specified]) -> str:
        """How many runs, or rows where they are computed."""
        return f"{len(runs)} {'runs' if self.trains else 'rows'}"

    def note(self, preset: str, settings: Mapping[str, Any]) -> str:
        """What to bear in mind about a preset in these settings, which are plain values; empty:
        nothing."""
        note = self.notes.get(preset)
        if note is None:
            return ""
        own = self.presets[preset].plain()
        if isinstance(note, Note):
            text, named = note.text, {*note.settings}
        else:
            text, named = note, (own.keys() | settings.keys()) - {"seeds"}
        return text if all(settings.get(name) == own.get(name) for name in named) else ""

    def filled_columns(self, points: Sequence[P]) -> list[tuple[str, str]]:
        """The columns in which some point has a value; all of them where there are no points."""
        return [
            (key, heading)
            for key, heading in self.columns
            if not points or any(getattr(point, key) is not None for point in points)
        ]

    def table(self, points: Sequence[P]) -> list[list[str]]:
        """The headings of filled columns, then a line per point."""
        columns = self.filled_columns(points)
        cells = [[point.cell(key) for key, _ in columns] for point in points]
        return [[heading for _, heading in columns], *cells]

    def check_options(
        self, runs: Sequence[Specified], workers: int | None, keep_weights: bool
    ) -> None:
        """Refuse options of a run that these runs have no use for."""
        if keep_weights and not self.trains:
            raise UsageError(
                f"--keep-weights goes with experiments that train; {self.name} computes its rows"
            )
        if workers and any(run.work != "train" for run in runs):
            raise UsageError(
                f"--workers goes with runs that are trained in ensembles; {self.name} makes its "
                "rows one after another"
            )

    def preset(self, name: str, **changes: Any) -> S:
        """A preset with some settings changed; unknown names are refused with the nearest ones."""
        if name not in self.presets:
            raise UsageError(f"unknown preset {shown(name)}; {nearest(name, self.presets)}")
        return self.presets[name].changed(**changes)


@dataclass(frozen=True)
class Computed:
    """A value whose row is computed, not trained.

    Derive from it as a frozen dataclass and name the experiment; its fields are its specification.
    """

    work: ClassVar[Work] = "compute"
    experiment: ClassVar[str]

    def spec(self) -> dict[str, Any]:
        """The value as plain values."""
        return {"experiment": self.experiment, **dataclasses.asdict(self)}

    def columns(self) -> dict[str, Any]:
        """The same as the columns of its row."""
        return columns_of(self.spec())

    @property
    def id(self) -> str:
        """A hash of the specification."""
        return id_of(self.spec())
