"""`tasks.check`: planted faults, each found in its own line."""

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.checked_tasks import Copies, Doubles, GlobalTorch, Largest, OneLoss, wrong

from headwise.tasks.check import check
from headwise.tasks.task import Classified, Task


class Extra(Largest):
    """Its inputs are another token long."""

    def sample(self, generator, batch, step=None):
        return torch.zeros(batch, 6, 3), torch.zeros(batch, 1, 3)


class Shorts(Copies):
    def sample(self, generator, batch, step=None):
        inputs, targets = super().sample(generator, batch, step)
        return inputs.int(), targets


class Beyond(Copies):
    def sample(self, generator, batch, step=None):
        inputs, targets = super().sample(generator, batch, step)
        return inputs + 1, targets


class BeyondClasses(Copies):
    classes = 6


class Squeezed(Largest):
    """A batch of one loses its axis."""

    def sample(self, generator, batch, step=None):
        inputs, targets = super().sample(generator, batch, step)
        return inputs, targets.squeeze()


class Alone(Largest):
    def sample(self, generator, batch, step=None):
        return super().sample(generator, batch, step)[0]


class Infinite(Largest):
    def sample(self, generator, batch, step=None):
        inputs, targets = super().sample(generator, batch, step)
        return inputs, targets / 0


class TornOff(Largest):
    """Held-out data are another length."""

    def sample(self, generator, batch, step=None):
        inputs, targets = super().sample(generator, batch, step)
        return (inputs[:, 1:] if step is None else inputs), targets


class GlobalNumpy(Largest):
    def sample(self, generator, batch, step=None):
        shift = float(np.random.rand())  # noqa: NPY002
        inputs, targets = super().sample(generator, batch, step)
        return inputs + shift, targets + shift


class GlobalPython(Largest):
    def sample(self, generator, batch, step=None):
        shift = random.random()
        inputs, targets = super().sample(generator, batch, step)
        return inputs + shift, targets + shift


ASKED = itertools.count()


class Counts(Largest):
    """It remembers how often it was asked."""

    def sample(self, generator, batch, step=None):
        inputs, targets = super().sample(generator, batch, step)
        shift = next(ASKED)
        return inputs + shift, targets + shift


class Unmoved(Largest):
    """It copies the generator and leaves it where it was."""

    def sample(self, generator, batch, step=None):
        return super().sample(torch.Generator().manual_seed(generator.initial_seed()), batch)


class OneSeed(Largest):
    def sample(self, generator, batch, step=None):
        return super().sample(torch.Generator().manual_seed(0), batch)


class ForgetsTheDevice(Largest):
    def sample(self, generator, batch, step=None):
        inputs, _ = super().sample(generator, batch, step)
        return inputs, torch.zeros(batch, 1, 3)


class DrawsOnTheDefault(Largest):
    def sample(self, generator, batch, step=None):
        inputs = torch.randn(batch, self.tokens, 3, generator=generator)
        return inputs, inputs.amax(1, keepdim=True)


ROWS = torch.randn(301, 5, 3, generator=torch.Generator().manual_seed(0))


class Leaks(Largest):
    """Held-out data are drawn from all rows."""

    def sample(self, generator, batch, step=None):
        rows = ROWS if step is None else ROWS[:280]
        at = torch.randint(len(rows), (batch,), generator=generator, device=generator.device)
        return rows[at], rows[at].amax(1, keepdim=True)


class OtherFill(Largest):
    def fill(self, x, target, generator, step=None):
        super().fill(x, target, generator, step)
        x += 1


class Mixes(Largest):
    """Divided by the number of models."""

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) / (len(outputs) if outputs.ndim == 4 else 1)


class Touches(Largest):
    """The value is each model's own, the gradient is everybody's."""

    def loss(self, outputs, targets):
        losses = super().loss(outputs, targets)
        return losses + losses.sum() - losses.detach().sum()


class Sums(Largest):
    def loss(self, outputs, targets):
        return (outputs[..., -1:, :3] - targets).square().sum((-1, -2, -3))


class Flat(Largest):
    def loss(self, outputs, targets):
        return (outputs[..., -1:, :3] - targets).sign().abs().flatten(-3).mean(-1).detach()


class NoGradientAtZero(Largest):
    def loss(self, outputs, targets):
        return (outputs[..., -1:, :3].abs().sqrt() - targets).square().flatten(-3).mean(-1)


class Ignores(Largest):
    def loss(self, outputs, targets):
        return 0 * super().loss(outputs, targets) + 1


class AllCoordinates(Copies):
    def logits(self, outputs):
        return outputs

    def loss(self, outputs, targets):
        return outputs.square().flatten(-3).mean(-1)


class NotSquared(Largest):
    squared = True

    def loss(self, outputs, targets):
        return (outputs[..., -1:, :3] - targets).abs().sum(-1).flatten(-2).mean(-1)


class NotANumber(Largest):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets).log().neg().sqrt()


class NoZero(Largest):
    def baselines(self):
        return {"mean": 1.0}


class WrongZero(Largest):
    def baselines(self):
        return {"zero": 3.0}


class NoNumber(Largest):
    def baselines(self):
        return {**super().baselines(), "mean": None}


class Measured(Largest):
    def measures(self, outputs, targets):
        return {"largest": outputs.amax()}


class Shown(Copies):
    """The next token is asked for, and seen."""

    def sample(self, generator, batch, step=None):
        ids = torch.randint(7, (batch, 24), generator=generator, device=generator.device)
        return ids[:, :-1], ids[:, 1:]


class BothKinds(Largest):
    vocab = 7


class NoSize(Largest):
    in_dim = 2.5


class Nameless(Largest):
    name = "farthest"


class Versioned(Largest):
    version = "2"


@dataclass(frozen=True)
class NoClasses(Classified):
    tokens: int = 5
    vocab = 7


@dataclass(frozen=True)
class NoSample(Classified):
    tokens: int = 5
    vocab = 7
    classes = 7


@dataclass(frozen=True)
class NoLoss(Task):
    tokens: int = 5
    in_dim = 3
    answer_dim = 3
    sample = Largest.sample


@dataclass(frozen=True)
class Listed(Largest):
    sizes: tuple[int, ...] = (1,)


class Undecorated(Largest):
    margin: float = 0.1


GLOBAL = "sample uses the global generator of {}: draw with generator=generator"
FAULTS: dict[str, tuple[Task, str, str]] = {
    "length": (Extra(), "sample", "vectors (batch, tokens, in_dim) = (1, 5, 3), got (1, 6, 3)"),
    "float64": (Doubles(), "sample", "inputs must be float32, got float64"),
    "int32": (Shorts(), "sample", "inputs must be int64, got int32"),
    "range": (Beyond(), "sample", "ids must be from 0 to 6 (vocab 7), got 1 to 7"),
    "classes": (BeyondClasses(), "sample", "targets must be from 0 to 5 (classes 6), got 0 to 6"),
    "batch of one": (Squeezed(), "sample", "targets must begin with the batch 1, got (3,)"),
    "no pair": (
        Alone(),
        "sample",
        "sample must return two tensors, inputs and targets, got Tensor",
    ),
    "infinite": (Infinite(), "sample", "targets must be finite, got "),
    "held-out length": (TornOff(), "sample", "= (1, 5, 3), got (1, 4, 3)"),
    "global torch": (GlobalTorch(), "generator", GLOBAL.format("torch")),
    "global numpy": (GlobalNumpy(), "generator", GLOBAL.format("numpy")),
    "global random": (GlobalPython(), "generator", GLOBAL.format("random")),
    "memory": (Counts(), "generator", "two calls with equal states differ"),
    "generator stays": (Unmoved(), "draws", "two draws in a row give the same inputs"),
    "one seed": (OneSeed(), "draws", "seeds 3 and 4 give the same inputs"),
    "device of targets": (ForgetsTheDevice(), "device", "must be on the generator's device"),
    "device of draws": (DrawsOnTheDefault(), "device", "must be on the generator's device"),
    "leak": (Leaks(), "held out", "where step is None, sample must draw from those that are kept"),
    "fill": (OtherFill(), "fill", "fill must write what sample draws from the same generator"),
    "one loss": (OneLoss(), "loss", "(2, 5, 5, 3) of 2 models must give (2,), got ()"),
    "models mix": (Mixes(), "loss", "loss of a model must not depend on the others: got "),
    "models touch": (Touches(), "gradient", "must not touch another model's outputs"),
    "not finite": (NotANumber(), "loss", "loss must be finite, got [nan, nan]"),
    "sum": (Sums(), "mean", "loss must be the mean over the batch: the same sequences twice give "),
    "beyond the answer": (AllCoordinates(), "mean", "coordinates beyond answer_dim 7"),
    "not squared": (NotSquared(), "mean", "squared says that the loss is |output - target|^2"),
    "no gradient": (Flat(), "gradient", "loss must be differentiable"),
    "gradient at zero": (
        NoGradientAtZero(),
        "gradient",
        "the gradient must be finite, got nan at outputs of zero",
    ),
    "no outputs": (Ignores(), "gradient", "loss must depend on the outputs, its gradient is zero"),
    "no zero": (NoZero(), "baselines", "the error of outputs of zero, got {'mean': 1.0}"),
    "wrong zero": (
        WrongZero(),
        "baselines",
        "baseline zero is 3, but outputs of zero have an error of ",
    ),
    "no number": (
        NoNumber(),
        "baselines",
        "baseline mean must be a finite number of at least 0, got None",
    ),
    "measure": (
        Measured(),
        "measures",
        "measure largest must be (2,) or (2, n) for 2 models, got ()",
    ),
    "next token": (Shown(), "causal", "the next token, which the model sees: set causal = True"),
    "both kinds": (BothKinds(), "sizes", "in_dim (inputs are vectors), got vocab 7, in_dim 3"),
    "size": (NoSize(), "sizes", "in_dim must be a whole number, got 2.5"),
    "no classes": (NoClasses(), "sizes", "classes is missing: give the class classes"),
    "no sample": (
        NoSample(),
        "sample",
        "sample is missing: write sample(self, generator, batch, step)",
    ),
    "no loss": (NoLoss(), "loss", "loss is missing: write loss(self, outputs, targets)"),
    "a built-in's name": (
        Nameless(),
        "value",
        "name must not be that of the built-in task farthest",
    ),
    "version": (Versioned(), "value", "version must be a whole number of at least 1, got '2'"),
    "a list": (Listed(sizes=[1]), "value", "field sizes of task Listed must be a plain value"),
    "no decorator": (
        Undecorated(),
        "value",
        "decorated with @dataclass(frozen=True), or its field margin would not",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_check_reports_a_planted_fault_in_one_clear_line(name):
    task, rule, line = FAULTS[name]
    found = wrong(task)
    assert rule in found, found
    assert line in found[rule]


def test_check_leaves_out_what_cannot_be_tested_after_a_fault():
    assert [finding.rule for finding in check(BothKinds())] == ["value", "sizes"]


class Raises(Largest):
    def measures(self, outputs, targets):
        raise RuntimeError("no\nmeasures")


def test_rule_that_raises_is_one_line():
    assert wrong(Raises()) == {"measures": "measures raises RuntimeError: no measures"}
