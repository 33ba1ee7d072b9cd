"""Tasks and models from a user's own Python file: `my_task.py`, `my_task.py:MyTask`, or
`my_task.py:MyTask(points=8, dim=16)`.

The file that is named is the only place code comes from: arguments are read as plain values and
never evaluated, and no row or store names a file that would be loaded. Every mistake is a
`UsageError` of one line. Loads torch only when it loads a file.
"""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from headwise.errors import UsageError, nearest, one_line
from headwise.files import load_user_file
from headwise.rows import check_class, check_value
from headwise.tasks import check_fields

if TYPE_CHECKING:
    from headwise.model.own import Model
    from headwise.tasks.task import Task

SPEC = re.compile(r"(?P<path>.*?\.py)(?::(?P<name>[^()]*)(?P<arguments>\(.*\))?)?", re.DOTALL)


@dataclass(frozen=True)
class _Kind:
    """What is looked for in a file: a task or a model."""

    word: str  # "task"
    base: type[Any]  # what its class derives from
    method: str  # what its class must write; one that does not is a base of others
    value: str  # a module-level value of that name is taken where none is named


def is_file_spec(text: str) -> bool:
    """Whether a text names a user's file rather than something built in.

    >>> is_file_spec("my_task.py:MyTask(points=8)"), is_file_spec("farthest")
    (True, False)
    """
    return SPEC.fullmatch(text) is not None


def load_task(spec: str) -> Task:
    """The task that a user's file holds: `FILE.py`, `FILE.py:NAME` or `FILE.py:NAME(field=value)`.

    A file with one class that derives from `headwise.Task`, or with a value `TASK`, needs no name.
    The cheap part of the contract is tested at once.
    """
    from headwise.tasks.first_check import check_first_sample

    task = _load(spec, _task_kind())
    check_first_sample(task)
    return task


def load_model(spec: str) -> Model:
    """The model that a user's file holds, named as for `load_task`; the value is `MODEL`."""
    return _load(spec, _model_kind())


def _task_kind() -> _Kind:
    from headwise.tasks.task import Task

    return _Kind("task", Task, "sample", "TASK")


def _model_kind() -> _Kind:
    from headwise.model.own import Model

    return _Kind("model", Model, "build", "MODEL")


def load_task_and_model(spec: str) -> tuple[Task | None, Model | None]:
    """What a user's file holds: a task, a model, or one of each."""
    # A name in the spec says which of the two is meant; a file alone may hold one of each.
    tasks, models = _task_kind(), _model_kind()
    found = _parsed(spec)
    module = _module(found["path"])
    if found["name"] is not None:
        value = vars(module).get(found["name"])
        kind = value if isinstance(value, type) else type(value)
        return (
            (None, load_model(spec)) if issubclass(kind, models.base) else (load_task(spec), None)
        )

    def held(kind: _Kind) -> Any:
        there = kind.value in vars(module) or _choices(module, kind)
        return _load(spec, kind) if there else None

    task, model = held(tasks), held(models)
    if task is None and model is None:
        raise UsageError(
            f"{spec} has no task and no model: it needs a class that derives from headwise.Task or "
            "headwise.Model"
        )
    return task, model


def _parsed(spec: str) -> re.Match[str]:
    found = SPEC.fullmatch(spec)
    if found is None:
        raise UsageError(
            "a task or model of your own is FILE.py, FILE.py:NAME or FILE.py:NAME(field=value), "
            f"got {spec!r}"
        )
    return found


def _load(spec: str, kind: _Kind) -> Any:
    found = _parsed(spec)
    # First the arguments, since their mistakes need no file. Then the file, then what it holds.
    path, name = found["path"], found["name"]
    arguments = _arguments(spec, found["arguments"])
    module = _module(path)
    chosen = _chosen(path, module, kind) if name is None else _named(path, module, name, kind)
    if isinstance(chosen, type):
        chosen = _built(path, chosen, kind, arguments or {})
    elif arguments is not None:
        raise UsageError(f"{name} in {path} is a value and takes no arguments, got {spec!r}")
    check_value(chosen, kind.word)
    return chosen


def _arguments(spec: str, text: str | None) -> dict[str, Any] | None:
    """`(points=8, dim=16)` as plain values; None where there are no parentheses."""
    if text is None:
        return None
    try:
        # The text is parsed as a call and never evaluated; only literals pass below.
        call = ast.parse(f"f{text}", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        call = None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise UsageError(f"arguments must be written (field=value, ...), got {spec!r}")
    values: dict[str, Any] = {}
    if call.args:
        raise UsageError(
            f"arguments must be named, as in (field=value), got {ast.unparse(call.args[0])!r}"
        )
    for keyword in call.keywords:
        if keyword.arg is None:
            raise UsageError(f"arguments must be written (field=value, ...), got {spec!r}")
        if keyword.arg in values:
            raise UsageError(f"each argument must be given once, {keyword.arg} is given twice")
        try:
            values[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            raise UsageError(
                f"{keyword.arg} must be a plain value such as 8, 0.5 or 'text', got "
                f"{ast.unparse(keyword.value)[:80]!r}"
            ) from None
    return values


def _module(path: str) -> ModuleType:
    try:
        return load_user_file(path)
    except UsageError:
        raise
    # The file itself may open another file that is missing.
    except FileNotFoundError as e:
        if e.filename != str(Path(path).resolve()):
            raise UsageError(f"{path} cannot be loaded: {one_line(e)}") from None
        raise UsageError(f"there is no file {path}") from None
    except SyntaxError as e:
        raise UsageError(f"{path} is not Python: line {e.lineno}: {e.msg}") from None
    except (Exception, SystemExit) as e:
        hint = ": write @dataclass(frozen=True)" if "non-frozen dataclass" in str(e) else ""
        raise UsageError(f"{path} cannot be loaded: {one_line(e)}{hint}") from None


def _choices(module: ModuleType, kind: _Kind) -> dict[str, type[Any]]:
    """The classes that a file itself writes, without bases that only others derive from."""
    classes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, kind.base)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }
    # A class without the method is a base of others, unless there is nothing else.
    unwritten = vars(kind.base)[kind.method]
    complete = {
        name: value
        for name, value in classes.items()
        if inspect.getattr_static(value, kind.method) is not unwritten
    }
    return complete or classes


def _chosen(path: str, module: ModuleType, kind: _Kind) -> Any:
    """The value or the class of a file where none is named."""
    if kind.value in vars(module):
        value = vars(module)[kind.value]
        if not isinstance(value, kind.base):
            raise UsageError(
                f"{kind.value} in {path} must be a headwise.{kind.base.__name__}, got {value!r:.80}"
            )
        return value
    choices = _choices(module, kind)
    if not choices:
        raise UsageError(
            f"{path} has no {kind.word}: it needs a class that derives from "
            f"headwise.{kind.base.__name__}, or a value {kind.value}"
        )
    if len(choices) > 1:
        first = next(iter(choices))
        raise UsageError(
            f"{path} has {len(choices)} {kind.word}s, {', '.join(choices)}: name one, as in "
            f"{path}:{first}"
        )
    return next(iter(choices.values()))


def _named(path: str, module: ModuleType, name: str, kind: _Kind) -> Any:
    """The value or the class of that name in a file."""
    values = vars(module)
    if name not in values:
        known = {key for key, value in values.items() if isinstance(value, kind.base)} | _choices(
            module, kind
        ).keys()
        hint = nearest(name, known) if known else f"it has no {kind.word}"
        raise UsageError(f"{path} has no {name!r}; {hint}")
    value = values[name]
    if isinstance(value, kind.base) or (isinstance(value, type) and issubclass(value, kind.base)):
        return value
    raise UsageError(
        f"{name} in {path} must derive from headwise.{kind.base.__name__}, got {value!r:.80}"
    )


def _built(path: str, chosen: type[Any], kind: _Kind, arguments: Mapping[str, Any]) -> Any:
    """An instance of a user's class; what its constructor raises is said in one line."""
    name = f"{path}:{chosen.__name__}"
    check_class(name, chosen)
    check_fields(chosen, f"{kind.word} {name}", arguments)
    try:
        return chosen(**_typed(chosen, arguments))
    except UsageError as e:
        raise UsageError(f"{name}: {e}") from None
    except Exception as e:
        raise UsageError(f"{name} cannot be made: {one_line(e)}") from None


def _typed(chosen: type[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as their fields' types want them: a whole number may stand for another number, a
    list for a tuple. Types that are not plain ones are the class's own business."""
    try:
        types = typing.get_type_hints(chosen)
    except Exception:  # an annotation may name anything
        types = {}
    values = {}
    for field, value in arguments.items():
        wanted = types.get(field)
        if wanted is float and type(value) is int:
            value = float(value)  # 1 and 1.0 are one run
        if isinstance(value, list):
            value = tuple(value)
        if wanted in (int, float, str, bool) and type(value) is not wanted:
            raise UsageError(f"{field} must be of type {wanted.__name__}, got {value!r}")
        values[field] = value
    return values
