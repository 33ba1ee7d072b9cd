"""The map: every cell at the budget, tuning that is not counted, paths, verdicts, figures."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.experiment_rows import rows_with_losses

from headwise.device import numerics
from headwise.errors import UsageError
from headwise.experiments import find
from headwise.experiments.leaner_paper import budget_map
from headwise.experiments.leaner_paper.budget_map_shapes import BUDGETS, cost
from headwise.experiments.leaner_paper.budget_map_shapes import cells as cells_of
from headwise.experiments.settings import CHOICES, settings_of
from headwise.experiments.shapes import shape_for
from headwise.model.transformer import build
from headwise.seeds import derive
from headwise.show.figure import to_json
from headwise.show.matplotlib_figure import save
from headwise.show.plotly_figure import plotly_figure
from headwise.store import Store
from headwise.theory.conditioning import attention_spectra
from headwise.training.engine import train

QUICK = budget_map.PRESETS["quick"]
TINY = dataclasses.replace(
    QUICK,
    dim=16,
    heads=(1, 2),
    ranks=(4, 8),
    depths=(1, 2),
    base=(2, 2, 8, 32),
    seeds=2,
    steps=4,
    epoch=2,
    batch=16,
    held_out=128,
    points=4,
)
PRESETS = [
    dataclasses.replace(preset, tasks=(task,))
    for preset in budget_map.PRESETS.values()
    for task in CHOICES
]


def named(settings):
    return f"{settings.tasks[0]}, width {settings.dim}"


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("settings", PRESETS, ids=named)
def test_cells_meet_the_budget_as_nearly_as_whole_numbers_can(settings, budget):
    settings = dataclasses.replace(settings, budget=budget)
    task = settings.task(settings.tasks[0])
    target = cost(shape_for(task, settings.dim, *settings.base), task, budget)
    cells = cells_of(task, settings)
    assert len(cells) >= 12
    assert len(set(cells)) == len(cells)
    for shape in cells:
        off = abs(cost(shape, task, budget) - target)
        assert off <= 0.005 * target
        for other in (shape.ffn_dim - 1, shape.ffn_dim + 1):
            assert off <= abs(cost(shape.replace(ffn_dim=other), task, budget) - target)
        assert shape.ffn_dim >= settings.dim // 4
    assert {(s.num_heads, s.head_dim) for s in cells} <= {
        (h, r) for h in settings.heads for r in settings.ranks
    }
    base = shape_for(task, settings.dim, *settings.base)
    assert base in cells, "the base is one of them, at no cost"


def loss_of(run):
    """Rank helps; the second rate is better for two layers; the tuning seed is far too good."""
    rate = 0.0 if (run.recipe.lr == QUICK.lrs[1]) == (run.shape.depth == 2) else 0.5
    return 4.0 / run.shape.head_dim + rate + (0.01 * run.seed if run.seed else -3.0)


def test_second_round_takes_each_cells_best_rate_and_other_seeds():
    first = budget_map.runs(TINY)
    assert {run.seed for run in first} == {0}
    assert {run.recipe.lr for run in first} == set(TINY.lrs)
    later = budget_map.then(TINY, rows_with_losses(first, loss_of))
    assert len(later) == len(first) // len(TINY.lrs) * TINY.seeds
    assert {run.seed for run in later} == {1, 2}
    assert all((run.recipe.lr == TINY.lrs[1]) == (run.shape.depth == 2) for run in later)
    assert {(run.task, run.shape) for run in later} == {(run.task, run.shape) for run in first}
    more = budget_map.then(dataclasses.replace(TINY, seeds=3), rows_with_losses(first, loss_of))
    assert {run.id for run in later} < {run.id for run in more}


@pytest.mark.parametrize(
    ("peak", "last"), [(0.0001, 0.00027), (0.001, 0.0009), (0.03, 0.03), (0.1, 0.1), (9.0, 0.27)]
)
def test_tuning_continues_where_the_best_rate_is_at_the_edge_of_its_grid(peak, last):
    settings = dataclasses.replace(TINY, lrs=(0.003, 0.01, 0.03), further=2)

    def loss(run):
        return abs(math.log(run.recipe.lr / peak)) + (1.0 if run.seed else 0.0)

    rows, more, rounds = [], budget_map.runs(settings), 0
    while more:
        rows, rounds = rows + rows_with_losses(more, loss), rounds + 1
        known = {row["id"] for row in rows}
        more = [run for run in budget_map.then(settings, rows) if run.id not in known]
    tried = {row["lr"] for row in rows if row["seed"] == 0}
    assert {0.003, 0.01, 0.03} <= tried
    assert len(tried) <= 5
    points = budget_map.summary(rows)
    for p in points:
        assert p.lr == pytest.approx(last, rel=0.2)
        assert p.n == TINY.seeds
        assert p.edge == (peak in (0.0001, 9.0)), "given up after two"
    assert ("smallest or the largest" in budget_map.headline(points)[-1]) == (peak in (0.0001, 9.0))
    assert rounds <= 4
    assert len(rows) == len({row["id"] for row in rows})
    once = budget_map.then(dataclasses.replace(settings, further=0), rows)
    assert {run.seed for run in once} == {1, 2}, "and not where it is not wanted"


def test_cell_that_always_diverges_keeps_its_first_rate_and_is_counted():
    first = budget_map.runs(TINY)

    def loss(run):
        return None if run.shape.num_heads == 2 and run.shape.depth == 1 else loss_of(run)

    later = budget_map.then(TINY, rows_with_losses(first, loss))
    lost = [run for run in later if run.shape.num_heads == 2 and run.shape.depth == 1]
    assert {run.recipe.lr for run in lost} == {TINY.lrs[0]}
    points = budget_map.summary(rows_with_losses([*first, *later], loss))
    gone = [p for p in points if p.held_out is None]
    assert {(p.heads, p.depth) for p in gone} == {(2, 1)}
    assert all((p.n, p.diverged) == (0, 2) for p in gone)
    assert budget_map.headline(points)
    assert budget_map.headline(gone) == []


def all_points(loss=loss_of, settings=TINY):
    first = budget_map.runs(settings)
    return budget_map.summary(
        rows_with_losses([*first, *budget_map.then(settings, rows_with_losses(first, loss))], loss)
    )


def test_tuning_seed_is_not_counted():
    for p in all_points():
        assert p.n == 2
        assert p.held_out == pytest.approx(4.0 / p.rank + 0.015)
        assert p.low < p.held_out < p.high
        assert p.lr == TINY.lrs[p.depth == 2]
        assert p.kappa_start == pytest.approx(10.0 + p.heads)


def test_cells_say_how_far_off_they_are_and_which_paths_they_lie_on():
    settings = dataclasses.replace(TINY, heads=(1, 2, 4, 8), ranks=(2, 4, 8, 16))
    points = {(p.depth, p.heads, p.rank): p for p in all_points(settings=settings)}
    whole = {p.params for p in points.values()}
    assert all(
        p.off == p.params / sorted(q.params for q in points.values())[len(points) // 2] - 1
        for p in points.values()
    )
    assert len(whole) > 1, "so small that whole numbers miss the budget visibly"
    split = {key for key, p in points.items() if "split" in (p.paths or "")}
    assert split == {(2, 16 // r, r) for r in (2, 4, 8, 16)} & set(points)
    assert {key for key, p in points.items() if "widen" in (p.paths or "")} == {
        key for key in points if key[0] == 2 and key[2] == 4
    }
    assert {key for key, p in points.items() if "trade" in (p.paths or "")} == {
        (2, 4, 4),
        (1, 8, 4),
    }


def test_verdicts_separate_a_difference_from_none_and_correlations_have_intervals():
    settings = dataclasses.replace(TINY, heads=(1, 2, 4), ranks=(2, 4, 8, 16))
    lines = budget_map.headline(all_points(settings=settings))
    assert any(line.startswith("farthest: best ") and "x 16" in line for line in lines)
    split = next(line for line in lines if line.startswith("farthest, split"))
    assert "the loss changes by +" in split
    correlations = [line for line in lines if "rank correlation" in line]
    assert [line.partition(":")[0] for line in correlations] == [
        "farthest, 1 layer",
        "farthest, 2 layers",
    ]
    assert all("with rank -1.00" in line or "with rank -0.9" in line for line in correlations)
    flat = budget_map.headline(all_points(lambda run: 1.0 + 0.1 * (run.seed % 2), settings))
    assert "no difference is found" in next(
        line for line in flat if line.startswith("farthest, split")
    )


@pytest.mark.parametrize("tasks", [("farthest",), ("farthest", "recall")])
def test_figure_draws_gaps_and_all_tasks(tasks, tmp_path):
    settings = dataclasses.replace(TINY, tasks=tasks, heads=(1, 2, 8), ranks=(4, 16))
    points = all_points(settings=settings)
    description = budget_map.figure(points)
    json.dumps(to_json(description), allow_nan=False)
    assert len(description.panels) == 2 * len(tasks)
    assert any(
        value is None for panel in description.panels for row in panel.cells for value in row
    ), "cells beyond the budget"
    for panel in description.panels:
        assert len(panel.cells) == 3
        assert all(len(row) == 2 for row in panel.cells)
        for p in (
            p for p in points if panel.title == f"{p.task}, {p.depth} layer{'s' * (p.depth > 1)}"
        ):
            assert (
                panel.cells[description.y_names.index(str(p.heads))][
                    description.x_names.index(str(p.rank))
                ]
                == p.held_out
            )
    save(description, tmp_path / "map.png")
    save(description, tmp_path / "map.svg")
    page = plotly_figure(description)
    json.dumps(page, allow_nan=False)
    assert sum(trace["type"] == "heatmap" for trace in page["data"]) == 2 * len(tasks)
    assert len(page["legend"]["series"]) >= 2


def test_advice_of_both_papers_is_marked_at_its_cells():
    settings = dataclasses.replace(TINY, heads=(1, 2, 4, 8), ranks=(2, 4, 8, 16))
    points = all_points(settings=settings)
    assert {(p.depth, p.heads, p.rank): p.advice for p in points if p.advice} == {
        (2, 1, settings.dim): "the rank paper", (1, 8, 4): "the leaner paper",
    }  # fmt: skip
    description = budget_map.figure(points)
    marks = {
        (panel.title, mark.label): (description.y_names[mark.y], description.x_names[mark.x])
        for panel in description.panels for mark in panel.marks
    }  # fmt: skip
    assert marks == {
        ("farthest, 2 layers", "the rank paper"): ("1", "16"),
        ("farthest, 1 layer", "the leaner paper"): ("8", "4"),
    }
    named = [trace["name"] for trace in plotly_figure(description)["data"] if trace.get("name")]
    assert {"the rank paper", "the leaner paper"} <= set(named)


def test_summary_over_tasks_says_what_the_headline_says(tmp_path):
    settings = dataclasses.replace(
        TINY, tasks=("farthest", "recall"), heads=(1, 2, 4), ranks=(2, 4, 8, 16)
    )
    points = all_points(settings=settings)
    description = budget_map.EXPERIMENT.views["summary"](points)
    json.dumps(to_json(description), allow_nan=False)
    changes, correlations = (panel.ranges for panel in description.panels)
    losses = [p.held_out for p in points if p.task == "farthest"]
    at = {(p.depth, p.heads, p.rank): p.held_out for p in points if p.task == "farthest"}
    split = next(
        row
        for row in changes
        if row.name == "farthest" and row.label.startswith("split: 1 x 16 to 4 x 4")
    )
    assert split.mean == pytest.approx(
        100 * (at[2, 4, 4] - at[2, 1, 16]) / (max(losses) - min(losses))
    )
    assert split.low < split.mean < split.high
    rank = next(row for row in correlations if (row.name, row.label) == ("recall, 1 layer", "rank"))
    assert rank.low <= rank.mean <= rank.high < 0
    assert {row.name for row in changes} == {"farthest", "recall"}
    assert {row.name for row in correlations} == {
        f"{task}, {depth}" for task in ("farthest", "recall") for depth in ("1 layer", "2 layers")
    }
    save(description, tmp_path / "summary.png")
    save(description, tmp_path / "summary.svg")
    page = plotly_figure(description)
    json.dumps(page, allow_nan=False)
    assert len(page["data"]) == len(changes) + len(correlations)
    assert page["layout"]["yaxis"]["ticktext"].count("farthest") == 1


def test_heads_that_help_in_one_depth_and_hurt_in_another_do_not_cancel():
    settings = dataclasses.replace(TINY, heads=(1, 2, 4), ranks=(2, 4, 8))

    def loss(run):
        sign = 1 if run.shape.depth == 1 else -1
        return 1.0 + 0.1 * sign * run.shape.num_heads + 0.01 * run.seed

    points = all_points(loss, settings)
    found = {
        row.name: row.mean
        for row in budget_map.over_tasks(points).panels[1].ranges
        if row.label == "heads"
    }
    assert found["farthest, 1 layer"] > 0.9
    assert found["farthest, 2 layers"] < -0.9


def test_summary_is_drawn_from_one_seed_and_from_cells_that_are_all_alike(tmp_path):
    one = budget_map.over_tasks(all_points(settings=dataclasses.replace(TINY, seeds=1)))
    assert all(row.low is None for row in one.panels[0].ranges)
    alike = budget_map.over_tasks(all_points(lambda run: 1.0))
    assert alike.panels[0].ranges == ()
    for number, description in enumerate((one, alike)):
        save(description, tmp_path / f"{number}.png")
        json.dumps(plotly_figure(description), allow_nan=False)


def test_rows_carry_the_conditioning_of_the_models_they_are_about(tmp_path):
    runs = budget_map.runs(
        dataclasses.replace(
            TINY, tasks=("farthest", "recall"), heads=(2,), ranks=(4,), depths=(2,), pairs=2
        )
    )[::2]
    runs = [dataclasses.replace(run, seed=1) for run in runs]
    rows = train(
        runs,
        device="cpu",
        folder=tmp_path,
        keep_weights=True,
        probe=budget_map.EXPERIMENT.probe,
        advance=lambda n: None,
    )
    from safetensors.torch import load_file

    for run, row in zip(runs, rows, strict=True):
        model = build(run.shape)
        model.load_state_dict(load_file(tmp_path / run.id / "weights.safetensors"))
        inputs, _ = run.task.sample(torch.Generator().manual_seed(derive(0, "probe")), 8)
        with numerics("fp32", torch.device("cpu")):  # as where it was trained: one thread
            assert row["kappa_end"] == attention_spectra(model, inputs)[-1]["kappa"]
        assert row["kappa_start"] != row["kappa_end"]
        assert math.isfinite(row["effective_rank_start"])


BAD = [
    (["tasks=farthes"], "unknown task 'farthes'; did you mean farthest?"),
    (["budget=param"], "unknown budget 'param'; did you mean params?"),
    (["base=2,4"], "base must be layers,heads,rank,feed-forward, got 2,4"),
    (["base=2,4,8,0"], "base must be layers,heads,rank,feed-forward, got 2,4,8,0"),
    (["lrs="], "lrs must not be empty"),
    (["heads=0,1"], "heads must be at least 1, got 0"),
    (["source=x.txt"], "source goes with the tasks text, images, sentences, got farthest"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_settings_die_in_one_line(changes, message):
    with pytest.raises(UsageError) as caught:
        settings_of(find("map"), "quick", changes)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def headwise(*words):
    return subprocess.run(
        [sys.executable, "-m", "headwise", *words], capture_output=True, text=True, check=False
    )


def test_command_makes_both_rounds_once_and_the_page(tmp_path: Path):
    words = [
        "run",
        "map",
        "--task",
        "recall",
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
        "heads=1,2",
        "ranks=8",
        "depths=1",
        "dim=16",
        "base=1,2,8,32",
        "pairs=2",
    ]
    first = headwise(*words)
    assert first.returncode == 0, first.stderr
    answer = json.loads(first.stdout.splitlines()[-1])
    assert (answer["runs"], answer["made"]) == (2 * 2 + 2 * 2, 2 * 2 + 2 * 2)
    assert Path(answer["report"]).exists()
    assert [p["n"] for p in answer["points"]] == [2, 2]
    again = json.loads(headwise(*words).stdout.splitlines()[-1])
    assert again["made"] == 0
    assert again["points"] == answer["points"]
    rows = Store(tmp_path / "s").rows()
    assert {r["seed"] for r in rows} == {0, 1, 2}
    assert {r["seed"]: r.get("kappa_end", 0) > 0 for r in rows} == {0: False, 1: True, 2: False}, (
        "one seed a cell is probed"
    )
    bad = headwise("run", "map", "--task", "chess", "--store", str(tmp_path / "s"))
    assert (bad.returncode, bad.stderr.count("\n")) == (2, 1)
