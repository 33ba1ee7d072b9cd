"""A task that breaks the contract dies in one line before anything is trained or written."""

from dataclasses import dataclass

import pytest
import torch
from support.small_runs import quiet

import headwise


@dataclass(frozen=True)
class OneLoss(headwise.SquaredError):
    """Its loss is one number for all models."""

    tokens: int = 5
    in_dim = 3
    answer_dim = 3

    def sample(self, generator, batch, step=None):
        size = (batch, self.tokens, 3)
        inputs = torch.randn(size, generator=generator, device=generator.device)
        return inputs, inputs.amax(1, keepdim=True)

    def loss(self, outputs, targets):
        return (outputs[..., -1:, :3] - targets).square().mean()


def test_train_refuses_a_broken_task_and_writes_nothing(tmp_path):
    shape = headwise.Shape(dim=3, depth=1, num_heads=1)
    run = headwise.Run(shape, OneLoss(), headwise.Recipe(steps=4, epoch=2, batch=4, held_out=8))
    with pytest.raises(headwise.UsageError, match=r"^task OneLoss: loss must give one number per"):
        headwise.train([run], device="cpu", folder=tmp_path / "store", advance=quiet)
    assert list(tmp_path.iterdir()) == []
