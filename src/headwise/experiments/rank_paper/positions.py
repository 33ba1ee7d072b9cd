"""The rank paper's positional-encoding figure: do positions repair low rank, or do the recipe and
the parameters that come with them?

    headwise run positions                   quick: d=16, N=8, equal arms, 54 models; 2 CPU cores, about 4 minutes
    headwise run positions --preset paper    d=64, N=16, both as published and with equal arms; one GPU, hours

As published, the arms differ in more than positions: none trains 100,000 steps at 0.01, additive
and concatenated 200,000 at 0.005, and concatenated is twice as wide, with four times the query and
key parameters. `equal` gives every arm one recipe and as many parameters: concatenated has a
quarter of the modules and half the feed-forward. `encodings=none,concatenated,room` adds what
positions must be told from: as many more coordinates that are the same at every place. Expected,
paper, `published`, training statistic under `replay`: published/fig3.csv.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headwise.errors import UsageError, nearest
from headwise.experiments.common import (
    Training,
    beside,
    check_lists,
    errors_of,
    plural,
    recipe_of,
    trained,
    whole,
)
from headwise.experiments.common import published as known
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.rows import Row
from headwise.shape import WIDENING, Shape
from headwise.stats import group
from headwise.tasks import Farthest
from headwise.training.run import REPLAYED, Run

QUESTION = "Do positions let heads of low rank find the farthest point?"
FIGURE, ARMS = ("none", "additive", "concatenated"), ("published", "equal")
ENCODINGS = (*FIGURE, "room")  # room: as wide as concatenated, the same at every place
PUBLISHED = (64, 100_000)  # dim and steps; with positions twice as many
COLUMNS = (
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
    ("zero", "predict zero"),
    ("one_place", "times as bad at one place"),
    ("train_best", "paper's statistic"),
    ("published", "published"),
)
PROBED = 256  # sequences

NOTES = {
    "quick": "Additive positions start four times as long as the points they are added to, and at this length the models have not yet "
    "learned to see past them; compare concatenated with none, and before a gain is put down to "
    "places with room, which is as wide "
    "and the same at every place (--set encodings=none,concatenated,room).",
}


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """What the figure varies and what it holds."""

    dim: int
    points: int
    depths: tuple[int, ...]
    width: int
    ranks: tuple[int, ...]
    encodings: tuple[str, ...]
    arms: tuple[
        str, ...
    ]  # published: the paper's recipes and sizes; equal: one recipe and one parameter count
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
        told = (
            "none" in self.encodings
            or {"additive", "concatenated"} <= set(self.encodings)
            or (self.dim, self.steps) == PUBLISHED
        )
        if "published" in self.arms and not told:
            raise UsageError(
                "published arms are told by what they stand beside: encodings must hold none, "
                f"got {self.encodings[0]}"
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
    s, out = settings, {}
    for arm in s.arms:
        for protocol in s.protocols:
            for depth in s.depths:
                for encoding in s.encodings:
                    longer = arm == "published" and encoding != "none"
                    change = {"lr": s.lr / 2, "steps": 2 * s.steps} if longer else {}
                    recipe = recipe_of(s, protocol=protocol, **change)
                    for rank in s.ranks:
                        shape = _shape(s, depth, rank, encoding, arm)
                        for seed in range(s.seeds):
                            run = Run(shape, Farthest(s.dim, s.points), recipe, seed)
                            out[run.id] = run
    return list(out.values())


def probe(run: Run, weights: dict[str, Any]) -> Row:
    """What a trained model makes of places: its error on some sequences, and on the same ones with
    one row of its table at every place, the mean over the rows. Where that is no worse, the table
    is room to work in and says nothing of places."""
    import torch

    if run.shape.positions in ("none", "room"):
        return {}
    model, x, target = trained(run, weights, PROBED)

    def error(rows: Any) -> float:
        model.positions.copy_(rows)
        return run.task.loss(model(x)[0], target).item()

    with torch.no_grad():
        table = model.positions.clone()
        found = {
            "own_places": error(table),
            "one_place": sum(error(row.expand(table.shape)) for row in table) / len(table),
        }
    return found if all(map(math.isfinite, found.values())) else {}


def _arm(row: Row, rows: list[Row]) -> str:
    """Which arm a row belongs to: those without positions to both. Where added and concatenated
    positions are there, it is told by the width: one for both as published, a quarter where arms
    are equal. Else by length, and beside no others by the paper's own recipe."""
    if row["positions"] == "none":
        return "both"
    added, beside = (
        {r["average"] for r in rows if r["positions"] in kinds}
        for kinds in (("additive",), WIDENING)
    )
    one = len({r["steps"] for r in rows if r["positions"] != "none"}) == 1
    if added and beside and (row["positions"] in WIDENING or (one and beside <= added)):
        return "published" if row["average"] in added else "equal"
    paper = PRESETS["paper"]
    longer = row["steps"] > min(r["steps"] for r in rows)
    alone = row["dim"] >= paper.dim and (row["steps"], row["lr"]) == (2 * paper.steps, paper.lr / 2)
    return "published" if longer or alone else "equal"


def _of_the_figure(rows: list[Row]) -> list[Row]:
    """Without positions only what those with them can stand beside: the main figure's rows may be
    given as they are."""
    placed, bare = (
        [r for r in rows if r["positions"] != "none"],
        [r for r in rows if r["positions"] == "none"],
    )
    widths = {r["average"] for r in placed} | {
        4 * r["average"] for r in placed if r["positions"] in WIDENING
    }  # equal arms: a quarter
    depths, width = (
        {r["depth"] for r in placed},
        max((r["average"] for r in bare if r["average"] in widths), default=0),
    )
    return placed + [
        r for r in bare if not placed or (r["depth"] in depths and r["average"] == width)
    ]


def published() -> dict[tuple[int, str, int], float]:
    """The paper's values by (layers, positions, rank), d=64, N=16, width 8: smallest training loss
    of any epoch of any seed."""
    return {
        (int(r["layers"]), r["encoding"], int(r["rank"])): float(r["mse"]) for r in known("fig3")
    }


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """One point per (arms, protocol, layers, positions, rank)."""
    paper, out, rows = published(), [], _of_the_figure(rows)
    told = [{**r, "arms": _arm(r, rows)} for r in rows]
    for (arms, protocol, depth, encoding, rank), same in group(
        told, "arms", "protocol", "depth", "positions", "head_dim"
    ).items():
        first = same[0]
        moved = [
            r["one_place"] / r["own_places"]
            for r in same
            if r["status"] == "done" and r.get("own_places")
        ]
        match = (
            (first["task_dim"], first["task_points"]) == (64, 16)
            and protocol in REPLAYED
            and arms != "equal"
        )
        out.append(
            {
                "arms": arms,
                "protocol": protocol,
                "layers": depth,
                "encoding": encoding,
                "rank": rank,
                "heads": first["num_heads"],
                "dim": first["task_dim"],
                "params": first["params"],
                "steps": first["steps"],
                **errors_of(same),
                "published": paper.get((depth, encoding, rank)) if match else None,
                "one_place": sum(moved) / len(moved) if moved else None,
            }
        )
    return out


def headline(points: list[dict[str, Any]]) -> list[str]:
    """What positions change at the lowest rank."""
    lines = []
    for (protocol, layers), same in group(points, "protocol", "layers").items():
        low = min(p["rank"] for p in same)
        found = [
            f"{p['encoding']}{'' if p['arms'] == 'both' else ' (' + p['arms'] + ' arms)'} "
            f"{p['held_out']:.4f}"
            for p in same if p["rank"] == low and p["held_out"] is not None
        ]  # fmt: skip
        if found:
            lines.append(
                f"{plural(layers, 'layer')}, rank {low}, {protocol}, held out: {', '.join(found)}"
            )
    return lines


def figure(points: list[dict[str, Any]]) -> dict[str, Any]:
    """A panel per protocol, layers and arms, a line per encoding, the published values dashed."""
    dim, panels, ranks, paper = (
        points[0]["dim"],
        [],
        sorted({p["rank"] for p in points}),
        published(),
    )
    shares = [rank / dim for rank in ranks]
    arms = [arm for arm in ARMS if any(p["arms"] == arm for p in points)] or ["both"]
    for (protocol, layers), same in group(points, "protocol", "layers").items():
        for arm in arms:
            lines = []
            for colour, encoding in enumerate(ENCODINGS):
                line = [
                    p
                    for p in same
                    if p["encoding"] == encoding
                    and p["arms"] in (arm, "both")
                    and p["held_out"] is not None
                ]
                if not line:
                    continue
                line = whole(line, ranks)
                theirs = sorted(
                    (rank / dim, value)
                    for (n, kind, rank), value in paper.items()
                    if (n, kind) == (layers, encoding)
                )
                known_here = arm != "equal" and any(p.get("published") is not None for p in line)
                lines += beside(encoding, colour, shares, line, theirs if known_here else [])
            panels.append(
                {"title": f"{plural(layers, 'layer')}, {protocol}, {arm} arms", "lines": lines}
            )
    return {
        "title": (f"Farthest neighbour: error against rank by positions (d={dim})"),
        "x_label": "rank of a head / d",
        "y_label": "squared error",
        "reference": {"label": "predicting zero", "y": 1.0},
        "panels": panels,
        "columns": min(2, len(panels)),
    }
