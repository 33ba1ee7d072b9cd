"""One run between two epochs: everything that is needed to resume it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import UsageError
from headwise.model.init import fresh
from headwise.seeds import derive, generator_of
from headwise.training import own
from headwise.training.flat import Layout
from headwise.training.loss_scale import LossScale
from headwise.training.run import Run


@dataclass
class State:
    """A run, its weights and AdamW's moments in flat rows (flat.py), and what came out so far."""

    run: Run
    weights: Tensor  # (numbers of a row,)
    mean: Tensor
    square: Tensor
    epoch: int = 0
    curve: list[float] = dataclasses.field(default_factory=list)  # mean training loss per epoch
    held_out_curve: list[tuple[int, float | None]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    resumed: int = 0
    scale: LossScale = dataclasses.field(default_factory=LossScale)
    # of a model of a user's own: its buffers, and parameters that are not trained
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict)


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
        [run.seed],
        lambda seed: generator_of(torch.device("cpu"), derive(seed, "init")),
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
