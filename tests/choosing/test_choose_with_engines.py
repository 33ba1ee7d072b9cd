"""`headwise.choose` with real trainings: built-in and own tasks, own models, a text, a kill."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.data import refused
from support.processes import started

import headwise
from headwise.choosing.trainings import text
from headwise.cli import main
from headwise.experiments.shapes import shape_for
from headwise.store import Store
from headwise.tasks import Farthest

TINY: dict[str, Any] = {
    "steps": 20,
    "batch": 8,
    "rates": (0.003, 0.01),
    "trials": 2,
    "seeds": 3,
    "device": "cpu",
    "workers": 1,
    "report": False,
    "say": lambda line: None,
}
OWN = '''
import torch
from dataclasses import dataclass
from pathlib import Path
import headwise


@dataclass(frozen=True)
class Sums(headwise.SquaredError):
    """Every token answers the sum of all."""
    places: int = 3
    tokens = 5
    in_dim = 1
    answer_dim = 1
    ordered = False

    def sample(self, generator, batch, step=None):
        x = torch.randn(batch, 5, 1, generator=generator, device=generator.device)
        if step is not None and step >= 7 and Path(__file__).with_suffix(".broken").exists():
            raise ArithmeticError("no more data")
        return x, x.sum(1, keepdim=True).expand(-1, 5, -1)


@dataclass(frozen=True)
class Mean(headwise.Model):
    def build(self, shape, task):
        layers = [torch.nn.Linear(1 if i == 0 else shape.dim, shape.dim)
                  for i in range(shape.depth)]
        return torch.nn.Sequential(*layers, torch.nn.Linear(shape.dim, 1))
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own_sums.py"
    path.write_text(OWN)
    return str(path)


def test_farthest_neighbour_is_answered_with_full_rank(tmp_path: Path) -> None:
    """8 points in 8 dimensions, one layer, equal parameters: 1 x 8 against 2 x 4 and 4 x 2."""
    task = Farthest(8, 8)
    shapes = [shape_for(task, 8, 1, heads, 8 // heads, 32) for heads in (4, 2, 1)]
    assert len({shape.params for shape in shapes}) == 1
    given = {**TINY, "steps": 250, "batch": 32, "rates": (0.03,), "trials": 1, "seeds": 6}
    found = headwise.choose(task, shapes=shapes, store=tmp_path, **given)
    assert found.best == shapes[2]
    assert found.sentence.startswith("1 x 8 in 1 layer is best on farthest: ")
    assert found.lead is not None
    assert found.lead.low is not None
    assert found.lead.low > 0
    assert len(str(found).splitlines()) < 12


def test_own_task_and_own_model_are_raced(own: str, tmp_path: Path) -> None:
    limits = {"params": 900, "dim": 8, "depths": (1,), "heads": (1, 2)}
    found = headwise.choose(f"{own}:Sums", store=tmp_path / "a", **limits, **TINY)
    assert found.task == "Sums"
    assert len(found.arms) == 2
    assert len({round(arm.params, -2) for arm in found.arms}) == 1
    raced = headwise.choose(
        f"{own}:Sums", model=f"{own}:Mean", store=tmp_path / "b", **limits, **TINY
    )
    assert [arm.flops for arm in raced.arms] == [None] * 2


def test_text_is_raced_in_bits_per_byte_on_the_other_half(tmp_path: Path) -> None:
    asked = text(steps=3, length=16, batch_tokens=64, eval_tokens=64, evals=3)
    given = {name: value for name, value in TINY.items() if name not in ("steps", "batch")}
    found = headwise.choose(
        asked, params=7_000, dim=16, depths=(1,), heads=(1, 2), store=tmp_path, **given
    )
    rows = Store(tmp_path).rows()
    assert {row["evaluated_on"] for row in rows if row["seed"] == 0} == {"validation"}
    assert {row["evaluated_on"] for row in rows if row["seed"] > 0} == {"test"}
    raced = [row for row in rows if row["seed"] > 0 and row["num_heads"] == 1]
    arm = next(arm for arm in found.arms if arm.shape.num_heads == 1)
    assert arm.loss == pytest.approx(sum(row["bits_per_byte"] for row in raced) / 3)
    assert arm.kv_bytes == 64
    assert found.unit == "bits per byte"


def test_task_that_raises_in_the_middle_is_one_line_and_loses_no_row(
    own: str, tmp_path: Path
) -> None:
    """What was trained before it broke is there, and the race resumes when it is mended."""
    limits = {"params": 900, "dim": 8, "depths": (1,), "heads": (1, 2), "store": tmp_path / "s"}
    headwise.choose(f"{own}:Sums", **limits, **{**TINY, "seeds": 2})
    rows = len(Store(tmp_path / "s").rows())
    broken = Path(own).with_suffix(".broken")
    broken.touch()
    message = refused(headwise.choose, f"{own}:Sums", **limits, **TINY)
    assert "no more data" in message
    assert len(Store(tmp_path / "s").rows()) == rows
    broken.unlink()
    again = headwise.choose(f"{own}:Sums", **limits, **TINY)
    assert again.spent.tuning + again.spent.race == len(Store(tmp_path / "s").rows()) > rows
    other = refused(headwise.choose, f"{own}:Sums(places=4)", **limits, **TINY)
    assert "holds another question about Sums: task places was 3, now 4" in other


def answer_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    for clock in ("spent", "store", "page"):
        answer.pop(clock)
    return answer


def test_command_after_kill_9_gives_the_answer_of_an_undisturbed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["choose", "farthest", "--params", "3k", "--dim", "8", "--depths", "1", "--heads",
             "1,2", "--steps", "30", "--batch", "8", "--rates", "0.003,0.01", "--trials", "3",
             "--seeds", "4", "--device", "cpu", "--workers", "1", "--checkpoint-every", "0",
             "--no-report", "--json", "--store"]  # fmt: skip
    whole = answer_of([*words, str(tmp_path / "whole")], capsys)
    store = tmp_path / "killed"
    with started([sys.executable, "-m", "headwise", *words, str(store)]) as process:
        # Killed when the tuning has its first rows.
        while process.poll() is None and not list(store.glob("runs/*/rows.jsonl")):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert answer_of([*words, str(store)], capsys) == whole
    ids = [row["id"] for row in Store(store).rows()]
    assert len(ids) == len(set(ids)) == len(Store(tmp_path / "whole").rows())
