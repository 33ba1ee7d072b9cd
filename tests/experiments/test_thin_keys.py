"""`thin_keys`: what is varied and held, what rates are chosen on, when a rank is enough."""

import dataclasses
import math
from typing import Any

import pytest
from support.experiment_rows import a_row

from headwise.errors import UsageError
from headwise.experiments import thin_keys
from headwise.experiments.settings import settings_of
from headwise.experiments.thin_keys import EXPERIMENT, PRESETS, Point, law_ranks
from headwise.show.figure import LineFigure
from headwise.training.run import Run

TINY = dataclasses.replace(PRESETS["quick"], candidates=(8, 32), ranks=(1, 2, 16), seeds=3)
COSTS = {1: 0.5, 2: 0.0, 3: 0.001, 4: 0.02, 5: 0.2, 16: 0.0}  # by rank, over an error of 0.1


def error_of(run: Run) -> float:
    """Larger at every rate but the middle one, and a little more with each seed."""
    grid = TINY.lookup_lrs if run.task.vocab else TINY.farthest_lrs
    off = 0.0 if run.recipe.lr == grid[1] else 0.3
    return 0.1 + COSTS[run.shape.head_dim] + off + run.seed / 1000


def all_rows(settings: thin_keys.Settings = TINY, error: Any = error_of) -> list[dict[str, Any]]:
    first = thin_keys.runs(settings)
    rows = [a_row(run, error(run)) for run in first]
    return rows + [a_row(run, error(run)) for run in thin_keys.then(settings, rows)]


def test_only_the_rank_of_queries_and_keys_differs_within_a_line() -> None:
    for name in ("quick", "paper"):
        s = PRESETS[name]
        made = thin_keys.runs(s)
        for task in {run.task for run in made}:
            of_task = [run for run in made if run.task == task]
            assert {run.shape.v_head_dim for run in of_task} == {s.dim}
            assert {run.shape.num_heads for run in of_task} == {1}
            assert len({run.shape.replace(head_dim=1) for run in of_task}) == 1
            assert len({dataclasses.replace(run.recipe, lr=1.0) for run in of_task}) == 1
            count = task.keys if task.vocab else task.points
            ranks = {run.shape.head_dim for run in of_task}
            assert ranks == {*s.ranks, *law_ranks(count, s.dim).values()}
        tokens = {run.recipe.batch * getattr(run.task, "points", 0) for run in made} - {0}
        assert len(tokens) == 1, "a step of farthest has as many points for every N"


def test_rates_are_chosen_on_a_seed_and_a_draw_that_are_not_counted() -> None:
    first = thin_keys.runs(TINY)
    assert {(run.seed, run.recipe.evaluated_on) for run in first} == {(0, "validation")}
    rows = [a_row(run, error_of(run)) for run in first]
    counted = thin_keys.then(TINY, rows)
    assert {run.seed for run in counted} == {1, 2, 3}
    assert {run.recipe.evaluated_on for run in counted} == {""}
    assert len(counted) * len(TINY.lookup_lrs) == 3 * len(first)
    for run in counted:
        grid = TINY.lookup_lrs if run.task.vocab else TINY.farthest_lrs
        assert run.recipe.lr == grid[1]


def test_best_rate_at_the_end_of_its_grid_is_followed_and_said() -> None:
    def falling(run: Run) -> float:
        return 0.5 - run.recipe.lr / 10 + run.seed / 1000

    settings = dataclasses.replace(TINY, candidates=(8,), ranks=(16,), tasks=("farthest",))
    first = thin_keys.runs(settings)
    rows = [a_row(run, falling(run)) for run in first]
    more = thin_keys.then(settings, rows)
    assert {(run.seed, run.recipe.lr) for run in more} == {(0, 0.9)}
    assert {run.recipe.evaluated_on for run in more} == {"validation"}
    rows += [a_row(run, falling(run)) for run in more]
    rows += [a_row(run, falling(run)) for run in thin_keys.then(settings, rows)]
    points = EXPERIMENT.summary(rows)
    assert all(p.edge and p.cell("lr") == "0.9 (edge)" for p in points)
    assert "at the edge of their rates" in EXPERIMENT.answered(points)
    assert "the best rate is the smallest or the largest tried" in EXPERIMENT.headline(points)[-1]


def by_place(rows: list[dict[str, Any]]) -> dict[tuple[str, int, int], Point]:
    return {(p.task, p.candidates, p.rank): p for p in EXPERIMENT.summary(rows)}


def test_rank_is_enough_where_it_loses_at_most_a_tenth_of_the_gain() -> None:
    at = by_place(all_rows())
    for task, zero in (("lookup", math.log(4)), ("farthest", 1.0)):
        gain = zero - 0.102
        assert at[task, 8, 16].gain == pytest.approx(gain)
        assert at[task, 8, 16].enough is None, "full rank is what others are compared with"
        for n, rank, enough in ((8, 1, "no"), (8, 2, "yes"), (8, 3, "yes"), (32, 5, "no")):
            point = at[task, n, rank]
            assert point.enough == enough
            assert point.lost == pytest.approx(COSTS[rank] / gain, abs=1e-9)
            assert point.visible == pytest.approx(0.00227, abs=1e-4)
            assert point.law == {3: "log2 N", 5: "log2 N"}.get(rank)
    lines = EXPERIMENT.headline(list(at.values()))
    assert lines[0].startswith("farthest, N=8: full rank 0.1020 ± 0.0025 (3 seeds) where zero")
    assert "enough from rank 2 on; rank 3 (log2 N) costs none found (+0.0010 ± 0.0023)" in lines[0]
    assert "enough from rank 16 on; rank 4 (d/4) costs +0.0200 ± 0.0023, enough: yes" in lines[1]
    assert lines[-1].startswith("the smallest visible difference from full rank")
    said = EXPERIMENT.answered(list(at.values()))
    assert "comparing whole vectors takes ranks 2, 16 of 16 at N = 8, 32; selecting one" in said
    assert said.endswith("(3 seeds per point)")


def test_rank_is_open_where_seeds_cannot_say() -> None:
    def spread(run: Run) -> float:
        return error_of(run) + (0.4 if run.seed == 3 and run.shape.head_dim == 2 else 0.0)

    assert by_place(all_rows(error=spread))["lookup", 8, 2].enough == "open"


def test_nothing_is_claimed_where_full_rank_learned_nothing() -> None:
    points = EXPERIMENT.summary(all_rows(error=lambda run: 1.0 + run.seed / 1e4))
    failed = [p for p in points if p.task == "farthest"]
    assert {p.enough for p in failed} == {None}
    assert EXPERIMENT.answered(failed) == ""
    assert all("so this compares nothing" in line for line in EXPERIMENT.headline(failed))


def test_figure_has_a_panel_per_task_a_line_per_count_and_the_laws_as_marks() -> None:
    points = EXPERIMENT.summary(all_rows())
    figure = EXPERIMENT.figure(points)
    assert isinstance(figure, LineFigure)
    assert [panel.title.partition(" ")[0] for panel in figure.panels] == ["farthest", "lookup"]
    for panel in figure.panels:
        at = {line.label: line for line in panel.lines}
        assert at["N=8"].x == (1, 2, 3, 4, 16)
        assert at["enough by log2 N"].x == (3, 5)
        assert at["enough by d/4"].x == (4, 4)
        assert at["enough by d"].x == (16, 16)
        assert at["enough by log2 N"].y[0] == at["N=8"].y[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["tasks=recall"], "unknown task 'recall'"),
        (["candidates=1"], "candidates must be at least 2, got 1"),
        (["ranks=32"], "ranks must be at most dim, which is at least 4, got rank 32 and dim 16"),
        (["protocols=replay"], "protocols must be stream here"),
        (["init=orthogonal"], "init has no effect here: every task has its own"),
        (["tasks=farthest", "values=3"], "values has no effect here: it goes with lookup"),
        (["tasks=lookup", "farthest_lrs=1"], "farthest_lrs has no effect here: it goes with far"),
    ],
)
def test_mistakes_in_settings_are_one_line(changes: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings_of(EXPERIMENT, "quick", changes)
