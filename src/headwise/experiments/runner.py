"""Make an experiment: `run` is the Python entry, `make` the plan it follows.

settings -> runs -> rows that are given -> note in the store -> train what is missing
         -> further rounds -> points -> figure and page
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import UsageError, check_instance
from headwise.execute.engine import Engine, Place
from headwise.execute.sources import check_tasks, edited, set_aside
from headwise.experiments import EXPERIMENTS, find
from headwise.experiments.base import MOST_RUNS, Experiment, Settings
from headwise.experiments.given_rows import given_rows, take_rows
from headwise.experiments.made import Counts, Made
from headwise.experiments.maker import Maker
from headwise.experiments.pages import page_of, remarked, write_report
from headwise.experiments.points import Point, plain_point
from headwise.experiments.state import Bounds, State, after_round, announced, tuning_only
from headwise.rows import Row, Specified
from headwise.store import Store

if TYPE_CHECKING:
    from headwise.model.own import Model
    from headwise.signals import Stop
    from headwise.tasks.task import Task

DEFAULT_STORE = "headwise-store"
ROUNDS = 32  # of runs that depend on others' rows, at most
Say = Callable[[str], None]


# ---- the Python entry


def run(
    experiment: str | Path | Experiment[Any, Any],
    *,
    preset: str = "quick",
    store: str | Path | Store = DEFAULT_STORE,
    task: str | Task | Sequence[str | Task] | None = None,
    model: str | Model | None = None,
    device: str = "auto",
    workers: int | None = None,
    on: str | Place = "local",
    rows: Sequence[str | Path] = (),
    train: bool = True,
    fresh: bool = False,
    keep_weights: bool = False,
    checkpoint_every: float = 30.0,
    report: bool = True,
    **settings: Any,
) -> Made:
    """Make an experiment and return what was made. What the store already has is not made again.

    `experiment` is a name (`headwise list` shows them), a Python file with an `EXPERIMENT`, or the
    value itself. Settings of the preset are changed by name. `task` and `model` put your own in the
    place of the experiment's: values, names of built-in tasks, or files. `on` says where to train:
    "local", "ray", "ray:auto", "ray://HOST:PORT", "slurm" or a `Place`. `fresh` makes again what
    other code of theirs made; `train=False` shows what is there.

        made = headwise.run("fig1", store="my-store", seeds=2)
        made.points, made.rows, made.headline, made.picture, made.page

    Progress goes to standard error. Ctrl-C saves what is being trained and raises
    KeyboardInterrupt; the same call resumes.
    """
    if not isinstance(experiment, Experiment):
        experiment = find(str(experiment))
    chosen = experiment.preset(preset)
    if task is not None:
        chosen = chosen.with_tasks(tasks_of(task))
    if model is not None:
        chosen = chosen.with_model(model_of(model))
    with Engine(on if isinstance(on, Place) else Place(on)) as engine:
        return make(
            experiment,
            chosen.changed(**settings),
            store if isinstance(store, Store) else Store(store),
            preset=preset,
            device=device,
            workers=workers,
            engine=engine,
            rows=rows,
            train=train,
            fresh=fresh,
            keep_weights=keep_weights,
            checkpoint_every=checkpoint_every,
            report=report,
            command=f'headwise.run("{experiment.name}", preset="{preset}", ...)',
        )


def tasks_of(given: str | Task | Sequence[str | Task]) -> list[str | Task]:
    """Built-in tasks by name, one's own as values; names of files are loaded."""
    if isinstance(given, str):
        # A file may have arguments with commas, as in my_task.py:MyTask(points=8, dim=16).
        words = [given] if ".py" in given else given.split(",")
        return [_task_of(word) for word in words]
    if isinstance(given, Sequence):
        return [task for one in given for task in tasks_of(one)]
    check_instance("task", given)
    return [given]


def _task_of(word: str) -> str | Task:
    from headwise.tasks.own import is_file_spec, load_task

    return load_task(word) if is_file_spec(word) else word


def model_of(given: str | Model) -> Model:
    """One's own model as a value; the name of a file is loaded."""
    if not isinstance(given, str):
        check_instance("model", given)
        return given
    from headwise.tasks.own import load_model

    return load_model(given)


# ---- the plan


def make(
    experiment: Experiment[Any, Any],
    settings: Settings,
    store: Store,
    *,
    preset: str = "",
    device: str = "auto",
    workers: int | None = None,
    engine: Engine | None = None,
    rows: Sequence[str | Path] = (),
    train: bool = True,
    fresh: bool = False,
    keep_weights: bool = False,
    checkpoint_every: float = 30.0,
    report: bool = True,
    note: bool = True,
    say: Say | None = None,
    stop: Stop | None = None,
    command: str = "",
) -> Made:
    """Make an experiment's rows, points, figure and page.

    `rows` names files of rows made before. `train=False` shows what is there and makes nothing.
    `fresh` makes those again that other code of a task or model of one's own made.
    `note=False` leaves the page that the store already has for this experiment.
    `stop` is asked between steps. `engine` trains elsewhere than here and in a pool.
    """
    say = say or functools.partial(print, file=sys.stderr, flush=True)
    settings.check_number()
    runs = list(experiment.runs(settings))
    if len(runs) > MOST_RUNS:
        raise UsageError(
            f"an experiment has at most {MOST_RUNS:,} runs, {experiment.name} has {len(runs):,} "
            "with these settings"
        )
    ids = list(dict.fromkeys(run.id for run in runs))
    experiment.check_options(runs, workers, keep_weights)
    if fresh and (rows or not train):
        raise UsageError("fresh makes runs again; it goes without rows of files and with training")
    given = given_rows(rows, runs) if rows else {}
    engine = engine if engine is not None and engine.place.by_engine else None
    worker = Maker(
        experiment, store, device, workers, keep_weights, checkpoint_every, train, stop, engine
    )

    # What is asked for, and what of it is there: said and noted before anything is made, so that
    # the store's page shows it also after a kill.
    count = experiment.count(runs)
    plain = settings.plain()
    asked = {"command": command, "preset": preset, "settings": plain, "made": train}
    later = _bounds(experiment, settings)
    before = store.noted_ids(experiment.name)
    taken = take_rows(given, runs, store, experiment) if given else 0
    if fresh:  # a task that is refused leaves its rows where they are
        check_tasks(store, runs, runs)
    again = set_aside(store, runs) if fresh else 0
    missing = store.missing(runs)
    begun = store.begun(missing)
    there = len(runs) - len(missing)
    beginning = f"{experiment.name} ({preset}): {count}, {there} already in {store.path}"
    if taken:
        files = ", ".join(map(str, rows))
        beginning += f", {taken} of them from {files}, {len(missing)} to make"
    if begun:
        beginning += f", {begun} to resume"
    beginning += announced(len(runs), later)
    if train:
        from headwise.execute.sweep import check_machine

        check_tasks(store, runs, missing)
        check_machine(device, store.path, missing, keep_weights, elsewhere=engine is not None)
        if engine is not None and missing:
            engine.executor.slots()  # what cannot be reached is said first
    if not train and len(missing) == len(runs):
        raise UsageError(
            f"none of these {count} is in {store.path}, and only what is there was asked for "
            "(--no-train, train=False)"
        )
    if note:
        store.note(experiment.name, {**asked, "ids": ids, "later": later})
    for line in (beginning, *edited(store, runs)):
        say(line)
    if missing and train and preset == "paper" and worker.slow:
        say(
            "the preset paper is made for a GPU and may take days on a CPU; --no-train shows what "
            "is there"
        )

    # The first round, then rounds of runs that depend on the rows so far.
    found = worker.rows_of(runs, experiment.keep_weights)
    later_rounds = _later_rounds(experiment, settings, runs, found) if train or not missing else ()
    for new in later_rounds:
        taken += take_rows(given, new, store, experiment) if given else 0
        again += set_aside(store, new) if fresh else 0
        waiting = store.missing(new)
        later = after_round(later, len(new))
        # Noted before they are made, as the first ones are.
        ids += [run.id for run in new]
        if note:
            store.note(experiment.name, {**asked, "ids": ids, "later": later})
        say(
            f"{experiment.name}, next round: {len(new)} runs, {len(new) - len(waiting)} already in "
            f"{store.path}{announced(len(ids), later)}"
        )
        found += worker.rows_of(new)
        runs += new
        missing += waiting

    if train or not missing:
        later = (0, 0)
    points = experiment.summary(found)
    remarks = edited(store, runs, now=False)
    headline = [*experiment.headline(points), *remarks]
    if again:
        say(f"{again} runs that other code had begun were made again (--fresh)")
    if note:
        kept = _kept(experiment, preset, points, plain)
        kept |= {"remarks": remarks} if remarks else {}
        store.note(experiment.name, {**asked, "ids": ids, "later": later, **kept})
        if before - set(ids):
            say(
                f"{experiment.name} was made with other settings in {store.path} before: its page "
                "now shows these; the older rows are still there"
            )
    drawn = _draw(experiment, points, remarks, store, say) if report else (None, None)
    counts = Counts(
        runs=len(runs),
        made=len(missing) if train else 0,
        taken=taken,
        missing=0 if train else len(missing),
        failed=sum(plain_point(p).get("holds") is False for p in points),
    )
    return Made(
        experiment=experiment,
        preset=preset,
        settings=settings,
        store=store,
        rows=found,
        points=points,
        headline=headline,
        counts=counts,
        state=State(
            there=len({row["id"] for row in found}),
            asked=len(ids),
            later=later,
            tuning=tuning_only(points),
            trains=experiment.trains,
            made=train,
        ),
        remarks=remarks,
        picture=drawn[0],
        page=drawn[1],
    )


# ---- its steps


def _bounds(experiment: Experiment[Any, Any], settings: Settings) -> Bounds | None:
    """How many runs depend on others' rows, as the experiment says; None: it does not."""
    if experiment.then is None:
        return 0, 0
    return experiment.later(settings) if experiment.later else None


def _kept(
    experiment: Experiment[Any, Any],
    preset: str,
    points: Sequence[Point],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """What the store keeps of an experiment of one's own: its page and its points as plain values.
    Those of the built-in ones are computed from their rows."""
    if experiment.name in EXPERIMENTS:
        return {}
    values = [plain_point(point) for point in points]
    page = page_of(experiment, preset, points, settings)
    return {"page": page.to_json(), "points": values}


def _later_rounds(
    experiment: Experiment[Any, Any],
    settings: Settings,
    runs: Sequence[Specified],
    rows: list[Row],
) -> Iterator[list[Any]]:
    """Runs that depend on rows, round after round; `rows` grows meanwhile."""
    if experiment.then is None:
        return
    known = {run.id for run in runs}
    for _ in range(ROUNDS):
        later = [run for run in experiment.then(settings, rows) if run.id not in known]
        if not later:
            return
        known |= {run.id for run in later}
        yield later
    raise UsageError(
        f"`then` of {experiment.name} must come to an end, it has new runs after {ROUNDS} rounds"
    )


def _draw(
    experiment: Experiment[Any, Any],
    points: Sequence[Point],
    remarks: Sequence[str],
    store: Store,
    say: Say,
) -> tuple[Path | None, Path | None]:
    """Write the figure and the store's page; without the libraries that draw, say so."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as e:
        say(
            f"no figure and no report: {e.name} is not installed (pip install "
            f"'headwise[report]'); the rows are in {store.path}"
        )
        return None, None
    from headwise.show.matplotlib_figure import save

    picture = store.path / f"{experiment.name}.png"
    save(remarked(experiment.figure(points), remarks), picture)
    return picture, write_report(store)
