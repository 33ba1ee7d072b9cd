"""One contract for every built-in task: values, samples, losses, measures, baselines, mistakes.

What one task says besides is in a file of its own; its example is in support/tasks.py. `headwise
check` tests the same contract (test_check.py); here it is written down a second time.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from support.tasks import EXAMPLES, NEIGHBORS
from support.tolerance import STANDARD_ERRORS, close, same, seeded

from headwise.errors import UsageError
from headwise.tasks import TASKS, BiasedNearest, Nearest, task_class, task_of
from headwise.tasks.task import Classified


@pytest.fixture(params=sorted(TASKS))
def example(request):
    return EXAMPLES[request.param]


def answers_of(task, outputs=2, batch=3):
    """Inputs, targets, and outputs of two models."""
    inputs, targets = task.sample(seeded(0), batch)
    size = (outputs, batch, task.tokens, task.answer_dim)
    return inputs, targets, torch.randn(size, generator=seeded(1))


# ---- values


def test_task_is_a_frozen_value(example):
    task = example.task
    assert task == example.task
    assert hash(task) == hash(example.task)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(task, next(iter(example.fields)), 8)
    assert type(task).__doc__


def test_task_names_itself_and_is_rebuilt_from_its_fields(example):
    task = example.task
    assert task.spec() == {"name": example.name, **dataclasses.asdict(task)}
    assert task_of(example.name, dataclasses.asdict(task)) == task
    assert task != task_of(example.name, example.fields | example.other)


def test_names_are_of_different_tasks():
    assert len(set(TASKS.values())) == len(TASKS)
    assert Nearest(7, 5) != BiasedNearest(7, 5)


# ---- samples


def test_inputs_are_token_ids_or_vectors(example):
    task = example.task
    x, _ = task.sample(seeded(0), 3)
    assert bool(task.vocab) != bool(task.in_dim)
    if task.vocab:
        assert (x.shape, x.dtype) == ((3, task.tokens), torch.int64)
        assert 0 <= x.min() <= x.max() < task.vocab
    else:
        assert (x.shape, x.dtype) == ((3, task.tokens, task.in_dim), torch.float32)
    assert not x.requires_grad


def test_targets_are_classes_or_numbers(example):
    task = example.task
    _, target = task.sample(seeded(0), 3)
    assert target.shape[0] == 3
    assert target.ndim == 1 or 1 <= target.shape[1] <= task.tokens
    assert not target.requires_grad
    if not isinstance(task, Classified):
        assert target.dtype == torch.float32
        assert 1 <= task.answer_dim <= 7
        return
    classes = target[..., 0] if example.name == "masked" else target  # whose targets say also where
    assert target.dtype == torch.int64
    assert 0 <= classes.min() <= classes.max() < task.answer_dim == task.classes


def test_real_data_are_held_out_and_others_are_one_law(example):
    task = example.task
    held_out, start, late = (task.sample(seeded(0), 3, step) for step in (None, 0, 10**9))
    assert example.has_data == (not torch.equal(late[0], held_out[0]))
    for a, b in zip(late, start if example.has_data else held_out, strict=True):
        same(a, b, "late in training the task is the one that is evaluated, or that of the start")


@pytest.mark.parametrize("step", [None, 0])
def test_data_follow_the_generator_alone(example, step):
    task = example.task
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    first = task.sample(seeded(9), 13, step)
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002
    for a, b in zip(first, task.sample(seeded(9), 13, step), strict=True):
        same(a, b)
    assert not torch.equal(first[0], task.sample(seeded(10), 13, step)[0])
    generator = seeded(9)
    task.sample(generator, 13, step)
    assert not torch.equal(first[0], task.sample(generator, 13, step)[0]), "the generator moves on"


# ---- loss, measures, baselines


def test_loss_is_one_number_per_model(example):
    task = example.task
    _, target, outputs = answers_of(task)
    loss = task.loss(outputs, target)
    assert loss.shape == (2,)
    same(task.loss(outputs, target.expand(2, *target.shape)), loss, "targets of each model")
    close(task.loss(outputs[1], target), loss[1])
    wider = torch.cat((outputs, torch.full((2, 3, task.tokens, 2), math.nan)), -1)
    same(task.loss(wider, target), loss, "coordinates beyond the answer are not evaluated")


def test_measures_are_per_model(example):
    task = example.task
    _, target, outputs = answers_of(task)
    wider = torch.cat((outputs, torch.full((2, 3, task.tokens, 2), math.nan)), -1)
    for key, value in task.measures(outputs, target).items():
        assert key.isidentifier()
        assert value.shape[:1] == (2,)
        same(task.measures(outputs, target.expand(2, *target.shape))[key], value)
        same(task.measures(wider, target)[key], value)
        close(task.measures(outputs[1], target)[key], value[1])


def test_task_of_classes_reports_accuracy(example):
    task = example.task
    _, target, outputs = answers_of(task)
    measures = task.measures(outputs, target)
    assert ("accuracy" in measures) == isinstance(task, Classified)
    if "accuracy" in measures:
        assert measures["accuracy"].shape == (2,)
        assert ((measures["accuracy"] >= 0) & (measures["accuracy"] <= 1)).all()


def test_regression_alone_has_a_profile(example):
    task = example.task
    _, target, outputs = answers_of(task)
    measures = task.measures(outputs, target)
    assert ("profile" in measures) == (example.name == "regression")
    if "profile" in measures:
        assert measures["profile"].shape == (2, target.shape[1])
        close(measures["profile"].mean(-1), task.loss(outputs, target))


def test_fused_kernels_know_the_loss_of_neighbors(example):
    assert example.task.squared == (example.name in NEIGHBORS)
    assert example.task.ordered == (example.name not in (*NEIGHBORS, "lookup"))


def test_outputs_of_zero_score_what_the_baseline_says(example):
    task, count = example.task, 4001
    baselines = task.baselines()
    assert all(isinstance(v, float) and 0.0 <= v < math.inf for v in baselines.values())
    zeros = torch.zeros(1, task.tokens, task.answer_dim)
    targets = task.sample(seeded(2), count)[1]
    errors = torch.stack([task.loss(zeros, target[None]) for target in targets]).double()
    error = errors.std() / math.sqrt(count)
    assert abs(errors.mean() - baselines["zero"]) <= STANDARD_ERRORS * error + 1e-6, (
        f"n {count}, seed 2"
    )


# ---- mistakes


def whole_fields(name):
    return {f.name for f in dataclasses.fields(task_class(name)) if f.type == "int"}


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name in sorted(TASKS) for field in EXAMPLES[name].least]
)
@pytest.mark.parametrize("bad", [4, 1, 0, -3, 2.0, "7", True, None])
def test_sizes_are_whole_numbers(name, field, bad):
    assert set(EXAMPLES[name].least) == whole_fields(name)
    least, message = (
        EXAMPLES[name].least[field],
        f"{field} must be a whole number of at least {EXAMPLES[name].least[field]}, got {bad!r}",
    )
    if type(bad) is int and bad >= least:
        fields = (
            EXAMPLES[name].fields
            | ({"pairs": 1} if (name, field) == ("recall", "keys") else {})
            | {field: bad}
        )
        assert getattr(task_of(name, fields), field) == bad
        return
    with pytest.raises(UsageError) as caught:
        task_of(name, EXAMPLES[name].fields | {field: bad})
    assert str(caught.value) == message


@pytest.mark.parametrize("name", sorted(TASKS))
def test_unknown_fields_of_tasks_die_with_one_line(name):
    known = [f.name for f in dataclasses.fields(task_class(name))]
    with pytest.raises(UsageError) as caught:
        task_of(name, EXAMPLES[name].fields | {known[0].capitalize(): 3})
    for part in (
        f"unknown key {known[0].capitalize()!r} of task {name}",
        f"did you mean {known[0]}",
        *known,
    ):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_task_by_name_says_what_it_lacks() -> None:
    with pytest.raises(UsageError, match="task farthest needs points"):
        task_of("farthest", {"dim": 8})
