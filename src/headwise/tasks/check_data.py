"""The rules of `headwise check` that are about data: randomness, devices, held-out sequences, and
other processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.errors import Note, Rule, Wrong
from headwise.tasks.first_check import BATCH, STEPS, drawn, refuse
from headwise.tasks.own import load_task
from headwise.tasks.task import Task

DRAWN = (4096, 1024)  # training and held-out sequences that are compared
LARGEST_DRAW = 2**24  # numbers in one of these parts
SMALL_SPACE = 10**6  # so few sequences of ids may all be met in training


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether tensors are equal pair by pair."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- before a task's first run


@functools.lru_cache(256)
def check_meaning(task: Task) -> None:
    """Refuse a task whose data make every number about it meaningless: they do not follow from the
    generator, never change, or show in training what is held out. Once per task and process.

    It draws as much as some 40 steps of training do.
    """
    with global_generators_kept():
        refuse(task, DATA_RULES)


# ---- randomness


def follows_the_generator(task: Task) -> str:
    """The generator's state alone decides what is drawn, whatever the global generators' states
    are."""
    for step in STEPS:
        # The same draw twice, with other states of the global generators: they must be neither used
        # nor read.
        with _global_generators(1) as touched:
            first = drawn(task, 9, 13, step)
        if touched:
            raise Wrong(
                f"sample uses the global generator of {' and '.join(touched)}: draw with "
                "generator=generator"
            )
        with _global_generators(2):
            second = drawn(task, 9, 13, step)
        if not equal(first, second):
            raise Wrong(
                "the same generator must give the same data: two calls with equal states differ"
            )
    return "the same state gives the same data; no global generator is used"


@contextlib.contextmanager
def global_generators_kept() -> Iterator[None]:
    """Give the global generators back in the state they had."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


@contextlib.contextmanager
def _global_generators(seed: int) -> Iterator[list[str]]:
    """Global generators seeded; the names of those that were used, once the block has ended."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    touched: list[str] = []
    before = _states()
    yield touched
    after = _states()
    touched += [name for name in before if before[name] != after[name]]


def _states() -> dict[str, bytes]:
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": pickle.dumps(np.random.get_state()),  # noqa: NPY002
        "random": pickle.dumps(random.getstate()),
    }


def draws_anew(task: Task) -> str:
    """Another seed, and a second draw from the same generator, give other data."""
    for step in STEPS:
        # One generator draws twice in a row; another has another seed.
        generator = torch.Generator().manual_seed(3)
        first = task.sample(generator, 64, step)
        if torch.equal(first[0], drawn(task, 4, 64, step)[0]):
            raise Wrong("other seeds must give other data: seeds 3 and 4 give the same inputs")
        if torch.equal(first[0], task.sample(generator, 64, step)[0]):
            raise Wrong("the generator must move on: two draws in a row give the same inputs")
    return "other seeds and later draws give other data"


def stays_on_the_device(task: Task) -> str:
    """Data lie where the generator is. Without a GPU, tensors made without a device are sent to
    "meta", where they are found out."""
    if torch.cuda.is_available():
        pair = task.sample(torch.Generator("cuda").manual_seed(0), BATCH)
        places = {tensor.device.type for tensor in pair}
        if places != {"cuda"}:
            raise Wrong(
                "inputs and targets must be on the generator's device cuda, got "
                f"{' and '.join(sorted(places))}: make tensors with device=generator.device"
            )
        return "data are on the generator's device, cuda"
    try:
        # Only inside: a default device that was ever set stays a mode that breaks torch.compile.
        with torch.device("meta"):
            places = {tensor.device.type for tensor in drawn(task, 0, BATCH)}
    except Exception as e:
        # Data that are moved from the default device afterwards cannot be tested here.
        places = {"meta"} if "'meta' device type for generator" in str(e) else set[str]()
    if "meta" in places:
        raise Wrong(
            "inputs and targets must be on the generator's device: make every tensor with "
            "device=generator.device"
        )
    return "tensors are made on the generator's device"


# ---- what is held out


def keeps_apart(task: Task) -> str:
    """No held-out sequence occurs in training, unless there are hardly any others."""
    # Long sequences of wide tokens are drawn in smaller numbers, so that the rule takes a second.
    room = LARGEST_DRAW // (task.tokens * max(1, task.in_dim))
    count, held_count = (max(32, min(n, room)) for n in DRAWN)
    # Four parts of training, far from each other in steps, so that a task that gets harder is met
    # at several stages.
    known: set[bytes] = set()
    for part in range(4):
        known |= set(_rows(drawn(task, 100 + part, count // 4, 1000 * part)[0]))
    held = _rows(drawn(task, 200, held_count)[0])
    seen = sum(row in known for row in held)
    what = f"{seen:,} of {held_count:,} held-out sequences occur among {count:,} training ones"
    if not seen:
        return f"none of {held_count:,} held-out sequences occurs among {count:,} training ones"
    # A small space of ids is met completely in training. That is no fault of the task, and so only
    # noted.
    space = task.vocab**task.tokens if task.vocab else math.inf
    if space <= SMALL_SPACE:
        raise Note(
            f"{what}: there are at most {space:,}. Keep some for step None to see what is learned "
            "rather than remembered"
        )
    if task.vocab and seen <= held_count / 100:
        raise Note(what)
    # Sequences of ids may come from a space so small that training meets most of it. Training then
    # repeats itself as often as it repeats what is held out.
    cure = "where step is None, sample must draw from those that are kept apart"
    again = len(held) * len(known) / seen
    if task.vocab and 2 * seen < held_count:
        cure = (
            f"there seem to be some {float(f'{again:.2g}'):,.0f} sequences in all. Keep a part of "
            "them for step None, such as every eighth by a sum of its ids (docs/own-task.md, few "
            "sequences), or draw longer ones"
        )
    raise Wrong(f"{what}: {cure}")


def _rows(inputs: Tensor) -> list[bytes]:
    return [row.tobytes() for row in inputs.flatten(1).numpy()]


# Rules without which no held-out error means anything.
DATA_RULES = (
    Rule("generator", follows_the_generator),
    Rule("draws", draws_anew),
    Rule("held out", keeps_apart),
)


def fills_what_it_samples(task: Task) -> str:
    """`fill` writes what `sample` returns from a generator in the same state."""
    steps, batch = 3, BATCH
    for step in (0, 10**6):
        # The engine's buffers are (steps, models, batch, ...): a view of one model has steps that
        # lie apart.
        expected = [t.unflatten(0, (steps, batch)) for t in drawn(task, 6, steps * batch, step)]
        room = [torch.zeros(steps, 2, *t.shape[1:], dtype=t.dtype) for t in expected]
        found = [t[:, 1] for t in room]  # the steps lie apart
        task.fill(found[0], found[1], torch.Generator().manual_seed(6), step)
        if not equal(found, expected):
            raise Wrong("fill must write what sample draws from the same generator")
    return "fill writes what sample draws"


# ---- answers that need not be found


def hides_the_answer(task: Task) -> str:
    """Where the answers of tokens can be compared with the tokens: the answer is not the token
    itself, nor the next one that the model sees."""
    inputs, targets = drawn(task, 7, 64)
    causal = "causal" if task.causal else "not causal"
    # Targets that are not like tokens (classes of a whole sequence, say) cannot be copied from one.
    shown = _answering_tokens(inputs, targets)
    if shown is None:
        return causal
    if torch.equal(shown, targets):
        raise Note("every answer is its own token: a model need only copy it")
    next_shown = shown.shape[1] > 1 and torch.equal(shown[:, 1:], targets[:, :-1])
    if next_shown and not task.causal:
        raise Wrong("every answer is the next token, which the model sees: set causal = True")
    return f"{causal}; no answer can be copied from {'its token' if task.causal else 'beside it'}"


def _answering_tokens(inputs: Tensor, targets: Tensor) -> Tensor | None:
    """The last tokens, which answer, in the size of the targets; None where these are not like
    tokens."""
    if targets.ndim != inputs.ndim or targets.dtype != inputs.dtype:
        return None
    if not 1 <= targets.shape[1] <= inputs.shape[1]:
        return None
    shown = inputs[:, -targets.shape[1] :]
    if inputs.ndim == 3:
        shown = shown[..., : targets.shape[2]]
    return shown if shown.shape == targets.shape else None


# ---- other processes


def is_pickled(task: Task) -> str:
    """A task survives pickling, which is how it travels to worker processes."""
    again = pickle.loads(pickle.dumps(task))
    if again != task or hash(again) != hash(task):
        raise Wrong(f"a pickled task must be equal to the task, got {again!r:.80}")
    return "equal after pickling"


def fingerprint(task: Task) -> dict[str, Any]:
    """What a task is and draws: its specification, and a digest of a few sequences."""
    digest = hashlib.sha256()
    for step in (0, None):
        for tensor in drawn(task, 8, 13, step):
            digest.update(tensor.contiguous().numpy().tobytes())
    return {"spec": json.loads(json.dumps(task.spec())), "data": digest.hexdigest()}


def fingerprints_elsewhere(tasks: Sequence[Task | str]) -> list[dict[str, Any]]:
    """The fingerprints that a new process finds of tasks, or of what names them. Its hash seed is
    another, so that sets and `hash` have another order there."""
    # The child imports from the same paths as this process, and prints JSON on its last line: a
    # user's file may print before it.
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    code = "from headwise.tasks.check_data import _answer; _answer()"
    found = subprocess.run(
        [sys.executable, "-P", "-c", code],
        input=pickle.dumps(list(tasks)),
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if found.returncode:
        last = found.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise Wrong(f"another process cannot load it: {last[:300]}")
    return json.loads(found.stdout.decode().rpartition("\n")[2])


def _answer() -> None:
    """The other process: tasks on standard input, their fingerprints on the last line of output."""
    tasks = pickle.load(sys.stdin.buffer)
    found = [fingerprint(load_task(task) if isinstance(task, str) else task) for task in tasks]
    print("\n" + json.dumps(found), end="")


def same_elsewhere(task: Task, spec: str) -> str:
    """A new process finds the same specification and draws the same data."""
    if type(task).__module__ == "__main__" and not spec:
        raise Note("its class is written in __main__: worker processes need it in a file")
    here, (there,) = fingerprint(task), fingerprints_elsewhere([spec or task])
    for key, value in here["spec"].items():
        if there["spec"].get(key) != value:
            raise Wrong(
                f"{key} must be the same in every process, got {value!r} here and "
                f"{there['spec'].get(key)!r} in another one: run ids would differ"
            )
    if here["data"] != there["data"]:
        raise Wrong(
            "the same generator must give the same data in every process: hash(), id() or the "
            "order of a set may be in it"
        )
    return "another process finds the same values and data"
