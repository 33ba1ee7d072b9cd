"""What the engine needs of a task."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.files import reduce_by_file
from headwise.rows import named_spec


@dataclass(frozen=True)
class Task:
    """A value that says what is drawn and how an answer is judged."""

    name: ClassVar[str] = ""  # in rows and run ids; "": the class's own name
    version: ClassVar[int] = 1  # of what it draws and asks; another one gives other run ids
    causal = False  # whether a token must not see the later ones, which hold its answer
    # whether the loss is the squared error of the first coordinates, the mean over the last tokens
    squared = False

    def spec(self) -> dict[str, Any]:
        """The task as plain values: its name, its version where it is not 1, and its fields."""
        return named_spec(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_by_file(self, protocol)

    @property
    def tokens(self) -> int:
        """Length of a sequence."""
        raise NotImplementedError

    @property
    def vocab(self) -> int:
        """How many token ids there are; 0: inputs are vectors."""
        return 0

    @property
    def in_dim(self) -> int:
        """Width of an input vector; 0: inputs are token ids."""
        return 0

    @property
    def answer_dim(self) -> int:
        """How many coordinates of an output are judged."""
        raise NotImplementedError

    @property
    def stage(self) -> int:
        """Steps of training over which what is drawn is of one kind; 0: all."""
        return 0

    def sample(
        self, generator: torch.Generator, batch: int, step: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Inputs (batch, tokens, width) or token ids (batch, tokens), and targets (batch, ...).

        `step` is that of training, None when judged: real data then come from the part that is held
        out.
        """
        raise NotImplementedError

    def fill(
        self, x: Tensor, target: Tensor, generator: torch.Generator, step: int | None = None
    ) -> None:
        """A sample written where it is wanted: (steps, batch, ...) of inputs and targets, whose
        steps may lie apart."""
        drawn = self.sample(generator, x.shape[0] * x.shape[1], step)
        for to, found in zip((x, target), drawn, strict=True):
            to.copy_(found.unflatten(0, x.shape[:2]))

    @property
    def has_original(self) -> bool:
        """Whether published code draws these data from a seed, so that they can be drawn again
        (`original`)."""
        return False

    def original(
        self, seed: int, batch: int, epoch: int, at: int, steps: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """What that code draws for `steps` steps from `at` on in an epoch of so many, which it
        repeats."""
        raise NotImplementedError

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean error of (..., batch, tokens, width) outputs, one number per model."""
        raise NotImplementedError

    def measures(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """What else is said about held-out answers, by name: one number per model, (...), or
        several, (..., n)."""
        return {}

    def baselines(self) -> dict[str, float]:
        """Errors of predictors that need no training; "zero" is always among them."""
        raise NotImplementedError


@dataclass(frozen=True)
class Classified(Task):
    """A task whose answer is one of `classes`: outputs are their log-odds, the loss is the
    cross-entropy in nats."""

    @property
    def classes(self) -> int:
        """How many answers there are."""
        raise NotImplementedError

    @property
    def answer_dim(self) -> int:
        return self.classes

    def logits(self, outputs: Tensor) -> Tensor:
        """Log-odds (..., answers, classes) from (..., batch, tokens, width) outputs; by default the
        mean over a sequence's tokens."""
        return outputs[..., : self.classes].mean(-2)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(outputs)
        answers = targets.expand(logits.shape[:-1]).reshape(-1)
        errors = F.cross_entropy(logits.reshape(-1, self.classes), answers, reduction="none")
        return errors.view(*outputs.shape[:-3], -1).mean(-1)

    def measures(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        right = self.logits(outputs).argmax(-1) == targets
        return {"accuracy": right.flatten(outputs.ndim - 3).float().mean(-1)}

    def baselines(self) -> dict[str, float]:
        """Equal odds, which is what outputs of zero say."""
        return {"zero": math.log(self.classes)}
