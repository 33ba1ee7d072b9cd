"""A terminal of any width, and what it shows of what a command writes: a real pty, and as much of
an emulator as lines, carriage returns and full lines need."""

import contextlib
import fcntl
import io
import os
import pty
import struct
import termios
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Terminal:
    """A terminal that something writes into; read `shown` once it is closed."""

    columns: int
    stream: io.TextIOWrapper
    written: bytearray = field(default_factory=bytearray)

    @property
    def shown(self) -> "Screen":
        return screen(self.written.decode(), self.columns)


@dataclass
class Screen:
    """The lines of a terminal, and how often one was full and its text began another."""

    lines: list[str]
    wraps: int


def screen(text: str, columns: int) -> Screen:
    """What a terminal of so many columns shows.

    A character in the last column leaves the cursor there; the next one begins a line, as in every
    terminal since the VT100.
    """
    lines: list[list[str]] = [[]]
    at, wraps = 0, 0
    for c in text:
        if c == "\n":
            lines.append([])
        elif c == "\r":
            at = 0
        else:
            assert c.isprintable(), repr(c)
            if at == columns:
                lines.append([])
                at, wraps = 0, wraps + 1
            line = lines[-1]
            line += [" "] * (at + 1 - len(line))
            line[at] = c
            at += 1
    return Screen(["".join(line).rstrip() for line in lines], wraps)


@contextlib.contextmanager
def terminal(columns: int) -> Iterator[Terminal]:
    """A pty of so many columns; what is written into `stream` is read as it comes."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    made = Terminal(columns, os.fdopen(theirs, "w", encoding="utf-8"))

    def read() -> None:
        with contextlib.suppress(OSError):  # the terminal ends with its last writer
            while part := os.read(ours, 65536):
                made.written += part

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield made
    finally:
        made.stream.close()
        reader.join()
        os.close(ours)
