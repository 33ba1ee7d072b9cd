"""`compute`: what is missing is made once and in order, whoever else computes."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from headwise.digests import read_signed
from headwise.execute import sweep
from headwise.store import Store


class Value(NamedTuple):
    id: str

    def spec(self) -> dict[str, Any]:
        return {"experiment": "own", "id": self.id}


def test_compute_makes_what_is_missing_in_order(tmp_path: Path) -> None:
    store, calls = Store(tmp_path / "s"), []

    def make(value: Value, device: str) -> dict[str, Any]:
        calls.append((value.id, device))
        return {"id": value.id, "status": "done", "seconds": 0.0}

    values = [Value(name) for name in ("b", "a", "b")]
    rows = sweep.compute(values, make, store, device="cpu")
    assert [row["id"] for row in rows] == ["b", "a", "b"]
    assert calls == [("b", "cpu"), ("a", "cpu")], "each once"
    assert {"commit", "device"} <= set(rows[0]), "where and by what it was made"
    assert sweep.compute([*values, Value("c")], make, store, device="cpu")[-1]["id"] == "c"
    assert calls[2:] == [("c", "cpu")]
    assert read_signed(tmp_path / "s/runs/a/run.json") == {
        "experiment": "own",
        "id": "a",
    }


def test_compute_keeps_what_was_made_before_a_failure(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")

    def make(value: Value, device: str) -> dict[str, Any]:
        if value.id == "b":
            raise RuntimeError("no memory")
        return {"id": value.id, "status": "done", "seconds": 0.0}

    with pytest.raises(RuntimeError, match="no memory"):
        sweep.compute([Value("a"), Value("b")], make, store, device="cpu")
    assert store.row("a") is not None
    assert [value.id for value in store.missing([Value("a"), Value("b")])] == ["b"]


def other_process(
    store: Store, monkeypatch: pytest.MonkeyPatch, leaves_a_row: bool
) -> contextlib.ExitStack:
    """Somebody else holds the value `a`, and is gone when we wait for the first time."""
    held = contextlib.ExitStack()
    held.enter_context(Store(store.path).claim([Value("a")]))
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1 and leaves_a_row:
            store.add({"id": "a", "status": "done", "seconds": 0.0, "by": "another"})
        held.close()
        assert len(waits) < 5, "waits for ever"

    monkeypatch.setattr(sweep, "time", SimpleNamespace(sleep=sleep))
    return held


def test_compute_waits_for_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "s")
    with other_process(store, monkeypatch, leaves_a_row=True):
        rows = sweep.compute(
            [Value("a")], lambda value, device: pytest.fail("made twice"), store, device="cpu"
        )
    assert rows[0]["by"] == "another"


def test_compute_makes_what_another_process_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "s")
    with other_process(store, monkeypatch, leaves_a_row=False):
        rows = sweep.compute(
            [Value("a")],
            lambda value, device: {"id": value.id, "status": "done", "seconds": 0.0},
            store,
            device="cpu",
        )
    assert [row["id"] for row in rows] == ["a"]
