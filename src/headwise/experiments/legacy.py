"""Experiments that are still modules, as values, until they are converted."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from headwise.experiments.base import ERRORS, Experiment
from headwise.show.figure import of_dict


class DictPoint(dict[str, Any]):
    """A point that is still a dict."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def cell(self, key: str) -> str:
        value = self[key]
        if value is None:
            return "diverged" if key == "held_out" else "-"
        if key == "held_out" and self.get("low") is not None:
            return f"{value:.4f} ± {(self['high'] - self['low']) / 2:.4f}"
        if isinstance(value, bool):
            return "yes" if value else "NO"
        if key == "off":
            return f"{value:+.2%}"
        if isinstance(value, float) and abs(value) >= 10_000:
            return f"{value:,.0f}"
        if isinstance(value, float):
            return f"{value:.4f}" if key in ("held_out", "train_best") else f"{value:.4g}"
        return f"{value:,}" if isinstance(value, int) else str(value)


def as_plain(point: Any) -> dict[str, Any]:
    import dataclasses

    return dict(point) if isinstance(point, dict) else dataclasses.asdict(point)


@functools.cache
def converted(name: str, module: ModuleType) -> Experiment[Any, Any]:
    parts = vars(module)
    return Experiment(
        name=name,
        question=parts["QUESTION"],
        about=(module.__doc__ or "").strip().partition("\n")[0],
        presets=parts.get("PRESETS", {}),
        columns=parts["COLUMNS"],
        runs=parts.get("runs", list),
        summary=lambda rows: [DictPoint(p) for p in module.summary(rows)],
        headline=module.headline,
        figure=lambda points: of_dict(module.figure(points)),
        notes=parts.get("NOTES", {}),
        caption=parts.get("CAPTION", ERRORS),
        views={
            view: lambda points, draw=draw: of_dict(draw(points))
            for view, draw in parts.get("VIEWS", {}).items()
        },
        then=parts.get("then"),
        keep_weights=parts.get("KEEP", False),
        probe=parts.get("probe"),
        make=parts.get("make"),
    )


def _modules() -> dict[str, ModuleType]:
    from headwise import experiments

    return {
        name: importlib.import_module(f"headwise.experiments.{module}")
        for name, module in experiments.EXPERIMENTS.items()
    }


EXPERIMENTS = _modules()
PARTS = ("QUESTION", "PRESETS", "COLUMNS", "runs", "summary", "headline", "figure")


def find(name: str) -> ModuleType:
    return EXPERIMENTS[name]


def page(name: str) -> ModuleType:
    return importlib.import_module("headwise.experiments.pretrained")


def cell(point: Any, key: str) -> str:
    return point.cell(key) if not isinstance(point, dict) else DictPoint(point).cell(key)


def settings_of(module: Any, preset: str, changes: Any = (), seeds: int | None = None) -> Any:
    from headwise.experiments import settings

    if isinstance(module, Experiment):
        return settings.settings_of(module, preset, changes, seeds)
    if "EXPERIMENT" in vars(module):
        return settings.settings_of(module.EXPERIMENT, preset, changes, seeds)
    name = next(n for n, m in EXPERIMENTS.items() if m is module)
    return settings.settings_of(converted(name, module), preset, changes, seeds)
