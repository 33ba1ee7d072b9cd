"""How runs of figure 1 begin: the training losses of the first epochs, by rank, seed and precision,
without finishing any.

    python -m benchmarks.beginnings --layers 3 --width 64 --ranks 32,8 --seeds 8 --epochs 63 --out
    beginnings.json

Where runs part ways early (three layers at d^3) it says at a sixteenth of the cost how many go
which way, and whether the precision of products has a say in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch

from headwise.device import numerics, pick_device, provenance
from headwise.experiments.rank_paper.fig1 import PRESETS, runs
from headwise.files import write_whole
from headwise.progress import Progress
from headwise.training.checkpoint import begin
from headwise.training.ensemble import Ensemble
from headwise.training.flat import HeadGroup
from headwise.training.run import PRECISIONS, PROTOCOLS, Run


def beginnings(
    chosen: list[Run], epochs: int, device: str = "auto"
) -> tuple[list[list[float]], Ensemble]:
    """Losses before each update, averaged over an epoch: one list a run; and the ensemble after
    them."""
    where, recipe = pick_device(device), chosen[0].recipe
    with numerics(recipe.precision, where):
        states, means = [begin(run) for run in chosen], []
        ensemble = Ensemble(states, where)
        blocks = recipe.epoch // ensemble.steps
        bar = Progress(epochs * recipe.epoch * len(chosen), f"{len(chosen)} runs")
        for epoch in range(epochs):
            losses = [
                ensemble.run_block(block).double().sum(0)
                for block in range(epoch * blocks, (epoch + 1) * blocks)
            ]
            means.append((torch.stack(losses).sum(0) / recipe.epoch).tolist())
            ensemble.scales.end_epoch([state.scale for state in states], recipe)
            bar.advance(recipe.epoch * len(chosen))
        bar.close()
    return [list(curve) for curve in zip(*means, strict=True)], ensemble


def differences(trained: Ensemble, block: int) -> list[dict[str, float]]:
    """How far a step's gradient at each precision is from that in float32, relatively, at the same
    weights: the largest over the layers' attention projections, one dictionary a run."""
    grads, names = {}, dict[str, tuple[int, int]]()
    for precision in PRECISIONS:
        runs = [
            dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, precision=precision))
            for run in trained.runs
        ]
        with numerics(precision, trained.device):
            ensemble = Ensemble(
                [
                    dataclasses.replace(begin(run), weights=w)
                    for run, w in zip(runs, trained.moved.weights.cpu(), strict=True)
                ],
                trained.device,
            )
            ensemble._draw(block)
            found = torch.empty_like(ensemble.moved.weights)

            def work(group: HeadGroup, to: torch.Tensor = found, of: Ensemble = ensemble) -> None:
                to[group.models] = of._gradient(0, group)

            ensemble.kernels.each_group(work)
            grads[precision] = found.double()
        spans = ensemble.rows.layout.spans
        names = {n: s for n, s in spans.items() if "attention" in n and n.endswith(".weight")}
    exact = grads.pop("fp32")

    def far(got: torch.Tensor, wanted: torch.Tensor) -> float:
        return max(
            float((got - wanted)[at : at + n].norm() / wanted[at : at + n].norm())
            for at, n in names.values()
        )

    return [
        {precision: far(g[m], exact[m]) for precision, g in grads.items()}
        for m in range(len(trained.runs))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument(
        "--width",
        type=int,
        default=64,
        help="1, 8 or 64 for the budgets d^2, d^2.5, d^3; default 64",
    )
    parser.add_argument("--ranks", default="64,32,8,1")
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0 on; default 5")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="replay")
    parser.add_argument(
        "--init",
        choices=("published", "original", "library"),
        default="published",
        help="default published",
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="fp16")
    parser.add_argument(
        "--epochs", type=int, default=63, help="of 100 steps, out of 1,000; default 63"
    )
    parser.add_argument(
        "--gradients",
        action="store_true",
        help="then compare a step's gradients at every precision with float32's",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True, help="JSON file, added to what is there")
    args = parser.parse_args()
    settings = dataclasses.replace(
        PRESETS["paper"],
        depths=(args.layers,),
        widths=(args.width,),
        ranks=tuple(map(int, args.ranks.split(","))),
        seeds=args.seeds,
        protocols=(args.protocol,),
        precision=args.precision,
        init=args.init,
    )
    chosen = sorted(
        runs(settings), key=lambda run: -run.shape.head_dim
    )  # models of one rank lie together in an ensemble
    made = provenance(pick_device(args.device))
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    curves, ensemble = beginnings(chosen, args.epochs, args.device)
    off = (
        differences(ensemble, args.epochs * (chosen[0].recipe.epoch // ensemble.steps))
        if args.gradients
        else [{}] * len(chosen)
    )
    for run, curve, gradients in zip(chosen, curves, off, strict=True):
        offsets = "".join(
            f", gradients in {name} off by {value:.4f}" for name, value in gradients.items()
        )
        print(
            f"rank {run.shape.head_dim}, seed {run.seed}: {curve[-1]:.4f} after {args.epochs} "
            f"epochs{offsets}"
        )
        row = {
            "layers": args.layers,
            "width": args.width,
            "rank": run.shape.head_dim,
            "seed": run.seed,
            "protocol": args.protocol,
        }
        row |= {
            "init": args.init,
            "precision": args.precision,
            "losses": [round(v, 5) for v in curve],
        }
        rows.append(row | ({"gradients": gradients} if gradients else {}) | made)
    write_whole(args.out, "[" + ",\n".join(map(json.dumps, rows)) + "]\n")


if __name__ == "__main__":
    main()
