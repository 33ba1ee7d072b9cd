"""A run between two blocks of steps: how it begins, what an interrupted one resumes from, and the
weights that are kept.

    <folder>/<run id>/checkpoint.safetensors    while the run is under way
    <folder>/<run id>/weights.safetensors       afterwards, with --keep-weights

A file is written beside its place and then renamed, so that there is the old one or the new one. It
has a digest (tensor_files.py): a damaged checkpoint costs time and never a number.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import UsageError
from headwise.model.init import fresh
from headwise.rows import CHECKPOINT_FILE, WEIGHTS_FILE
from headwise.seeds import derive, generator_of
from headwise.tensor_files import (
    DamagedError,
    read_tensors,
    remove_checkpoint,
    set_aside,
    write_tensors,
)
from headwise.training import own
from headwise.training.data import block_steps
from headwise.training.flat import Layout
from headwise.training.loss_scale import LossScale
from headwise.training.run import Run

FORMAT = 1  # any other is not read
MOST_STATE = 64 << 20  # bytes of a checkpoint besides its tensors: the curves
FIXED = "fixed."  # before the names of an own model's buffers


@dataclass
class State:
    """A run, its weights and AdamW's moments in flat rows (flat.py), and what came out so far."""

    run: Run
    weights: Tensor  # (numbers of a row,)
    mean: Tensor
    square: Tensor
    epoch: int = 0
    block: int = 0  # of the epoch
    epoch_loss: float = 0.0  # the sum over that epoch's steps so far
    curve: list[float] = dataclasses.field(default_factory=list)  # mean training loss per epoch
    held_out_curve: list[tuple[int, float | None]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    resumed: int = 0
    scale: LossScale = dataclasses.field(default_factory=LossScale)
    # of a model of a user's own: its buffers, and parameters that are not trained
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    @property
    def step(self) -> int:
        """Steps made."""
        recipe = self.run.recipe
        return self.epoch * recipe.epoch + self.block * block_steps(self.run.task, recipe)


def begin(run: Run, parent: Mapping[str, Tensor] | None = None) -> State:
    """A run before its first step. Of a parent's weights it takes those of its own parameters'
    names and sizes, and draws the rest."""
    if run.model is not None:
        module = own.build(run)
        weights = own.flat_weights(module)
        zeros = torch.zeros_like(weights)
        return State(run, weights, zeros, zeros.clone(), buffers=own.fixed(module))
    scheme = "normal" if run.recipe.parent else run.recipe.init
    model = fresh(
        run.shape,
        scheme,
        [generator_of(torch.device("cpu"), derive(run.seed, "init"))],
    )
    if parent is not None:
        _take(model, parent, run)
    layout = Layout.of(model.named_parameters())
    weights = torch.zeros(layout.length)
    for p, (start, size) in zip(model.parameters(), layout.spans.values(), strict=True):
        weights[start : start + size] = p.detach().flatten()
    return State(run, weights, torch.zeros(layout.length), torch.zeros(layout.length))


def _take(model: torch.nn.Module, parent: Mapping[str, Tensor], run: Run) -> None:
    """Copy a parent's weights where names and sizes agree."""
    fitting = {
        name: p
        for name, p in model.named_parameters()
        if name in parent and parent[name].shape == p.shape[1:]
    }
    if not any(name.startswith("blocks.") for name in fitting):
        shape = run.shape
        raise UsageError(
            f"none of the blocks of run {run.recipe.parent} fits a model of width {shape.dim}, "
            f"{shape.num_heads} heads of rank "
            f"{shape.head_dim}, feed-forward {shape.ffn_dim}; init {run.recipe.init} needs a run "
            "of the same sizes"
        )
    with torch.no_grad():
        for name, p in fitting.items():
            p[0].copy_(parent[name])


# ---- files


def path_of(folder: Path, run: Run) -> Path:
    return folder / run.id / CHECKPOINT_FILE


def save(folder: Path, state: State) -> None:
    """Write a run's checkpoint in the place of the one before."""
    about = {
        "epoch": state.epoch,
        "curve": state.curve,
        "held_out_curve": state.held_out_curve,
        "seconds": state.seconds,
        "resumed": state.resumed,
        "skipped": state.scale.skipped,
        "shrink": state.scale.loss_scale,  # names on disk are those of format 1
        "clean": state.scale.clean_epochs,
    }
    if state.block:  # within an epoch; others are as they always were
        about |= {
            "block": state.block,
            "epoch_loss": state.epoch_loss,
            "overflows": state.scale.overflows,
        }
    tensors = {"weights": state.weights, "mean": state.mean, "square": state.square}
    tensors |= {FIXED + name: t.contiguous() for name, t in state.buffers.items()}
    header = {"format": str(FORMAT), "run": state.run.id, "state": json.dumps(about)}
    write_tensors(path_of(folder, state.run), tensors, header)


def remove(folder: Path, run: Run) -> None:
    """Remove what only an unfinished run needs."""
    remove_checkpoint(path_of(folder, run))


def load(folder: Path | None, run: Run) -> State:
    """The run's state from its checkpoint, else from the start: the row is the same, so what cannot
    be read costs only time."""
    if folder is None or not os.path.lexists(path_of(folder, run)):
        return begin(run, parent_weights(folder, run))
    path = path_of(folder, run)
    try:
        state = _read(path, run)
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        set_aside(path, run.id, error)
        return begin(run, parent_weights(folder, run))
    state.resumed += 1
    return state


def _read(path: Path, run: Run) -> State:
    """A checkpoint of this run, or an error that says why it is none."""
    like = begin(run)
    sizes = [like.weights.nbytes] * 3 + [t.nbytes for t in like.buffers.values()]
    header, tensors = read_tensors(path, most=2 * sum(sizes) + MOST_STATE)
    if (header["format"], header["run"]) != (str(FORMAT), run.id):
        raise ValueError(f"format {header['format']} of run {header['run']}")
    rows = {name: tensors[name] for name in ("weights", "mean", "square")}
    buffers = {name: tensors[FIXED + name] for name in like.buffers}
    if any(t.shape != like.weights.shape or t.dtype != torch.float32 for t in rows.values()):
        raise ValueError("sizes of another model")
    if any(t.shape != like.buffers[name].shape for name, t in buffers.items()):
        raise ValueError("buffers of another model")
    about: dict[str, Any] = json.loads(header["state"]) | rows
    scale = LossScale(
        loss_scale=about.pop("shrink", 1.0),
        clean_epochs=about.pop("clean", 0),
        skipped=about.pop("skipped", 0),
        overflows=about.pop("overflows", 0),
    )
    state = State(run, **about, scale=scale, buffers=buffers)
    numbers = (
        *(state.epoch, state.block, state.epoch_loss, state.resumed, state.seconds),
        *(*state.curve, *vars(scale).values()),
    )
    if not all(isinstance(number, int | float) for number in numbers):
        raise ValueError("state of another kind")
    if not 0 <= state.epoch < run.recipe.epochs or len(state.curve) != state.epoch:
        raise ValueError(f"epoch {state.epoch} of {run.recipe.epochs}")
    blocks = run.recipe.epoch // block_steps(run.task, run.recipe)
    if not 0 <= state.block < blocks or not state.step:
        raise ValueError(f"block {state.block} of {blocks} in epoch {state.epoch}")
    state.held_out_curve = [(epoch, error) for epoch, error in state.held_out_curve]
    return state


def keep_weights(folder: Path, run: Run, weights: dict[str, Tensor]) -> None:
    """Write a trained model's parameters by name."""
    write_tensors(folder / run.id / WEIGHTS_FILE, weights, {"run": json.dumps(run.spec())})


def parent_weights(folder: Path | None, run: Run) -> dict[str, Tensor] | None:
    """The weights that a run starts from, where its init names another run."""
    parent = run.recipe.parent
    if not parent:
        return None
    if folder is None:
        raise UsageError(
            f"init run:{parent} takes that run's weights from a store, so it needs one; got no "
            "folder"
        )
    path = folder / parent / WEIGHTS_FILE
    try:
        return read_tensors(path)[1]
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
    except (DamagedError, OSError) as error:
        why = " ".join(str(error).split())
        raise UsageError(
            f"init run:{parent} needs {path}, which cannot be read ({why}): remove its folder and "
            "train that run again"
        ) from None
