"""Decoders trained on `Regression`: alone and in ensembles, their profiles, every precision."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from support.prompts import loop
from support.small_runs import bits

from headwise.experiments.rank_paper import regression
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.model.transformer import build
from headwise.seeds import derive
from headwise.tasks import Farthest, Regression
from headwise.training.checkpoint import begin
from headwise.training.data import HELD_OUT_BATCH, HELD_OUT_SEED
from headwise.training.engine import train
from headwise.training.ensemble import Ensemble, most_models
from headwise.training.run import ADDED, Recipe, Run

CPU = torch.device("cpu")


def together(runs: list[Run], **options: Any) -> list[dict[str, Any]]:
    return train(runs, device="cpu", advance=lambda _: None, **options)


RECIPE = Recipe(
    steps=12, epoch=4, batch=16, held_out=300, evals=2, init="normal", lr=0.003, beta2=0.999
)
EVEN = Regression(dim=3, points=8, curriculum=3, first_dim=1, first_points=4)


def decoders(task: Regression, heads: tuple[int, ...], **recipe: Any) -> list[Run]:
    return [
        Run(regression.decoder(16, 2, h, task), task, dataclasses.replace(RECIPE, **recipe), seed)
        for h in heads
        for seed in range(2)
    ]


def test_ensemble_of_head_counts_trains_each_as_alone_bit_for_bit():
    runs = [*decoders(EVEN, (1, 2, 4, 16)), *decoders(EVEN, (8,), protocol="replay", lr=0.01)]
    rows = together(runs)
    assert {row["models"] for row in rows} == {len(runs)}, "they were not one ensemble"
    assert [bits(row) for row in rows] == [bits(together([run])[0]) for run in runs]
    assert len({row["held_out"] for row in rows}) == len(runs)


@pytest.mark.parametrize(
    "task", [Regression(3, 7), Regression(1, 8), Regression(5, 3, curriculum=5)], ids=str
)
def test_ensemble_of_prime_sizes_trains_each_as_alone_bit_for_bit(task):
    runs = decoders(task, (1, 4), steps=4, held_out=128)
    assert [bits(row) for row in together(runs)] == [bits(together([run])[0]) for run in runs]


def test_map_from_one_number_joins_no_ensemble_on_a_cpu():
    assert most_models(decoders(Regression(3, 8), (2,))[0], CPU) > 1
    assert most_models(decoders(Regression(1, 8), (2,))[0], CPU) == 1  # a matrix of one column


def test_profile_of_a_row_is_the_error_of_each_query_on_the_held_out_prompts(tmp_path):
    """From the kept weights, one model and one query at a time; and its mean is the held-out
    error."""
    runs = decoders(EVEN, (1, 4))
    rows = together(runs, folder=tmp_path, keep_weights=True)
    from safetensors.torch import load_file

    for run, row in zip(runs, rows, strict=True):
        model = build(run.shape)
        model.load_state_dict(load_file(tmp_path / run.id / "weights.safetensors"))
        batches = []
        for batch in range(3):  # 300 prompts, rounded up
            generator = torch.Generator().manual_seed(derive(HELD_OUT_SEED, "held out", batch))
            x, target = run.task.sample(generator, HELD_OUT_BATCH)
            with torch.no_grad():
                batches.append(loop(model(x)[0].double().numpy(), target.double().numpy()))
        assert row["held_out_profile"] == pytest.approx(np.mean(batches, 0), rel=1e-4)
        assert np.mean(row["held_out_profile"]) == pytest.approx(row["held_out"], rel=1e-6)
        assert row["zero_error"] == 3.0
        assert row["held_out_profile"][0] > 1.0, "without a pair nobody knows the answer"


def test_profile_exists_only_for_tasks_that_tell_their_queries_apart():
    run = Run(
        paper_shape(12, 1, 4, ffn_dim=16),
        Farthest(12, 4),
        Recipe(steps=2, epoch=2, batch=4, held_out=16),
    )
    assert Ensemble([begin(run)], CPU).evaluate()[1] == {}
    (row,) = together([run])
    assert {key for key in row if key.startswith("held_out")} == {
        "held_out",
        "held_out_sequences",
        "held_out_se",
        "held_out_curve",
    }
    assert not set(ADDED) & set(row)


def test_run_that_diverges_has_no_profile_and_leaves_the_others_theirs():
    sane = decoders(EVEN, (1, 4))
    wild = decoders(EVEN, (2,), lr=1e6, schedule="constant")[:1]
    rows = together([*sane[:2], *wild, *sane[2:]])
    lost = rows.pop(2)
    assert lost["status"] == "diverged"
    assert lost["models"] == 5, "it was not in one ensemble with the others"
    assert "held_out_profile" not in lost
    assert [bits(row) for row in rows] == [bits(row) for row in together(sane)]


def test_small_model_learns_from_its_prompt():
    """One dimension: y/x of any pair is the answer. After training the last query errs far less
    than the first."""
    task = Regression(1, 4)
    run = Run(
        regression.decoder(16, 2, 2, task),
        task,
        Recipe(steps=400, epoch=100, batch=64, lr=0.01, held_out=512, evals=1),
    )
    (row,) = together([run])
    assert row["held_out_profile"][0] > 0.8
    assert row["held_out_profile"][-1] < 0.4, row["held_out_profile"]


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_precisions_other_than_fp32_train(precision):
    (run,) = decoders(EVEN, (2,), precision=precision)[:1]
    (exact,) = decoders(EVEN, (2,))[:1]
    assert together([run])[0]["held_out"] == pytest.approx(
        together([exact])[0]["held_out"], rel=0.03
    )
