"""The rank paper's main figure: error against rank at one parameter budget, for several depths.

    headwise run fig1                    quick: d=16, N=8, 48 models; 2 CPU cores, about 2 minutes
    headwise run fig1 --preset paper     d=64, N=16, 630 models of 100,000 steps, both data protocols; one GPU
    headwise run fig1 --set rates=1,0.3  every point at two learning rates, the better one counts; twice the time

Expected, quick, held out (mean of 3 seeds): one layer, d^2 budget: full rank 0.036, half rank 0.57, rank 1 0.74; four
times the heads repair little of it. Expected, paper, training statistic under `replay`: published/fig1.csv within 10 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headwise.experiments.common import Training, beside, check_lists, edges, errors_of, plural, recipe_of, solid, whole
from headwise.experiments.common import published as known
from headwise.models import paper_shape
from headwise.runs import REPLAYED, Row, Run
from headwise.shape import UsageError
from headwise.stats import group
from headwise.tasks import Farthest

COLUMNS = (
    ("protocol", "data"), ("layers", "layers"), ("budget", "budget"), ("rank", "rank"), ("heads", "heads"), ("params", "parameters"),
    ("lr", "rate"), ("held_out", "held-out error"), ("n", "n"), ("diverged", "diverged"), ("zero", "predict zero"),
    ("train_best", "paper's statistic"), ("published", "published"),
)  # fmt: skip
SIDES = (
    "Left: the rank paper's statistic, the smallest training loss of any epoch of any seed on replayed data; dashed, as published. "
    "Right: error on fresh data of models trained on fresh data, mean over seeds with its 95 % interval."
)
LAYERS = (
    "What more layers do at each rank. Left: the rank paper's statistic on replayed data; dashed, as published. Right: error on fresh data "
    "of models trained on fresh data, mean over seeds with its 95 % interval, at the best of the learning rates that were run."
)
QUESTION = "At a fixed number of parameters, should attention have many heads of low rank or one head of full rank?"


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """What the figure varies and what it holds."""

    dim: int
    points: int
    depths: tuple[int, ...]
    widths: tuple[int, ...]  # parallel attention modules, averaged: the parameter budget is width * dim^2
    ranks: tuple[int, ...]
    lr: tuple[float, ...]  # for one layer, two layers and so on, the last for all deeper; the same for every rank and width
    rates: tuple[float, ...] = (1.0,)  # times which it is tried, at every point alike; the best of them counts

    def __post_init__(self) -> None:
        check_lists(self, ("depths", "widths", "ranks"), ("protocols", "rates"))
        if not self.lr:
            raise UsageError("lr must not be empty")


NOTES = {
    "quick": "In the preset's 3,500 steps two layers are undertrained, and full rank does worse with two than with one: "
    "compare ranks within a depth, not depths with each other.",
}
PRESETS = {
    "quick": Settings(
        dim=16, points=8, ffn_dim=64, depths=(1, 2), widths=(1, 4), ranks=(16, 8, 4, 1), seeds=3,
        steps=3500, batch=32, lr=(0.05, 0.015), warmup=0.3, schedule="cosine", protocols=("stream",), held_out=2048, evals=5,
    ),
    "paper": Settings(
        dim=64, points=16, ffn_dim=2048, depths=(1, 3, 5), widths=(1, 8, 64), ranks=(64, 32, 16, 8, 4, 2, 1), seeds=5,
        steps=100_000, batch=256, lr=(0.01,), warmup=0.05, schedule="published", protocols=("replay", "stream"), precision="fp16",
    ),
}  # fmt: skip


def runs(settings: Settings) -> list[Run]:
    """Every model of the figure, seeds innermost."""
    s, out = settings, []
    for protocol in s.protocols:
        for depth in s.depths:
            lr = s.lr[min(depth, len(s.lr)) - 1]
            for width in s.widths:
                for rank in s.ranks:
                    shape = paper_shape(dim=s.dim, depth=depth, rank=rank, width=width, ffn_dim=s.ffn_dim, points=s.points)
                    for times in s.rates:
                        recipe = recipe_of(s, lr=float(f"{lr * times:.6g}"), protocol=protocol)
                        out += [Run(shape, Farthest(s.dim, s.points), recipe, seed) for seed in range(s.seeds)]
    return out


def published() -> dict[tuple[int, int, int], float]:
    """The paper's values by (layers, width, rank), d=64 and N=16: smallest training loss of any epoch of any seed."""
    width = {"2": 1, "2.5": 8, "3": 64}
    return {(int(r["layers"]), width[r["params_power"]], int(r["rank"])): float(r["mse"]) for r in known("fig1")}


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """One point per (protocol, layers, width, rank, rate): held-out mean with interval, the paper's statistic, its value."""
    paper, out = published(), []
    for (protocol, depth, width, rank, lr), same in group(rows, "protocol", "depth", "average", "head_dim", "lr").items():
        first = same[0]
        match = first["dim"] == 64 and first["task_points"] == 16 and protocol in REPLAYED  # as what was published
        out.append(
            {
                "protocol": protocol,
                "layers": depth,
                "width": width,
                "budget": budget(width, first["dim"]),
                "rank": rank,
                "heads": first["num_heads"],
                "dim": first["dim"],
                "params": first["params"],
                "lr": lr,
                **errors_of(same),
                "published": paper.get((depth, width, rank)) if match else None,
            }
        )
    return out


def budget(width: int, dim: int) -> str:
    """A width as the paper writes it: the power of d that is the number of query/key parameters a layer."""
    power = 2 + math.log(width) / math.log(dim)
    return f"d^{power:g}" if abs(power * 2 - round(power * 2)) < 1e-9 else f"{width} d^2"


def tuned(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each (protocol, layers, width, rank) the rate that does best: held out, but by the paper's statistic where data are replayed.
    `edge`: it is the smallest or the largest of three or more."""
    out = []
    for (protocol, *_), same in group(points, "protocol", "layers", "width", "rank").items():
        by = "train_best" if protocol in REPLAYED else "held_out"
        best = min(same, key=lambda p: (math.inf if p[by] is None else p[by], p["lr"]))
        rates = [p["lr"] for p in same]
        out.append({**best, "rates": len(rates), "edge": len(rates) > 2 and best["lr"] in (min(rates), max(rates))})
    return out


def headline(points: list[dict[str, Any]]) -> list[str]:
    """The claim in numbers: full against half rank at each depth and budget, and half rank by depth, held out."""
    lines, points, several = [], tuned(points), sum(p["rates"] > 1 for p in tuned(points))
    for (protocol, layers, width), same in group(points, "protocol", "layers", "width").items():
        by_rank = {p["rank"]: p for p in same}
        dim = same[0]["dim"]
        full, half = by_rank.get(dim), by_rank.get(dim / 2)
        what = f"{plural(layers, 'layer')}, budget {budget(width, dim)}, {protocol}"
        if full and half and full["held_out"] and half["held_out"]:
            failed = full["zero"] + half["zero"]
            ratio = f"{half['held_out'] / full['held_out']:.1f} times as large"
            verdict = f"{failed} runs only predict zero, so this compares nothing" if failed else ratio
            lines.append(f"{what}: full rank {full['held_out']:.4f}, half rank {half['held_out']:.4f}, {verdict}")
    lines += _by_depth([p for p in points if p["protocol"] == "stream"])
    if several:
        lines += [f"{several} of {len(points)} points were run at several learning rates, and the best counts", *edges(points, "points")]
    if any(p["protocol"] == "original" and p["n"] > 1 for p in points):
        lines.append("original data: seeds next to each other share six of seven batches, so that intervals over seeds are too narrow")
    return lines


def _by_depth(points: list[dict[str, Any]]) -> list[str]:
    """What depth does to half rank on fresh data, beside the shallowest model of full rank; where every depth had several rates, since one
    that suits a depth may be too high for another."""
    lines = []
    for (width, dim), same in group(points, "width", "dim").items():
        half, full = ([p for p in same if p["rank"] == rank and p["held_out"] is not None] for rank in (dim / 2, dim))
        if len(half) > 1 and full and min(p["rates"] for p in half) > 1:
            errors, layers = (", ".join(texts) for texts in zip(*((f"{p['held_out']:.4f}", str(p["layers"])) for p in half), strict=True))
            first = f"{full[0]['held_out']:.4f} with {full[0]['layers']}"
            lines.append(f"by depth, budget {budget(width, dim)}, stream: half rank {errors} with {layers} layers, full rank {first}")
    return lines


def figure(points: list[dict[str, Any]]) -> dict[str, Any]:
    """What to draw: a panel per depth and protocol, a line per budget, the published values dashed."""
    points = tuned(points)
    dim, ranks = points[0]["dim"], sorted({p["rank"] for p in points})
    paper, panels, shares = published(), [], [rank / dim for rank in ranks]
    theirs = {budget(width, 64): width for width in (1, 8, 64)}
    colours = list(dict.fromkeys([*theirs, *(budget(width, dim) for width in sorted({p["width"] for p in points}))]))
    for (protocol, layers), same in group(points, "protocol", "layers").items():
        lines = []
        for (width,), line in group(same, "width").items():
            line = whole([p for p in line if p["held_out"] is not None], ranks)
            name = budget(width, dim)
            colour = colours.index(name)
            held, best = beside(name, colour, shares, line, ())
            lines += [{**held, "text": [_about(p) if p["n"] else "" for p in line]}, best]
        for name in sorted({budget(p["width"], dim) for p in same} & theirs.keys()):
            known = sorted((rank, value) for (depth, w, rank), value in paper.items() if (depth, w) == (layers, theirs[name]))
            if known:
                lines.append(
                    {
                        "label": f"published (training, replay), d=64, {name}",
                        "colour": colours.index(name),
                        "style": "dashed",
                        "x": [r / 64 for r, _ in known],
                        "y": [v for _, v in known],
                        "text": [f"rank {r}" for r, _ in known],
                    }
                )
        title = plural(layers, "layer") + (f", {protocol}" if len({p["protocol"] for p in points}) > 1 else "")
        panels.append({"title": title, "lines": lines})
    return {
        "title": f"Farthest neighbour: error against rank at equal parameters (d={dim})",
        "x_label": "rank of a head / d", "y_label": "squared error",
        "reference": {"label": "predicting zero", "y": 1.0}, "panels": panels,
        "columns": len({p["layers"] for p in points}),
    }  # fmt: skip


def _about(p: dict[str, Any]) -> str:
    rate = f", rate {p['lr']:g}, the best of {p['rates']}" if p["rates"] > 1 else ""
    return f"rank {p['rank']}, {plural(p['heads'], 'head')}, {p['params']:,} parameters, n={p['n']}{rate}"


def sides(points: list[dict[str, Any]]) -> dict[str, Any]:
    """As published against held out by rank, a line a depth."""
    return _sides(points, "layers", "rank", "Does depth repair low rank?", SIDES)


def layers(points: list[dict[str, Any]]) -> dict[str, Any]:
    """The same by depth, a line a rank; nothing of one depth alone."""
    several = len({p["layers"] for p in points}) > 1
    return _sides(points if several else [], "rank", "layers", "What more layers do, by rank.", LAYERS)


def _sides(points: list[dict[str, Any]], by: str, along: str, title: str, caption: str) -> dict[str, Any]:
    """A row a budget; left the training statistic under replay, right fresh data throughout."""
    points, panels, dim = tuned(points), [], points[0]["dim"] if points else 64
    paper = [{"layers": n, "width": w, "rank": r, "value": v} for (n, w, r), v in sorted(published().items()) if dim == 64]
    unit, axis = (dim, "rank of a head / d") if along == "rank" else (1, "layers")
    places = sorted({p[along] for p in points})
    xs, none = [place / unit for place in places], [None] * len(places)
    replayed = next((name for name in REPLAYED if any(p["protocol"] == name for p in points)), "")
    for (width,), same in group(points, "width").items():
        left, right = [], []
        for colour, value in enumerate(sorted({p[by] for p in points}, reverse=by == "rank")):
            here = [p for p in same if p[by] == value]
            name = plural(value, "layer") if by == "layers" else f"rank {value}"
            seen = [p for p in here if p["protocol"] == replayed and p["train_best"] is not None]
            fresh = [p for p in here if p["protocol"] == "stream" and p["held_out"] is not None]
            known = [p for p in paper if (p["width"], p[by]) == (width, value)]
            if seen:
                ours = {"y": [p["train_best"] for p in whole(seen, places, along)], "low": none, "high": none}
                left.append({"label": name, "colour": colour, "style": "solid", "x": xs, **ours})
            if known and here:
                theirs = {"x": [p[along] / unit for p in known], "y": [p["value"] for p in known]}
                left.append({"label": f"published, {name}", "colour": colour, "style": "dashed", **theirs})
            if fresh:
                there = whole(fresh, places, along)
                right.append({**solid(name, colour, xs, there), "text": [_about(p) if p["n"] else "" for p in there]})
        panels += [
            {"title": f"as published: training error, replayed data ({budget(width, dim)})", "lines": left},
            {"title": f"held out: trained and judged on fresh data ({budget(width, dim)})", "lines": right},
        ]
    return {
        "title": f"{title} Farthest neighbour, d={dim}", "x_label": axis, "y_label": "squared error",
        "reference": {"label": "predicting zero", "y": 1.0}, "panels": panels, "columns": 2, "caption": caption,
    }  # fmt: skip


VIEWS = {"depth": sides, "layers": layers}
