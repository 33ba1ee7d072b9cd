"""The loss scale of half precision: it keeps small gradients above float16's smallest number, and
backs off when a large one overflows.

A gradient is carried times two factors until AdamW takes it:

base scale   the number of tokens, rounded up to a power of two (`base_scale`). The loss is a mean,
             so this gives a gradient the size of one token's own. Kernels undo it themselves.
loss scale   1, or a smaller power of two after overflows (`LossScale`); one per model. AdamW undoes
             it, and leaves a model as it is in a step whose gradient is not finite.

Overflows are counted on the device and read once per epoch, so that no step waits for the host. In
the other precisions both factors are 1 and nothing is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.training.run import Recipe

SMALLEST = 2.0**-10
HALVINGS = 5  # per epoch at most
CLEAN_EPOCHS = 20  # epochs without an overflow after which the scale is doubled


def base_scale(tokens: int, precision: str) -> float:
    """The factor that makes a mean over `tokens` a gradient of a token's own size.

    >>> base_scale(100, "fp16"), base_scale(100, "bf16")
    (128.0, 1.0)
    """
    # 64 times more overflowed after thousands of steps, when weights had grown
    return float(1 << (tokens - 1).bit_length()) if precision == "fp16" else 1.0


@dataclass
class LossScale:
    """One run's loss scale, and what it knows of the run's overflows."""

    loss_scale: float = 1.0
    clean_epochs: int = 0  # since the last overflow, while the scale is below 1
    skipped: int = 0  # steps not made, because a gradient overflowed
    overflows: int = 0  # in the epoch that a checkpoint lies within
    hopeless: bool = False  # a whole epoch overflowed at the smallest scale, or every step did

    def end_epoch(self, overflows: int, recipe: Recipe) -> None:
        """Adapt to the overflows of the last epoch: each halves the scale (at most HALVINGS times
        per epoch, never below SMALLEST); CLEAN_EPOCHS epochs without one double it."""
        self.skipped += overflows
        self.overflows = 0
        self.hopeless = overflows == recipe.epoch and (
            self.loss_scale == SMALLEST or self.skipped == recipe.steps
        )
        self.clean_epochs = 0 if overflows or self.loss_scale == 1 else self.clean_epochs + 1
        if overflows:
            halvings = min(overflows, HALVINGS)
            self.loss_scale = max(self.loss_scale * 2.0**-halvings, SMALLEST)
        elif self.clean_epochs == CLEAN_EPOCHS:
            self.loss_scale *= 2
            self.clean_epochs = 0


class LossScales:
    """The loss scales of an ensemble on its device, where kernels and CUDA graphs read them."""

    def __init__(self, scales: Sequence[LossScale], precision: str, device: torch.device) -> None:
        self.counted = precision == "fp16"
        self.scale = torch.ones(len(scales), device=device)
        self.inverse = torch.ones(len(scales), device=device)
        # steps of this epoch, per model
        self.skipped = torch.tensor([float(s.overflows) for s in scales], device=device)
        self._set(scales)

    def _set(self, scales: Sequence[LossScale]) -> None:
        self.scale.copy_(torch.tensor([s.loss_scale for s in scales]))
        self.inverse.copy_(torch.tensor([1 / s.loss_scale for s in scales]))

    def count(self, total: Tensor, models: slice) -> None:
        """Count a step of those models whose `total` is not finite."""
        self.skipped[models] += ~total.isfinite()

    def end_epoch(self, scales: Sequence[LossScale], recipe: Recipe) -> None:
        """Read the epoch's overflows, adapt each run's scale, and use it from the next block on."""
        before = [s.loss_scale for s in scales]
        for scale, overflows in zip(scales, self.skipped.int().tolist(), strict=True):
            scale.end_epoch(overflows, recipe)
        self.skipped.zero_()
        if before != [s.loss_scale for s in scales]:
            self._set(scales)
