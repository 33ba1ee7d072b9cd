"""`model.check`: planted faults of a model of one's own, each found in its own line."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from headwise.errors import UsageError
from headwise.experiments.shapes import shape_for
from headwise.model.check import check_first_output, check_model
from headwise.model.own import Model
from headwise.tasks import Farthest, Text

TASK = Farthest(7, 5)
SHAPE = shape_for(TASK, 16, 2, 2, 8, 32)


@dataclass(frozen=True)
class Linear(Model):
    """A linear map of each token, and one of their mean: without a fault."""

    bias: bool = True

    def build(self, shape, task):
        return Net(shape, task, self.bias)


class Net(nn.Module):
    def __init__(self, shape, task, bias=True):
        super().__init__()
        self.own = nn.Linear(task.in_dim, task.answer_dim, bias=bias)
        self.mean = nn.Linear(task.in_dim, task.answer_dim, bias=bias)

    def forward(self, x):
        return self.own(x) + self.mean(x.mean(1, keepdim=True))


def wrong(model, shape=SHAPE, task=TASK):
    found = check_model(model, shape, task)
    for finding in found:
        assert "\n" not in finding.text
    return {finding.rule: finding.text for finding in found if finding.level == "wrong"}


def test_check_passes_a_model_without_a_fault():
    found = check_model(Linear(), SHAPE, TASK)
    assert [finding.level for finding in found] == ["ok"] * 9
    check_first_output(Linear(), SHAPE, TASK)


class NoModule(Linear):
    def build(self, shape, task):
        return "a net"


class NoBuild(Model):
    pass


class NoParameters(Linear):
    def build(self, shape, task):
        return nn.Identity()


class Doubles(Linear):
    def build(self, shape, task):
        return super().build(shape, task).double()


class Narrow(Linear):
    def build(self, shape, task):
        return nn.Linear(task.in_dim, task.answer_dim - 1)


class Pair(Linear):
    def build(self, shape, task):
        net = super().build(shape, task)
        net.register_forward_hook(lambda module, inputs, outputs: (outputs, None))
        return net


class DrawnByNumpy(Linear):
    def build(self, shape, task):
        net = super().build(shape, task)
        noise = np.random.default_rng().standard_normal(net.own.weight.shape)
        with torch.no_grad():
            net.own.weight += torch.tensor(noise, dtype=torch.float32)
        return net


class Unused(Linear):
    def build(self, shape, task):
        net = super().build(shape, task)
        net.spare = nn.Linear(3, 3)
        return net


class AlwaysDrops(Linear):
    def build(self, shape, task):
        net = super().build(shape, task)
        net.register_forward_hook(lambda module, inputs, out: nn.functional.dropout(out, 0.5))
        return net


class MixesTheBatch(Linear):
    def build(self, shape, task):
        net = super().build(shape, task)
        net.register_forward_hook(lambda module, inputs, out: out - out.mean(0))
        return net


class Hidden(Linear):
    """A weight that no state dict holds."""

    def build(self, shape, task):
        net = super().build(shape, task)
        scale = torch.rand(task.answer_dim)
        net.register_forward_hook(lambda module, inputs, out: out * scale)
        return net


class Miscounts(Linear):
    def params(self, shape, task):
        return 3


@dataclass(frozen=True)
class Listed(Linear):
    sizes: tuple[int, ...] = ()


class Lost(Linear):
    width: int = 3


FAULTS = {
    "no module": (NoModule(), "build", "build must return a torch.nn.Module, got str"),
    "no build": (NoBuild(), "build", "build is missing: write build(self, shape, task)"),
    "nothing to train": (NoParameters(), "build", "must have parameters to train, got none"),
    "float64": (Doubles(), "build", "parameters must be float32, own.weight is float64"),
    "narrow": (Narrow(), "outputs", "(batch, tokens, width) = (5, 5, at least 7), got (5, 5, 6)"),
    "a pair": (Pair(), "outputs", "the module must return one tensor, got tuple"),
    "seed": (DrawnByNumpy(), "seed", "must follow from torch's seed: own.weight differs"),
    "unused": (Unused(), "gradient", "spare.weight gets no gradient, and 1 more"),
    "dropout": (AlwaysDrops(), "evaluation", "the same inputs must give the same outputs"),
    "batch": (MixesTheBatch(), "evaluation", "must not depend on the others of its batch"),
    "hidden": (Hidden(), "weights", "the state dict must hold all that the outputs depend on"),
    "count": (Miscounts(), "params", "params must count what build makes, 112, got 3"),
    "a list": (Listed(sizes=[1]), "value", "field sizes of model Listed must be a plain value"),
    "no decorator": (Lost(), "value", "Lost must be decorated with @dataclass(frozen=True)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_check_reports_a_planted_fault_in_one_clear_line(name):
    model, rule, line = FAULTS[name]
    found = wrong(model)
    assert rule in found, found
    assert line in found[rule]


@dataclass(frozen=True)
class Reads(Model):
    """Embeds ids; with `ahead` a token sees the next one."""

    ahead: bool = False

    def build(self, shape, task):
        net = nn.Embedding(task.vocab, task.answer_dim)
        if self.ahead:
            net.register_forward_hook(lambda module, inputs, out: out + out.roll(-1, 1))
        return net


def test_causal_model_must_not_see_later_tokens():
    task = Text(7)
    shape = shape_for(task, 16, 1, 2, 8, 32)
    assert wrong(Reads(), shape, task) == {}
    assert wrong(Reads(ahead=True), shape, task) == {
        "causal": "shape and task are causal: outputs must not depend on later tokens, they do"
    }


def test_check_first_output_refuses_in_one_line():
    with pytest.raises(
        UsageError, match=r"^model Narrow: outputs must be \(batch, tokens, width\)"
    ):
        check_first_output(Narrow(), SHAPE, TASK)


def test_check_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    check_model(Linear(), SHAPE, TASK)
    assert torch.equal(before, torch.get_rng_state())
