"""How far long work is: a bar on a terminal, a plain line now and then otherwise. Standard library
only."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TextIO

LINE_EVERY = 15.0  # seconds between plain lines
BARS = (24, 12, 0)  # widths of the bar, from a wide terminal to a narrow one


def clock(seconds: float) -> str:
    """A duration for people: 42s, 3m05s, 2h10m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def columns_of(stream: TextIO) -> int:
    """How many columns a terminal has; COLUMNS in the environment says otherwise."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and len(given) < 6 and int(given):
        return max(20, int(given))
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # a stream that only says it is one
        columns = 0
    return columns or 80  # a terminal that does not know its size says 0


class Free(int):
    """Work that takes no time now: it was done before, or is not to be done any more."""


class Progress:
    """Counts work that is done out of a total and says how long the rest takes."""

    def __init__(
        self, total: int, label: str, stream: TextIO | None = None, begun: int = 0
    ) -> None:
        self.total = max(1, total)
        self.label = label
        # What was done before the clock started says nothing about the speed.
        self.done = begun
        self.free = begun
        self.stream = stream or sys.stderr
        self.terminal = self.stream.isatty()
        self.start = self.shown = time.monotonic()
        self.width = 0

    def advance(self, amount: int, note: str = "") -> None:
        """Add finished work, also such as was `Free`; shows it when it is time to."""
        self.done += amount
        self.free += amount if isinstance(amount, Free) else 0
        now = time.monotonic()
        if now - self.shown >= (0.1 if self.terminal else LINE_EVERY):
            self.shown = now
            self._show(note, now)

    def close(self, note: str = "") -> None:
        """Show the end state and leave the line."""
        self._show(note, time.monotonic(), last=True)

    def _show(self, note: str, now: float, last: bool = False) -> None:
        share = min(1.0, self.done / self.total)
        spent = now - self.start
        made = max(0, self.done - self.free)
        # The time left follows from the speed of what was made since the clock started.
        if last:
            left = f"{clock(spent)} {'for the rest' if self.free else 'in all'}"
        elif made:
            left = f"{clock(spent / made * max(0, self.total - self.done))} left"
        else:
            left = "starting"
        notes = [left, *note.split(", ")] if note else [left]
        text = f"{self.label} {100 * share:3.0f}%"
        if not self.terminal:
            print(", ".join((text, *notes)), file=self.stream, flush=True)
            return
        # The line is written over itself, padded to the width of the one before. It leaves the
        # terminal's last column free, since a full line would begin a new one.
        most = columns_of(self.stream) - 1
        line = _fitting(share, text, notes, most)
        padded = f"{line:<{min(self.width, most)}}"
        with _closed_terminal_ignored():
            print(f"\r{padded}", end="\n" if last else "", file=self.stream, flush=True)
        self.width = len(line)


def _fitting(share: float, text: str, notes: list[str], most: int) -> str:
    """A bar, a text and as many notes as `most` columns hold: first the bar is made shorter, then
    the last notes go, then the bar."""
    for kept in range(len(notes), -1, -1):
        line = ", ".join((text, *notes[:kept]))
        for width in BARS:
            bar = f"[{'#' * round(width * share):<{width}}] " if width else ""
            # Where there is one note left, how long it takes, it is worth more than the bar.
            if len(bar + line) <= most and (width or kept <= 1):
                return bar + line
    return text[:most]


@contextlib.contextmanager
def _closed_terminal_ignored() -> Iterator[None]:
    """Whoever closed the terminal has sent SIGHUP too, and the work is still to be saved."""
    try:
        yield
    except OSError as e:
        if e.errno != errno.EIO:
            raise


@dataclass
class Steps:
    """Counts an ensemble's model-steps, so that they can be taken back when it is trained again."""

    advance: Callable[[int], None]
    made: int = 0
    free: int = 0

    def add(self, steps: int) -> None:
        if isinstance(steps, Free):
            self.free += steps
        else:
            self.made += steps
        self.advance(steps)

    def take_back(self, finished: int) -> None:
        """All of them but those of runs that are finished."""
        self.advance(Free(-self.free))
        self.advance(finished - self.made)
