"""Tasks: one file each, no knowledge of models.

A task is a frozen dataclass that derives from `Task`: `sample(generator, batch, step) -> (inputs,
targets)`, `loss(outputs, targets)` that keeps a leading model axis, `tokens`, and `baselines()`,
the errors of predictors that need no training. A class in a user's own file is as good as one of
these (`headwise.tasks.own`).

The classes are imported when they are first used, so that naming a task costs nothing.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headwise.errors import UsageError, nearest

if TYPE_CHECKING:
    from headwise.tasks.images import Images
    from headwise.tasks.listops import ListOps
    from headwise.tasks.lookup import Lookup
    from headwise.tasks.masked import Masked
    from headwise.tasks.neighbors import BiasedNearest, Farthest, Nearest
    from headwise.tasks.recall import Recall
    from headwise.tasks.regression import Regression
    from headwise.tasks.sentences import Sentences
    from headwise.tasks.task import Classified, SquaredError, Task
    from headwise.tasks.text import Text

PACKAGE = "headwise.tasks."  # the modules of built-in tasks are named so, others are a user's
# name in rows and run ids -> (file, class)
TASKS: dict[str, tuple[str, str]] = {
    "farthest": ("neighbors", "Farthest"),
    "nearest": ("neighbors", "Nearest"),
    "biased-nearest": ("neighbors", "BiasedNearest"),
    "regression": ("regression", "Regression"),
    "text": ("text", "Text"),
    "images": ("images", "Images"),
    "listops": ("listops", "ListOps"),
    "recall": ("recall", "Recall"),
    "lookup": ("lookup", "Lookup"),
    "sentences": ("sentences", "Sentences"),
    "masked": ("masked", "Masked"),
}
_FILE_OF = {name: file for file, name in TASKS.values()} | dict.fromkeys(
    ("Task", "Classified", "SquaredError"), "task"
)

__all__ = [
    "TASKS",
    "BiasedNearest",
    "Classified",
    "Farthest",
    "Images",
    "ListOps",
    "Lookup",
    "Masked",
    "Nearest",
    "Recall",
    "Regression",
    "Sentences",
    "SquaredError",
    "Task",
    "Text",
    "task_class",
    "task_of",
]


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module 'headwise.tasks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headwise.tasks.{_FILE_OF[name]}"), name)


def task_class(name: str) -> type[Task]:
    """The class of a built-in task; unknown names are refused with the nearest ones."""
    if name not in TASKS:
        raise UsageError(f"unknown task {name!r}; {nearest(name, TASKS)}")
    file, kind = TASKS[name]
    return getattr(importlib.import_module(f"headwise.tasks.{file}"), kind)


def task_of(name: str, fields: Mapping[str, Any]) -> Task:
    """A built-in task by name; unknown names and keys are refused with the nearest ones."""
    kind = task_class(name)
    check_fields(kind, f"task {name}", fields)
    return kind(**fields)


def check_fields(kind: type[Any], what: str, fields: Mapping[str, Any]) -> None:
    """Refuse names that are not fields of a dataclass, and fields that are missing."""
    # A field without a default is needed; a field that __init__ does not take cannot be given.
    needed = {
        f.name: f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        for f in dataclasses.fields(kind)
        if f.init
    }
    for key in fields:
        if key not in needed:
            choices = nearest(key, needed) if needed else "it has no fields"
            raise UsageError(f"unknown key {key!r} of {what}; {choices}")
    missing = [key for key, is_needed in needed.items() if is_needed and key not in fields]
    if missing:
        raise UsageError(f"{what} needs {', '.join(missing)}")
