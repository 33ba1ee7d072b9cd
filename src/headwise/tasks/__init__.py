"""Tasks: one file each, no knowledge of models.

A task is a frozen dataclass with `sample(generator, batch, step) -> (inputs, targets)`,
`loss(outputs, targets)` that keeps a leading model axis, `tokens`, and `baselines()`: the errors of
predictors that need no training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from headwise.errors import UsageError, nearest
from headwise.tasks.images import Images
from headwise.tasks.listops import ListOps
from headwise.tasks.masked import Masked
from headwise.tasks.neighbors import BiasedNearest, Farthest, Nearest
from headwise.tasks.recall import Recall
from headwise.tasks.regression import Regression
from headwise.tasks.sentences import Sentences
from headwise.tasks.task import Task
from headwise.tasks.text import Text

TASKS: dict[str, type[Any]] = {
    "farthest": Farthest,
    "nearest": Nearest,
    "biased-nearest": BiasedNearest,
    "regression": Regression,
    "text": Text,
    "images": Images,
    "listops": ListOps,
    "recall": Recall,
    "sentences": Sentences,
    "masked": Masked,
}


def task_name(task: Task) -> str:
    """The name under which a task is known."""
    for name, kind in TASKS.items():
        if kind is type(task):
            return name
    raise UsageError(
        f"task {type(task).__name__} is not one of headwise's; choices: {', '.join(TASKS)}"
    )


def task_of(name: str, fields: Mapping[str, Any]) -> Task:
    """A task by name; unknown names and keys are refused with the nearest ones."""
    if name not in TASKS:
        raise UsageError(f"unknown task {name!r}; {nearest(name, TASKS)}")
    known = {f.name: f.default is dataclasses.MISSING for f in dataclasses.fields(TASKS[name])}
    for key in fields:
        if key not in known:
            raise UsageError(f"unknown key {key!r} of task {name}; {nearest(key, known)}")
    missing = [key for key, needed in known.items() if needed and key not in fields]
    if missing:
        raise UsageError(f"task {name} needs {', '.join(missing)}")
    return TASKS[name](**fields)


__all__ = [
    "TASKS",
    "BiasedNearest",
    "Farthest",
    "Images",
    "ListOps",
    "Masked",
    "Nearest",
    "Recall",
    "Regression",
    "Sentences",
    "Task",
    "Text",
    "task_name",
    "task_of",
]
