"""Do more heads let you drop layers? The leaner-transformers paper's trade with every control it
lacks.

    headwise run leaner                                quick: width 32, 20 shapes; 2 CPU cores, about 5 minutes
    headwise run leaner --preset paper --task text     width 64, 8 layers; one GPU, minutes a task

From one base: more heads by splitting the width or by widening it, at full depth, at half the
layers and at half the feed-forward, each beside the same cut without more heads; more heads paid
for by the feed-forward (widen-iso) or by layers (trade); and the same parameters spent on the
feed-forward or on layers instead. Learning rates are tuned per arm with the same effort, on a seed
that is not counted. The paper's own values for this are not known; Expected of it: half the layers
cost nothing once there are more heads.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from headwise.errors import UsageError
from headwise.experiments.common import (
    OverTasks,
    against,
    check_lists,
    edges,
    next_round,
    plural,
    recipe_of,
    shape_in,
    shape_of,
    solid,
    task_of,
    tuned,
)
from headwise.policies import (
    Budget,
    narrower,
    shallower,
    spend_on_depth,
    spend_on_ffn,
    split,
    trade,
    widen,
    widen_iso,
)
from headwise.rows import Row
from headwise.shape import Shape
from headwise.stats import group
from headwise.training.run import Run

QUESTION = "Do more heads let you drop layers?"
COLUMNS = (
    ("task", "task"),
    ("arm", "arm"),
    ("depth", "layers"),
    ("heads", "heads"),
    ("rank", "rank"),
    ("ffn", "feed-forward"),
    ("params", "parameters"),
    ("off", "against base's"),
    ("lr", "tuned rate"),
    ("held_out", "held-out loss"),
    ("n", "n"),
    ("diverged", "diverged"),
    ("accuracy", "accuracy"),
    ("change", "loss against base"),
)
CAPTION = (
    "Held-out loss, mean over seeds at the tuned learning rate with its 95 % interval. Dots: arms "
    "with the parameters of the base or of "
    "the widened arm."
)
BASE, HALF, THIN = "base", "half the layers", "half the feed-forward"
PAYING = {
    "widen-iso": "feed-forward pays",
    "trade": "layers pay",
    "feed-forward": "feed-forward instead",
    "layers": "layers instead",
}


@dataclass(frozen=True, kw_only=True)
class Settings(OverTasks):
    """The base and how many times its heads."""

    depth: int
    heads: int
    more: tuple[int, ...]  # times the heads

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lists(self, ("more",))
        if (
            self.heads < 1
            or self.dim % self.heads
            or any(k < 2 or (self.dim // self.heads) % k for k in self.more)
        ):
            given = f"more {','.join(map(str, self.more))}, dim {self.dim}, heads {self.heads}"
            raise UsageError(
                f"more must be numbers of at least 2 that divide the rank, got {given}"
            )
        if self.depth < 2 or self.ffn_dim < 2:
            raise UsageError(
                f"depth and ffn_dim must be at least 2 to be halved, got {self.depth} and "
                f"{self.ffn_dim}"
            )


PRESETS = {
    "quick": Settings(
        tasks=("farthest",),
        dim=32,
        depth=2,
        heads=2,
        ffn_dim=128,
        more=(2, 4),
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
        tasks=("text",),
        dim=64,
        depth=8,
        heads=4,
        ffn_dim=256,
        more=(2, 4),
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


def arms(base: Shape, more: list[int]) -> dict[str, Shape]:
    """Every shape of the comparison by name; those that cannot be built within their budget are
    left out."""
    half, thin = max(1, base.depth // 2), max(1, base.ffn_dim // 2)
    out = {BASE: base, HALF: shallower(base, half), THIN: narrower(base, thin)}
    for k in more:
        heads = k * base.num_heads
        for name, grown in (("split", split(base, heads)), ("widen", widen(base, heads))):
            label = f"{name} to {heads}"
            out |= {
                label: grown,
                f"{label}, {HALF}": shallower(grown, half),
                f"{label}, {THIN}": narrower(grown, thin),
            }
        wide = Budget.of(widen(base, heads))
        with contextlib.suppress(
            UsageError
        ):  # so many heads that nothing is left for the feed-forward
            out[f"widen-iso to {heads}"] = widen_iso(base, heads)
        with contextlib.suppress(UsageError):
            out[f"trade to {heads}"] = trade(base, heads, exact=True)
        out[f"feed-forward instead of {heads}"] = spend_on_ffn(base, wide)
        out[f"layers instead of {heads}"] = spend_on_depth(base, wide, exact=True)
    return out


def runs(settings: Settings) -> list[Run]:
    """The tuning: every arm at every rate, one seed."""
    s, out = settings, []
    for name in s.tasks:
        task = task_of(name, s)
        base = shape_of(task, s.dim, s.depth, s.heads, s.dim // s.heads, s.ffn_dim)
        shapes = list(dict.fromkeys(arms(base, list(s.more)).values()))
        out += [
            Run(shape, task, recipe_of(s, protocol="stream", lr=lr), 0)
            for shape in shapes
            for lr in s.lrs
        ]
    return out


def then(settings: Settings, rows: list[Row]) -> list[Run]:
    """The measurement: every arm at its best rate, `seeds` other seeds."""
    return next_round(runs(settings), rows, settings.seeds, settings.further)


# ---- points


def named(shapes: set[Shape]) -> dict[str, Shape]:
    """The arms' names from their shapes: of all shapes as a base, the one whose arms are most of
    them."""
    best: dict[str, Shape] = {}
    for base in sorted(shapes, key=lambda s: (s.num_heads, -s.depth, -s.ffn_dim, s.head_dim)):
        more = sorted(
            {s.num_heads // base.num_heads for s in shapes if s.num_heads > base.num_heads}
        )
        try:
            found = {name: shape for name, shape in arms(base, more).items() if shape in shapes}
        except UsageError:
            continue
        if len(set(found.values())) > len(set(best.values())):
            best = found
    return best


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """One point per task and arm, and its difference from the base with its interval."""
    out = []
    for (task,), same in group(rows, "task").items():
        by_shape: dict[Shape, list[Row]] = {}
        for row in same:
            by_shape.setdefault(shape_in(row), []).append(row)
        found = named(set(by_shape))
        for arm, shape in found.items():
            value = tuned(by_shape[shape])
            gap, told = (
                against(by_shape[shape], by_shape[found[BASE]])
                if BASE in found and arm != BASE
                else (None, None)
            )
            out.append(
                {
                    "task": task,
                    "arm": arm,
                    "depth": shape.depth,
                    "heads": shape.num_heads,
                    "rank": shape.head_dim,
                    "ffn": shape.ffn_dim,
                    "params": shape.params,
                    "off": shape.params / found[BASE].params - 1 if BASE in found else None,
                    **value,
                    "gap": gap,
                    "change": told,
                }
            )
    return out


def headline(points: list[dict[str, Any]]) -> list[str]:
    """What half the layers cost, without and with more heads; then the arms at the base's
    parameters."""
    lines = []
    for (task,), same in group(points, "task").items():
        by = {p["arm"]: p for p in same if p["held_out"] is not None}
        if BASE not in by:
            continue
        lines.append(f"{task}: base {_name(by[BASE])}, held-out loss {by[BASE]['held_out']:.4f}")
        if HALF in by:
            costs = [
                f"{arm.removesuffix(f', {HALF}')} {p['change']}"
                for arm, p in by.items()
                if arm.endswith(f", {HALF}")
            ]
            lines.append(
                f"{task}, {HALF}: without more heads {by[HALF]['change']}"
                + (f"; {'; '.join(costs)}" if costs else "")
            )
        equal = [
            f"{arm} {p['change']}"
            for arm, p in by.items()
            if arm.startswith(("split", "widen-iso", "trade")) and abs(p["off"]) < 0.01
        ]
        if equal:
            lines.append(f"{task}, the base's parameters: " + "; ".join(equal))
        lines += [f"{task}: {line}" for line in edges(list(by.values()), "arms")]
    return lines


def _name(p: dict[str, Any]) -> str:
    return f"{p['heads']} x {p['rank']} in {plural(p['depth'], 'layer')}, feed-forward {p['ffn']}"


def figure(points: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of panels per task: loss against heads at full size, at half the layers, at half the
    feed-forward; split and widened."""
    panels = []
    for (task,), same in group(points, "task").items():
        known = [p for p in same if p["held_out"] is not None]
        for cut in ("", HALF, THIN):
            lines = []
            for colour, how in enumerate(("split", "widen")):
                along = [
                    p
                    for p in known
                    if p["arm"] == (cut or BASE)
                    or (p["arm"].startswith(f"{how} to") and _cut(p["arm"]) == cut)
                ]
                along.sort(key=lambda p: p["heads"])
                if along:
                    lines.append(solid(how, colour, [p["heads"] for p in along], along))
            panels.append(
                {
                    "title": f"{task}, {cut or 'full size'}",
                    "lines": lines if cut else [*lines, *_instead(known)],
                }
            )
    return {
        "title": (
            "More heads, fewer layers: every arm beside its control"
        ), "x_label": "heads", "y_label": "held-out loss",
        "y_scale": "linear", "panels": panels, "columns": 3,
    }  # fmt: skip


def _instead(known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where others pay for the heads, or their price is spent otherwise, at the heads they are
    compared with."""
    out = []
    for colour, (kind, label) in enumerate(PAYING.items(), 2):
        here = [p for p in known if p["arm"].startswith(f"{kind} ")]
        if here:
            at = {
                "x": [int(p["arm"].rsplit(" ", 1)[1]) for p in here],
                "y": [p["held_out"] for p in here],
            }
            out.append({"label": label, "colour": colour, "style": "dots", **at})
    return out


def _cut(arm: str) -> str:
    return arm.partition(", ")[2]
