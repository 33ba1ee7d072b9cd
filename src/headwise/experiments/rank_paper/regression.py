"""The rank paper's last experiment (ICLR version): linear regression in context, width 48 cut into
1 to 16 heads.

    headwise run regression                    quick: 3 dimensions, 8 pairs, width 16, 3 layers,
                                               12 models; 2 CPU cores, minutes
    headwise run regression --preset paper     20 dimensions, 41 pairs, width 48, 12 layers,
                                               500,000 steps; an H200 GPU, half an hour
    headwise run regression --preset garg      the shapes of Garg et al. (width 64, 128, 256; heads
                                               of 32); one GPU, hours

Expected, paper (published/icl_regression.csv): two heads beat one, and the error grows once the
rank falls below the 20 dimensions of the data. The paper does not say whether its error is divided
by the dimension; ours agree with it if it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headwise.errors import UsageError
from headwise.experiments.base import Experiment
from headwise.experiments.figure_parts import error_line, published_line, published_values
from headwise.experiments.points import Measured, check_one_model, groups, plural
from headwise.experiments.probes import trained_model
from headwise.experiments.rank_paper.more_answers import of_regression
from headwise.experiments.settings import Training, check_lists
from headwise.rows import Row
from headwise.shape import Shape
from headwise.show.figure import Line, LineFigure, LinePanel, Reference
from headwise.stats import group, mean, told_apart
from headwise.training.run import Run

if TYPE_CHECKING:
    from headwise.tasks import Regression

PROMPTS = 512  # of the probe
# Up to so many seeds are drawn one by one: some learn and some do not, and a mean is neither.
FEW = 5
CAPTION = (
    "Held-out squared error divided by the data's dimension, so that predicting zero scores 1. "
    "After k pairs least squares errs by 1 - k/d, and by nothing once k reaches d. Published "
    "values are divided too: it is not said whether they already were, but at the published length "
    "ours are of their size before the division."
)


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """What the experiment varies and what it holds."""

    dim: int
    points: int
    shapes: tuple[str, ...]  # width x layers x heads
    lr: float
    beta2: float
    curriculum: int  # steps per stage; 0: none
    first_dim: int = 5
    first_points: int = 11
    ffn_dim: int = 0  # four times the width where 0

    def __post_init__(self) -> None:
        check_lists(self, (), ("shapes", "protocols"))
        if len({_sizes(word) for word in self.shapes}) < len(self.shapes):
            raise UsageError(f"shapes must differ from each other, got {', '.join(self.shapes)}")


def _sizes(word: str) -> tuple[int, int, int]:
    parts = word.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"shapes are width x layers x heads like 48x12x2, got {word!r}")
    width, depth, heads = map(int, parts)
    if width % heads:
        raise UsageError(
            f"heads must divide the width, got {heads} heads and width {width} in {word!r}"
        )
    return width, depth, heads


PRESETS = {
    "quick": Settings(
        dim=3,
        points=8,
        shapes=("16x3x1", "16x3x2", "16x3x4", "16x3x8"),
        seeds=3,
        steps=5000,
        batch=64,
        lr=0.003,
        beta2=0.999,
        warmup=0.1,
        schedule="cosine",
        curriculum=0,
        protocols=("stream",),
        init="normal",
        held_out=2048,
        evals=5,
    ),
    "paper": Settings(
        dim=20,
        points=41,
        shapes=("48x12x1", "48x12x2", "48x12x4", "48x12x8", "48x12x16"),
        seeds=3,
        steps=500_000,
        batch=64,
        lr=1e-4,
        beta2=0.999,
        warmup=0.0,
        schedule="constant",
        curriculum=2000,
        protocols=("stream",),
        init="normal",
        precision="fp16",
        epoch=1000,
    ),
    "garg": Settings(
        dim=20,
        points=41,
        shapes=("64x3x2", "128x6x4", "256x12x8"),
        seeds=3,
        steps=500_000,
        batch=64,
        lr=1e-4,
        beta2=0.999,
        warmup=0.0,
        schedule="constant",
        curriculum=2000,
        protocols=("stream",),
        init="normal",
        precision="tf32",
        epoch=1000,
    ),
}


def decoder(width: int, depth: int, heads: int, task: Regression, ffn_dim: int = 0) -> Shape:
    """The decoder of Garg et al.: GPT-2's blocks, vectors read in and one number read out."""
    return Shape(
        dim=width,
        depth=depth,
        num_heads=heads,
        ffn_dim=ffn_dim or 4 * width,
        activation="gelu",
        norm="layer",
        norm_at="pre",
        causal=True,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        positions="additive",
        num_positions=task.tokens,
        input_dim=task.dim,
        output_dim=1,
    )


def runs(settings: Settings) -> list[Run]:
    """Every model, seeds innermost."""
    from headwise.tasks import Regression

    s, out = settings, []
    # A small task has no room for the paper's first stage, so the stage is cut to the task.
    first = (min(s.first_dim, s.dim), min(s.first_points, s.points))
    task = Regression(s.dim, s.points, s.curriculum, *first)
    for protocol in s.protocols:
        for word in s.shapes:
            shape = decoder(*_sizes(word), task, s.ffn_dim)
            out += [s.run(shape, task, seed, protocol=protocol) for seed in range(s.seeds)]
    return out


def probe(run: Run, weights: dict[str, Any]) -> Row:
    """What a trained model makes of each coordinate: the slopes of its last answer in the products
    w_j x_j that the right answer is the sum of, fitted to some prompts. 1 where a coordinate counts
    as it should, 0 where it is ignored."""
    import torch

    from headwise.tasks import Regression

    assert isinstance(run.task, Regression)
    # The last query has all pairs before it. Its right answer is the sum of w_j x_j.
    pairs = run.task.points - 1
    if run.model is not None or pairs < run.task.dim:
        return {}  # with fewer pairs w does not follow from them
    # The model's answers at the last x, whose token stands before its y.
    model, inputs, targets = trained_model(run, weights, PROMPTS)
    with torch.no_grad():
        answers = torch.cat([model(some)[0][:, -2, 0] for some in inputs.split(64)]).double()
    x_BPD, y_BP = inputs[:, ::2].double(), targets[..., 0].double()
    # w follows from the pairs. The slope of the answers in w_j x_j is how much coordinate j counts.
    w_BD = torch.linalg.lstsq(x_BPD[:, :pairs], y_BP[:, :pairs, None]).solution[..., 0]
    slopes = torch.linalg.lstsq(w_BD * x_BPD[:, -1], answers[:, None]).solution[:, 0]
    if not slopes.isfinite().all():
        return {}
    return {"slopes": [round(slope, 4) for slope in slopes.tolist()]}


# ---- points


@dataclass(frozen=True, kw_only=True)
class Point(Measured):
    """One shape: the error after all pairs, and by number of pairs, divided by the dimension."""

    protocol: str
    width: int
    depth: int
    heads: int
    rank: int
    params: int
    task_dim: int
    task_points: int
    average: float | None  # over the prompt
    squared: float | None  # after all pairs, not divided
    profile: list[float]
    profile_low: list[float | None]
    profile_high: list[float | None]
    profiles: list[list[float]]  # by seed
    published: float | None
    used: float | None  # coordinates that count as they should


def summary(rows: list[Row]) -> list[Point]:
    """One point per shape, with intervals over seeds."""
    keys = ("protocol", "dim", "depth", "num_heads", "task_dim", "task_points")
    return [_point(same) for same in group(rows, *keys).values()]


def _point(rows: list[Row]) -> Point:
    check_one_model(rows)
    first = rows[0]
    done = sorted((r for r in rows if r["status"] == "done"), key=lambda r: r["seed"])
    # All errors are divided by d, so that predicting zero scores 1 in every dimension.
    d, count = first["task_dim"], first["task_points"]
    profiles = [[error / d for error in r["held_out_profile"]] for r in done]
    profile = [mean([p[k] for p in profiles]) for k in range(count)] if done else []
    last = profile[-1] if profile else None
    paper = {int(r["num_heads"]): float(r["mse"]) for r in published_values("icl_regression")}
    as_published = (d, count, first["dim"], first["depth"]) == (20, 41, 48, 12)
    # A coordinate is used where its slope is above one half.
    used = [sum(slope > 0.5 for slope in r["slopes"]) for r in done if "slopes" in r]
    return Point(
        protocol=first["protocol"],
        width=first["dim"],
        depth=first["depth"],
        heads=first["num_heads"],
        rank=first["head_dim"],
        params=first["params"],
        task_dim=d,
        task_points=count,
        n=len(done),
        diverged=len(rows) - len(done),
        held_out=last.mean if last else None,
        low=last.low if last else None,
        high=last.high if last else None,
        average=mean([r["held_out"] / d for r in done]).mean if done else None,
        squared=last.mean * d if last else None,
        profile=[m.mean for m in profile],
        profile_low=[m.low for m in profile],
        profile_high=[m.high for m in profile],
        profiles=profiles,
        published=paper.get(first["num_heads"]) if as_published else None,
        used=sum(used) / len(used) if used else None,
    )


# ---- words and figures


def _place(p: Point, points: Sequence[Point]) -> str:
    """A point's width and depth, and its protocol where there are several."""
    place = f"width {p.width}, {plural(p.depth, 'layer')}"
    several = len({q.protocol for q in points}) > 1
    return f"{place}, {p.protocol}" if several else place


def _against_best(p: Point, best: Point, comparisons: int) -> str:
    """How much worse than the best; or that the seeds do not tell, or that there is but one."""
    assert p.held_out is not None
    assert best.held_out is not None
    doubt = ""
    if p.one_seed or best.one_seed:
        doubt = ", by one seed"
    elif not told_apart(_last(p), _last(best), comparisons):
        doubt = ", not told apart"
    return f"{plural(p.heads, 'head')} {p.held_out / best.held_out:.1f} times{doubt}"


def _last(p: Point) -> list[float]:
    """The errors after all pairs, by seed."""
    return [profile[-1] for profile in p.profiles]


def headline(points: Sequence[Point]) -> list[str]:
    """The best number of heads of each width and depth, and what the others lose."""
    lines = []
    for same in groups(points, "protocol", "width", "depth").values():
        known = [p for p in same if p.held_out is not None]
        if not known:
            continue
        best = min(known, key=lambda p: p.held_out or 0.0)
        rest = [p for p in known if p is not best]
        apart = [p for p in rest if told_apart(_last(p), _last(best), len(rest))]
        claim = (
            f"{_place(best, points)}: {'' if apart or not rest else 'no best; '}"
            f"{plural(best.heads, 'head')} of rank {best.rank}, error {best.error}"
        )
        others = [_against_best(p, best, len(rest)) for p in rest]
        lines.append("; ".join([claim, *others]))
    return lines


def figure(points: Sequence[Point]) -> LineFigure:
    """Error after all pairs against the rank of a head, a line per width and depth."""
    lines: list[Line] = []
    known = [p for p in points if p.held_out is not None]
    for colour, same in enumerate(groups(known, "protocol", "width", "depth").values()):
        place = _place(same[0], points)
        lines.append(error_line(place, colour, [p.rank for p in same], same))
        # Runs of one shape fall in two groups, those that learn and those that do not, so single
        # seeds are drawn too.
        singles = [
            (p.rank, profile[-1]) for p in same if len(p.profiles) > 1 for profile in p.profiles
        ]
        if singles:
            lines.append(
                Line(
                    label=f"single seeds, {place}",
                    colour=colour,
                    style="dots",
                    x=[x for x, _ in singles],
                    y=[y for _, y in singles],
                )
            )
        paper = [(p.rank, p.published / p.task_dim) for p in same if p.published is not None]
        if paper:
            lines.append(published_line("published, divided by d", colour, paper))
    return _described(points, lines, "rank of a head", "log")


def by_examples(points: Sequence[Point]) -> LineFigure:
    """Error against the number of pairs seen, a line per shape and seed (of many seeds their mean
    and its interval), and least squares."""
    lines: list[Line] = []
    several = len({(p.protocol, p.width, p.depth) for p in points}) > 1
    for colour, p in enumerate(p for p in points if p.held_out is not None):
        label = f"{plural(p.heads, 'head')} of rank {p.rank}"
        if several:
            label += f", {_place(p, points)}"
        pairs = range(len(p.profile))
        if len(p.profiles) <= FEW:
            lines += [
                Line(label=label, colour=colour, style="line", x=pairs, y=one) for one in p.profiles
            ]
        else:
            low, high = p.profile_low, p.profile_high
            mean_line = Line(
                label=label, colour=colour, style="line", x=pairs, y=p.profile, low=low, high=high
            )
            lines.append(mean_line)
    d, count = points[0].task_dim, points[0].task_points
    exact = [(k, 1 - k / d) for k in range(min(d, count))]
    lines.append(published_line("least squares", len(points), exact))
    return _described(points, lines, "pairs seen", "linear")


def _described(
    points: Sequence[Point], lines: list[Line], x_label: str, x_scale: Literal["log", "linear"]
) -> LineFigure:
    d, count = points[0].task_dim, points[0].task_points
    return LineFigure(
        title=f"Linear regression in context: {d} dimensions, {count - 1} pairs and a query",
        x_label=x_label,
        x_scale=x_scale,
        y_label="squared error / d",
        reference=Reference(label="predicting zero", y=1.0),
        panels=[LinePanel(title="", lines=lines)],
    )


EXPERIMENT: Experiment[Settings, Point] = Experiment(
    name="regression",
    question=(
        "How many heads does it take to learn linear regression in context, and of what rank?"
    ),
    about="linear regression in context: one width cut into heads",
    presets=PRESETS,
    columns=(
        ("protocol", "data"),
        ("width", "width"),
        ("depth", "layers"),
        ("heads", "heads"),
        ("rank", "rank"),
        ("params", "parameters"),
        ("held_out", "error after all pairs / d"),
        ("n", "n"),
        ("diverged", "diverged"),
        ("average", "mean over prompt / d"),
        ("squared", "error after all pairs"),
        ("published", "published"),
        ("used", "coordinates used"),
    ),
    main_columns=("heads", "held_out", "rank", "depth", "width", "params", "published", "used"),
    runs=runs,
    summary=summary,
    headline=headline,
    answer=of_regression,
    figure=figure,
    views={"examples": by_examples},
    probe=probe,
    caption=CAPTION,
    meanings={
        "dim": "dimensions of the data",
        "points": "pairs and the query",
        "shapes": "width x layers x heads, such as 48x12x2",
        "curriculum": "steps per stage of growing data; 0: none",
        "first_dim": "dimensions of the first stage",
        "first_points": "pairs and query of the first stage",
        "ffn_dim": "width of the feed-forward; 0: four times the width",
    },
)
