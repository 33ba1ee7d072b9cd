"""Run ids: rows on disk are found by the ids they were made under."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from headwise.experiments.rank_paper import regression
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.shape import LATER, Shape
from headwise.tasks import Farthest, Regression
from headwise.training.run import ADDED, Recipe, Run

ROOT = Path(__file__).parents[2]
TASK = Regression(dim=5, points=7, curriculum=3, first_dim=2, first_points=3)
SHAPE = regression.decoder(16, 1, 2, TASK)
RECIPE = Recipe(
    steps=12, epoch=4, batch=16, held_out=300, evals=2, init="normal", lr=0.003, beta2=0.999
)


def run_of_row(row: dict[str, Any]) -> Run:
    """A run from its row, which holds all of it; the recipe's count of held-out sequences has
    another name there."""
    shape = {f.name: row[f.name] for f in dataclasses.fields(Shape) if f.name in row}
    recipe = {f.name: row[f.name] for f in dataclasses.fields(Recipe)} | {
        "held_out": row["held_out_sequences"]
    }
    task = {"name": row["task"]} | {
        k.removeprefix("task_"): v for k, v in row.items() if k.startswith("task_")
    }
    return Run.of({"shape": shape, "task": task, "recipe": recipe, "seed": row["seed"]})


@pytest.mark.parametrize("path", sorted(ROOT.glob("results/fig1/*.jsonl")), ids=lambda p: p.name)
def test_rows_on_disk_are_found_by_the_ids_they_were_made_under(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) >= {"supplement.jsonl": 3, "lost.jsonl": 1}.get(path.name, 21)
    for row in rows:
        assert run_of_row(row).id == row["id"]


def test_fields_that_came_later_are_in_a_spec_only_where_they_are_used():
    recipe = Recipe(steps=100)
    plain = Run(paper_shape(12, 1, 4, ffn_dim=20), Farthest(12, 5), recipe)
    first = {f.name for f in dataclasses.fields(Shape)} - {*ADDED, *LATER}
    assert set(plain.spec()["shape"]) == first
    both = Run(SHAPE, TASK, recipe, 3)
    assert both.spec()["shape"].keys() == {*first, *ADDED}
    one = Run(SHAPE.replace(output_dim=0), TASK, recipe, 3)
    assert "output_dim" not in one.spec()["shape"]
    assert one.spec()["shape"]["input_dim"] == 5
    for run in (plain, both, one):
        again = Run.of(json.loads(json.dumps(run.spec())))
        assert again == run
        assert again.id == run.id
    assert len({plain.id, both.id, one.id}) == 3


def test_id_of_a_run_is_what_it_was():
    """A literal: results on disk are found by it, so a change of hashing must be on purpose."""
    assert Run(SHAPE, TASK, Recipe(steps=100), 3).id == "dd20bfa1ceb73874"


def test_id_changes_with_every_field_of_the_task():
    others = [
        dataclasses.replace(TASK, **{name: getattr(TASK, name) + 1})
        for name in ("curriculum", "first_dim", "first_points")
    ]
    others += [dataclasses.replace(TASK, points=6)]
    assert len({Run(SHAPE, task, RECIPE).id for task in (TASK, *others)}) == 5
