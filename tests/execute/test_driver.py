"""The driver's loop with workers that are processes of this machine, each of them real: killed,
failing, of another version, twice at once, on a full disk."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.clusters import (
    assert_complete,
    command,
    driver,
    environment,
    living,
    runs_of,
    undisturbed,
    wait_for,
)

from headwise.execute.base import Handle, Job, Status
from headwise.execute.groups import Group, Options, group_of
from headwise.execute.local import Local
from headwise.store import Store

HALF = ["depths=1", "lr=0.05"]  # eight runs in two ensembles
RUNS = runs_of(2, *HALF)
ON = ["--devices", "cpu:2", "--lost-after", "8"]
LONG = "steps=1600"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), RUNS)


def groups(store: Store, *, count: int = 2) -> list[Group]:
    """The runs in this many groups."""
    store.open()
    size = len(RUNS) // count
    parts = [RUNS[i : i + size] for i in range(0, len(RUNS), size)]
    options = Options("cpu", checkpoint_every=0.0, beat=0.1, lost_after=5.0)
    made = [group_of(store.path, part, 180 * len(part), 1.0, options, {}) for part in parts]
    for group in made:
        group.write()
    return made


def worker(group: Group, *words: str) -> list[str]:
    return [sys.executable, "-m", "headwise", "worker", str(group.folder), *words]


def test_worker_and_driver_are_killed_and_nothing_is_lost(
    tmp_path: Path, reference: dict[str, str]
) -> None:
    store = tmp_path / "store"
    words = command(store, ON, 2, *HALF)
    with driver(words) as process:
        first = wait_for(lambda: living(store))
        wait_for(lambda: list(store.glob("runs/*/checkpoint.safetensors")))
        os.kill(first[0], signal.SIGKILL)
        wait_for(lambda: set(living(store)) - set(first))
        process.kill()
        process.wait()
    wait_for(lambda: not living(store))  # workers end with their driver
    with driver(words) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["runs"] == 8
    assert_complete(store, reference)


def test_two_workers_of_one_group_end_with_one_row_each(
    tmp_path: Path, reference: dict[str, str]
) -> None:
    """As when a queue starts a job again whose process still runs."""
    store = Store(tmp_path / "store")
    (group,) = groups(store, count=1)
    environ = environment()
    with (
        subprocess.Popen(worker(group), env=environ, stderr=subprocess.PIPE) as one,
        subprocess.Popen(worker(group), env=environ, stderr=subprocess.PIPE) as two,
    ):
        assert (one.wait(120), two.wait(120)) == (0, 0)
    beats = group.beats()
    assert len(beats) == 2
    for path in beats:
        path.unlink()
    assert_complete(store.path, reference)


class Failing:
    """Local workers, but of one group only such as fail."""

    name = address = "local"
    outlives = by_value = False

    def __init__(self, group: str) -> None:
        self.local, self.group, self.submitted = Local(["", ""]), group, []

    def slots(self) -> int:
        return 2

    def submit(self, jobs: list[Job]) -> list[Handle]:
        self.submitted += jobs
        bad = [Job(j.group, j.folder, j.attempt, j.device, ("--code", "no.py")) for j in jobs]
        return self.local.submit(
            [b if j.group == self.group else j for j, b in zip(jobs, bad, strict=True)]
        )

    def poll(self, handles: list[Handle]) -> list[Status]:
        return self.local.poll(handles)

    def cancel(self, handles: list[Handle]) -> None:
        self.local.cancel(handles)

    def close(self) -> None:
        self.local.close()
