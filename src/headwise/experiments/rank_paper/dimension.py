"""The dimension sweep that the rank paper's code contains and the paper does not show: what does a
head count cost as d grows?

    headwise run dimension                   quick: d = 8, 16, 32, N=8, one layer, 36 models;
                                             2 CPU cores, about 3 minutes
    headwise run dimension --preset paper    d = 16, 64, 128, 256, N=16, two layers, width 8,
                                             200,000 steps; one GPU, hours

Nothing was published for it. Expected, quick, held out: one head a module (of two) 0.046, 0.066,
0.103 at d = 8, 16, 32; two of half the rank 0.41, 0.45, 0.49; eight 0.59, 0.69, 0.74.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwise.errors import UsageError
from headwise.experiments.base import Experiment
from headwise.experiments.figure_parts import error_line
from headwise.experiments.points import Errors, errors_of, groups
from headwise.experiments.rank_paper.answers import of_dimension
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.experiments.settings import Training, check_lists
from headwise.rows import Row
from headwise.show.figure import LineFigure, LinePanel, Reference
from headwise.stats import group
from headwise.training.run import Run

CAPTION = (
    "Error on fresh data that no run has seen, mean over seeds with its 95 % interval, against "
    "the rank of a head over the dimension. Models of one dimension have the same number of "
    "parameters."
)


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """What the sweep varies and what it holds."""

    dims: tuple[int, ...]
    splits: tuple[int, ...]  # heads per module, each of rank dim / split
    points: int
    depth: int
    width: int
    lr: float

    def __post_init__(self) -> None:
        check_lists(self, ("dims", "splits"), ("protocols",))
        for dim in self.dims:
            for split in self.splits:
                if dim % split:
                    raise UsageError(
                        f"splits must divide every dimension, got split {split} and dimension {dim}"
                    )


PRESETS = {
    "quick": Settings(
        dims=(8, 16, 32),
        splits=(1, 2, 4, 8),
        points=8,
        ffn_dim=64,
        depth=1,
        width=2,
        seeds=3,
        steps=2500,
        batch=32,
        lr=0.02,
        warmup=0.3,
        schedule="cosine",
        protocols=("stream",),
        held_out=2048,
        evals=5,
    ),
    "paper": Settings(
        dims=(16, 64, 128, 256),
        splits=(1, 2, 4, 8, 16),
        points=16,
        ffn_dim=2048,
        depth=2,
        width=8,
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
    """Every model of the sweep, seeds innermost."""
    from headwise.tasks import Farthest

    s, out = settings, []
    for protocol in s.protocols:
        for dim in s.dims:
            for split in s.splits:
                # Each module's heads are as wide as the points together, whatever the split, so
                # the number of parameters stays.
                shape = paper_shape(
                    dim=dim,
                    depth=s.depth,
                    rank=dim // split,
                    width=s.width,
                    ffn_dim=s.ffn_dim,
                    points=s.points,
                )
                task = Farthest(dim, s.points)
                out += [s.run(shape, task, seed, protocol=protocol) for seed in range(s.seeds)]
    return out


@dataclass(frozen=True, kw_only=True)
class Point(Errors):
    """One dimension and rank."""

    protocol: str
    dim: int
    rank: int
    split: int
    heads: int
    params: int


def summary(rows: list[Row]) -> list[Point]:
    """One point per (protocol, dimension, rank)."""
    return [
        Point(
            protocol=protocol,
            dim=dim,
            rank=rank,
            split=dim // rank,
            heads=same[0]["num_heads"],
            params=same[0]["params"],
            **errors_of(same),
        )
        for (protocol, dim, rank), same in group(rows, "protocol", "dim", "head_dim").items()
    ]


def headline(points: Sequence[Point]) -> list[str]:
    """One head against two, by dimension."""
    lines = []
    for (protocol, dim), same in groups(points, "protocol", "dim").items():
        by_split = {p.split: p for p in same if p.held_out}
        one, two = by_split.get(1), by_split.get(2)
        if one and two and one.held_out and two.held_out:
            lines.append(
                f"d={dim}, {protocol}, per module: one head {one.error}, two heads {two.error}, "
                f"{two.held_out / one.held_out:.1f} times as large"
            )
    return lines


def figure(points: Sequence[Point]) -> LineFigure:
    """A panel per protocol, a line per dimension, over the rank's share of it."""
    panels, dims = [], sorted({p.dim for p in points})
    for (protocol,), same in groups(points, "protocol").items():
        lines = []
        for colour, dim in enumerate(dims):
            line = [p for p in same if p.dim == dim and p.held_out is not None]
            shares = [p.rank / dim for p in line]
            if line:
                lines.append(error_line(f"held out, d={dim}", colour, shares, line))
        panels.append(LinePanel(title=protocol, lines=lines))
    return LineFigure(
        title="Farthest neighbour: error against rank by dimension",
        x_label="rank of a head / d",
        y_label="squared error",
        reference=Reference(label="predicting zero", y=1.0),
        panels=panels,
        columns=len(panels),
    )


EXPERIMENT: Experiment[Settings, Point] = Experiment(
    name="dimension",
    question="Does cutting a layer into more heads cost more in higher dimension?",
    about="error against rank, by the dimension of the points",
    presets=PRESETS,
    columns=(
        ("protocol", "data"),
        ("dim", "d"),
        ("split", "heads per module"),
        ("rank", "rank"),
        ("heads", "heads"),
        ("params", "parameters"),
        ("held_out", "held-out error"),
        ("n", "n"),
        ("diverged", "diverged"),
        ("zero", "runs at zero"),
        ("train_best", "paper's statistic"),
    ),
    main_columns=("rank", "held_out", "dim", "split", "heads", "protocol", "params"),
    runs=runs,
    summary=summary,
    headline=headline,
    answer=of_dimension,
    figure=figure,
    caption=CAPTION,
    meanings={
        "dims": "dimensions of the points",
        "splits": "heads per attention module, each of rank dim / split",
        "width": "attention modules, averaged",
    },
)
