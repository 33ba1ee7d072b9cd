"""What a task is: `Task`, and the two kinds most tasks are of, `Classified` and `SquaredError`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.files import reduce_by_file
from headwise.rows import named_spec

MEASURED_ON = 4096  # sequences from which baselines without a closed form are measured


@dataclass(frozen=True)
class Task:
    """What is drawn, and how an answer is evaluated.

    A task is a frozen dataclass of plain fields that derives from `Classified` (the answer is one
    of several classes), from `SquaredError` (the answer is numbers), or from `Task` itself. Write

        tokens            how many tokens a sequence has
        in_dim or vocab   the width of a token's vector, or how many token ids there are
        sample            inputs and targets of `batch` sequences, drawn from a generator
        classes           of a `Classified` task; any other one has
        answer_dim        how many coordinates of an output are evaluated, and
        loss              their mean error (`SquaredError` has one).

    Everything else has a default. `headwise check FILE.py` says what is wrong with a task.

    >>> @dataclass(frozen=True)
    ... class Parity(Classified):
    ...     '''Is the number of ones odd?'''
    ...     tokens: int = 8
    ...     vocab = 2
    ...     classes = 2
    ...     def sample(self, generator, batch, step=None):
    ...         device = generator.device
    ...         ids = torch.randint(2, (batch, self.tokens), generator=generator, device=device)
    ...         return ids, ids.sum(-1) % 2
    >>> Parity(tokens=5).spec(), round(Parity().baselines()["zero"], 3)
    ({'name': 'Parity', 'tokens': 5}, 0.693)
    """

    # The name in rows and run ids; "": the class's own name.
    name: ClassVar[str] = ""
    # Of what the task draws and evaluates. Raise it when you change that: the ids of its runs are
    # then others, so that old rows are not taken for new ones.
    version: ClassVar[int] = 1
    # Whether a token must not see the later ones, because they hold its answer. Only a causal
    # shape may then be trained.
    causal: ClassVar[bool] = False
    # Whether the order of the tokens means anything, so that a shape needs positions.
    ordered: ClassVar[bool] = True

    def spec(self) -> dict[str, Any]:
        """The task as plain values: its name, its version where it is not 1, and its fields."""
        return named_spec(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_by_file(self, protocol)

    # -- what a task must say

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
        """How many coordinates of an output are evaluated: its first ones."""
        raise NotImplementedError

    def sample(
        self, generator: torch.Generator, batch: int, step: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets of `batch` sequences, on the generator's device.

        Inputs are vectors (batch, tokens, in_dim), float32, or token ids (batch, tokens), int64.
        Targets (batch, ...) are what `loss` takes. All randomness comes from the generator. `step`
        is that of training; None asks for what is held out, which real data must keep apart.
        """
        raise NotImplementedError

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean error over the batch of outputs (..., batch, tokens, width): (...), one number per
        model. Targets are (batch, ...), or have the models' axes in front as well."""
        raise NotImplementedError

    # -- what it may say

    def measures(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """What else is reported of held-out answers, by name: one number per model, (...), or
        several, (..., n)."""
        return {}

    def baselines(self) -> dict[str, float]:
        """Errors of predictors that need no training. "zero" (outputs of zero) is always among
        them; by default it is measured on 4,096 held-out sequences."""
        return {"zero": _zero_error(self)}

    @property
    def squared(self) -> bool:
        """Whether the loss is that of `SquaredError`, which the fused GPU kernels compute."""
        return False

    @property
    def stage(self) -> int:
        """Steps of training over which what is drawn stays of one kind, for a task that gets
        harder; 0: it never changes."""
        return 0

    # -- how the engine draws

    def fill(
        self, x: Tensor, target: Tensor, generator: torch.Generator, step: int | None = None
    ) -> None:
        """`sample` written to where the engine wants it: x and target are (steps, batch, ...), and
        their steps may lie apart in memory."""
        drawn = self.sample(generator, x.shape[0] * x.shape[1], step)
        for to, found in zip((x, target), drawn, strict=True):
            to.copy_(found.unflatten(0, x.shape[:2]))

    @property
    def has_original(self) -> bool:
        """Whether `original` draws the very data of published code (protocol "original")."""
        return False

    def original(
        self, seed: int, batch: int, epoch: int, at: int, steps: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The published code's data of `steps` steps from step `at` on, in an epoch of `epoch`
        steps which it repeats."""
        raise NotImplementedError


@dataclass(frozen=True)
class Classified(Task):
    """A task whose answer is one of `classes`: an output's first coordinates are the log-odds, the
    loss is the cross-entropy in nats. Targets are classes (batch,) or (batch, answers)."""

    @property
    def classes(self) -> int:
        """How many answers there are."""
        raise NotImplementedError

    @property
    def answer_dim(self) -> int:
        """One log-odds per class."""
        return self.classes

    def logits(self, outputs: Tensor) -> Tensor:
        """Log-odds (..., answers, classes) from (..., batch, tokens, width) outputs; by default the
        mean over a sequence's tokens."""
        return outputs[..., : self.classes].mean(-2)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats."""
        # Models and batch are flattened for the cross-entropy and unflattened for the mean of each
        # model.
        logits = self.logits(outputs)
        answers = targets.expand(logits.shape[:-1]).reshape(-1)
        errors = F.cross_entropy(logits.reshape(-1, self.classes), answers, reduction="none")
        return errors.view(*outputs.shape[:-3], -1).mean(-1)

    def measures(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Accuracy: the share of answers whose largest log-odds is the right class."""
        right = self.logits(outputs).argmax(-1) == targets
        return {"accuracy": right.flatten(outputs.ndim - 3).float().mean(-1)}

    def baselines(self) -> dict[str, float]:
        """Equal odds, which is what outputs of zero say."""
        return {"zero": math.log(self.classes)}


@dataclass(frozen=True)
class SquaredError(Task):
    """A task whose answer is numbers: targets (batch, answers, answer_dim) belong to the last
    `answers` tokens of a sequence; the loss is the mean of |output - target|^2 over batch and
    answers. Coordinates of the outputs beyond `answer_dim` are not evaluated."""

    @property
    def squared(self) -> bool:
        """Whether the loss is this class's own, not one that a task has put in its place."""
        return type(self).loss is SquaredError.loss

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean of |output - target|^2 over batch and answers."""
        answers, width = targets.shape[-2:]
        error = outputs[..., -answers:, :width] - targets
        return error.square().flatten(-3).sum(-1) / (targets.shape[-3] * answers)


@functools.lru_cache(64)
def _zero_error(task: Task) -> float:
    """The loss of outputs of zero, measured on held-out sequences."""
    # Held-out sequences, in parts that fit any memory.
    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(MEASURED_ON // 128):
        targets = task.sample(generator, 128)[1]
        errors.append(task.loss(torch.zeros(128, task.tokens, task.answer_dim), targets).double())
    return torch.stack(errors).mean().item()
