"""Schedules against their formulas, and the optimiser of an ensemble against torch's own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.small_runs import CPU, alone, bits, make, together

from headwise.model.init import initialise
from headwise.model.transformer import build
from headwise.seeds import derive
from headwise.training.data import block_steps, draw_block
from headwise.training.run import SCHEDULES, Recipe, Run

# ---- schedules


def by_epoch(recipe: Recipe) -> np.ndarray:
    rates = recipe.rates().reshape(recipe.epochs, recipe.epoch)
    assert (rates == rates[:, :1]).all(), "the rate changes within an epoch"
    return rates[:, 0]


def test_published_schedule_has_the_published_values() -> None:
    rates = by_epoch(Recipe(steps=100_000, epoch=100, lr=0.01, schedule="published"))
    assert rates[0] == 0
    assert rates[1] == pytest.approx(2.041e-4, rel=5e-4)
    assert rates[500] == pytest.approx(5.413e-3, rel=5e-4)
    assert rates[999] == pytest.approx(2.7e-8, rel=2e-2)
    assert rates.argmax() == 49
    assert rates[49] == rates[50] == 0.01
    assert (np.diff(rates[:50]) > 0).all()
    assert (np.diff(rates[50:]) < 0).all()


def test_published_warm_up_is_a_twentieth_of_the_epochs() -> None:
    rates = by_epoch(Recipe(steps=200_000, epoch=100, lr=0.005, schedule="published"))
    assert rates.argmax() == 99
    assert rates[99] == rates[100] == 0.005
    assert rates[1] == pytest.approx(0.005 / 99)
    assert (
        Recipe(steps=70, epoch=1, schedule="published").rates().argmax() == 2
    )  # three epochs, of 3.5


def test_published_schedule_warms_up_longer_when_asked_to() -> None:
    rates = by_epoch(Recipe(steps=30_000, epoch=100, lr=0.01, schedule="published", warmup=0.17))
    assert rates.argmax() == 50
    assert rates[:51] == pytest.approx(0.01 * np.arange(51) / 50)


def test_cosine_and_constant_schedules() -> None:
    rates = Recipe(steps=200, epoch=100, lr=0.3, warmup=0.1).rates()
    assert rates[:20] == pytest.approx(0.3 * np.arange(1, 21) / 20)
    assert rates[20] == 0.3
    assert rates[110] == pytest.approx(0.15)  # half-way down
    assert 0 < rates[-1] < 1e-4
    assert Recipe(steps=200, epoch=100, lr=0.3, warmup=0.0).rates()[0] == 0.3
    assert (Recipe(steps=7, epoch=1, lr=0.3, schedule="constant").rates() == 0.3).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("steps", "epoch"), [(1, 1), (2, 1), (5, 5), (19, 1), (20, 1), (21, 1)])
@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0])
def test_rates_are_sane_at_every_length(
    schedule: str, steps: int, epoch: int, warmup: float
) -> None:
    rates = Recipe(steps=steps, epoch=epoch, lr=0.7, schedule=schedule, warmup=warmup).rates()
    assert rates.shape == (steps,)
    assert np.isfinite(rates).all()
    assert (rates >= 0).all()
    assert (rates <= 0.7).all()


# ---- the optimiser


def torch_adamw(run: Run) -> tuple[torch.nn.Module, list[float]]:
    """The same run with torch's optimiser, one model, no model axis."""
    r, model = run.recipe, build(run.shape)
    initialise(model, r.init, torch.Generator().manual_seed(derive(run.seed, "init")))
    optimiser = torch.optim.AdamW(
        model.parameters(),
        betas=(r.beta1, r.beta2),
        eps=r.eps,
        weight_decay=r.weight_decay,
        foreach=False,
    )
    losses, per_block = [], block_steps(run.task, r)
    for step, rate in enumerate(r.rates()):
        x, target = draw_block(run, step // per_block, CPU)
        optimiser.param_groups[0]["lr"] = float(rate)
        optimiser.zero_grad()
        loss = run.task.loss(model(x[step % per_block])[0], target[step % per_block])
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return model, [sum(losses[i : i + r.epoch]) / r.epoch for i in range(0, r.steps, r.epoch)]


def test_ensemble_adamw_is_torch_adamw_one_model_at_a_time(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [
        {"lr": 0.01},
        {"lr": 0.02, "schedule": "constant", "weight_decay": 0.3},
        {"lr": 0.005, "schedule": "published", "weight_decay": 1.0, "protocol": "replay"},
        {"lr": 0.01, "init": "published"},
    ]
    runs = [make(i, depth=2, rank=4, steps=30, **s) for i, s in enumerate(settings)]
    rows = together(runs, folder=tmp_path, keep_weights=True)
    assert {row["models"] for row in rows} == {len(runs)}
    for run, row in zip(runs, rows, strict=True):
        model, curve = torch_adamw(run)
        assert row["curve"] == pytest.approx(curve, rel=1e-5)
        ours = load_file(tmp_path / run.id / "weights.safetensors")
        theirs = model.state_dict()
        assert set(ours) == set(theirs)
        for name, weight in theirs.items():
            compared = torch.ones_like(weight, dtype=torch.bool)
            if name.endswith("qkv.bias"):
                compared[12:24] = (
                    # softmax does not see the keys' bias: its gradient is rounding, which Adam
                    # scales up
                    False
                )
            torch.testing.assert_close(ours[name][compared], weight[compared], rtol=1e-4, atol=2e-5)


def test_weight_decay_is_seen_by_its_run_alone() -> None:
    plain, decayed = make(0), make(0, weight_decay=0.5)
    rows = together([plain, decayed])
    assert rows[0]["held_out"] != rows[1]["held_out"]
    assert list(map(bits, rows)) == list(map(bits, alone([plain, decayed])))
