"""Were the longest of the published runs cut off by their jobs' time limits? How long ours train
until they reach the published values.

    python -m benchmarks.unfinished results/fig1/{rows,supplement}.jsonl
    results/{length,positions}/rows.jsonl

The published job files give a run 6 hours (main figure), 2 (its supplement) or 4 (sequence length,
positions) and do not resume afterwards; the smallest training loss of whatever epochs there are is
what is drawn. If that is what happened, the time limit over the steps that ours need to reach the
published value is the time of a published step: about the same per layer in every experiment, and
about what the stock way takes. Points that ours do not reach are left out. With --cut 61,108,345
(milliseconds a layer and step: of ranks 8 and more, of 4 and 2, of 1) the other way round: how many
points of the main figure agree if every run of budget d^3 ends with its job.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path

from headwise.experiments.rank_paper import fig1_figures, length, positions
from headwise.experiments.rank_paper.shapes import budget
from headwise.rows import Row
from headwise.stats import group
from headwise.training.run import REPLAYED

WIDTH = 64  # attention modules side by side: budget d^3
NEAR = 0.1


def limit(row: Row) -> tuple[str, float]:
    """The figure a run belongs to and the hours its published job had."""
    if row["positions"] != "none":
        return f"positions, {row['positions']}", 4
    if row["depth"] == 2:
        return f"sequence length, {row['task_points']} points", 4
    return (
        ("main figure", 6) if row["batch"] == 256 else (f"its supplement, batch {row['batch']}", 2)
    )


def table(rows: list[Row]) -> list[dict]:
    """One entry a point whose published value our best run reaches: after how many epochs, and what
    a step then took per layer."""
    known = {
        ("none", 16, layers, rank): value
        for (layers, width, rank), value in fig1_figures.published_errors().items()
        if width == WIDTH
    }
    known |= {
        ("none", points, 2, rank): value
        for (points, rank), value in length.published_errors().items()
    }
    known |= {
        (kind, 16, layers, rank): value
        for (layers, kind, rank), value in positions.published_errors().items()
        if kind != "none"
    }
    large = [
        row
        for row in rows
        if row["average"] == WIDTH or (row["positions"] != "none" and row["depth"] > 1)
    ]
    ours = [row for row in large if row["protocol"] in REPLAYED and row["status"] == "done"]
    out = []
    for (kind, points, layers, rank, _), same in group(
        ours, "positions", "task_points", "depth", "head_dim", "batch"
    ).items():
        value = known.get((kind, points, layers, rank))
        best = [min(losses) for losses in zip(*(row["curve"] for row in same), strict=True)]
        epochs = next(
            (i + 1 for i, loss in enumerate(best) if value is not None and loss <= value), None
        )
        if epochs is not None:
            figure, hours = limit(same[0])
            out.append(
                {
                    "figure": figure,
                    "layers": layers,
                    "rank": rank,
                    "seeds": len(same),
                    "published": value,
                    "ours": min(best),
                    "epochs": epochs,
                    "of": len(best),
                    "hours": hours,
                    "ms": hours * 3.6e6 / (epochs * same[0]["epoch"] * layers),
                }
            )
    return sorted(out, key=lambda e: (e["figure"], e["layers"], -e["rank"]))


def agreeing(
    rows: list[Row], high: float = 0.0, low: float = 0.0, one: float = 0.0
) -> tuple[list[tuple], list[tuple]]:
    """The main figure's points (layers, width, rank) whose training statistic is within 10 % of the
    published one, and the others, if steps of budget d^3 took so long (of ranks 8 and more, of 4
    and 2, of 1) and runs ended with their jobs; with 0 as they end. A run that diverged counts
    until then, as it would in the paper's statistic."""
    known, best = fig1_figures.published_errors(), dict[tuple, float]()
    for row in rows:
        point = row["depth"], row["average"], row["head_dim"]
        if row["positions"] == "none" and row["protocol"] in REPLAYED and point in known:
            step, epochs = (
                high if row["head_dim"] >= 8 else low if row["head_dim"] > 1 else one,
                len(row["curve"]),
            )
            if row["average"] == WIDTH and step:
                epochs = min(
                    epochs, int(limit(row)[1] * 3.6e6 / (step * row["depth"] * row["epoch"]))
                )
            losses = [loss for loss in row["curve"][:epochs] if loss is not None]
            if losses:
                best[point] = min([*losses, best.get(point, math.inf)])
    near = [point for point in sorted(best) if abs(best[point] / known[point] - 1) <= NEAR]
    return near, [point for point in sorted(best) if point not in near]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="+", help="files of rows")
    parser.add_argument(
        "--speed",
        type=Path,
        help="what benchmarks.figure1 wrote, to set the stock way's step beside it",
    )
    parser.add_argument(
        "--cut",
        metavar="MS,MS,MS",
        help=(
            "of a layer and step, ranks 8 and more, 4 and 2, 1: how many points agree if runs "
            "were cut off"
        ),
    )
    args = parser.parse_args()
    if args.cut and not re.fullmatch(r"\d+(\.\d+)?(,\d+(\.\d+)?){2}", args.cut):
        parser.error(f"--cut must be three numbers, such as 61,108,345, got {args.cut}")
    rows = [json.loads(line) for path in args.rows for line in path.read_text().splitlines()]
    print(
        "| figure | layers | rank | published | ours at the end | seeds | published value reached "
        "after | ms a layer and step, if cut |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for e in table(rows):
        reached = f"{e['epochs']} of {e['of']} epochs | {e['ms']:.0f} ({e['hours']} h)"
        print(
            f"| {e['figure']} | {e['layers']} | {e['rank']} | {e['published']:g} | "
            f"{e['ours']:.4f} | {e['seeds']} | {reached} |"
        )
    if args.speed:
        measured = json.loads(args.speed.read_text())
        for rank in (64, 8, 1):
            each = [measured[f"stock {layers} {WIDTH} {rank}"] / layers for layers in (1, 3, 5)]
            print(
                f"stock way on {measured['device']}, rank {rank}: {min(each):.0f} to "
                f"{max(each):.0f} ms a layer and step"
            )
    if args.cut:
        for when, speeds in (
            ("as they end", ()),
            (f"cut off at {args.cut} ms", map(float, args.cut.split(","))),
        ):
            near, far = agreeing(rows, *speeds)
            distant = ", ".join(
                f"({layers} layers, {budget(width, 64)}, rank {rank})"
                for layers, width, rank in far
            )
            print(
                f"main figure, {when}: {len(near)} of {len(near) + len(far)} points within "
                f"{NEAR:.0%}, not {distant}"
            )


if __name__ == "__main__":
    main()
