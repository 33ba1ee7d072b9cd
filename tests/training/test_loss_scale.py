"""The loss scale of half precision: what overflows cost, how the scale backs off and comes back,
and that nothing else sees it."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.small_runs import CPU, after_overflows, bits, make, tiny_before_the_last_norm

from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.tasks import Farthest
from headwise.training import checkpoint
from headwise.training.checkpoint import State, begin
from headwise.training.engine import train
from headwise.training.loss_scale import SMALLEST, LossScale, LossScales, base_scale
from headwise.training.run import Recipe, Run
from headwise.training.step import Modules


def half_run(seed: int = 0, **recipe: Any) -> Run:
    settings = {"steps": 20, "epoch": 4, "batch": 16, "held_out": 128, "evals": 1, **recipe}
    shape = paper_shape(dim=16, rank=4, ffn_dim=32)
    return Run(shape, Farthest(16, 4), Recipe(**settings, precision="fp16"), seed)


def scaled(state: State, loss_scale: float) -> State:
    return dataclasses.replace(state, scale=LossScale(loss_scale))


# ---- the scale of one run


def test_loss_scale_halves_per_overflow_and_doubles_after_clean_epochs() -> None:
    scale, recipe = LossScale(), make(0, steps=400, epoch=10).recipe
    found = []
    for overflows in ([2, 0, 1], [0] * 20, [0] * 60, [10], [10]):
        for steps in overflows:
            scale.end_epoch(steps, recipe)
        found.append(scale.loss_scale)
    assert found == [1 / 8, 1 / 4, 1.0, 1 / 32, SMALLEST]
    assert not scale.hopeless
    scale.end_epoch(9, recipe)
    assert not scale.hopeless, "one step was made"
    scale.end_epoch(10, recipe)
    assert scale.hopeless
    assert scale.skipped == 3 + 10 + 10 + 9 + 10


def test_loss_scales_count_on_from_a_checkpoint_within_an_epoch() -> None:
    recipe = make(0, steps=400, epoch=10).recipe
    scale = LossScale(overflows=2)
    scales = LossScales([scale], "fp16", CPU)
    scales.count(torch.tensor([math.nan]), slice(0, 1))
    scales.end_epoch([scale], recipe)
    assert scale == LossScale(loss_scale=1 / 8, skipped=3)


def test_loss_scale_is_not_hopeless_where_only_the_last_epoch_overflowed() -> None:
    recipe = make(0, steps=6, epoch=3).recipe
    trained, never = LossScale(), LossScale()
    for scale, first in ((trained, 2), (never, 3)):
        scale.end_epoch(first, recipe)
        assert not scale.hopeless
        scale.end_epoch(3, recipe)
    assert (trained.hopeless, never.hopeless) == (False, True)


def test_base_scale_is_the_tokens_only_where_half_precision_needs_it() -> None:
    assert [base_scale(n, "fp16") for n in (1, 100, 128, 129)] == [1, 128, 128, 256]
    assert all(base_scale(192, precision) == 1.0 for precision in ("fp32", "tf32", "bf16"))


def test_loss_scales_are_where_kernels_read_them() -> None:
    each = [LossScale(0.5), LossScale(), LossScale()]
    scales, recipe = LossScales(each, "fp16", CPU), make(0, steps=400, epoch=10).recipe
    place = scales.scale.data_ptr(), scales.inverse.data_ptr()
    scales.count(torch.tensor([1.0, math.inf]), slice(1, 3))
    scales.count(torch.tensor([math.nan]), slice(2, 3))
    scales.end_epoch(each, recipe)
    assert scales.scale.tolist() == [0.5, 1.0, 0.25]
    assert scales.inverse.tolist() == [2.0, 1.0, 4.0]
    assert (scales.scale.data_ptr(), scales.inverse.data_ptr()) == place
    assert [scale.skipped for scale in each] == [0, 0, 2]
    scales.end_epoch(each, recipe)
    assert [scale.skipped for scale in each] == [0, 0, 2], "counted once"


# ---- in training


def test_overflow_of_half_precision_costs_one_step_of_one_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = [half_run(seed, steps=8) for seed in (0, 1)]
    usual, gradient, steps = train(runs, device="cpu"), Modules.gradient, []

    def spoiled(self: Modules, *given: Any) -> Any:
        out = gradient(self, *given)
        steps.append(1)
        if len(steps) == 3:
            out[0, 5] = math.inf
        return out

    monkeypatch.setattr(Modules, "gradient", spoiled)
    once = train(runs, device="cpu")
    assert [row["skipped"] for row in usual] == [0, 0]
    assert [row["skipped"] for row in once] == [1, 0]
    assert once[0]["status"] == "done"
    assert once[0]["held_out"] != usual[0]["held_out"]
    assert math.isfinite(once[0]["held_out"])
    assert (once[1]["curve"], once[1]["held_out"]) == (usual[1]["curve"], usual[1]["held_out"])


def test_loss_scale_backs_off_until_gradients_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "load", lambda folder, run: tiny_before_the_last_norm(run))
    (row,) = train([half_run(lr=1e-7)], device="cpu")
    assert row["status"] == "done"
    assert 4 <= row["skipped"] <= 8, "the first epoch or two, not all five"


def test_loss_scale_stays_with_its_run_when_another_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One run diverges and is dropped; the other, whose gradients overflow unless they are scaled
    down, resumes with its own scale."""
    kept = half_run(lr=1e-7)
    wild = dataclasses.replace(
        kept, recipe=dataclasses.replace(kept.recipe, lr=1e30, schedule="constant")
    )

    def load(folder: Any, run: Run) -> State:
        return begin(run) if run == wild else scaled(tiny_before_the_last_norm(run), SMALLEST)

    monkeypatch.setattr(checkpoint, "load", load)
    rows = train([wild, kept], device="cpu")
    assert [row["status"] for row in rows] == ["diverged", "done"]
    assert rows[1]["skipped"] == 0


def test_loss_scale_changes_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    run, rows = half_run(), []
    for loss_scale in (1.0, 0.25):
        monkeypatch.setattr(
            checkpoint, "load", lambda folder, run, s=loss_scale: scaled(after_overflows(run), s)
        )
        rows += train([run], device="cpu")
    assert rows[1]["curve"] == pytest.approx(rows[0]["curve"], rel=1e-3)
    assert rows[0]["curve"][0] - rows[0]["curve"][-1] > 0.05 * rows[0]["curve"][0], "it learns"


# ---- on disk


def test_loss_scale_resumes_from_a_checkpoint_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, load = half_run(lr=1e-7, epoch=2), checkpoint.load
    monkeypatch.setattr(
        checkpoint, "begin", lambda run, parent=None: tiny_before_the_last_norm(run)
    )
    (whole,) = train([run], device="cpu")

    class Killed(Exception):
        pass

    def kill(steps: int) -> None:
        if steps > 0 and load(tmp_path, run).epoch == 6:
            raise Killed

    with pytest.raises(Killed):
        train([run], device="cpu", folder=tmp_path, checkpoint_every=0, advance=kill)
    assert load(tmp_path, run).scale.loss_scale < 1
    (again,) = train([run], device="cpu", folder=tmp_path)
    assert again["resumed"] == 1
    assert 0 < whole["skipped"] < 10
    assert bits(again) == bits(whole)


def three_epochs() -> State:
    state = begin(make(0, steps=400, epoch=10))
    state.epoch, state.curve = 3, [1.0, 0.9, 0.8]
    for overflows in (2, 0, 0):
        state.scale.end_epoch(overflows, state.run.recipe)
    return state


def test_checkpoint_holds_the_loss_scale_under_the_names_of_its_format(tmp_path: Path) -> None:
    state = three_epochs()
    checkpoint.save(tmp_path, state)
    assert checkpoint.load(tmp_path, state.run).scale == LossScale(0.25, 2, 2)
    with safe_open(checkpoint.path_of(tmp_path, state.run), "pt") as f:
        about = json.loads(f.metadata()["state"])
    assert (about["shrink"], about["clean"], about["skipped"]) == (0.25, 2, 2)
    names = {"epoch", "curve", "held_out_curve", "seconds", "resumed", "skipped", "shrink", "clean"}
    assert set(about) == names


def test_checkpoint_from_before_the_loss_scale_is_read(tmp_path: Path) -> None:
    state = three_epochs()
    checkpoint.save(tmp_path, state)
    path = checkpoint.path_of(tmp_path, state.run)
    with safe_open(path, "pt") as f:
        header = f.metadata()
    about = json.loads(header["state"])
    del about["shrink"], about["clean"], header["digest"]  # which came later, too
    save_file(load_file(path), path, {**header, "state": json.dumps(about)})
    assert checkpoint.load(tmp_path, state.run).scale == LossScale(1.0, 0, 2)
