"""What is asked, and where its answer stands: pure functions of the rows of a store. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headwise.choosing.choice import names_of
from headwise.choosing.race import Race, Rule, race
from headwise.choosing.rates import best_rate, next_trials
from headwise.choosing.trainings import TUNING_SEED, AnyRun, Training
from headwise.errors import UsageError, shown
from headwise.rows import Row
from headwise.shape import Shape
from headwise.store import Store


@dataclass(frozen=True)
class Question:
    """Which of these shapes is best, trained so, at rates from this grid?"""

    training: Training
    shapes: tuple[Shape, ...]
    rates: tuple[float, ...]
    trials: int
    label: str = ""  # tells questions about one task apart that share a store
    named: tuple[str, ...] = ()  # the shapes' names, where they do not follow from their sizes

    def __post_init__(self) -> None:
        if len(self.shapes) < 2:
            raise UsageError(f"at least 2 shapes can be compared, got {len(self.shapes)}")
        if len(set(self.shapes)) < len(self.shapes):
            raise UsageError("shapes must differ from each other")
        for shape in self.shapes:  # what does not fit the task is refused before anything is made
            self.training.run(shape, self.rates[0], TUNING_SEED)

    @cached_property
    def names(self) -> dict[str, Shape]:
        """The shapes by name."""
        return dict(zip(self.named or names_of(self.shapes), self.shapes, strict=True))

    @property
    def note(self) -> str:
        """Under which name a store keeps it."""
        return f"choose-{self.training.name}" + (f"-{self.label}" if self.label else "")

    def spec(self) -> dict[str, Any]:
        """As plain values: what another question in the same store would differ in."""
        shapes = [shape.spec() for shape in self.shapes]
        plain = {**self.training.spec(), "shapes": shapes, "rates": self.rates,
                 "trials": self.trials}  # fmt: skip
        return json.loads(json.dumps(plain))


# ---- where it stands


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What the rows say so far, and which runs come next."""

    tried: dict[str, dict[float, float]]  # arm -> rate -> loss on validation data
    rates: dict[str, float]  # of every arm, once all are tuned
    race: Race
    losses: dict[str, dict[int, float]]  # arm -> seed -> loss
    rows: dict[str, dict[int, Row]]  # of the race
    tuning: int  # runs
    seconds: float  # that all runs so far took
    work: float  # that they were, in the training's unit
    next: tuple[AnyRun, ...]
    asked: tuple[str, ...]  # ids of all runs so far, those of `next` among them

    @property
    def tuned(self) -> bool:
        """Whether every arm has its rate."""
        return bool(self.rates)

    @property
    def raced(self) -> int:
        """Runs of the race."""
        return sum(map(len, self.rows.values()))


def standing(question: Question, rule: Rule, store: Store) -> Standing:
    """Walk through tuning and race as far as the store's rows go. The same rows give the same
    standing, however often the making of them was interrupted."""
    training, names = question.training, question.names
    asked: list[str] = []
    spent = [0.0, 0.0]  # seconds, work

    def found(runs: Mapping[Any, AnyRun]) -> tuple[dict[Any, Row], list[AnyRun]]:
        rows, missing = {}, []
        for key, run in runs.items():
            asked.append(run.id)
            row = store.row(run.id)
            if row is None:
                missing.append(run)
            else:
                rows[key] = row
                spent[0] += row["seconds"]
                spent[1] += training.work(run)
        return rows, missing

    # -- rates: every arm tries the grid, then one rate at a time, as many as all others
    tried: dict[str, dict[float, float]] = {name: {} for name in names}
    later: list[AnyRun] = []
    for name, shape in names.items():
        while todo := next_trials(tried[name], question.rates, question.trials):
            runs = {lr: training.run(shape, lr, TUNING_SEED) for lr in todo}
            rows, missing = found(runs)
            tried[name] |= {lr: training.loss(row) for lr, row in rows.items()}
            if missing:
                later += missing
                break
    count = sum(map(len, tried.values()))
    empty = race({}, list(names), rule)
    if later:
        return Standing(tried=tried, rates={}, race=empty, losses={}, rows={}, tuning=count,
                        seconds=spent[0], work=spent[1], next=tuple(later),
                        asked=tuple(asked))  # fmt: skip

    # -- the race, on seeds that no rate was chosen on
    rates = {name: best_rate(tried[name]) for name in names}
    losses: dict[str, dict[int, float]] = {name: {} for name in names}
    kept: dict[str, dict[int, Row]] = {name: {} for name in names}
    while True:
        at = race(losses, list(names), rule)
        runs = {
            (name, seed): training.run(names[name], rates[name], seed) for name, seed in at.missing
        }
        rows, missing = found(runs)
        for (name, seed), row in rows.items():
            losses[name][seed] = training.loss(row)
            kept[name][seed] = row
        if missing or not at.missing:
            return Standing(tried=tried, rates=rates, race=at, losses=losses, rows=kept,
                            tuning=count, seconds=spent[0], work=spent[1],
                            next=tuple(missing), asked=tuple(asked))  # fmt: skip


def work_to_look(question: Question, rule: Rule, at: Standing) -> float:
    """The work that is left until the next look, in the training's unit."""
    training, looks = question.training, len(at.race.looks)
    if looks == len(rule.looks):
        return 0.0
    total = 0.0
    for name in at.race.left:
        run = training.run(question.names[name], question.rates[0], TUNING_SEED + 1)
        runs = question.trials - len(at.tried[name])
        runs += rule.looks[looks] - len(at.losses.get(name, {}))
        total += runs * training.work(run)
    return total


def check_same_question(question: Question, store: Store) -> None:
    """Refuse a store in which another question of that name was asked."""
    noted = store.experiments().get(question.note)
    if noted is None:
        return
    before, now = noted.get("settings", {}), question.spec()
    if differing := [key for key in (*now, *before) if before.get(key) != now.get(key)]:
        key = differing[0]
        theirs, ours = before.get(key), now.get(key)
        if isinstance(theirs, dict) and isinstance(ours, dict):
            inner = next(k for k in (*ours, *theirs) if theirs.get(k) != ours.get(k))
            key, theirs, ours = f"{key} {inner}", theirs.get(inner), ours.get(inner)
        elif key == "shapes":
            theirs, ours = (f"{len(value or [])} others" for value in (theirs, ours))
        raise UsageError(
            f"{store.path} holds another question about {question.training.name}: {key} was "
            f"{shown(theirs)}, now {shown(ours)}; give another store (its rows stay), or ask as "
            "before"
        )


def curve_of(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """The mean learning curve of several runs of one shape: share of the training, loss."""
    by_place: dict[float, list[float]] = {}
    for row in rows:
        places = row["held_out_curve"]
        if row["status"] != "done" or not places:
            continue
        for place, loss in places:
            if loss is not None:
                by_place.setdefault(place / places[-1][0], []).append(loss)
    most = max(map(len, by_place.values()), default=0)
    return [
        (share, math.fsum(values) / len(values))
        for share, values in sorted(by_place.items())
        if len(values) == most
    ]
