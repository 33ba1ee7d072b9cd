"""The rank paper's positional-encoding figure: do positions repair low rank, or do the recipe and
the parameters that come with them?

    headwise run positions                   quick: d=16, N=8, equal arms, 54 models; 2 CPU cores,
                                             about 4 minutes
    headwise run positions --preset paper    d=64, N=16, both as published and with equal arms;
                                             one GPU, hours

As published, the arms differ in more than positions: none trains 100,000 steps at 0.01, additive
and concatenated 200,000 at 0.005, and concatenated is twice as wide, with four times the query and
key parameters. `equal` gives every arm one recipe and as many parameters: concatenated has a
quarter of the modules and half the feed-forward. `encodings=none,concatenated,room` adds what
positions must be told apart from: as many more coordinates that are the same at every place.
Expected, paper, `published`, training statistic under `replay`: published/fig3.csv.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwise.errors import UsageError, nearest
from headwise.experiments.base import Experiment
from headwise.experiments.figure_parts import lines_beside, published_values
from headwise.experiments.points import Errors, errors_of, groups, plural
from headwise.experiments.probes import trained_model
from headwise.experiments.rank_paper.more_answers import of_positions
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.experiments.settings import Training, check_lists
from headwise.rows import Row
from headwise.shape import WIDENING, Shape
from headwise.show.figure import LineFigure, LinePanel, Reference
from headwise.stats import group
from headwise.training.run import REPLAYED, Run

ARMS = ("published", "equal")
FIGURE = ("none", "additive", "concatenated")
ENCODINGS = (*FIGURE, "room")  # room: as wide as concatenated, the same at every place
PUBLISHED = (64, 100_000)  # dim and steps; with positions twice as many
SEQUENCES = 256  # of the probe


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """What the figure varies and what it holds."""

    dim: int
    points: int
    depths: tuple[int, ...]
    width: int
    ranks: tuple[int, ...]
    encodings: tuple[str, ...]
    # published: the paper's recipes and sizes; equal: one recipe and one parameter count
    arms: tuple[str, ...]
    lr: float

    def __post_init__(self) -> None:
        check_lists(self, ("depths", "ranks"), ("protocols", "encodings", "arms"))
        for name, choices in (("encodings", ENCODINGS), ("arms", ARMS)):
            for value in getattr(self, name):
                if value not in choices:
                    raise UsageError(f"unknown {name} {value!r}; {nearest(value, choices)}")
        if "equal" in self.arms and set(WIDENING) & set(self.encodings) and self.width % 4:
            raise UsageError(
                "equal arms with concatenated positions or room need a width in fours, got "
                f"{self.width}"
            )
        # Rows do not say which arm they belong to; `_arm` finds out from the rows beside them, if
        # it can.
        told_apart = (
            "none" in self.encodings
            or {"additive", "concatenated"} <= set(self.encodings)
            or (self.dim, self.steps) == PUBLISHED
        )
        if "published" in self.arms and not told_apart:
            raise UsageError(
                "published arms are told apart by what they stand beside: encodings must hold "
                f"none, got {self.encodings[0]}"
            )


PRESETS = {
    "quick": Settings(
        dim=16,
        points=8,
        ffn_dim=64,
        depths=(1,),
        width=4,
        ranks=(16, 4, 1),
        encodings=FIGURE,
        arms=("equal",),
        seeds=3,
        steps=3000,
        batch=32,
        lr=0.008,
        warmup=0.3,
        schedule="cosine",
        protocols=("replay", "stream"),
        held_out=2048,
        evals=5,
    ),
    "paper": Settings(
        dim=PUBLISHED[0],
        points=16,
        ffn_dim=2048,
        depths=(1, 3),
        width=8,
        ranks=(64, 32, 16, 8, 4, 2, 1),
        encodings=FIGURE,
        arms=ARMS,
        seeds=5,
        steps=PUBLISHED[1],
        batch=256,
        lr=0.01,
        warmup=0.05,
        schedule="published",
        protocols=("replay", "stream"),
        precision="fp16",
    ),
}


def _shape(s: Settings, depth: int, rank: int, encoding: str, arm: str) -> Shape:
    # Concatenated positions double the width D, and modules cost D^2: a quarter of them and half
    # the feed-forward have the parameters of the others.
    wide = encoding in WIDENING
    smaller = wide and arm == "equal"
    return paper_shape(
        dim=s.dim,
        depth=depth,
        rank=rank,
        width=s.width // 4 if smaller else s.width,
        ffn_dim=s.ffn_dim // 2 if smaller else s.ffn_dim,
        positions=encoding,
        points=s.points,
        position_dim=s.dim,
    )


def runs(settings: Settings) -> list[Run]:
    """Every model of the figure, seeds innermost; an arm that is the same both ways is there
    once."""
    from headwise.tasks import Farthest

    s, out = settings, {}
    task = Farthest(s.dim, s.points)
    for arm in s.arms:
        for protocol in s.protocols:
            for depth in s.depths:
                for encoding in s.encodings:
                    # The paper trains models with positions twice as long at half the rate.
                    longer = arm == "published" and encoding != "none"
                    changes = {"lr": s.lr / 2, "steps": 2 * s.steps} if longer else {}
                    for rank in s.ranks:
                        shape = _shape(s, depth, rank, encoding, arm)
                        for seed in range(s.seeds):
                            run = s.run(shape, task, seed, protocol=protocol, **changes)
                            out[run.id] = run
    return list(out.values())


def probe(run: Run, weights: dict[str, Any]) -> Row:
    """What a trained model makes of places: its error on some sequences, and on the same ones with
    one row of its table at every place, the mean over the rows. Where that is no worse, the table
    is room to work in and says nothing of places."""
    import torch

    # Only a table that differs from place to place can be taken away.
    if run.model is not None or run.shape.positions in ("none", "room"):
        return {}
    model, x, target = trained_model(run, weights, SEQUENCES)

    def error(rows: Any) -> float:
        model.positions.copy_(rows)
        return run.task.loss(model(x)[0], target).item()

    with torch.no_grad():
        # One row everywhere keeps what the table adds and removes what it says of the place.
        table = model.positions.clone()
        found = {
            "own_places": error(table),
            "one_place": sum(error(row.expand(table.shape)) for row in table) / len(table),
        }
    return found if all(map(math.isfinite, found.values())) else {}


# ---- points


@dataclass(frozen=True, kw_only=True)
class Point(Errors):
    """One arm, number of layers, kind of positions and rank."""

    arms: str
    protocol: str
    layers: int
    encoding: str
    rank: int
    heads: int
    dim: int
    params: int
    steps: int
    published: float | None
    one_place: float | None  # how many times as bad with one row of the table at every place


def _arm(row: Row, rows: list[Row]) -> str:
    """Which arm a row belongs to: those without positions to both.

    Where added and concatenated positions are there, the width tells: one for both as published, a
    quarter where arms are equal. Else the length does, and beside no others the paper's own recipe.
    """
    if row["positions"] == "none":
        return "both"
    # The number of averaged modules (`average`) and of steps are what the arms differ in.
    added = {r["average"] for r in rows if r["positions"] == "additive"}
    widened = {r["average"] for r in rows if r["positions"] in WIDENING}
    one = len({r["steps"] for r in rows if r["positions"] != "none"}) == 1
    if added and widened and (row["positions"] in WIDENING or (one and widened <= added)):
        return "published" if row["average"] in added else "equal"
    paper = PRESETS["paper"]
    longer = row["steps"] > min(r["steps"] for r in rows)
    alone = row["dim"] >= paper.dim and (row["steps"], row["lr"]) == (2 * paper.steps, paper.lr / 2)
    return "published" if longer or alone else "equal"


def _of_the_figure(rows: list[Row]) -> list[Row]:
    """Without positions only what those with them can stand beside: the main figure's rows may be
    given as they are."""
    placed = [r for r in rows if r["positions"] != "none"]
    bare = [r for r in rows if r["positions"] == "none"]
    if not placed:
        return bare
    # A model without positions stands beside those with as many modules, or four times as many as
    # an equal arm's concatenated ones.
    widths = {r["average"] for r in placed}
    widths |= {4 * r["average"] for r in placed if r["positions"] in WIDENING}  # a quarter, equal
    depths = {r["depth"] for r in placed}
    width = max((r["average"] for r in bare if r["average"] in widths), default=0)
    return placed + [r for r in bare if r["depth"] in depths and r["average"] == width]


def published_errors() -> dict[tuple[int, str, int], float]:
    """The paper's values by (layers, positions, rank), d=64, N=16, width 8: smallest training loss
    of any epoch of any seed."""
    return {
        (int(r["layers"]), r["encoding"], int(r["rank"])): float(r["mse"])
        for r in published_values("fig3")
    }


def summary(rows: list[Row]) -> list[Point]:
    """One point per (arms, protocol, layers, positions, rank)."""
    shown = _of_the_figure(rows)
    by_arm = [{**row, "arms": _arm(row, shown)} for row in shown]
    places = group(by_arm, "arms", "protocol", "depth", "positions", "head_dim")
    paper = published_errors()
    return [_point(same, paper) for same in places.values()]


def _point(rows: list[Row], paper: dict[tuple[int, str, int], float]) -> Point:
    first = rows[0]
    # The paper's own arms at its sizes have a published value beside them.
    place = (first["depth"], first["positions"], first["head_dim"])
    as_published = (
        (first["task_dim"], first["task_points"]) == (64, 16)
        and first["protocol"] in REPLAYED
        and first["arms"] != "equal"
    )
    # How many times as bad a model is without its places, run by run.
    moved = [
        r["one_place"] / r["own_places"]
        for r in rows
        if r["status"] == "done" and r.get("own_places")
    ]
    return Point(
        arms=first["arms"],
        protocol=first["protocol"],
        layers=first["depth"],
        encoding=first["positions"],
        rank=first["head_dim"],
        heads=first["num_heads"],
        dim=first["task_dim"],
        params=first["params"],
        steps=first["steps"],
        published=paper.get(place) if as_published else None,
        one_place=sum(moved) / len(moved) if moved else None,
        **errors_of(rows),
    )


def headline(points: Sequence[Point]) -> list[str]:
    """What positions change at the lowest rank."""
    lines = []
    for (protocol, layers), same in groups(points, "protocol", "layers").items():
        low = min(p.rank for p in same)
        found = [
            f"{p.encoding}{'' if p.arms == 'both' else f' ({p.arms} arms)'} {p.cell('held_out')}"
            for p in same
            if p.rank == low and p.held_out is not None
        ]
        if found:
            lines.append(
                f"{plural(layers, 'layer')}, rank {low}, {protocol}, held out: {', '.join(found)}"
            )
    return lines


def figure(points: Sequence[Point]) -> LineFigure:
    """A panel per protocol, layers and arms, a line per encoding, the published values dashed."""
    panels = []
    arms = [arm for arm in ARMS if any(p.arms == arm for p in points)] or ["both"]
    ranks = sorted({p.rank for p in points})
    for (protocol, layers), same in groups(points, "protocol", "layers").items():
        for arm in arms:
            of_arm = [p for p in same if p.arms in (arm, "both") and p.held_out is not None]
            title = f"{plural(layers, 'layer')}, {protocol}, {arm} arms"
            lines = [
                line
                for colour, encoding in enumerate(ENCODINGS)
                for line in _lines(of_arm, encoding, colour, arm, ranks)
            ]
            panels.append(LinePanel(title=title, lines=lines))
    return LineFigure(
        title=f"Farthest neighbour: error against rank by positions (d={points[0].dim})",
        x_label="rank of a head / d",
        y_label="squared error",
        reference=Reference(label="predicting zero", y=1.0),
        panels=panels,
        columns=min(2, len(panels)),
    )


def _lines(
    points: list[Point], encoding: str, colour: int, arm: str, ranks: list[int]
) -> list[Any]:
    """One encoding's lines in one panel."""
    line = {p.rank: p for p in points if p.encoding == encoding}
    if not line:
        return []
    first = next(iter(line.values()))
    theirs = []
    if arm != "equal" and any(p.published is not None for p in line.values()):
        theirs = sorted(
            (rank / first.dim, error)
            for (layers, kind, rank), error in published_errors().items()
            if (layers, kind) == (first.layers, encoding)
        )
    shares = [rank / first.dim for rank in ranks]
    return lines_beside(encoding, colour, shares, [line.get(rank) for rank in ranks], theirs)


EXPERIMENT: Experiment[Settings, Point] = Experiment(
    name="positions",
    question="Do positions let heads of low rank find the farthest point?",
    about="error against rank, without positions and with each kind",
    presets=PRESETS,
    columns=(
        ("arms", "arms"),
        ("protocol", "data"),
        ("layers", "layers"),
        ("encoding", "positions"),
        ("rank", "rank"),
        ("heads", "heads"),
        ("params", "parameters"),
        ("steps", "steps"),
        ("held_out", "held-out error"),
        ("n", "n"),
        ("diverged", "diverged"),
        ("zero", "runs at zero"),
        ("one_place", "times as bad at one place"),
        ("train_best", "paper's statistic"),
        ("published", "published"),
    ),
    main_columns=("rank", "held_out", "encoding", "layers", "heads", "arms", "protocol"),
    runs=runs,
    summary=summary,
    headline=headline,
    answer=of_positions,
    figure=figure,
    probe=probe,
    notes={
        "quick": (
            "Additive positions start four times as long as the points they are added to, and at "
            "this length the models have not yet learned to see past them; compare concatenated "
            "with none, and before a gain is put down to places with room, which is as wide and "
            "the same at every place (--set encodings=none,concatenated,room)."
        )
    },
    meanings={
        "width": "attention modules, averaged",
        "encodings": "none, additive, concatenated, or room (as wide, without places)",
        "arms": "equal: one recipe and budget for all; published: as in the paper",
    },
)
