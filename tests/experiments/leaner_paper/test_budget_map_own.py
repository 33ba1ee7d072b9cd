"""The map on one's own: baselines, a model of one's own beside ours, and tasks of one name."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from support.checked_tasks import Largest
from support.experiment_rows import rows_with_losses
from torch import nn

import headwise
from headwise.errors import UsageError
from headwise.experiments import find
from headwise.experiments.leaner_paper import budget_map
from headwise.experiments.points import labelled
from headwise.training.own import module_digest

QUICK = budget_map.PRESETS["quick"]
TINY = dataclasses.replace(
    QUICK,
    dim=16,
    heads=(1, 2, 4),
    ranks=(2, 4, 8),
    depths=(1, 2),
    base=(2, 2, 8, 32),
    seeds=2,
    steps=4,
    epoch=2,
    held_out=128,
)


@dataclass(frozen=True)
class Kth(Largest):
    k: int = 1


class Pooled(nn.Module):
    def __init__(self, n_in, dim, depth, n_out):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(n_in, dim), *(nn.Linear(dim, dim) for _ in range(depth))]
        )
        self.leave = nn.Linear(dim, n_out)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.leave(x - x.mean(1, keepdim=True))


@dataclass(frozen=True)
class Pool(headwise.Model):
    """Heads are of no account."""

    def build(self, shape, task):
        return Pooled(task.in_dim, shape.dim, shape.depth, task.answer_dim)


class Headed(nn.Module):
    """The same parameters for any number of heads."""

    def __init__(self, dim, heads, task):
        super().__init__()
        self.enter, self.leave = nn.Linear(task.in_dim, dim), nn.Linear(dim, task.answer_dim)
        self.mix = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x):
        x = self.enter(x)
        return self.leave(x + self.mix(x, x, x, need_weights=False)[0])


@dataclass(frozen=True)
class Heads(headwise.Model):
    def build(self, shape, task):
        return Headed(shape.dim, shape.num_heads, task)


def points_of(settings, loss, baseline=None):
    """Cells of both rounds, whose rows say this baseline."""
    first = budget_map.runs(settings)
    rows = rows_with_losses(first, loss)
    later = budget_map.then(settings, rows)
    rows += rows_with_losses(later, loss)
    own = {run.id: run.columns() for run in (*first, *later)}
    for row in rows:
        named = {k: v for k, v in own[row["id"]].items() if k.startswith(("task_", "model"))}
        row |= {"zero_error": 1.0, **named}
        if baseline:
            row["baseline_name"], row["baseline"] = baseline
    return rows


def lines_of(rows):
    return budget_map.headline(budget_map.summary(rows))


def loss(run):
    return 0.5 + 0.001 * run.seed + 0.01 / run.shape.head_dim


# ---- baselines


def test_headline_and_figure_say_the_best_answer_without_attention():
    settings = TINY.with_tasks([Largest()])
    rows = points_of(settings, loss, ("mean by place", 0.41))
    words = "no cell beats the best answer without attention (mean by place: 0.41) by 1 %"
    assert f"Largest: {words}, so this compares nothing" in lines_of(rows)
    figure = budget_map.figure(budget_map.summary(rows))
    assert figure.caption.endswith("Best answer without attention: Largest 0.41 (mean by place).")
    better = lines_of(points_of(settings, loss, ("mean by place", 0.8)))
    (line,) = [line for line in better if "without attention" in line]
    assert line == (
        "Largest: the smallest loss is 0.63 of the best answer without attention (mean by place: "
        "0.8)"
    )


def test_built_in_tasks_are_compared_with_predicting_zero():
    assert not [line for line in lines_of(points_of(TINY, loss)) if "without attention" in line]
    chance = lines_of(points_of(TINY, lambda run: 0.995 + 0.001 * run.seed))
    assert "(predicting zero: 1) by 1 %, so this compares nothing" in chance[0]


# ---- correlations


@pytest.mark.parametrize(("ranks", "shown"), [((2, 4), False), ((2, 4, 8), True)])
def test_correlation_needs_eight_cells(ranks, shown):
    settings = dataclasses.replace(TINY, ranks=ranks)
    rows = points_of(settings, loss)
    assert any("rank correlation" in line for line in lines_of(rows)) == shown
    panel = budget_map.over_tasks(budget_map.summary(rows)).panels[1]
    assert bool(panel.ranges) == shown


# ---- a model of one's own


def test_model_that_ignores_heads_is_trained_once_per_distinct_model():
    settings = TINY.with_tasks([Largest()]).with_model(Pool())
    runs = budget_map.runs(settings)
    assert len(runs) == 2 * len(TINY.lrs), "one per depth"
    ours = budget_map.runs(TINY.with_tasks([Largest()]))
    assert len(ours) > 8 * len(runs)
    own = {(run.shape, run.recipe.lr) for run in runs}
    assert own <= {(run.shape, run.recipe.lr) for run in ours}, "the first cells, ids as before"


def test_model_whose_heads_change_only_what_it_computes_is_trained_for_each():
    settings = TINY.with_tasks([Largest()]).with_model(Heads())
    runs = budget_map.runs(settings)
    assert {run.shape.num_heads for run in runs} == {1, 2, 4}
    assert len(runs) == 3 * len(TINY.lrs), "not for each rank and depth"
    assert len({run.params for run in runs}) == 1


def test_module_digest_tells_dropout_apart():
    @dataclass(frozen=True)
    class Dropped(headwise.Model):
        share: float = 0.1

        def build(self, shape, task):
            return nn.Sequential(nn.Linear(task.in_dim, 3), nn.Dropout(self.share))

    shape = TINY.with_tasks([Largest()])
    run = budget_map.runs(shape)[0]
    recipe = dataclasses.replace(run.recipe, init="library")
    found = {
        module_digest(headwise.Run(run.shape, Largest(), recipe, 0, Dropped(share)))
        for share in (0.1, 0.2, 0.1)
    }
    assert len(found) == 2


def test_own_model_stands_as_it_is_and_is_named():
    rows = points_of(TINY.with_tasks([Largest()]).with_model(Heads()), loss)
    points = budget_map.summary(rows)
    assert {p.task for p in points} == {"Largest with Heads"}
    assert {(p.off, p.paths, p.advice) for p in points} == {(None, None, None)}
    head = find("map").table(points)[0]
    assert "off budget" not in head
    assert "path" not in head
    figure = budget_map.figure(points)
    assert figure.title == "Held-out loss of Heads; parameters as the model has them"
    assert not any(panel.paths or panel.marks for panel in figure.panels)
    lines = budget_map.headline(points)
    assert lines[0].startswith("Largest with Heads: 3 distinct models, parameters as the model has")
    assert not any(", split:" in line or ", widen:" in line for line in lines)


def test_mine_and_ours_stand_in_one_figure():
    own = points_of(TINY.with_tasks([Largest()]).with_model(Heads()), loss)
    ours = points_of(TINY.with_tasks([Largest()]), lambda run: 2 * loss(run))
    alone = budget_map.summary(ours)
    points = budget_map.summary([*own, *ours])
    assert [p for p in points if p.model is None] == alone, "ours as without mine"
    figure = budget_map.figure(points)
    titles = [panel.title for panel in figure.panels]
    assert titles == ["Largest, 1 layer", "Largest, 2 layers", "Largest with Heads, 1 layer"]
    assert len({(panel.least, panel.most) for panel in figure.panels}) == 1, "one scale of colours"
    assert figure.title == "Held-out loss: headwise at one budget, Heads as large as built"


# ---- tasks of one name


def test_two_settings_of_one_task_are_told_apart_by_the_field_that_differs():
    settings = TINY.with_tasks([Kth(), Kth(k=3)])
    rows = points_of(settings, lambda run: loss(run) * run.task.k)
    points = budget_map.summary(rows)
    assert {p.task for p in points} == {"Kth(k=1)", "Kth(k=3)"}
    assert len(points) == 2 * len(budget_map.summary([r for r in rows if r["task_k"] == 3]))
    with pytest.raises(UsageError, match="tasks must differ from each other, got Kth"):
        TINY.with_tasks([Kth(), Kth()])


def test_labels_name_versions_and_models_and_leave_built_in_tasks():
    rows = [
        {"task": "Kth", "task_k": 1},
        {"task": "Kth", "task_k": 1, "task_version": 2},
        {"task": "farthest", "task_points": 3},
        {"task": "farthest", "task_points": 5, "model": "Pool", "model_wide": True},
        {"task": "farthest", "task_points": 5, "model": "Pool", "model_wide": False},
        {"id": "a decoder's"},
    ]
    assert [row.get("task") for row in labelled(rows)] == [
        "Kth(version=1)",
        "Kth(version=2)",
        "farthest",
        "farthest with Pool(wide=True)",
        "farthest with Pool(wide=False)",
        None,
    ]
