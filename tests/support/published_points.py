"""The main figure's rows and published values by point, and the times beside the published loop."""

import csv
import json
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from support.page_numbers import ROOT, Rows, errors, rows_of

import headwise

PUBLISHED = Path(headwise.__file__).parent / "experiments" / "published" / "fig1.csv"
WIDTH = {"d^2": 1, "d^2.5": 8, "d^3": 64}  # heads of full rank
RATE = 0.01  # as published

Point = tuple[int, int, int]  # layers, heads of full rank, rank


@cache
def published() -> dict[Point, float]:
    lines = [line for line in PUBLISHED.read_text().splitlines() if not line.startswith("#")]
    width = {"2": 1, "2.5": 8, "3": 64}
    return {
        (int(row["layers"]), width[row["params_power"]], int(row["rank"])): float(row["mse"])
        for row in csv.DictReader(lines)
    }


@cache
def points(file: str, protocol: str, lr: float = RATE) -> dict[Point, Rows]:
    """The rows of each point of a file of results/fig1, at one protocol and rate."""
    found: dict[Point, Rows] = defaultdict(list)
    for row in rows_of(f"fig1/{file}"):
        if (row["protocol"], row["lr"]) == (protocol, lr):
            width = row["num_heads"] * row["head_dim"] // row["dim"]
            found[row["depth"], width, row["head_dim"]].append(row)
    return found


def fresh(file: str, lr: float = RATE) -> dict[Point, Rows]:
    return points(file, "stream", lr)


def counted(layers: int, width: int, rank: int, lr: float) -> list[float]:
    """Errors of the seeds that did not choose the rate, of the runs that did not diverge."""
    rows = [*fresh("rows.jsonl", lr)[layers, width, rank]]
    rows += fresh("tuned.jsonl", lr)[layers, width, rank]
    return errors([row for row in rows if row["seed"]])


def reproduced(protocol: str, among: Iterable[Point] | None = None) -> int:
    """How many published values the smallest training loss of any seed meets within 10 %."""
    ours = points("rows.jsonl", protocol)
    return sum(
        abs(min(row["train_best"] for row in ours[point]) / published()[point] - 1) <= 0.1
        for point in (published() if among is None else among)
    )


def stock_over_ours(file: str, *, alone: bool = False) -> list[float]:
    """The time of the published loop's step, on the host of one measurement, over that of ours
    today: in ensembles over all shapes, or one model alone at one layer, d², rank 64."""

    def milliseconds(value: float | dict[str, float]) -> float:
        return value["ms"] if isinstance(value, dict) else value

    stock, ours = (
        json.loads((ROOT / f"results/speed/{name}.json").read_text())
        for name in (file, "figure1-whole")
    )
    if alone:
        return [milliseconds(stock["stock 1 1 64"]) / milliseconds(ours["models 1 1 64 1"])]
    shapes = [key.removeprefix("stock ") for key in stock if key.startswith("stock ")]
    return [milliseconds(stock[f"stock {s}"]) / milliseconds(ours[f"headwise {s}"]) for s in shapes]
