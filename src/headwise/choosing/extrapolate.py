"""The race at smaller sizes, and what it says about a larger one.

A design is a number of layers and of heads; at every size it has the width and the feed-forward
that meet the size. Of each design and seed the logarithm of the loss is a line over the logarithm
of the parameters, by least squares:

    log loss(design, seed, size) = height + slope * log(size)

so every seed gives a prediction, and their differences between designs are compared as in a race.
Two things widen the intervals: the seeds, as always, and the bend. With three sizes or more the
bend is measured: how far the parabola through the last three sizes is from the line through all.
With two it cannot be seen, and a tenth of the predicted change is allowed for; so at the least with
three.

The order is not predictable when it changes with size: when a design that leads at one size is
ruled out at another.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.choosing.candidates import designs
from headwise.choosing.choice import Choice, _plain
from headwise.choosing.question import Question
from headwise.choosing.race import Losses, Race, Rule, look_at
from headwise.choosing.rates import GRID, TRIALS, check_grid
from headwise.choosing.recommend import answer, limit_of
from headwise.choosing.trainings import training_of
from headwise.errors import UsageError
from headwise.execute.engine import Engine, Place
from headwise.experiments.points import plural
from headwise.experiments.runner import DEFAULT_STORE, Say
from headwise.stats import tail_point
from headwise.store import Store

if TYPE_CHECKING:
    from headwise.lm.spec import Pretraining
    from headwise.model.own import Model
    from headwise.signals import Stop
    from headwise.tasks.task import Task
    from headwise.training.run import Recipe

ALLOWED_BEND = 0.1  # of the predicted change of the logarithm, at the least


# ---- the law


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """One design at the size that was asked for."""

    name: str
    loss: float
    low: float
    high: float
    in_band: bool  # whether it cannot be told apart from the one that is predicted best


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What smaller sizes say about a larger one. `print(prediction)` says it."""

    task: str
    params: int
    sizes: tuple[int, ...]
    designs: tuple[Predicted, ...]  # the best first
    reason: str  # why the order cannot be predicted; empty: it can
    delta: float
    seeds: int  # that all designs have at all sizes
    choices: tuple[Choice, ...] = ()  # of each size

    @property
    def predictable(self) -> bool:
        """Whether the order of the designs is."""
        return not self.reason

    @property
    def sentence(self) -> str:
        """The prediction."""
        at = f"At {self.params:,} parameters on {self.task}"
        if not self.predictable:
            return f"{at} the best shape is not predictable: {self.reason}."
        best = self.designs[0]
        band = [one.name for one in self.designs if one.in_band]
        loss = f"loss {best.loss:.4f} ({best.low:.4f} to {best.high:.4f})"
        if len(band) == 1:
            return f"{at} {best.name} is predicted to be best, {loss}."
        return f"{at} {', '.join(band)} cannot be told apart; {best.name} leads, {loss}."

    @property
    def lines(self) -> list[str]:
        """The prediction, what it rests on, and the answer at each size."""
        sizes = ", ".join(f"{size:,}" for size in self.sizes)
        out = [
            self.sentence,
            f"A law through {sizes} parameters, {plural(self.seeds, 'seed')} each; intervals hold "
            f"together with probability {1 - self.delta:.3g} if the law does.",
        ]
        for size, choice in zip(self.sizes, self.choices, strict=False):
            out.append(f"{size:,} parameters: {choice.sentence}")
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def table(self) -> list[list[str]]:
        """The headings, then a line per design."""
        head = ["design", "predicted loss", "from", "to", "stands"]
        return [head, *(
            [one.name, f"{one.loss:.4f}", f"{one.low:.4f}", f"{one.high:.4f}",
             "not told apart" if one.in_band else "worse"] for one in self.designs
        )]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """As values that JSON has."""
        values = {name: value for name, value in vars(self).items() if name != "choices"}
        return _plain({**values, "sentence": self.sentence, "predictable": self.predictable,
                       "choices": [choice.to_json() for choice in self.choices]})  # fmt: skip


def predict(
    losses: Mapping[int, Losses],
    params: int,
    *,
    races: Mapping[int, Race] | None = None,
    delta: float = 0.05,
    task: str = "",
) -> Prediction:
    """Predict the losses of designs at `params` from those at smaller sizes: size -> design ->
    seed -> loss. `races` are those of the sizes, for the check of the order."""
    sizes = sorted(losses)
    if len(sizes) < 2 or sizes[-1] >= params:
        raise UsageError(
            "a prediction needs at least two sizes, all below the one asked for, got "
            f"{', '.join(map(str, sizes)) or 'none'} for {params}"
        )
    # Seeds that every design has at every size; a design that diverged anywhere has no law.
    names = [
        name
        for name in losses[sizes[0]]
        if all(
            losses[size].get(name) and all(0 < x < math.inf for x in losses[size][name].values())
            for size in sizes
        )
    ]
    if not names:
        raise UsageError("no design has losses at every size")
    common = set.intersection(*(set(losses[size][name]) for size in sizes for name in names))
    seeds = sorted(common)
    if len(seeds) < 2:
        raise UsageError("a prediction needs two seeds that all designs have at all sizes")
    x, goal = [math.log(size) for size in sizes], math.log(params)
    weights, curved = _weights(x, goal), _parabola(x[-3:], goal)
    logs = {
        name: [[math.log(losses[size][name][seed]) for size in sizes] for seed in seeds]
        for name in names
    }
    lines = {name: [_dot(weights, y) for y in logs[name]] for name in names}
    bends = {name: _bend(logs[name], lines[name], curved) for name in names}

    # Designs are compared by the seeds' predictions, and by how differently they bend.
    level = delta / 2 / max(1, 2 * len(names) - 1)
    look = look_at(lines, Rule(delta=delta), level)
    behind = {gap.arm: gap.low - bends[gap.arm] - bends[look.leader] for gap in look.gaps}
    # Each design's own interval, with the spread of its seeds' predictions.
    point, out = tail_point(level, len(seeds) - 1), []
    for name in names:
        centre = math.fsum(lines[name]) / len(seeds)
        spread = math.fsum((v - centre) ** 2 for v in lines[name]) / (len(seeds) - 1)
        half = point * math.sqrt(spread / len(seeds)) + bends[name]
        out.append(Predicted(
            name=name, loss=math.exp(centre), low=math.exp(centre - half),
            high=math.exp(centre + half), in_band=behind.get(name, 0.0) <= 0,
        ))  # fmt: skip
    return Prediction(
        task=task, params=params, sizes=tuple(sizes), seeds=len(seeds), delta=delta,
        designs=tuple(sorted(out, key=lambda one: one.loss)),
        reason=_order_changes(races or {}),
    )  # fmt: skip


def _weights(x: Sequence[float], goal: float) -> list[float]:
    """What each size counts for in the least-squares line at the goal."""
    mean = math.fsum(x) / len(x)
    squares = math.fsum((v - mean) ** 2 for v in x)
    return [1 / len(x) + (goal - mean) * (v - mean) / squares for v in x]


def _dot(weights: Sequence[float], y: Sequence[float]) -> float:
    return math.fsum(w * v for w, v in zip(weights, y, strict=True))


def _parabola(x: Sequence[float], goal: float) -> list[float]:
    """What each of three sizes counts for in the parabola through them at the goal; of two sizes
    the line's."""
    if len(x) < 3:
        return _weights(x, goal)
    return [math.prod((goal - other) / (v - other) for other in x if other != v) for v in x]


def _bend(
    logs: Sequence[Sequence[float]], lines: Sequence[float], curved: Sequence[float]
) -> float:
    """How far the mean prediction is from that of the parabola through the last three sizes, and at
    the least a part of the predicted change."""
    n = len(logs)
    bent = math.fsum(_dot(curved, y[-len(curved) :]) for y in logs) / n
    centre, largest = math.fsum(lines) / n, math.fsum(y[-1] for y in logs) / n
    return max(abs(bent - centre), ALLOWED_BEND * abs(centre - largest))


def _order_changes(races: Mapping[int, Race]) -> str:
    """Which design leads at one size and is ruled out at another; empty: none."""
    for size, found in sorted(races.items()):
        for other, against in sorted(races.items()):
            if found.leader in against.out:
                return (
                    f"the order changes with size, {found.leader} leads at {size:,} parameters "
                    f"and is ruled out at {other:,}"
                )
    return ""


# ---- races at several sizes


def extrapolate(
    task: str | Task | Pretraining,
    *,
    params: int | str,
    sizes: Sequence[int],
    depths: Sequence[int] = (),
    heads: Sequence[int] = (),
    most: int = 8,
    model: str | Model | None = None,
    recipe: Recipe | None = None,
    steps: int | None = None,
    batch: int | None = None,
    rates: Sequence[float] = GRID,
    trials: int | None = None,
    delta: float = 0.05,
    epsilon: float = 0.0,
    seeds: int = 8,
    seconds: float | None = None,
    hours: float | None = None,
    store: str | Path | Store = DEFAULT_STORE,
    device: str = "auto",
    workers: int | None = None,
    on: str | Place = "local",
    checkpoint_every: float = 30.0,
    report: bool = True,
    say: Say | None = None,
    stop: Stop | None = None,
    command: str = "",
) -> Prediction:
    """Race designs at smaller sizes and predict which is best at `params`; the other arguments are
    those of `headwise.choose`. The same call resumes."""
    from headwise.choosing.limits import amount

    goal, began = amount("params", params), time.monotonic()
    sizes = sorted(amount("extrapolate", size) for size in sizes)
    if len(set(sizes)) < 2 or sizes[-1] >= goal:
        raise UsageError(
            f"extrapolate needs at least two sizes below params {goal:,}, got "
            f"{', '.join(f'{size:,}' for size in sizes)}"
        )
    say = say or functools.partial(print, file=sys.stderr, flush=True)
    limit = limit_of(seconds, hours)
    training = training_of(task, model, recipe, steps, batch)
    trials = (len(rates) if len(rates) == 1 else TRIALS) if trials is None else trials
    check_grid(rates, trials)
    shapes = designs(training, [*sizes, goal], depths=depths, heads=heads, most=most)
    kept = store if isinstance(store, Store) else Store(store)
    rule = Rule(delta=delta, epsilon=epsilon, seeds=seeds)
    # Larger sizes get more of the time, by their parameters.
    choices: dict[int, Choice] = {}
    losses: dict[int, dict[str, dict[int, float]]] = {}
    for i, size in enumerate(sizes):
        left = None if limit is None else limit - (time.monotonic() - began)
        part = None if left is None else left * size / sum(sizes[i:])
        if part is not None and part <= 0:
            break
        chosen = shapes[size]
        question = Question(training, tuple(chosen.values()), tuple(map(float, rates)), trials,
                            label=str(size), named=tuple(chosen))  # fmt: skip
        with Engine(on if isinstance(on, Place) else Place(on)) as engine:
            choices[size], at = answer(
                question, rule, kept, began=time.monotonic(), seconds=part,
                how={"device": device, "workers": workers, "checkpoint_every": checkpoint_every,
                     "engine": engine},
                report=report, say=say, stop=stop, command=command,
            )  # fmt: skip
        if not at.race.looks:
            raise UsageError(
                f"time was up before the first look at {size:,} parameters; the same command "
                "resumes"
            )
        losses[size] = at.losses
    found = predict(
        losses, goal, races={size: one.race for size, one in choices.items()}, delta=delta,
        task=training.name,
    )  # fmt: skip
    return dataclasses.replace(found, choices=tuple(choices[size] for size in found.sizes))
