"""What the engine needs of a task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.shape import UsageError


@dataclass(frozen=True)
class Task:
    """What is drawn and how an answer is judged."""

    dim: int  # width of an input vector
    causal = False  # whether a token must not see the later ones, which hold its answer

    @property
    def tokens(self) -> int:
        """Length of a sequence."""
        raise NotImplementedError

    @property
    def answer_dim(self) -> int:
        """How many coordinates of an output are judged."""
        return self.dim

    @property
    def stage(self) -> int:
        """Steps of training over which what is drawn is of one kind; 0: all."""
        return 0

    def sample(self, generator: torch.Generator, batch: int, step: int | None = None) -> tuple[Tensor, Tensor]:
        """Inputs (batch, tokens, dim) and targets (batch, queries, ...); `step` is that of training, None when judged."""
        raise NotImplementedError

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean error of (..., batch, tokens, width) outputs, one number per model."""
        raise NotImplementedError

    def profile(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """The same error by query, (..., queries), where the place in the sequence matters."""
        return None

    def baselines(self) -> dict[str, float]:
        """Errors of predictors that need no training; "zero" is always among them."""
        raise NotImplementedError


def whole(value: Any, least: int, *names: str) -> None:
    """Refuse fields that are not whole numbers of at least `least`."""
    for name in names:
        given = getattr(value, name)
        if not isinstance(given, int) or isinstance(given, bool) or given < least:
            raise UsageError(f"{name} must be a whole number of at least {least}, got {given!r}")
