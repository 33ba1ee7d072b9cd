"""Stops that are asked for at a known moment."""

import contextlib
import signal
from collections.abc import Iterator

from headwise.signals import Stop


class StopAtQuestion(Stop):
    """A stop that is asked for from the n-th question on."""

    def __init__(self, number: int) -> None:
        super().__init__(lambda _: None)
        self.left = number - 1

    def asked(self) -> bool:
        self.left -= 1
        if self.left < 0:
            self.number = signal.SIGINT
        return self.number != 0


@contextlib.contextmanager
def handlers(handler: object) -> Iterator[None]:
    """One handler for all signals that stop; those of before at the end."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
