"""Does a task keep its contract? `check(task)` answers in one line per rule, and `headwise check
my_task.py` prints them.

Every rule below is a function of the task that returns what holds, or raises `Wrong` with the value
that breaks it. The rules draw a few thousand sequences and take about a second. The first ones also
run before every training (first_check.py), and those that make numbers meaningless before a task's
first run (`check_data.check_meaning`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headwise.errors import Finding, Note, Rule, Wrong, findings
from headwise.tasks.check_data import (
    DATA_RULES,
    fills_what_it_samples,
    global_generators_kept,
    hides_the_answer,
    is_pickled,
    same_elsewhere,
    stays_on_the_device,
)
from headwise.tasks.first_check import (
    BATCH,
    FIRST_RULES,
    drawn,
    in_words,
    is_close,
    named_baselines,
    not_finite,
    random_outputs,
)
from headwise.tasks.task import Task

STANDARD_ERRORS = 4.0  # between a baseline and its measurement


def check(
    task: Task,
    spec: str = "",
    elsewhere: bool = True,
    found_one: Callable[[Finding], None] | None = None,
) -> list[Finding]:
    """One finding per rule of the contract; `found_one` gets each as soon as it is there.

    With `elsewhere` a second process draws the same data; it loads the task from `spec`, the text
    that named it on the command line, or else unpickles it.
    """
    rules = [*FIRST_RULES, *RULES]
    if elsewhere:
        other = Rule("process", lambda task: same_elsewhere(task, spec), follows="generator")
        rules.append(other)
    # The rules seed the global generators, so the caller gets them back as they were.
    with global_generators_kept():
        return findings(task, rules, found_one)


# ---- loss


def _averages(task: Task) -> str:
    """The loss is a mean over the batch of the first coordinates alone."""
    outputs, targets = random_outputs(task), drawn(task, 1, BATCH)[1]
    losses = task.loss(outputs, targets)
    # A mean over the batch does not change when the batch is doubled; a sum does.
    twice = task.loss(torch.cat((outputs, outputs), 1), torch.cat((targets, targets)))
    if not is_close(twice, losses):
        raise Wrong(
            "loss must be the mean over the batch: the same sequences twice give "
            f"{in_words(twice[0])} instead of {in_words(losses[0])}"
        )
    # Models may have wider outputs than the task asks for. NaN in the extra coordinates shows any
    # use.
    beyond = torch.full((*outputs.shape[:-1], 2), math.nan)
    if not is_close(task.loss(torch.cat((outputs, beyond), -1), targets), losses):
        raise Wrong(
            f"loss must not depend on coordinates beyond answer_dim {task.answer_dim}: outputs may "
            "be wider"
        )
    # Fused kernels compute |output - target|^2 themselves wherever `squared` says that this is the
    # loss.
    if task.squared:
        answers, width = targets.shape[-2:]
        error = outputs[..., -answers:, :width] - targets
        if not is_close(error.square().sum(-1).flatten(1).mean(1), losses):
            raise Wrong("squared says that the loss is |output - target|^2, which it is not")
    return f"a mean over the batch, of the first {task.answer_dim} coordinates"


def _is_differentiable(task: Task) -> str:
    targets = drawn(task, 1, BATCH)[1]
    # Zero is where losses with a root or a norm have no slope.
    for outputs in (random_outputs(task), torch.zeros_like(random_outputs(task))):
        outputs.requires_grad_()
        losses = task.loss(outputs, targets)
        if not losses.requires_grad:
            raise Wrong("loss must be differentiable, got a loss without a gradient")
        (gradient,) = torch.autograd.grad(losses[0], outputs)
        if not bool(gradient.isfinite().all()):
            raise Wrong(
                f"the gradient must be finite, got {not_finite(gradient)} at outputs "
                f"{'of zero' if not bool(outputs.any()) else 'drawn at random'}"
            )
        if bool(gradient[1].any()):
            raise Wrong("the gradient of one model's loss must not touch another model's outputs")
    (gradient,) = torch.autograd.grad(
        task.loss(outputs := random_outputs(task).requires_grad_(), targets)[0], outputs
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
    outputs, targets = random_outputs(task), drawn(task, 1, BATCH)[1]
    measures = task.measures(outputs, targets)
    if not isinstance(measures, dict):
        raise Wrong(f"measures must be a dict of tensors, got {type(measures).__name__}")
    for name, value in measures.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise Wrong(f"the name of a measure must be an identifier, got {name!r}")
        if not isinstance(value, Tensor) or value.shape[:1] != (2,) or value.ndim > 2:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise Wrong(f"measure {name} must be (2,) or (2, n) for 2 models, got {found}")
        if not is_close(task.measures(outputs[1], targets)[name], value[1]):
            raise Wrong(f"measure {name} of a model must not depend on the other models")
    return ", ".join(measures) if measures else "none besides the loss"


def _has_baselines(task: Task) -> str:
    baselines = named_baselines(task)
    # The stated baseline is compared with a measurement, within 4 standard errors.
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


RULES = (
    *DATA_RULES,
    Rule("device", stays_on_the_device),
    Rule("fill", fills_what_it_samples, follows="generator"),
    Rule("mean", _averages),
    Rule("gradient", _is_differentiable),
    Rule("measures", _measures_per_model),
    Rule("baselines", _has_baselines),
    Rule("causal", hides_the_answer),
    Rule("pickle", is_pickled),
)
