"""What a result row is: one flat dict per run, and the check that every row from a file passes.
Standard library only."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol

from headwise.errors import UsageError

Row = dict[str, Any]
Work = Literal["train", "pretrain", "compute"]

CHECKPOINT_FILE = "checkpoint.safetensors"  # in the folder of a run that is under way
WEIGHTS_FILE = "weights.safetensors"  # in the folder of a run whose weights were kept
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
    for key, value in json.loads(json.dumps(run.columns())).items():
        if key in row and row[key] != value:
            return f"{key} is {value!r} in that run, got {row[key]!r}"
    return _unfit(row, TRAINED if run.work == "train" else SHOWN)


SHOWN: dict[str, Callable[[Any], bool]] = {
    "seconds": _number,
    "device": lambda value: isinstance(value, str),
}
TRAINED = {
    **dict.fromkeys(
        ("dim", "depth", "num_heads", "head_dim", "average", "protocol", "steps", "seed", "params"),
        lambda value: True,
    ),
    **SHOWN,
    "zero_error": _number,
    "held_out": lambda value: value is None or _number(value),
    "train_best": lambda value: value is None or _number(value),
    "curve": lambda value: isinstance(value, list) and all(v is None or _number(v) for v in value),
    "held_out_curve": lambda value: (
        isinstance(value, list) and all(isinstance(v, list) and len(v) == 2 for v in value)
    ),
}


def _unfit(row: Row, needs: dict[str, Callable[[Any], bool]]) -> str:
    """Which value of a row is missing, or is none that tables and pages can show."""
    if missing := [key for key in needs if key not in row]:
        return f"it has no {missing[0]}"
    if row["status"] == "done" and row.get("held_out", 0.0) is None:
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
