"""How many attention heads, of what rank, how deep? headwise measures the answer.

The names below are the public interface; each is imported when it is first used, so that `import
headwise` costs nothing.
"""

from __future__ import annotations

import importlib

# As in typing, whose import takes longer than this file.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "Classified",
    "Decoder",
    "Encoder",
    "Farthest",
    "Model",
    "Nearest",
    "Plan",
    "Recipe",
    "Run",
    "Shape",
    "SquaredError",
    "Store",
    "Task",
    "UsageError",
    "attend",
    "choose",
    "convert",
    "explain",
    "explore",
    "inspect",
    "plan",
    "run",
    "train",
]

_HOME = {
    "Shape": "shape",
    "UsageError": "errors",
    "Attention": "model.attention",
    "attend": "model.dispatch",
    "explain": "model.backends",
    "Encoder": "model.transformer",
    "Decoder": "model.transformer",
    "Task": "tasks.task",
    "Classified": "tasks.task",
    "SquaredError": "tasks.task",
    "Model": "model.own",
    "Farthest": "tasks",
    "Nearest": "tasks",
    "explore": "explorer.explore",
    "plan": "planning.plan",
    "Plan": "planning.result",
    "Recipe": "training.run",
    "Run": "training.run",
    "run": "experiments.runner",
    "choose": "choosing.recommend",
    "train": "training.engine",
    "Store": "store",
    "inspect": "diagnose.inspection",
    "convert": "converting.convert",
}

if TYPE_CHECKING:
    from headwise.choosing.recommend import choose
    from headwise.converting.convert import convert
    from headwise.diagnose.inspection import inspect
    from headwise.errors import UsageError
    from headwise.experiments.runner import run
    from headwise.explorer.explore import explore
    from headwise.model.attention import Attention
    from headwise.model.backends import explain
    from headwise.model.dispatch import attend
    from headwise.model.own import Model
    from headwise.model.transformer import Decoder, Encoder
    from headwise.planning.plan import plan
    from headwise.planning.result import Plan
    from headwise.shape import Shape
    from headwise.store import Store
    from headwise.tasks import Farthest, Nearest
    from headwise.tasks.task import Classified, SquaredError, Task
    from headwise.training.engine import train
    from headwise.training.run import Recipe, Run


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headwise.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
