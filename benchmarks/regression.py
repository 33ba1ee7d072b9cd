"""Linear regression in context on one GPU: what a training step of the rank paper's decoders costs,
one by one and as an ensemble.

    python -m benchmarks.regression --out regression.json

Width 48, 12 layers, 82 tokens, batch 64, heads 1, 2, 4, 8 and 16, in one run on one card:

stock     transformers' GPT-2, as the published code has it: eager float32, one model, torch's Adam
triton    `headwise run regression --preset paper` with the blocks in Triton kernels
headwise  the same as it is: on an H100 or H200 three kernels a block in CUDA C++

Microseconds per step and model; ours for an ensemble of three seeds of each and for one seed. What
is in the file already is not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import unittest.mock
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.figure1 import GPU, Results, events, repeats_of
from headwise.device import commit, numerics
from headwise.experiments.points import plural
from headwise.experiments.rank_paper.regression import PRESETS, runs
from headwise.kernels import nvrtc
from headwise.tasks import Regression
from headwise.training.checkpoint import begin
from headwise.training.ensemble import Ensemble
from headwise.training.fused_decoder import FusedDecoder

PAPER = PRESETS["paper"]
HEADS = (1, 2, 4, 8, 16)
SEEDS = (3, 1)


class Stock(nn.Module):
    """Vectors read in, GPT-2's blocks, one number read out."""

    def __init__(self, heads: int, task: Regression) -> None:
        from transformers import GPT2Config, GPT2Model

        super().__init__()
        sizes: dict[str, Any] = {
            "n_positions": task.tokens,
            "n_embd": 48,
            "n_layer": 12,
            "n_head": heads,
            "vocab_size": 1,
        }
        sizes |= {"bos_token_id": 0, "eos_token_id": 0}
        self.blocks = GPT2Model(
            GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
        )
        self.read_in, self.read_out = nn.Linear(task.dim, 48), nn.Linear(48, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read_out(self.blocks(inputs_embeds=self.read_in(x)).last_hidden_state)


def kernels_of(ensemble: Ensemble) -> str:
    """Who makes its gradients; of a fused decoder who makes its blocks."""
    kernels = ensemble.kernels
    return type(kernels.blocks if isinstance(kernels, FusedDecoder) else kernels).__name__


def time_stock(heads: int) -> float:
    task, generator = Regression(PAPER.dim, PAPER.points), torch.Generator(GPU).manual_seed(0)
    model = Stock(heads, task).to(GPU)
    optimizer = torch.optim.Adam(model.parameters(), lr=PAPER.lr)

    def step() -> None:
        x, target = task.sample(generator, PAPER.batch)
        optimizer.zero_grad()
        task.loss(model(x), target).backward()
        optimizer.step()

    step()
    return 1e3 * events(step, repeats_of(step))


def time_ours(way: str, seeds: int) -> dict[str, Any]:
    """Whole blocks of steps with their data."""
    refused = (
        unittest.mock.patch.object(nvrtc, "missing", return_value="not now")
        if way == "triton"
        else contextlib.nullcontext()
    )
    chosen = runs(dataclasses.replace(PAPER, seeds=seeds))
    with numerics(PAPER.precision, GPU), refused:
        ensemble, blocks = Ensemble([begin(run) for run in chosen], GPU), iter(range(1000))
        ensemble.run_block(next(blocks))
        torch.cuda.synchronize()
        us = (
            1e3
            * events(lambda: ensemble.run_block(next(blocks)), 3)
            / (ensemble.steps * len(chosen))
        )
    return {"us": us, "models": len(chosen), "kernels": kernels_of(ensemble)}


def table(values: dict[str, Any]) -> list[str]:
    """The measurements as lines of Markdown."""
    stock = [values[f"stock {heads}"] for heads in HEADS if f"stock {heads}" in values]
    lines = [f"{values['device']}, torch {values['torch']}, commit {values['commit']}", ""]
    lines += ["| way | models | µs a step and model | stock / ours |", "|---|---|---|---|"]
    for heads in HEADS:
        if f"stock {heads}" in values:
            lines.append(
                f"| stock, {plural(heads, 'head')} | 1 | {values[f'stock {heads}']:,.0f} | |"
            )
    for way in ("triton", "headwise"):
        for seeds in SEEDS:
            if found := values.get(f"{way} {seeds}"):
                ratio = f"{sum(stock) / len(stock) / found['us']:.0f}" if stock else ""
                lines.append(
                    f"| {way} ({found['kernels']}) | {found['models']} | {found['us']:.0f} | "
                    f"{ratio} |"
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a file of measurements; what is there is kept")
    parser.add_argument("--ways", default="stock,triton,headwise", help="which to time")
    args = parser.parse_args()
    results, ways = Results(args.out), args.ways.split(",")
    results.values |= {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    for seeds in SEEDS:
        for way in ("headwise", "triton"):
            if way in ways:
                results.add(f"{way} {seeds}", time_ours, way, seeds)
    for heads in HEADS if "stock" in ways else ():
        results.add(f"stock {heads}", time_stock, heads)
    print("\n".join(table(results.values)))


if __name__ == "__main__":
    main()
