"""Rows reach a tracker once each, also one of one's own, and while they are being made."""

import threading
from pathlib import Path

import pytest
from support.tracked_rows import DECODER, DIVERGED, SMALL, TAKEN, small_row, tracked_store

from headwise.errors import UsageError
from headwise.store import Store
from headwise.tracking import Exported, TrackedRun, export, following

EVERY = 0.01


class Diary:
    """A tracker of one's own that knows what it has, and that can fail."""

    def __init__(self, broken: str = "") -> None:
        self.runs: dict[str, TrackedRun] = {}
        self.broken = broken
        self.written = threading.Event()

    def __call__(self, run: TrackedRun) -> bool:
        if run.id == self.broken:
            raise OSError("the pen is\nempty")
        known = run.id in self.runs
        self.runs[run.id] = run
        self.written.set()
        return not known


def test_export_gives_each_run_once(tmp_path: Path) -> None:
    store, diary, count = tracked_store(tmp_path / "s"), Diary(), []
    assert export(store, diary, advance=count.append) == Exported(added=4, already=0)
    assert export(store, diary) == Exported(added=0, already=4)
    assert count == [1] * 4
    assert {run_id: run.group for run_id, run in diary.runs.items()} == {
        SMALL.id: "mine",
        DIVERGED.id: "mine",
        TAKEN.id: "mine",
        DECODER.id: "",
    }


def test_export_takes_a_plain_function_and_some_ids(tmp_path: Path) -> None:
    seen: list[str] = []

    def note(run: TrackedRun) -> None:
        seen.append(run.id)

    assert export(tracked_store(tmp_path / "s"), note, [DECODER.id, "none"]).added == 1
    assert seen == [DECODER.id]


def test_export_that_failed_is_finished_by_the_next(tmp_path: Path) -> None:
    store = tracked_store(tmp_path / "s")
    ids = [row["id"] for row in store.rows()]
    diary = Diary(broken=ids[2])
    with pytest.raises(RuntimeError, match=f"^Diary at run {ids[2]}: OSError: the pen is empty$"):
        export(store, diary)
    assert list(diary.runs) == ids[:2]
    diary.broken = ""
    assert export(store, diary) == Exported(added=2, already=2)


def test_export_passes_on_what_a_tracker_says_of_its_use(tmp_path: Path) -> None:
    def refuse(run: TrackedRun) -> None:
        raise UsageError("no such project")

    with pytest.raises(UsageError, match=r"^no such project$"):
        export(tracked_store(tmp_path / "s"), refuse)


# ---- while rows are made


def test_following_gives_new_rows_while_the_body_runs(tmp_path: Path) -> None:
    store, diary = Store(tmp_path / "s"), Diary()
    with following(store, diary, pytest.fail, EVERY):
        store.add(small_row(SMALL))
        assert diary.written.wait(30)
        assert list(diary.runs) == [SMALL.id]
        store.add(small_row(TAKEN))
    assert list(diary.runs) == [SMALL.id, TAKEN.id]


def test_following_gives_older_rows_only_where_they_are_named(tmp_path: Path) -> None:
    store, diary = tracked_store(tmp_path / "s"), Diary()
    with following(store, diary, pytest.fail, EVERY) as also:
        also([DECODER.id, "none"])
    assert list(diary.runs) == [DECODER.id]


def test_following_ends_with_a_tracker_that_fails_and_the_body_does_not(tmp_path: Path) -> None:
    store, diary = Store(tmp_path / "s"), Diary(broken=SMALL.id)
    said: list[str] = []
    with following(store, diary, said.append, EVERY):
        store.add(small_row(SMALL))
        store.add(small_row(TAKEN))
    assert len(said) == 1
    assert said[0].startswith("headwise: tracking has ended, training has not: RuntimeError: Diary")
    assert said[0].endswith("headwise export gives the tracker what is missing")


def test_following_leaves_a_stopped_body_at_once(tmp_path: Path) -> None:
    store, diary = Store(tmp_path / "s"), Diary()

    def stopped() -> None:
        with following(store, diary, pytest.fail, 60.0):
            store.add(small_row(SMALL))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert diary.runs == {}
    assert export(store, diary).added == 1
