"""Does a task keep its contract? `check(task)` answers in one line per rule, and `headwise check
my_task.py` prints them.

Every rule below is a function of the task that returns what holds, or raises `Wrong` with the value
that breaks it. The rules draw a few thousand sequences and take about a second. The first ones also
run before every training (`check_first_sample`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headwise.errors import Finding, Note, Rule, UsageError, Wrong, findings
from headwise.rows import check_value
from headwise.tasks import TASKS, task_class
from headwise.tasks.check_data import (
    BATCH,
    STEPS,
    drawn,
    draws_anew,
    fills_what_it_samples,
    follows_the_generator,
    global_generators_kept,
    hides_the_answer,
    is_pickled,
    keeps_apart,
    same_elsewhere,
    stays_on_the_device,
)
from headwise.tasks.task import Classified, SquaredError, Task

STANDARD_ERRORS = 4.0  # between a baseline and its measurement


def check(task: Task, spec: str = "", elsewhere: bool = True) -> list[Finding]:
    """One finding per rule of the contract.

    With `elsewhere` a second process draws the same data; it loads the task from `spec`, the text
    that named it on the command line, or else unpickles it.
    """
    rules = [*FIRST_RULES, *RULES]
    if elsewhere:
        rules.append(Rule("process", lambda task: same_elsewhere(task, spec)))
    with global_generators_kept():
        return findings(task, rules)


def check_first_sample(task: Task) -> None:
    """Refuse a task that breaks the cheap part of the contract, before anything is trained."""
    for finding in findings(task, FIRST_RULES):
        if finding.level == "wrong":
            raise UsageError(f"task {type(task).__name__}: {finding.text}")


# ---- before training


def _is_a_value(task: Task) -> str:
    check_value(task, "task")
    name = task.spec()["name"]
    if name in TASKS and type(task) is not task_class(name):
        raise Wrong(f"name must not be that of the built-in task {name}")
    if not isinstance(task.version, int) or isinstance(task.version, bool) or task.version < 1:
        raise Wrong(f"version must be a whole number of at least 1, got {task.version!r}")
    fields = ", ".join(
        f"{key}={value!r}" for key, value in task.spec().items() if key not in ("name", "version")
    )
    return f"{name}({fields}), version {task.version}"


def _has_sizes(task: Task) -> str:
    sizes = {name: _size(task, name) for name in ("tokens", "vocab", "in_dim", "answer_dim")}
    if bool(sizes["vocab"]) == bool(sizes["in_dim"]):
        raise Wrong(
            "a task has either vocab (inputs are token ids) or in_dim (inputs are vectors), got "
            f"vocab {sizes['vocab']}, in_dim {sizes['in_dim']}"
        )
    for name in ("tokens", "answer_dim"):
        if not sizes[name]:
            raise Wrong(f"{name} must be at least 1, got 0")
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size)


def _size(task: Task, name: str) -> int:
    """One of the task's sizes."""
    try:
        size = getattr(task, name)
    except NotImplementedError:
        needs = "classes" if name == "answer_dim" and isinstance(task, Classified) else name
        raise Wrong(f"{needs} is missing: give the class {needs}, as in {needs} = 8") from None
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise Wrong(f"{name} must be a whole number, got {size!r}")
    return size


def _samples_of_its_sizes(task: Task) -> str:
    text = ""
    for step in STEPS:
        for batch in (1, BATCH):
            try:
                pair = drawn(task, 0, batch, step)
            except NotImplementedError:
                raise Wrong(
                    "sample is missing: write sample(self, generator, batch, step)"
                ) from None
            text = _fits(task, pair, batch)
    return text


def _fits(task: Task, pair: Any, batch: int) -> str:
    """That a sample is of the task's sizes."""
    if not isinstance(pair, tuple) or [isinstance(t, Tensor) for t in pair] != [True, True]:
        raise Wrong(f"sample must return two tensors, inputs and targets, got {_named(pair)}")
    inputs, targets = pair
    vocab = task.vocab
    size = (batch, task.tokens) if vocab else (batch, task.tokens, task.in_dim)
    dtype = torch.int64 if vocab else torch.float32
    wanted = f"{'ids (batch, tokens)' if vocab else 'vectors (batch, tokens, in_dim)'} = {size}"
    if tuple(inputs.shape) != size:
        raise Wrong(f"inputs must be {wanted}, got {tuple(inputs.shape)}")
    if inputs.dtype != dtype:
        raise Wrong(f"inputs must be {_word(dtype)}, got {_word(inputs.dtype)}")
    if vocab and not 0 <= int(inputs.min()) <= int(inputs.max()) < vocab:
        raise Wrong(
            f"ids must be from 0 to {vocab - 1} (vocab {vocab}), got {int(inputs.min())} to "
            f"{int(inputs.max())}"
        )
    if targets.shape[:1] != (batch,):
        raise Wrong(f"targets must begin with the batch {batch}, got {tuple(targets.shape)}")
    for name, tensor in (("inputs", inputs), ("targets", targets)):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise Wrong(f"{name} must be finite, got {_not_finite(tensor)}")
        if tensor.requires_grad:
            raise Wrong(f"{name} must be plain data, got a tensor that requires a gradient")
    if type(task).loss is Classified.loss and isinstance(task, Classified):
        _are_classes(targets, task.classes)
    if type(task).loss is SquaredError.loss:
        _are_numbers(targets, task)
    return (
        f"inputs {tuple(inputs.shape)} {_word(inputs.dtype)}, targets {tuple(targets.shape)} "
        f"{_word(targets.dtype)}"
    )


def _are_classes(targets: Tensor, classes: int) -> None:
    if targets.dtype != torch.int64:
        raise Wrong(f"targets must be classes of int64, got {_word(targets.dtype)}")
    if not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        raise Wrong(
            f"targets must be from 0 to {classes - 1} (classes {classes}), got "
            f"{int(targets.min())} to {int(targets.max())}"
        )


def _are_numbers(targets: Tensor, task: Task) -> None:
    if not targets.is_floating_point() or targets.dtype == torch.float64:
        raise Wrong(f"targets must be float32, got {_word(targets.dtype)}")
    if targets.ndim != 3 or targets.shape[1] > task.tokens or targets.shape[2] != task.answer_dim:
        raise Wrong(
            f"targets must be (batch, answers, answer_dim) with at most {task.tokens} answers and "
            f"answer_dim {task.answer_dim}, got {tuple(targets.shape)}"
        )


def _losses_per_model(task: Task) -> str:
    """The loss keeps the axis of models, and its models apart."""
    outputs, targets = _outputs(task), drawn(task, 1, BATCH)[1]
    try:
        losses = task.loss(outputs, targets)
    except NotImplementedError:
        raise Wrong("loss is missing: write loss(self, outputs, targets)") from None
    found = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if found != (2,):
        raise Wrong(
            f"loss must give one number per model: outputs {tuple(outputs.shape)} of 2 models must "
            f"give (2,), got {found}"
        )
    if not bool(losses.isfinite().all()):
        raise Wrong(f"loss must be finite, got {losses.tolist()}")
    for m in range(2):
        alone = task.loss(outputs[m], targets)
        if tuple(alone.shape) != () or not _close(alone, losses[m]):
            raise Wrong(
                f"loss of a model must not depend on the others: got {_number(losses[m])} beside "
                f"another one, {_number(alone)} alone"
            )
    given_twice = task.loss(outputs, targets.expand(2, *targets.shape))
    if tuple(given_twice.shape) != (2,) or not _close(given_twice, losses):
        raise Wrong(
            "loss must be the same where the targets have the axis of models too: got "
            f"{given_twice.tolist()} instead of {losses.tolist()}"
        )
    return f"outputs {tuple(outputs.shape)} of 2 models give (2,)"


def _outputs(task: Task, models: int = 2, batch: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(models, batch, task.tokens, task.answer_dim, generator=generator)


# ---- loss


def _averages(task: Task) -> str:
    """The loss is a mean over the batch of the first coordinates alone."""
    outputs, targets = _outputs(task), drawn(task, 1, BATCH)[1]
    losses = task.loss(outputs, targets)
    twice = task.loss(torch.cat((outputs, outputs), 1), torch.cat((targets, targets)))
    if not _close(twice, losses):
        raise Wrong(
            "loss must be the mean over the batch: the same sequences twice give "
            f"{_number(twice[0])} instead of {_number(losses[0])}"
        )
    beyond = torch.full((*outputs.shape[:-1], 2), math.nan)
    if not _close(task.loss(torch.cat((outputs, beyond), -1), targets), losses):
        raise Wrong(
            f"loss must not depend on coordinates beyond answer_dim {task.answer_dim}: outputs may "
            "be wider"
        )
    if task.squared:
        answers, width = targets.shape[-2:]
        error = outputs[..., -answers:, :width] - targets
        if not _close(error.square().sum(-1).flatten(1).mean(1), losses):
            raise Wrong("squared says that the loss is |output - target|^2, which it is not")
    return f"a mean over the batch, of the first {task.answer_dim} coordinates"


def _is_differentiable(task: Task) -> str:
    targets = drawn(task, 1, BATCH)[1]
    for outputs in (_outputs(task), torch.zeros_like(_outputs(task))):
        outputs.requires_grad_()
        losses = task.loss(outputs, targets)
        if not losses.requires_grad:
            raise Wrong("loss must be differentiable, got a loss without a gradient")
        (gradient,) = torch.autograd.grad(losses[0], outputs)
        if not bool(gradient.isfinite().all()):
            raise Wrong(
                f"the gradient must be finite, got {_not_finite(gradient)} at outputs "
                f"{'of zero' if not bool(outputs.any()) else 'drawn at random'}"
            )
        if bool(gradient[1].any()):
            raise Wrong("the gradient of one model's loss must not touch another model's outputs")
    (gradient,) = torch.autograd.grad(
        task.loss(outputs := _outputs(task).requires_grad_(), targets)[0], outputs
    )
    used = gradient[0].flatten(0, -2).any(0)
    if not bool(used.any()):
        raise Wrong("loss must depend on the outputs, its gradient is zero")
    if not bool(used[-1]):
        last = int(used.nonzero().max()) + 1
        raise Note(
            f"answer_dim is {task.answer_dim}, but the loss depends on the first {last} "
            "coordinates only"
        )
    return "finite, and each model's own"


def _measures_per_model(task: Task) -> str:
    outputs, targets = _outputs(task), drawn(task, 1, BATCH)[1]
    measures = task.measures(outputs, targets)
    if not isinstance(measures, dict):
        raise Wrong(f"measures must be a dict of tensors, got {type(measures).__name__}")
    for name, value in measures.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise Wrong(f"the name of a measure must be an identifier, got {name!r}")
        if not isinstance(value, Tensor) or value.shape[:1] != (2,) or value.ndim > 2:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise Wrong(f"measure {name} must be (2,) or (2, n) for 2 models, got {found}")
        if not _close(task.measures(outputs[1], targets)[name], value[1]):
            raise Wrong(f"measure {name} of a model must not depend on the other models")
    return ", ".join(measures) if measures else "none besides the loss"


def _has_baselines(task: Task) -> str:
    baselines = task.baselines()
    if not isinstance(baselines, dict) or "zero" not in baselines:
        raise Wrong(f'baselines must hold "zero", the error of outputs of zero, got {baselines!r}')
    for name, value in baselines.items():
        if not isinstance(value, float) or not 0 <= value < math.inf:
            raise Wrong(f"baseline {name} must be a finite number of at least 0, got {value!r}")
    if baselines["zero"] == 0:
        raise Wrong("outputs of zero must have an error, got baseline zero 0.0")
    batches, batch = 64, 32
    generator = torch.Generator().manual_seed(5)
    zeros = torch.zeros(batch, task.tokens, task.answer_dim)
    errors = torch.stack(
        [task.loss(zeros, task.sample(generator, batch)[1]) for _ in range(batches)]
    ).double()
    mean, error = errors.mean().item(), errors.std().item() / math.sqrt(batches)
    if abs(mean - baselines["zero"]) > STANDARD_ERRORS * error + 1e-5 * abs(mean):
        raise Wrong(
            f"baseline zero is {baselines['zero']:.6g}, but outputs of zero have an error of "
            f"{mean:.6g} ± {error:.2g}"
        )
    return ", ".join(f"{name} {value:.4g}" for name, value in baselines.items())


# ---- words


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _named(value: Any) -> str:
    """What a value is, for people."""
    if isinstance(value, tuple):
        return f"({', '.join(type(one).__name__ for one in value)})"
    return type(value).__name__


def _not_finite(tensor: Tensor) -> str:
    return str(tensor[~tensor.isfinite()][0].item())


def _number(value: Tensor) -> str:
    return (
        f"{value.item():.6g}" if isinstance(value, Tensor) and value.numel() == 1 else repr(value)
    )


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-6)


FIRST_RULES = (
    Rule("value", _is_a_value, needed=True),
    Rule("sizes", _has_sizes, needed=True),
    Rule("sample", _samples_of_its_sizes, needed=True),
    Rule("loss", _losses_per_model, needed=True),
)
RULES = (
    Rule("generator", follows_the_generator),
    Rule("draws", draws_anew),
    Rule("device", stays_on_the_device),
    Rule("held out", keeps_apart),
    Rule("fill", fills_what_it_samples),
    Rule("mean", _averages),
    Rule("gradient", _is_differentiable),
    Rule("measures", _measures_per_model),
    Rule("baselines", _has_baselines),
    Rule("causal", hides_the_answer),
    Rule("pickle", is_pickled),
)
