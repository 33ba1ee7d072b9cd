"""The rank paper's learned-weights figure: do heads of full rank learn a large negative multiple of
the identity?

    headwise run learned                     quick: d=16, N=8, 1, 4 and 8 heads of full rank, 9 models; 2 CPU cores, about 1 minute
    headwise run learned --preset paper      d=64, N=16, 1, 8 and 64 heads, 30 models, both protocols; one GPU, minutes

Expected, paper, published form under `replay`, medians over heads: published/fig_perfect.csv
(angles 179.6, 176.3, 168.5 degrees); measured 179.6, 176.1, 169.0, and on fresh data (`stream`)
180.0, 179.3, 178.9. These are runs of the main figure, so a store that has them has this figure
too.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from headwise.errors import UsageError
from headwise.experiments.common import errors_of, plural, published
from headwise.experiments.rank_paper import fig1
from headwise.experiments.rank_paper.fig1 import Settings
from headwise.rows import Row
from headwise.stats import group
from headwise.training.run import REPLAYED, Run

QUESTION = "What does a head of full rank learn in order to find the farthest point?"
CAPTION = (
    "Solid: the median over heads, and over runs the widest quartiles. Crosses: the same with the "
    "published code's transposed product. "
    "Dashed: published."
)
COLUMNS = (
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
)
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
    """The main figure's runs with one layer and one head a module."""
    if settings.ranks != (settings.dim,) or len(settings.depths) > 1:
        ranks, depths = (
            ", ".join(map(str, values)) for values in (settings.ranks, settings.depths)
        )
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


def _median(rows: list[Row], key: str) -> float | None:
    """Over the runs, of each run's median over the heads of its first layer."""
    values = [r[key][0][2] for r in rows if r.get(key)]
    return median(values) if values else None


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """One point per (protocol, heads): the medians in both forms, the published ones."""
    paper = {
        (int(r["num_heads"]), r["quantity"]): float(r["median"]) for r in published("fig_perfect")
    }
    out = []
    least = min((r["depth"] for r in rows), default=1)
    rows = [
        r for r in rows if (r["depth"], r["head_dim"]) == (least, r["dim"])
    ]  # the main figure's may be given as they are
    for (protocol, heads), same in group(rows, "protocol", "num_heads").items():
        first = same[0]
        match = first["dim"] == 64 and first["task_points"] == 16 and protocol in REPLAYED
        spread = [r["score_angle"][0] for r in same if r.get("score_angle")]
        out.append(
            {
                "protocol": protocol,
                "heads": heads,
                "dim": first["dim"],
                **errors_of(same),
                "angle": _median(same, "score_angle"),
                "norm": _median(same, "score_norm"),
                "angle_low": min((s[1] for s in spread), default=None),
                "angle_high": max((s[3] for s in spread), default=None),
                "angle_published_form": _median(same, "score_angle_transposed"),
                "norm_published_form": _median(same, "score_norm_transposed"),
                "published_angle": paper.get((heads, "angle_deg")) if match else None,
                "published_norm": paper.get((heads, "norm")) if match else None,
            }
        )
    return out


def headline(points: list[dict[str, Any]]) -> list[str]:
    """How near to -c I, and how large c."""
    lines = []
    for p in points:
        if p["angle"] is None and p["n"]:
            lines.append(
                f"{p['heads']} heads, {p['protocol']}: no angles in these rows; a version made "
                "them that did not measure any"
            )
        elif p["angle"] is not None:
            near = (
                f"median angle to the identity {p['angle']:.2f} degrees (180 is -c I), norm over "
                f"sqrt(d) {p['norm']:.4g}"
            )
            lines.append(
                f"{plural(p['heads'], 'head')}, {p['protocol']}: {near}, held out "
                f"{p['held_out']:.4f}"
            )
    return lines


def figure(points: list[dict[str, Any]]) -> dict[str, Any]:
    """A panel per protocol: the angle left to -c I over the number of heads, the published medians
    dashed."""
    panels = []
    for (protocol,), same in group(points, "protocol").items():
        line = [p for p in same if p["angle"] is not None]
        xs = [p["heads"] for p in line]
        lines = [
            {
                "label": "ours",
                "colour": 0,
                "style": "solid",
                "x": xs,
                "y": [180 - p["angle"] for p in line],
                "low": [180 - p["angle_high"] for p in line],
                "high": [180 - p["angle_low"] for p in line],
            },
            {
                "label": "ours, published form",
                "colour": 1,
                "style": "dots",
                "x": xs,
                "y": [
                    None if p["angle_published_form"] is None else 180 - p["angle_published_form"]
                    for p in line
                ],
            },
        ]
        known = [p for p in line if p["published_angle"] is not None]
        if known:
            there = {
                "x": [p["heads"] for p in known],
                "y": [180 - p["published_angle"] for p in known],
            }
            lines.append({"label": "published", "colour": 1, "style": "dashed", **there})
        panels.append({"title": protocol, "lines": lines})
    return {
        "title": (
            "Learned queries and keys: degrees from a negative multiple of the identity "
            f"(d={points[0]['dim']})"
        ),
        "x_label": "heads",
        "y_label": "degrees from -c I",
        "y_scale": "linear",
        "panels": panels,
        "columns": len(panels),
    }
