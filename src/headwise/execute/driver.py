"""The loop that has groups trained, whatever the engine: submit, poll, submit again, report.

    plan      groups of the store that a former driver left, then new ones of the runs left over
    submit    one attempt each; the engine, its handle and the attempt are noted in the folder
    poll      a group is done when each of its runs has a row, whoever wrote it
              an attempt is lost when its engine says that it ended, or its beat is quiet for long
    again     a lost group is submitted anew and resumes from its checkpoints, at most `tries` times
    report    groups that failed stop only themselves: one table at the end, with causes

The driver keeps ids and nothing of any row. It may be killed and started again anywhere that the
store is seen. Standard library only.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headwise.errors import UsageError
from headwise.execute.base import Executor, Handle, Job, Status, last_lines
from headwise.execute.groups import (
    CANCEL_FILE,
    Group,
    attempts_of,
    beats_of,
    cancelled,
    groups_in,
    handle_of,
    note_attempt,
    read_group,
)
from headwise.execute.leases import Watch, cause_of, free_lost
from headwise.progress import Progress
from headwise.rows import Specified
from headwise.signals import Stop, Stopped, saving
from headwise.store import Store

TRIES = 3  # attempts at a group in one call
POLL = 0.25  # seconds between two polls, at the beginning
SLOWEST = 0.5  # and once groups take long
INFINITE = float("inf")
LOOK = 2.0  # seconds between two looks for a wish to cancel
MOST_STOPS = 100  # times that an engine may ask a group to save and end, such as at a time limit
SAVE_WITHIN = 45.0  # seconds that workers have to save when the driver is asked to stop
BEGIN_WITHIN = 600.0  # seconds from an engine's "running" to the first beat


class GroupsFailedError(RuntimeError):
    """Some groups could not be made; all other rows are there. The table has a line per group."""

    def __init__(self, table: Sequence[Sequence[str]], runs: int) -> None:
        self.table = [list(line) for line in table]
        first = self.table[1]
        super().__init__(
            f"{runs} runs are missing, of {len(self.table) - 1} groups that failed; group "
            f"{first[0]}: {first[-1]}"
        )


@dataclass
class _Course:
    """A group as its driver sees it."""

    group: Group
    left: list[str]  # ids of runs without a row
    handle: Handle | None = None
    attempt: int = 0
    tries: int = 0
    state: str = "waiting"  # then "running", "done", "failed"
    cause: str = ""
    steps: int = 0  # of the latest attempt
    running_since: float = 0.0
    rows: int = 0  # that its workers have said
    started: float = 0.0  # when the engine started it, again and again after a lost node
    gone_since: float = 0.0  # when its workers were first seen to have ended
    looked: float = 0.0  # when somebody's wish to cancel it was last looked for
    cancelled: bool = False
    stops: int = 0  # times that its engine asked it to save and end

    @property
    def done_steps(self) -> int:
        """Steps as the progress line counts them: whole runs, and what is under way."""
        share = self.group.steps // max(1, len(self.group.ids))
        made = share * (len(self.group.ids) - len(self.left))
        return self.group.steps if self.state == "done" else max(made, self.steps)


@dataclass
class Driver:
    """Has groups trained by an executor, and keeps count."""

    store: Store
    executor: Executor
    words: tuple[str, ...] = ()  # of each worker's command line: the user's code
    probe: Any = None  # the same as a value, for an engine that carries values
    tries: int = TRIES
    lost_after: float = 60.0
    label: str = "sweep"
    watch: Watch = field(init=False)
    courses: list[_Course] = field(init=False, default_factory=list)
    runs: dict[str, Specified] = field(init=False, default_factory=dict)  # that are missing
    device_seconds: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.watch = Watch(self.lost_after)

    # ---- plan

    def plan(
        self, runs: Sequence[Specified], cut: Callable[[list[Any]], list[Group]]
    ) -> list[Group]:
        """Take up what a former driver left, and cut the runs that are in no such group."""
        missing = {run.id: run for run in self.store.missing(runs)}
        self.runs = dict(missing)
        for group in groups_in(self.store.path):
            attempts = attempts_of(group.folder)
            left = [run_id for run_id in group.ids if run_id in missing]
            if not left:
                self._tidy(group)
            if not left or not attempts or not self._alive(group, attempts[-1]):
                continue
            handle = replace(handle_of(attempts[-1]), log=str(log_of(group, attempts[-1])))
            course = _Course(group, left, handle, attempts[-1]["attempt"], 1)
            self.courses.append(course)
            for run_id in left:
                del missing[run_id]
        if self.courses:
            print(
                f"headwise: {len(self.courses)} groups of a former driver are under way",
                file=sys.stderr,
                flush=True,
            )
        new = cut(list(missing.values())) if missing else []
        self.courses += [_Course(group, list(group.ids)) for group in new]
        return new

    def _tidy(self, group: Group) -> None:
        """Remove what workers of a complete group left that nobody followed to their end."""
        beats = [path for path in group.beats() if self.watch.lost(path)]
        if beats and not group.missing(self.store):
            free_lost(self.store, group.ids, self.watch, set(beats))
            for path in beats:
                path.unlink(missing_ok=True)

    def _alive(self, group: Group, attempt: dict[str, Any]) -> bool:
        """Whether an attempt of a former driver may still be under way."""
        beats = beats_of(group, attempt["attempt"])
        if any(self.watch.quiet(path) < self.lost_after for path in beats):
            return True
        if attempt.get("engine") != self.executor.name:
            return False
        handle = replace(handle_of(attempt), log=str(log_of(group, attempt)))
        (status,) = self.executor.poll([handle])
        return status.state in ("waiting", "running")

    # ---- the loop

    def run(self, stop: Stop | None = None) -> None:
        """Have every group made, or fail; raises GroupsFailedError at the end, Stopped when asked
        to stop."""
        bar = Progress(sum(c.group.steps for c in self.courses), self.label)
        shown, pause, before = 0, POLL, time.monotonic()
        with saving(stop) as heard:
            while any(c.state in ("waiting", "running") for c in self.courses):
                if heard.asked():
                    self._stopped(heard)
                self._submit()
                self._poll()
                now = time.monotonic()
                running = sum(c.state == "running" for c in self.courses)
                self.device_seconds += running * (now - before)
                before = now
                total = sum(c.done_steps for c in self.courses)
                bar.advance(total - shown, self.line())
                pause = POLL if total > shown else min(SLOWEST, pause * 1.2)
                shown = total
                if running or any(c.state == "waiting" for c in self.courses):
                    _wait(pause, heard)
        bar.close(self.line())
        # Those of former drivers too.
        for folder in {path.parent for path in self.store.path.glob("groups/*/*.beat")}:
            with contextlib.suppress(UsageError):
                self._tidy(read_group(folder))
        if table := self.failures():
            raise GroupsFailedError(table, sum(len(c.left) for c in self.courses))

    def line(self) -> str:
        """The whole sweep in one line.

        >>> from headwise.execute.local import Local
        >>> import tempfile
        >>> Driver(Store(tempfile.mkdtemp()), Local([""])).line()
        'groups 0 waiting, 0 running, 0 done, 0 failed, 0.00 device-hours'
        """
        count = {
            state: sum(c.state == state for c in self.courses)
            for state in ("waiting", "running", "done", "failed")
        }
        parts = ", ".join(f"{number} {state}" for state, number in count.items())
        return f"groups {parts}, {self.device_seconds / 3600:.2f} device-hours"

    def failures(self) -> list[list[str]]:
        """A table of the groups that failed, headings first; empty: none."""
        failed = [c for c in self.courses if c.state == "failed"]
        lines = [
            [c.group.id, f"{len(c.left)} of {len(c.group.ids)}", str(c.tries), c.cause]
            for c in failed
        ]
        return [["group", "runs missing", "attempts", "cause"], *lines] if lines else []

    def _submit(self) -> None:
        """Submit what waits and has no job yet."""
        new = [c for c in self.courses if c.state == "waiting" and c.handle is None]
        if not new:
            return
        jobs = []
        for course in new:
            group = course.group
            known = [a["attempt"] for a in attempts_of(group.folder)]
            course.attempt = max([0, *known]) + 1
            course.tries += 1
            course.steps = course.rows = 0
            course.running_since = course.gone_since = 0.0
            group.write()
            (group.folder / CANCEL_FILE).unlink(missing_ok=True)
            device = group.options.device
            values = tuple(self.runs[run_id] for run_id in course.left if run_id in self.runs)
            jobs.append(
                Job(
                    group.id,
                    group.folder,
                    course.attempt,
                    device,
                    self.words,
                    values if self.executor.by_value else (),
                    self.probe,
                )
            )
        for course, handle in zip(new, self.executor.submit(jobs), strict=True):
            course.handle = handle
            note_attempt(course.group, handle, self.executor.address)

    def _poll(self) -> None:
        open_ = [c for c in self.courses if c.handle and c.state in ("waiting", "running")]
        handles = [c.handle for c in open_ if c.handle]
        for course, status in zip(open_, self.executor.poll(handles), strict=True):
            self._follow(course, status)

    def _follow(self, course: _Course, status: Status) -> None:
        """What a status means, as far as the store agrees."""
        group, now = course.group, time.monotonic()
        queued = status.state == "waiting" and course.state == "waiting"
        beats = {} if queued else beats_of(group, course.attempt)
        quiet = [self.watch.quiet(path) for path in beats]
        living = any(seconds < self.lost_after for seconds in quiet)
        rows = sum(beat.get("rows", 0) for beat in beats.values())
        course.steps = max([0, *(beat.get("steps", 0) for beat in beats.values())])
        ended = status.state in ("ended", "unknown")
        if living or status.state == "running":
            course.state = "running"
            course.running_since = course.running_since or now
        if ended or rows != course.rows:
            course.rows = rows
            course.left = self._left(course)
        if living or not beats:
            course.gone_since = 0.0
        if status.state != "running":
            course.started = 0.0
        elif not course.started:
            course.started = now
        why = ""
        if course.handle and not course.cancelled and now - course.looked > LOOK:
            course.looked = now
            course.cancelled = cancelled(group.folder)
            if course.cancelled:
                self.executor.cancel([course.handle])
        if not course.left:
            self._close(course, "done")
        elif status.state == "ended" or (ended and not living):
            self._lost(course, status, beats)
        elif status.state == "running" and not beats:
            if now - course.running_since > BEGIN_WITHIN:
                why = status.line or f"it did not begin within {BEGIN_WITHIN:g}s"
        elif status.state == "running" and not living:
            # The engine still believes in it. Its beat is the better witness; but an engine that
            # starts a job again by itself gets the time to.
            course.gone_since = course.gone_since or now
            silent = any(seconds < INFINITE for seconds in quiet)
            silent = silent and now - course.started > self.lost_after
            if silent or now - course.gone_since > self.lost_after:
                why = f"no sign of life for {self.lost_after:g}s"
        if why:
            assert course.handle is not None
            self.executor.cancel([course.handle])
            self._lost(course, Status("ended", why), beats)

    def _lost(self, course: _Course, status: Status, beats: dict[Any, dict[str, Any]]) -> None:
        """An attempt came to an end before its runs: once more, or give it up."""
        group = course.group
        course.left = self._left(course)
        if not course.left:
            self._close(course, "done")
            return
        # Its leases are of no use to anybody, since the engine knows that it ended.
        if status.state == "ended":
            free_lost(self.store, group.ids, self.watch, set(beats))
        ends = [beat for beat in beats.values() if beat.get("state")]
        course.cause = cause_of(ends[-1]) if ends else status.line or self._last_words(course)
        states = {beat["state"] for beat in ends}
        stop = cancelled(group.folder)
        course.cause = "cancelled" if stop else course.cause
        # A time limit, or a preemption, is no failure where there was any progress.
        if "stopped" in states and course.steps and course.stops < MOST_STOPS:
            course.stops, course.tries = course.stops + 1, course.tries - 1
        if course.tries >= self.tries or stop or "refused" in states:
            self._close(course, "failed")
            return
        course.handle, course.state = None, "waiting"

    def _left(self, course: _Course) -> list[str]:
        """Those of its runs that have no row yet; a row that is there stays."""
        return [run_id for run_id in course.left if self.store.row(run_id) is None]

    def _last_words(self, course: _Course) -> str:
        log = course.handle.log if course.handle else ""
        return (last_lines(log) if log else "") or "it ended without a word"

    def _close(self, course: _Course, state: str) -> None:
        course.state, course.handle = state, None
        self.watch.forget(course.group.folder)
        if state == "done":
            beats = course.group.beats()
            if beats:
                free_lost(self.store, course.group.ids, self.watch, set(beats))
            for path in beats:
                path.unlink(missing_ok=True)

    def _stopped(self, heard: Stop) -> None:
        """Save what is under way, or leave it to an engine that stays."""
        handles = [c.handle for c in self.courses if c.handle]
        if self.executor.outlives:
            print(
                f"headwise: {len(handles)} groups stay with {self.executor.name}; the same command "
                f"finds them, headwise cancel --store {self.store.path} ends them",
                file=sys.stderr,
                flush=True,
            )
            raise Stopped(heard.number)
        self.executor.cancel(handles)
        end = time.monotonic() + SAVE_WITHIN
        while handles and time.monotonic() < end:
            statuses = self.executor.poll(handles)
            handles = [
                h
                for h, s in zip(handles, statuses, strict=True)
                if s.state in ("waiting", "running")
            ]
            time.sleep(0.05)
        raise Stopped(heard.number)


def _wait(seconds: float, heard: Stop) -> None:
    """Sleep, and wake up soon after a signal."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not heard.asked():
        time.sleep(min(0.1, left))


def log_of(group: Group, attempt: dict[str, Any]) -> Path:
    """Where the log of an attempt lies as the store is seen from here."""
    return group.folder / f"log.{attempt['attempt']}"
