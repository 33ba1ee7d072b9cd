"""Runs on disk: what an interrupted run resumes from, and the weights that are kept.

    <folder>/<run id>/checkpoint.safetensors    while the run is under way
    <folder>/<run id>/weights.safetensors       afterwards, with --keep-weights

A file is written beside its place and then renamed, so that there is the old one or the new one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import UsageError
from headwise.files import write_whole
from headwise.rows import CHECKPOINT_FILE, WEIGHTS_FILE
from headwise.training.loss_scale import LossScale
from headwise.training.run import Run
from headwise.training.state import State, begin

FORMAT = 1  # any other is not read
FIXED = "fixed."  # before the names of an own model's buffers


def path_of(folder: Path, run: Run) -> Path:
    return folder / run.id / CHECKPOINT_FILE


def save(folder: Path, state: State) -> None:
    """Write a run's checkpoint in the place of the one before."""
    from safetensors.torch import save as packed

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
    tensors = {"weights": state.weights, "mean": state.mean, "square": state.square}
    tensors |= {FIXED + name: t.contiguous() for name, t in state.buffers.items()}
    header = {"format": str(FORMAT), "run": state.run.id, "state": json.dumps(about)}
    write_whole(path_of(folder, state.run), packed(tensors, header))


def load(folder: Path | None, run: Run) -> State:
    """The run's state from its checkpoint, else from the start: the row is the same, so what cannot
    be read costs only time."""
    if folder is None or not path_of(folder, run).exists():
        return begin(run, parent_weights(folder, run))
    from safetensors import SafetensorError

    try:
        state = _read(path_of(folder, run), run)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        print(
            f"headwise: run {run.id} starts again, its checkpoint cannot be used ({why})",
            file=sys.stderr,
            flush=True,
        )
        return begin(run, parent_weights(folder, run))
    state.resumed += 1
    return state


def _read(path: Path, run: Run) -> State:
    """A checkpoint of this run, or an error that says why it is none."""
    from safetensors import safe_open

    like = begin(run)
    with safe_open(path, "pt") as f:
        header = f.metadata() or {}
        if (header["format"], header["run"]) != (str(FORMAT), run.id):
            raise ValueError(f"format {header['format']} of run {header['run']}")
        rows = [f.get_tensor(name) for name in ("weights", "mean", "square")]
        buffers = {name: f.get_tensor(FIXED + name) for name in like.buffers}
    if any(t.shape != like.weights.shape or t.dtype != torch.float32 for t in rows):
        raise ValueError("sizes of another model")
    if any(t.shape != like.buffers[name].shape for name, t in buffers.items()):
        raise ValueError("buffers of another model")
    about: dict[str, Any] = json.loads(header["state"])
    scale = LossScale(
        loss_scale=about.pop("shrink", 1.0),
        clean_epochs=about.pop("clean", 0),
        skipped=about.pop("skipped", 0),
    )
    state = State(run, *rows, **about, scale=scale, buffers=buffers)
    if not 0 < state.epoch < run.recipe.epochs or len(state.curve) != state.epoch:
        raise ValueError(f"epoch {state.epoch} of {run.recipe.epochs}")
    state.held_out_curve = [(epoch, error) for epoch, error in state.held_out_curve]
    return state


def remove(folder: Path, run: Run) -> None:
    path_of(folder, run).unlink(missing_ok=True)


def keep_weights(folder: Path, run: Run, weights: dict[str, Tensor]) -> None:
    """Write a trained model's parameters by name."""
    from safetensors.torch import save as packed

    header = {"run": json.dumps(run.spec())}
    write_whole(folder / run.id / WEIGHTS_FILE, packed(weights, header))


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
    except (SafetensorError, OSError) as error:
        why = " ".join(str(error).split())
        raise UsageError(
            f"init run:{parent} needs {path}, which cannot be read ({why}): remove its folder and "
            "train that run again"
        ) from None
