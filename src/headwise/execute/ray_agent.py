"""A process of a Ray cluster that trains one group after another, and what it says to the driver.

    work      train a group; the answer is its outcome
    changes   files of a store that the driver does not see, as bytes
    wait      the answer of `work` again, for a driver that was started anew

An agent that sees the driver's store works in it. Another one gets what it needs as bytes, works in
a folder of its own, and hands out the rows, checkpoints, beats and logs that it writes there. Its
module is installed on the node; values of a user's classes come by value.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from headwise.digests import digest_of, read_signed
from headwise.errors import one_line
from headwise.execute.base import open_log
from headwise.execute.groups import GROUP_FILE
from headwise.execute.worker import Outcome, work_on
from headwise.signals import Stop

IDLE = 60.0  # seconds without work or a word from a driver, after which an agent ends
Mark = tuple[int, int]  # of a file: when it was written, and its size
UNCOLLECTED = 3600.0  # the same for one whose files were not collected yet


@dataclass(frozen=True)
class Order:
    """A group as it travels to an agent."""

    job: str
    folder: str  # STORE/groups/ID as the driver has it
    digest: str  # of its group.json: whether the agent sees the same store
    attempt: int
    values: bytes = b""  # runs and probe; empty: made from the specifications
    modules: tuple[tuple[str, str, str], ...] = ()  # name, file and text of users' files
    files: dict[str, bytes] | None = None  # of the store, by path, where the agent does not see it


@dataclass
class _Work:
    """The group that an agent has, or had last."""

    order: Order
    store: Path
    carried: bool
    stop: Stop = field(default_factory=lambda: Stop(lambda number: None))
    ended: threading.Event = field(default_factory=threading.Event)
    answer: tuple[str, str] = ("", "")
    given: dict[str, Mark] = field(default_factory=dict)  # files as they came


class Agent:
    """What runs in the cluster; its methods are called by the driver, several at once."""

    def __init__(self, idle: float = IDLE) -> None:
        self._idle, self._heard = idle, time.monotonic()
        self._work: _Work | None = None
        self._taking = threading.Lock()
        threading.Thread(target=self._leave_when_idle, daemon=True).start()

    def ready(self) -> str:
        """The job that it has or had last; empty: none."""
        self._heard = time.monotonic()
        return self._work.order.job if self._work else ""

    def work(self, order: Order) -> tuple[str, str]:
        """Train a group; returns how it ended and why. "busy": it has another one. "unseen": the
        store is not seen from here, so the order needs files."""
        seen = digest_at(Path(order.folder)) == order.digest
        if not seen and order.files is None:
            return "unseen", ""
        with self._taking:
            if self._work is not None and not self._work.ended.is_set():
                return "busy", self._work.order.job
            if self._work is not None:
                self._forget(self._work)
            folder = Path(order.folder)
            store = folder.parent.parent if seen else Path(tempfile.mkdtemp(prefix="headwise-"))
            work = self._work = _Work(order, store, carried=not seen)
        try:
            outcome = self._outcome(work)
            work.answer = outcome.state, outcome.cause
        except BaseException as e:  # the agent lives, whatever the user's code raises
            work.answer = "failed", one_line(e)
        finally:
            self._heard = time.monotonic()
            work.ended.set()
        return work.answer

    def wait(self, job: str) -> tuple[str, str]:
        """How a job ended, once it has."""
        work = self._work
        if work is None or work.order.job != job:
            return "unknown", ""
        work.ended.wait()
        return work.answer

    def cancel(self, job: str) -> None:
        """Have a job save and end."""
        work = self._work
        if work is not None and work.order.job == job:
            work.stop.number = work.stop.number or 15

    def changes(self, job: str, known: dict[str, Mark]) -> dict[str, tuple[Mark, bytes]]:
        """Files of a carried job that the driver does not know as they are now. An answer that is
        lost costs nothing, since the next question has the same `known`."""
        self._heard = time.monotonic()
        work = self._work
        if work is None or work.order.job != job or not work.carried:
            return {}
        found = {}
        for path in handed_out(work.store):
            name = str(path.relative_to(work.store))
            with contextlib.suppress(OSError):
                about = path.stat()
                mark = about.st_mtime_ns, about.st_size
                if mark not in (known.get(name), work.given.get(name)):
                    found[name] = mark, path.read_bytes()
        return found

    def forget(self, job: str) -> None:
        """The driver has every file of a job that has ended."""
        work = self._work
        if work is not None and work.order.job == job and work.ended.is_set():
            self._forget(work)

    # ---- within the agent

    def _outcome(self, work: _Work) -> Outcome:
        order = work.order
        if work.carried:
            for name, data in (order.files or {}).items():
                path = work.store / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                about = path.stat()
                work.given[name] = about.st_mtime_ns, about.st_size
        folder = work.store / "groups" / Path(order.folder).name
        try:
            runs, probe = values_of(order) if order.values else (None, None)
        except Exception as e:
            return Outcome("refused", f"the runs cannot be made there: {one_line(e)}")
        with _logged(folder / f"log.{order.attempt}"):
            return work_on(folder, order.attempt, runs=runs, probe=probe, stop=work.stop)

    def _forget(self, work: _Work) -> None:
        if work.carried:
            shutil.rmtree(work.store, ignore_errors=True)
        self._work = None

    def _leave_when_idle(self) -> None:
        while True:
            time.sleep(1.0)
            work = self._work
            busy = work is not None and not work.ended.is_set()
            limit = max(self._idle, UNCOLLECTED) if work and work.carried else self._idle
            if not busy and time.monotonic() - self._heard > limit:
                if work is not None:
                    self._forget(work)
                os._exit(0)


def handed_out(store: Path) -> Iterator[Path]:
    """The files of an agent's own store that the driver wants: finished ones before the rows that
    say so."""
    for name in (
        "weights.safetensors",
        "checkpoint.safetensors",
        "source.json",
        "rows.jsonl",
    ):
        yield from sorted(store.glob(f"runs/*/{name}"))
    yield from sorted(store.glob("groups/*/*.beat"))
    yield from sorted(store.glob("groups/*/log.*"))


def digest_at(folder: Path) -> str:
    """A digest of a group's file; empty where it is not seen."""
    try:
        return digest_of(read_signed(folder / GROUP_FILE, 1 << 30))
    except (OSError, ValueError):
        return ""


def values_of(order: Order) -> tuple[Any, Any]:
    """The runs and the probe of an order. Users' files are made modules from their text, since the
    file may not be here."""
    for name, file, text in order.modules:
        if name not in sys.modules:
            module = ModuleType(name)
            module.__file__ = file
            sys.modules[name] = module
            try:
                exec(compile(text, file, "exec"), module.__dict__)
            except BaseException:
                del sys.modules[name]
                raise
    return pickle.loads(order.values)


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """What is printed goes into a group's log, where one can be written."""
    try:
        log: TextIO = io.TextIOWrapper(open_log(path), write_through=True)
    except OSError:
        log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            yield
    finally:
        with contextlib.suppress(OSError):
            log.close()
