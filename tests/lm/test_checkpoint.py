"""Checkpoints of one decoder: resumed, refused, of an earlier version; and weights it leaves."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file, save, save_file
from support.data import refused
from support.lm_runs import SHAPE, bits, make_run, stop, trained_row
from support.stops import StopAtQuestion

from headwise.lm import Pretraining, load_decoder, pretrain
from headwise.signals import Stopped


@pytest.mark.parametrize("optimiser", ["muon", "adamw"])
def test_resume_after_any_step_is_bitwise_the_same(
    book: str, optimiser: str, tmp_path: Path
) -> None:
    run = make_run(book, optimiser=optimiser, weight_decay=0.1)
    undisturbed = trained_row(run, folder=tmp_path / "whole")
    for steps in range(1, run.steps):
        stop(run, steps, tmp_path / "kept")
    row = trained_row(run, folder=tmp_path / "kept")
    assert row["resumed"] == run.steps - 1
    assert bits(row) == bits(undisturbed)
    assert sorted(p.name for p in (tmp_path / "kept" / run.id).iterdir()) == ["weights.safetensors"]
    a, b = (
        load_file(tmp_path / name / run.id / "weights.safetensors") for name in ("whole", "kept")
    )
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_interrupted_after_any_step_is_bitwise_the_same(book: str, tmp_path: Path) -> None:
    """Each start makes one step, within which it is asked to stop."""
    run, saved = make_run(book, weight_decay=0.1), []
    undisturbed = trained_row(run)
    rows: list[dict[str, Any]] = []
    while not rows:
        with pytest.raises(Stopped) as stopped:
            trained_row(run, folder=tmp_path, done=rows.append, stop=StopAtQuestion(2))
        saved += stopped.value.saved
        assert len(saved) < run.steps
    assert saved == [(run.id, step) for step in range(1, run.steps)]
    assert bits(rows[0]) == bits(undisturbed)


def test_resume_needs_the_moments(book: str, tmp_path: Path) -> None:
    run = make_run(book)
    stop(run, 3, tmp_path)
    path = tmp_path / run.id / "checkpoint.safetensors"
    with safe_open(path, "pt") as f:
        metadata = f.metadata()
    tensors = load_bytes(path.read_bytes())  # not mapped: the file is written over
    for name in tensors:
        if name.startswith("mean."):
            tensors[name].zero_()
    del metadata["digest"]  # as a version of before would have written it
    save_file(tensors, path, metadata)
    assert bits(trained_row(run, folder=tmp_path)) != bits(trained_row(run))


def test_checkpoint_that_cannot_be_used_costs_time_and_is_kept_until_the_end(
    book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in training: the run starts again, says so in a line, and keeps the file aside."""
    run, wider = make_run(book), make_run(book, shape=SHAPE.replace(dim=24))
    path = tmp_path / run.id / "checkpoint.safetensors"
    aside = path.with_name("checkpoint.damaged")
    stop(run, 2, tmp_path)
    complete = path.read_bytes()
    with safe_open(path, "pt") as f:
        about = {key: text for key, text in f.metadata().items() if key != "digest"}  # as of before
    tensors = load_bytes(complete)
    smaller = {**tensors, "weights.embedding": tensors["weights.embedding"][:-1].clone()}
    losses = complete.index(struct.pack("<d", tensors["losses"][0].item()))
    spoilt = {
        "not safetensors": b"x" * 99,
        "cut off": complete[: len(complete) // 2],
        "a flipped bit": complete[:losses] + bytes([complete[losses] ^ 1]) + complete[losses + 1 :],
        "a tensor less": save({n: t for n, t in tensors.items() if n != "losses"}, about),
        "another size": save(smaller, about),
        "format 9": save(tensors, {**about, "format": "9"}),
    }
    undisturbed = bits(trained_row(run))
    capsys.readouterr()
    for what, data in spoilt.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        stop(run, 1, tmp_path)
        (line,) = capsys.readouterr().err.splitlines()
        start = f"headwise: run {run.id} starts again, its checkpoint cannot be used ("
        assert line.startswith(start), what
        assert line.endswith(f"; it is kept as {aside}"), what
        assert aside.read_bytes() == data, what
        row = trained_row(run, folder=tmp_path)
        assert bits(row) == undisturbed, what
        assert row["resumed"] == 1, what
        assert sorted(p.name for p in path.parent.iterdir()) == ["weights.safetensors"], what
    (tmp_path / wider.id).mkdir()
    (tmp_path / wider.id / path.name).write_bytes(complete)
    assert trained_row(wider, folder=tmp_path)["resumed"] == 0
    assert "it is of another run: dim 22 for 24" in capsys.readouterr().err


def test_resume_of_a_checkpoint_that_an_earlier_version_wrote(tmp_path: Path) -> None:
    """The file was written before the folders of the package were made, after step 3 of 6; the
    numbers are those of the undisturbed run of that version."""
    old = Path(__file__).with_name("data") / "checkpoint-format-1.safetensors"
    with safe_open(old, "pt") as f:
        run = Pretraining.of(json.loads(f.metadata()["run"]))
    assert run.id == "b01227dd018c0994"
    (tmp_path / run.id).mkdir()
    shutil.copy(old, tmp_path / run.id / "checkpoint.safetensors")
    row = trained_row(run, folder=tmp_path)
    assert (row["resumed"], row["steps_done"]) == (1, 6)
    curve = [5.537772455, 5.520219201, 5.458762256, 5.403872089, 5.360883155, 5.279890461]
    assert row["curve"][:3] == pytest.approx(curve[:3], rel=1e-9), "not read from the file"
    assert row["curve"] == pytest.approx(curve, rel=1e-5)
    evaluations = [(2, 7.89531906), (4, 7.74926247), (6, 7.62072535)]
    for found, expected in zip(row["held_out_curve"], evaluations, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_load_decoder_of_a_finished_run(book: str, tmp_path: Path) -> None:
    run = make_run(book, steps=2)
    pretrain(run, device="cpu", folder=tmp_path, quiet=True)
    model = load_decoder(tmp_path / run.id)
    assert model.shape == run.shape
    assert not model.training
    weights = load_file(tmp_path / run.id / "weights.safetensors")
    assert all(value.equal(weights[name]) for name, value in model.state_dict().items())
    assert "holds no weights of a finished run" in refused(load_decoder, tmp_path / "none")
