"""Tasks without a fault, and what `tasks.check` says of a task."""

from dataclasses import dataclass

import torch

from headwise.tasks.check import check
from headwise.tasks.task import Classified, SquaredError, Task


@dataclass(frozen=True)
class Largest(SquaredError):
    """The largest of a few numbers, at the last token: without a fault."""

    tokens: int = 5
    in_dim = 3
    answer_dim = 3

    def sample(self, generator, batch, step=None):
        size = (batch, self.tokens, self.in_dim)
        inputs = torch.randn(size, generator=generator, device=generator.device)
        return inputs, inputs.amax(1, keepdim=True)


@dataclass(frozen=True)
class Copies(Classified):
    """Every token again: without a fault, if too easy."""

    tokens: int = 23
    vocab = 7
    classes = 7

    def sample(self, generator, batch, step=None):
        ids = torch.randint(7, (batch, self.tokens), generator=generator, device=generator.device)
        return ids, ids.flip(1)

    def logits(self, outputs):
        return outputs[..., : self.classes]


def wrong(task: Task) -> dict[str, str]:
    """The rules that do not hold, and their lines."""
    found = check(task, elsewhere=False)
    for finding in found:
        assert "\n" not in finding.text
        assert len(finding.text) > 3
    return {finding.rule: finding.text for finding in found if finding.level == "wrong"}


class Doubles(Largest):
    def sample(self, generator, batch, step=None):
        inputs, targets = super().sample(generator, batch, step)
        return inputs.double(), targets.double()


class GlobalTorch(Largest):
    def sample(self, generator, batch, step=None):
        inputs = torch.randn(batch, self.tokens, 3)
        return inputs, inputs.amax(1, keepdim=True)


class OneLoss(Largest):
    """One number for all models."""

    def loss(self, outputs, targets):
        return (outputs[..., -1:, :3] - targets).square().sum(-1).mean()
