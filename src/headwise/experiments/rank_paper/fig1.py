"""The rank paper's main figure: error against rank at one parameter budget, for several depths.

    headwise run fig1                    quick: d=16, N=8, 48 models; 2 CPU cores, about 2 minutes
    headwise run fig1 --preset paper     d=64, N=16, 630 models of 100,000 steps, both data
                                         protocols; one GPU
    headwise run fig1 --set rates=1,0.3  every point at two learning rates on one seed, at the
                                         better one on the others
    headwise run fig1 my_task.py         your own task in the paper's place

Expected, quick, held out (mean of 3 seeds): one layer, d^2 budget: full rank 0.036, half rank 0.57,
rank 1 0.74; four times the heads repair little of it. Expected, paper, training statistic under
`replay`: published/fig1.csv within 10 % at 42 of its 63 points (`stream`: at 16).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwise.errors import UsageError
from headwise.experiments.base import Experiment
from headwise.experiments.points import (
    Against,
    Errors,
    baseline_of,
    check_one_model,
    errors_of,
    groups,
    labelled,
    plural,
)
from headwise.experiments.rank_paper import fig1_figures
from headwise.experiments.rank_paper.answers import of_fig1
from headwise.experiments.rank_paper.shapes import budget, paper_shape
from headwise.experiments.settings import Training, check_lists, task_name
from headwise.experiments.shapes import shape_for
from headwise.experiments.tuning import edge_line, later_runs, next_round, rows_at_best_rate
from headwise.rows import Row
from headwise.shape import Shape
from headwise.stats import group, told_apart
from headwise.training.run import REPLAYED, Run

if TYPE_CHECKING:
    from typing import Self

    from headwise.tasks.task import Task

OWN_RATES = (1.0, 0.3, 0.1)  # multiples of lr that are tried on a task nobody has tuned yet


# ---- settings


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """What the figure varies and what it holds."""

    dim: int
    points: int
    depths: tuple[int, ...]
    # Attention modules side by side, averaged: the parameter budget is width * dim^2.
    widths: tuple[int, ...]
    ranks: tuple[int, ...]
    # For one layer, two layers and so on, the last for all deeper; one for all ranks and widths.
    lr: tuple[float, ...]
    # Multiples of lr. Several are tried at every point on seed 0, and `seeds` others are trained at
    # the best.
    rates: tuple[float, ...] = (1.0,)
    task: str | Task = "farthest"

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
        if isinstance(self.task, str) and self.task != "farthest":
            raise UsageError(
                f"fig1 is about farthest, or a task from a file of your own, got {self.task!r}; "
                "other built-in tasks go with map, leaner, removable"
            )

    def idle(self) -> dict[str, str]:
        out = {}
        deepest = max(self.depths)
        if len(self.lr) > deepest:
            out["lr"] = (
                f"it is a rate for one layer, one for two and so on, {len(self.lr)} of them for "
                f"depths up to {deepest}; rates tries several"
            )
        if self.task != "farthest":
            out["points"] = f"it goes with farthest, task is {task_name(self.task)}"
        return out

    def with_tasks(self, tasks: Sequence[str | Task]) -> Self:
        """A task of one's own in the paper's place.

        Its rate is not known, so several are tried. Where the paper's encoder fits, the model is as
        wide as the task and the ranks keep their shares of it.
        """
        if len(tasks) != 1:
            names = ", ".join(map(task_name, tasks))
            raise UsageError(f"fig1 takes one task, got {len(tasks)}: {names}")
        task = tasks[0]
        if isinstance(task, str):
            return dataclasses.replace(self, task=task)
        own = dataclasses.replace(self, task=task, rates=OWN_RATES)
        if not fits_papers_encoder(task):
            return dataclasses.replace(own, init="normal")
        ranks = [_divisor(task.in_dim, rank / self.dim) for rank in self.ranks]
        return dataclasses.replace(own, dim=task.in_dim, ranks=tuple(dict.fromkeys(ranks)))

    def made_task(self) -> Task:
        """The task as a value."""
        if not isinstance(self.task, str):
            return self.task
        from headwise.tasks.neighbors import Farthest

        return Farthest(self.dim, self.points)

    def shape(self, task: Task, depth: int, width: int, rank: int) -> Shape:
        """The paper's encoder where the task has vectors in and vectors of that width out. Else a
        pre-norm model with the same attention budget, width * dim^2 query/key parameters per
        layer."""
        if fits_papers_encoder(task):
            return paper_shape(
                dim=self.dim,
                depth=depth,
                rank=rank,
                width=width,
                ffn_dim=self.ffn_dim,
                points=task.tokens,
            )
        if self.dim % rank:
            raise UsageError(f"rank must divide the width {self.dim}, got rank {rank}")
        return shape_for(task, self.dim, depth, width * self.dim // rank, rank, self.ffn_dim)


def _times(lr: float, times: float) -> float:
    """A multiple of a rate, without the last digits that only binary numbers have."""
    return lr if times == 1 else float(f"{lr * times:.6g}")


def _divisor(dim: int, share: float) -> int:
    """The largest rank that divides a width and is at most this share of it."""
    return max(
        rank for rank in range(1, dim + 1) if dim % rank == 0 and rank <= max(1, dim * share)
    )


def fits_papers_encoder(task: Task) -> bool:
    """Whether inputs are vectors and answers vectors of their width, by squared error."""
    return task.squared and 1 < task.in_dim == task.answer_dim and not task.causal


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


# ---- runs


def runs(settings: Settings) -> list[Run]:
    """Every model of the figure, seeds innermost. Where several rates are tried: seed 0 at each."""
    s, task = settings, settings.made_task()
    seeds = range(s.seeds if len(s.rates) == 1 else 1)
    out = []
    for protocol in s.protocols:
        for depth in s.depths:
            lr = s.lr[min(depth, len(s.lr)) - 1]
            for width in s.widths:
                for rank in s.ranks:
                    shape = s.shape(task, depth, width, rank)
                    for rate in s.rates:
                        changes = {"lr": _times(lr, rate), "protocol": protocol}
                        out += [s.run(shape, task, seed, **changes) for seed in seeds]
    return out


def then(settings: Settings, rows: list[Row]) -> list[Run]:
    """Where several rates were tried: every point at its best, `seeds` other seeds."""
    if len(settings.rates) == 1:
        return []
    return next_round(runs(settings), rows, settings.seeds)


def later(settings: Settings) -> tuple[int, int]:
    """How many runs that will be."""
    return later_runs(runs(settings), settings.seeds) if len(settings.rates) > 1 else (0, 0)


# ---- points


@dataclass(frozen=True, kw_only=True)
class Point(Errors, Against):
    """One place in the figure."""

    task: str
    protocol: str
    layers: int
    width: int
    budget: str
    rank: int
    heads: int
    dim: int
    params: int
    lr: float
    rates: int  # how many were tried
    edge: bool  # whether the best is the smallest or the largest of three or more
    published: float | None


def summary(rows: list[Row]) -> list[Point]:
    """One point per (protocol, layers, width, rank). Where there are several rates: of the one that
    is best on seed 0, over the other seeds."""
    rows = labelled(rows)
    dims, tasks = ({row[key] for row in rows} for key in ("dim", "task"))
    if len(dims) > 1:
        raise UsageError(
            f"one figure is of one dim, got rows of {' and '.join(map(str, sorted(dims)))}"
        )
    if len(tasks) > 1:
        raise UsageError(f"one figure is of one task, got rows of {' and '.join(sorted(tasks))}")
    places = [{**row, "width": row["num_heads"] * row["head_dim"] // row["dim"]} for row in rows]
    found = group(places, "protocol", "depth", "width", "head_dim")
    return [_point(same, *place) for place, same in found.items()]


def _point(rows: list[Row], protocol: str, layers: int, width: int, rank: int) -> Point:
    best, tried = _at_best_rate(rows)
    first, errors = best[0], errors_of(best)
    as_published = (
        (first["task"], first["dim"], first.get("task_points")) == ("farthest", 64, 16)
        and protocol in REPLAYED
        and first["lr"] == PRESETS["paper"].lr[0]
    )
    paper = fig1_figures.published_errors() if as_published else {}
    return Point(
        task=first["task"],
        protocol=protocol,
        layers=layers,
        width=width,
        budget=budget(width, first["dim"]),
        rank=rank,
        heads=first["num_heads"],
        dim=first["dim"],
        params=first["params"],
        lr=first["lr"],
        rates=len(tried),
        edge=len(tried) > 2 and first["lr"] in (min(tried), max(tried)),
        tuning=len(tried) > 1 and first["seed"] == 0,
        published=paper.get((layers, width, rank)),
        **baseline_of(best),
        **errors,
    )


def _at_best_rate(rows: list[Row]) -> tuple[list[Row], list[float]]:
    """One point's rows that count, and the rates it was tried at."""
    check_one_model(rows, "lr")
    tried = sorted({r["lr"] for r in rows})
    if len(tried) == 1:
        return rows, tried
    tried = sorted({r["lr"] for r in rows if r["seed"] == 0})
    if not tried:
        raise UsageError(
            "runs of one point at several rates need one of seed 0, by which the rate is chosen; "
            "got none"
        )
    return rows_at_best_rate(rows), tried


# ---- the claim in numbers


def headline(points: Sequence[Point]) -> list[str]:
    """Full against half rank at each depth and budget, held out."""
    lines = []
    # What was trained and evaluated on fresh data comes first.
    found = groups(points, "protocol", "layers", "width").items()
    for _, same in sorted(found, key=lambda item: (item[0][0] != "stream", item[0])):
        by_rank = {p.rank: p for p in same}
        dim = same[0].dim
        full, half = by_rank.get(dim), by_rank.get(dim // 2) if dim % 2 == 0 else None
        if full and half and full.held_out and half.held_out:
            place = f"{plural(full.layers, 'layer')}, budget {full.budget}, {full.protocol}"
            lines.append(f"{place}: {_full_against_half(full, half)}")
    if tried := [p for p in points if p.rates > 1]:
        lines += _tuning(tried, len(points))
    if any(p.protocol == "original" and p.n > 1 for p in points):
        lines.append(
            "original data: seeds next to each other share six of seven batches, so that "
            "intervals over seeds are too narrow"
        )
    return lines


def _full_against_half(full: Point, half: Point) -> str:
    assert full.held_out
    assert half.held_out
    failed = full.zero + half.zero
    verdict = f"{half.held_out / full.held_out:.1f} times as large"
    if not (full.one_seed or half.one_seed or told_apart(half.values, full.values)):
        verdict += ", but not told apart"
    if full.rates != half.rates:
        verdict += f", tuned over {plural(full.rates, 'rate')} and {half.rates}"
    if failed:
        verdict = f"{failed} runs only predict zero, so this compares nothing"
    return f"full rank {full.error}, half rank {half.error}, {verdict}"


def _tuning(tried: list[Point], of: int) -> list[str]:
    """How the points that were tried at several rates came to theirs."""
    alone, many = sum(p.tuning for p in tried), [p for p in tried if p.rates > 2]
    line = (
        f"{len(tried)} of {of} points were tried at several learning rates on seed 0, and the "
        "best one there is evaluated on other seeds"
    )
    if alone:
        line += f"; {alone} have no others and show that one"
    return [
        line,
        *edge_line(sum(p.edge for p in many), len(many), "points with three rates or more"),
    ]


EXPERIMENT: Experiment[Settings, Point] = Experiment(
    name="fig1",
    question=(
        "At a fixed number of parameters, should attention have many heads of low rank or one head "
        "of full rank?"
    ),
    about="the rank paper's main figure: error against rank at one budget",
    presets=PRESETS,
    columns=(
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
        ("zero", "runs at zero"),
        ("train_best", "paper's statistic"),
        ("published", "published"),
    ),
    main_columns=(
        "rank",
        "held_out",
        "layers",
        "budget",
        "heads",
        "params",
        "protocol",
        "train_best",
        "n",
    ),
    runs=runs,
    then=then,
    later=later,
    summary=summary,
    headline=headline,
    answer=of_fig1,
    figure=fig1_figures.figure,
    views={"depth": fig1_figures.by_rank, "layers": fig1_figures.by_layers},
    notes={
        "quick": (
            "At the preset's 3,500 steps and rates two layers are undertrained, and full rank does "
            "worse with two than with one: there compare ranks within a depth, not depths with "
            "each other."
        )
    },
    meanings={
        "widths": "budgets: so many times dim^2 query/key parameters per layer",
        "lr": "learning rates: for one layer, two layers and so on",
        "rates": "multiples of lr; several are tried on seed 0",
    },
)
