"""Training that was stopped resumes with the same bits, wherever it was stopped and whatever is
left of its checkpoint."""

import json
import pickle
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.small_runs import WILD, bits, make, together
from support.stops import StopAtQuestion, handlers

from headwise import progress
from headwise.progress import Free, Progress
from headwise.signals import SIGNALS, Stopped
from headwise.training.engine import train
from headwise.training.run import Run

# ---- checkpoints


class Stop(Exception):
    pass


def stop_after(calls: int) -> Any:
    left = [calls]

    def advance(_: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Stop

    return advance


MIXED = [
    make(0),
    make(1, rank=3),
    make(2, depth=2),
    make(3, protocol="replay", schedule="published", weight_decay=0.1),
]


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    return [bits(row) for row in together(MIXED)]


@pytest.mark.parametrize("calls", range(14))
def test_run_stopped_at_any_epoch_resumes_with_the_same_bits(
    calls: int, tmp_path: Path, undisturbed: list[str]
) -> None:
    """Two ensembles of six epochs, each of which says how far it is once before and after each of
    them."""
    rows: list[dict[str, Any]] = []
    with pytest.raises(Stop):
        train(
            MIXED,
            device="cpu",
            folder=tmp_path,
            advance=stop_after(calls),
            checkpoint_every=0,
            done=rows.append,
        )
    done = {row["id"] for row in rows}
    rows += together(
        [run for run in MIXED if run.id not in done], folder=tmp_path, checkpoint_every=0
    )
    by_id = {row["id"]: row for row in rows}
    assert [bits(by_id[run.id]) for run in MIXED] == undisturbed
    assert any(row["resumed"] for row in rows) == (calls % 7 > 1)
    assert not list(tmp_path.rglob("checkpoint*"))


def test_run_stopped_at_every_epoch_in_turn_ends_with_the_same_bits(
    tmp_path: Path, undisturbed: list[str]
) -> None:
    left, rows, stops = list(MIXED), [], 0
    while left:
        try:
            train(
                left,
                device="cpu",
                folder=tmp_path,
                advance=stop_after(2),
                checkpoint_every=0,
                done=rows.append,
            )
        except Stop:
            stops += 1
        left = [run for run in MIXED if run.id not in {row["id"] for row in rows}]
        assert stops < 50
    by_id = {row["id"]: row for row in rows}
    assert [bits(by_id[run.id]) for run in MIXED] == undisturbed
    assert max(row["resumed"] for row in rows) >= 4


def test_runs_at_different_epochs_meet_and_keep_their_bits(
    tmp_path: Path, undisturbed: list[str]
) -> None:
    for run, calls in zip(MIXED, (1, 3, 4, 6), strict=True):
        with pytest.raises(Stop):
            train(
                [run], device="cpu", folder=tmp_path, advance=stop_after(calls), checkpoint_every=0
            )
    rows = together(MIXED, folder=tmp_path)
    assert [row["resumed"] for row in rows] == [0, 1, 1, 1]
    assert [bits(row) for row in rows] == undisturbed


# two epochs of three blocks of steps
IN_BLOCKS = [
    make(seed, steps=120, epoch=60, held_out=16, protocol=protocol, evals=2)
    for seed, protocol in enumerate(("stream", "replay"))
]


def test_run_interrupted_in_every_block_in_turn_loses_no_step(tmp_path: Path) -> None:
    """Each start trains one block, within which it is asked to stop."""
    undisturbed = [bits(row) for row in together(IN_BLOCKS)]
    rows: list[dict[str, Any]] = []
    saved, made = [], []
    while len(rows) < 2:
        left = [run for run in IN_BLOCKS if run.id not in {row["id"] for row in rows}]
        with pytest.raises(Stopped) as stopped:
            train(
                left,
                device="cpu",
                folder=tmp_path,
                advance=made.append,
                done=rows.append,
                stop=StopAtQuestion(2),
            )
        saved += stopped.value.saved
        assert len(saved) < 20
    assert [step for run, step in saved if run == IN_BLOCKS[0].id] == [20, 40, 60, 80, 100]
    by_id = {row["id"]: row for row in rows}
    assert [bits(by_id[run.id]) for run in IN_BLOCKS] == undisturbed
    assert not list(tmp_path.rglob("checkpoint*"))


def test_checkpoint_at_the_end_of_an_epoch_is_as_it_always_was(tmp_path: Path) -> None:
    """So that earlier versions read it."""
    path = checkpoint_of(MIXED[0], tmp_path)
    with safe_open(path, "pt") as f:
        state = json.loads(f.metadata()["state"])
    names = {"epoch", "curve", "held_out_curve", "seconds", "resumed", "skipped"}
    assert set(state) == {*names, "shrink", "clean"}


def test_ctrl_c_in_a_script_saves_and_is_a_keyboard_interrupt(tmp_path: Path) -> None:
    run = IN_BLOCKS[0]
    undisturbed = bits(together([run])[0])
    calls = []

    def advance(steps: int) -> None:
        calls.append(steps)
        if len(calls) == 2:  # after the first epoch
            signal.raise_signal(signal.SIGINT)

    with handlers(signal.default_int_handler):
        with pytest.raises(KeyboardInterrupt, match=r"saved run .* at step 60; the same call"):
            train([run], device="cpu", folder=tmp_path, advance=advance)
        found = [signal.getsignal(number) for number in SIGNALS]
        assert found == [signal.default_int_handler] * 3
    (row,) = together([run], folder=tmp_path)
    assert row["resumed"] == 1
    assert bits(row) == undisturbed


def test_rows_made_before_count_as_done_and_not_as_fast(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        train(MIXED[:1], device="cpu", folder=tmp_path, advance=stop_after(4), checkpoint_every=0)
    made: list[int] = []
    train(MIXED[:1], device="cpu", folder=tmp_path, advance=made.append)
    assert [(type(steps), steps // MIXED[0].recipe.epoch) for steps in made] == [
        (Free, 3),
        (int, 1),
        (int, 1),
        (int, 1),
    ]


def test_time_left_is_that_of_work_which_was_made_now(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = Progress(200, "runs")
    unpickled = pickle.loads(pickle.dumps(Free(40)))  # from another process
    for seconds, amount in (
        (20, 0),
        (1, unpickled),
        (19, 10),
        (40, 20),
        (1, Free(100)),
        (19, 5),
    ):  # ten in 40 seconds, 20 in 40, 5 in 20
        now[0] += seconds
        bar.advance(amount)
    bar.close()
    assert capsys.readouterr().err.splitlines() == [
        "runs   0%, starting",
        "runs  25%, 10m00s left",
        "runs  35%, 5m47s left",
        "runs  88%, 1m11s left",
        "runs  88%, 1m40s for the rest",
    ]


def test_row_that_could_not_be_stored_is_made_again(tmp_path: Path, undisturbed: list[str]) -> None:
    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        together(MIXED[:1], folder=tmp_path, checkpoint_every=0, done=full)
    assert bits(together(MIXED[:1], folder=tmp_path)[0]) == undisturbed[0]


def test_diverged_run_leaves_no_checkpoint(tmp_path: Path) -> None:
    wild = WILD["in the middle"]
    rows = together([make(0), wild], folder=tmp_path, checkpoint_every=0)
    assert [row["status"] for row in rows] == ["done", "diverged"]
    assert not list(tmp_path.rglob("checkpoint*"))


def checkpoint_of(run: Run, folder: Path) -> Path:
    with pytest.raises(Stop):
        train([run], device="cpu", folder=folder, advance=stop_after(4), checkpoint_every=0)
    return folder / run.id / "checkpoint.safetensors"


def spoil(path: Path, how: str) -> None:
    with safe_open(path, "pt") as f:
        about = {key: text for key, text in f.metadata().items() if key != "digest"}
    tensors = load_file(path)
    match how:
        case "a flipped bit":
            data = bytearray(path.read_bytes())
            data[-5] ^= 4  # in a moment
            path.write_bytes(data)
        case "half of it":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        case "empty":
            path.write_bytes(b"")
        case "noise":
            path.write_bytes(np.random.default_rng(0).bytes(5000))
        case "newer format":
            save_file(tensors, path, {**about, "format": "999"})
        case "no format":
            save_file(tensors, path, {"state": about["state"]})
        case "another run's":
            save_file(tensors, path, {**about, "run": "0" * 16})
        case "unknown state":
            save_file(
                tensors,
                path,
                {**about, "state": json.dumps({**json.loads(about["state"]), "momentum": 1})},
            )
        case "past the end":
            save_file(
                tensors,
                path,
                {**about, "state": json.dumps({**json.loads(about["state"]), "epoch": 6})},
            )
        case "past the epoch":
            about["state"] = json.dumps({**json.loads(about["state"]), "block": 1})
            save_file(tensors, path, about)
        case "other sizes":
            save_file({**tensors, "mean": torch.zeros(3)}, path, about)
        case "no moments":
            save_file({"weights": tensors["weights"]}, path, about)


SPOILS = [
    "a flipped bit",
    "half of it",
    "empty",
    "noise",
    "newer format",
    "no format",
    "another run's",
    "unknown state",
    "past the end",
    "past the epoch",
    "other sizes",
    "no moments",
]


@pytest.mark.parametrize("how", SPOILS)
def test_checkpoint_that_cannot_be_used_costs_time_not_the_result(
    how: str, tmp_path: Path, undisturbed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint_of(MIXED[0], tmp_path)
    spoil(path, how)
    rows = together(MIXED, folder=tmp_path)
    assert [bits(row) for row in rows] == undisturbed
    assert [row["resumed"] for row in rows] == [0, 0, 0, 0]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(
        f"headwise: run {MIXED[0].id} starts again, its checkpoint cannot be used ("
    )
    assert said[0].endswith(f"; it is kept as {path.with_name('checkpoint.damaged')}")
    assert not any(p.name.startswith("checkpoint") for p in path.parent.iterdir())


def test_good_checkpoint_is_used_without_a_word(
    tmp_path: Path, undisturbed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint_of(MIXED[0], tmp_path)
    rows = together(MIXED, folder=tmp_path)
    assert [bits(row) for row in rows] == undisturbed
    assert [row["resumed"] for row in rows] == [1, 0, 0, 0]
    assert capsys.readouterr().err == ""
