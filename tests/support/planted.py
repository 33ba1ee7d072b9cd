"""A training without an engine: rows of planted losses, for the loop of `headwise.choosing`."""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headwise.rows import Row, Work, id_of
from headwise.shape import Shape
from headwise.signals import Stopped
from headwise.store import Store

SHAPES = tuple(Shape(dim=16, depth=1, num_heads=h, head_dim=16 // h) for h in (1, 2, 4, 8))
GAPS = dict(zip(SHAPES, (0.0, 0.05, 0.4, 0.8), strict=True))  # the first two are close
BEST_RATE = 0.002


@dataclass(frozen=True)
class PlantedRun:
    """What stands in the place of a training: its row follows from it."""

    work: ClassVar[Work] = "compute"
    shape: Shape
    lr: float
    seed: int

    def spec(self) -> dict[str, Any]:
        return {"experiment": "planted", "heads": self.shape.num_heads, "lr": self.lr,
                "seed": self.seed}  # fmt: skip

    def columns(self) -> Row:
        return {**self.spec(), "params": self.shape.params}

    @property
    def id(self) -> str:
        return id_of(self.spec())

    def row(self) -> Row:
        rng = random.Random(self.seed)
        shared, own = rng.gauss(0, 0.1), random.Random(f"{self.seed} {self.shape}").gauss(0, 0.05)
        loss = 2 + GAPS[self.shape] + shared + own + math.log(self.lr / BEST_RATE) ** 2 / 10
        return {"id": self.id, "status": "done", **self.columns(), "held_out": loss,
                "held_out_curve": [[i, loss + 1 / i - 0.1] for i in range(1, 11)],
                "seconds": 0.01, "device": "none", "commit": "none"}  # fmt: skip


@dataclass(frozen=True)
class Planted:
    """The surface of `choosing.trainings.OnTask`. `interrupt` is called before every row."""

    interrupt: Callable[[int], None] = lambda made: None
    made: list[str] = dataclasses.field(default_factory=list, compare=False)

    model = None
    name = "planted"
    tokens = 5
    steps = 10
    causal = True

    def run(self, shape: Shape, lr: float, seed: int) -> PlantedRun:
        return PlantedRun(shape, lr, seed)

    def loss(self, row: Row) -> float:
        return row["held_out"] if row["status"] == "done" else math.inf

    def work(self, run: PlantedRun) -> float:
        return 1.0

    def spec(self) -> dict[str, Any]:
        return {"task": {"name": "planted"}}

    def make(self, runs: Sequence[PlantedRun], store: Store, **how: Any) -> None:
        for run in store.missing(runs):
            if how["stop"].asked():
                raise Stopped(how["stop"].number)
            self.interrupt(len(self.made))
            self.made.append(run.id)
            store.add(run.row())
