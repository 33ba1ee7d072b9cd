"""The quick figure 1 grid on the CPU: ours against the stock way, same machine, same run.

    python -m benchmarks.quick_grid

Ours: the whole grid through `sweep` (worker start, data and held-out errors included), `--steps`
steps of each of its 48 models, by default all of them. Stock: one model after another, eager; each
of the 16 cells is timed over `--stock-steps` steps after warm-up, with one thread and with all
cores, three times each; the fastest counts and is multiplied up to the same number of models and
steps (data made the same way; nothing evaluated).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace

import torch

from benchmarks.stock import StockEncoder
from headwise.execute.sweep import cores, sweep
from headwise.experiments.rank_paper import fig1
from headwise.shape import Shape
from headwise.store import Store
from headwise.training.data import draw_block
from headwise.training.run import Run


def stock_seconds_per_step(run: Run, steps: int, warmup: int = 5) -> float:
    """Wall time of one training step of one model, stock modules."""
    model = StockEncoder(run.shape)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=run.recipe.lr, betas=(0.9, 0.95), weight_decay=0.0
    )
    began, block = 0.0, 0
    inputs, targets = draw_block(run, 0, torch.device("cpu"))
    for i in range(warmup + steps):
        if i == warmup:
            began = time.perf_counter()
        at = i % len(inputs)
        if i and at == 0:
            block += 1
            inputs, targets = draw_block(run, block, torch.device("cpu"))
        optimiser.zero_grad()
        run.task.loss(model(inputs[at]), targets[at]).backward()
        optimiser.step()
    return (time.perf_counter() - began) / steps


def best_stock(run: Run, steps: int) -> float:
    """The stock way at its best: fastest of three with one thread and of three with all cores."""
    times = []
    for threads in (1, cores()):
        torch.set_num_threads(threads)
        times += [stock_seconds_per_step(run, steps) for _ in range(3)]
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=fig1.PRESETS["quick"].steps)
    parser.add_argument("--stock-steps", type=int, default=40)
    args = parser.parse_args()
    settings = replace(fig1.PRESETS["quick"], steps=args.steps)
    runs = fig1.runs(settings)
    stock: dict[Shape, float] = {}
    for run in runs:
        if run.shape not in stock:
            stock[run.shape] = best_stock(run, args.stock_steps)
            s = run.shape
            print(
                f"stock: {s.depth} layers, {s.average} d^2, rank {s.head_dim:2d}: "
                f"{stock[s] * 1e3:7.2f} ms a step",
                flush=True,
            )
    theirs = sum(stock[run.shape] for run in runs) * args.steps
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        rows = sweep(runs, Store(folder), device="cpu", label="ours")
        ours = time.perf_counter() - began
    trained = sum(r["seconds"] for r in rows) / cores()
    print(
        f"{len(runs)} models, {args.steps} steps each, {cores()} cores, torch {torch.__version__}"
    )
    print(
        f"stock {theirs:.1f} s, ours {ours:.1f} s (training alone {trained:.1f} s): "
        f"{theirs / ours:.1f} times faster"
    )
    print(
        json.dumps(
            {
                "models": len(runs),
                "steps": args.steps,
                "stock_s": theirs,
                "ours_s": ours,
                "ratio": theirs / ours,
                "ratio_training": theirs / trained,
            }
        )
    )


if __name__ == "__main__":
    main()
