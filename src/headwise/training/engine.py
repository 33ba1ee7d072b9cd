"""Train many models at once: `train(runs) -> rows`.

    load        every run's state, from its checkpoint or from the start   (checkpoint.py)
    pack        states that can be trained together into ensembles
    train       an ensemble epoch by epoch, in blocks of steps             (ensemble.py)
    drop        models that diverged; the others' numbers are unchanged
    evaluate    on held-out sequences, and write rows

Runs that share a shape, a task and the static part of a recipe form an ensemble: every parameter
has a leading model axis and one step moves them all, each with its own seed, data, learning rate
and schedule. What a run sees is a pure function of its seed and the step, so a run killed anywhere
resumes as if nothing had happened, and on a CPU its bits do not depend on the runs beside it.

Needs the standard library, torch, numpy and safetensors only, so that it runs wherever torch does.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.device import memory, numerics, pick_device, provenance
from headwise.model.geometry import score_geometry
from headwise.model.transformer import build
from headwise.progress import Free, Progress
from headwise.rows import Row
from headwise.tasks.first_check import check_first_sample
from headwise.training import checkpoint
from headwise.training.checkpoint import State
from headwise.training.data import block_steps
from headwise.training.ensemble import Ensemble, family_of
from headwise.training.flat import ALIGN
from headwise.training.run import Run, ensemble_key

LARGEST = 64  # models
CPU_CACHE = 32 << 20  # bytes of a step's activations and weights on a CPU
GPU_SHARE, GPU_BYTES = 0.4, 56 << 30  # of the free memory, and at most
DIVERGED = 100.0  # an epoch's mean loss above this many times the zero predictor's, or not a number

Probe = Callable[[Run, dict[str, Tensor]], Row]


def train(
    runs: Sequence[Run],
    *,
    device: str = "auto",
    folder: Path | None = None,
    done: Callable[[Row], None] | None = None,
    advance: Callable[[int], None] | None = None,
    checkpoint_every: float = 30.0,
    keep_weights: bool = False,
    probe: Probe | None = None,
) -> list[Row]:
    """Train every run, together where their shapes agree; rows in the order of the runs.

    With `folder`, each run leaves a checkpoint in folder/<id> at the end of an epoch, at most every
    `checkpoint_every` seconds, and resumes from it. `done` gets each row as soon as it is there,
    `advance` the number of model-steps just made (`Free` ones take no time; a progress bar is shown
    when it is not given). What `probe` says of a trained run and its weights is added to its row.
    """
    target = pick_device(device)
    for task in {run.task for run in runs}:
        check_first_sample(task)
    unique = {run.id: run for run in runs}
    rows: dict[str, Row] = {}

    def finish(row: Row) -> None:
        rows[row["id"]] = row
        if done is not None:
            done(row)
        if folder is not None:
            checkpoint.remove(folder, unique[row["id"]])

    bar = None
    if advance is None:
        bar = Progress(sum(run.recipe.steps for run in unique.values()), f"{len(unique)} runs")
        advance = bar.advance

    waiting = pack([checkpoint.load(folder, run) for run in unique.values()], target)
    while waiting:
        states = waiting.pop(0)
        steps = Steps(advance)
        work = Work(target, folder, finish, steps, checkpoint_every, keep_weights, probe)
        try:
            with numerics(states[0].run.recipe.precision, target):
                train_ensemble(states, work)
        except torch.OutOfMemoryError:
            if len(states) == 1:
                raise
        else:
            continue
        # outside the handler, whose traceback holds the ensemble's memory
        left = [state.run for state in states if state.run.id not in rows]
        finished = sum(s.run.recipe.steps for s in states if s.run.id in rows)
        steps.take_back(finished)
        waiting = _halves(left, folder, target) + waiting
    if bar:
        bar.close()
    return [rows[run.id] for run in runs]


@dataclass
class Steps:
    """Counts an ensemble's model-steps, so that they can be taken back when it is trained again."""

    advance: Callable[[int], None]
    made: int = 0
    free: int = 0

    def add(self, steps: int) -> None:
        if isinstance(steps, Free):
            self.free += steps
        else:
            self.made += steps
        self.advance(steps)

    def take_back(self, finished: int) -> None:
        """All of them but those of runs that are finished."""
        self.advance(Free(-self.free))
        self.advance(finished - self.made)


@dataclass
class Work:
    """Where and how an ensemble is trained; the arguments of `train`."""

    device: torch.device
    folder: Path | None
    finish: Callable[[Row], None]
    steps: Steps
    checkpoint_every: float
    keep_weights: bool
    probe: Probe | None


# ---- which runs train together


def pack(states: Sequence[State], device: torch.device) -> list[list[State]]:
    """States that can be trained together: equal keys, equal epochs, the same kernels, no more than
    fit. Equal shapes come side by side."""
    groups: dict[Any, list[State]] = {}
    for state in states:
        key = (ensemble_key(state.run), state.epoch, family_of(state.run, device))
        groups.setdefault(key, []).append(state)
    ensembles = []
    for group in groups.values():
        group.sort(key=lambda state: state.run.shape.num_heads)
        count = math.ceil(len(group) / most_models(group[0].run, device))
        size = math.ceil(len(group) / count)
        ensembles += [group[i : i + size] for i in range(0, len(group), size)]
    return ensembles


def most_models(run: Run, device: torch.device) -> int:
    """How many models of this kind are trained together at most.

    On a CPU as many as keep a step's activations near the cache, and one alone when its bits would
    depend on its place. On a GPU as many as fit 40 % of the free memory and 56 GiB: a model's step
    was never slower in a larger ensemble. A model of a user's own is always alone.
    """
    on_cpu = device.type == "cpu"
    if run.model is not None or (on_cpu and not _fills_lines(run)):
        return 1
    recipe, tokens = run.recipe, run.task.tokens
    step = run.shape.activation_bytes(tokens, batch=recipe.batch) + 20 * run.shape.params
    if on_cpu:
        return max(1, min(LARGEST, CPU_CACHE // step))
    free, _ = torch.cuda.mem_get_info(device)
    # what an earlier ensemble left to us
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    family = family_of(run, device)
    model = 4 * step if family is None else family.model_bytes(run)
    block = block_steps(run.task, recipe) * recipe.batch * tokens * max(2, run.task.in_dim) * 4
    data = 4 * block  # drawn, and in place
    return max(1, min(LARGEST, int(min(GPU_SHARE * free, GPU_BYTES)) // (model + data)))


def _fills_lines(run: Run) -> bool:
    """Whether one model's activations and gradients fill whole cache lines, so that its neighbours'
    start on one: the matrix library takes another path, with other bits, where they do not, and for
    a matrix of one row or column (the read-out is padded)."""
    with torch.device("meta"):
        matrices = [
            p
            for name, p in build(run.shape).named_parameters()
            if name.endswith("weight") and p.ndim == 2 and "read_out" not in name
        ]
    sizes = [run.recipe.batch * run.task.tokens, *(p.numel() for p in matrices)]
    return not any(size % ALIGN for size in sizes) and all(min(p.shape) > 1 for p in matrices)


def _halves(left: list[Run], folder: Path | None, device: torch.device) -> list[list[State]]:
    """What did not fit the memory, as two halves."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    states, half = [checkpoint.load(folder, run) for run in left], len(left) // 2
    halves = [part for part in (states[:half], states[half:]) if part]
    sizes = " and ".join(str(len(part)) for part in halves)
    print(
        f"headwise: {len(left)} models at once do not fit the memory; going on with {sizes}",
        file=sys.stderr,
    )
    return [ensemble for part in halves for ensemble in pack(part, device)]


# ---- one ensemble


def train_ensemble(states: list[State], work: Work) -> None:
    """Train states of one kind and epoch to their end, and finish their rows."""
    recipe, models = states[0].run.recipe, len(states)
    ensemble = Ensemble(states, work.device)
    saved = began = time.monotonic()
    blocks = recipe.epoch // ensemble.steps
    evaluated = {round(recipe.epochs * (i + 1) / recipe.evals) for i in range(recipe.evals)}
    evaluated -= {0, recipe.epochs}
    limit = DIVERGED * states[0].run.task.baselines()["zero"]
    work.steps.add(Free(states[0].epoch * recipe.epoch * models))

    for epoch in range(states[0].epoch, recipe.epochs):
        # -- one epoch; losses stay on the device, so that the next block is queued meanwhile
        total = torch.zeros(len(states), dtype=torch.float64, device=work.device)
        for block in range(epoch * blocks, (epoch + 1) * blocks):
            total += ensemble.run_block(block).double().sum(0)
        work.steps.add(recipe.epoch * len(states))
        now = time.monotonic()
        for state, loss in zip(states, (total / recipe.epoch).tolist(), strict=True):
            state.epoch = epoch + 1
            state.seconds += (now - began) / len(states)
            state.curve.append(loss)
        ensemble.scales.end_epoch([state.scale for state in states], recipe)
        began = now

        # -- drop what diverged
        lost = [i for i, s in enumerate(states) if not s.curve[-1] <= limit or s.scale.hopeless]
        if lost:
            ensemble.update(states)
            for i in lost:
                work.finish(row_of(states[i], None, models, work.device))
            states = [state for i, state in enumerate(states) if i not in lost]
            work.steps.add(Free(len(lost) * (recipe.epochs - epoch - 1) * recipe.epoch))
            if not states:
                return
            ensemble = Ensemble(states, work.device)

        # -- evaluate along the way, and save
        if epoch + 1 in evaluated:
            for state, error in zip(states, ensemble.held_out().mean(1).tolist(), strict=True):
                state.held_out_curve.append((epoch + 1, _finite(error)))
        due = now - saved >= work.checkpoint_every and epoch + 1 < recipe.epochs
        if work.folder is not None and due:
            ensemble.update(states)
            for state in states:
                checkpoint.save(work.folder, state)
            saved = time.monotonic()

    # -- evaluate at the end, and finish the rows
    errors, measures = ensemble.evaluate()
    for m, state in enumerate(states):
        run, error = state.run, errors[m].mean().item()
        weights = ensemble.named_weights(m)
        state.held_out_curve.append((recipe.epochs, _finite(error)))
        if work.folder is not None and work.keep_weights:
            checkpoint.keep_weights(work.folder, run, weights)
        if not error <= limit:
            work.finish(row_of(state, None, models, work.device))
            continue
        row = row_of(state, errors[m], models, work.device)
        if run.model is None:
            row |= score_geometry(run.shape, weights)
        row |= {f"held_out_{name}": values[m].tolist() for name, values in measures.items()}
        if work.probe is not None:
            row |= work.probe(run, weights)
        work.finish(row)


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def row_of(state: State, errors: Tensor | None, models: int, device: torch.device) -> Row:
    """A finished run as one flat row: what it was, what came out, and where it ran. `errors` on
    held-out batches; None: it diverged."""
    run = state.run
    finite = [x for x in state.curve if math.isfinite(x)]
    held_out, spread = None, None
    if errors is not None:
        held_out = errors.mean().item()
        if len(errors) > 1:
            spread = errors.std().item() / math.sqrt(len(errors))
    flops = None  # of a model of a user's own nobody knows
    if run.model is None:
        flops = run.shape.flops(run.task.tokens, batch=run.recipe.batch, training=True)
    return {
        "id": run.id,
        "status": "diverged" if errors is None else "done",
        **run.columns(),
        "flops": flops,
        "held_out": held_out,
        "held_out_se": spread,
        "train_best": min(finite) if finite else None,
        "train_last": None if errors is None else state.curve[-1],
        "zero_error": run.task.baselines()["zero"],
        "epochs_done": state.epoch,
        "curve": [_finite(x) for x in state.curve],
        "held_out_curve": state.held_out_curve,
        "seconds": round(state.seconds, 3),
        "models": models,
        "memory_bytes": memory(device),
        "resumed": state.resumed,
        "skipped": state.scale.skipped,
        **provenance(device),
    }
