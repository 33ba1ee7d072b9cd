"""The rank paper's main figure: its runs, points and views."""

import dataclasses
import math
from typing import Any

import pytest
from support.experiment_rows import a_row, some_rows
from support.fig1_rows import FIG1, rated

from headwise.errors import UsageError
from headwise.experiments.pages import page_of
from headwise.experiments.rank_paper import fig1, fig1_figures
from headwise.experiments.rank_paper.shapes import budget
from headwise.experiments.settings import settings_of


@pytest.mark.parametrize("preset", ["quick", "paper"])
def test_ranks_of_a_budget_have_exactly_the_same_parameters(preset: str) -> None:
    budgets: dict[tuple[int, int], set[int]] = {}
    ranks: dict[tuple[int, int], set[int]] = {}
    for run in fig1.runs(fig1.PRESETS[preset]):
        key = run.shape.depth, run.shape.average
        budgets.setdefault(key, set()).add(run.shape.params)
        ranks.setdefault(key, set()).add(run.shape.head_dim)
        assert run.shape.num_heads * run.shape.head_dim == run.shape.average * run.shape.dim
    assert all(len(params) == 1 for params in budgets.values())
    assert all(found == set(fig1.PRESETS[preset].ranks) for found in ranks.values())
    assert len(budgets) == len(fig1.PRESETS[preset].depths) * len(fig1.PRESETS[preset].widths)


def test_paper_preset_is_the_papers() -> None:
    """d = 64, N = 16, batches of 256, 1000 epochs of 100 steps, rate 0.01, AdamW (0.9, 0.95), five
    seeds (fact sheet)."""
    runs = fig1.runs(fig1.PRESETS["paper"])
    assert len(runs) == 2 * 3 * 3 * 7 * 5
    for run in runs:
        r = run.recipe
        assert (run.shape.dim, run.task.tokens, r.batch, r.epochs, r.epoch, r.lr) == (
            64,
            16,
            256,
            1000,
            100,
            0.01,
        )
        assert (r.beta1, r.beta2, r.weight_decay, r.schedule, r.init) == (
            0.9,
            0.95,
            0.0,
            "published",
            "published",
        )
    assert {(r.shape.depth, r.shape.average, r.shape.head_dim) for r in runs} == set(
        fig1_figures.published_errors()
    )


def test_published_values_are_all_63_there() -> None:
    values = fig1_figures.published_errors()
    assert set(values) == {
        (n, w, r) for n in (1, 3, 5) for w in (1, 8, 64) for r in (1, 2, 4, 8, 16, 32, 64)
    }
    assert all(0 < v < 1 for v in values.values())
    assert values[1, 1, 64] == 0.0153
    assert values[3, 1, 64] == 0.003176
    assert values[3, 1, 8] == 0.2165
    assert all(values[n, w, 1] > values[n, w, 64] for n in (1, 3, 5) for w in (1, 8, 64))


def test_point_is_the_mean_of_its_seeds_beside_the_papers_statistic() -> None:
    settings = settings_of(
        FIG1, "paper", ["depths=3", "widths=1", "ranks=64,8", "protocols=replay"], seeds=3
    )
    rows = [
        a_row(run, error, best)
        for run, error, best in zip(
            fig1.runs(settings), (1, 2, 3, 4, 4, 4), (9, 7, 8, 6, 5, 6), strict=True
        )
    ]
    low, full = fig1.summary(rows)
    assert (low.rank, low.heads, low.n, low.held_out, low.low, low.high) == (
        8,
        8,
        3,
        4.0,
        4.0,
        4.0,
    )
    assert (low.train_best, low.published, low.budget) == (2.0, 0.2165, "d^2")
    assert (full.rank, full.held_out, full.train_best, full.published) == (
        64,
        2.0,
        2.0,
        0.003176,
    )
    assert full.high - full.held_out == pytest.approx(4.302653 / math.sqrt(3))
    assert full.params == low.params


@pytest.mark.parametrize("widths", ["8", "1,64", "64,8,1"])
def test_budget_has_the_colour_of_its_published_values(widths: str) -> None:
    settings = settings_of(
        FIG1, "paper", ["depths=3", f"widths={widths}", "ranks=64,8", "protocols=replay"], seeds=1
    )
    (panel,) = fig1_figures.figure(
        fig1.summary([a_row(run, 1.0, 0.5) for run in fig1.runs(settings)])
    ).panels
    colours = {
        line.label.rpartition(" ")[2]: line.colour for line in panel.lines if line.style == "solid"
    }
    published = {
        line.label.rpartition(" ")[2]: line.colour for line in panel.lines if line.style == "dashed"
    }
    assert colours == published
    assert len(set(colours.values())) == len(colours) == len(widths.split(","))


def test_published_values_stand_only_beside_the_papers_sizes() -> None:
    assert all(p.published is None for p in fig1.summary(some_rows(FIG1)[0]))
    description = fig1_figures.figure(fig1.summary(some_rows(FIG1)[0]))
    dashed = [
        line.label for panel in description.panels for line in panel.lines if line.style == "dashed"
    ]
    assert dashed
    assert all(label.startswith("published (training, replay), d=64, ") for label in dashed)


def test_headline_compares_full_with_half_rank() -> None:
    settings = settings_of(
        FIG1, "paper", ["depths=1,3", "widths=1,8", "ranks=64,32,1", "protocols=stream"], seeds=1
    )
    errors = {64: 0.02, 32: 0.7, 1: 0.9}
    rows = [a_row(run, errors[run.shape.head_dim]) for run in fig1.runs(settings)]
    assert fig1.headline(fig1.summary(rows)) == [
        f"{layers}, budget {budget}, stream: full rank 0.0200 (one seed), half rank 0.7000 (one "
        "seed), 35.0 times as large"
        for layers in ("1 layer", "3 layers")
        for budget in ("d^2", "d^2.5")
    ]
    dead = [a_row(run, 1.0) for run in fig1.runs(settings)]
    assert all(
        "2 runs only predict zero, so this compares nothing" in line
        for line in fig1.headline(fig1.summary(dead))
    )
    assert all(point.zero == 1 for point in fig1.summary(dead))
    quarter = [row for row in rows if row["head_dim"] != 32]
    assert fig1.headline(fig1.summary(quarter)) == []


def test_budgets_are_written_as_the_paper_does() -> None:
    assert [budget(w, 64) for w in (1, 8, 64, 512)] == ["d^2", "d^2.5", "d^3", "d^3.5"]
    assert [budget(w, 16) for w in (1, 4, 16)] == ["d^2", "d^2.5", "d^3"]
    assert [budget(w, 8) for w in (2, 4, 8)] == ["2 d^2", "4 d^2", "d^3"]


def test_protocol_gets_its_own_panel_and_both_depths_a_row() -> None:
    settings = settings_of(FIG1, "paper", ["depths=1,3", "widths=1", "ranks=64,1"], seeds=1)
    description = fig1_figures.figure(
        fig1.summary([a_row(run, 0.5) for run in fig1.runs(settings)])
    )
    titles = [panel.title for panel in description.panels]
    assert titles == ["1 layer, replay", "3 layers, replay", "1 layer, stream", "3 layers, stream"]
    assert description.columns == 2
    (solid,) = (line for line in description.panels[0].lines if line.style == "solid")
    assert solid.x == (1 / 64, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": ()}, "ranks must not be empty"),
        ({"lr": ()}, "lr must not be empty"),
        ({"ranks": (4, 0)}, "ranks must be at least 1, got 0"),
        ({"widths": (1, 1)}, "widths must differ from each other, got 1, 1"),
        (
            {"protocols": ("stream", "stream")},
            "protocols must differ from each other, got stream, stream",
        ),
        ({"rates": ()}, "rates must not be empty"),
        ({"rates": (1.0, 1.0)}, "rates must differ from each other, got 1.0, 1.0"),
        (
            {"rates": (1.0, 1.0000001)},
            "rates must differ in their first six digits, got 1.0, 1.0000001",
        ),
        ({"rates": (1.0, 0.0)}, "rates must be above 0 and finite, got 0"),
        ({"rates": (-1.0,)}, "rates must be above 0 and finite, got -1"),
        ({"rates": (math.nan,)}, "rates must be above 0 and finite, got nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        dataclasses.replace(fig1.PRESETS["quick"], **change)
    assert str(caught.value) == message


def test_published_values_stand_beside_replayed_runs_alone() -> None:
    settings = settings_of(FIG1, "paper", ["depths=1", "widths=1", "ranks=64"], seeds=1)
    points = fig1.summary([a_row(run, 0.5) for run in fig1.runs(settings)])
    assert {p.protocol: p.published for p in points} == {"replay": 0.0153, "stream": None}


def test_view_by_layers_has_a_line_per_rank() -> None:
    errors = {
        (1, 64, 0.01, 0): 0.02,
        (1, 8, 0.01, 0): 0.8,
        (5, 8, 0.01, 0): 0.5,
        (5, 8, 0.003, 0): 0.4,
    }
    points = rated(errors) + rated(errors, "replay")
    described = fig1_figures.by_layers(points)
    left, right = described.panels
    assert (described.x_label, described.columns, described.caption) == (
        "layers",
        2,
        fig1_figures.BY_LAYERS,
    )
    assert [(line.label, [*line.x], [*line.y]) for line in right.lines] == [
        ("rank 64", [1.0, 5.0], [0.02, None]),
        ("rank 8", [1.0, 5.0], [0.8, 0.4]),
    ]
    assert right.lines[1].text[1].endswith("rate 0.003 of 2")
    known = fig1_figures.published_errors()
    assert [(line.label, [*line.x], [*line.y]) for line in left.lines] == [
        ("rank 64", [1.0, 5.0], [0.01, None]),
        ("published, rank 64", [1.0, 3.0, 5.0], [known[n, 8, 64] for n in (1, 3, 5)]),
        ("rank 8", [1.0, 5.0], [0.4, 0.2]),
        ("published, rank 8", [1.0, 3.0, 5.0], [known[n, 8, 8] for n in (1, 3, 5)]),
    ]
    across = fig1_figures.by_rank(points)
    assert (across.x_label, across.caption) == ("rank of a head / d", fig1_figures.BY_RANK)
    assert [(line.label, [*line.x], [*line.y]) for line in across.panels[1].lines] == [
        ("1 layer", [0.125, 1.0], [0.8, 0.02]),
        ("5 layers", [0.125, 1.0], [0.4, None]),
    ]
    elsewhere = [dataclasses.replace(p, dim=16) for p in points]
    assert not any(
        "published" in line.label for line in fig1_figures.by_layers(elsewhere).panels[0].lines
    )


def test_page_of_one_depth_leaves_the_view_by_layers_out() -> None:
    settings = settings_of(FIG1, "quick", ["depths=1", "protocols=replay,stream"], seeds=1)
    points = FIG1.summary([a_row(run, 0.5) for run in fig1.runs(settings)])
    assert [f.caption for f in page_of(FIG1, "quick", points).figures] == [
        "",
        fig1_figures.BY_RANK,
    ]
    more = FIG1.summary(
        [a_row(run, 0.5) for run in fig1.runs(dataclasses.replace(settings, depths=(1, 2)))]
    )
    assert [f.caption for f in page_of(FIG1, "quick", more).figures] == [
        "",
        fig1_figures.BY_RANK,
        fig1_figures.BY_LAYERS,
    ]


def test_depths_are_set_side_by_side_on_fresh_data_alone_where_rates_were_tuned() -> None:
    points = rated({(1, 64, 0.01, 0): 0.02, (5, 64, 0.01, 0): 0.03, (5, 64, 0.003, 0): 0.01})
    elsewhere = [dataclasses.replace(p, dim=32) for p in points]
    described = fig1_figures.by_layers(elsewhere)
    assert (described.columns, len(described.panels)) == (1, 1)
    assert described.panels[0].title.startswith("held out")
    assert fig1_figures.by_layers([dataclasses.replace(p, rates=1) for p in elsewhere]).panels == ()
    assert fig1_figures.by_rank(elsewhere).panels == (), "nothing was replayed or published"
    assert len(fig1_figures.by_rank(points).panels) == 2


def test_figure_is_of_one_dimension() -> None:
    rows = [
        a_row(fig1.runs(settings_of(FIG1, preset, seeds=1))[0], 0.5)
        for preset in ("quick", "paper")
    ]
    with pytest.raises(UsageError, match="one figure is of one dim, got rows of 16 and 64"):
        fig1.summary(rows)


def test_headline_of_one_depth_says_nothing_about_depth() -> None:
    both = {(1, 64, 0.01, 0): 0.02, (5, 64, 0.01, 0): 0.03}
    points = rated(both) + rated(both, "replay")
    shallow = [dataclasses.replace(p, width=1) for p in points if p.layers == 1]
    assert fig1_figures.by_layers(shallow).panels == ()
    assert len(fig1_figures.by_layers(points + shallow).panels) == 2, (
        "the budget with one depth is left out"
    )
