"""What is missing -> engine -> store.

An executor is a function `(work, chunks, advance, stop) -> None` that calls `work(chunk, advance,
stop)` for every chunk, in any order and anywhere. Since all state is in the store, an executor
keeps none: whatever it loses is found missing by the next sweep. When `stop` hears a signal, it
raises Stopped after what is under way was saved.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.device import pick_device, provenance
from headwise.errors import UsageError
from headwise.execute.cut import chunks_of
from headwise.execute.engine import Engine
from headwise.execute.groups import Options
from headwise.execute.leases import Watch, claimed, free_lost
from headwise.execute.memory import check_memory
from headwise.execute.pool import Pool
from headwise.execute.sources import check_tasks, note_sources
from headwise.files import USER_FILE
from headwise.lm.spec import Pretraining
from headwise.lm.trainer import load_corpus, pretrain
from headwise.progress import Progress
from headwise.rows import Row
from headwise.signals import Stop
from headwise.store import Store
from headwise.training.engine import Probe, train
from headwise.training.run import Run

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Work:
    """What a worker does with a chunk of runs: claim, train, store. Plain values only, so that it
    travels."""

    store: str
    device: str
    keep_weights: bool = False
    checkpoint_every: float = 30.0
    probe: Probe | None = None

    def __call__(self, chunk: Sequence[Run], advance: Advance, stop: Stop | None = None) -> None:
        store = Store(self.store)
        with claimed(store, chunk) as mine:
            note_sources(store, mine)
            train(
                mine,
                device=self.device,
                folder=store.runs_path,
                done=store.add,
                advance=advance,
                keep_weights=self.keep_weights,
                checkpoint_every=self.checkpoint_every,
                probe=self.probe,
                stop=stop,
                checked=True,  # by `sweep`
            )


def here(
    work: Work, chunks: Sequence[Sequence[Run]], advance: Advance, stop: Stop | None = None
) -> None:
    """The executor that runs everything in this process."""
    for chunk in chunks:
        work(chunk, advance, stop)


def _only_here(runs: Sequence[Run], probe: Probe | None) -> bool:
    """Whether a task, a model or the probe is defined where another process does not find it: in
    the caller's script or notebook, or inside a function."""
    classes = {type(value) for run in runs for value in (run.task, run.model)}
    return any(_is_only_here(value) for value in (*classes, probe) if value is not None)


def _is_only_here(value: Any) -> bool:
    module = sys.modules.get(value.__module__)
    if module is None or value.__module__ == "__main__":
        return True
    if value.__module__ != "builtins" and "__file__" not in vars(module):
        return True  # a notebook's cell, or what exec was given
    try:
        pickle.dumps(value)  # by its name, which has to lead back to it
    except (pickle.PicklingError, AttributeError, TypeError):
        return True
    return False


def _user_file(probe: Probe | None) -> str:
    """The user's file that a probe came from, so that a worker can load it; empty: none. Tasks and
    models of users bring their files themselves when they are unpickled."""
    module = sys.modules.get(probe.__module__) if probe is not None else None
    from_user = module is not None and module.__name__.startswith(USER_FILE)
    return module.__file__ or "" if module is not None and from_user else ""


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_space(path: Path, runs: Sequence[Any], keep_weights: bool = False) -> None:
    """Refuse to start what the disk cannot hold."""
    sizes = [run.shape.params for run in runs]
    need = 0
    # a checkpoint has 12 bytes a parameter and is written beside the one before; kept weights have
    # 4
    if sizes:
        need = (
            (64 << 20)
            + (64 << 10) * len(sizes)
            + 12 * (sum(sizes) + max(sizes))
            + (4 * sum(sizes) if keep_weights else 0)
        )
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < need:
        raise UsageError(
            f"no disk space: {len(runs)} runs need about {need >> 20} MiB in {path}, {free >> 20} "
            "MiB are free"
        )
    if not os.access(folder, os.W_OK):
        raise UsageError(f"the store {path} cannot be written: no permission in {folder}")


def check_machine(
    device: str,
    path: Path,
    missing: Sequence[Any],
    keep_weights: bool,
    elsewhere: bool = False,
) -> None:
    """Refuse what disk or memory cannot hold, and a device that is not there. What is trained
    elsewhere has that machine's memory, which workers ask."""
    trained = [run for run in missing if run.work != "compute"]
    if not elsewhere:
        check_memory(trained, pick_device(device))
    check_space(path, trained, keep_weights)


def sweep(
    runs: Sequence[Run],
    store: Store,
    *,
    device: str = "auto",
    workers: int | None = None,
    label: str = "sweep",
    keep_weights: bool = False,
    checkpoint_every: float = 30.0,
    probe: Probe | None = None,
    stop: Stop | None = None,
    engine: Engine | None = None,
) -> list[Row]:
    """Make every run's row exist and return the rows in order; finished runs are never repeated.

    Without an `engine` they are made in this process or in a pool of them.
    """
    if engine is not None and engine.place.by_engine:
        options = Options(device, keep_weights, checkpoint_every)
        return engine.rows(runs, store, options, label=label, probe=probe, stop=stop)
    where = pick_device(device)
    missing = store.missing(runs)
    if missing:
        check_tasks(store, runs, missing)
        check_space(store.path, missing, keep_weights)
        store.open()
    if workers is None:
        workers = cores() if where.type == "cpu" else 1
    work = Work(str(store.path), str(where), keep_weights, checkpoint_every, probe)
    bar = Progress(sum(r.recipe.steps for r in missing), f"{label}: {len(missing)} runs")
    watch = Watch()
    while missing:
        chunks = chunks_of(missing, workers)
        if workers == 1 or len(chunks) == 1 or _only_here(missing, probe):
            here(work, chunks, bar.advance, stop)
        elif free := [left for chunk in chunks if (left := _free(store, chunk))]:
            Pool(workers, _user_file(probe))(work, free, bar.advance, stop)
        left = store.missing(missing)
        if len(left) == len(missing):
            free_lost(store, [run.id for run in left], watch)
            bar.advance(0, f"waiting for {len(left)} runs that another process is making")
            time.sleep(0.5)
        missing = left
    store.tidy(runs)
    rows = store.rows([run.id for run in runs])
    if bar.done:
        bar.close()
    return rows


def _free(store: Store, chunk: list[Run]) -> list[Run]:
    """Those of a chunk that nobody is making now: processes are not started only to find that
    out."""
    with claimed(store, chunk) as mine:
        return list(mine)


def pretrain_all(
    runs: Sequence[Pretraining],
    store: Store,
    *,
    device: str = "auto",
    checkpoint_every: float = 60.0,
    keep_weights: bool = False,
    label: str = "pretrain",
    stop: Stop | None = None,
    engine: Engine | None = None,
) -> list[Row]:
    """Make every decoder's row exist, one after the other in this process, compiled on a GPU, and
    return the rows in order."""
    if engine is not None and engine.place.by_engine:
        options = Options(device, keep_weights, checkpoint_every)
        return engine.rows(runs, store, options, label=label, stop=stop)
    compiled = "blocks" if pick_device(device).type == "cuda" else ""
    folder, cache = store.runs_path, store.path / "tokens"
    for run in {
        (run.digest, run.length): run for run in runs if store.row(run.id) is None
    }.values():
        store.open()
        load_corpus(run, cache)  # a text that does not do leaves no run behind

    def make(run: Pretraining) -> None:
        pretrain(
            run,
            device=device,
            folder=folder,
            cache=cache,
            compiled=compiled,
            checkpoint_every=checkpoint_every,
            keep=keep_weights,
            done=store.add,
            quiet=True,
            stop=stop,
        )

    return _one_by_one(runs, store, make, lambda run: run.steps, f"{label}: %d runs")


def compute(
    values: Sequence[Any],
    make: Callable[[Any, str], Row],
    store: Store,
    *,
    device: str = "auto",
    label: str = "compute",
) -> list[Row]:
    """Make every value's row exist and return the rows in order, where nothing is trained:
    `make(value, device) -> row`."""
    where = pick_device(device)

    def add(value: Any) -> None:
        store.add({**make(value, str(where)), **provenance(where)})

    return _one_by_one(values, store, add, lambda _: 1, f"{label}: %d rows")


def _one_by_one(
    values: Sequence[Any],
    store: Store,
    make: Callable[[Any], None],
    size: Callable[[Any], int],
    label: str,
) -> list[Row]:
    """Have the missing values' rows made here, waiting for those that another process is making;
    all rows in order."""
    missing, watch = store.missing(values), Watch()
    bar = Progress(sum(map(size, missing)), label % len(missing))
    while missing:
        for value in missing:
            with claimed(store, [value]) as mine:
                for one in mine:
                    make(one)
            bar.advance(size(value) if store.row(value.id) is not None else 0)
        left = store.missing(missing)
        if len(left) == len(missing):
            free_lost(store, [value.id for value in left], watch)
            time.sleep(0.5)  # another process is making them, or was
        missing = left
    store.tidy(values)
    if bar.done:
        bar.close()
    return store.rows([value.id for value in values])
