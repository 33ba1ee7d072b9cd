"""A group of runs in a store that nobody works on any more, as a driver that was killed leaves
it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.commands import TINY

from headwise.digests import signed
from headwise.execute.groups import ATTEMPTS_FILE, Group, Options, group_of
from headwise.execute.leases import SIZE
from headwise.experiments import find
from headwise.experiments.settings import settings_of
from headwise.store import Store


def tiny_runs(seeds: int) -> list[Any]:
    """The runs of the tiny fig1."""
    return find("fig1").runs(settings_of(find("fig1"), "quick", TINY, seeds, [], None))


def idle_group(store: Path, runs: Sequence[Any]) -> Group:
    """A group of those of the runs that have no row: an attempt, a beat of another machine, a
    log."""
    missing = [run for run in runs if Store(store).row(run.id) is None]
    group = group_of(store, missing, 8, 1e6, Options(device="cpu", beat=0.1, lost_after=0.5), {})
    group.write()
    handle = {"engine": "local", "job": "1", "group": group.id, "attempt": 1, "log": ""}
    about = signed({"attempts": [{**handle, "address": "local", "submitted": 1.0}]})
    (group.folder / ATTEMPTS_FILE).write_text(json.dumps(about, indent=1) + "\n")
    beat = {"token": "0123456789ab", "host": "elsewhere 1 2", "pid": 1, "start": "1", "attempt": 1,
            "count": 3, "steps": 4, "rows": 0}  # fmt: skip
    (group.folder / "0123456789ab.beat").write_text(json.dumps(beat).ljust(SIZE - 1) + "\n")
    (group.folder / "log.1").write_text("headwise: a word\n")
    return group
