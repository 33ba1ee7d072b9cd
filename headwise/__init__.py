"""How many attention heads, of what rank, how deep? headwise measures the answer.

The names below are the public interface; each is imported when it is first used, so that `import headwise` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "Decoder",
    "Encoder",
    "Farthest",
    "Nearest",
    "Recipe",
    "Run",
    "Shape",
    "Store",
    "UsageError",
    "attend",
    "explain",
    "train",
]

_HOME = {
    "Shape": "shape",
    "UsageError": "shape",
    "Attention": "attention",
    "attend": "attention",
    "explain": "backends",
    "Encoder": "models",
    "Decoder": "models",
    "Farthest": "tasks",
    "Nearest": "tasks",
    "Recipe": "runs",
    "Run": "runs",
    "train": "engine",
    "Store": "store",
}

if TYPE_CHECKING:
    from headwise.attention import Attention, attend
    from headwise.backends import explain
    from headwise.engine import train
    from headwise.models import Decoder, Encoder
    from headwise.runs import Recipe, Run
    from headwise.shape import Shape, UsageError
    from headwise.store import Store
    from headwise.tasks import Farthest, Nearest


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headwise.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
