"""Checkpoints of one decoder's training, and the weights that a finished run leaves.

A checkpoint is one safetensors file. It holds complete tensors however many processes wrote it:

    weights.<parameter>   the parameters
    mean.<parameter>      their first moments
    square.<parameter>    their second moments; Muon has none
    losses                of every step, float64

with the run's specification and the rest of its state in the metadata, and a digest of it all
(tensor_files.py). The main process reads and writes; the others send and receive their shards.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import UsageError
from headwise.lm.distributed import (
    broadcast,
    broadcast_result,
    full_tensor,
    local_shard,
    shard_of,
)
from headwise.lm.launch import World
from headwise.lm.optim import Optimiser
from headwise.lm.spec import Pretraining
from headwise.model.transformer import Decoder
from headwise.rows import PATHS, WEIGHTS_FILE
from headwise.shape import Shape
from headwise.tensor_files import read_tensors, remove_checkpoint, set_aside, write_tensors

FORMAT = 1
MOST_STATE = 64 << 20  # bytes of a checkpoint besides its tensors and losses


@dataclass
class TrainingState:
    """What a training is besides its tensors."""

    losses: list[float] = field(default_factory=list)  # of every step whose loss was read
    evaluations: list[tuple[int, float | None]] = field(default_factory=list)  # (step, bits/byte)
    seconds: float = 0.0
    timed_steps: int = 0  # steps in `seconds`: all but the first after each start
    resumed: int = 0


# ---- checkpoints


def save(
    path: Path, run: Pretraining, optimiser: Optimiser, state: TrainingState, world: World
) -> None:
    """Write a checkpoint; every process calls this."""
    # Gathering the shards takes every process; writing takes the main one.
    tensors = _complete(_local_tensors(optimiser, moments=True), world)
    if not world.is_main:
        return
    tensors["losses"] = torch.tensor(state.losses, dtype=torch.float64)
    about = {
        "judged": state.evaluations,
        "seconds": state.seconds,
        "timed": state.timed_steps,
        "resumed": state.resumed,
    }
    metadata = {
        "format": str(FORMAT),
        "run": json.dumps(run.spec()),
        "state": json.dumps(about),
    }
    write_tensors(path, tensors, metadata)


def remove(path: Path) -> None:
    """Remove what only an unfinished run needs."""
    remove_checkpoint(path)


def resume(
    path: Path, run: Pretraining, optimiser: Optimiser, world: World
) -> TrainingState | None:
    """Put a checkpoint's tensors into parameters and moments, and return the rest of its state;
    None where there is no checkpoint that can be used. Every process calls this."""
    # Where each tensor of the file goes in this process.
    places = _local_tensors(optimiser, moments=True)
    tensors: dict[str, Tensor] = {}  # in the main process

    def read() -> TrainingState | None:
        if not os.path.lexists(path):
            return None
        sizes = {name: like.shape for name, (_, like) in places.items()}
        try:
            found, state = _read(path, run, sizes)
        except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            set_aside(path, run.id, error)
            return None
        tensors.update(found)
        return state

    # The main process reads and checks, the others hear what came out.
    state = broadcast_result(world, read)
    if state is None:
        return None
    # One full tensor is on its way at a time; each process keeps its rows of it.
    with torch.no_grad():
        for name, (shard, like) in places.items():
            full = broadcast(world, tensors.pop(name, None), like)
            shard.copy_(shard_of(full, like))
    optimiser.set_steps(len(state.losses))
    state.resumed += 1
    return state


def _local_tensors(optimiser: Optimiser, moments: bool) -> dict[str, tuple[Tensor, nn.Parameter]]:
    """By name: the rows of each parameter and moment that lie in this process, and the parameter
    that is cut as they are."""
    tensors = {
        f"weights.{name}": (local_shard(p.detach()), p) for name, p in optimiser.named.items()
    }
    if moments:
        for name, moment in optimiser.moments.items():
            tensors[name] = (moment, optimiser.owner(name))
    return tensors


def _complete(tensors: dict[str, tuple[Tensor, nn.Parameter]], world: World) -> dict[str, Tensor]:
    """The complete tensors on the CPU, in the main process; every process takes part."""
    complete = {}
    for name, (shard, like) in tensors.items():
        full = full_tensor(shard, like)
        if world.is_main:
            complete[name] = full.cpu().contiguous()
    return complete


def _read(
    path: Path, run: Pretraining, sizes: dict[str, torch.Size]
) -> tuple[dict[str, Tensor], TrainingState]:
    """The tensors and the state of a run's checkpoint, or an error that says why it is none."""
    bytes_of_tensors = 4 * sum(size.numel() for size in sizes.values())
    metadata, found = read_tensors(path, most=2 * bytes_of_tensors + 16 * run.steps + MOST_STATE)
    if metadata["format"] != str(FORMAT):
        raise ValueError(f"format {metadata['format']}, this headwise reads {FORMAT}")
    # The run is compared before its tensors, so that another run's checkpoint is refused by what
    # differs and not by a size.
    _check_same_run(json.loads(metadata["run"]), run)
    tensors = {name: found[name] for name in sizes}
    for name, size in sizes.items():
        if tensors[name].shape != size:
            raise ValueError(f"{name} is {tuple(tensors[name].shape)}, not {tuple(size)}")
    about = json.loads(metadata["state"])
    evaluations = [(step, bits) for step, bits in about["judged"]]
    seconds, timed, resumed = (float(about["seconds"]), int(about["timed"]), int(about["resumed"]))
    losses = found["losses"].tolist()
    return tensors, TrainingState(losses, evaluations, seconds, timed, resumed)


def _check_same_run(saved: dict[str, Any], run: Pretraining) -> None:
    """Refuse the checkpoint of another run, with what differs."""
    # Through JSON, as the saved one went: tuples have become lists.
    spec = json.loads(json.dumps(run.spec()))
    ours = {**spec["shape"], **spec}
    theirs = {**saved["shape"], **saved}
    names = [name for name in ours if name not in ("shape", *PATHS)]
    differing = [name for name in names if ours[name] != theirs.get(name)]
    if differing:
        what = ", ".join(f"{name} {theirs.get(name)} for {ours[name]}" for name in differing[:4])
        raise ValueError(f"it is of another run: {what}")


# ---- weights of a finished run


def save_weights(path: Path, run: Pretraining, optimiser: Optimiser, world: World) -> None:
    """Write the weights, by the names of the model's parameters; every process calls this."""
    tensors = {
        name.removeprefix("weights."): tensor
        for name, tensor in _complete(_local_tensors(optimiser, moments=False), world).items()
    }
    if world.is_main:
        write_tensors(path, tensors, {"run": json.dumps(run.spec())})


def load_decoder(folder: str | Path) -> Decoder:
    """The decoder that a finished run left in its folder (`runs/<id>` of a store), ready to
    generate."""
    return read_decoder(folder)[0]


def read_decoder(folder: str | Path) -> tuple[Decoder, dict[str, Any]]:
    """The same, with the specification of its run."""
    path = Path(folder) / WEIGHTS_FILE
    try:
        about, tensors = read_tensors(path)
        spec = json.loads(about["run"])
        model = Decoder(Shape.of(spec["shape"]))
        model.load_state_dict(tensors)
    except (OSError, KeyError, TypeError, ValueError, RuntimeError) as e:
        reason = " ".join(str(e).split())[:300]
        raise UsageError(f"{folder} holds no weights of a finished run ({reason})") from None
    return model.eval(), spec
