"""Leases on a file system without locks: one of many holds a run, lost ones are followed."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.clusters import environment
from support.small_runs import make

from headwise.execute.leases import (
    SIZE,
    Beat,
    Watch,
    claimed,
    ended_here,
    free_lost,
    lease_of,
    make_lease,
    read_beat,
)
from headwise.store import Store

RUN = make()


def folders(tmp_path: Path) -> tuple[Store, Path, Path]:
    """A store, a run's folder in it and a group's."""
    store = Store(tmp_path / "store")
    store.open()
    run, group = store.runs_path / RUN.id, store.path / "groups" / "0a1b"
    run.mkdir(parents=True)
    group.mkdir(parents=True)
    return store, run, group


def test_lease_is_made_by_one_of_many(tmp_path: Path) -> None:
    _, folder, group = folders(tmp_path)
    with ThreadPoolExecutor(13) as many:
        beats = [group / f"{i:012x}.beat" for i in range(13)]
        made = list(many.map(lambda beat: make_lease(folder, 1, beat), beats))
    assert sum(made) == 1
    assert lease_of(folder) == (1, beats[made.index(True)])
    assert [p.name for p in folder.iterdir()] == ["lease.1"], "no half-written one is left"


CLAIM = """
import sys, time
from pathlib import Path
from support.small_runs import make
from headwise.execute.leases import Beat, claimed
from headwise.store import Store
store = Store(sys.argv[1])
with Beat(Path(sys.argv[1]) / "groups" / "0a1b", {}, every=0.05) as beat:
    with claimed(store, [make()], beat) as mine:
        print(len(mine), flush=True)
        sys.stdin.readline()
"""


def holder(store: Store) -> subprocess.Popen[str]:
    """A process that claims the run, and has said how many it got."""
    return subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(store.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def without_lock(store: Store) -> None:
    """As on a file system whose locks other machines do not see."""
    (store.runs_path / RUN.id / "lock").unlink()


def test_run_that_is_held_elsewhere_is_not_claimed_until_its_holder_is_lost(
    tmp_path: Path,
) -> None:
    store, folder, _ = folders(tmp_path)
    with holder(store) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        without_lock(store)
        watch = Watch(lost_after=1e6)
        with claimed(store, [RUN]) as mine:
            assert mine == []
        assert free_lost(store, [RUN.id], watch) == 0
        process.kill()
        process.wait()
    # Of this machine's processes the end is known at once.
    assert lease_of(folder)[0] == 1
    assert free_lost(store, [RUN.id], watch) == 1
    assert lease_of(folder) == (0, None)
    with claimed(store, [RUN]) as mine:
        assert mine == [RUN]


def test_holder_frees_its_lease_at_the_end(tmp_path: Path) -> None:
    store, folder, group = folders(tmp_path)
    with Beat(group, {}) as beat, claimed(store, [RUN], beat) as mine:
        assert mine == [RUN]
        assert lease_of(folder) == (1, beat.path)
    assert sorted(p.name for p in folder.iterdir()) == ["lock", "run.json"]


def foreign(beat: Beat) -> None:
    """A beat as another machine's."""
    beat.values["host"] = "elsewhere 0 0"
    beat.write()


def test_beat_of_another_machine_is_lost_once_it_is_quiet_by_the_own_clock(
    tmp_path: Path,
) -> None:
    store, folder, group = folders(tmp_path)
    watch = Watch(lost_after=0.3)
    with Beat(group, {}, every=1e6) as beat:
        foreign(beat)
        os.utime(beat.path, (1, 1))  # its clock counts for nothing
        assert make_lease(folder, 1, beat.path)
        assert free_lost(store, [RUN.id], watch) == 0, "it is seen for the first time"
        time.sleep(0.2)
        beat.write()
        assert free_lost(store, [RUN.id], watch) == 0, "it has changed"
        time.sleep(0.4)
        assert free_lost(store, [RUN.id], watch) == 1
    assert lease_of(folder) == (0, None)


def test_lease_that_cannot_be_read_is_lost_too(tmp_path: Path) -> None:
    store, folder, _ = folders(tmp_path)
    for text in ("", "{", '{"group": "../..", "token": "x"}', "[]"):
        (folder / "lease.3").write_text(text)
        watch = Watch(lost_after=0.1)
        assert free_lost(store, [RUN.id], watch) == 0
        time.sleep(0.2)
        assert free_lost(store, [RUN.id], watch) == 1, text


def test_lease_of_any_number_is_freed_at_once(tmp_path: Path) -> None:
    """A loop from 1 to the number of somebody's lease would take minutes."""
    store, folder, _ = folders(tmp_path)
    (folder / "lease.100000000").write_text("{}")
    assert free_lost(store, [folder.name], Watch(lost_after=0.0)) == 1
    assert lease_of(folder) == (0, None)
    assert not list(folder.glob("lease*"))


def test_beat_says_what_was_done_and_how_it_ended(tmp_path: Path) -> None:
    with Beat(tmp_path, {"attempt": 2}, every=0.01) as beat:
        first = read_beat(beat.path)
        beat.add(steps=5, rows=1)
        while read_beat(beat.path)["count"] < first["count"] + 2:
            time.sleep(0.01)
        assert not ended_here(read_beat(beat.path))
        beat.end("failed", "é" * 5000)
    last = read_beat(beat.path)
    assert (last["attempt"], last["steps"], last["rows"], last["state"]) == (2, 5, 1, "failed")
    assert beat.path.stat().st_size == SIZE, "later beats need no more space than the first"
    assert Watch().lost(beat.path)


def test_beat_of_a_process_id_that_another_process_has_now_is_lost(tmp_path: Path) -> None:
    with Beat(tmp_path, {}, every=1e6) as beat:
        beat.values["start"] = "1"  # another process had this number
        beat.write()
        assert ended_here(read_beat(beat.path))


@pytest.mark.parametrize("there", [False, True])
def test_row_of_two_writers_is_kept_once(tmp_path: Path, there: bool) -> None:
    store, folder, _ = folders(tmp_path)
    if there:
        (folder / "rows.jsonl").write_text('{"torn')
    row = {"id": RUN.id, "status": "done", "held_out": 0.25}
    with ThreadPoolExecutor(7) as many:
        list(many.map(lambda _: Store(store.path).add_once(dict(row)), range(7)))
    assert len((folder / "rows.jsonl").read_text().splitlines()) == 1 + there
    assert json.loads((folder / "rows.jsonl").read_text().splitlines()[-1])["held_out"] == 0.25
    assert [p.name for p in folder.iterdir()] == ["rows.jsonl"]
