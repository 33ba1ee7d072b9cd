"""Experiments: one file a figure or table.

A module has `QUESTION` (one sentence), `PRESETS` (name -> frozen settings), `runs(settings)`, `summary(rows)` (plain
dicts, one a point, with intervals and published values) and `figure(points)` (what `headwise.figures` draws). Its
docstring holds the command, the hardware, the time and the expected numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from headwise.experiments import fig1
from headwise.shape import UsageError, nearest

EXPERIMENTS: dict[str, ModuleType] = {"fig1": fig1}


def settings_of(module: ModuleType, preset: str, changes: Sequence[str] = (), seeds: int | None = None) -> Any:
    """A preset with `key=value` changes; unknown presets and keys are refused with the nearest ones."""
    if preset not in module.PRESETS:
        raise UsageError(f"unknown preset {preset!r}; {nearest(preset, module.PRESETS)}")
    base = module.PRESETS[preset]
    values = {} if seeds is None else {"seeds": seeds}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise UsageError(f"--set takes key=value, got {change!r}")
        known = [f.name for f in dataclasses.fields(base)]
        if key not in known:
            raise UsageError(f"unknown setting {key!r}; {nearest(key, known)}")
        values[key] = _parse(key, text, getattr(base, key))
    return dataclasses.replace(base, **values)


def _parse(key: str, text: str, like: Any) -> Any:
    """Text as a value of the same kind as the preset's: a number, a word, or a comma-separated list of them."""
    if isinstance(like, tuple):
        return tuple(_parse(key, part, like[0]) for part in text.split(",") if part)
    if isinstance(like, str):
        return text
    try:
        return type(like)(text.replace("_", ""))
    except ValueError:
        kind = "a whole number" if isinstance(like, int) else "a number"
        raise UsageError(f"{key} must be {kind}, got {text!r}") from None
