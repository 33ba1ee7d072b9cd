"""A user's own tasks, models and probes in another process: as words of its command line, and back.

A specification in a store names no file that would be loaded. So the driver says on the worker's
command line where its own code came from, the worker loads that and nothing else, finds the classes
by the names in the specifications, and compares the digests of their code with the driver's.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from headwise.errors import UsageError, one_line, shown
from headwise.execute.sources import digest
from headwise.files import load_user_file
from headwise.lm.spec import Pretraining
from headwise.shape import Shape
from headwise.tasks import TASKS, task_of
from headwise.training.run import Recipe, Run


def own_classes(runs: Sequence[Any]) -> set[type]:
    """The classes of tasks and models that are not headwise's."""
    classes = {type(part) for run in runs if isinstance(run, Run) for part in (run.task, run.model)}
    return {kind for kind in classes - {type(None)} if not kind.__module__.startswith("headwise.")}


def digests_of(runs: Sequence[Any]) -> dict[str, str]:
    """A digest of each of these classes' code, by name; those whose code is in no file are left
    out."""
    found = {kind.__name__: digest(kind) for kind in own_classes(runs)}
    return {name: text for name, text in found.items() if text}


def words_of(runs: Sequence[Any], probe: Any = None) -> tuple[str, ...]:
    """What the worker's command line says of the user's code: `--code WHERE`, `--probe
    WHERE:NAME`. A class that no other process finds is refused."""
    words: list[str] = []
    for place in sorted({_place(kind, "its class") for kind in own_classes(runs)}):
        words += ["--code", place]
    if probe is not None:
        words += ["--probe", f"{_place(probe, 'the probe')}:{probe.__qualname__}"]
    return tuple(words)


def _place(value: Any, what: str) -> str:
    """The file or the module that another process can load to find a class or a function."""
    name = value.__qualname__
    module = sys.modules.get(value.__module__)
    file = None if module is None else vars(module).get("__file__")
    # A name within a function, or in a notebook's cell, is nowhere else.
    if module is None or file is None or "<locals>" in name or not _has(module, name):
        raise UsageError(
            f"{name} cannot reach a worker, {what} is in no file: put it into one, as in "
            "my_task.py:MyTask, or use --on ray, which carries it"
        )
    if value.__module__.startswith("headwise."):
        return value.__module__
    return str(Path(file).resolve()) if str(file).endswith(".py") else value.__module__


def _has(module: ModuleType, qualified: str) -> bool:
    value: Any = module
    for part in qualified.split("."):
        value = vars(value).get(part) if hasattr(value, "__dict__") else None
    return value is not None


# ---- in the worker


def _module(place: str) -> ModuleType:
    """The code at a place that the command line names."""
    try:
        return load_user_file(place) if place.endswith(".py") else importlib.import_module(place)
    except FileNotFoundError:
        raise UsageError(f"there is no file {place} on this machine") from None
    except (Exception, SystemExit) as e:
        raise UsageError(f"{place} cannot be loaded: {one_line(e)}") from None


def probe_of(word: str) -> Callable[..., Any] | None:
    """The function that `--probe` names; none where it is empty."""
    if not word:
        return None
    place, _, name = word.rpartition(":")
    value: Any = _module(place) if place else None
    for part in name.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        raise UsageError(f"--probe names a function, FILE.py:NAME, got {shown(word)}")
    return value


def runs_of(
    work: str,
    ids: Sequence[str],
    specs: Sequence[Mapping[str, Any]],
    code: Sequence[str] = (),
    digests: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs from their specifications, with classes of one's own from the places in `code`."""
    classes: dict[str, type] = {}
    if work != "pretrain":
        classes = {name: kind for place in code for name, kind in _classes(_module(place))}
        for name, expected in (digests or {}).items():
            kind = next((kind for kind in classes.values() if kind.__name__ == name), None)
            if kind is not None and digest(kind) not in ("", expected):
                raise UsageError(
                    f"the code of {name} on this machine is not that of the driver: copy "
                    f"{', '.join(code)} again"
                )
    runs = []
    for run_id, spec in zip(ids, specs, strict=True):
        try:
            run = Pretraining.of(dict(spec)) if work == "pretrain" else _run_of(spec, classes, code)
            found = run.id
        except UsageError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise UsageError(
                f"run {run_id} cannot be made from its specification: {one_line(e)}"
            ) from None
        if found != run_id:
            raise UsageError(
                f"run {run_id} cannot be made from its specification, which is that of {found}"
            )
        runs.append(run)
    return runs


def _classes(module: ModuleType) -> Iterator[tuple[str, type]]:
    """The classes of a module by the names that specifications have for them."""
    for value in vars(module).values():
        if isinstance(value, type) and isinstance(vars(value).get("__module__"), str):
            yield str(vars(value).get("name") or value.__name__), value


def _run_of(spec: Mapping[str, Any], classes: Mapping[str, type], code: Sequence[str]) -> Run:
    task, model = dict(spec["task"]), spec.get("model")
    name = str(task.pop("name"))
    return Run(
        Shape.of(spec["shape"]),
        task_of(name, task) if name in TASKS else _value(name, task, classes, code),
        Recipe(**spec["recipe"]),
        spec["seed"],
        None if model is None else _value(str(model["name"]), model, classes, code),
    )


def _value(
    name: str, fields: Mapping[str, Any], classes: Mapping[str, type], code: Sequence[str]
) -> Any:
    """An instance of a user's class."""
    if name not in classes:
        places = ", ".join(code) or "the worker's command line, which names no --code"
        raise UsageError(f"there is no {name} in {places}")
    given = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in fields.items()
        if key not in ("name", "version")
    }
    try:
        return classes[name](**given)
    except Exception as e:
        raise UsageError(f"{name} cannot be made: {one_line(e)}") from None
