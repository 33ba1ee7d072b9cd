"""Finished rows to a tracker, once each: all that a store has, or those that appear while a command
runs.

    store.rows -> tracked -> tracker

The tracker itself knows what it has, so an export that was killed is finished by the same command,
and a store that another machine wrote is exported as one of this machine. While runs are being
made, a thread looks for new rows in the store: who makes them, and where, makes no difference.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwise.errors import UsageError, one_line
from headwise.files import USER_FILE
from headwise.store import ROWS_FILE, Store
from headwise.tracking.runs import Tracker, tracked

LOOK_EVERY = 5.0  # seconds between two looks at a store
PATIENCE = 60.0  # seconds that a tracker has to finish its run when training has ended
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Exported:
    """How many runs a tracker was given: those it took, and those it had already."""

    added: int
    already: int


def export(
    store: Store, tracker: Tracker, ids: Sequence[str] | None = None, advance: Advance | None = None
) -> Exported:
    """Give a tracker the finished runs of a store, by id or all of them. A run that it has already
    is left as it is."""
    groups = _groups(store)
    added = already = 0
    for row in store.rows(ids):
        run = tracked(row, store.spec(row["id"]), groups.get(row["id"], ""))
        try:
            taken = tracker(run)
        except UsageError:
            raise
        except Exception as e:
            if os.environ.get("HEADWISE_TRACEBACK"):
                raise
            # A mistake in one's own file is a user's; what a tracker's service does is not.
            place, kind = _line(e), UsageError if _line(e) else RuntimeError
            name = place or type(tracker).__name__
            raise kind(f"{name} at run {run.id}: {one_line(e)}") from None
        if taken is False:
            already += 1
        else:
            added += 1
        if advance is not None:
            advance(1)
    return Exported(added, already)


def _groups(store: Store) -> dict[str, str]:
    """The experiment that each run was asked for under, the first by name."""
    groups: dict[str, str] = {}
    for name, about in store.experiments().items():
        for run_id in about.get("ids", []):
            groups.setdefault(run_id, name)
    return groups


def _line(error: BaseException) -> str:
    """The last line of a user's file that an error passed through; empty: there is none."""
    lines = [
        f"{Path(frame.f_code.co_filename).name} line {number}"
        for frame, number in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(USER_FILE)
    ]
    return lines[-1] if lines else ""


@contextlib.contextmanager
def following(
    store: Store, tracker: Tracker, say: Callable[[str], None], every: float = LOOK_EVERY
) -> Iterator[Callable[[Sequence[str]], None]]:
    """While the body runs, a tracker is given each row that appears in a store.

    Those that were there before are not, but for the ids that the body names: it is handed a
    function for that. They are given at the end, as a command that resumes another one needs it.
    What a tracker raises ends the tracking and not the training: it is said in one line, and
    `headwise export` gives the tracker what it has missed.

        with following(Store("my-store"), find("wandb"), print) as also:
            made = headwise.run("fig1", store="my-store")
            also([row["id"] for row in made.rows])
    """
    # A store of its own: what is damaged is named by whoever else reads it.
    watch = _Watch(Store(store.path), tracker, say)
    done = threading.Event()

    def look() -> None:
        while not done.wait(every) and watch.look():
            pass

    # A daemon does not keep a stopped command alive.
    thread = threading.Thread(target=look, daemon=True, name="headwise tracking")
    thread.start()
    try:
        yield watch.forget
    finally:
        done.set()
    # Only here, where the body has ended as it should. The last rows are given by this thread.
    thread.join(PATIENCE)
    if thread.is_alive():
        say(f"tracking is still at work after {PATIENCE:.0f} s and is left: {CATCH_UP}")
    else:
        watch.look()


CATCH_UP = "headwise export gives the tracker what is missing"


class _Watch:
    """What of a store a tracker was given already."""

    def __init__(self, store: Store, tracker: Tracker, say: Callable[[str], None]) -> None:
        self.store, self.tracker, self.say = store, tracker, say
        self.broken = False
        self.before = {run_id for run_id in self._finished() if store.row(run_id) is not None}
        self.given: set[str] = set()

    def _finished(self) -> list[str]:
        """The runs that have a file of rows."""
        runs = self.store.runs_path
        names = os.listdir(runs) if runs.exists() else []
        return sorted(name for name in names if (runs / name / ROWS_FILE).exists())

    def forget(self, ids: Sequence[str]) -> None:
        """Have runs given that were there before."""
        self.before -= set(ids)

    def look(self) -> bool:
        """Give the tracker what is new; returns whether there is a reason to look again."""
        if self.broken:
            return False
        try:
            for run_id in self._finished():
                known = run_id in self.given or run_id in self.before
                if not known and self.store.row(run_id) is not None:
                    export(self.store, self.tracker, [run_id])
                    self.given.add(run_id)
        except Exception as e:
            self.broken = True
            self.say(f"headwise: tracking has ended, training has not: {one_line(e)}; {CATCH_UP}")
        return not self.broken
