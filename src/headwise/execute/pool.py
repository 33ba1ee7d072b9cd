"""The executor that runs chunks of runs in processes of this machine.

Parent and worker speak through one pipe. There are no threads, queues or semaphores, so that
nothing is left to clean up wherever a process ends.

    worker  ("ready", None)       it has imported what it needs, or has finished a chunk
            ("advance", steps)
            ("stopped", saved)    it was asked to stop, has saved, and ends
            ("failed", error)
    parent  a chunk               after "ready"
            None                  save, and end

Signals are the parent's to handle. A worker ignores them, and ends when its parent has ended.
Standard library only, since a worker is to hear of its parent's end before it imports PyTorch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from types import FrameType, ModuleType
from typing import Any

from headwise.files import load_user_file
from headwise.signals import SIGNALS, Saved, Stop, Stopped, saving

DIED = "a worker process died, perhaps out of memory; run the same command to resume"


@dataclass
class Worker:
    """A process as its parent sees it."""

    process: Any
    pipe: Connection
    state: str = "starting"  # then "ready", "busy", "stopped"

    def receive(self) -> tuple[str, Any]:
        """Its next message."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(DIED) from None

    def send(self, chunk: list[Any] | None) -> None:
        """Give it a chunk, or have it save and end."""
        try:
            self.pipe.send(chunk)
        except ConnectionError:
            raise RuntimeError(DIED) from None


class Pool:
    """Runs chunks in `workers` processes, one thread each. `file` is a user's Python file that a
    worker loads before it unpickles its work; empty: none."""

    def __init__(self, workers: int, file: str = "") -> None:
        self.workers, self.file = workers, file

    def __call__(
        self,
        work: Callable[..., None],
        chunks: Sequence[Sequence[Any]],
        advance: Callable[[int], None],
        stop: Stop | None = None,
    ) -> None:
        waiting = list(chunks)
        with saving(stop) as heard, contextlib.ExitStack() as started:
            workers: list[Worker] = []
            started.callback(_kill, workers)
            with _environment(), _main_hidden():
                while len(workers) < min(self.workers, len(chunks)) and not heard.asked():
                    workers.append(_start(pickle.dumps(work), self.file))
            while (waiting or any(w.state == "busy" for w in workers)) and not heard.asked():
                for worker, (kind, value) in _messages(workers):
                    if kind == "advance":
                        advance(value)
                    elif kind == "failed":
                        raise value
                    else:
                        worker.state = "ready"
                    if worker.state == "ready" and waiting:
                        worker.state = "busy"
                        worker.send(list(waiting.pop(0)))
            if heard.asked():
                raise Stopped(heard.number, _stop_all(workers, advance))


def _stop_all(workers: list[Worker], advance: Callable[[int], None]) -> list[Saved]:
    """Have every busy worker save and end; returns what they have saved. The others hold
    nothing."""
    saved: list[Saved] = []
    for worker in workers:
        if worker.state == "busy":
            worker.send(None)
    while any(worker.state == "busy" for worker in workers):
        for worker, (kind, value) in _messages(workers):
            if kind == "advance":
                advance(value)
            elif kind == "failed":
                raise value
            else:  # stopped, or ready: it had just finished its chunk
                saved += value or []
                worker.state = "stopped"
    return saved


def _messages(workers: list[Worker]) -> Iterator[tuple[Worker, tuple[str, Any]]]:
    """What workers say within a tenth of a second, one message of each."""
    of_pipe = {worker.pipe: worker for worker in workers if worker.state != "stopped"}
    for pipe in wait(list(of_pipe), timeout=0.1):
        worker = of_pipe[pipe]  # type: ignore[index]
        yield worker, worker.receive()


def _start(work: bytes, file: str) -> Worker:
    """Start a worker, which hears no signal until it has said how to take them."""
    context = get_context("spawn")
    with _signals_blocked():
        resource_tracker.ensure_running()  # it unblocks signals when it starts a process
    with _signals_blocked():
        ours, theirs = context.Pipe()
        process = context.Process(target=_run_worker, args=(theirs, os.getpid(), work, file))
        process.start()
        theirs.close()
    return Worker(process, ours)


def _kill(workers: list[Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.pipe.close()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What a worker reads when it starts. PyTorch has one thread there. And nothing is imported
    from the folder that the command was given in, which may be somebody's store."""
    changed = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


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


# ---- in a worker


class _Asked(Stop):
    """A Stop that the parent asks for through the pipe."""

    def __init__(self, pipe: Connection, parent: int) -> None:
        super().__init__(os._exit)
        self.pipe, self.parent = pipe, parent

    def asked(self) -> bool:
        """While a chunk is worked on, the parent says nothing but this."""
        if not self.number and self.pipe.poll():
            self.pipe.recv()
            self.number = signal.SIGTERM
        return self.number != 0

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """SIGTERM comes when the parent has ended, and then the worker ends; or from elsewhere."""
        if os.getppid() != self.parent:
            self.saving = False
            super().handle(number, frame)


def _run_worker(pipe: Connection, parent: int, pickled: bytes, file: str) -> None:
    stop = _Asked(pipe, parent)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop.handle)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: no orphans
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if os.getppid() != parent:
        os._exit(1)
    try:
        if file:
            load_user_file(file)
        work = pickle.loads(pickled)
        _work(work, pipe, stop)
    except (EOFError, ConnectionError):  # the parent has ended
        os._exit(1)
    except BaseException as error:
        pipe.send(("failed", _portable(error)))


def _work(work: Callable[..., None], pipe: Connection, stop: Stop) -> None:
    """Chunk after chunk, until the parent asks to stop."""

    def advance(steps: int) -> None:
        pipe.send(("advance", steps))

    while True:
        pipe.send(("ready", None))
        chunk = pipe.recv()
        if chunk is None:
            return
        try:
            work(chunk, advance, stop)
        except Stopped as stopped:
            pipe.send(("stopped", stopped.saved))
            return


def _portable(error: BaseException) -> BaseException:
    """An error as another process can unpickle it, with a note of where it was."""
    where = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(where)
    return error
