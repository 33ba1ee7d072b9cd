"""What is missing -> engine -> store.

An executor is a function `(work, chunks, advance) -> None` that calls `work(chunk, advance)` for
every chunk, in any order and anywhere. Since all state is in the store, an executor keeps none:
whatever it loses is found missing by the next sweep.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import queue
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

from headwise.device import pick_device, provenance
from headwise.errors import UsageError
from headwise.execute.sources import note_sources
from headwise.files import USER_FILE, load_user_file
from headwise.lm.spec import Pretraining
from headwise.lm.trainer import load_corpus, pretrain
from headwise.progress import Progress
from headwise.rows import Row
from headwise.store import Store
from headwise.training.engine import Probe, train
from headwise.training.run import Run, ensemble_key

Advance = Callable[[int], None]
MOST_RUNS = 128  # in a chunk, each an open lock file; twice the largest stack


@dataclass(frozen=True)
class Work:
    """What a worker does with a chunk of runs: claim, train, store. Plain values only, so that it
    travels."""

    store: str
    device: str
    keep_weights: bool = False
    checkpoint_every: float = 30.0
    probe: Probe | None = None

    def __call__(self, chunk: Sequence[Run], advance: Advance) -> None:
        store = Store(self.store)
        with store.claim(chunk) as mine:
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
            )


def here(work: Work, chunks: Sequence[Sequence[Run]], advance: Advance) -> None:
    """The executor that runs everything in this process."""
    for chunk in chunks:
        work(chunk, advance)


class Pool:
    """The executor that runs chunks in processes of this machine, one thread each."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def __call__(self, work: Work, chunks: Sequence[Sequence[Run]], advance: Advance) -> None:
        context = get_context("spawn")
        # One thread, read when a worker imports torch; and a process that starts must not import
        # from the folder that the command was given in, which may be somebody's store.
        changed = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        news: Any = context.Queue()
        start = (news, os.getpid(), _user_file(work.probe))
        pool = ProcessPoolExecutor(
            min(self.workers, len(chunks)), context, initializer=_start_worker, initargs=start
        )
        try:
            # Submitting starts the workers. Ctrl-C is the parent's to handle, not theirs.
            with _interrupts_held(), _main_hidden():
                waiting: set[Future[None]] = {
                    pool.submit(_work_in_pool, work, list(chunk)) for chunk in chunks
                }
            while waiting:
                finished, waiting = wait(waiting, timeout=0.1, return_when=FIRST_COMPLETED)
                _drain(news, advance)
                for future in finished:
                    future.result()
            _drain(news, advance)
            pool.shutdown()
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process died, perhaps out of memory; run the same command to resume"
            ) from None
        finally:
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keep SIGINT waiting; processes started meanwhile never see one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Start processes that do not import the caller's script, which may have no `if __name__ ==
    "__main__"` and would train everything again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


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


def _drain(news: Any, advance: Advance) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            advance(news.get_nowait())


_news: Any = None


def _user_file(probe: Probe | None) -> str:
    """The user's file that a probe came from, so that a worker can load it; empty: none. Tasks and
    models of users bring their files themselves when they are unpickled."""
    module = sys.modules.get(probe.__module__) if probe is not None else None
    from_user = module is not None and module.__name__.startswith(USER_FILE)
    return module.__file__ or "" if module is not None and from_user else ""


def _start_worker(news: Any, parent: int, file: str) -> None:
    global _news
    _news = news
    if file:
        load_user_file(file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphans
        if os.getppid() != parent:
            os._exit(1)


def _work_in_pool(work: Work, chunk: list[Run]) -> None:
    work(chunk, _news.put)


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cost(run: Run) -> float:
    """Arithmetic of a whole run, for dealing work out."""
    return (
        run.shape.flops(run.task.tokens, batch=run.recipe.batch, training=True) * run.recipe.steps
    )


def chunks_of(runs: Sequence[Run], workers: int) -> list[list[Run]]:
    """Runs that stack go together, split until none is more than half of a worker's share or
    MOST_RUNS; the longest first."""
    most = sum(map(cost, runs)) / workers / (2 if workers > 1 else 1)
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(ensemble_key(run), []).append(run)
    chunks = []
    for group in groups.values():
        parts = min(len(group), max(1, math.ceil(sum(map(cost, group)) / most - 0.01)))
        size = min(math.ceil(len(group) / parts), MOST_RUNS)
        chunks += [group[i : i + size] for i in range(0, len(group), size)]
    return sorted(chunks, key=lambda chunk: -sum(map(cost, chunk)))


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


def check_machine(device: str, path: Path, missing: Sequence[Any], keep_weights: bool) -> None:
    """Refuse what the disk cannot hold, and a device that is not there."""
    check_space(path, [run for run in missing if run.work != "compute"], keep_weights)
    pick_device(device)


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
) -> list[Row]:
    """Make every run's row exist and return the rows in order; finished runs are never repeated."""
    where = pick_device(device)
    missing = store.missing(runs)
    if missing:
        check_space(store.path, missing, keep_weights)
        store.open()
    if workers is None:
        workers = cores() if where.type == "cpu" else 1
    work = Work(str(store.path), str(where), keep_weights, checkpoint_every, probe)
    bar = Progress(sum(r.recipe.steps for r in missing), f"{label}: {len(missing)} runs")
    while missing:
        chunks = chunks_of(missing, workers)
        if workers == 1 or len(chunks) == 1 or _only_here(missing, probe):
            here(work, chunks, bar.advance)
        elif free := [left for chunk in chunks if (left := _free(store, chunk))]:
            Pool(workers)(work, free, bar.advance)
        left = store.missing(missing)
        if len(left) == len(missing):
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
    with store.claim(chunk) as mine:
        return list(mine)


def pretrain_all(
    runs: Sequence[Pretraining],
    store: Store,
    *,
    device: str = "auto",
    checkpoint_every: float = 60.0,
    keep_weights: bool = False,
    label: str = "pretrain",
) -> list[Row]:
    """Make every decoder's row exist, one after the other in this process, compiled on a GPU, and
    return the rows in order."""
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
    missing = store.missing(values)
    bar = Progress(sum(map(size, missing)), label % len(missing))
    while missing:
        for value in missing:
            with store.claim([value]) as mine:
                for one in mine:
                    make(one)
            bar.advance(size(value) if store.row(value.id) is not None else 0)
        left = store.missing(missing)
        if len(left) == len(missing):
            time.sleep(0.5)  # another process is making them, or was
        missing = left
    store.tidy(values)
    if bar.done:
        bar.close()
    return store.rows([value.id for value in values])
