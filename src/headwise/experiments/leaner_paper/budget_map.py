"""More heads or fewer? Held-out loss over heads x rank x depth at one exact budget, with both
papers' advice on it.

    headwise run map --task farthest        quick: width 32, 28 cells; 2 CPU cores, minutes; also recall, text, images, listops, sentences
    headwise run map --preset paper --task text --set source=FILE     width 64, 3 seeds after tuning; one GPU, minutes a task

Every cell is a model of the same number of parameters (or FLOPs): what its heads do not use goes
into the feed-forward. Ways to add heads are paths across it: `split` (rank x heads kept), `widen`
(rank kept, the feed-forward pays), `trade` (rank kept, layers pay). Every cell's learning rate is
tuned with the same effort, on a seed of its own that is not counted. Expected: on `farthest` the
error falls with rank at every number of heads, `recall` needs two layers; elsewhere see
results/map.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headwise.errors import UsageError, nearest
from headwise.experiments.common import (
    OverTasks,
    check_lists,
    counted,
    edges,
    how_conditioned,
    logmean,
    next_round,
    plural,
    recipe_of,
    shape_of,
    signed,
    task_of,
    tuned,
)
from headwise.rows import Row
from headwise.shape import Shape
from headwise.stats import Mean, difference, group, rank_correlation
from headwise.tasks import Task
from headwise.training.run import Run

QUESTION = "At one exact budget, how many heads, of what rank, how deep?"
COLUMNS = (
    ("task", "task"),
    ("depth", "layers"),
    ("heads", "heads"),
    ("rank", "rank"),
    ("ffn", "feed-forward"),
    ("params", "parameters"),
    ("off", "off budget"),
    ("lr", "tuned rate"),
    ("held_out", "held-out loss"),
    ("n", "n"),
    ("diverged", "diverged"),
    ("accuracy", "accuracy"),
    ("kappa_start", "kappa at start"),
    ("kappa_end", "at end"),
    ("paths", "on the path of"),
)
CAPTION = (
    "Colour and number: held-out loss, mean over seeds at the tuned learning rate; darker is "
    "better, the best cell of a task is framed. "
    "Empty cells cannot be built within the budget. Lines: ways to add heads, from few to many. "
    "Star: what the rank paper advises, one "
    "head of full rank; diamond: what the leaner paper does, more heads of the same rank in half "
    "of the layers."
)
PATHS = ("split", "widen", "trade")
ADVICE = {"the rank paper": "star", "the leaner paper": "diamond"}
BUDGETS = ("params", "flops")
PREDICTORS = ("rank", "heads", "depth", "kappa_start", "kappa_end")
PREDICTED = ("rank", "heads", "layers", "kappa at start", "kappa at end")


@dataclass(frozen=True, kw_only=True)
class Settings(OverTasks):
    """The grid, and the base shape that sets the budget."""

    heads: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]
    base: tuple[
        int, ...
    ]  # layers, heads, rank, feed-forward: the shape whose budget all others meet
    budget: str
    ffn_dim: int = 0  # follows from the budget

    def idle(self) -> dict[str, str]:
        return {**super().idle(), "ffn_dim": "it follows from base and budget"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lists(self, ("heads", "ranks", "depths"))
        if self.budget not in BUDGETS:
            raise UsageError(f"unknown budget {self.budget!r}; {nearest(self.budget, BUDGETS)}")
        if len(self.base) != 4 or min(self.base) < 1:
            raise UsageError(
                f"base must be layers,heads,rank,feed-forward, got {','.join(map(str, self.base))}"
            )


PRESETS = {
    "quick": Settings(
        tasks=("farthest",),
        dim=32,
        heads=(1, 2, 4, 8),
        ranks=(4, 8, 16, 32),
        depths=(1, 2),
        base=(2, 4, 8, 128),
        budget="params",
        lrs=(0.01, 0.03),
        beta2=0.99,
        weight_decay=0.0,
        points=8,
        pairs=4,
        length=32,
        seeds=3,
        steps=700,
        batch=32,
        warmup=0.1,
        schedule="cosine",
        protocols=("stream",),
        init="normal",
        held_out=1024,
        evals=1,
    ),
    "paper": Settings(
        tasks=("farthest",),
        dim=64,
        heads=(1, 2, 4, 8, 16),
        ranks=(4, 8, 16, 32, 64),
        depths=(1, 2, 4),
        base=(4, 4, 16, 256),
        budget="params",
        lrs=(0.001, 0.003, 0.01),
        further=2,
        beta2=0.99,
        weight_decay=0.0,
        points=16,
        pairs=8,
        length=64,
        seeds=3,
        steps=4000,
        batch=64,
        warmup=0.1,
        schedule="cosine",
        protocols=("stream",),
        init="normal",
        precision="fp16",
        epoch=500,
        evals=2,
    ),
}


# ---- shapes at one budget


def cost(shape: Shape, task: Task, budget: str) -> int:
    """What the budget counts."""
    return shape.params if budget == "params" else shape.flops(task.tokens)


def cells(task: Task, s: Settings) -> list[Shape]:
    """Every shape of the grid at the base's cost, its feed-forward the whole number that comes
    nearest; those with less than a quarter of the width left for it are left out."""
    target = cost(shape_of(task, s.dim, *s.base), task, s.budget)
    out = []
    for depth in s.depths:
        for heads in s.heads:
            for rank in s.ranks:
                one, two = (
                    cost(shape_of(task, s.dim, depth, heads, rank, f), task, s.budget)
                    for f in (1, 2)
                )
                ffn = round(1 + (target - one) / (two - one))
                if ffn >= max(1, s.dim // 4):
                    out.append(shape_of(task, s.dim, depth, heads, rank, ffn))
    if not out:
        base = ",".join(map(str, s.base))
        raise UsageError(
            "no shape of heads, ranks and depths meets the base's budget with a feed-forward of "
            f"{s.dim // 4}; base {base}"
        )
    return out


# ---- runs in two rounds


def runs(settings: Settings) -> list[Run]:
    """The tuning: every cell at every rate, one seed."""
    s, out = settings, []
    for name in s.tasks:
        task = task_of(name, s)
        out += [
            Run(shape, task, recipe_of(s, protocol="stream", lr=lr), 0)
            for shape in cells(task, s)
            for lr in s.lrs
        ]
    return out


def then(settings: Settings, rows: list[Row]) -> list[Run]:
    """The measurement: every cell at its best rate, `seeds` other seeds."""
    return next_round(runs(settings), rows, settings.seeds, settings.further)


probe = how_conditioned  # of every trained run


# ---- points


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """One point per task and cell: the tuned rate, then the held-out loss over the other seeds."""
    out = []
    for (task, depth, heads, rank), same in group(
        rows, "task", "depth", "num_heads", "head_dim"
    ).items():
        first, these = same[0], counted(same)
        out.append(
            {
                "task": task,
                "depth": depth,
                "heads": heads,
                "rank": rank,
                "ffn": first["ffn_dim"],
                "dim": first["dim"],
                "params": first["params"],
                "flops": first["flops"],
                **tuned(same),
                **{
                    key: logmean([r.get(key) for r in these])
                    for key in ("kappa_start", "kappa_end", "kappa_centred_end")
                },
            }
        )
    for same in group(out, "task").values():
        _place(same)
    return out


def _place(points: list[dict[str, Any]]) -> None:
    """How far each cell is off the budget that most of them share, and which paths it lies on.

    The base of the paths is the deepest cell whose heads have the model's width between them and
    whose rank is nearest to 16.
    """
    spread = {key: max(p[key] for p in points) / min(p[key] for p in points) for key in BUDGETS}
    held = min(BUDGETS, key=lambda key: spread[key])
    target = sorted(p[held] for p in points)[len(points) // 2]
    deepest, dim = max(p["depth"] for p in points), points[0]["dim"]
    square = [p for p in points if p["depth"] == deepest and p["heads"] * p["rank"] == dim]
    base = min(square, key=lambda p: abs(p["rank"] - min(16, dim // 4)), default=None)
    for p in points:
        p["off"] = p[held] / target - 1
        on = []
        if base and p["depth"] == deepest and p["heads"] * p["rank"] == dim:
            on.append("split")
        if base and p["depth"] == deepest and p["rank"] == base["rank"]:
            on.append("widen")
        if (
            base
            and p["rank"] == base["rank"]
            and p["heads"] * p["depth"] == base["heads"] * deepest
        ):
            on.append("trade")
        p["paths"] = ", ".join(on) or None
        widest = p["depth"] == deepest and (p["heads"], p["rank"]) == (1, dim)
        halved = "trade" in on and 2 * p["depth"] == deepest
        p["advice"] = "the rank paper" if widest else "the leaner paper" if halved else None


def headline(points: list[dict[str, Any]]) -> list[str]:
    """For each task: the best cell, what each path does from its first to its last cell, and what
    predicts the loss."""
    lines = []
    for (task,), same in group(points, "task").items():
        known = [p for p in same if p["held_out"] is not None]
        if not known:
            continue
        best = min(known, key=lambda p: p["held_out"])
        lines.append(f"{task}: best {_name(best)}, held-out loss {best['held_out']:.4f}")
        lines += [
            f"{task}, {path}: {_verdict(*ends)}" for path in PATHS if (ends := _ends(known, path))
        ]
        told = [f"{what} {rho}" for what in PREDICTORS if (rho := _predicts(known, what))]
        if told:
            lines.append(
                f"{task}: rank correlation of the loss over {len(known)} cells with "
                + ", ".join(told)
            )
        lines += [f"{task}: {line}" for line in edges(known, "cells")]
    return lines


def _ends(points: list[dict[str, Any]], path: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """A path's cells of fewest and of most heads."""
    along = sorted((p for p in points if path in (p["paths"] or "")), key=lambda p: p["heads"])
    return (along[0], along[-1]) if len(along) > 1 else None


def _goes_with(points: list[dict[str, Any]], what: str) -> Mean:
    there = [p for p in points if p[what] is not None]
    return rank_correlation([p[what] for p in there], [p["held_out"] for p in there])


def _predicts(points: list[dict[str, Any]], what: str) -> str:
    rho = _goes_with(points, what)
    return "" if rho.low is None else f"{rho.mean:+.2f} ({rho.low:+.2f} to {rho.high:+.2f})"


def _name(p: dict[str, Any]) -> str:
    return f"{p['heads']} x {p['rank']} in {plural(p['depth'], 'layer')}"


def _verdict(few: dict[str, Any], many: dict[str, Any]) -> str:
    gap, way = difference(many["values"], few["values"]), f"from {_name(few)} to {_name(many)}"
    if gap.low is None or gap.high is None:
        return f"{way} the loss changes by {signed(gap.mean)} (one seed)"
    told = f"{signed(gap.mean)} ± {signed((gap.high - gap.low) / 2)[1:]}"
    return (
        f"{way} no difference is found ({told})"
        if gap.low <= 0 <= gap.high
        else f"{way} the loss changes by {told}"
    )


# ---- the figure


def figure(points: list[dict[str, Any]]) -> dict[str, Any]:
    """A panel per task and depth: rank across, heads up, loss as colour, the paths as lines."""
    ranks, heads = (sorted({p[key] for p in points}) for key in ("rank", "heads"))
    panels = []
    for (task,), same in group(points, "task").items():
        known = [p["held_out"] for p in same if p["held_out"] is not None]
        for (depth,), here in group(same, "depth").items():
            at = {(p["heads"], p["rank"]): p for p in here}
            z = [[at[h, r]["held_out"] if (h, r) in at else None for r in ranks] for h in heads]
            paths = []
            for colour, path in enumerate(PATHS):
                along = sorted(
                    (p for p in here if path in (p["paths"] or "")), key=lambda p: p["heads"]
                )
                places = {
                    "x": [ranks.index(p["rank"]) for p in along],
                    "y": [heads.index(p["heads"]) for p in along],
                }
                if along:
                    paths.append({"label": path, "colour": colour, **places})
            ends = {"least": min(known, default=None), "most": max(known, default=None)}
            title = f"{task}, {plural(depth, 'layer')}"
            marks = [
                {
                    "label": p["advice"],
                    "symbol": ADVICE[p["advice"]],
                    "x": ranks.index(p["rank"]),
                    "y": heads.index(p["heads"]),
                }
                for p in here
                if p["advice"]
            ]
            panels.append({"title": title, "z": z, "paths": paths, "marks": marks, **ends})
    return {
        "kind": "heat",
        "title": "Held-out loss at one budget",
        "x": [str(r) for r in ranks],
        "y": [str(h) for h in heads],
        "x_label": "rank of a head",
        "y_label": "heads",
        "panels": panels,
        "columns": len({p["depth"] for p in points}),
    }


def over_tasks(points: list[dict[str, Any]]) -> dict[str, Any]:
    """All tasks at a glance: what each way to add heads does to the loss, and what the loss goes
    with."""
    changes, told = [], []
    for (task,), same in group(points, "task").items():
        known = [p for p in same if p["held_out"] is not None]
        losses = [p["held_out"] for p in known]
        whole = (max(losses) - min(losses)) / 100 if len(set(losses)) > 1 else math.nan
        for colour, path in enumerate(PATHS):
            if (ends := _ends(known, path)) and whole > 0:
                few, many = ends
                gap = difference(many["values"], few["values"])
                spread = (
                    {"low": None, "high": None}
                    if gap.low is None or gap.high is None
                    else {"low": gap.low / whole, "high": gap.high / whole}
                )
                label = f"{path}: {_goes(few, many)}"
                changes.append(
                    {
                        "name": task,
                        "label": label,
                        "colour": colour,
                        "mean": gap.mean / whole,
                        **spread,
                    }
                )
        for colour, (what, label) in enumerate(zip(PREDICTORS, PREDICTED, strict=True)):
            rho = _goes_with(known, what)
            if rho.low is not None:
                told.append(
                    {
                        "name": task,
                        "label": label,
                        "colour": colour,
                        "mean": rho.mean,
                        "low": rho.low,
                        "high": rho.high,
                    }
                )
    return {
        "kind": "ranges", "title": "More heads or fewer, at one budget", "columns": 2,
        "panels": [
            {"title": "from few heads to many", "x_label": (
                "change of the held-out loss, % of best to worst cell"
            ), "rows": changes},
            {"title": (
                "what the loss goes with, over all cells"
            ), "x_label": "rank correlation", "rows": told},
        ],
    }  # fmt: skip


def _goes(few: dict[str, Any], many: dict[str, Any]) -> str:
    layers = (
        f"{few['depth']} layers"
        if few["depth"] == many["depth"]
        else f"{few['depth']} to {many['depth']} layers"
    )
    return f"{few['heads']} x {few['rank']} to {many['heads']} x {many['rank']}, {layers}"


VIEWS = {"summary": over_tasks}
