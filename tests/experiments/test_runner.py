"""`headwise.run`: an experiment from Python, with a task of one's own in the paper's place."""

from pathlib import Path

import pytest

import headwise
from headwise.errors import UsageError
from headwise.experiments.rank_paper import fig1

OWN = '''
from dataclasses import dataclass

import torch

from headwise import SquaredError


@dataclass(frozen=True)
class Mean(SquaredError):
    """Every token asks for the mean of all."""

    points: int = 5
    dim: int = 12

    @property
    def tokens(self):
        return self.points

    @property
    def in_dim(self):
        return self.dim

    @property
    def answer_dim(self):
        return self.dim

    def sample(self, generator, batch, step=None):
        x = torch.randn(batch, self.points, self.dim, generator=generator)
        return x, x.mean(1, keepdim=True).expand_as(x).contiguous()
'''
SMALL = {"depths": (1,), "widths": (1,), "steps": 4, "epoch": 2, "batch": 8, "held_out": 128}


def test_run_returns_what_was_made_and_makes_nothing_twice(tmp_path: Path) -> None:
    options = {"store": tmp_path / "s", "seeds": 2, "device": "cpu", "workers": 1, "report": False}
    made = headwise.run("fig1", ranks=(16, 1), **options, **SMALL)
    assert (made.counts.runs, made.counts.made, len(made.rows)) == (4, 4, 4)
    assert [point.rank for point in made.points] == [1, 16]
    assert made.figure.panels
    assert made.table[0][:2] == ["data", "layers"]
    assert "fig1 (quick): 4 of 4 runs finished" in repr(made)
    assert "<table>" in made._repr_html_()
    again = headwise.run("fig1", ranks=(16, 1), **options, **SMALL)
    assert again.counts.made == 0
    assert again.points == made.points
    with pytest.raises(UsageError, match="unknown setting 'rank'; did you mean ranks"):
        headwise.run("fig1", rank=3, **options)


def test_run_puts_an_own_task_in_the_papers_place(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    options = {"store": tmp_path / "s", "device": "cpu", "workers": 1, "report": False}
    made = headwise.run("fig1", task=str(file), seeds=1, **options, **SMALL)
    assert {row["task"] for row in made.rows} == {"Mean"}
    assert [point.rank for point in made.points] == [1, 3, 6, 12], "the shares of the paper's ranks"
    assert len({point.params for point in made.points}) == 1
    assert {point.rates for point in made.points} == {len(fig1.OWN_RATES)}
    assert all(point.published is None for point in made.points)
    assert made.figure.reference is not None
    assert made.figure.reference.label == "predicting zero", "the lowest of its baselines"
    noted = made.store.experiments()["fig1"]["settings"]["task"]
    assert noted == {"name": "Mean", "points": 5, "dim": 12}, "the specification, never code"


def test_run_refuses_tasks_where_an_experiment_has_its_own(tmp_path: Path) -> None:
    for name in ("length", "learned"):
        with pytest.raises(UsageError, match=r"tasks? (of its own|about)|farthest point alone"):
            headwise.run(name, task="recall", store=tmp_path / "s")
    assert not (tmp_path / "s").exists()
