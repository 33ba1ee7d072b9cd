"""Own code beside a store's runs: tested once, an edit is marked, and `fresh` makes again exactly
what other code made."""

import json
import sys
from pathlib import Path

import pytest

import headwise
from headwise.cli import main
from headwise.errors import UsageError
from headwise.execute import sources
from headwise.execute.sources import OLDER_FILE, SOURCE_FILE
from headwise.experiments.made import Made
from headwise.store import ROWS_FILE, Store
from headwise.tasks.check_data import check_meaning
from headwise.tasks.own import load_task

TASK = """
from dataclasses import dataclass
import torch
import headwise

DRAWN = []


@dataclass(frozen=True)
class Mean(headwise.SquaredError):
    tokens: int = 5
    in_dim = 1
    answer_dim = 1

    def sample(self, generator, batch, step=None):
        DRAWN.append(batch)
        numbers = torch.randn((batch, self.tokens, 1), generator=generator, device=generator.device)
        return numbers, numbers.mean(1, keepdim=True)

    def baselines(self):
        return {"zero": 1 / self.tokens, "half": 0.11}
"""
SMALL = {
    "dim": 8,
    "base": (1, 2, 4, 16),
    "depths": 1,
    "heads": (1, 2),
    "ranks": 4,
    "lrs": (0.01, 0.03),
    "seeds": 2,
    "steps": 4,
    "epoch": 2,
    "batch": 4,
    "held_out": 128,
    "evals": 1,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mean.py"
    path.write_text(TASK)
    return path


def made(file: Path, **options) -> Made:
    store = file.parent / "store"
    options = {"store": store, "device": "cpu", "workers": 1, "report": False, **options}
    return headwise.run("map", task=load_task(str(file)), **options, **SMALL)


def drawn(task) -> int:
    """The largest batch that was drawn since last asked: the test of held-out data draws 1,024."""
    batches = vars(sys.modules[type(task).__module__])["DRAWN"]
    most = max(batches, default=0)
    batches.clear()
    return most


def test_data_are_tested_once_for_a_store_and_again_when_the_code_changes(file):
    store = Store(file.parent / "store")
    recipe = headwise.Recipe(steps=100)

    def asked() -> tuple[list[headwise.Run], int]:
        check_meaning.cache_clear()  # as in a new process
        task = load_task(str(file))
        runs = [headwise.Run(run_shape(), task, recipe, seed) for seed in (5, 6)]
        drawn(task)
        sources.check_tasks(store, runs, runs)
        return runs, drawn(task)

    runs, most = asked()
    assert most == 1024
    with store.claim(runs[:1]) as mine:
        sources.note_sources(store, mine)
    assert asked()[1] == 0, "what is noted beside one of its runs is not tested again"
    file.write_text(TASK + "# a note\n")
    assert asked()[1] == 0
    file.write_text(TASK.replace("mean(1", "amax(1"))
    assert asked()[1] == 1024


def run_shape() -> headwise.Shape:
    return headwise.Shape(
        dim=8,
        depth=1,
        num_heads=2,
        input_dim=1,
        output_dim=1,
        positions="additive",
        num_positions=5,
    )


def test_refused_task_leaves_nothing_behind(file):
    file.write_text(TASK.replace("generator=generator, ", ""))
    with pytest.raises(UsageError, match="uses the global generator of torch"):
        made(file)
    assert not (file.parent / "store").exists()


def test_edited_code_is_marked_everywhere_and_fresh_makes_it_again(file, capsys):
    first = made(file)
    assert first.remarks == []
    file.write_text(TASK.replace("mean(1", "amax(1"))
    marked = made(file, report=True)
    (remark,) = marked.remarks
    assert remark.startswith("the code of task Mean changed since 8 of these runs were begun")
    assert marked.counts.made == 0
    assert remark in marked.headline
    assert "The code of task Mean changed since 8" in marked.figure.caption
    page = marked.page.read_text()
    assert f"T{remark[1:]}." in page
    assert main(["draw", "map", str(marked.store.path), "--output", str(file) + ".png"]) == 0
    assert remark in " ".join(capsys.readouterr().out.split())

    again = made(file, fresh=True, report=True)
    assert again.counts.made == 8
    assert again.remarks == []
    assert "changed since" not in again.page.read_text()
    assert {row["id"] for row in again.rows} >= {row["id"] for row in first.rows if not row["seed"]}
    before = {row["id"]: row["held_out"] for row in first.rows}
    assert all(row["held_out"] != before.get(row["id"]) for row in again.rows)
    for row in first.rows:
        folder = again.store.runs_path / row["id"]
        (line,) = (folder / OLDER_FILE).read_text().splitlines()
        assert json.loads(line)["held_out"] == row["held_out"]
        assert (folder / SOURCE_FILE).exists() == (folder / ROWS_FILE).exists()
    assert made(file, fresh=True).counts.made == 0, "nothing of other code is left"


def test_fresh_keeps_rows_where_the_new_code_is_refused(file):
    first = made(file)
    file.write_text(TASK.replace("generator=generator, ", ""))
    with pytest.raises(UsageError, match="uses the global generator of torch"):
        made(file, fresh=True)
    assert len(first.store.rows()) == 8


def test_fresh_goes_with_training(file):
    with pytest.raises(UsageError, match="fresh makes runs again"):
        made(file, fresh=True, train=False)


def test_lowest_baseline_is_in_the_rows_of_own_tasks_alone(file):
    assert {(r["baseline"], r["baseline_name"]) for r in made(file).rows} == {(0.11, "half")}
    recipe = headwise.Recipe(steps=2, epoch=1, batch=4, held_out=128, evals=1)
    farthest = headwise.Farthest(dim=8, points=3)
    (row,) = headwise.train(
        [headwise.Run(headwise.Shape(dim=8, depth=1, num_heads=2), farthest, recipe)]
    )
    assert "baseline" not in row
