"""One contract for every experiment, and the numbers of positions and length."""

import dataclasses
import importlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.experiment_rows import a_row, counted, in_rounds, some_rows
from support.tolerance import seeded

from headwise.errors import UsageError
from headwise.execute.cut import cost
from headwise.experiments import EXPERIMENTS, PAGES, find
from headwise.experiments.pages import shown_by
from headwise.experiments.points import plain_point
from headwise.experiments.rank_paper import length, positions
from headwise.experiments.settings import meaning_of, settings_of
from headwise.model.geometry import score_geometry
from headwise.model.transformer import build
from headwise.seeds import derive
from headwise.shape import Shape
from headwise.show.figure import HeatFigure, LineFigure, from_json, to_json
from headwise.show.matplotlib_figure import save
from headwise.tasks import Farthest
from headwise.training.checkpoint import State, begin
from headwise.training.engine import row_of
from headwise.training.ensemble import Ensemble
from headwise.training.run import Run

NAMES = [name for name in EXPERIMENTS if find(name).trains]
LARGE = {"nanochat_heads"}  # of these, one model at a time; test_nanochat_heads has rows for them
ENSEMBLES = [name for name in NAMES if name not in LARGE]
QUICK_COST = 4e12  # floating-point operations: minutes on two cores


def price(run: Any) -> float:
    """Floating-point operations of a run."""
    return cost(run) if isinstance(run, Run) else run.flops * run.steps


def once(points: list[Any]) -> list[Any]:
    """Points of different runs: an arm that has two names is one model."""
    names = ("task", "depth", "heads", "rank", "ffn")
    plain = [plain_point(p) for p in points]
    keys = [tuple(p[k] for k in names) if "arm" in p else i for i, p in enumerate(plain)]
    return list(dict(zip(keys, points, strict=True)).values())


# ---- the contract


@pytest.mark.parametrize("name", [*EXPERIMENTS, *PAGES])
def test_experiment_says_what_it_is(name: str) -> None:
    experiment = shown_by(name)
    assert experiment.name == name
    assert experiment.question.endswith("?")
    assert "\n" not in experiment.question
    assert 0 < len(experiment.about) <= 66
    assert experiment.about == experiment.about.strip(".")
    headings = [heading for _, heading in experiment.columns]
    assert len(headings) == len(experiment.columns) > 2
    assert set(experiment.notes) <= set(experiment.presets)
    assert list(experiment.summary([])) == []
    assert experiment.headline([]) == []


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_explains_every_setting(name: str) -> None:
    experiment = find(name)
    assert {"quick", "paper"} <= set(experiment.presets)
    for settings in experiment.presets.values():
        for field in dataclasses.fields(settings):
            assert meaning_of(experiment, field.name), field.name
        json.dumps(settings.plain(), allow_nan=False)
        with pytest.raises(dataclasses.FrozenInstanceError):
            settings.seeds = 7


@pytest.mark.parametrize("name", NAMES)
def test_experiment_file_says_command_hardware_time_and_expected_numbers(name: str) -> None:
    module = importlib.import_module(f"headwise.experiments.{EXPERIMENTS[name]}")
    text = module.__doc__ or ""
    assert f"headwise run {name}" in text
    assert f"headwise run {name} --preset paper" in text
    assert "Expected" in text, "the expected numbers"
    assert re.search(r"\bCPU\b", text), "the hardware"
    assert re.search(r"\bGPU\b", text), "the hardware"
    assert re.search(r"\bminutes?\b|\bhours?\b", text), "the time"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("preset", ["quick", "paper"])
def test_experiment_presets_make_different_runs(name: str, preset: str) -> None:
    experiment = find(name)
    settings = experiment.presets[preset]
    runs = experiment.runs(settings)
    ids = [run.id for run in runs]
    assert len(set(ids)) == len(ids)
    assert [run.id for run in experiment.runs(settings)] == ids
    assert settings.seeds >= 3, "an interval needs seeds"
    if in_rounds(experiment, settings) and not experiment.keep_weights:
        assert {run.seed for run in runs} == {0}, "a seed to tune on"
        return
    assert {run.seed for run in runs} == set(range(settings.seeds))
    more = experiment.runs(settings.changed(seeds=settings.seeds + 1))
    assert set(ids) < {run.id for run in more}, "more seeds keep the runs that are there"


@pytest.mark.parametrize("name", NAMES)
def test_experiment_quick_preset_is_quick(name: str) -> None:
    experiment = find(name)
    quick, paper = (
        sum(map(price, experiment.runs(experiment.presets[preset])))
        for preset in ("quick", "paper")
    )
    assert 0 < quick < QUICK_COST
    assert quick < paper


@pytest.mark.parametrize("name", NAMES)
def test_experiment_settings_are_changed_by_name_and_checked(name: str) -> None:
    experiment = find(name)
    assert settings_of(experiment, "quick") == experiment.presets["quick"]
    assert settings_of(experiment, "paper", ["seeds=9"]).seeds == 9
    assert settings_of(experiment, "paper", seeds=8).seeds == 8
    assert settings_of(experiment, "quick", ["steps=1_000"]).steps == 1000
    for changes, message in (
        (["speed=1"], "unknown setting 'speed'; "),
        (["steps"], "--set takes key=value, got 'steps'"),
        (["steps=x"], "steps must be a whole number, got 'x'"),
        (["seeds=0"], "seeds must be at least 1, got 0"),
    ):
        with pytest.raises(UsageError) as caught:
            settings_of(experiment, "quick", changes)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError) as caught:
        settings_of(experiment, "papr")
    assert str(caught.value).startswith("unknown preset 'papr'; did you mean paper")
    assert str(caught.value).endswith(f"? choices: {', '.join(sorted(experiment.presets))}")


@pytest.mark.parametrize("name", ENSEMBLES)
def test_experiment_points_columns_headline_and_figure_fit_together(
    name: str, tmp_path: Path
) -> None:
    experiment = find(name)
    rows, others = some_rows(experiment)
    points = list(experiment.summary(others + rows))
    json.dumps([plain_point(p) for p in points], allow_nan=False)
    assert sum(p.n for p in once(points)) == len(rows)
    for p in points:
        assert p.low < p.held_out < p.high
        assert all(isinstance(p.cell(key), str) for key, _ in experiment.columns)
    assert list(experiment.summary((others + rows)[::-1])) == points, "the order of rows matters"
    assert all("\n" not in line for line in experiment.headline(points))
    assert experiment.headline(points)
    described = experiment.figure(points)
    assert from_json(json.loads(json.dumps(to_json(described), allow_nan=False))) == described
    assert 1 <= described.columns <= len(described.panels)
    if isinstance(described, HeatFigure):
        shown = {value for panel in described.panels for row in panel.cells for value in row}
    else:
        assert isinstance(described, LineFigure)
        shown = {y for panel in described.panels for line in panel.lines for y in line.y}
    if name != "learned":  # that figure is of weights
        assert {p.held_out for p in points} <= shown
    save(described, tmp_path / "a.png")


@pytest.mark.parametrize("name", ENSEMBLES)
def test_experiment_counts_diverged_runs_and_leaves_them_out_of_the_mean(
    name: str, tmp_path: Path
) -> None:
    experiment = find(name)
    runs, others = counted(experiment, experiment.preset("quick", seeds=2))
    rows = [a_row(run, None if i < 3 else 0.5) for i, run in enumerate(runs)]
    points = list(experiment.summary(others + rows))
    assert sum(p.diverged for p in once(points)) == 3
    assert sum(p.n for p in once(points)) == len(rows) - 3
    gone = [p for p in once(points) if p.n == 0]
    assert len(gone) == 1
    assert gone[0].held_out is gone[0].low is gone[0].high is None
    assert gone[0].cell("held_out") == "diverged"
    save(experiment.figure(points), tmp_path / "some.png")
    all_gone = experiment.summary(others + [a_row(run, None) for run in runs])
    assert experiment.headline(all_gone) == []
    save(experiment.figure(all_gone), tmp_path / "none.png")


# ---- what heads learn


def test_geometry_of_scores_equals_the_products_themselves() -> None:
    shape = Shape(dim=6, depth=2, num_heads=3, head_dim=2)
    weights = {
        f"blocks.{i}.attention.qkv.weight": torch.randn(
            18, 6, generator=torch.Generator().manual_seed(i)
        )
        for i in range(2)
    }
    found = score_geometry(shape, weights)
    assert set(found) == {"score_angle", "score_norm"}
    for i in range(2):
        q, k = (
            weights[f"blocks.{i}.attention.qkv.weight"][j * 6 : (j + 1) * 6].double().view(3, 2, 6)
            for j in (0, 1)
        )
        products = [q[h].T @ k[h] for h in range(3)]
        angles = sorted(
            math.degrees(math.acos(m.trace() / (m.norm() * math.sqrt(6)))) for m in products
        )
        norms = sorted(float(m.norm()) / math.sqrt(6) for m in products)
        for name, values in (("score_angle", angles), ("score_norm", norms)):
            least, _, median, _, largest = found[name][i]
            assert [least, median, largest] == pytest.approx(values, rel=1e-5)


def test_negative_multiple_of_the_identity_is_at_180_degrees_in_both_forms() -> None:
    eye = torch.eye(5)
    weights = {"blocks.0.attention.qkv.weight": torch.cat((-3 * eye, 2 * eye, eye))}
    found = score_geometry(Shape(dim=5, depth=1, num_heads=1), weights)
    assert found["score_angle"] == found["score_angle_transposed"] == [[180.0] * 5]
    assert found["score_norm"] == found["score_norm_transposed"] == [[6.0] * 5]


# ---- positions


def test_equal_arms_have_one_recipe_and_nearly_one_parameter_count() -> None:
    s = dataclasses.replace(positions.PRESETS["paper"], arms=("equal",), protocols=("stream",))
    made = positions.runs(s)
    assert len({run.recipe for run in made}) == 1
    for depth in s.depths:
        counts = {run.shape.params for run in made if run.shape.depth == depth}
        assert max(counts) < 1.01 * min(counts)


def test_published_arms_are_as_published() -> None:
    s = dataclasses.replace(
        positions.PRESETS["paper"], arms=("published",), protocols=("replay",), seeds=1
    )
    for run in positions.runs(s):
        longer = run.shape.positions != "none"
        assert (run.recipe.steps, run.recipe.lr) == (
            (200_000, 0.005) if longer else (100_000, 0.01)
        )
        assert (run.shape.dim, run.shape.average, run.shape.ffn_dim) == (
            128 if run.shape.positions == "concatenated" else 64,
            8,
            2048,
        )


@pytest.mark.parametrize(
    "encodings",
    [
        ("none", "additive", "concatenated"),
        ("none", "concatenated"),
        ("additive",),
        ("concatenated",),
    ],
)
@pytest.mark.parametrize("steps", [100_000, 200_000])
@pytest.mark.parametrize("arms", [("published",), ("equal",), ("published", "equal")])
def test_row_of_the_paper_has_its_arm_also_beside_no_others(
    encodings: tuple[str, ...], arms: tuple[str, ...], steps: int
) -> None:
    """Published values stand beside published arms and those without positions, and beside no
    others."""
    if steps > 100_000 and (arms != ("equal",) and "none" not in encodings):
        return  # twice the paper's steps, and nothing beside it that tells
    paper = dataclasses.replace(
        positions.PRESETS["paper"], encodings=encodings, arms=arms, steps=steps
    )
    s = dataclasses.replace(paper, protocols=("replay",), seeds=1, ranks=(64, 8))
    nothing = torch.zeros(0)
    rows = [
        row_of(
            State(run, nothing, nothing, nothing, curve=[0.4]),
            torch.full((5,), 0.5),
            1,
            torch.device("cpu"),
        )
        for run in positions.runs(s)
    ]
    found = positions.summary(rows)
    assert {p.arms for p in found} == {
        "both" if e == "none" else a for e in encodings for a in arms
    }
    assert all((p.published is None) == (p.arms == "equal") for p in found)


def test_errors_of_other_lengths_stand_beside_what_needs_no_attention() -> None:
    s = dataclasses.replace(length.PRESETS["quick"], seeds=1, ranks=(16, 1))
    found = length.summary([a_row(run, 0.5) for run in length.runs(s)])
    draw = torch.Generator().manual_seed(5)
    for points in s.lengths:
        x, target = Farthest(s.dim, points).sample(draw, 20_000)
        along = -(x * target).sum(-1).mean(1)  # the error of the best multiple c of -x is 1 - c^2
        exact = math.sqrt(1 - next(p.alone for p in found if p.points == points))
        assert abs(along.mean().item() - exact) < 4 * along.std().item() / math.sqrt(len(along))
    assert "from the point alone 0.9546 and 0.8179" in length.headline(found)[0]


def test_room_is_as_wide_as_concatenated_positions_and_has_their_recipe() -> None:
    for arm in positions.ARMS:
        s = dataclasses.replace(
            positions.PRESETS["paper"],
            arms=(arm,),
            encodings=("none", "concatenated", "room"),
            seeds=1,
            ranks=(8,),
        )
        made = positions.runs(s)
        by = {kind: [r for r in made if r.shape.positions == kind] for kind in s.encodings}
        for placed, room in zip(by["concatenated"], by["room"], strict=True):
            assert placed.shape.replace(positions="room", num_positions=0) == room.shape
            assert placed.recipe == room.recipe
        rows = [a_row(run, 0.5) for run in made if run.shape.depth == 1]
        assert {p.encoding: p.arms for p in positions.summary(rows)} == {
            "none": "both",
            "concatenated": arm,
            "room": arm,
        }


@pytest.mark.parametrize("encoding", ["none", "additive", "concatenated", "room"])
def test_effect_of_places_is_the_error_with_one_row_at_all_of_them(
    encoding: str,
) -> None:
    s = dataclasses.replace(
        positions.PRESETS["quick"],
        encodings=(encoding,),
        ranks=(4,),
        protocols=("stream",),
        seeds=1,
    )
    (run,) = positions.runs(s)
    weights = Ensemble([begin(run)], torch.device("cpu")).named_weights(0)
    if encoding in ("none", "room"):
        assert positions.probe(run, weights) == {}
        return
    weights["positions"] = torch.randn(weights["positions"].shape, generator=seeded(3))
    probed = positions.probe(run, weights)
    assert abs(probed["one_place"] / probed["own_places"] - 1) > 1e-3
    x, target = run.task.sample(
        torch.Generator().manual_seed(derive(0, "probe")), positions.SEQUENCES
    )
    model, rows = build(run.shape), weights["positions"]
    model.load_state_dict(weights)
    with torch.no_grad():
        assert probed["own_places"] == pytest.approx(run.task.loss(model(x)[0], target).item())
        each = []
        for row in rows:
            model.load_state_dict({**weights, "positions": row.repeat(len(rows), 1)})
            each.append(run.task.loss(model(x)[0], target).item())
    assert probed["one_place"] == pytest.approx(sum(each) / len(each))
    alike = positions.probe(run, {**weights, "positions": rows[:1].repeat(len(rows), 1)})
    assert alike["one_place"] == pytest.approx(alike["own_places"]), (
        "all places alike: it says nothing of them"
    )
    broken = positions.probe(run, {**weights, "positions": rows * math.nan})
    assert broken == {}


def test_point_says_how_much_worse_its_models_are_at_one_place() -> None:
    s = dataclasses.replace(
        positions.PRESETS["quick"],
        encodings=("none", "concatenated"),
        ranks=(4,),
        protocols=("stream",),
        seeds=2,
    )
    rows = [a_row(run, 0.5) for run in positions.runs(s)]
    for row, (own, one) in zip(
        [r for r in rows if r["positions"] == "concatenated"], ((0.2, 0.4), (0.1, 0.4)), strict=True
    ):
        row |= {"own_places": own, "one_place": one}
    assert {p.encoding: p.one_place for p in positions.summary(rows)} == {
        "none": None,
        "concatenated": pytest.approx(3.0),
    }
