"""Train many models at once: `train(runs) -> rows`.

Runs that share a shape, a task and the static part of a recipe are stacked: every parameter has a
leading model axis and one step moves them all, each with its own seed, data, learning rate and
schedule. What a run sees is a pure function of its seed and the step, so a run killed anywhere goes
on as if nothing had happened, and on a CPU its bits do not depend on the runs beside it.

Imports the standard library, torch, numpy and safetensors only, so that it runs wherever torch
does.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.device import memory, numerics, pick_device, provenance
from headwise.errors import UsageError
from headwise.files import write_whole
from headwise.model.geometry import score_geometry
from headwise.model.transformer import build
from headwise.progress import Free, Progress
from headwise.rows import CHECKPOINT_FILE, WEIGHTS_FILE, Row
from headwise.training import fused_decoder, fused_encoder
from headwise.training.data import block_steps
from headwise.training.ensemble import ALIGN, Stack, State, begin, fused_refusal, trunk_refusal
from headwise.training.run import Run, ensemble_key

DIVERGED = 100.0  # an epoch's mean loss above this many times the zero predictor's, or not a number
CHECKPOINT = 1  # format; any other is not read

Probe = Callable[[Run, dict[str, Tensor]], Row]


# ---- saving and finishing one run


def _checkpoint_path(folder: Path, run: Run) -> Path:
    return folder / run.id / CHECKPOINT_FILE


def _save(folder: Path, state: State) -> None:
    from safetensors.torch import save

    about = {
        name: getattr(state, name)
        for name in (
            "epoch",
            "curve",
            "held_out_curve",
            "seconds",
            "resumed",
            "skipped",
            "shrink",
            "clean",
        )
    }
    tensors = {"weights": state.weights, "mean": state.mean, "square": state.square}
    told = {"format": str(CHECKPOINT), "run": state.run.id, "state": json.dumps(about)}
    write_whole(_checkpoint_path(folder, state.run), save(tensors, told))


def _load(folder: Path | None, run: Run) -> State:
    """The run's state from its checkpoint, else from the start: the row is the same, so what cannot
    be read costs only time."""
    if folder is None or not _checkpoint_path(folder, run).exists():
        return begin(run, _parent_weights(folder, run))
    from safetensors import SafetensorError, safe_open

    like = begin(run).weights
    try:
        with safe_open(_checkpoint_path(folder, run), "pt") as f:
            told = f.metadata() or {}
            if (told["format"], told["run"]) != (str(CHECKPOINT), run.id):
                raise ValueError(f"format {told['format']} of run {told['run']}")
            state = State(
                run,
                *(f.get_tensor(name) for name in ("weights", "mean", "square")),
                **json.loads(told["state"]),
            )
        if not 0 < state.epoch < run.recipe.epochs or len(state.curve) != state.epoch:
            raise ValueError(f"epoch {state.epoch} of {run.recipe.epochs}")
        if any(
            t.shape != like.shape or t.dtype != torch.float32
            for t in (state.weights, state.mean, state.square)
        ):
            raise ValueError("sizes of another model")
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as e:
        why = " ".join(f"{type(e).__name__}: {e}".split())
        print(
            f"headwise: run {run.id} starts again, its checkpoint cannot be used ({why})",
            file=sys.stderr,
            flush=True,
        )
        return begin(run, _parent_weights(folder, run))
    state.held_out_curve = [(e, v) for e, v in state.held_out_curve]
    state.resumed += 1
    return state


def _parent_weights(folder: Path | None, run: Run) -> dict[str, Tensor] | None:
    """The weights that a run starts from, where its init names another run."""
    parent = run.recipe.parent
    if not parent:
        return None
    if folder is None:
        raise UsageError(
            f"init run:{parent} takes that run's weights from a store, so it needs one; got no "
            "folder"
        )
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / parent / WEIGHTS_FILE
    try:
        return load_file(path)
    except FileNotFoundError:
        again = (
            "; its row is there already, so remove that folder before"
            if path.parent.is_dir()
            else ""
        )
        raise UsageError(
            f"init run:{parent} needs {path}, which is not there: train that run with "
            f"--keep-weights first{again}"
        ) from None
    except (SafetensorError, OSError) as e:
        why = " ".join(str(e).split())
        raise UsageError(
            f"init run:{parent} needs {path}, which cannot be read ({why}): remove its folder and "
            "train that run again"
        ) from None


def row_of(state: State, errors: Tensor | None, models: int, device: torch.device) -> Row:
    """A finished run as one flat row: what it was, what came out, and where it ran."""
    run = state.run
    finite = [x for x in state.curve if math.isfinite(x)]
    spread = (
        errors.std().item() / math.sqrt(len(errors))
        if errors is not None and len(errors) > 1
        else None
    )
    return {
        "id": run.id,
        "status": "done" if errors is not None else "diverged",
        **run.columns(),
        "flops": run.shape.flops(run.task.tokens, batch=run.recipe.batch, training=True),
        "held_out": errors.mean().item() if errors is not None else None,
        "held_out_se": spread,
        "train_best": min(finite) if finite else None,
        "train_last": state.curve[-1] if errors is not None else None,
        "zero_error": run.task.baselines()["zero"],
        "epochs_done": state.epoch,
        "curve": [x if math.isfinite(x) else None for x in state.curve],
        "held_out_curve": state.held_out_curve,
        "seconds": round(state.seconds, 3),
        "models": models,
        "memory_bytes": memory(device),
        "resumed": state.resumed,
        "skipped": state.skipped,
        **provenance(device),
    }


# ---- train


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
    """Train every run, stacked where their shapes agree; rows in the order of the runs.

    With `folder`, each run leaves a checkpoint in folder/<id> at the end of an epoch, at most every
    `checkpoint_every` seconds, and goes on from it. `done` gets each row as soon as it is there,
    `advance` the number of model-steps just made (`Free` ones take no time; a progress bar is shown
    when it is not given). What `probe` says of a trained run and its weights is added to its row.
    """
    where = pick_device(device)
    rows: dict[str, Row] = {}

    unique = {run.id: run for run in runs}

    def finish(row: Row) -> None:
        rows[row["id"]] = row
        if done is not None:
            done(row)
        if folder is not None:
            _checkpoint_path(folder, unique[row["id"]]).unlink(missing_ok=True)

    bar = (
        None
        if advance
        else Progress(sum(r.recipe.steps for r in unique.values()), f"{len(unique)} runs")
    )
    forward = advance or (bar.advance if bar else lambda n: None)
    waiting = stacks([_load(folder, run) for run in unique.values()], where)
    while waiting:
        stack, made, free = waiting.pop(0), [0], [0]

        def count(steps: int, made: list[int] = made, free: list[int] = free) -> None:
            (free if isinstance(steps, Free) else made)[0] += steps
            forward(steps)

        try:
            with numerics(stack[0].run.recipe.precision, where):
                _train_stack(
                    stack, where, folder, finish, count, checkpoint_every, keep_weights, probe
                )
        except torch.OutOfMemoryError:
            left = [state.run for state in stack if state.run.id not in rows]
            if len(stack) == 1:
                raise
        else:
            continue
        # outside the handler, whose traceback holds the stack's memory
        if where.type == "cuda":
            torch.cuda.empty_cache()
        forward(Free(-free[0]))
        forward(sum(state.run.recipe.steps for state in stack if state.run.id in rows) - made[0])
        again, half = [_load(folder, run) for run in left], len(left) // 2
        pieces = [piece for piece in (again[:half], again[half:]) if piece]
        parts = " and ".join(str(len(piece)) for piece in pieces)
        print(
            f"headwise: {len(left)} models at once do not fit the memory; going on with {parts}",
            file=sys.stderr,
        )
        waiting = [part for piece in pieces for part in stacks(piece, where)] + waiting
    if bar:
        bar.close()
    return [rows[run.id] for run in runs]


def most_models(run: Run, device: torch.device) -> int:
    """How many models of this kind are stacked at most.

    On a CPU as many as keep a step's activations near the cache, and one alone when its bits would
    depend on its place. On a GPU as many as fit 40 % of the free memory and 56 GiB: a model's step
    was never slower in a larger stack.
    """
    recipe, tokens = run.recipe, run.task.tokens
    step = run.shape.activation_bytes(tokens, batch=recipe.batch) + 20 * run.shape.params
    if device.type == "cpu":
        return max(1, min(64, (32 << 20) // step)) if _fills_lines(run) else 1
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(
        device
    )  # what an earlier stack left to us
    each = 4 * step
    for refuse, needs in (
        (trunk_refusal, fused_decoder.needs),
        (fused_refusal, fused_encoder.needs),
    ):
        if not refuse(run, device):
            each = needs(run.shape, tokens, recipe.batch, recipe.precision)
    data = (
        4 * block_steps(run.task, recipe) * recipe.batch * tokens * max(2, run.task.in_dim) * 4
    )  # drawn and in place
    return max(1, min(64, int(min(0.4 * free, 56 << 30)) // (each + data)))


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


def stacks(states: Sequence[State], device: torch.device) -> list[list[State]]:
    """States that can be trained together: equal keys, equal epochs, taken or refused by the same
    kernels, no more than fit."""
    groups: dict[Any, list[State]] = {}
    for state in states:
        refused = [bool(refuse(state.run, device)) for refuse in (fused_refusal, trunk_refusal)]
        groups.setdefault((ensemble_key(state.run), state.epoch, *refused), []).append(state)
    out = []
    for group in groups.values():
        group.sort(key=lambda state: state.run.shape.num_heads)  # equal shapes side by side
        most = most_models(group[0].run, device)
        parts = math.ceil(len(group) / most)
        size = math.ceil(len(group) / parts)
        out += [group[i : i + size] for i in range(0, len(group), size)]
    return out


def _train_stack(
    states: list[State],
    device: torch.device,
    folder: Path | None,
    finish: Callable[[Row], None],
    advance: Callable[[int], None],
    checkpoint_every: float,
    keep_weights: bool,
    probe: Probe | None,
) -> None:
    recipe, models = states[0].run.recipe, len(states)
    stack, saved, began = Stack(states, device), time.monotonic(), time.monotonic()
    blocks = recipe.epoch // stack.steps
    limit = DIVERGED * states[0].run.task.baselines()["zero"]
    eval_epochs = {round(recipe.epochs * (i + 1) / recipe.evals) for i in range(recipe.evals)} - {
        0,
        recipe.epochs,
    }
    advance(Free(states[0].epoch * recipe.epoch * models))
    for epoch in range(states[0].epoch, recipe.epochs):
        total = torch.zeros(len(states), dtype=torch.float64, device=device)
        for block in range(epoch * blocks, (epoch + 1) * blocks):
            total += (
                stack.run_block(block).double().sum(0)
            )  # stays on the device, so that the next block is queued meanwhile
        advance(recipe.epoch * len(states))
        now = time.monotonic()
        for state, loss in zip(states, (total / recipe.epoch).tolist(), strict=True):
            state.epoch, state.seconds = epoch + 1, state.seconds + (now - began) / len(states)
            state.curve.append(loss)
        stack.settle(states)
        began = now
        lost = [i for i, s in enumerate(states) if not s.curve[-1] <= limit or s.stuck]
        if lost:
            stack, states = _drop(stack, states, lost, models, device, finish)
            advance(Free(len(lost) * (recipe.epochs - epoch - 1) * recipe.epoch))
            if not states:
                return
        if epoch + 1 in eval_epochs:
            for state, error in zip(states, stack.held_out().mean(1).tolist(), strict=True):
                state.held_out_curve.append((epoch + 1, error if math.isfinite(error) else None))
        if folder is not None and now - saved >= checkpoint_every and epoch + 1 < recipe.epochs:
            _take(stack, states)
            for state in states:
                _save(folder, state)
            saved = time.monotonic()
    errors, measures = stack.judged()
    for m, state in enumerate(states):
        error = errors[m].mean().item()
        state.held_out_curve.append((recipe.epochs, error if math.isfinite(error) else None))
        weights = stack.named_weights(m)
        if folder is not None and keep_weights:
            _keep(folder, state, weights)
        row = row_of(state, errors[m] if error <= limit else None, models, device)
        if error <= limit:
            row |= score_geometry(state.run.shape, weights)
            row |= {f"held_out_{name}": values[m].tolist() for name, values in measures.items()}
            row |= {} if probe is None else probe(state.run, weights)
        finish(row)


def _take(stack: Stack, states: list[State]) -> None:
    for state, (weights, mean, square) in zip(states, stack.parts(), strict=True):
        state.weights, state.mean, state.square = weights, mean, square


def _drop(
    stack: Stack,
    states: list[State],
    lost: list[int],
    models: int,
    device: torch.device,
    finish: Callable[[Row], None],
) -> tuple[Stack, list[State]]:
    """Record the runs that diverged and go on without them; the others' numbers are copied as they
    are."""
    _take(stack, states)
    for i in lost:
        finish(row_of(states[i], None, models, device))
    rest = [s for i, s in enumerate(states) if i not in lost]
    return (Stack(rest, device) if rest else stack), rest


def _keep(folder: Path, state: State, weights: dict[str, Tensor]) -> None:
    from safetensors.torch import save

    write_whole(
        folder / state.run.id / WEIGHTS_FILE, save(weights, {"run": json.dumps(state.run.spec())})
    )
