"""The first rules of a task's contract: it is a value, has sizes, draws samples of them, and its
loss keeps models apart. They run before every training; those about data before a task's first run
(check_data.py); `headwise check` adds the others (check.py).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import Rule, UsageError, Wrong, findings, one_line
from headwise.rows import check_value
from headwise.tasks import PACKAGE, TASKS
from headwise.tasks.task import MEASURED_ON, Classified, SquaredError, Task

BATCH = 5  # sequences of most rules
STEPS = (0, 10**6, None)  # of training: the first, a late one; held out


def check_first_sample(task: Task) -> None:
    """Refuse a task that breaks the cheap part of the contract, before anything is trained."""
    refuse(task, FIRST_RULES)


def check_baselines(task: Task) -> None:
    """Refuse a task whose baselines are no errors by name, before anything is trained."""
    refuse(task, (Rule("baselines", lambda task: str(named_baselines(task))),))


def refuse(task: Task, rules: Sequence[Rule]) -> None:
    """Refuse a task that breaks one of these rules, with the line of `headwise check`."""
    for finding in findings(task, rules):
        if finding.level == "wrong":
            raise UsageError(f"task {type(task).__name__}: {finding.text}")


# ---- the rules


def _is_a_value(task: Task) -> str:
    # A task is a frozen dataclass of plain values, so that its specification can be hashed to a run
    # id.
    check_value(task, "task")
    name = task.spec()["name"]
    if name in TASKS and not type(task).__module__.startswith(PACKAGE):
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
            except TypeError as e:
                if _takes_a_step(task):
                    raise
                given = ", ".join(("self", *inspect.signature(task.sample).parameters))
                raise Wrong(
                    f"sample must be written sample(self, generator, batch, step=None), got "
                    f"sample({given}): {one_line(e)}"
                ) from None
            text = _fits(task, pair, batch)
    return text


def _takes_a_step(task: Task) -> bool:
    """Whether `sample` can be called as the engine calls it."""
    try:
        inspect.signature(task.sample).bind(None, 1, 0)
        inspect.signature(task.sample).bind(None, 1)
    except TypeError:
        return False
    return True


def _fits(task: Task, pair: Any, batch: int) -> str:
    """That a sample is of the task's sizes."""
    if not isinstance(pair, tuple) or [isinstance(t, Tensor) for t in pair] != [True, True]:
        raise Wrong(f"sample must return two tensors, inputs and targets, got {_named(pair)}")
    # Sizes and dtype of the inputs follow from vocab or in_dim.
    inputs, targets = pair
    vocab = task.vocab
    size = (batch, task.tokens) if vocab else (batch, task.tokens, task.in_dim)
    dtype = torch.int64 if vocab else torch.float32
    wanted = f"{'ids (batch, tokens)' if vocab else 'vectors (batch, tokens, in_dim)'} = {size}"
    if tuple(inputs.shape) != size:
        ids = not vocab and tuple(inputs.shape) == size[:2] and not inputs.is_floating_point()
        hint = "; for token ids write vocab, how many there are, and no in_dim" if ids else ""
        raise Wrong(f"inputs must be {wanted}, got {tuple(inputs.shape)}{hint}")
    if inputs.dtype != dtype:
        raise Wrong(f"inputs must be {_word(dtype)}, got {_word(inputs.dtype)}")
    if vocab and not 0 <= int(inputs.min()) <= int(inputs.max()) < vocab:
        raise Wrong(
            f"ids must be from 0 to {vocab - 1} (vocab {vocab}), got {int(inputs.min())} to "
            f"{int(inputs.max())}"
        )
    # Targets may have any shape behind the batch, as far as the task's own loss takes them.
    if targets.shape[:1] != (batch,):
        raise Wrong(f"targets must begin with the batch {batch}, got {tuple(targets.shape)}")
    for name, tensor in (("inputs", inputs), ("targets", targets)):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise Wrong(f"{name} must be finite, got {not_finite(tensor)}")
        if tensor.requires_grad:
            raise Wrong(f"{name} must be plain data, got a tensor that requires a gradient")
    # A loss that is inherited says more about what the targets must be.
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
    outputs, targets = random_outputs(task), drawn(task, 1, BATCH)[1]
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
    # An ensemble trains models side by side: the loss of each is what it would be alone.
    for m in range(2):
        alone = task.loss(outputs[m], targets)
        if tuple(alone.shape) != () or not is_close(alone, losses[m]):
            raise Wrong(
                f"loss of a model must not depend on the others: got {in_words(losses[m])} beside "
                f"another one, {in_words(alone)} alone"
            )
    # In an ensemble each model may have its own data, so targets come with the models' axis too.
    given_twice = task.loss(outputs, targets.expand(2, *targets.shape))
    if tuple(given_twice.shape) != (2,) or not is_close(given_twice, losses):
        raise Wrong(
            "loss must be the same where the targets have the axis of models too: got "
            f"{given_twice.tolist()} instead of {losses.tolist()}"
        )
    return f"outputs {tuple(outputs.shape)} of 2 models give (2,)"


def named_baselines(task: Task) -> dict[str, float]:
    """The errors of the task's predictors that need no training."""
    baselines = task.baselines()
    if not isinstance(baselines, dict) or "zero" not in baselines:
        raise Wrong(f'baselines must hold "zero", the error of outputs of zero, got {baselines!r}')
    for name, value in baselines.items():
        if not isinstance(value, float) or not 0 <= value < math.inf:
            _finds_what_is_not_finite(task)
            raise Wrong(f"baseline {name} must be a finite number of at least 0, got {value!r}")
    if baselines["zero"] == 0:
        raise Wrong("outputs of zero must have an error, got baseline zero 0.0")
    return baselines


def _finds_what_is_not_finite(task: Task) -> None:
    """A rare NaN in the data shows only where many are drawn, as for a measured baseline."""
    generator = torch.Generator().manual_seed(0)
    bad = dict.fromkeys(("inputs", "targets"), 0)
    for _ in range(MEASURED_ON // 128):
        for name, tensor in zip(bad, task.sample(generator, 128), strict=True):
            bad[name] += int((~tensor.reshape(len(tensor), -1).isfinite()).any(1).sum())
    for name, count in bad.items():
        if count:
            raise Wrong(
                f"{name} must be finite, got nan or inf in {count:,} of {MEASURED_ON:,} sequences"
            )


def random_outputs(task: Task, models: int = 2, batch: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(models, batch, task.tokens, task.answer_dim, generator=generator)


# ---- samples and words, for all rules


def drawn(task: Task, seed: int, batch: int, step: int | None = None) -> tuple[Tensor, Tensor]:
    """A sample of the task from a fresh generator of this seed, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    # Held-out sequences are asked for without a step, as in training.
    return task.sample(generator, batch) if step is None else task.sample(generator, batch, step)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _named(value: Any) -> str:
    """What a value is, for people."""
    if isinstance(value, tuple):
        return f"({', '.join(type(one).__name__ for one in value)})"
    return type(value).__name__


def not_finite(tensor: Tensor) -> str:
    return str(tensor[~tensor.isfinite()][0].item())


def in_words(value: Tensor) -> str:
    return (
        f"{value.item():.6g}" if isinstance(value, Tensor) and value.numel() == 1 else repr(value)
    )


def is_close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-6)


FIRST_RULES = (
    Rule("value", _is_a_value, needed=True),
    Rule("sizes", _has_sizes, needed=True),
    Rule("sample", _samples_of_its_sizes, needed=True),
    Rule("loss", _losses_per_model, needed=True),
)
