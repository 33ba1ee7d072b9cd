"""What `map`, `leaner` and `removable` share: presets, and points with condition numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwise.experiments.base import Note
from headwise.experiments.points import Tuned, geometric_mean
from headwise.rows import Row

# Held equal, so that the numbers of the three can be set side by side; each adds what is its own.
QUICK: dict[str, Any] = {
    "dim": 32,
    "lrs": (0.01, 0.03),
    "beta2": 0.99,
    "weight_decay": 0.0,
    "points": 8,
    "pairs": 4,
    "length": 32,
    "seeds": 3,
    "steps": 700,
    "batch": 32,
    "warmup": 0.1,
    "schedule": "cosine",
    "protocols": ("stream",),
    "held_out": 1024,
    "evals": 1,
}
PAPER: dict[str, Any] = {
    "dim": 64,
    "lrs": (0.001, 0.003, 0.01),
    "further": 2,
    "beta2": 0.99,
    "weight_decay": 0.0,
    "points": 16,
    "pairs": 8,
    "length": 64,
    "seeds": 3,
    "steps": 4000,
    "batch": 64,
    "warmup": 0.1,
    "schedule": "cosine",
    "protocols": ("stream",),
    "precision": "fp16",
    "epoch": 500,
    "evals": 2,
}


NOTES = {
    "paper": Note(
        "This preset is named paper for being the larger one. At width 64 it is the size of no "
        "experiment in a paper.",
        ("dim",),
    )
}


@dataclass(frozen=True, kw_only=True)
class Conditioned(Tuned):
    """A tuned point with the condition number of its heads' outputs at the start and at the end of
    training, as they are and without their mean token. `kappas` fills it."""

    kappa_start: float | None
    kappa_end: float | None
    kappa_centred_end: float | None

    def cell(self, key: str) -> str:
        """As `Tuned.cell`; of a large condition number two digits count."""
        value = getattr(self, key)
        if key.startswith("kappa") and value is not None and value >= 10_000:
            return f"{value:.1e}"
        return super().cell(key)


def kappas(rows: Sequence[Row]) -> dict[str, Any]:
    """The condition numbers of `Conditioned`: geometric means over the rows that have them."""
    names = ("kappa_start", "kappa_end", "kappa_centred_end")
    return {name: geometric_mean(row.get(name) for row in rows) for name in names}
