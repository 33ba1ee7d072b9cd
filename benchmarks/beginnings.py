"""How runs of figure 1 begin: the training losses of the first epochs, by rank, seed and precision, without finishing any.

    python -m benchmarks.beginnings --layers 3 --width 64 --ranks 32,8 --seeds 8 --epochs 63 --out beginnings.json

Where runs part ways early (three layers at d^3) it says at a sixteenth of the cost how many go which way, and whether the precision of
products has a say in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch

from headwise.engine import pick_device, provenance
from headwise.experiments.fig1 import PRESETS, runs
from headwise.files import write_whole
from headwise.progress import Progress
from headwise.runs import PRECISIONS, PROTOCOLS, Run
from headwise.stack import Stack, begin, numerics


def beginnings(chosen: list[Run], epochs: int, device: str = "auto") -> list[list[float]]:
    """Losses before each update, averaged over an epoch: one list a run."""
    where, recipe = pick_device(device), chosen[0].recipe
    with numerics(recipe.precision, where):
        stack, means = Stack([begin(run) for run in chosen], where), []
        blocks, bar = recipe.epoch // stack.steps, Progress(epochs * recipe.epoch * len(chosen), f"{len(chosen)} runs")
        for epoch in range(epochs):
            losses = [stack.run_block(block).double().sum(0) for block in range(epoch * blocks, (epoch + 1) * blocks)]
            means.append((torch.stack(losses).sum(0) / recipe.epoch).tolist())
            bar.advance(recipe.epoch * len(chosen))
        bar.close()
    return [list(curve) for curve in zip(*means, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=64, help="1, 8 or 64 for the budgets d^2, d^2.5, d^3; default 64")
    parser.add_argument("--ranks", default="64,32,8,1")
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0 on; default 5")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="replay")
    parser.add_argument("--init", choices=("published", "original", "library"), default="published", help="default published")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp16")
    parser.add_argument("--epochs", type=int, default=63, help="of 100 steps, out of 1,000; default 63")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True, help="JSON file, added to what is there")
    args = parser.parse_args()
    settings = dataclasses.replace(
        PRESETS["paper"], depths=(args.layers,), widths=(args.width,), ranks=tuple(map(int, args.ranks.split(","))), seeds=args.seeds,
        protocols=(args.protocol,), precision=args.precision, init=args.init,
    )  # fmt: skip
    chosen = sorted(runs(settings), key=lambda run: -run.shape.head_dim)  # models of one rank lie together in a stack
    made = provenance(pick_device(args.device))
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    for run, curve in zip(chosen, beginnings(chosen, args.epochs, args.device), strict=True):
        print(f"rank {run.shape.head_dim}, seed {run.seed}: {curve[-1]:.4f} after {args.epochs} epochs")
        row = {"layers": args.layers, "width": args.width, "rank": run.shape.head_dim, "seed": run.seed, "protocol": args.protocol}
        rows.append(row | {"init": args.init, "precision": args.precision, "losses": [round(v, 5) for v in curve]} | made)
    write_whole(args.out, "[" + ",\n".join(map(json.dumps, rows)) + "]\n")


if __name__ == "__main__":
    main()
