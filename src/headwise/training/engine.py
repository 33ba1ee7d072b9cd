"""Train many models at once: `train(runs) -> rows`.

    load        every run's state, from its checkpoint or from the start   (checkpoint.py)
    pack        states that can be trained together into ensembles         (ensemble.py)
    train       an ensemble epoch by epoch, in blocks of steps             (ensemble.py)
    save        between two blocks, now and then and when asked to stop    (checkpoint.py)
    drop        models that diverged; the others' numbers are unchanged
    evaluate    on held-out sequences, and write rows

Runs that share a shape, a task and the static part of a recipe form an ensemble: every parameter
has a leading model axis and one step moves them all, each with its own seed, data, learning rate
and schedule. What a run sees is a pure function of its seed and the step, so a run killed anywhere
resumes as if nothing had happened, and on a CPU its bits do not depend on the runs beside it.

Needs the standard library, torch, numpy and safetensors only, so that it runs wherever torch does.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headwise.device import memory, numerics, pick_device, provenance
from headwise.errors import UsageError, shown
from headwise.model.geometry import score_geometry
from headwise.progress import Free, Progress, Steps
from headwise.rows import Row
from headwise.signals import Saved, Stop, Stopped, saving
from headwise.tasks import PACKAGE
from headwise.tasks.check_data import check_meaning
from headwise.tasks.first_check import check_baselines, check_first_sample
from headwise.tasks.task import Task
from headwise.training import checkpoint
from headwise.training.checkpoint import State
from headwise.training.ensemble import Ensemble, pack
from headwise.training.run import Run

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
    stop: Stop | None = None,
    checked: bool = False,
) -> list[Row]:
    """Train every run, together where their shapes agree; rows in the order of the runs.

    With `folder`, each run leaves a checkpoint in folder/<id> between two blocks of steps, at most
    every `checkpoint_every` seconds, and resumes from it. Ctrl-C, and whatever else `stop` hears,
    has it written after the block that is under way, and raises `Stopped`, a KeyboardInterrupt.
    `done` gets each row as soon as it is there,
    `advance` the number of model-steps just made (`Free` ones take no time; a progress bar is shown
    when it is not given). What `probe` says of a trained run and its weights is added to its row.
    `checked` says that the data of tasks of one's own were tested by whoever dealt the runs out.
    """
    if isinstance(runs, Run):
        raise UsageError("train takes a list of runs: train([run]), got one run")
    runs = list(runs)
    if others := [run for run in runs if not isinstance(run, Run)]:
        raise UsageError(f"train takes a list of runs, got {shown(others[0])} in it")
    target = pick_device(device)
    for task in {run.task for run in runs}:
        if not type(task).__module__.startswith(PACKAGE):  # the tests check those of headwise
            check_first_sample(task)
            check_baselines(task)
            if not checked:
                check_meaning(task)
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
                if folder is None:
                    train_ensemble(states, work)
                else:
                    with saving(stop) as heard:
                        train_ensemble(states, dataclasses.replace(work, stop=heard))
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
class Work:
    """Where and how an ensemble is trained; the arguments of `train`."""

    device: torch.device
    folder: Path | None
    finish: Callable[[Row], None]
    steps: Steps
    checkpoint_every: float
    keep_weights: bool
    probe: Probe | None
    stop: Stop | None = None  # to be asked; None: nothing can be saved

    def asked(self) -> Stop | None:
        """Who asks for a stop, if somebody does."""
        return self.stop if self.stop is not None and self.stop.asked() else None


def _halves(left: list[Run], folder: Path | None, device: torch.device) -> list[list[State]]:
    """What did not fit the memory, as two halves."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    states, half = [checkpoint.load(folder, run) for run in left], len(left) // 2
    halves = [part for part in (states[:half], states[half:]) if part]
    sizes = " and ".join(str(len(part)) for part in halves)
    print(
        f"headwise: {len(left)} models at once do not fit the memory; now {sizes}",
        file=sys.stderr,
    )
    return [ensemble for part in halves for ensemble in pack(part, device)]


# ---- one ensemble


def train_ensemble(states: list[State], work: Work) -> None:
    """Train states of one kind and step to their end, and finish their rows.

    A checkpoint lies between two blocks of steps. Within a block the head groups are at different
    steps, a model of a user's own is within its random numbers, and a GPU runs a block as one CUDA
    graph.
    """
    recipe, models = states[0].run.recipe, len(states)
    ensemble = Ensemble(states, work.device)
    saved = began = time.monotonic()
    blocks = recipe.epoch // ensemble.steps
    evaluated = {round(recipe.epochs * (i + 1) / recipe.evals) for i in range(recipe.evals)}
    evaluated -= {0, recipe.epochs}
    limit = DIVERGED * states[0].run.task.baselines()["zero"]
    work.steps.add(Free(states[0].step * models))
    if stop := work.asked():
        raise Stopped(stop.number, _saved(states))

    for epoch in range(states[0].epoch, recipe.epochs):
        # -- one epoch; losses stay on the device, so that the next block is queued meanwhile
        first = states[0].block
        losses = [state.epoch_loss for state in states]
        total = torch.tensor(losses, dtype=torch.float64, device=work.device)
        for block in range(first, blocks):
            total += ensemble.run_block(epoch * blocks + block).double().sum(0)
            now, stop = time.monotonic(), work.asked()
            due = now - saved >= work.checkpoint_every
            if work.folder is not None and (stop or due) and block + 1 < blocks:
                overflows = ensemble.scales.skipped.int().tolist()
                for state, loss, count in zip(states, total.tolist(), overflows, strict=True):
                    state.block, state.epoch_loss, state.scale.overflows = block + 1, loss, count
                    state.seconds += (now - began) / len(states)
                began, saved = now, _save(work.folder, ensemble, states, stop)
        work.steps.add((blocks - first) * ensemble.steps * len(states))
        now = time.monotonic()
        for state, loss in zip(states, (total / recipe.epoch).tolist(), strict=True):
            state.epoch, state.block, state.epoch_loss = epoch + 1, 0, 0.0
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
        stop, due = work.asked(), now - saved >= work.checkpoint_every
        if work.folder is not None and (stop or due) and epoch + 1 < recipe.epochs:
            saved = _save(work.folder, ensemble, states, stop)

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


def _save(folder: Path, ensemble: Ensemble, states: list[State], stop: Stop | None) -> float:
    """Write every run's checkpoint; returns the time, or raises Stopped if that is asked for."""
    ensemble.update(states)
    for state in states:
        checkpoint.save(folder, state)
    if stop:
        raise Stopped(stop.number, _saved(states))
    return time.monotonic()


def _saved(states: list[State]) -> list[Saved]:
    return [(state.run.id, state.step) for state in states if state.step]


def _baselines(task: Task) -> Row:
    """The error of answers of zero; of a task of one's own also its lowest baseline, since nobody
    else knows it."""
    errors = task.baselines()
    if type(task).__module__.startswith(PACKAGE):
        return {"zero_error": errors["zero"]}
    name = min(errors, key=lambda name: errors[name])
    # Its last bits may depend on the number of threads, and a row's must not.
    lowest = {"baseline": float(f"{errors[name]:.6g}"), "baseline_name": name}
    return {"zero_error": errors["zero"], **lowest}


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
        **_baselines(run.task),
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
