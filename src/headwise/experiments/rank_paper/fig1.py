"""The rank paper's main figure: error against rank at one parameter budget, for several depths.

    headwise run fig1                    quick: d=16, N=8, 48 models; 2 CPU cores, about 2 minutes
    headwise run fig1 --preset paper     d=64, N=16, 630 models of 100,000 steps, both data protocols; one GPU
    headwise run fig1 --set rates=1,0.3  every point at two learning rates on one seed, at the better one on the others

Expected, quick, held out (mean of 3 seeds): one layer, d^2 budget: full rank 0.036, half rank 0.57,
rank 1 0.74; four times the heads repair little of it. Expected, paper, training statistic under
`replay`: published/fig1.csv within 10 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headwise.errors import UsageError
from headwise.experiments.common import (
    Training,
    beside,
    check_alike,
    check_lists,
    counted,
    edges,
    errors_of,
    next_round,
    plural,
    recipe_of,
    solid,
    whole,
)
from headwise.experiments.common import published as known
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.rows import Row
from headwise.stats import group
from headwise.tasks import Farthest
from headwise.training.run import REPLAYED, Run

COLUMNS = (
    ("protocol", "data"),
    ("layers", "layers"),
    ("budget", "budget"),
    ("rank", "rank"),
    ("heads", "heads"),
    ("params", "parameters"),
    ("lr", "rate"),
    ("held_out", "held-out error"),
    ("n", "n"),
    ("diverged", "diverged"),
    ("zero", "predict zero"),
    ("train_best", "paper's statistic"),
    ("published", "published"),
)
SIDES = (
    "Left: the rank paper's statistic, the smallest training loss of any epoch of any seed on "
    "replayed data; dashed, as published. "
    "Right: error on fresh data of models trained on fresh data, mean over seeds with its 95 % "
    "interval."
)
LAYERS = (
    "What more layers do at each rank. Left: the rank paper's statistic on replayed data; dashed, "
    "as published. Right: error on fresh data "
    "of models trained on fresh data, mean over seeds with its 95 % interval; where several "
    "learning rates were tried on the first seed, "
    "at the one that is best there, over the other seeds."
)
QUESTION = (
    "At a fixed number of parameters, should attention have many heads of low rank or one head of "
    "full rank?"
)


def _times(lr: float, times: float) -> float:
    """A multiple of a rate, without the last digits that only binary numbers have."""
    return lr if times == 1 else float(f"{lr * times:.6g}")


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """What the figure varies and what it holds."""

    dim: int
    points: int
    depths: tuple[int, ...]
    widths: tuple[
        int, ...
    ]  # parallel attention modules, averaged: the parameter budget is width * dim^2
    ranks: tuple[int, ...]
    lr: tuple[
        float, ...
    ]  # for one layer, two layers and so on, the last for all deeper; the same for every rank and width
    rates: tuple[float, ...] = (
        1.0,
    )  # multiples of lr; several are tried at every point on seed 0, and `seeds` others go on at the best

    def __post_init__(self) -> None:
        check_lists(self, ("depths", "widths", "ranks"), ("protocols", "rates"))
        if not self.lr:
            raise UsageError("lr must not be empty")
        if bad := [times for times in self.rates if not 0 < times < math.inf]:
            raise UsageError(f"rates must be above 0 and finite, got {bad[0]:g}")
        for lr in self.lr:
            if len({_times(lr, times) for times in self.rates}) < len(self.rates):
                raise UsageError(
                    "rates must differ in their first six digits, got "
                    f"{', '.join(map(str, self.rates))}"
                )

    def idle(self) -> dict[str, str]:
        """Settings that would have no effect, and why."""
        most = max(self.depths)
        told = (
            f"it is a rate for one layer, one for two and so on, {len(self.lr)} of them for "
            f"depths up to {most}; rates tries several"
        )
        return {"lr": told} if len(self.lr) > most else {}


NOTES = {
    "quick": "At the preset's 3,500 steps and rates two layers are undertrained, and full rank does worse with two than with one: "
    "there compare ranks within a depth, not depths with each other.",
}
PRESETS = {
    "quick": Settings(
        dim=16,
        points=8,
        ffn_dim=64,
        depths=(1, 2),
        widths=(1, 4),
        ranks=(16, 8, 4, 1),
        seeds=3,
        steps=3500,
        batch=32,
        lr=(0.05, 0.015),
        warmup=0.3,
        schedule="cosine",
        protocols=("stream",),
        held_out=2048,
        evals=5,
    ),
    "paper": Settings(
        dim=64,
        points=16,
        ffn_dim=2048,
        depths=(1, 3, 5),
        widths=(1, 8, 64),
        ranks=(64, 32, 16, 8, 4, 2, 1),
        seeds=5,
        steps=100_000,
        batch=256,
        lr=(0.01,),
        warmup=0.05,
        schedule="published",
        protocols=("replay", "stream"),
        precision="fp16",
    ),
}


def runs(settings: Settings) -> list[Run]:
    """Every model of the figure, seeds innermost; where several rates are tried, that of seed 0 at
    each."""
    s, out, seeds = settings, [], range(settings.seeds if len(settings.rates) == 1 else 1)
    for protocol in s.protocols:
        for depth in s.depths:
            lr = s.lr[min(depth, len(s.lr)) - 1]
            for width in s.widths:
                for rank in s.ranks:
                    shape = paper_shape(
                        dim=s.dim,
                        depth=depth,
                        rank=rank,
                        width=width,
                        ffn_dim=s.ffn_dim,
                        points=s.points,
                    )
                    for times in s.rates:
                        recipe = recipe_of(s, lr=_times(lr, times), protocol=protocol)
                        out += [
                            Run(shape, Farthest(s.dim, s.points), recipe, seed) for seed in seeds
                        ]
    return out


def then(settings: Settings, rows: list[Row]) -> list[Run]:
    """Where several rates were tried: every point at its best, `seeds` other seeds."""
    return next_round(runs(settings), rows, settings.seeds) if len(settings.rates) > 1 else []


def published() -> dict[tuple[int, int, int], float]:
    """The paper's values by (layers, width, rank), d=64 and N=16: smallest training loss of any
    epoch of any seed."""
    width = {"2": 1, "2.5": 8, "3": 64}
    return {
        (int(r["layers"]), width[r["params_power"]], int(r["rank"])): float(r["mse"])
        for r in known("fig1")
    }


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """One point per (protocol, layers, width, rank): held-out mean with interval, the paper's
    statistic, its value; where there are several rates, of the one that is best on seed 0, over the
    other seeds."""
    paper, out, dims = published(), [], sorted({row["dim"] for row in rows})
    if len(dims) > 1:
        raise UsageError(f"one figure is of one dim, got rows of {' and '.join(map(str, dims))}")
    for (protocol, depth, width, rank), same in group(
        rows, "protocol", "depth", "average", "head_dim"
    ).items():
        kept, tried = _at_best(same)
        first = kept[0]
        match = (
            first["dim"] == 64
            and first["task_points"] == 16
            and protocol in REPLAYED
            and first["lr"] == PRESETS["paper"].lr[0]
        )
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
                "lr": first["lr"],
                "rates": len(tried),
                "edge": len(tried) > 2 and first["lr"] in (min(tried), max(tried)),
                "seed_0": len(tried) > 1 and first["seed"] == 0,
                **errors_of(kept),
                "published": paper.get((depth, width, rank)) if match else None,
            }
        )
    return out


def _at_best(rows: list[Row]) -> tuple[list[Row], list[float]]:
    """One point's rows that count, and the rates it was tried at."""
    check_alike(rows, "lr")
    tried = sorted({r["lr"] for r in rows})
    if len(tried) == 1:
        return rows, tried
    tried = sorted({r["lr"] for r in rows if r["seed"] == 0})
    if not tried:
        raise UsageError(
            "runs of one point at several rates need one of seed 0, by which the rate is chosen; "
            "got none"
        )
    return counted(rows), tried


def budget(width: int, dim: int) -> str:
    """A width as the paper writes it: the power of d that is the number of query/key parameters a
    layer."""
    power = 2 + math.log(width) / math.log(dim)
    return f"d^{power:g}" if abs(power * 2 - round(power * 2)) < 1e-9 else f"{width} d^2"


def headline(points: list[dict[str, Any]]) -> list[str]:
    """The claim in numbers: full against half rank at each depth and budget, held out."""
    lines = []
    for (protocol, layers, width), same in group(points, "protocol", "layers", "width").items():
        by_rank = {p["rank"]: p for p in same}
        dim = same[0]["dim"]
        full, half = by_rank.get(dim), by_rank.get(dim / 2)
        what = f"{plural(layers, 'layer')}, budget {budget(width, dim)}, {protocol}"
        if full and half and full["held_out"] and half["held_out"]:
            failed = full["zero"] + half["zero"]
            ratio = f"{half['held_out'] / full['held_out']:.1f} times as large"
            if full["rates"] != half["rates"]:
                ratio += f", tuned over {plural(full['rates'], 'rate')} and {half['rates']}"
            verdict = (
                f"{failed} runs only predict zero, so this compares nothing" if failed else ratio
            )
            lines.append(
                f"{what}: full rank {full['held_out']:.4f}, half rank {half['held_out']:.4f}, "
                f"{verdict}"
            )
    lines += _tuning([p for p in points if p["rates"] > 1], len(points))
    if any(p["protocol"] == "original" and p["n"] > 1 for p in points):
        lines.append(
            "original data: seeds next to each other share six of seven batches, so that "
            "intervals over seeds are too narrow"
        )
    return lines


def _tuning(tried: list[dict[str, Any]], of: int) -> list[str]:
    """How the points that were tried at several rates came to theirs."""
    if not tried:
        return []
    alone, many = sum(p["seed_0"] for p in tried), [p for p in tried if p["rates"] > 2]
    told = (
        f"{len(tried)} of {of} points were tried at several learning rates on seed 0, and the "
        "best one there is judged on other seeds"
    )
    return [
        told + (f"; {alone} have no others and show that one" if alone else ""),
        *edges(many, "points with three rates or more"),
    ]


def figure(points: list[dict[str, Any]]) -> dict[str, Any]:
    """What to draw: a panel per depth and protocol, a line per budget, the published values
    dashed."""
    dim, ranks = points[0]["dim"], sorted({p["rank"] for p in points})
    paper, panels, shares = published(), [], [rank / dim for rank in ranks]
    theirs = {budget(width, 64): width for width in (1, 8, 64)}
    colours = list(
        dict.fromkeys(
            [*theirs, *(budget(width, dim) for width in sorted({p["width"] for p in points}))]
        )
    )
    for (protocol, layers), same in group(points, "protocol", "layers").items():
        lines = []
        for (width,), line in group(same, "width").items():
            line = whole([p for p in line if p["held_out"] is not None], ranks)
            name = budget(width, dim)
            colour = colours.index(name)
            held, best = beside(name, colour, shares, line, ())
            lines += [{**held, "text": [_about(p) if p["n"] else "" for p in line]}, best]
        for name in sorted({budget(p["width"], dim) for p in same} & theirs.keys()):
            known = sorted(
                (rank, value)
                for (depth, w, rank), value in paper.items()
                if (depth, w) == (layers, theirs[name])
            )
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
        title = plural(layers, "layer") + (
            f", {protocol}" if len({p["protocol"] for p in points}) > 1 else ""
        )
        panels.append({"title": title, "lines": lines})
    return {
        "title": f"Farthest neighbour: error against rank at equal parameters (d={dim})",
        "x_label": "rank of a head / d", "y_label": "squared error",
        "reference": {"label": "predicting zero", "y": 1.0}, "panels": panels,
        "columns": len({p["layers"] for p in points}),
    }  # fmt: skip


def _about(p: dict[str, Any]) -> str:
    rate = f", rate {p['lr']:g} of {p['rates']}" if p["rates"] > 1 else ""
    return (
        f"rank {p['rank']}, {plural(p['heads'], 'head')}, {p['params']:,} parameters, "
        f"n={p['n']}{rate}"
    )


def sides(points: list[dict[str, Any]]) -> dict[str, Any]:
    """As published against held out by rank, a line a depth; nothing of fresh data alone, which the
    figure itself shows."""
    described, left, _ = _sides(points, "layers", "rank", "Does depth repair low rank?", SIDES)
    return described if left else {**described, "panels": []}


def by_layers(points: list[dict[str, Any]]) -> dict[str, Any]:
    """The same by depth, a line a rank, for budgets with several depths; on fresh data alone where
    rates were tuned, since one that suits a depth may be too high for another."""
    several = [
        same for same in group(points, "width").values() if len({p["layers"] for p in same}) > 1
    ]
    of = [p for same in several for p in same]
    described, left, right = _sides(
        of or points, "rank", "layers", "What more layers do, by rank.", LAYERS
    )
    return (
        described
        if of and ((left and right) or any(p["rates"] > 1 for p in of))
        else {**described, "panels": []}
    )


def _sides(
    points: list[dict[str, Any]], by: str, along: str, title: str, caption: str
) -> tuple[dict[str, Any], bool, bool]:
    """A row a budget; left the training statistic under replay, right fresh data throughout; and
    which of the two there is."""
    panels, dim = list[tuple[str, list[Any], list[Any]]](), points[0]["dim"]
    paper = [
        {"layers": n, "width": w, "rank": r, "value": v}
        for (n, w, r), v in sorted(published().items())
        if dim == 64
    ]
    unit, axis = (dim, "rank of a head / d") if along == "rank" else (1, "layers")
    places = sorted({p[along] for p in points})
    xs, none = [place / unit for place in places], [None] * len(places)
    replayed = next((name for name in REPLAYED if any(p["protocol"] == name for p in points)), "")
    for (width,), same in group(points, "width").items():
        left, right = list[Any](), list[Any]()
        for colour, value in enumerate(sorted({p[by] for p in points}, reverse=by == "rank")):
            here = [p for p in same if p[by] == value]
            name = plural(value, "layer") if by == "layers" else f"rank {value}"
            seen = [p for p in here if p["protocol"] == replayed and p["train_best"] is not None]
            fresh = [p for p in here if p["protocol"] == "stream" and p["held_out"] is not None]
            known = [p for p in paper if (p["width"], p[by]) == (width, value)]
            if seen:
                ours = {
                    "y": [p["train_best"] for p in whole(seen, places, along)],
                    "low": none,
                    "high": none,
                }
                left.append({"label": name, "colour": colour, "style": "solid", "x": xs, **ours})
            if known and here:
                theirs = {"x": [p[along] / unit for p in known], "y": [p["value"] for p in known]}
                left.append(
                    {"label": f"published, {name}", "colour": colour, "style": "dashed", **theirs}
                )
            if fresh:
                there = whole(fresh, places, along)
                right.append(
                    {
                        **solid(name, colour, xs, there),
                        "text": [_about(p) if p["n"] else "" for p in there],
                    }
                )
        panels.append((budget(width, dim), left, right))
    shown = any(row[1] for row in panels), any(row[2] for row in panels)
    titles = (
        "as published: training error, replayed data",
        "held out: trained and judged on fresh data",
    )
    described = {
        "title": (f"{title} Farthest neighbour, d={dim}"),
        "x_label": axis,
        "y_label": "squared error",
        "reference": {"label": "predicting zero", "y": 1.0},
        "columns": sum(shown),
        "caption": caption,
        "panels": [
            {"title": f"{what} ({name})", "lines": lines}
            for name, *both in panels
            for what, lines, there in zip(titles, both, shown, strict=True)
            if there
        ],
    }
    return described, *shown


VIEWS = {"depth": sides, "layers": by_layers}
