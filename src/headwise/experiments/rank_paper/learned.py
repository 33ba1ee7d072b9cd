"""The rank paper's learned-weights figure: do heads of full rank learn a large negative multiple of
the identity?

    headwise run learned                     quick: d=16, N=8, 1, 4 and 8 heads of full rank, 9
                                             models; 2 CPU cores, about 1 minute
    headwise run learned --preset paper      d=64, N=16, 1, 8 and 64 heads, 30 models, both
                                             protocols; one GPU, minutes

Expected, paper, published form under `replay`, medians over heads: published/fig_perfect.csv
(angles 179.6, 176.3, 168.5 degrees); measured 179.6, 176.1, 169.0, and on fresh data (`stream`)
180.0, 179.3, 178.9, all at the published rate; at rates that suit 8 and 64 heads better they stand
far from -c I. These are runs of the main figure, so a store that has them has this figure
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Self

from headwise.errors import UsageError
from headwise.experiments.base import Experiment
from headwise.experiments.figure_parts import published_line, published_values
from headwise.experiments.points import Errors, errors_of, groups, plural
from headwise.experiments.rank_paper import fig1
from headwise.experiments.rank_paper.more_answers import of_learned
from headwise.rows import Row
from headwise.show.figure import Line, LineFigure, LinePanel
from headwise.stats import group
from headwise.training.run import REPLAYED, Run

if TYPE_CHECKING:
    from headwise.tasks.task import Task

CAPTION = (
    "Solid: the median over the heads of a run, and of that over runs. Band: from the lowest lower "
    "quartile of any run to the highest upper one; single heads lie farther out. Crosses: the "
    "median with the published code's transposed product. Dashed: published."
)


@dataclass(frozen=True, kw_only=True)
class Settings(fig1.Settings):
    """The main figure's settings, of its own task alone."""

    def with_tasks(self, tasks: Sequence[str | Task]) -> Self:
        """Refused: -c I is the answer for the farthest point alone."""
        raise UsageError("learned is about the farthest point alone; own tasks go with fig1")


PRESETS = {
    "quick": Settings(
        dim=16,
        points=8,
        ffn_dim=64,
        depths=(1,),
        widths=(1, 4, 8),
        ranks=(16,),
        seeds=3,
        steps=3500,
        batch=32,
        lr=(0.05,),
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
        depths=(1,),
        widths=(1, 8, 64),
        ranks=(64,),
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
    """The main figure's runs with one layer and heads of full rank."""
    if settings.ranks != (settings.dim,) or len(settings.depths) > 1:
        ranks = ", ".join(map(str, settings.ranks))
        depths = ", ".join(map(str, settings.depths))
        raise UsageError(
            f"heads of full rank at one depth: ranks must be dim, {settings.dim}, got ranks "
            f"{ranks} and depths {depths}"
        )
    if len(settings.rates) > 1:
        raise UsageError(
            "weights are compared at one learning rate: rates must be one, got "
            f"{', '.join(map(str, settings.rates))}"
        )
    return fig1.runs(settings)


@dataclass(frozen=True, kw_only=True)
class Point(Errors):
    """One number of heads: angles of the score matrices to the identity, in degrees, and their
    norms over sqrt(d)."""

    protocol: str
    heads: int
    dim: int
    angle: float | None
    norm: float | None
    angle_low: float | None
    angle_high: float | None
    angle_published_form: float | None
    norm_published_form: float | None
    published_angle: float | None
    published_norm: float | None


def _median(rows: list[Row], key: str) -> float | None:
    """Over the runs, of each run's median over the heads of its first layer."""
    values = [r[key][0][2] for r in rows if r.get(key)]
    return median(values) if values else None


def summary(rows: list[Row]) -> list[Point]:
    """One point per (protocol, heads): the medians in both forms, the published ones. The main
    figure's rows may be given as they are."""
    # Of the main figure's rows those with the fewest layers and full rank belong here.
    least = min((r["depth"] for r in rows), default=1)
    full = [r for r in rows if (r["depth"], r["head_dim"]) == (least, r["dim"])]
    found = group(full, "protocol", "num_heads")
    return [_point(same, protocol, heads) for (protocol, heads), same in found.items()]


def _point(rows: list[Row], protocol: str, heads: int) -> Point:
    first = rows[0]
    # The published medians stand only beside runs of their own size and data.
    as_published = (first["dim"], first["task_points"]) == (64, 16) and protocol in REPLAYED
    paper = {
        (int(r["num_heads"]), r["quantity"]): float(r["median"])
        for r in published_values("fig_perfect")
        if as_published
    }
    # A row holds five quantiles per layer: least, quartile, median, quartile, largest.
    quartiles = [r["score_angle"][0] for r in rows if r.get("score_angle")]
    return Point(
        protocol=protocol,
        heads=heads,
        dim=first["dim"],
        angle=_median(rows, "score_angle"),
        norm=_median(rows, "score_norm"),
        angle_low=min((q[1] for q in quartiles), default=None),
        angle_high=max((q[3] for q in quartiles), default=None),
        angle_published_form=_median(rows, "score_angle_transposed"),
        norm_published_form=_median(rows, "score_norm_transposed"),
        published_angle=paper.get((heads, "angle_deg")),
        published_norm=paper.get((heads, "norm")),
        **errors_of(rows),
    )


def headline(points: Sequence[Point]) -> list[str]:
    """How near to -c I, and how large c."""
    lines = []
    for p in points:
        if p.angle is not None:
            lines.append(
                f"{plural(p.heads, 'head')}, {p.protocol}: median angle to the identity "
                f"{p.angle:.2f} degrees (180 is -c I), norm over sqrt(d) {p.norm:.4g}, held out "
                f"{p.error}"
            )
        elif p.n:
            lines.append(
                f"{p.heads} heads, {p.protocol}: no angles in these rows; a version made "
                "them that did not measure any"
            )
    return lines


def _left_to_opposite(angle: float | None) -> float | None:
    """Degrees from -c I, which has an angle of 180 to the identity."""
    return None if angle is None else 180 - angle


def figure(points: Sequence[Point]) -> LineFigure:
    """A panel per protocol: the angle left to -c I over the number of heads, the published medians
    dashed."""
    panels = []
    for (protocol,), same in groups(points, "protocol").items():
        known = [p for p in same if p.angle is not None]
        heads = [p.heads for p in known]
        # The axis shows 180 degrees less the angle, so the ends of the interval change places.
        ours = Line(
            label="ours",
            colour=0,
            x=heads,
            y=[_left_to_opposite(p.angle) for p in known],
            low=[_left_to_opposite(p.angle_high) for p in known],
            high=[_left_to_opposite(p.angle_low) for p in known],
        )
        form = Line(
            label="ours, published form",
            colour=1,
            style="dots",
            x=heads,
            y=[_left_to_opposite(p.angle_published_form) for p in known],
        )
        paper = [(p.heads, 180 - p.published_angle) for p in known if p.published_angle is not None]
        theirs = [published_line("published", 1, paper)] if paper else []
        panels.append(LinePanel(title=protocol, lines=[ours, form, *theirs]))
    return LineFigure(
        title=(
            "Learned queries and keys: degrees from a negative multiple of the identity "
            f"(d={points[0].dim})"
        ),
        x_label="heads",
        y_label="degrees from -c I",
        y_scale="linear",
        panels=panels,
        columns=len(panels),
    )


EXPERIMENT: Experiment[Settings, Point] = Experiment(
    name="learned",
    question="What does a head of full rank learn in order to find the farthest point?",
    about="what full-rank heads learn: the angle of their scores to -c I",
    presets=PRESETS,
    columns=(
        ("protocol", "data"),
        ("heads", "heads"),
        ("held_out", "held-out error"),
        ("n", "n"),
        ("diverged", "diverged"),
        ("angle", "median angle, degrees"),
        ("norm", "median norm"),
        ("angle_published_form", "angle, published form"),
        ("norm_published_form", "norm, published form"),
        ("published_angle", "published angle"),
        ("published_norm", "published norm"),
    ),
    main_columns=("heads", "angle", "held_out", "norm", "published_angle", "protocol"),
    runs=runs,
    summary=summary,
    headline=headline,
    answer=of_learned,
    figure=figure,
    caption=CAPTION,
    meanings=fig1.EXPERIMENT.meanings,
)
