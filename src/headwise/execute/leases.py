"""Who works on a run, on machines that share nothing but a file system: no locks, links and renames
alone, as NFS wants it.

    STORE/groups/ID/TOKEN.beat    one worker: host, process, and a count that it raises every few
                                  seconds; written in place, so that a full disk stops it not and an
                                  NFS client sees the new content when it opens the file
    STORE/runs/ID/lease.N         the worker with the highest N holds the run; names its beat

A lease is made by a link, which one of many wins. It is removed by its holder. Where its holder's
beat has not changed for a while, by the clock of whoever looks, somebody else may make lease N + 1.
On the holder's own host a process that has ended is seen at once. A process that was taken for lost
and was not does no harm: two writers of one run make equal rows, and one of them is kept
(`Store.add_once`). Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from headwise.digests import parse, read_bytes
from headwise.files import DamagedError, own_mark
from headwise.rows import Specified
from headwise.store import Store

S = TypeVar("S", bound=Specified)
SIZE = 2048  # bytes of a beat, always
MOST_CAUSE = 400  # characters of it
BEAT = 5.0  # seconds between two
LOST_AFTER = 60.0  # seconds without one


def host() -> str:
    """This machine, as it is known until it is started again; containers of one are several."""
    boot = space = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{socket.gethostname()} {boot} {space}".strip()


def started(pid: int) -> str:
    """When a process was started, in the system's own clock; empty: there is none, or it is a
    zombie."""
    if not Path("/proc/self/stat").exists():  # not Linux
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except PermissionError:
            pass
        return "?"
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]


# ---- beats


class Beat:
    """The sign of life of one worker: a file that a thread writes again and again.

    What it says beside that it lives: how many steps are made, and, at the end, how it ended.
    `asked` is called between two beats, such as to see whether somebody wants the worker to stop.
    """

    def __init__(
        self,
        folder: Path,
        about: dict[str, Any],
        every: float = BEAT,
        asked: Callable[[], None] | None = None,
    ) -> None:
        self.token = secrets.token_hex(6)
        self.path = folder / f"{self.token}.beat"
        self.every, self.asked = every, asked
        pid = os.getpid()
        whose = {"token": self.token, "host": host(), "pid": pid, "start": started(pid)}
        self.values: dict[str, Any] = {**whose, **about, "count": 0, "steps": 0, "rows": 0}
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="headwise beat")

    def __enter__(self) -> Beat:
        # All its bytes are there from the beginning: later ones need no space on a full disk.
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.write(handle, self._text())
            os.fsync(handle)
        finally:
            os.close(handle)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def add(self, steps: int = 0, rows: int = 0) -> None:
        """Note work that is done; said with the next beat."""
        with self._writing:
            self.values["steps"] += steps
            self.values["rows"] += rows

    def end(self, state: str, cause: str = "") -> None:
        """Say how the worker ended: done, stopped, refused or failed."""
        with self._writing:
            self.values["state"], self.values["cause"] = state, cause[:MOST_CAUSE]
        self.write()

    def write(self) -> None:
        """One beat."""
        with self._writing:
            self.values["count"] += 1
            data = self._text()
        with contextlib.suppress(OSError):  # a file server that is away for a moment
            handle = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                os.pwrite(handle, data, 0)
            finally:
                os.close(handle)

    def _text(self) -> bytes:
        text = json.dumps(self.values, ensure_ascii=False).encode(errors="replace")
        return text[: SIZE - 1].ljust(SIZE - 1) + b"\n"

    def _run(self) -> None:
        while not self._ended.wait(self.every):
            self.write()
            if self.asked is not None:
                self.asked()


def read_beat(path: Path) -> dict[str, Any]:
    """What a beat says; empty where it is not there or is just being written."""
    try:
        value = parse(read_bytes(path, SIZE).rstrip(b" \n"))
    except (FileNotFoundError, DamagedError):
        return {}
    if not isinstance(value, dict):
        return {}
    counts = {name: value.get(name) for name in ("attempt", "count", "steps", "rows", "pid")}
    known = {name: n for name, n in counts.items() if isinstance(n, int) and 0 <= n < 2**63}
    return {**value, **dict.fromkeys(counts, 0), **known}


def ended_here(beat: dict[str, Any]) -> bool:
    """Whether a beat's process is known to have ended, because it was one of this machine."""
    if beat.get("host") != host() or not isinstance(beat.get("pid"), int):
        return False
    return started(beat["pid"]) != beat.get("start")


@dataclass
class Watch:
    """Since when files have not changed, by this process's clock; other hosts' clocks count for
    nothing."""

    lost_after: float = LOST_AFTER
    seen: dict[str, tuple[str, float]] = field(default_factory=dict)

    def quiet(self, path: Path) -> float:
        """For how many seconds a beat has been seen without change; infinite once its process is
        known to have ended."""
        beat, now = read_beat(path), time.monotonic()
        if ended_here(beat) or beat.get("state"):
            return float("inf")
        text = json.dumps(beat)
        before, since = self.seen.get(str(path), ("", now))
        if text != before or not before:
            since = now
            self.seen[str(path)] = (text, now)
        return now - since

    def lost(self, path: Path) -> bool:
        """Whether the worker of a beat is to be taken for lost."""
        return self.quiet(path) >= self.lost_after

    def forget(self, folder: Path) -> None:
        """Keep nothing of a folder's beats."""
        for path in [path for path in self.seen if path.startswith(f"{folder}{os.sep}")]:
            del self.seen[path]


# ---- leases


def lease_of(folder: Path) -> tuple[int, Path | None]:
    """The highest lease in a run's folder, and the path of its holder's beat; (0, None): none."""
    numbers = _numbers(folder)
    if not numbers:
        return 0, None
    beat = folder / "none"  # of a lease that cannot be read: nobody's
    with contextlib.suppress(FileNotFoundError, DamagedError, AttributeError):
        about = parse(read_bytes(folder / f"lease.{max(numbers)}", SIZE))
        group, token = str(about.get("group")), str(about.get("token"))
        if group.isalnum() and token.isalnum():  # a store is data, and leads nowhere else
            beat = folder.parent.parent / "groups" / group / f"{token}.beat"
    return max(numbers), beat


def _numbers(folder: Path) -> list[int]:
    """The leases that a run's folder has, in order."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            stem, _, number = name.partition(".")
            if stem == "lease" and number.isdecimal() and len(number) < 10:
                found.append(int(number))
    return sorted(found)


@contextlib.contextmanager
def claimed(store: Store, runs: Sequence[S], beat: Beat | None = None) -> Iterator[list[S]]:
    """Hold the runs that nobody else holds, here or on another machine, and that are not finished;
    frees them at the end. Without a beat they are held on this machine alone."""
    with store.claim(runs) as here, contextlib.ExitStack() as held:
        mine = []
        for run in here:
            folder = store.runs_path / run.id
            number, _ = lease_of(folder)
            if number:
                continue
            if beat is not None:
                if not make_lease(folder, 1, beat.path):
                    continue
                held.callback(_release, folder, 1)
                # Somebody may have finished it between the two.
                if store.row(run.id) is not None:
                    continue
            mine.append(run)
        yield mine


def free_lost(store: Store, ids: Sequence[str], watch: Watch, ended: Collection[Path] = ()) -> int:
    """Remove the leases of workers that are lost, so that anybody may claim their runs; returns how
    many. A process that is started anew has to look for as long as `watch.lost_after`. Of the beats
    in `ended` it is known."""
    freed = 0
    for run_id in ids:
        folder = store.runs_path / run_id
        number, path = lease_of(folder)
        if path is None or not (path in ended or watch.lost(path)):
            continue
        if make_lease(folder, number + 1, folder / "none"):
            _release(folder, number + 1)
            freed += 1
    return freed


def make_lease(folder: Path, number: int, beat: Path) -> bool:
    """Make a lease in a run's folder, for the worker of a beat, where there is none of that number;
    of many who try, one does."""
    group, token = beat.parent.name, beat.stem
    temporary = folder / f".lease.{own_mark()}"
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.write(handle, json.dumps({"group": group, "token": token}).encode())
        finally:
            os.close(handle)
        try:
            os.link(temporary, folder / f"lease.{number}")
        except FileExistsError:
            return False
        except OSError:
            # Over NFS an answer may be lost although the link was made.
            with contextlib.suppress(FileNotFoundError):
                return temporary.stat().st_nlink == 2
            return False
        return True
    finally:
        temporary.unlink(missing_ok=True)


def _release(folder: Path, number: int) -> None:
    """Remove a lease after those before it, so that there is always one while it is held."""
    for before in _numbers(folder):  # of somebody's store the first may be any
        if before <= number:
            with contextlib.suppress(OSError):
                (folder / f"lease.{before}").unlink(missing_ok=True)


def cause_of(beat: dict[str, Any]) -> str:
    """How a worker ended, in its own words, and where it ran."""
    where = str(beat.get("host", "")).partition(" ")[0]
    return f"{beat.get('cause', '')} ({where})" if where else str(beat.get("cause", ""))
