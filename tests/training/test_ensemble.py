"""Runs of one ensemble do not know of each other: each has the bits that it has alone."""

import dataclasses

import pytest
import torch
from support.mixes import MIXES
from support.small_runs import CPU, SHAPES, alone, bits, make, together

from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.shape import Shape
from headwise.tasks import BiasedNearest, Farthest, Nearest
from headwise.training import ensemble
from headwise.training.checkpoint import begin
from headwise.training.run import Recipe, Run, ensemble_key


def test_runs_that_the_kernels_refuse_do_not_hold_back_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head of rank 128 is too wide for them; the same width cut in two is not, and would be
    in one ensemble with it."""
    monkeypatch.setattr(ensemble, "most_models", lambda run, device: 64)
    shapes = [
        paper_shape(dim=128, depth=1, rank=rank, width=1, ffn_dim=64, points=16)
        for rank in (128, 64, 32)
    ]
    runs = [
        Run(shape, Farthest(128, 16), Recipe(steps=10, epoch=5, batch=64), seed)
        for shape in shapes
        for seed in range(2)
    ]
    assert len({ensemble_key(run) for run in runs}) == 1
    states = [begin(run) for run in runs]
    by_kernels = ensemble.pack(states, torch.device("cuda"))
    assert [sorted(s.run.shape.head_dim for s in group) for group in by_kernels] == [
        [128, 128],
        [32, 32, 64, 64],
    ]
    assert [len(group) for group in ensemble.pack(states, CPU)] == [6]


@pytest.mark.parametrize("mix", MIXES)
def test_ensemble_trains_each_model_as_alone_bit_for_bit(mix: str) -> None:
    runs = MIXES[mix]
    rows = together(runs)
    assert {row["models"] for row in rows} == {len(runs)}, "they were not one ensemble"
    assert [row["id"] for row in rows] == [run.id for run in runs]
    assert list(map(bits, rows)) == list(map(bits, alone(runs)))


@pytest.mark.parametrize("name", SHAPES)
def test_ensemble_of_every_kind_of_shape_is_independent(name: str) -> None:
    recipe = Recipe(steps=8, epoch=4, batch=16, held_out=32, lr=0.003)
    runs = [Run(SHAPES[name], Farthest(16, 7), recipe, seed) for seed in range(3)]
    rows = together(runs)
    assert {row["models"] for row in rows} == {3}, "they were not one ensemble"
    assert list(map(bits, rows)) == list(map(bits, alone(runs)))


@pytest.mark.parametrize("name", SHAPES)
def test_ensemble_of_prime_sizes_is_independent(name: str) -> None:
    """Its matrices end within a cache line, so that a neighbour's product would take another path
    with other bits."""
    shape = Shape.of({**dataclasses.asdict(SHAPES[name]), "dim": 11})
    runs = [
        Run(shape, Farthest(11, 7), Recipe(steps=8, epoch=4, batch=16, held_out=32, lr=0.003), seed)
        for seed in range(3)
    ]
    assert list(map(bits, together(runs))) == list(map(bits, alone(runs)))


def test_ensemble_of_heads_of_one_number_is_independent() -> None:
    shape = Shape(dim=16, depth=1, num_heads=1, head_dim=1, ffn_dim=16)
    runs = [
        Run(shape, Farthest(16, 8), Recipe(steps=8, epoch=4, batch=8, held_out=32), seed)
        for seed in range(3)
    ]
    assert list(map(bits, together(runs))) == list(map(bits, alone(runs)))


@pytest.mark.parametrize(("batch", "points"), [(9, 5), (3, 7), (1, 2), (17, 3)])
def test_ensemble_of_batches_that_fill_no_cache_lines_is_independent(
    batch: int, points: int
) -> None:
    runs = [
        make(seed, rank=rank, batch=batch, points=points) for seed in range(2) for rank in (12, 3)
    ]
    assert batch * points % 16
    assert list(map(bits, together(runs))) == list(map(bits, alone(runs)))


def test_ensemble_on_a_task_with_one_query_token_is_independent() -> None:
    shape = paper_shape(dim=12, rank=4, ffn_dim=11)
    recipe = Recipe(steps=9, epoch=3, batch=16, held_out=32)
    runs = [
        Run(shape, task, recipe, seed)
        for seed in range(2)
        for task in (Nearest(12, 5), BiasedNearest(12, 5, bias=0.5))
    ]
    assert list(map(bits, together(runs))) == list(map(bits, alone(runs)))


def test_runs_that_cannot_share_an_ensemble_do_not() -> None:
    run = make()
    for other in (
        make(depth=2),
        make(width=2),
        make(batch=32),
        make(points=7),
        make(steps=21),
        make(beta1=0.8),
        make(dim=8, rank=8),
    ):
        assert ensemble_key(run) != ensemble_key(other)
    for other in (
        make(1),
        make(rank=2),
        make(lr=1.0),
        make(schedule="constant"),
        make(protocol="replay"),
        make(weight_decay=0.1),
    ):
        assert ensemble_key(run) == ensemble_key(other)
