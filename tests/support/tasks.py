"""Examples of every built-in task, in one place: a new task adds one entry here. And the loss of a
class, in numpy."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwise.tasks import TASKS, Task, task_class, task_of
from headwise.tasks.neighbors import Neighbors

NEIGHBORS = sorted(name for name in TASKS if issubclass(task_class(name), Neighbors))


@dataclass(frozen=True)
class Example:
    """A small task, and what the contract's tests have to know about it."""

    name: str
    fields: dict[str, Any]  # of a small one
    other: dict[str, Any]  # changed in another one
    least: dict[str, int]  # every whole number, and the least it may be
    long_fields: dict[str, Any] = field(default_factory=dict)  # so that no sequence comes twice
    has_data: bool = False  # what is evaluated is held out of what is trained on

    @property
    def task(self) -> Task:
        return task_of(self.name, self.fields)

    @property
    def long(self) -> Task:
        return task_of(self.name, self.fields | self.long_fields)


POINTS = {"dim": 7, "points": 5}
EXAMPLES = {
    example.name: example
    for example in (
        *(
            Example(name, POINTS, other={"points": 6}, least={"dim": 2, "points": 2})
            for name in NEIGHBORS
        ),
        Example(
            "regression",
            POINTS,
            other={"points": 6},
            least={"dim": 1, "points": 2, "curriculum": 0, "first_dim": 1, "first_points": 1},
        ),
        Example(
            "text",
            {"length": 7},
            other={"length": 5},
            least={"length": 2, "most": 2},
            long_fields={"length": 101},
            has_data=True,
        ),
        Example("images", {"patch": 8}, other={"patch": 2}, least={"patch": 1}, has_data=True),
        Example(
            "listops",
            {"length": 11, "depth": 2, "examples": 97},
            other={"examples": 89},
            least={"length": 5, "depth": 1, "arguments": 2, "examples": 1},
            has_data=True,
        ),
        Example(
            "recall",
            {"pairs": 5, "keys": 7, "values": 3},
            other={"values": 2},
            least={"pairs": 1, "keys": 1, "values": 2, "queries": 0},
        ),
        Example(
            "lookup",
            {"keys": 5, "values": 3},
            other={"values": 2},
            least={"keys": 2, "values": 2, "queries": 0},
            long_fields={"keys": 19},
        ),
        Example(
            "sentences",
            {"length": 29},
            other={"examples": 101},
            least={"length": 3, "most": 1, "examples": 0},
            long_fields={"length": 61},
            has_data=True,
        ),
        Example(
            "masked",
            {"length": 13, "level": "byte"},
            other={"share": 0.3},
            least={"length": 2, "most": 2},
            long_fields={"length": 101},
            has_data=True,
        ),
    )
}


def softmax_losses(logits, targets):
    """-log softmax at the targets, in numpy."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_odds = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(log_odds, targets[..., None], -1)[..., 0]
