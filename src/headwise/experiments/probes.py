"""Probes: what is measured on a trained model and added to its row. They run where the run was
trained, also in worker processes, and load torch there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headwise.rows import Row
from headwise.seeds import derive

if TYPE_CHECKING:
    from headwise.training.run import Run

CONDITION = ("kappa", "kappa_centred", "stable_rank", "effective_rank")
SEQUENCES = 8


def trained_model(run: Run, weights: Mapping[str, Any], count: int) -> tuple[Any, Any, Any]:
    """A run's model with these weights, and `count` inputs and targets to try it on, the same for
    every run of a task."""
    import torch

    from headwise.model.transformer import build

    model = build(run.shape)
    model.load_state_dict(weights)
    return model, *run.task.sample(torch.Generator().manual_seed(derive(0, "probe")), count)


def condition_probe(run: Run, weights: dict[str, Any]) -> Row:
    """How well conditioned the heads' outputs are before and after training: means over the layers.

    Of seed 1 alone, the first that counts: shapes differ by orders of magnitude, seeds do not.
    """
    # A run that starts from another's weights, or a user's own model, has no start that can be
    # drawn again here.
    if run.seed != 1 or run.recipe.parent or run.model is not None:
        return {}
    import torch

    from headwise.model.init import fresh
    from headwise.theory.conditioning import attention_spectra

    # The start is drawn again from the run's seed; the end are the weights that training left.
    first = fresh(
        run.shape,
        run.recipe.init,
        [torch.Generator().manual_seed(derive(run.seed, "init"))],
    )
    start = {name: p[0] for name, p in first.named_parameters()}
    out: Row = {}
    for when, state in (("start", start), ("end", weights)):
        model, inputs, _ = trained_model(run, state, SEQUENCES)
        average = attention_spectra(model, inputs)[-1]
        for name in CONDITION:
            # JSON has no infinity, so an infinite kappa is a missing one.
            value = float(average[name])
            out[f"{name}_{when}"] = value if math.isfinite(value) else None
    return out
