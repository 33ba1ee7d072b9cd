"""The interface of executors: plain values between the driver and an engine that can start a
command.

    driver    jobs = one attempt each at a group of runs   -> executor.submit -> handles
              handles                                      -> executor.poll   -> statuses
              handles of what is not wanted any more       -> executor.cancel
    engine    runs job.command() anywhere that sees the job's folder

All of a worker's state is in the store: what to train in the group's folder, what it has done in
run folders, that it lives in its beat (leases.py). So an executor keeps nothing that a new one
could not do without, and the driver believes a status only as far as the store agrees. Nothing in a
store is executed: code of one's own is named by the worker's command line. Standard library only.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from headwise.errors import bounded

# waiting   in the engine's queue
# running   the engine has started it and has not heard of its end
# ended     the engine knows that nothing of this job runs any more, however it ended
# unknown   the engine does not know the job, as after the driver was started again elsewhere
State = Literal["waiting", "running", "ended", "unknown"]


@dataclass(frozen=True)
class Job:
    """One attempt at a group, as an executor gets it."""

    group: str  # its id
    folder: Path  # STORE/groups/ID, absolute
    attempt: int  # 1 the first time; a name for logs, since a later driver counts on
    device: str  # of its runs, as pick_device takes it
    words: tuple[str, ...] = ()  # of the worker's command line beside these: the user's code
    # The runs and the probe as values, for an engine that carries values; never written
    runs: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    probe: Any = field(default=None, repr=False, compare=False)

    def command(self, python: str = sys.executable) -> list[str]:
        """What to run where the folder is seen; its exit code is 0 when every run has a row.

        >>> Job("0a", Path("/s/groups/0a"), 1, "cpu").command("python")
        ['python', '-m', 'headwise', 'worker', '/s/groups/0a', '--attempt', '1']
        """
        head = [python, "-m", "headwise", "worker", str(self.folder)]
        return [*head, "--attempt", str(self.attempt), *self.words]

    @property
    def log(self) -> Path:
        """Where the engine puts what the worker prints, both streams, appended."""
        return self.folder / f"log.{self.attempt}"


@dataclass(frozen=True)
class Handle:
    """A submitted job; plain text, so that it can be kept in the group's folder and be polled by
    another process."""

    engine: str  # the executor's name
    job: str  # what the engine calls it
    group: str
    attempt: int
    log: str = ""  # the path of its log, where the engine has none of its own


@dataclass(frozen=True)
class Status:
    """What an engine knows of a job."""

    state: State
    line: str = ""  # why it ended or waits, in the engine's words; the log's last line where none


class Executor(Protocol):
    """An engine that starts jobs. Errors that the user can mend are UsageErrors, at construction
    where possible: a host that does not answer, a partition that is not there, a package."""

    name: str  # "local", "ray", "slurm": what group folders keep
    address: str  # what `--on` takes to reach it again: "local", "ray://head:10001", "slurm"
    outlives: bool  # whether jobs stay when the driver ends
    by_value: bool  # whether it carries Job.runs to the worker; else own code needs a file

    def slots(self) -> int:
        """How many jobs run at once, as far as it is known now; at least 1."""
        ...

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        """Queue jobs, all at once where the engine has arrays; a handle each, in order."""
        ...

    def poll(self, handles: Sequence[Handle]) -> list[Status]:
        """A status each, in order, without waiting. Called a few times a second at most."""
        ...

    def cancel(self, handles: Sequence[Handle]) -> None:
        """Have jobs save and end, without waiting: SIGTERM where the engine can, which workers take
        as Ctrl-C, and SIGKILL after a grace. Jobs that have ended are left out silently."""
        ...

    def close(self) -> None:
        """Let go of the engine. Jobs of an engine that does not outlive its driver save and end,
        those of another one stay."""
        ...


def open_log(path: str | Path) -> BinaryIO:
    """A log to append to. A link or a pipe in somebody's store could lead anywhere."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    handle = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(handle, "ab", 0)


def last_lines(path: str | Path, count: int = 1) -> str:
    """The last lines of a log that say something, joined; empty where there is none."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        return ""
    with os.fdopen(handle, "rb") as f:
        f.seek(max(0, os.fstat(handle).st_size - 8192))
        text = f.read(8192).decode(errors="replace")
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return bounded(" | ".join(lines[-count:]))
