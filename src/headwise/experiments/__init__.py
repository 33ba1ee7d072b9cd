"""Experiments: one file a figure or table.

A module has `QUESTION` (one sentence), `PRESETS` (name -> frozen settings), `runs(settings)`,
`summary(rows)` (plain dicts, one a point, with intervals and published values), `COLUMNS` (which of
their values are shown, and their headings), `headline(points)` (the claim in numbers) and
`figure(points)` (what `headwise.show.figure` draws). It may have `NOTES` (preset -> what a reader
should bear in mind), `CAPTION` (what the figure's lines are), `VIEWS` (name -> another figure of
the same points), `then(settings, rows)` (runs that depend on those rows; asked until there are no
new ones), `KEEP` (whether the first ones' weights are kept, for the others to start from) and
`probe(run, weights)` (columns to add to a trained run's row); its settings may have `idle()` (name
-> why it would have no effect). Where nothing is trained, `runs` gives values with an `id`, a
`spec()` and `columns()`, and `make(value, device)` computes one's row. Its docstring holds the
command, the hardware, the time and the expected numbers. A file of your own with the same parts is
run by its path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from headwise.errors import UsageError, nearest
from headwise.experiments import nanochat_heads, pretrained
from headwise.experiments.leaner_paper import budget_map, conditioning, finetune, leaner, removable
from headwise.experiments.rank_paper import (
    dimension,
    features,
    fig1,
    learned,
    length,
    positions,
    regression,
    representation,
    theory,
)
from headwise.files import load_module

EXPERIMENTS: dict[str, ModuleType] = {
    "fig1": fig1,
    "learned": learned,
    "length": length,
    "positions": positions,
    "dimension": dimension,
    "regression": regression,
    "features": features,
    "representation": representation,
    "theory": theory,
    "conditioning": conditioning,
    "map": budget_map,
    "leaner": leaner,
    "removable": removable,
    "nanochat_heads": nanochat_heads,
    "finetune": finetune,
}
PAGES: dict[str, ModuleType] = {
    "pretrain": pretrained
}  # what other commands leave in a store: shown, not run
PARTS = ("QUESTION", "PRESETS", "COLUMNS", "runs", "summary", "headline", "figure")


def find(name: str) -> ModuleType:
    """An experiment by its name, or from a Python file with the same parts."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    if not name.endswith(".py"):
        raise UsageError(
            f"unknown experiment {name!r}; {nearest(name, EXPERIMENTS)}, or a Python file"
        )
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"there is no experiment file at {name}")
    try:
        module = load_module(
            f"headwise_experiment_{path.stem}", path
        )  # whatever the file is called, it hides no other module
    except UsageError:
        raise
    except Exception as e:
        raise UsageError(
            f"{name} cannot be loaded: {type(e).__name__}: {' '.join(str(e).split())}"
        ) from None
    missing = [part for part in PARTS if not hasattr(module, part)]
    if missing:
        raise UsageError(
            f"an experiment needs {', '.join(PARTS)}; {name} lacks {', '.join(missing)}"
        )
    return module


def page(name: str) -> ModuleType:
    """What a store's rows of that name are shown by."""
    return PAGES.get(name) or find(name)


def cell(point: dict[str, Any], key: str) -> str:
    """One value of a point for people; an error with its interval, a missing value as a dash."""
    value = point[key]
    if value is None:
        return "diverged" if key == "held_out" else "-"
    if key == "held_out" and point.get("low") is not None:
        return f"{value:.4f} ± {(point['high'] - point['low']) / 2:.4f}"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if key == "off":  # a budget
        return f"{value:+.2%}"
    if isinstance(value, float) and abs(value) >= 10_000:
        return f"{value:,.0f}"
    if isinstance(value, float):
        return f"{value:.4f}" if key in ("held_out", "train_best") else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def settings_of(
    module: ModuleType, preset: str, changes: Sequence[str] = (), seeds: int | None = None
) -> Any:
    """A preset with `key=value` changes; unknown presets and keys are refused with the nearest
    ones."""
    if preset not in module.PRESETS:
        raise UsageError(f"unknown preset {preset!r}; {nearest(preset, module.PRESETS)}")
    base = module.PRESETS[preset]
    if seeds is not None and not hasattr(base, "seeds"):
        raise UsageError(
            f"{module.__name__.rpartition('.')[2]} has no seeds to choose the number of"
        )
    values = {} if seeds is None else {"seeds": seeds}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise UsageError(f"--set takes key=value, got {change!r}")
        known = [f.name for f in dataclasses.fields(base)]
        if key not in known:
            raise UsageError(f"unknown setting {key!r}; {nearest(key, known)}")
        values[key] = _parse(key, text, getattr(base, key))
    settings = dataclasses.replace(base, **values)
    for key, why in settings.idle().items() if hasattr(settings, "idle") else ():
        if key in values:
            raise UsageError(f"{key} has no effect here: {why}")
    return settings


def _parse(key: str, text: str, like: Any) -> Any:
    """Text as a value of the same kind as the preset's: a number, a word, or a comma-separated list
    of them."""
    if isinstance(like, tuple):
        return tuple(_parse(key, part, like[0] if like else "") for part in text.split(",") if part)
    if isinstance(like, str) or like is None:
        return text
    if isinstance(like, bool):
        if text.lower() not in ("true", "false"):
            raise UsageError(f"{key} must be true or false, got {text!r}")
        return text.lower() == "true"
    try:
        return type(like)(text.replace("_", ""))
    except ValueError:
        kind = "a whole number" if isinstance(like, int) else "a number"
        raise UsageError(f"{key} must be {kind}, got {text!r}") from None
