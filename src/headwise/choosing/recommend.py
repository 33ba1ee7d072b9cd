"""`choose`: tune, race, report.

    question    task or text, shapes, rates                        (question.py)
    loop        rows -> standing -> the runs that come next -> made by the engine, or time is up
    answer      rows -> Choice, and its page                        (choice.py, page.py)

All that is known lies in the store's rows: the same call resumes after an interruption, and gives
the answer that an undisturbed one would have given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.choosing.candidates import MOST
from headwise.choosing.choice import Arm, Choice, Spent
from headwise.choosing.clock import Deadline, Pace, end_of, slowness, times
from headwise.choosing.learning_curve import worth
from headwise.choosing.limits import shapes_within
from headwise.choosing.page import note_of
from headwise.choosing.question import (
    Question,
    Standing,
    check_same_question,
    curve_of,
    standing,
    work_to_look,
)
from headwise.choosing.race import Rule, seeds_needed
from headwise.choosing.rates import GRID, TRIALS, at_edge, check_grid
from headwise.choosing.trainings import Training, training_of
from headwise.errors import UsageError
from headwise.execute.engine import Engine, Place
from headwise.experiments import own_mistakes
from headwise.experiments.pages import write_report
from headwise.experiments.points import BEATEN, baseline_of, plural, signed
from headwise.experiments.runner import DEFAULT_STORE, Say
from headwise.signals import Stop, Stopped, hand_on, installed
from headwise.stats import Mean
from headwise.store import Store

if TYPE_CHECKING:
    from headwise.lm.spec import Pretraining
    from headwise.model.own import Model
    from headwise.shape import Shape
    from headwise.tasks.task import Task
    from headwise.training.run import Recipe

QUICK = 10.0  # seconds; a shorter round is made in this process, where nothing has to start


def choose(
    task: str | Task | Pretraining,
    *,
    shapes: Sequence[Shape] | None = None,
    params: int | str | None = None,
    dim: int | None = None,
    depths: Sequence[int] = (),
    heads: Sequence[int] = (),
    ranks: Sequence[int] = (),
    limits: Mapping[str, str] | None = None,
    most: int = MOST,
    model: str | Model | None = None,
    recipe: Recipe | None = None,
    steps: int | None = None,
    batch: int | None = None,
    rates: Sequence[float] = GRID,
    trials: int | None = None,
    delta: float = 0.05,
    epsilon: float = 0.0,
    seeds: int = 20,
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
) -> Choice:
    """Which of several shapes is best on a task, with its evidence.

    `task` is a task's value, its name or file, or a `Pretraining` for a text, whose shape, rate and
    seed are replaced. The shapes are given, or are those of `params` parameters (narrowed by `dim`,
    `depths`, `heads`, `ranks`, and by `limits` as those of `headwise.plan`). Every shape's rate is
    tuned with `trials` runs on a seed and on held-out data that are not used again; then shapes are
    compared on fresh seeds, the same for
    all, until the answer is clear, `seeds` are used up or time is up. With probability 1 - `delta`
    no statement is wrong; differences below `epsilon` do not matter. `on` says where to train, as
    in `headwise.run`.

        best = headwise.choose("my_task.py", params=300_000, hours=0.5, store="my-store")
        print(best); best.best, best.lead, best.band, best.page

    Progress goes to standard error. Ctrl-C saves what is being trained; the same call resumes.
    """
    say = say or functools.partial(print, file=sys.stderr, flush=True)
    began = time.monotonic()
    limit = limit_of(seconds, hours)
    rule = Rule(delta=delta, epsilon=epsilon, seeds=seeds)
    training = training_of(task, model, recipe, steps, batch)
    chosen = _shapes(training, shapes, params, limits or {}, dim, depths, heads, ranks, most)
    trials = (len(rates) if len(rates) == 1 else TRIALS) if trials is None else trials
    check_grid(rates, trials)
    question = Question(training, chosen, tuple(map(float, rates)), trials)
    how = {"device": device, "workers": workers, "checkpoint_every": checkpoint_every}
    with Engine(on if isinstance(on, Place) else Place(on)) as engine:
        choice, _ = answer(
            question,
            rule,
            store if isinstance(store, Store) else Store(store),
            began=began,
            seconds=limit,
            how={**how, "engine": engine},
            report=report,
            say=say,
            stop=stop,
            command=command or f'headwise.choose("{training.name}", ...)',
        )
    return choice


def limit_of(seconds: float | None, hours: float | None) -> float | None:
    """The time there is, in seconds; None: no limit."""
    if seconds is not None and hours is not None:
        raise UsageError(f"time is given in seconds or in hours, got {seconds:g} and {hours:g}")
    limit = seconds if hours is None else 3600 * hours
    if limit is not None and not 0 < limit < math.inf:
        raise UsageError(f"time must be above 0, got {limit:g} seconds")
    return limit


def _shapes(
    training: Training,
    shapes: Sequence[Shape] | None,
    params: int | str | None,
    within: Mapping[str, str],
    dim: int | None,
    depths: Sequence[int],
    heads: Sequence[int],
    ranks: Sequence[int],
    most: int,
) -> tuple[Shape, ...]:
    """The shapes that were given, or those that meet the limits."""
    limits = {"params": params, "limits": within, "dim": dim}
    limits |= {"depths": depths, "heads": heads, "ranks": ranks}
    if shapes is not None:
        if given := [name for name, value in limits.items() if value]:
            raise UsageError(f"shapes are given, so {given[0]} has nothing to limit")
        return tuple(shapes)
    if params is None:
        raise UsageError("choose needs shapes, or the parameters that they are to have (params)")
    return shapes_within(
        training, params, within, dim=dim, depths=depths, heads=heads, ranks=ranks, most=most
    )


# ---- the loop


def answer(
    question: Question,
    rule: Rule,
    store: Store,
    *,
    began: float,
    seconds: float | None,
    how: dict[str, Any],
    report: bool,
    say: Say,
    stop: Stop | None,
    command: str,
) -> tuple[Choice, Standing]:
    """Have the rows made that the answer needs, as far as time allows, and give it."""
    entered, own = time.monotonic(), time.process_time()
    from headwise.device import pick_device
    from headwise.execute.sources import edited
    from headwise.execute.sweep import check_machine, cores

    check_same_question(question, store)
    engine = how.get("engine")
    elsewhere = engine is not None and engine.place.by_engine
    on_cpu = (
        not elsewhere
        and pick_device(how["device"]).type == "cpu"
        and question.training.model is None
    )
    at = standing(question, rule, store)
    check_machine(how["device"], store.path, at.next[:1], False, elsewhere)
    store.note(question.note, note_of(question, at, command, None))
    say(
        f"choose: {plural(len(question.shapes), 'shape')} on {question.training.name}, "
        f"{plural(at.tuning + at.raced, 'run')} already in {store.path}"
        + (f", {times(seconds)} to go" if seconds else "")
    )
    for line in edited(store, [run for run in at.next if run is not None]):
        say(line)
    workers = (how["workers"] or cores()) if on_cpu else 1
    pace = Pace(_known_pace(at, workers))
    ended = ""
    slow = slowness(time.monotonic() - entered, time.process_time() - own)
    with _listening(stop, end_of(seconds, began, slow)) as deadline:
        while at.next and not ended:
            todo = sum(map(question.training.work, at.next))
            expected = pace.seconds(todo)
            left = deadline.end - time.monotonic()
            # A look that would come too late is not begun. Before the first one there is nothing to
            # report anyway, and what is under way is saved when time is up.
            if left <= 0 or (at.race.looks and expected is not None and expected > left):
                ended = "time"
                break
            say(_round_in_words(at, expected))
            given = dict(how)
            if on_cpu and how["workers"] is None and expected is not None and expected < QUICK:
                given["workers"] = 1
            since = time.monotonic()
            try:
                with own_mistakes("choose"):
                    question.training.make(at.next, store, stop=deadline, **given)
            except Stopped:
                if deadline.signals.asked():
                    raise
                ended = "time"
            else:
                pace.note(todo, time.monotonic() - since)
            at = standing(question, rule, store)
            store.note(question.note, note_of(question, at, command, None))
    known = _known_pace(at, workers)
    needed = None if known is None else known * work_to_look(question, rule, at)
    choice = _choice(question, rule, at, ended or at.race.end, store, command,
                     time.monotonic() - began, needed)  # fmt: skip
    return _reported(choice, question, at, store, report, say), at


@contextlib.contextmanager
def _listening(stop: Stop | None, end: float) -> Iterator[Deadline]:
    """A Deadline over the caller's Stop, or over one that handles signals meanwhile."""
    if stop is not None:
        yield Deadline(stop, end)
        return
    own = Stop(hand_on)
    with installed(own):
        yield Deadline(own, end)


def _known_pace(at: Standing, workers: int) -> float | None:
    """Seconds per unit of work by the rows that are there, if there are any."""
    return at.seconds / at.work / workers if at.work else None


def _round_in_words(at: Standing, expected: float | None) -> str:
    what = "tuning"
    if at.tuned:
        left = plural(len(at.race.left), "shape")
        what = f"look {len(at.race.looks) + 1}, {left} left"
    time_left = f", about {times(expected)}" if expected is not None else ""
    return f"choose: {what}: {plural(len(at.next), 'run')}{time_left}"


# ---- the answer


def _choice(
    question: Question,
    rule: Rule,
    at: Standing,
    ended: str,
    store: Store,
    command: str,
    seconds: float,
    needed: float | None,
) -> Choice:
    """What the rows say; `needed` is the time to the next look."""
    training, found = question.training, at.race
    out = found.out
    at_last = {gap.arm: gap for look in found.looks for gap in look.gaps}
    leader = found.leader
    arms = []
    for name, shape in question.names.items():
        losses = list(at.losses.get(name, {}).values())
        finite = [x for x in losses if math.isfinite(x)]
        gap = at_last.get(name) if name != leader else None
        tried = at.tried[name]
        lr = at.rates.get(name)
        known = training.model is None
        run = training.run(shape, question.rates[0], 1)
        arms.append(Arm(
            name=name, shape=shape,
            params=int(run.columns()["params"]),
            flops=shape.flops(training.tokens) // training.tokens if known else None,
            kv_bytes=shape.kv_bytes() if known and training.causal else None,
            lr=lr,
            edge=lr is not None and at_edge(tried),
            tuning_loss=None if lr is None or math.isinf(tried[lr]) else tried[lr],
            seeds=len(losses), diverged=len(losses) - len(finite),
            loss=math.fsum(finite) / len(finite) if finite else None,
            gap=None if gap is None else _mean(gap, found.looks, name),
            out=found.looks[out[name][0]].seeds if name in out else None,
        ))  # fmt: skip
    band = [arm for arm in arms if found.looks and arm.name in found.left]
    by_name = {arm.name: arm for arm in arms}
    best = by_name[leader].shape if leader and ended != "diverged" else None
    choice = Choice(
        task=training.name,
        unit="bits per byte" if training.name == "text" else "held-out loss",
        best=best, arms=tuple(arms),
        band=tuple(sorted(band, key=lambda arm: (arm.cost, arm.name))),
        race=found, ended=ended, worth="nothing was compared",
        seeds_needed=seeds_needed(found), changes=(),
        spent=Spent(tuning=at.tuning, race=at.raced,
                    grid=len(arms) * rule.seeds, seconds=round(seconds, 1)),
        store=store.path, command=command,
    )  # fmt: skip
    lead, changes = _worth(choice, at), tuple(_changes(choice, at, needed))
    return dataclasses.replace(choice, worth=lead, changes=changes)


def _mean(gap: Any, looks: Sequence[Any], name: str) -> Mean:
    """A gap with the seeds of its look."""
    seeds = max(look.seeds for look in looks if any(g.arm == name for g in look.gaps))
    if math.isinf(gap.mean):
        return Mean(math.inf, None, None, seeds)
    return Mean(gap.mean, gap.low, gap.high, seeds)


def _worth(choice: Choice, at: Standing) -> Any:
    """What the lead over the second is worth in training."""
    leader, second, lead = choice.leader, choice.second, choice.lead
    if leader is None or second is None or lead is None or lead.low is None or lead.high is None:
        return "there is no second shape to compare with"
    ratio = second.flops / leader.flops if second.flops and leader.flops else 1.0
    points = curve_of(list(at.rows[leader.name].values()))
    return worth(points, (lead.mean, lead.low, lead.high), ratio)


def _changes(choice: Choice, at: Standing, needed: float | None) -> Iterator[str]:
    """What would change the answer, as far as the rows know."""
    edge = [arm.name for arm in choice.arms if arm.edge]
    if edge:
        side = "its best rate is" if len(edge) == 1 else "their best rates are"
        yield f"other rates for {', '.join(edge)}: {side} at the edge of what was tried"
    if choice.ended == "time":
        look = "first" if not choice.race.looks else "next"
        more = "" if needed is None else f", about {times(needed)} to the {look} look at this pace"
        yield f"more time{more} (the same command resumes), fewer shapes or fewer steps"
    leader = choice.leader
    if leader is None:
        return
    yield from _nothing_learned(leader, at)
    if crossed := _ahead_before(leader, at):
        yield (
            f"another length of training: after half of the steps {crossed} was ahead of "
            f"{leader.name}"
        )
    wide = [arm for arm in choice.band if arm.name != leader.name and arm.gap]
    if wide and choice.ended == "seeds":
        visible = max((a.gap.high - a.gap.low) / 2 for a in wide
                      if a.gap and a.gap.low is not None and a.gap.high is not None)  # fmt: skip
        yield (
            f"more seeds: {choice.race.rule.seeds} show no difference below about "
            f"{signed(visible)[1:]}"
        )


def _nothing_learned(leader: Arm, at: Standing) -> Iterator[str]:
    """Whether the leader is hardly better than an answer that needs no training."""
    rows = list(at.rows[leader.name].values())
    found = baseline_of(rows) if rows else {"baseline": None}
    lowest = found["baseline"]
    if lowest is None or leader.loss is None or leader.loss <= BEATEN * lowest:
        return
    yield (
        f"longer training or larger models: no shape beats the best answer without attention "
        f"({found['baseline_name'] or 'zero'}: {lowest:.4g}) by 1 %, so this compares nothing yet"
    )


def _ahead_before(leader: Arm, at: Standing) -> str:
    """Which arm was ahead of the leader after half of the training, by means over the seeds of
    both; empty: none."""
    ours = {round(share, 3): loss for share, loss in curve_of(list(at.rows[leader.name].values()))}
    best, ahead = 0.0, ""
    for name in at.race.left:
        rows = at.rows[name]
        for share, loss in curve_of([rows[seed] for seed in rows]):
            gap = loss - ours.get(round(share, 3), -math.inf)
            if 0.4 <= share <= 0.6 and gap < best:
                best, ahead = gap, name
    return ahead


def _reported(
    choice: Choice, question: Question, at: Standing, store: Store, report: bool, say: Callable
) -> Choice:
    """The answer noted in the store, and the store's page written."""
    store.note(question.note, note_of(question, at, choice.command, choice))
    if not report:
        return choice
    try:
        import jinja2  # noqa: F401
    except ModuleNotFoundError as e:
        say(f"no page: {e.name} is not installed (pip install 'headwise[report]')")
        return choice
    return dataclasses.replace(choice, page=write_report(store))
