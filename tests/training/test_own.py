"""A model of a user's own in the engine: the same training as ours, resumable to the bit, and one
line for what it gets wrong."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.small_runs import bits, make, together
from support.stops import StopAtQuestion
from torch import Tensor, nn

from headwise.errors import UsageError
from headwise.model.init import initialise
from headwise.model.own import Model
from headwise.model.transformer import build
from headwise.rows import check_row
from headwise.shape import Shape
from headwise.signals import Stopped
from headwise.tasks import Farthest, Recall
from headwise.tasks.task import Task
from headwise.training import checkpoint
from headwise.training.engine import train
from headwise.training.run import Recipe, Run, ensemble_key

RECIPE = Recipe(steps=18, epoch=3, batch=16, held_out=32, evals=3)


class First(nn.Module):
    """The outputs alone of a module that gives more."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.module(x)[0]
        return outputs


@dataclass(frozen=True)
class Wrapped(Model):
    """Headwise's own encoder as somebody else's."""

    def build(self, shape: Shape, task: Task) -> nn.Module:
        model = build(shape)
        generator = torch.Generator().manual_seed(torch.initial_seed())  # as ours is drawn
        initialise(model, "library", generator)
        return First(model)


@dataclass(frozen=True)
class Mlp(Model):
    """A token-wise network with everything that needs care: dropout, batch statistics, a parameter
    used twice, one that is not trained, and a layer without a bias."""

    hidden: int = 7
    dropout: float = 0.2

    def build(self, shape: Shape, task: Task) -> nn.Module:
        return Tricky(task.in_dim, self.hidden, task.answer_dim, self.dropout)


class Tricky(nn.Module):
    def __init__(self, width: int, hidden: int, out: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.again = nn.Linear(width, hidden, bias=False)
        self.again.weight = self.up.weight
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(hidden, out)
        self.gain = nn.Parameter(torch.rand(hidden), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x) + self.again(x.roll(1, 1)))
        h = self.norm(h.flatten(0, 1)).view(h.shape)
        out: Tensor = self.down(self.drop(h * self.gain))
        return out


def own_run(model: Model, seed: int = 0, **recipe: Any) -> Run:
    ours = make(seed, **recipe)
    return Run(ours.shape, ours.task, ours.recipe, seed, model)


# ---- it is trained as ours are


def test_own_model_that_wraps_ours_gives_our_numbers(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"depth": 2, "rank": 4, "weight_decay": 0.1}
    theirs = together([own_run(Wrapped(), **settings)], folder=tmp_path, keep_weights=True)[0]
    run = make(0, **settings)
    ours = together([run], folder=tmp_path, keep_weights=True)[0]
    assert theirs["curve"] == pytest.approx(ours["curve"], rel=1e-5)
    assert theirs["held_out"] == pytest.approx(ours["held_out"], rel=1e-5)
    assert theirs["held_out_curve"][-1][0] == ours["held_out_curve"][-1][0]
    assert (theirs["params"], theirs["model"]) == (ours["params"], "Wrapped")
    assert theirs["flops"] is None
    weights = load_file(tmp_path / own_run(Wrapped(), **settings).id / "weights.safetensors")
    assert {name.removeprefix("module.") for name in weights} == set(
        load_file(tmp_path / run.id / "weights.safetensors")
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_own_model_trains_at_every_precision(precision: str) -> None:
    theirs = together([own_run(Wrapped(), precision=precision)])[0]
    ours = together([make(precision=precision)])[0]
    assert theirs["curve"] == pytest.approx(ours["curve"], rel=1e-3)


def test_own_models_of_two_seeds_differ_and_each_is_trained_alone() -> None:
    runs = [own_run(Mlp(), seed) for seed in (0, 1)]
    rows = together([*runs, make(0)])
    assert [row["models"] for row in rows] == [1, 1, 1]
    assert rows[0]["curve"] != rows[1]["curve"]
    assert len({ensemble_key(run) for run in runs}) == 2
    found = [
        check_row(json.loads(json.dumps(row)), run) for row, run in zip(rows[:2], runs, strict=True)
    ]
    assert found == ["", ""]
    assert [bits(row) for row in rows[:2]] == [bits(together([run])[0]) for run in runs]


def test_own_model_takes_tokens() -> None:
    @dataclass(frozen=True)
    class Table(Model):
        def build(self, shape: Shape, task: Task) -> nn.Module:
            return nn.Sequential(nn.Embedding(task.vocab, 5), nn.Linear(5, task.answer_dim))

    task = Recall(2, 4, 4)
    shape = Shape(dim=16, depth=1, num_heads=2, causal=True, vocab_size=task.vocab)
    (row,) = together([Run(shape, task, RECIPE, 0, Table())])
    assert row["status"] == "done"


def test_own_model_that_diverges_is_a_row() -> None:
    (row,) = together([own_run(Mlp(), lr=1e30, schedule="constant", steps=60)])
    assert row["status"] == "diverged"


# ---- resumed to the bit


class Stop(Exception):
    pass


@pytest.mark.parametrize("calls", [2, 4, 6])
def test_own_model_resumes_with_the_same_bits(calls: int, tmp_path: Path) -> None:
    run, left = own_run(Mlp()), [calls]

    def advance(_: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Stop

    undisturbed = bits(together([run])[0])
    with pytest.raises(Stop):
        train([run], device="cpu", folder=tmp_path, advance=advance, checkpoint_every=0)
    state = checkpoint.load(tmp_path, run)
    assert set(state.buffers) == {
        "gain",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert state.buffers["norm.running_mean"].abs().sum() > 0
    (row,) = together([run], folder=tmp_path)
    assert bits(row) == undisturbed
    assert row["resumed"] == 1


def test_own_model_interrupted_within_an_epoch_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """Dropout's random numbers and the batch statistics too."""
    run = own_run(Mlp(), steps=60, epoch=60, evals=1)
    undisturbed = bits(together([run])[0])
    for step in (20, 40):
        with pytest.raises(Stopped) as stopped:
            together([run], folder=tmp_path, stop=StopAtQuestion(2))
        assert stopped.value.saved == [(run.id, step)]
    assert bits(together([run], folder=tmp_path)[0]) == undisturbed


def test_own_models_bits_do_not_depend_on_the_callers_generator(tmp_path: Path) -> None:
    rows = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        rows.append(bits(together([own_run(Mlp())])[0]))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert rows[0] == rows[1]


def test_own_model_drops_nothing_when_it_is_evaluated(tmp_path: Path) -> None:
    """From its kept weights, in evaluation mode, by hand."""
    from headwise.training.data import held_out_batches

    run = own_run(Mlp(dropout=0.5))
    (row,) = together([run], folder=tmp_path, keep_weights=True)
    assert run.model is not None
    module = run.model.build(run.shape, run.task)
    weights = load_file(tmp_path / run.id / "weights.safetensors")
    module.load_state_dict(weights, strict=False)
    module.again.weight = module.up.weight  # type: ignore[union-attr]
    module.eval()
    errors = [
        run.task.loss(module(x)[None], target[None]).mean().item()
        for x, target in held_out_batches(run.task, run.recipe.held_out, torch.device("cpu"))
    ]
    assert row["held_out"] == pytest.approx(sum(errors) / len(errors), rel=1e-6)


# ---- what it gets wrong is one line


def linear(task: Task, out: int = 0) -> nn.Linear:
    return nn.Linear(task.in_dim, out or task.answer_dim)


class Unused(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.used, self.spare = linear(task), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


class Followed(nn.Module):
    """A linear map, and then whatever."""

    def __init__(self, task: Task, then: Any) -> None:
        super().__init__()
        self.map, self.then = linear(task), then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.map(x))


class Mismatched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.map(x)
        return out


def fails(task: Task) -> nn.Module:
    raise RuntimeError("no\nsuch\nthing")


FAULTS: dict[str, tuple[Any, str]] = {
    "a factory that raises": (fails, "cannot be built: RuntimeError: no such thing"),
    "not a module": (lambda task: "a net", "build must give an nn.Module, got str"),
    "float64": (
        lambda task: linear(task).double(),
        "parameters must be float32, weight is float64",
    ),
    "no parameter": (lambda task: nn.Identity(), "needs a parameter that is trained, got none"),
    "a frozen one": (lambda task: linear(task).requires_grad_(False), "got none"),
    "unused parameters": (
        Unused,
        "has parameters that its outputs do not depend on: spare.weight, spare.bias",
    ),
    "too narrow": (lambda task: linear(task, 5), r"outputs \(16, 5, 12 or more\) of inputs"),
    "one per sequence": (lambda task: Followed(task, lambda y: y.mean(1)), r"got \(16, 12\)"),
    "a tuple": (lambda task: Followed(task, lambda y: (y, y)), "must give a tensor, got tuple"),
    "float64 out": (
        lambda task: Followed(task, Tensor.double),
        "must give float32 outputs, got float",
    ),
    "wrong inside": (lambda task: Mismatched(), r"fails on inputs of shape \(16, 5, 12\): Runtime"),
    "detached": (lambda task: Followed(task, Tensor.detach), "no parameter reaches the loss"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_own_model_that_is_wrong_is_refused_in_one_line(fault: str) -> None:
    make_module, message = FAULTS[fault]

    @dataclass(frozen=True)
    class Wrong(Model):
        def build(self, shape: Shape, task: Task) -> nn.Module:
            module: nn.Module = make_module(task)
            return module

    with pytest.raises(UsageError, match=message) as caught:
        together([own_run(Wrong())])
    assert str(caught.value).startswith("model Wrong")
    assert "\n" not in str(caught.value)


def test_own_model_counts_what_it_trains() -> None:
    run = own_run(Mlp())
    width, hidden = run.task.in_dim, 7
    assert run.params == width * hidden + hidden + 2 * hidden + (hidden + 1) * run.task.answer_dim
    assert math.isfinite(run.params)
    assert isinstance(run.task, Farthest)


class Settled(nn.Module):
    """Batch statistics that stay as they are, since the factory says so."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.map, self.norm = linear(task), nn.BatchNorm1d(task.tokens)
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.map(x))
        return out


def test_own_model_keeps_the_modes_that_its_factory_chose(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Chosen(Model):
        def build(self, shape: Shape, task: Task) -> nn.Module:
            return Settled(task)

    run = own_run(Chosen())
    together([run], folder=tmp_path, keep_weights=True)
    weights = load_file(tmp_path / run.id / "weights.safetensors")
    assert weights["norm.running_mean"].abs().sum() == 0, "evaluated three times, never trained"
