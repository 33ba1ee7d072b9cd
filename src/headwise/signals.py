"""Signals that ask a command or a training to stop: Ctrl-C (SIGINT), SIGTERM and SIGHUP. Standard
library only.

The handler of a command raises no exception into code that it interrupts, since some of that code
aborts (PyTorch while it is imported) and some swallows it (destructors). It does one of two things:

nothing to save   it removes files that are half-written, and ends the process
`saving`          it takes a note. Training asks `stop.asked()` between steps, saves, and raises
                  `Stopped`. A second signal ends the process

A signal that is ignored (nohup) or that has another handler already is left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds within which several signals count as one. `timeout` and torchrun send two at once.
AT_ONCE = 0.5
RESUME = "run the same command to resume"

# commands that begin anew each time
FROM_THE_START = (
    *("chat", "check", "convert", "cost", "explain", "generate", "infer", "inspect", "list"),
    *("policies", "report"),
)

Saved = tuple[str, int]  # a run's id, and the step that its checkpoint is at


class Stopped(KeyboardInterrupt):
    """A training that was asked to stop has stopped; says what it has saved."""

    def __init__(self, number: int, saved: Sequence[Saved] = ()) -> None:
        super().__init__(number, tuple(saved))
        self.number = number  # of the signal
        self.saved = list(saved)

    def __str__(self) -> str:
        return f"{message(self.number, self.saved)}; the same call resumes"


def message(number: int, saved: Sequence[Saved] = ()) -> str:
    """What came, and what was saved, in half a line.

    >>> message(2, [("0a1b", 40)])
    'interrupted; saved run 0a1b at step 40'
    >>> message(15, [("0a", 40), ("0b", 40), ("0c", 1200)])
    'interrupted by SIGTERM; saved 2 runs at step 40, 1 run at step 1,200'
    """
    text = "interrupted" + ("" if number == signal.SIGINT else f" by {signal.Signals(number).name}")
    if not saved:
        return text
    if len(saved) == 1:
        return f"{text}; saved run {saved[0][0]} at step {saved[0][1]:,}"
    steps = sorted(step for _, step in saved)
    if len(set(steps)) > 3:
        return f"{text}; saved {len(saved)} runs at steps {steps[0]:,} to {steps[-1]:,}"
    groups = [(steps.count(step), step) for step in sorted(set(steps))]
    return f"{text}; saved " + ", ".join(
        f"{count} run{'s' if count > 1 else ''} at step {step:,}" for count, step in groups
    )


def resume(words: Sequence[str]) -> str:
    """The end of the message of a command that was interrupted, if the command resumes.

    >>> resume(["check", "my_task.py"]), resume(["run", "fig1"])
    ('', '; run the same command to resume')
    """
    return "" if words and words[0] in FROM_THE_START else f"; {RESUME}"


class Stop:
    """Whether a signal has asked for a stop. `leave` ends the process, or hands the signal on."""

    def __init__(self, leave: Callable[[int], None], notice: str = "") -> None:
        self.leave = leave
        self.notice = notice  # shown on a terminal while work is being saved
        self.number = 0  # of the signal that came while somebody was saving; 0: none
        self.saving = False  # whether somebody asks between steps, and saves
        self.half_written: set[Path] = set()
        self.first = 0.0  # when it came

    def asked(self) -> bool:
        """Whether to save and stop now."""
        return self.number != 0

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """What the system calls when a signal comes."""
        if self.saving and not self.asked():
            self.number, self.first = number, time.monotonic()
            if self.notice and os.isatty(2):
                with contextlib.suppress(OSError):
                    os.write(2, f"\n{self.notice}\n".encode())
        elif not self.number or time.monotonic() - self.first >= AT_ONCE:
            for path in list(self.half_written):
                with contextlib.suppress(OSError):
                    path.unlink()
            self.leave(number)


# ---- handlers


def install(stop: Stop) -> dict[int, Any]:
    """Have a Stop handle the signals that nobody handles or ignores yet; returns the handlers of
    before. Only the main thread may install handlers; in others nothing happens."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = handler
                signal.signal(number, stop.handle)
    return before


def restore(before: dict[int, Any]) -> None:
    """Put back the handlers of before."""
    for number, handler in before.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def installed(stop: Stop) -> Iterator[Stop]:
    """A Stop that handles the signals within a block."""
    before = install(stop)
    try:
        yield stop
    finally:
        restore(before)


def hand_on(number: int) -> None:
    """Do at once what Python does: KeyboardInterrupt, or the end of the process."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


# ---- for those who save, and those who write files


@contextlib.contextmanager
def saving(stop: Stop | None) -> Iterator[Stop]:
    """A block that asks `stop.asked()` between steps, saves, and raises Stopped.

    Without a Stop of the caller's (in a script, a notebook) signals are handled for this block
    alone. After it Ctrl-C is a KeyboardInterrupt as always, and SIGTERM and SIGHUP end the process.
    """
    if stop is not None:
        with _saving(stop):
            yield stop
        return
    own = Stop(hand_on)
    try:
        with installed(own), _saving(own):
            yield own
    except Stopped as stopped:
        if stopped.number != signal.SIGINT:
            print(f"headwise: {stopped}", file=sys.stderr, flush=True)
            hand_on(stopped.number)
        raise


@contextlib.contextmanager
def _saving(stop: Stop) -> Iterator[None]:
    before, stop.saving = stop.saving, True
    try:
        yield
    finally:
        stop.saving = before
    # A signal that came after the last question is not forgotten.
    if stop.asked():
        raise Stopped(stop.number)


@contextlib.contextmanager
def half_written(path: Path) -> Iterator[None]:
    """A file that is removed if a signal ends the process within the block."""
    handlers = [getattr(signal.getsignal(number), "__self__", None) for number in SIGNALS]
    stops = [handler for handler in handlers if isinstance(handler, Stop)]
    for stop in stops:
        stop.half_written.add(path)
    try:
        yield
    finally:
        for stop in stops:
            stop.half_written.discard(path)


# ---- a command


def stop_of_command() -> Stop:
    """A Stop that ends a command's process with one line and the exit code of shells."""
    return Stop(_leave_command, "headwise: saving at the next step; again: stop at once")


def _leave_command(number: int) -> None:
    # Of several processes under torchrun the first one speaks. A pod's own RANK says nothing.
    launched = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if not launched or os.environ["RANK"] == "0":
        with contextlib.suppress(OSError):
            line = "\n" if os.isatty(2) else ""  # the progress bar's line is left first
            os.write(2, f"{line}headwise: {message(number)}{resume(sys.argv[1:])}\n".encode())
    os._exit(128 + number)


def silence() -> None:
    """The end of a process has nothing to say: from here on signals end it without a word."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
