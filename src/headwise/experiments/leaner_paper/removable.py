"""Do layers become removable once attention is well conditioned? The leaner-transformers paper's
mechanism, tested by intervention.

    headwise run removable                                 quick: width 32, 2 and 1 layers, three starts; 2 CPU cores, about 2 minutes
    headwise run removable --preset paper --task text      width 64, 8, 4 and 2 layers; one GPU, a minute or two a task

The paper holds that more heads condition attention better and that layers can therefore go. Here
heads and sizes stay as they are and the condition number is changed by the start: `normal`
(GPT-2's), `spectral` (the identity added to every head's queries, keys and values) and `orthogonal`
(orthonormal queries and keys, values the identity's rows). Both also make the heads' outputs larger
and the softmax sharper; spectral starts near a copy of each token. Each start and depth has its
learning rate tuned with the same effort. Expected, if conditioning is the cause: the better
conditioned the start, the less it costs to drop half of the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwise.errors import UsageError, nearest
from headwise.experiments.common import (
    OverTasks,
    change,
    check_lists,
    counted,
    edges,
    how_conditioned,
    logmean,
    next_round,
    plural,
    recipe_of,
    shape_of,
    solid,
    task_of,
    tuned,
)
from headwise.model import INITS
from headwise.rows import Row
from headwise.stats import difference, group
from headwise.training.run import Run

QUESTION = "Heads and sizes kept, do layers become removable once attention is well conditioned?"
COLUMNS = (
    ("task", "task"),
    ("init", "start"),
    ("depth", "layers"),
    ("heads", "heads"),
    ("rank", "rank"),
    ("params", "parameters"),
    ("lr", "tuned rate"),
    ("held_out", "held-out loss"),
    ("n", "n"),
    ("diverged", "diverged"),
    ("accuracy", "accuracy"),
    ("kappa_start", "kappa at start"),
    ("kappa_end", "at end"),
    ("cost", "loss against all layers"),
    ("gain", "cost against normal start"),
)
CAPTION = (
    "Held-out loss against layers, mean over seeds at the tuned learning rate with its 95 % "
    "interval, from three starts that differ "
    "in how well conditioned attention is. Layers are removable where a line is flat."
)
PLAIN = "normal"


@dataclass(frozen=True, kw_only=True)
class Settings(OverTasks):
    """The shape, the numbers of layers, and the starts."""

    depths: tuple[int, ...]
    heads: int
    starts: tuple[str, ...]

    def idle(self) -> dict[str, str]:
        return {**super().idle(), "init": "starts says how weights begin"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lists(self, ("depths",), ("starts",))
        for start in self.starts:
            if start not in INITS:
                raise UsageError(f"unknown start {start!r}; {nearest(start, INITS)}")
        if self.heads < 1 or self.dim % self.heads:
            raise UsageError(f"heads must divide dim, got heads {self.heads}, dim {self.dim}")


PRESETS = {
    "quick": Settings(
        tasks=("farthest",),
        dim=32,
        depths=(2, 1),
        heads=2,
        ffn_dim=128,
        starts=("normal", "spectral", "orthogonal"),
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
        held_out=1024,
        evals=1,
    ),
    "paper": Settings(
        tasks=("text",),
        dim=64,
        depths=(8, 4, 2),
        heads=4,
        ffn_dim=256,
        starts=("normal", "spectral", "orthogonal"),
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
        precision="fp16",
        epoch=500,
        evals=2,
    ),
}


def runs(settings: Settings) -> list[Run]:
    """The tuning: every start and depth at every rate, one seed."""
    s, out = settings, []
    for name in s.tasks:
        task = task_of(name, s)
        for depth in s.depths:
            shape = shape_of(task, s.dim, depth, s.heads, s.dim // s.heads, s.ffn_dim)
            out += [
                Run(shape, task, recipe_of(s, protocol="stream", lr=lr, init=init), 0)
                for init in s.starts
                for lr in s.lrs
            ]
    return out


def then(settings: Settings, rows: list[Row]) -> list[Run]:
    """The measurement: every start and depth at its best rate, `seeds` other seeds."""
    return next_round(runs(settings), rows, settings.seeds, settings.further)


probe = how_conditioned  # of every trained run


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """One point per task, start and depth, most layers first; what it costs to go there from the
    most layers, and whether that is less than from the normal start."""
    out: list[dict[str, Any]] = []
    for (task, init, depth), same in group(rows, "task", "init", "depth").items():
        first, kept = same[0], counted(same)
        out.append(
            {
                "task": task,
                "init": init,
                "depth": depth,
                "heads": first["num_heads"],
                "rank": first["head_dim"],
                "dim": first["dim"],
                "params": first["params"],
                **tuned(same),
                **{
                    key: logmean([r.get(key) for r in kept])
                    for key in ("kappa_start", "kappa_end", "kappa_centred_end")
                },
            }
        )
    at = {(p["task"], p["init"], p["depth"]): p for p in out}
    for p in out:
        most = max(q["depth"] for q in out if q["task"] == p["task"])
        costs = [
            _costs(at.get((p["task"], init, p["depth"])), at.get((p["task"], init, most)))
            for init in (p["init"], PLAIN)
        ]
        shallow = p["depth"] < most
        p["costs"] = costs[0] if shallow else []
        p["cost"] = (
            change(difference(p["values"], at[p["task"], p["init"], most]["values"]))
            if shallow and costs[0]
            else None
        )
        p["gain"] = (
            change(difference(*costs)) if shallow and p["init"] != PLAIN and all(costs) else None
        )
    return sorted(out, key=lambda p: (p["task"], -p["depth"]))


def _costs(shallow: dict[str, Any] | None, deep: dict[str, Any] | None) -> list[float]:
    """What dropping layers costs, seed by seed."""
    if not shallow or not deep:
        return []
    before = dict(zip(deep["seeds"], deep["values"], strict=True))
    return [
        loss - before[seed]
        for seed, loss in zip(shallow["seeds"], shallow["values"], strict=True)
        if seed in before
    ]


def headline(points: list[dict[str, Any]]) -> list[str]:
    """For each task and fewer layers: what going there costs from each start, with its condition
    number."""
    lines = []
    for (task,), same in group(points, "task").items():
        most = max(p["depth"] for p in same)
        for (depth,), here in sorted(group(same, "depth").items(), reverse=True):
            told = [
                f"{_name(p)} {p['held_out']:.4f}" if depth == most else f"{_name(p)} {p['cost']}"
                for p in here
                if p["values"] and (depth == most or p["cost"])
            ]
            if not told:
                continue
            words = plural(depth, "layer")
            what = (
                f"loss with {words}"
                if depth == most
                else f"from {most} to {words} the loss changes by"
            )
            lines.append(f"{task}, {what}: " + "; ".join(told))
            less = [f"{p['init']} {p['gain']}" for p in here if p["gain"]]
            if less:
                lines.append(f"{task}, that cost against the normal start's: " + "; ".join(less))
        lines += [
            f"{task}: {line}"
            for line in edges([p for p in same if p["values"]], "starts and depths")
        ]
    return lines


def _name(p: dict[str, Any]) -> str:
    return p["init"] if p["kappa_start"] is None else f"{p['init']} (kappa {p['kappa_start']:.3g})"


def figure(points: list[dict[str, Any]]) -> dict[str, Any]:
    """A panel per task: loss against layers, a line a start."""
    panels = []
    for (task,), same in group(points, "task").items():
        lines = []
        for colour, ((init,), along) in enumerate(group(same, "init").items()):
            known = sorted(
                (p for p in along if p["held_out"] is not None), key=lambda p: p["depth"]
            )
            if known:
                lines.append(solid(init, colour, [p["depth"] for p in known], known))
        panels.append({"title": task, "lines": lines})
    return {
        "title": (
            "Layers dropped from three starts"
        ), "x_label": "layers", "y_label": "held-out loss", "y_scale": "linear", "own_y": True,
        "panels": panels, "columns": min(3, max(1, len(panels))),
    }  # fmt: skip
