"""The rank paper's sequence-length figure: does low rank get worse with more points, and is a short
sequence easy at any rank?

    headwise run length                      quick: d=16, N = 4, 8, 16, 54 models, both protocols;
                                             2 CPU cores, about 3 minutes
    headwise run length --preset paper       d=64, N = 4, 16, 64, 256, two layers, d^3, 200,000
                                             steps; one GPU, hours

Expected, paper, training statistic under `replay`: published/figN.csv. Expected on fresh data
(`stream`): N=4 is no longer easy at low rank, because the published numbers are training error on a
replayed set. Quick with 64 points: rank 1 errs by 0.54, 0.72, 0.67 with 4, 16, 64 points, where the
best multiple of the asking point, no attention at all, errs by 0.95, 0.82, 0.69.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwise.experiments.base import Experiment, Note
from headwise.experiments.figure_parts import lines_beside, published_values
from headwise.experiments.points import Errors, errors_of, groups
from headwise.experiments.rank_paper.more_answers import of_length
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.experiments.settings import Training, check_lists
from headwise.rows import Row
from headwise.show.figure import LineFigure, LinePanel, Reference
from headwise.stats import group
from headwise.training.run import REPLAYED, Run

NOTE = Note(
    "Among more points the farthest lies nearer to the opposite of the one that asks, so that an "
    "answer from that point alone, the best multiple of it, without attention, gets better with "
    "their number: compare errors with that one."
)


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """What the figure varies and what it holds."""

    dim: int
    lengths: tuple[int, ...]
    depth: int
    width: int
    ranks: tuple[int, ...]
    lr: float

    def __post_init__(self) -> None:
        check_lists(self, ("lengths", "ranks"), ("protocols",))


PRESETS = {
    "quick": Settings(
        dim=16,
        lengths=(4, 8, 16),
        ffn_dim=64,
        depth=1,
        width=4,
        ranks=(16, 4, 1),
        seeds=3,
        steps=2500,
        batch=32,
        lr=0.03,
        warmup=0.3,
        schedule="cosine",
        protocols=("replay", "stream"),
        held_out=2048,
        evals=5,
    ),
    "paper": Settings(
        dim=64,
        lengths=(4, 16, 64, 256),
        ffn_dim=2048,
        depth=2,
        width=64,
        ranks=(64, 32, 16, 8, 1),
        seeds=5,
        steps=200_000,
        batch=256,
        lr=0.005,
        warmup=0.05,
        schedule="published",
        protocols=("replay", "stream"),
        precision="fp16",
    ),
}


def runs(settings: Settings) -> list[Run]:
    """Every model of the figure, seeds innermost."""
    from headwise.tasks import Farthest

    s, out = settings, []
    for protocol in s.protocols:
        for points in s.lengths:
            for rank in s.ranks:
                shape = paper_shape(
                    dim=s.dim,
                    depth=s.depth,
                    rank=rank,
                    width=s.width,
                    ffn_dim=s.ffn_dim,
                    points=points,
                )
                task = Farthest(s.dim, points)
                out += [s.run(shape, task, seed, protocol=protocol) for seed in range(s.seeds)]
    return out


def published_errors() -> dict[tuple[int, int], float]:
    """The paper's values by (points, rank), two layers at d=64 and width 64: smallest training loss
    of any epoch of any seed."""
    return {
        (int(r["num_points"]), int(r["rank"])): float(r["mse"]) for r in published_values("figN")
    }


@dataclass(frozen=True, kw_only=True)
class Point(Errors):
    """One number of points and rank."""

    protocol: str
    points: int
    rank: int
    heads: int
    dim: int
    params: int
    published: float | None
    alone: float  # the error of the best multiple of the asking point


def summary(rows: list[Row]) -> list[Point]:
    """One point per (protocol, points, rank): held-out mean with interval, what needs no attention,
    the paper's statistic, its value."""
    from headwise.tasks import Farthest

    paper, out = published_errors(), []
    found = group(rows, "protocol", "task_points", "head_dim")
    for (protocol, points, rank), same in found.items():
        first = same[0]
        # The published values are of one size under replay and stand beside no others.
        sizes = (first["dim"], first["depth"], first["average"])
        as_published = sizes == (64, 2, 64) and protocol in REPLAYED
        out.append(
            Point(
                protocol=protocol,
                points=points,
                rank=rank,
                heads=first["num_heads"],
                dim=first["dim"],
                params=first["params"],
                published=paper.get((points, rank)) if as_published else None,
                alone=Farthest(first["task_dim"], points).baselines()["query"],
                **errors_of(same),
            )
        )
    return out


def headline(points: Sequence[Point]) -> list[str]:
    """Lowest rank, shortest and longest sequence, and how far training and held-out error part."""
    lines, least = [], min((p.rank for p in points), default=0)
    for (protocol, rank), same in groups(points, "protocol", "rank").items():
        # A line for the lowest rank alone: there the sequence's length matters most.
        known = sorted((p for p in same if p.held_out is not None), key=lambda p: p.points)
        if len(known) < 2 or rank != least:
            continue
        first, last = known[0], known[-1]
        lines.append(
            f"rank {rank}, {protocol}: held out {first.error} with {first.points} points, "
            f"{last.error} with {last.points}; in training {first.train_best:.4f} and "
            f"{last.train_best:.4f}; from the point alone {first.alone:.4f} and {last.alone:.4f}"
        )
    return lines


def figure(points: Sequence[Point]) -> LineFigure:
    """A panel per protocol, a line per number of points, the published values dashed under
    replay."""
    dim, lengths, panels = points[0].dim, sorted({p.points for p in points}), []
    for (protocol,), same in groups(points, "protocol").items():
        lines = []
        for colour, length in enumerate(lengths):
            line = [p for p in same if p.points == length and p.held_out is not None]
            if not line:
                continue
            shares = [p.rank / dim for p in line]
            theirs = [(p.rank / dim, p.published) for p in line if p.published is not None]
            lines += lines_beside(f"N={length}", colour, shares, line, theirs)
        panels.append(LinePanel(title=protocol, lines=lines))
    return LineFigure(
        title=f"Farthest neighbour: error against rank by number of points (d={dim})",
        x_label="rank of a head / d",
        y_label="squared error",
        reference=Reference(label="predicting zero", y=1.0),
        panels=panels,
        columns=len(panels),
    )


EXPERIMENT: Experiment[Settings, Point] = Experiment(
    name="length",
    question="Does a head of low rank need more help as the sequence grows?",
    about="error against rank, by the number of points",
    presets=PRESETS,
    columns=(
        ("protocol", "data"),
        ("points", "points"),
        ("rank", "rank"),
        ("heads", "heads"),
        ("params", "parameters"),
        ("held_out", "held-out error"),
        ("n", "n"),
        ("diverged", "diverged"),
        ("zero", "runs at zero"),
        ("alone", "from the point alone"),
        ("train_best", "paper's statistic"),
        ("published", "published"),
    ),
    main_columns=("rank", "held_out", "points", "heads", "protocol", "train_best"),
    runs=runs,
    summary=summary,
    headline=headline,
    answer=of_length,
    figure=figure,
    notes={"quick": NOTE, "paper": NOTE},
    meanings={"lengths": "numbers of points", "width": "attention modules, averaged"},
)
