"""A row as trackers see it: above all, every number stands at its step."""

import json
from pathlib import Path

import pytest
from support.tracked_rows import (
    DECODER,
    DIVERGED,
    FINISHED,
    HISTORY,
    SMALL,
    TAKEN,
    decoder_row,
    diverged_row,
    small_row,
    tracked_store,
)

from headwise.execute.sweep import sweep
from headwise.rows import Row
from headwise.store import Store, read_rows
from headwise.tracking import tracked
from headwise.training.run import Recipe, Run

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("row", [small_row(SMALL), diverged_row(), decoder_row()])
def test_history_stands_at_the_steps_made(row: Row) -> None:
    assert dict(tracked(row).history) == HISTORY[row["id"]]


def test_history_of_a_trained_run_has_its_epochs_and_evaluations(tmp_path: Path) -> None:
    recipe = Recipe(steps=28, epoch=7, evals=2, batch=3, held_out=128)
    run = Run(SMALL.shape, SMALL.task, recipe)
    row = sweep([run], Store(tmp_path / "s"), device="cpu", workers=1)[0]
    found = dict(tracked(row).history)
    assert list(found) == [7, 14, 21, 28]
    assert [step for step, values in found.items() if "held_out" in values] == [14, 28]
    assert found[28] == {"train_loss": row["train_last"], "held_out": row["held_out"]}


@pytest.mark.parametrize("file", ["fig1/quick", "regression/short", "nanochat/long", "fig1/lost"])
def test_history_of_published_rows_ends_with_the_last_step(file: str) -> None:
    for row in read_rows(RESULTS / f"{file}.jsonl"):
        run = tracked(row)
        steps = [step for step, _ in run.history]
        error = "bits_per_byte" if row["task"] == "language" else "held_out"
        held_out = [step for step, values in run.history if error in values]
        assert steps == sorted(steps)
        if row["status"] == "done":
            assert steps[-1] == held_out[-1] == row["steps"]
            assert run.history[-1][1][error] == pytest.approx(row[error])
            assert len(held_out) == row["evals"]
        else:
            assert steps[-1] < row["steps"]


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": None},
        {"epoch": True - 1},
        {"curve": "no list"},
        {"held_out_curve": None},
    ],
)
def test_history_of_a_row_without_curves_is_empty(change: Row) -> None:
    assert tracked({**small_row(SMALL), **change}).history == ()


def test_configuration_is_the_specification_and_the_summary_is_the_rest(tmp_path: Path) -> None:
    store = tracked_store(tmp_path / "s")
    row = store.row(SMALL.id)
    assert row is not None
    run = tracked(row, store.spec(SMALL.id), "mine")
    columns = {key: value for key, value in SMALL.columns().items() if key != "params"}
    assert run.config == {key: row[key] for key in columns}
    assert run.config["task_points"] == 5
    assert run.config["lr"] == 0.01
    assert run.summary.keys() == row.keys() - columns.keys() - {"id", "curve", "held_out_curve"}
    assert run.results == {
        "params": SMALL.params,
        "held_out": 0.55,
        "held_out_se": 0.01,
        "train_best": 0.5,
        "zero_error": 1.0,
        "seconds": 7.5,
    }
    assert (run.id, run.group, run.finished) == (SMALL.id, "mine", FINISHED)


def test_configuration_of_a_row_without_specification_is_its_plain_values(tmp_path: Path) -> None:
    store = tracked_store(tmp_path / "s")
    assert store.spec(TAKEN.id) is None
    run = tracked(small_row(TAKEN), store.spec(TAKEN.id))
    assert run.config["task_points"] == 5
    assert not {"seconds", "device", "curve", "score_angle"} & run.config.keys()
    assert run.summary["task_points"] == 5


def test_name_is_different_for_every_run_and_no_path() -> None:
    rows = [small_row(SMALL), small_row(TAKEN), diverged_row(), decoder_row()]
    names = [tracked(row).name for row in rows]
    assert names[0] == f"farthest-d6-l1-h2-r3-s1-{SMALL.id}"
    assert len({*names}) == 4
    hostile = tracked({"id": "../../x", "task": "../..\x00/é"}).name
    assert not set(hostile) - set("abcdefghijklmnopqrstuvwxyz_.-")
    assert not hostile.startswith((".", "-"))


@pytest.mark.parametrize("when", [None, 3, "yesterday", "9999-99-99T00:00:00Z"])
def test_time_that_is_none_is_zero(when: object) -> None:
    assert tracked({**small_row(SMALL), "finished": when}).finished == 0.0


def test_specification_of_another_folder_is_not_read(tmp_path: Path) -> None:
    store = tracked_store(tmp_path / "s")
    assert store.spec(f"../runs/{DECODER.id}") is None
    assert store.spec(DIVERGED.id) == json.loads(json.dumps(DIVERGED.spec()))
