"""`Task`, `Classified` and `SquaredError`: their losses, measures and defaults."""

import dataclasses

import numpy as np
import pytest
import torch
from support.tasks import softmax_losses
from support.tolerance import close, seeded

from headwise.tasks.task import Classified

pytestmark = pytest.mark.usefixtures("no_network")


@dataclasses.dataclass(frozen=True)
class Bare(Classified):
    """Five classes, and all that a task of this kind inherits."""

    @property
    def tokens(self):
        return 3

    @property
    def classes(self):
        return 5


def test_loss_and_accuracy_of_classes_equal_numpy():
    outputs = torch.randn(2, 7, 11, 3, 8, generator=seeded(1), dtype=torch.float64)
    targets = torch.randint(5, (11,), generator=seeded(2))
    logits = outputs[..., :5].numpy().mean(-2)
    losses = softmax_losses(logits, np.broadcast_to(targets.numpy(), (2, 7, 11)))
    right = logits.argmax(-1) == targets.numpy()
    assert Bare().answer_dim == 5
    close(Bare().loss(outputs, targets), torch.from_numpy(losses.mean(-1)))
    close(Bare().measures(outputs, targets)["accuracy"], torch.from_numpy(right.mean(-1)).float())
    assert set(Bare().measures(outputs, targets)) == {"accuracy"}
    close(
        Bare().loss(torch.zeros(11, 3, 5, dtype=torch.float64), targets),
        torch.tensor(Bare().baselines()["zero"], dtype=torch.float64),
    )
    assert not Bare().squared
    huge = torch.full((11, 3, 5), -1e4)
    huge[torch.arange(11), :, targets] = 1e4
    assert Bare().loss(huge, targets) == 0.0
    assert Bare().measures(huge, targets)["accuracy"] == 1.0
    assert Bare().measures(-huge, targets)["accuracy"] == 0.0
