"""The groups of a store as they are now, and how to end them; from files alone. Standard library
only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from headwise.execute.base import last_lines
from headwise.execute.groups import (
    Group,
    attempts_of,
    beats_of,
    cancel_group,
    cancelled,
    groups_in,
)
from headwise.execute.leases import ended_here
from headwise.store import Store


@dataclass(frozen=True)
class Live:
    """A group as `headwise list --live` shows it."""

    group: str
    state: str  # waiting, running, lost (no sign of life for too long), done, cancelled, ended
    rows: int  # of its runs that have one
    runs: int
    share: float  # of its steps that is made
    engine: str
    attempt: int
    host: str
    heard: float | None  # seconds since its last sign of life, by the file system's clock
    line: str  # the last one of its log


def live(store: Store) -> list[Live]:
    """Every group of a store."""
    return [_live(store, group) for group in groups_in(store.path)]


def _live(store: Store, group: Group) -> Live:
    attempts = attempts_of(group.folder)
    latest = attempts[-1] if attempts else {}
    number = latest.get("attempt", 0)
    beats = beats_of(group, number)
    heard = None
    current: dict[str, object] = {}
    for path, beat in beats.items():
        age = time.time() - path.stat().st_mtime
        if heard is None or age < heard:
            heard, current = age, beat
    left = len(group.missing(store))
    if not left:
        state = "done"
    elif current and not current.get("state") and not ended_here(current):
        state = "running" if (heard or 0) < group.options.lost_after else "lost"
    elif cancelled(group.folder):
        state = "cancelled"
    else:
        state = "ended" if current else "waiting"
    steps = current.get("steps", 0)
    return Live(
        group.id,
        state,
        len(group.ids) - left,
        len(group.ids),
        1.0 if not left else min(1.0, float(str(steps)) / max(1, group.steps)),
        str(latest.get("engine", "")),
        number,
        str(current.get("host", "")).partition(" ")[0],
        None if heard is None else round(heard, 1),
        last_lines(group.folder / f"log.{number}"),
    )


def cancel_groups(store: Store, names: Sequence[str] = ()) -> list[str]:
    """Ask the workers of groups that are not done to save and end, and the driver not to submit
    them again; returns the groups' ids."""
    asked = []
    for group in groups_in(store.path):
        if (not names or group.id in names) and group.missing(store):
            cancel_group(group.folder)
            asked.append(group.id)
    return asked
