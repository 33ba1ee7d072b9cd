"""nanochat's checkpoints, read without nanochat."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.errors import UsageError, one_line
from headwise.files import read_file, read_json
from headwise.integrations.nanochat.configs import shape_of, without_stock_sizes
from headwise.shape import Shape

# what the names of weights begin with, and what the shape calls them
_EXTRAS = {
    "value_embeds.": "value embeddings",
    "resid_lambdas": "residual scalars",
    "x0_lambdas": "residual scalars",
    "smear_": "smear",
    "backout_lambda": "backout",
}


class Checkpoint(NamedTuple):
    """A checkpoint of nanochat's: what the model is, its weights by nanochat's names, and what was
    written beside them."""

    shape: Shape
    state: dict[str, Tensor]
    config: dict[str, Any]
    step: int
    meta: dict[str, Any]


def read(folder: str | Path, step: int | None = None) -> Checkpoint:
    """The checkpoint of a folder with model_*.pt and meta_*.json, the last one unless a step is
    given; nanochat is not needed.

    Heads that the config leaves out are read off the weights. The shape counts every parameter that
    is there.
    """
    folder = Path(folder)
    step = _find_step(folder, step)
    model, notes = folder / f"model_{step:06d}.pt", folder / f"meta_{step:06d}.json"
    try:
        meta = read_json(read_file(notes, links=True))
        config = {"window_pattern": "L", **meta["model_config"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{str(notes)!r} must be JSON with a model_config, got {type(error).__name__}: {error}"
        ) from None
    if not model.is_file():  # the opening of a named pipe would wait for a writer
        raise UsageError(f"{str(model)!r} must be a file as torch.save writes it")
    try:
        # Tensors and plain values alone: a checkpoint is a pickle, and a pickle may run any code.
        loaded = torch.load(model, map_location="cpu", weights_only=True)
        state = {name.removeprefix("_orig_mod."): tensor for name, tensor in loaded.items()}
    except Exception as error:  # damaged pickles raise nearly anything
        raise UsageError(
            f"{str(model)!r} must be tensors by name as torch.save writes them, got "
            f"{one_line(error)}"
        ) from None
    _check_names(config, state)
    config = {**config, **_widths(config, state)}
    return Checkpoint(
        _with_extras(shape_of(config), state), state, without_stock_sizes(config), step, meta
    )


def _find_step(folder: Path, step: int | None) -> int:
    """The step asked for, or the last one."""
    names = (re.fullmatch(r"model_(\d+)\.pt", path.name) for path in folder.glob("model_*.pt"))
    steps = sorted(int(name[1]) for name in names if name)
    if step is None and steps:
        return steps[-1]
    if step is not None and step in steps:
        return step
    there = f"steps {', '.join(map(str, steps))}" if steps else "none"
    wanted = "" if step is None else f" of step {step}"
    raise UsageError(f"no checkpoint{wanted} in {str(folder)!r}; there: {there}")


def _check_names(config: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Refuse weights that are no tensors, and those whose heads cannot be read off."""
    other = next((name for name, value in state.items() if not isinstance(value, Tensor)), None)
    if other is not None:
        raise UsageError(
            f"a checkpoint must hold tensors by name, got {type(state[other]).__name__} as "
            f"{other[:80]!r}"
        )
    for part in ("c_k", "c_v"):
        name = f"transformer.h.0.attn.{part}.weight"
        if name not in state or state[name].ndim != 2:
            raise UsageError(f"a checkpoint of nanochat's must hold a matrix {name}")
    heads = config.get("n_kv_head")
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
        raise UsageError(f"n_kv_head must be a whole number of at least 1, got {heads!r:.80}")


def _widths(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, int]:
    """head_dim and v_head_dim as the weights have them."""
    found = {}
    for name, part in (("head_dim", "c_k"), ("v_head_dim", "c_v")):
        rows, heads = state[f"transformer.h.0.attn.{part}.weight"].shape[0], config["n_kv_head"]
        if rows % heads or config.get(name) not in (None, rows // heads):
            said = f"n_kv_head {heads}" + (f", {name} {config[name]}" if config.get(name) else "")
            raise UsageError(f"{part} must have n_kv_head x {name} rows, got {rows} rows, {said}")
        found[name] = rows // heads
    return found


def _with_extras(shape: Shape, state: Mapping[str, Tensor]) -> Shape:
    """The shape with the extras that the weights have, whatever version of nanochat made them."""
    extras: dict[str, int] = {}
    for name, tensor in state.items():
        known = [label for prefix, label in _EXTRAS.items() if name.startswith(prefix)]
        known += ["value gates"] if name.endswith(".attn.ve_gate.weight") else []
        if known:
            extras[known[0]] = extras.get(known[0], 0) + tensor.numel()
    order = [name for name, _ in shape.extras if name in extras]
    shape = shape.replace(extras=tuple((name, extras[name]) for name in order))
    total = sum(tensor.numel() for tensor in state.values())
    if shape.params != total:
        raise UsageError(
            f"a nanochat model of this config has {shape.params} parameters, the checkpoint has "
            f"{total}"
        )
    return shape
