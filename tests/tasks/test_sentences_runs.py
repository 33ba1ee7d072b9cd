"""Models trained on `Sentences` and on masked text, and the ids of their runs."""

import dataclasses
import json

import pytest
from support.data import forget, refused
from support.sentences import GOOD, HELD, tsv
from support.small_runs import bits

from headwise.experiments.shapes import shape_for
from headwise.tasks import Masked, Sentences
from headwise.training.engine import train
from headwise.training.run import Recipe, Run, ensemble_key

pytestmark = pytest.mark.usefixtures("no_network")


def run_of(task, heads=2, seed=0, **recipe):
    settings = {
        "steps": 20,
        "epoch": 10,
        "batch": 16,
        "held_out": 128,
        "evals": 1,
        "lr": 0.01,
        "init": "normal",
    } | recipe
    return Run(shape_for(task, 16, 1, heads, 16 // heads, 32), task, Recipe(**settings), seed)


def together(runs, **options):
    return train(runs, device="cpu", advance=lambda n: None, **options)


@pytest.mark.parametrize(
    "task", [Sentences(16, level="word", examples=500), Masked(16)], ids=["sentences", "masked"]
)
def test_models_of_several_head_counts_train_as_if_alone(task):
    runs = [run_of(task, heads, seed) for heads in (1, 2, 4) for seed in (0, 1)]
    assert len({ensemble_key(run) for run in runs}) == 1
    rows = together(runs)
    assert {row["models"] for row in rows} == {len(runs)}
    for run, row in zip(runs, rows, strict=True):
        assert bits(together([run])[0]) == bits(row)


def test_small_model_learns_both_tasks():
    """Words by their place; characters by their neighbours, so better than by how often each
    stands."""
    task = Sentences(12, level="word")
    (row,) = together([run_of(task, steps=400, epoch=100)])
    assert row["held_out_accuracy"] > 0.8, row["held_out"]
    masked = Masked(16)
    (row,) = together([run_of(masked, steps=100, epoch=100, lr=0.01)])
    assert row["held_out"] < row["zero_error"] - 0.3


def test_specs_round_trip_and_ids_follow_the_data(tmp_path):
    folder, ids = tsv(tmp_path, GOOD, HELD), []
    for task in (
        Sentences(8, folder),
        Sentences(8, folder, "word"),
        Sentences(8, folder, examples=3),
        Masked(13, share=0.5),
        Masked(13),
    ):
        run = run_of(task)
        spec = json.loads(json.dumps(run.spec()))
        assert Run.of(spec) == run
        assert spec["task"]["digest"] == task.digest
        ids.append(run.id)
        spec["task"]["digest"] = "0" * 12
        assert "expected 000000000000" in refused(Run.of, spec)
    assert len(set(ids)) == len(ids)
    tsv(tmp_path, GOOD, HELD[::-1])
    forget()
    assert run_of(Sentences(8, folder)).id != ids[0]
    assert dataclasses.replace(Masked(13), share=0.15) == Masked(13)
