"""The experiment on starts that condition attention better: its runs, settings and command."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.experiment_rows import rows_with_losses
from support.removable_runs import QUICK, TWO, best_rate, tuned
from support.tolerance import seeded

from headwise.errors import UsageError
from headwise.experiments import find
from headwise.experiments.leaner_paper import removable
from headwise.experiments.settings import CHOICES, settings_of
from headwise.model.transformer import build
from headwise.seeds import derive
from headwise.store import Store
from headwise.theory.conditioning import attention_spectra
from headwise.training.checkpoint import begin
from headwise.training.engine import train
from headwise.training.ensemble import Ensemble

CONDITIONED = ("spectral", "orthogonal")


# ---- what is run


PRESETS = [
    dataclasses.replace(preset, tasks=(task,))
    for preset in removable.PRESETS.values()
    for task in CHOICES
]


@pytest.mark.parametrize(
    "settings", [TWO, *PRESETS], ids=lambda s: f"{'+'.join(s.tasks)}, width {s.dim}"
)
def test_runs_of_a_depth_differ_in_start_and_rate_alone(settings):
    runs = removable.runs(settings)
    assert (
        len({run.id for run in runs})
        == len(runs)
        == len(settings.tasks) * len(settings.depths) * len(settings.starts) * len(settings.lrs)
    )
    by_task = {
        task: [run for run in runs if run.task == task] for task in {run.task for run in runs}
    }
    assert len(by_task) == len(settings.tasks)
    for same_task in by_task.values():
        shapes = {run.shape for run in same_task}
        assert sorted(s.depth for s in shapes) == sorted(settings.depths), "one shape a depth"
        assert {s.replace(depth=1) for s in shapes} == {next(iter(shapes)).replace(depth=1)}, (
            "which differ in depth alone"
        )
        for shape in shapes:
            here = [run.recipe for run in same_task if run.shape == shape]
            assert {(r.init, r.lr) for r in here} == {
                (init, lr) for init in settings.starts for lr in settings.lrs
            }
            assert len({dataclasses.replace(r, init="normal", lr=1.0) for r in here}) == 1
            assert (shape.num_heads, shape.head_dim, shape.dim) == (
                settings.heads,
                settings.dim // settings.heads,
                settings.dim,
            )
    assert {(run.seed, run.recipe.protocol) for run in runs} == {(0, "stream")}


def test_starts_are_each_tuned_for_themselves():
    first = removable.runs(TWO)
    later = removable.then(TWO, rows_with_losses(first, tuned))
    assert len({run.id for run in later}) == len(later) == 2 * 3 * 3 * TWO.seeds
    assert {run.seed for run in later} == {1, 2, 3}
    assert all(run.recipe.lr == best_rate(run) for run in later)
    tried = {(run.task, run.shape, run.recipe.init) for run in first}
    assert {(run.task, run.shape, run.recipe.init) for run in later} == tried
    assert len({(best_rate(run), run.recipe.init) for run in first}) == 9, "planted apart"


# ---- bad settings


BAD = [
    (["tasks=chess"], "unknown task 'chess'; choices: "),
    (["starts=normal,spectrl"], "unknown start 'spectrl'; did you mean spectral?"),
    (["starts=normal,normal"], "starts must differ from each other, got normal, normal"),
    (["starts="], "starts must not be empty"),
    (["heads=3"], "heads must divide dim, got heads 3, dim 32"),
    (["depths=2,1,2"], "depths must differ from each other, got 2, 1, 2"),
    (["depths=2,0"], "depths must be at least 1, got 0"),
    (["depths="], "depths must not be empty"),
    (["source=a.txt"], "source goes with the tasks text, images, sentences, got farthest"),
    (["heads=0"], "heads must"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_settings_die_in_one_line(changes, message):
    with pytest.raises(UsageError) as caught:
        settings_of(find("removable"), "quick", changes)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


# ---- the real thing


TINY = dataclasses.replace(
    QUICK,
    dim=16,
    lrs=(0.01,),
    seeds=2,
    steps=2,
    epoch=2,
    batch=16,
    held_out=128,
    points=5,
    ffn_dim=24,
)


def test_rows_carry_the_conditioning_of_the_start_that_was_trained(tmp_path):
    runs = [dataclasses.replace(run, seed=1) for run in removable.runs(TINY)]
    rows = train(
        runs,
        device="cpu",
        folder=tmp_path,
        keep_weights=False,
        probe=removable.EXPERIMENT.probe,
        advance=lambda n: None,
    )
    kappa = {}
    for run, row in zip(runs, rows, strict=True):
        model = build(run.shape)
        model.load_state_dict(Ensemble([begin(run)], torch.device("cpu")).named_weights(0))
        inputs, _ = run.task.sample(seeded(derive(0, "probe")), 8)
        kappa[run.recipe.init, run.shape.depth] = row["kappa_start"]
        assert row["kappa_start"] == attention_spectra(model, inputs)[-1]["kappa"]
        assert row["kappa_end"] != row["kappa_start"]
    for depth in TINY.depths:
        assert all(kappa[init, depth] < kappa["normal", depth] / 10 for init in CONDITIONED)


def headwise(*words):
    return subprocess.run(
        [sys.executable, "-m", "headwise", *words], capture_output=True, text=True, check=False
    )


def test_command_makes_both_rounds_once_and_the_page(tmp_path: Path):
    words = [
        "run",
        "removable",
        "--task",
        "farthest",
        "--store",
        str(tmp_path / "s"),
        "--workers",
        "1",
        "--seeds",
        "2",
        "--json",
        "--set",
    ]
    words += [
        "steps=4",
        "epoch=2",
        "batch=16",
        "held_out=128",
        "depths=1,2",
        "dim=16",
        "ffn_dim=24",
        "points=5",
    ]
    first = headwise(*words)
    assert first.returncode == 0, first.stderr
    answer = json.loads(first.stdout.splitlines()[-1])
    assert (answer["runs"], answer["made"]) == (2 * 3 * 2 + 2 * 3 * 2, 2 * 3 * 2 + 2 * 3 * 2)
    assert Path(answer["report"]).exists()
    points = answer["points"]
    assert [(p["depth"], p["init"], p["n"]) for p in points] == [
        (d, init, 2) for d in (2, 1) for init in ("normal", "orthogonal", "spectral")
    ]
    assert all((p["cost"] is not None) == (p["depth"] == 1) for p in points)
    assert all(
        (p["gain"] is not None) == (p["depth"] == 1 and p["init"] != "normal") for p in points
    )
    assert "farthest, from 2 to 1 layer the loss changes by: normal (kappa " in first.stdout
    again = json.loads(headwise(*words).stdout.splitlines()[-1])
    assert again["made"] == 0
    assert again["points"] == points
    rows = Store(tmp_path / "s").rows()
    assert {(r["seed"], r.get("kappa_start") is not None) for r in rows} == {
        (0, False),
        (1, True),
        (2, False),
    }, "one seed a cell is probed"
