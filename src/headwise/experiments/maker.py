"""How an experiment's rows come to be: trained in ensembles, one decoder after another, or
computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.experiments.base import Experiment
from headwise.rows import Row
from headwise.store import Store

if TYPE_CHECKING:
    from headwise.execute.engine import Engine
    from headwise.signals import Stop


@dataclass(frozen=True)
class Maker:
    """How rows come to be: trained in ensembles, one decoder after another, or computed."""

    experiment: Experiment[Any, Any]
    store: Store
    device: str
    workers: int | None
    keep_weights: bool
    checkpoint_every: float
    train: bool
    stop: Stop | None
    engine: Engine | None  # elsewhere; None: here and in a pool

    @property
    def slow(self) -> bool:
        """Whether this trains on a CPU here."""
        from headwise.device import pick_device

        if not self.experiment.trains or self.engine is not None:
            return False
        return pick_device(self.device).type == "cpu"

    def rows_of(self, runs: Sequence[Any], keep_weights: bool = False) -> list[Row]:
        """The rows of runs, in order; those that are missing are made unless only what is there was
        asked for."""
        if not self.train or not runs:
            return self.store.rows([run.id for run in runs])
        from headwise.execute.sweep import compute, pretrain_all, sweep

        name, keep = self.experiment.name, keep_weights or self.keep_weights
        match runs[0].work:
            case "compute":
                assert self.experiment.make is not None
                make = self.experiment.make
                return compute(runs, make, self.store, device=self.device, label=name)
            case "pretrain":
                return pretrain_all(
                    runs,
                    self.store,
                    device=self.device,
                    checkpoint_every=self.checkpoint_every,
                    keep_weights=keep,
                    label=name,
                    stop=self.stop,
                    engine=self.engine,
                )
            case _:
                return sweep(
                    runs,
                    self.store,
                    device=self.device,
                    workers=self.workers,
                    label=name,
                    keep_weights=keep,
                    checkpoint_every=self.checkpoint_every,
                    probe=self.experiment.probe,
                    stop=self.stop,
                    engine=self.engine,
                )
