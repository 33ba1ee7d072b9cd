"""A limit on wall-clock time: how long the next round will take, and a stop when time is up."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from headwise.signals import Stop

# Kept for a last block of steps, its checkpoint and the report: seconds, a share of the time, and
# at most another share of it.
RESERVE, SHARE, MOST_SHARE = 3.0, 0.02, 0.25
SLOWEST = 10.0
ENOUGH = 0.2  # seconds of a processor, such as PyTorch's import, that tell how busy it is


class Deadline(Stop):
    """A Stop that also asks for a stop when time is up. Signals are those of the other Stop."""

    def __init__(self, stop: Stop, end: float, now: Callable[[], float] = time.monotonic) -> None:
        self.signals, self.end, self.now = stop, end, now
        super().__init__(stop.leave)

    # Signals reach the other one, so what it must know is kept there.

    @property
    def number(self) -> int:
        """Of the signal that came, or an alarm's."""
        return self.signals.number or (signal.SIGALRM if self.up else 0)

    @number.setter
    def number(self, value: int) -> None:
        pass

    @property
    def saving(self) -> bool:
        """Whether somebody asks between steps, and saves."""
        return self.signals.saving

    @saving.setter
    def saving(self, value: bool) -> None:
        self.signals.saving = value

    @property
    def up(self) -> bool:
        """Whether time is up."""
        return self.now() >= self.end

    def asked(self) -> bool:
        """Whether to save and stop now."""
        return self.signals.asked() or self.up


class Pace:
    """How many seconds a unit of work takes, from the rounds that were made: the slowest of the
    last two, since later rounds train fewer models at once."""

    def __init__(self, known: float | None = None) -> None:
        self.measured: list[float] = [] if known is None else [known]

    def note(self, work: float, seconds: float) -> None:
        """A round was made."""
        if work > 0:
            self.measured.append(seconds / work)

    def seconds(self, work: float) -> float | None:
        """What a round of so much work will take; None: nothing was measured yet."""
        return max(self.measured[-2:]) * work if self.measured else None


def end_of(seconds: float | None, now: float, slow: float = 1.0) -> float:
    """When training must have ended, so that the report is there in time on a machine that is so
    many times slower than an idle one."""
    if seconds is None:
        return float("inf")
    return now + seconds - min(RESERVE * slow + SHARE * seconds, MOST_SHARE * seconds)


def slowness(wall: float, cpu: float) -> float:
    """How many times slower this machine is for others' work on it, by what this process has just
    done: seconds on the clock per second of its own, from 1 to SLOWEST."""
    return min(max(wall / cpu, 1.0), SLOWEST) if cpu > ENOUGH else 1.0


def times(value: Any) -> str:
    """Seconds in words.

    >>> times(42), times(5400)
    ('42 seconds', '1.5 hours')
    """
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if value >= 1.5 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} seconds"
