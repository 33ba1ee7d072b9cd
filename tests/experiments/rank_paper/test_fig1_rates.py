"""The learning rates of the rank paper's main figure: which are tried, and which is chosen."""

import dataclasses
from typing import Any

import pytest
from support.experiment_rows import a_row
from support.fig1_rows import FIG1, rated

from headwise.errors import UsageError
from headwise.experiments.rank_paper import fig1, fig1_figures
from headwise.experiments.settings import settings_of


def test_rate_belongs_to_a_depth_not_to_a_place() -> None:
    settings = settings_of(FIG1, "quick", ["depths=2,3", "lr=0.3,0.1"])
    assert {(run.shape.depth, run.recipe.lr) for run in fig1.runs(settings)} == {(2, 0.1), (3, 0.1)}
    assert {run.recipe.lr for run in fig1.runs(settings_of(FIG1, "quick", ["depths=1"]))} == {
        fig1.PRESETS["quick"].lr[0]
    }


def test_rates_are_each_depths_own() -> None:
    settings = settings_of(FIG1, "quick", ["depths=1,2", "lr=0.3,0.1"])
    assert {(run.shape.depth, run.recipe.lr) for run in fig1.runs(settings)} == {(1, 0.3), (2, 0.1)}
    settings = settings_of(FIG1, "quick", ["depths=1,2", "lr=0.3"])
    assert {(run.shape.depth, run.recipe.lr) for run in fig1.runs(settings)} == {(1, 0.3), (2, 0.3)}


def test_points_are_tried_at_the_same_multiples_of_their_depths_rate_on_one_seed() -> None:
    settings = settings_of(FIG1, "quick", ["depths=1,2", "lr=0.05,0.01", "rates=1,0.3,3"], seeds=2)
    runs = fig1.runs(settings)
    assert {(run.shape.depth, run.recipe.lr) for run in runs} == {
        (1, 0.05),
        (1, 0.015),
        (1, 0.15),
        (2, 0.01),
        (2, 0.003),
        (2, 0.03),
    }
    assert {run.seed for run in runs} == {0}
    assert (
        len({run.id for run in runs})
        == len(runs)
        == 3 * len(fig1.runs(dataclasses.replace(settings, rates=(1.0,), seeds=1)))
    )


def test_best_rate_of_the_first_seed_runs_with_others() -> None:
    settings = settings_of(
        FIG1,
        "paper",
        ["depths=1", "widths=8", "ranks=64,32", "protocols=replay,stream", "rates=1,0.3"],
        seeds=2,
    )
    best = {
        ("replay", 64): 0.003,
        ("replay", 32): 0.01,
        ("stream", 64): 0.01,
        ("stream", 32): 0.003,
    }
    rows = [
        a_row(run, 0.1 if run.recipe.lr == best[run.recipe.protocol, run.shape.head_dim] else 0.2)
        for run in fig1.runs(settings)
    ]
    later = fig1.then(settings, rows)
    assert {
        (run.recipe.protocol, run.shape.head_dim, run.recipe.lr, run.seed) for run in later
    } == {(*point, lr, seed) for point, lr in best.items() for seed in (1, 2)}
    assert len(later) == 8
    one = dataclasses.replace(settings, rates=(1.0,))
    assert fig1.then(one, [a_row(run, 0.1) for run in fig1.runs(one)]) == []


def test_rate_that_is_typed_is_the_rate_that_runs() -> None:
    """Ids of runs made before there were multiples must stay."""
    settings = settings_of(FIG1, "quick", ["lr=0.0123456789"])
    assert {run.recipe.lr for run in fig1.runs(settings)} == {0.0123456789}


def chosen(point: fig1.Point) -> tuple[Any, ...]:
    return tuple(
        getattr(point, key) for key in ("rank", "lr", "rates", "edge", "tuning", "n", "held_out")
    )


@pytest.mark.parametrize("protocol", ["stream", "replay"])
def test_rates_are_chosen_on_the_first_seed_and_never_pooled(protocol: str) -> None:
    at = {
        (1, 32, 0.01, 0): 0.5,
        (1, 32, 0.003, 0): 0.4,
        (1, 32, 0.001, 0): 0.6,
        (1, 32, 0.003, 1): 0.42,
        (1, 32, 0.003, 2): 0.44,
    }
    others = {(1, 32, 0.01, 1): 0.1, (1, 64, 0.01, 0): 0.02, (1, 64, 0.01, 1): 0.04}
    half, full = rated(at | others, protocol)
    assert chosen(half) == (32, 0.003, 3, False, False, 2, pytest.approx(0.43)), (
        "0.01 does better on another seed, which is not asked"
    )
    assert chosen(full) == (64, 0.01, 1, False, False, 2, pytest.approx(0.03)), (
        "one rate: every seed counts"
    )


@pytest.mark.parametrize(("best", "edge"), [(0.01, True), (0.003, False), (0.001, True)])
def test_best_rate_at_the_edge_of_its_grid_is_reported(best: float, edge: bool) -> None:
    points = rated(
        {(1, 32, lr, 0): 0.4 if lr == best else 0.5 for lr in (0.01, 0.003, 0.001)}
        | {(1, 64, 0.01, 0): 0.02}
    )
    assert chosen(points[0]) == (32, best, 3, edge, True, 1, 0.4)
    note = (
        "1 of 2 points were tried at several learning rates on seed 0, and the best one there is "
        "evaluated on other seeds"
    )
    assert fig1.headline(points) == [
        (
            "1 layer, budget d^2.5, stream: full rank 0.0200 (one seed), half rank 0.4000 "
            "(tuning), 20.0 times as large, tuned over 1 rate and 3"
        ),
        f"{note}; 1 have no others and show that one",
        *(
            [
                (
                    "the best rate is the smallest or the largest tried in 1 of 1 points with "
                    "three "
                    "rates or more: a wider range may change them"
                )
            ]
            * edge
        ),
    ]
    two = rated({(1, 32, 0.01, 0): 0.4, (1, 32, 0.003, 0): 0.5})
    assert not two[0].edge, "of two one is always the last"


def test_rate_that_diverges_is_not_the_best() -> None:
    for protocol in ("stream", "replay"):
        (point,) = rated(
            {(1, 32, 0.01, 0): None, (1, 32, 0.003, 0): 0.6, (1, 32, 0.003, 1): 0.62}, protocol
        )
        assert chosen(point) == (32, 0.003, 2, False, False, 1, 0.62)


def test_rates_need_the_seed_by_which_one_is_chosen() -> None:
    with pytest.raises(
        UsageError, match="several rates need one of seed 0, by which the rate is chosen; got none"
    ):
        rated({(1, 32, 0.01, 1): 0.5, (1, 32, 0.003, 1): 0.6})


def test_published_values_stand_beside_the_published_rate_alone() -> None:
    assert [rated({(1, 32, lr, 0): 0.5}, "replay")[0].published for lr in (0.01, 0.003)] == [
        0.4306,
        None,
    ]


def test_figure_says_which_rate_a_point_has() -> None:
    (panel,) = fig1_figures.figure(
        rated({(1, 32, 0.01, 0): 0.5, (1, 32, 0.003, 0): 0.4, (1, 64, 0.01, 0): 0.02})
    ).panels
    (held, *_) = panel.lines
    assert held.y == (0.4, 0.02)
    assert [text.rpartition(", ")[2] for text in held.text] == ["rate 0.003 of 2", "n=1"]


def test_rates_by_depth_are_not_taken_for_rates_to_try() -> None:
    with pytest.raises(
        UsageError,
        match=(
            r"^lr has no effect here: it is a rate for one layer, one for two and so on, 2 of "
            r"them for depths up to 1; "
        ),
    ):
        settings_of(FIG1, "quick", ["depths=1", "lr=0.01,0.02"])
    assert settings_of(FIG1, "quick", ["depths=1"]).lr == fig1.PRESETS["quick"].lr, (
        "the preset's own are no mistake"
    )
    assert settings_of(FIG1, "quick", ["depths=2", "lr=0.01,0.02"]).lr == (0.01, 0.02)
