"""A tracker by name, or from a file of one's own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise.errors import UsageError, nearest, one_line, shown
from headwise.files import load_user_file
from headwise.tracking.runs import Tracker

# name -> (its module in PACKAGE, its class, what its destination is)
PACKAGE = "headwise.integrations.trackers"
TRACKERS = {
    "tensorboard": ("tensorboard", "TensorBoard", "a folder; default STORE/tensorboard"),
    "wandb": ("wandb", "WeightsAndBiases", "PROJECT or ENTITY/PROJECT; default headwise"),
    "mlflow": ("mlflow", "MLflow", "a tracking URI; default as MLflow's own"),
    "trackio": ("trackio", "Trackio", "a project; default headwise"),
}
OWN = "or a file of yours, my_tracker.py:MyTracker"


def find(name: str, destination: str = "", store: str | Path = ".") -> Tracker:
    """A built-in tracker, or what a file of one's own names: a function that takes a run, or a
    class whose instances do. A class is made with the destination, where one is given.

    A package that is missing, and a destination that cannot be used, are refused here.
    """
    path, _, wanted = name.partition(":")
    if path.endswith(".py"):
        return _own(path, wanted, destination)
    if name not in TRACKERS:
        raise UsageError(f"unknown tracker {shown(name)}; {nearest(name, TRACKERS)}; {OWN}")
    module, kind, _ = TRACKERS[name]
    if name == "tensorboard":
        destination = destination or str(Path(store) / "tensorboard")
    try:
        made = getattr(importlib.import_module(f"{PACKAGE}.{module}"), kind)(destination)
    except ModuleNotFoundError as e:
        if str(e.name).partition(".")[0] == "headwise":
            raise
        raise UsageError(
            f"the tracker {name} needs {e.name}: pip install 'headwise[{name}]'"
        ) from None
    return made


def _own(path: str, name: str, destination: str) -> Tracker:
    """The function, class or value of a user's file."""
    try:
        module = load_user_file(path)
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except SyntaxError as e:
        raise UsageError(f"{path} is not Python: line {e.lineno}: {e.msg}") from None
    except (Exception, SystemExit) as e:
        raise UsageError(f"{path} cannot be loaded: {one_line(e)}") from None
    written = {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", "") == module.__name__
    }
    choices = {key: value for key, value in written.items() if callable(value)}
    if not name and len(choices) != 1:
        found = f"it has {', '.join(choices)}" if choices else "it has none"
        raise UsageError(
            f"{path} must name its tracker, as in {path}:MyTracker, unless it has exactly one "
            f"function or class; {found}"
        )
    if name and name not in vars(module):
        hint = nearest(name, choices) if choices else "it has no function or class"
        raise UsageError(f"{path} has no {shown(name)}; {hint}")
    value = vars(module)[name] if name else next(iter(choices.values()))
    label = f"{path}:{name}" if name else path
    if isinstance(value, type):
        value = _built(label, value, destination)
    elif destination:
        raise UsageError(f"{label} is no class and takes no destination, got {shown(destination)}")
    if not callable(value) or not _takes_one(value):
        raise UsageError(
            f"the tracker {label} must be a function of one run, or a class with __call__(self, "
            f"run), got {shown(value)}"
        )
    return value


def _built(label: str, kind: type[Any], destination: str) -> Any:
    try:
        return kind(destination) if destination else kind()
    except UsageError:
        raise
    except Exception as e:
        raise UsageError(f"the tracker {label} cannot be made: {one_line(e)}") from None


def _takes_one(value: Callable[..., Any]) -> bool:
    """Whether it can be called with one argument, as far as Python can tell."""
    try:
        inspect.signature(value).bind(None)
    except TypeError:
        return False
    except ValueError:  # written in C
        return True
    return True
