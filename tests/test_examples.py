"""The tutorial's task and model: short, without a fault, trained, and as docs/own-task.md shows
them."""

import re
import textwrap
from pathlib import Path

import pytest
from support.small_runs import bits, quiet
from support.tolerance import seeded

import headwise
from headwise.experiments.shapes import shape_for
from headwise.model.check import check_model
from headwise.tasks.check import check
from headwise.tasks.own import load_model, load_task

ROOT = Path(__file__).parents[1]
TASK, MODEL = ROOT / "examples/my_task.py", ROOT / "examples/my_model.py"
RECIPE = headwise.Recipe(steps=60, epoch=20, batch=32, held_out=128, evals=1)
SIZES = {"dim": 16, "depth": 1, "heads": 2, "rank": 8, "ffn_dim": 32}


@pytest.fixture(scope="module")
def task():
    return load_task(str(TASK))


@pytest.fixture(scope="module")
def model():
    return load_model(str(MODEL))


def run_of(task, model=None, seed=0):
    return headwise.Run(shape_for(task, **SIZES), task, RECIPE, seed, model)


def trained(runs):
    return headwise.train(runs, device="cpu", advance=quiet)


def test_examples_are_short():
    assert len(TASK.read_text().splitlines()) <= 40
    assert len(MODEL.read_text().splitlines()) <= 30


def test_examples_are_those_of_the_tutorial():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/own-task.md").read_text(), re.DOTALL)
    assert TASK.read_text() in blocks
    assert MODEL.read_text() in blocks


def test_task_has_no_fault(task):
    assert [f for f in check(task, str(TASK)) if f.level != "ok"] == []


def test_model_has_no_fault(task, model):
    shape = shape_for(task, **SIZES)
    assert [f for f in check_model(model, shape, task) if f.level != "ok"] == []


def test_task_sorts():
    numbers, answers = load_task(f"{TASK}:Sorting(tokens=7)").sample(seeded(3), 11)
    for sequence, answer in zip(numbers.tolist(), answers.tolist(), strict=True):
        assert sorted(sequence) == answer


def test_ids_follow_name_version_and_fields(task, model):
    run = run_of(task)
    assert run.id == "f2916b6e89a82512"
    assert run_of(task, model).id == "93a41a453455cfa5"
    fields = load_task(f"{TASK}:Sorting(tokens=7)")
    newer = type(task).__new__(type("Sorting", (type(task),), {"version": 2}))
    object.__setattr__(newer, "tokens", 16)
    assert len({run.id, run_of(fields).id, run_of(newer).id}) == 3
    assert newer.spec() == {"name": "Sorting", "version": 2, "tokens": 16}


def test_task_is_learned_by_many_models_at_once_as_by_each_alone(task):
    runs = [run_of(task, seed=seed) for seed in (0, 1)]
    rows = trained(runs)
    for run, row in zip(runs, rows, strict=True):
        assert row["task"] == "Sorting"
        assert row["held_out"] < row["zero_error"] == 1.0
        assert bits(trained([run])[0]) == bits(row)


def test_table_of_the_tutorial_is_a_task_without_a_fault(tmp_path):
    """The lines about data of one's own, as they stand, on a small table."""
    page = (ROOT / "docs/own-task.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    lines = next(block for block in blocks if "numpy.loadtxt" in block)
    function, method = lines.split("\n\n\n")
    rows = [f"{i},{i * i % 97},{i % 7},{i % 3}" for i in range(500)]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,c,label", *rows]))
    (tmp_path / "table.py").write_text(
        f"""
import functools
from dataclasses import dataclass
import numpy, torch, headwise

{function}

@dataclass(frozen=True)
class Table(headwise.Classified):
    path: str = "{tmp_path}/table.csv"
    tokens, in_dim, classes = 3, 1, 3

{textwrap.indent(method, "    ")}
"""
    )
    found = check(load_task(f"{tmp_path}/table.py"), elsewhere=False)
    assert [finding for finding in found if finding.level != "ok"] == []


def test_model_takes_the_place_of_headwises(task, model):
    ours, own = trained([run_of(task), run_of(task, model)])
    assert own["model"] == "Mixer"
    assert own["held_out"] < 1.0
    assert own["held_out"] != ours["held_out"]
