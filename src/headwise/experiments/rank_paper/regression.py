"""The rank paper's last experiment (ICLR version): linear regression in context, width 48 cut into
1 to 16 heads.

    headwise run regression                    quick: 3 dimensions, 8 pairs, width 16, 3 layers, 12 models; 2 CPU cores, minutes
    headwise run regression --preset paper     20 dimensions, 41 pairs, width 48, 12 layers, 500,000 steps; an H200, half an hour
    headwise run regression --preset garg      the shapes of Garg et al. (width 64, 128, 256; heads of 32); one GPU, hours

Expected, paper (published/icl_regression.csv): two heads beat one, and the error grows once the
rank falls below the 20 dimensions of the data. The paper does not say whether its error is divided
by the dimension; ours agree with it if it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwise.errors import UsageError
from headwise.experiments.common import (
    Training,
    check_alike,
    check_lists,
    plural,
    published,
    recipe_of,
    solid,
    trained,
)
from headwise.rows import Row
from headwise.shape import Shape
from headwise.stats import difference, group, mean
from headwise.tasks import Regression
from headwise.training.run import Run

QUESTION = "How many heads does it take to learn linear regression in context, and of what rank?"
COLUMNS = (
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
)
PROBED = 512  # prompts
FEW = (
    5  # seeds that are drawn one by one: some learn and some do not, and a mean of both is neither
)
CAPTION = (
    "Held-out squared error divided by the data's dimension, so that predicting zero scores 1. "
    "After k pairs least squares errs by "
    "1 - k/d, and by nothing once k reaches d. Published values are divided too: it is not said "
    "whether they already were, but at the "
    "published length ours are of their size before the division."
)


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """What the experiment varies and what it holds."""

    dim: int
    points: int
    shapes: tuple[str, ...]  # width x layers x heads
    lr: float
    beta2: float
    curriculum: int  # steps a stage lasts; 0: none
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
    s, out = settings, []
    task = Regression(
        s.dim, s.points, s.curriculum, min(s.first_dim, s.dim), min(s.first_points, s.points)
    )
    for protocol in s.protocols:
        for word in s.shapes:
            shape = decoder(*_sizes(word), task, s.ffn_dim)
            out += [
                Run(shape, task, recipe_of(s, protocol=protocol), seed) for seed in range(s.seeds)
            ]
    return out


def probe(run: Run, weights: dict[str, Any]) -> Row:
    """What a trained model makes of each coordinate: the slopes of its last answer in the products
    w_j x_j that the right answer is the sum of, fitted to some prompts. 1 where a coordinate counts
    as it should, 0 where it is ignored."""
    import torch

    assert isinstance(run.task, Regression)
    pairs = run.task.points - 1
    if pairs < run.task.dim:
        return {}  # w does not follow from the pairs
    model, inputs, targets = trained(run, weights, PROBED)
    with torch.no_grad():
        answers = torch.cat([model(some)[0][:, -2, 0] for some in inputs.split(64)]).double()
    x_BPD, y_BP = inputs[:, ::2].double(), targets[..., 0].double()
    w_BD = torch.linalg.lstsq(x_BPD[:, :pairs], y_BP[:, :pairs, None]).solution[..., 0]
    slopes = torch.linalg.lstsq(w_BD * x_BPD[:, -1], answers[:, None]).solution[:, 0]
    return (
        {"slopes": [round(slope, 4) for slope in slopes.tolist()]}
        if slopes.isfinite().all()
        else {}
    )


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """One point per shape: the error after all pairs and by number of pairs, with intervals over
    seeds."""
    paper, out = {int(r["num_heads"]): float(r["mse"]) for r in published("icl_regression")}, []
    for (protocol, width, depth, heads, d, count), same in group(
        rows, "protocol", "dim", "depth", "num_heads", "task_dim", "task_points"
    ).items():
        check_alike(same)
        first, good = same[0], [r for r in same if r["status"] == "done"]
        profile = (
            [mean([r["held_out_profile"][k] / d for r in good]) for k in range(count)]
            if good
            else []
        )
        last = profile[-1] if profile else None
        match = (d, count, width, depth) == (20, 41, 48, 12)
        used = [sum(slope > 0.5 for slope in r["slopes"]) for r in good if "slopes" in r]
        out.append(
            {
                "protocol": protocol,
                "width": width,
                "depth": depth,
                "heads": heads,
                "rank": first["head_dim"],
                "params": first["params"],
                "task_dim": d,
                "task_points": count,
                "n": len(good),
                "diverged": len(same) - len(good),
                "held_out": last.mean if last else None,
                "low": last.low if last else None,
                "high": last.high if last else None,
                "average": mean([r["held_out"] / d for r in good]).mean if good else None,
                "squared": last.mean * d if last else None,
                "profile": [m.mean for m in profile],
                "profile_low": [m.low for m in profile],
                "profile_high": [m.high for m in profile],
                "profiles": [
                    [error / d for error in r["held_out_profile"]]
                    for r in sorted(good, key=lambda r: r["seed"])
                ],
                "published": paper.get(heads) if match else None,
                "used": sum(used) / len(used) if used else None,
            }
        )
    return out


def _where(p: dict[str, Any], points: list[dict[str, Any]]) -> str:
    """A point's width and depth, and its protocol where there are several."""
    several = len({q["protocol"] for q in points}) > 1
    return f"width {p['width']}, {plural(p['depth'], 'layer')}" + (
        f", {p['protocol']}" if several else ""
    )


def _beside(p: dict[str, Any], best: dict[str, Any]) -> str:
    """A point against the best: how much worse, or that the seeds do not tell or that there is but
    one."""
    found = difference(*([profile[-1] for profile in q["profiles"]] for q in (p, best)))
    doubt = (
        ", by one seed" if found.low is None else ", no difference found" if found.low <= 0 else ""
    )
    return f"{plural(p['heads'], 'head')} {p['held_out'] / best['held_out']:.1f} times{doubt}"


def headline(points: list[dict[str, Any]]) -> list[str]:
    """The best number of heads of each width and depth, and what the others lose."""
    lines = []
    for same in group(points, "protocol", "width", "depth").values():
        known = [p for p in same if p["held_out"] is not None]
        if not known:
            continue
        best = min(known, key=lambda p: p["held_out"])
        where = (
            f"{_where(best, points)}: {plural(best['heads'], 'head')} of rank {best['rank']}, "
            f"error {best['held_out']:.4f}"
        )
        lines.append("; ".join([where, *(_beside(p, best) for p in known if p is not best)]))
    return lines


def figure(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Error after all pairs against the rank of a head, a line per width and depth."""
    lines, known = [], [p for p in points if p["held_out"] is not None]
    for colour, same in enumerate(group(known, "protocol", "width", "depth").values()):
        lines.append(solid(_where(same[0], points), colour, [p["rank"] for p in same], same))
        each = [
            (p["rank"], profile[-1])
            for p in same
            for profile in p["profiles"]
            if len(p["profiles"]) > 1
        ]
        if each:
            at = {"x": [x for x, _ in each], "y": [y for _, y in each]}
            lines.append(
                {
                    "label": f"single seeds, {_where(same[0], points)}",
                    "colour": colour,
                    "style": "dots",
                    **at,
                }
            )
        there = [p for p in same if p["published"] is not None]
        if there:
            at = {
                "x": [p["rank"] for p in there],
                "y": [p["published"] / p["task_dim"] for p in there],
            }
            lines.append(
                {"label": "published, divided by d", "colour": colour, "style": "dashed", **at}
            )
    return _described(points, lines, "rank of a head", "log")


def by_examples(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Error against the number of pairs seen, a line per shape and seed (of many seeds their mean
    and its interval), and least squares."""
    lines, several = [], len({(p["protocol"], p["width"], p["depth"]) for p in points}) > 1
    for colour, p in enumerate(p for p in points if p["held_out"] is not None):
        label = f"{plural(p['heads'], 'head')} of rank {p['rank']}" + (
            f", {_where(p, points)}" if several else ""
        )
        line = {
            "label": label,
            "colour": colour,
            "style": "line",
            "x": list(range(len(p["profile"]))),
        }
        if len(p["profiles"]) <= FEW:
            alone = [None] * len(p["profile"])
            lines += [
                {**line, "y": profile, "low": alone, "high": alone} for profile in p["profiles"]
            ]
        else:
            lines.append(
                {**line, "y": p["profile"], "low": p["profile_low"], "high": p["profile_high"]}
            )
    d, count = points[0]["task_dim"], points[0]["task_points"]
    exact = [(k, 1 - k / d) for k in range(min(d, count))]
    at = {"x": [k for k, _ in exact], "y": [y for _, y in exact]}
    lines.append({"label": "least squares", "colour": len(points), "style": "dashed", **at})
    return _described(points, lines, "pairs seen", "linear")


def _described(
    points: list[dict[str, Any]], lines: list[dict[str, Any]], x_label: str, x_scale: str
) -> dict[str, Any]:
    d, count = points[0]["task_dim"], points[0]["task_points"]
    return {
        "title": (
            f"Linear regression in context: {d} dimensions, {count - 1} pairs and a query"
        ), "x_label": x_label, "x_scale": x_scale,
        "y_label": "squared error / d", "reference": {"label": "predicting zero", "y": 1.0},
        "panels": [{"title": "", "lines": lines}], "columns": 1,
    }  # fmt: skip


VIEWS = {"examples": by_examples}
