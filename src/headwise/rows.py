"""What a result row is: one flat dict per run, and the check that every row from a file passes.
Standard library only."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol

from headwise.errors import UsageError

Row = dict[str, Any]
Work = Literal["train", "pretrain", "compute"]

CHECKPOINT_FILE = "checkpoint.safetensors"  # in the folder of a run that is under way
WEIGHTS_FILE = "weights.safetensors"  # in the folder of a run whose weights were kept
SAMPLE_FILE = "sample.json"  # in the folder of a decoder: a text that it wrote
MEASURED = frozenset(  # what differs when the same run is made again
    {
        "seconds",
        "finished",
        "memory_bytes",
        "models",
        "commit",
        "headwise",
        "torch",
        "python",
        "device",
        "host_cpus",
        "resumed",
    }
)

PATHS = ("source", "tokenizer")  # where a text lies: no part of what a run is


# ---- specifications


def id_of(spec: Mapping[str, Any]) -> str:
    """The id of the run with this specification, a hash of it; empty where only the run's own class
    knows it."""
    if "experiment" in spec:  # something computed
        return _hashed(json.dumps(spec, sort_keys=True))
    if {"shape", "task", "recipe", "seed"} <= spec.keys():
        return _hashed(json.dumps(spec, sort_keys=True, separators=(",", ":")))
    if {"shape", "batch_tokens", "digest"} <= spec.keys():  # of one decoder
        rest = {name: value for name, value in spec.items() if name not in PATHS}
        return _hashed(json.dumps({"pretrain": rest}, sort_keys=True, separators=(",", ":")))
    return ""


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def columns_of(spec: Mapping[str, Any]) -> Row:
    """A specification as the columns of its row. `held_out` is the error there, so the recipe's
    count has another name."""
    if "experiment" in spec:
        return {name: value for name, value in spec.items() if name != "experiment"}
    shape = {key: value for key, value in spec["shape"].items() if key != "extras"}
    own = {
        part if key == "name" else f"{part}_{key}": value
        for part in ("task", "model")
        for key, value in spec.get(part, {}).items()
    }
    recipe = {
        "held_out_sequences" if key == "held_out" else key: value
        for key, value in spec.get("recipe", {}).items()
    }
    parts = ("shape", "task", "model", "recipe", *PATHS)
    rest = {name: value for name, value in spec.items() if name not in parts}
    return {**shape, **own, **recipe, **rest}


def _contradiction(row: Row, columns: Mapping[str, Any]) -> str:
    """Where a row is not that of a run with these columns; empty: nowhere."""
    for key, value in json.loads(json.dumps(columns)).items():
        if key in row and row[key] != value:
            return f"{key} is {value!r} in that run, got {row[key]!r:.80}"
    return ""


# ---- tasks and models


def named_spec(value: Any) -> dict[str, Any]:
    """A task or model as plain values: its name, its version where it is not 1, and its fields.

    A class that sets no `name` of its own goes by its class name, so that a subclass is never taken
    for its parent.
    """
    kind = type(value)
    version = {} if kind.version == 1 else {"version": kind.version}
    return {"name": vars(kind).get("name") or kind.__name__, **version, **dataclasses.asdict(value)}


def check_value(value: Any, word: str) -> None:
    """Refuse a task or model that cannot stand in a run's specification: it must be a frozen
    dataclass of plain values."""
    name = type(value).__name__
    if not dataclasses.is_dataclass(value):
        raise UsageError(f"{word} {name} must be a frozen dataclass")
    check_class(name, type(value))
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        try:
            hash(held)
            plain = dataclasses.asdict(held) if dataclasses.is_dataclass(held) else held
            json.dumps(plain, allow_nan=False)
        except (TypeError, ValueError):
            raise UsageError(
                f"field {field.name} of {word} {name} must be a plain value (number, text, "
                f"True, None or a tuple of them), got {held!r:.80}"
            ) from None


def check_class(name: str, chosen: type[Any]) -> None:
    """Refuse fields that `dataclass` does not see, or that hide behind a property."""
    own = [
        field
        for field, annotation in inspect.get_annotations(chosen).items()
        if "ClassVar" not in str(annotation)
    ]
    if own and "__dataclass_fields__" not in vars(chosen):
        raise UsageError(
            f"{name} must be decorated with @dataclass(frozen=True), or its field"
            f"{'s' * (len(own) > 1)} {', '.join(own)} would not count"
        )
    for field in own:
        if isinstance(inspect.getattr_static(chosen, field, None), property):
            raise UsageError(
                f"field {field} of {name} needs a default, as in {field}: int = 8, because its "
                "base has a property of that name"
            )


# ---- runs and their rows


class Specified(Protocol):
    """A value that has a row: a run of the engine, of one decoder, or something computed."""

    work: ClassVar[Work]

    @property
    def id(self) -> str:
        """A hash of the specification."""
        ...

    def spec(self) -> dict[str, Any]:
        """The value as plain values."""
        ...

    def columns(self) -> Row:
        """The same as the columns of its row."""
        ...


def _number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value <= sys.float_info.max
    )


def check_row(row: Row, run: Specified | None = None) -> str:
    """What is wrong with a row that comes from a file, and, with a run, why it cannot be that
    run's; empty: nothing."""
    if row.get("status") not in ("done", "diverged"):
        return f"status must be done or diverged, got {row.get('status')!r}"
    if not isinstance(row.get("commit"), str):
        return f"commit must be a name, got {row.get('commit')!r}"
    for key, value in row.items():
        if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
            return f"{key} must be a finite number, got {str(value)[:20]}"
    if run is None:
        return ""
    needs = TRAINED if run.work == "train" else SHOWN
    return _contradiction(row, run.columns()) or _unfit(row, needs)


def check_columns(row: Row, spec: Mapping[str, Any]) -> str:
    """Why a row cannot be that of the run with this specification, or lacks what tables and pages
    show; empty: it can."""
    needs = TRAINED if "recipe" in spec else SHOWN
    return _contradiction(row, columns_of(spec)) or _unfit(row, needs)


def check_shown(row: Row) -> str:
    """Why a page cannot show a row, whatever run it is of; empty: it can."""
    return check_row(row) or _unfit(row, {**SHOWN, **(CURVES if "curve" in row else {})})


SHOWN: dict[str, Callable[[Any], bool]] = {
    "seconds": _number,
    "device": lambda value: isinstance(value, str),
}
CURVES: dict[str, Callable[[Any], bool]] = {  # what a learning curve and its label need
    **dict.fromkeys(("depth", "num_heads", "head_dim", "seed"), lambda value: True),
    "curve": lambda value: isinstance(value, list) and all(v is None or _number(v) for v in value),
    "held_out_curve": lambda value: (
        isinstance(value, list) and all(isinstance(v, list) and len(v) == 2 for v in value)
    ),
}
TRAINED: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("dim", "average", "protocol", "steps", "params"), lambda value: True),
    **SHOWN,
    "zero_error": _number,
    "held_out": lambda value: value is None or _number(value),
    "train_best": lambda value: value is None or _number(value),
    **CURVES,
}


def _unfit(row: Row, needs: dict[str, Callable[[Any], bool]]) -> str:
    """Which value of a row is missing, or is none that tables and pages can show."""
    if missing := [key for key in needs if key not in row]:
        return f"it has no {missing[0]}"
    if row.get("status") == "done" and row.get("held_out", 0.0) is None:
        return "held_out must be a number of at least 0, got None"
    for key, fits in needs.items():
        if not fits(row[key]):
            kind = (
                "a list of numbers"
                if "curve" in key
                else "a name"
                if key == "device"
                else "a number of at least 0"
            )
            return f"{key} must be {kind}, got {repr(row[key])[:40]}"
    return ""
