"""What the tests of training share: small runs, shapes of every kind, rows as bits."""

import json
from typing import Any

import torch

from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.model.transformer import build
from headwise.rows import MEASURED
from headwise.shape import Shape
from headwise.tasks import Farthest
from headwise.training.checkpoint import State, begin
from headwise.training.engine import train
from headwise.training.flat import Layout
from headwise.training.run import Recipe, Run

CPU = torch.device("cpu")


def quiet(_: int) -> None:
    """No progress bar."""


def make(
    seed: int = 0,
    *,
    dim: int = 12,
    rank: int = 12,
    width: int = 1,
    depth: int = 1,
    points: int = 5,
    **recipe: Any,
) -> Run:
    shape = paper_shape(dim=dim, depth=depth, rank=rank, width=width, ffn_dim=20, points=points)
    settings = {"steps": 18, "epoch": 3, "batch": 16, "held_out": 32, "evals": 3, **recipe}
    return Run(shape, Farthest(dim, points), Recipe(**settings), seed)


def bits(row: dict[str, Any]) -> str:
    """A row without what is measured; JSON writes floats so that equal text is equal bits."""
    return json.dumps({k: v for k, v in row.items() if k not in MEASURED}, allow_nan=False)


def together(runs: list[Run], **options: Any) -> list[dict[str, Any]]:
    return train(runs, device="cpu", advance=quiet, **options)


def alone(runs: list[Run]) -> list[dict[str, Any]]:
    return [together([run])[0] for run in runs]


SHAPES = {
    "pre-norm, gelu": Shape(
        dim=16, depth=2, num_heads=3, head_dim=5, v_head_dim=7, ffn_dim=13, activation="gelu"
    ),
    "grouped, rotary": Shape(
        dim=16,
        depth=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        qk_rope_head_dim=4,
        activation="swiglu",
    ),
    "layer norm, window": Shape(
        dim=16, depth=2, num_heads=1, norm="layer", qkv_bias=True, ffn_bias=True, windows=(2, 0)
    ),
    "query-key norm, sandwich": Shape(
        dim=16,
        depth=1,
        num_heads=2,
        head_dim=3,
        qk_norm="head",
        norm_at="sandwich",
        activation="relu2",
    ),
    "latent": Shape(
        dim=16, depth=1, num_heads=2, head_dim=5, v_head_dim=4, kv_lora_rank=8, qk_rope_head_dim=2
    ),
    "no feed-forward, positions": Shape(
        dim=16, depth=1, num_heads=1, ffn_dim=0, positions="additive", num_positions=7
    ),
    "parallel": Shape(dim=16, depth=2, num_heads=11, head_dim=2, norm_at="parallel", out_bias=True),
}
WILD = {
    "at once": make(4, lr=1e6, schedule="constant", steps=60),
    "in the middle": make(
        4, lr=1e6, schedule="published", steps=60
    ),  # its first epoch is at rate 0
    "by overflow": make(4, lr=3e38, schedule="constant", steps=60),
}


def after_overflows(run: Run) -> State:
    """A run's start with a loss scale below 1 in half precision, another for each shape, which must
    change nothing. AdamW alone would not see a wrong size; with moments
    that are there already it does."""
    state = begin(run)
    state.square.fill_(1e-3)
    if run.recipe.precision == "fp16":
        state.scale.loss_scale = 2.0 ** -(2 + run.shape.num_heads % 5)
    return state


def tiny_before_the_last_norm(run: Run) -> State:
    """A run whose tokens are tiny before the last norm: its gradient is 1e5 times what comes in,
    too much for half precision."""
    state, model = begin(run), build(run.shape, models=1)
    for name, (at, size) in Layout.of(model.named_parameters()).spans.items():
        if "norm1" in name or "feed.down" in name:
            state.weights[at : at + size] *= 1e-5
    return state
