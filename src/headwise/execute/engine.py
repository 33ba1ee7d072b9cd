"""Where a command's runs are trained: `Place` is what was asked for, `Engine` makes rows there.

    local         this process, or a pool of processes on a CPU: the default, and no Engine
    local, with devices    a process per GPU of this machine
    ray           a Ray that is started here
    ray:auto      the Ray that this machine belongs to
    ray://H:P     a Ray cluster elsewhere
    slurm         Slurm's queue

An engine that is an extra is imported where it is used. Standard library only.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwise.errors import UsageError, nearest, shown
from headwise.execute.base import Executor, Handle
from headwise.execute.driver import SAVE_WITHIN, TRIES, Driver, GroupsFailedError, log_of
from headwise.execute.groups import (
    Group,
    Options,
    attempts_of,
    group_of,
    groups_in,
    handle_of,
)
from headwise.execute.leases import BEAT, LOST_AFTER
from headwise.rows import Row
from headwise.signals import Stop
from headwise.store import Store

ENGINES = ("local", "ray", "ray:auto", "ray://HOST:PORT", "slurm")


@dataclass(frozen=True)
class Place:
    """Where runs are trained.

    >>> Place("ray").by_engine, Place().by_engine, Place(devices="0,1").by_engine
    (True, False, True)
    """

    on: str = "local"
    devices: str = ""  # of this machine, for local: "0,1", "all" or "cpu:4"
    slurm: tuple[str, ...] = ()  # KEY=VALUE, as sbatch takes them
    lost_after: float = LOST_AFTER  # seconds without a sign of life
    tries: int = TRIES  # attempts at a group

    def __post_init__(self) -> None:
        if self.on not in ("local", "slurm") and not is_ray(self.on):
            raise UsageError(f"unknown engine {shown(self.on)}; {nearest(self.on, ENGINES)}")
        if self.on.startswith("ray:/") and not 0 < int(self.on.rpartition(":")[2]) < 65_536:
            raise UsageError(f"a port is from 1 to 65535, got {self.on}")
        if self.devices and self.on != "local":
            raise UsageError(
                f"--devices names this machine's, so it is for --on local, got --on {self.on}"
            )
        if self.slurm and self.on != "slurm":
            raise UsageError(f"--slurm is for --on slurm, got --on {self.on}")
        if self.tries < 1:
            raise UsageError(f"tries must be at least 1, got {self.tries}")
        if not 1 <= self.lost_after <= 86_400:
            raise UsageError(f"lost_after is from 1 to 86400 seconds, got {self.lost_after:g}")

    @property
    def by_engine(self) -> bool:
        """Whether groups are submitted; else this process and its pool do everything."""
        return self.on != "local" or bool(self.devices)


def is_ray(text: str) -> bool:
    """Whether `--on` names a Ray."""
    return text in ("ray", "ray:auto") or bool(re.fullmatch(r"ray://[^/:\s]+:\d{1,5}", text))


def executor_of(place: Place) -> Executor:
    """The executor of a place, with its engine reached; raises UsageError where that fails."""
    if is_ray(place.on):
        from headwise.execute.ray_cluster import Ray

        return Ray(place.on)
    if place.on == "slurm":
        from headwise.execute.slurm import Slurm

        return Slurm(place.slurm)
    from headwise.execute.local import Local, devices_of

    return Local(devices_of(place.devices, _gpus, _cores()))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Engine:
    """Makes rows at a place. The executor is reached when the first runs are missing, serves all
    rounds of a command, and is closed at the end."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._executor: Executor | None = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    @property
    def executor(self) -> Executor:
        """The executor, reached when it is first asked for."""
        if self._executor is None:
            self._executor = executor_of(self.place)
        return self._executor

    def _memory(self, device: str, slots: int) -> float:
        """Bytes that a group may need. Of another machine nobody knows; there the engine halves
        what does not fit."""
        if self.place.on != "local":
            return math.inf
        from headwise.device import memory_of, pick_device

        where = pick_device(device)
        return memory_of(where) * 0.8 / (slots if where.type == "cpu" else 1)

    def rows(
        self,
        runs: Sequence[Any],
        store: Store,
        options: Options,
        *,
        label: str,
        probe: Callable[..., Any] | None = None,
        stop: Stop | None = None,
    ) -> list[Row]:
        """Make every run's row exist and return the rows in order. Groups that fail stop only
        themselves; what they lack is a GroupsFailedError, after all others are done."""
        missing = store.missing(runs)
        if missing:
            self.make(missing, store, options, label=label, probe=probe, stop=stop)
        store.tidy(runs)
        return store.rows([run.id for run in runs])

    def make(
        self,
        runs: Sequence[Any],
        store: Store,
        options: Options,
        *,
        label: str,
        probe: Callable[..., Any] | None = None,
        stop: Stop | None = None,
    ) -> None:
        """Make the rows of runs and read none."""
        from headwise.execute.cut import groups_of, steps_of
        from headwise.execute.own_code import digests_of, words_of
        from headwise.execute.sources import note_sources

        store.open()
        digests = digests_of(runs)
        beat = min(BEAT, self.place.lost_after / 6)
        options = replace(options, beat=beat, lost_after=self.place.lost_after)
        executor = self.executor
        words = () if executor.by_value else words_of(runs, probe)
        driver = Driver(
            store,
            executor,
            words,
            probe,
            self.place.tries,
            self.place.lost_after,
            f"{label}: {len(runs)} runs",
        )

        def cut(left: list[Any]) -> list[Group]:
            slots = executor.slots()
            groups = groups_of(left, slots, store, self._memory(options.device, slots))
            return [
                group_of(store.path, g, sum(map(steps_of, g)), c, options, digests)
                for g, c in groups
            ]

        note_sources(store, [run for run in runs if run.work == "train"])
        driver.plan(runs, cut)
        try:
            driver.run(stop)
        except GroupsFailedError as e:
            for line in e.table:
                print("  ".join(line), file=sys.stderr, flush=True)
            raise


def cancel_jobs(store: Store, groups: Sequence[str], on: str) -> int:
    """Have the engine that is named end its jobs of these groups, also where their workers do not
    see the store; returns how many it was asked for. What a store says of an engine's place is
    followed by nobody."""
    handles = []
    for group in groups_in(store.path):
        handles += [
            replace(handle_of(attempt), log=str(log_of(group, attempt)))
            for attempt in (attempts_of(group.folder)[-1:] if group.id in groups else ())
        ]
    with Engine(Place(on)) as engine:
        executor = engine.executor
        mine = [handle for handle in handles if handle.engine == executor.name]
        executor.poll(mine)
        executor.cancel(mine)
        _wait_for_ends(executor, mine)
    return len(mine)


def _wait_for_ends(executor: Executor, handles: Sequence[Handle]) -> None:
    """Poll until jobs have ended, for as long as they may take to save."""
    end = time.monotonic() + SAVE_WITHIN
    while time.monotonic() < end:
        states = {status.state for status in executor.poll(handles)}
        if not states & {"waiting", "running"}:
            return
        time.sleep(0.1)
