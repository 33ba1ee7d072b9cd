"""Mistakes in files of one's own: tasks, models, experiments, and the arguments behind them."""

from __future__ import annotations

import random

from support.commands import TINY

from tests.fuzz.cases import Case, File, special
from tests.fuzz.options import QUICKLY
from tests.fuzz.values import spoiled_bytes, word

TASK = """from dataclasses import dataclass
import torch
import headwise

@dataclass(frozen=True)
class Sorting(headwise.SquaredError):
    tokens: int = 5
    in_dim = 1
    answer_dim = 1

    def sample(self, generator, batch, step=None):
        numbers = torch.randn((batch, self.tokens, 1), generator=generator)
        return numbers, numbers.sort(1).values

    def baselines(self):
        return {"zero": 1.0}
"""
MODEL = """from dataclasses import dataclass
from torch import nn
import headwise

@dataclass(frozen=True)
class Plain(headwise.Model):
    width: int = 3

    def build(self, shape, task):
        enter, leave = nn.Linear(task.in_dim, self.width), nn.Linear(self.width, task.answer_dim)
        return nn.Sequential(enter, leave)
"""
EXPERIMENT = """import dataclasses
from headwise.experiments import find
EXPERIMENT = dataclasses.replace(find("fig1"), name="mine")
"""
# what stands in a good file -> what a mistake makes of it
MISTAKES = {
    TASK: (
        ("@dataclass(frozen=True)", ""), ("@dataclass(frozen=True)", "@dataclass"),
        ("headwise.SquaredError", "object"), ("headwise.SquaredError", "headwise.Classified"),
        ("headwise.SquaredError", "headwise.Task"), ("headwise.SquaredError", "headwise.Tsak"),
        ("int = 5", "int = 0"), ("int = 5", "int = -1"), ("int = 5", "int = 10**9"),
        ("int = 5", "int = 10**400"), ("int = 5", "float = float('nan')"),
        ("int = 5", "list = None"),
        ("in_dim = 1", "in_dim = 0"), ("in_dim = 1", "in_dim = None"),
        ("in_dim = 1", "in_dim = 10**12"),
        ("answer_dim = 1", "answer_dim = 2"), ("answer_dim = 1", "answer_dim = 'x'"),
        ("generator, batch, step=None", "generator"), ("generator, batch, step=None", "batch"),
        ("return numbers, numbers.sort(1).values", "return numbers"),
        ("return numbers, numbers.sort(1).values", "return None"),
        ("return numbers, numbers.sort(1).values", "raise OSError(5, 'disk')"),
        ("return numbers, numbers.sort(1).values", "raise MemoryError"),
        ("return numbers, numbers.sort(1).values", "raise OverflowError('x' * 9999)"),
        ("return numbers, numbers.sort(1).values", "raise SystemExit(3)"),
        ("return numbers, numbers.sort(1).values", "return self.sample(generator, batch, step)"),
        ("return numbers, numbers.sort(1).values", "return numbers / 0, numbers * float('inf')"),
        ("return numbers, numbers.sort(1).values", "return numbers.long(), numbers[:, :1]"),
        ("return numbers, numbers.sort(1).values", "return torch.randn(3), torch.randn(10**6)"),
        ('{"zero": 1.0}', '{"zero": None}'), ('{"zero": 1.0}', "{}"), ('{"zero": 1.0}', "[1]"),
        ('{"zero": 1.0}', '{"zero": float("nan")}'), ('{"zero": 1.0}', "1 / 0"),
        ("Sorting", "_Sorting"), ("Sorting", "Ümläut"), ("import torch", "import trch"),
        ("import torch", "raise SystemExit(0)"), ("import torch", "raise KeyError"),
        ("import torch", "1/0"), ("import torch", "x ="),
        ("import torch", "import torch\nTASK = 3"),
        ("import torch", "raise RecursionError"), ("import torch", "open('none.txt')"),
        ("import torch", "raise UnicodeDecodeError('utf-8', b'x', 0, 1, 'no')"),
        ("import torch", "raise ValueError('a\\nb\\n' * 500)"),
    ),
    MODEL: (
        ("@dataclass(frozen=True)", ""), ("headwise.Model", "object"), ("int = 3", "int = 0"),
        ("int = 3", "int = -1"), ("int = 3", "int = 10**12"), ("int = 3", "str = 'x'"),
        ("shape, task", "shape"), ("task.answer_dim", "7"), ("task.in_dim", "task.nothing"),
        ("return nn.Sequential", "return None and nn.Sequential"),
        ("return nn", "return 1 / 0, nn"),
        ("return nn.Sequential", "raise MemoryError('x' * 999) #"), ("nn.Linear", "nn.Dropout"),
        ("return nn.Sequential", "return lambda x: nn.Sequential"),
        ("import headwise", "import hw"),
    ),
    EXPERIMENT: (
        ('"mine"', '"fig1"'), ('"mine"', "None"), ('"mine"', "'a/b'"), ('"mine"', "'x' * 300"),
        ('name="mine"', "nome=3"), ("EXPERIMENT =", "X = Y ="),
        ("EXPERIMENT =", "EXPERIMENT = 3 #"),
        ('find("fig1")', 'find("fig2")'), ('name="mine"', 'name="mine", presets={}'),
        ('name="mine"', 'name="mine", presets={"quick": 3}'),
        ('name="mine"', 'name="mine", runs=None'),
        ('name="mine"', 'name="mine", runs=lambda s: [1]'),
        ('name="mine"', 'name="mine", columns=3'),
        ('name="mine"', 'name="mine", runs=lambda s: 1 / 0'),
        ('name="mine"', 'name="mine", runs=lambda: []'),
        ('name="mine"', 'name="mine", summary=lambda r: 1 / 0'),
        ('name="mine"', 'name="mine", notes=5'),
        ('name="mine"', 'name="mine", summary=lambda r: [None]'),
        ("import dataclasses", "import nope"),
        ('name="mine"', 'name="mine", headline=lambda p: [1]'),
        ('name="mine"', 'name="mine", figure=print'),
        ('name="mine"', 'name="mine", question=7'),
        ('name="mine"', 'name="mine", probe=lambda r, w: {}'),
        ('name="mine"', 'name="mine", probe=lambda r, w: 3'),
        ('name="mine"', 'name="mine", views={"x": 1}'),
        ('name="mine"', 'name="mine", probe=lambda r, w: {"x": w}'),
        ("import dataclasses", "exit(5)"),
    ),
}  # fmt: skip


def with_mistake(rng: random.Random, good: str) -> bytes:
    """A good file with one thing wrong."""
    how = rng.random()
    if how < 0.85:
        right, wrong = rng.choice(MISTAKES[good])
        return good.replace(right, wrong, 1).encode()
    return spoiled_bytes(rng, good.encode()) if how < 0.97 else good.encode()


def arguments(rng: random.Random) -> str:
    """What may stand behind `my_task.py`."""
    name = rng.choice(
        ("Sorting",) * 5 + ("Plain", "Sortin", "", "torch", "__name__", "dataclass", word(rng))
    )
    inner = rng.choice(
        (
            "tokens=3", "tokens=0", "tokens=-1", "tokens='x'", "tokens=None", "tokens=1.5",
            "tokens=[1]",
            "tokens=10**9", "tokens=999999999999", "tokens=__import__('os')", "tokens=3, tokens=4",
            "3", "*[3]", "**{}", "tokens", "tokens=", "tokens=3)(", "tokens={'a': 1}", "x=3",
            "tokens=True",
            "tokens=" + "(" * 300, "tokens=" + "-" * 5000 + "1", "tokens=" + "9" * 5000,
            "tokens=1e999",
            f"tokens={word(rng)!r}", f"tokens={word(rng)}", word(rng), "lambda: 0", "tokens:=3",
            "\n",
        )
    )  # fmt: skip
    return rng.choice(
        (f":{name}", f":{name}({inner})", f":{name}({inner})", f":{name}({inner}", ":", "::")
    )


def tasks(rng: random.Random) -> Case:
    """An own task with a mistake, for `check` and `run`."""
    text: File = with_mistake(rng, TASK) if rng.random() < 0.7 else TASK.encode()
    spec = "my_task.py" + (arguments(rng) if rng.random() < 0.4 else "")
    if rng.random() < 0.04:
        text = special(rng, "my_task.py")
    words: tuple[str, ...] = ("check", spec)
    if rng.random() < 0.75:  # a check of a good task starts another process
        words = ("run", "fig1", spec, *QUICKLY, "--seeds", "1", "--set", *_sizes())
    return Case(words, {"my_task.py": text}, code=True)


def models(rng: random.Random) -> Case:
    """An own model with a mistake."""
    text = with_mistake(rng, MODEL)
    words: tuple[str, ...] = ("check", "my_model.py", *rng.choice(((), ("--task", "my_task.py"))))
    if rng.random() < 0.4:
        words = ("run", "fig1", *QUICKLY, "--seeds", "1", "--model", "my_model.py", "--set", *TINY)
    return Case(words, {"my_model.py": text, "my_task.py": TASK.encode()}, code=True)


def experiments(rng: random.Random) -> Case:
    """An own experiment with a mistake."""
    text = with_mistake(rng, EXPERIMENT)
    words = ["run", "my_experiment.py", *QUICKLY[:-1], "--seeds", "1"]
    return Case((*words, "--set", *TINY), {"my_experiment.py": text}, code=True)


def _sizes() -> list[str]:
    return [change for change in TINY if not change.startswith(("dim=", "points="))] + ["dim=4"]
