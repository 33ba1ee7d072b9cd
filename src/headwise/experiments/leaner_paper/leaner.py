"""Do more heads let you drop layers? The leaner-transformers paper's trade with every control it
lacks.

    headwise run leaner
    headwise run leaner --preset paper --task text

quick: width 32, 20 shapes; 2 CPU cores, about 5 minutes. paper (the larger preset, no paper's
size): width 64, 8 layers; one GPU, minutes per task.

From one base: more heads by splitting the width or by widening it, at full depth, at half the
layers and at half the feed-forward, each beside the same cut without more heads; more heads paid
for by the feed-forward (widen-iso) or by layers (trade); and the same parameters spent on the
feed-forward or on layers instead. Learning rates are tuned per arm with the same effort, on a seed
that is not counted. The paper's own values for this are not known. Expected of it: half the layers
cost nothing once there are more heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from headwise.errors import UsageError
from headwise.experiments.base import Experiment
from headwise.experiments.figure_parts import error_line
from headwise.experiments.leaner_paper.answers import of_leaner
from headwise.experiments.leaner_paper.shared import NOTES, PAPER, QUICK
from headwise.experiments.points import Tuned, groups, labelled, plural
from headwise.experiments.settings import OverTasks, check_lists
from headwise.experiments.shapes import shape_for, shape_of_row
from headwise.experiments.tuning import edge_warning, gap_between, later_runs, next_round, tuned
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
from headwise.show.figure import Line, LineFigure, LinePanel
from headwise.stats import Mean, group
from headwise.training.run import Run

BASE, HALF, THIN = "base", "half the layers", "half the feed-forward"
PAYING = {  # the beginning of an arm's name -> who pays for the heads
    "widen-iso": "feed-forward pays",
    "trade": "layers pay",
    "feed-forward": "feed-forward instead",
    "layers": "layers instead",
}


@dataclass(frozen=True, kw_only=True)
class LeanerSettings(OverTasks):
    """The base and how many times its heads."""

    depth: int
    heads: int
    more: tuple[int, ...]  # times the heads

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lists(self, ("more",))
        divided = self.heads >= 1 and self.dim % self.heads == 0
        rank = self.dim // self.heads if divided else 0
        if not divided or any(times < 2 or rank % times for times in self.more):
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
    "quick": LeanerSettings(
        **QUICK, tasks=("farthest",), init="normal", depth=2, heads=2, ffn_dim=128, more=(2, 4)
    ),
    "paper": LeanerSettings(
        **PAPER, tasks=("text",), init="normal", depth=8, heads=4, ffn_dim=256, more=(2, 4)
    ),
}


# ---- the arms


def arms(base: Shape, more: Sequence[int]) -> dict[str, Shape]:
    """Every shape of the comparison by name. Those that cannot be built within their budget are
    left out."""
    # The three cuts without more heads are the controls of all others.
    half = max(1, base.depth // 2)
    thin = max(1, base.ffn_dim // 2)
    out = {BASE: base, HALF: shallower(base, half), THIN: narrower(base, thin)}
    for times in more:
        heads = times * base.num_heads
        # More heads by splitting and by widening, each at the three cuts.
        for name, grown in (("split", split(base, heads)), ("widen", widen(base, heads))):
            label = f"{name} to {heads}"
            out[label] = grown
            out[f"{label}, {HALF}"] = shallower(grown, half)
            out[f"{label}, {THIN}"] = narrower(grown, thin)
        # With so many heads nothing may be left for the feed-forward or for a layer.
        with contextlib.suppress(UsageError):
            out[f"widen-iso to {heads}"] = widen_iso(base, heads)
        with contextlib.suppress(UsageError):
            out[f"trade to {heads}"] = trade(base, heads, exact=True)
        # What the widened heads cost, spent on the feed-forward or on layers instead.
        budget = Budget.of(widen(base, heads))
        out[f"feed-forward instead of {heads}"] = spend_on_ffn(base, budget)
        out[f"layers instead of {heads}"] = spend_on_depth(base, budget, exact=True)
    return out


def named(shapes: set[Shape]) -> dict[str, Shape]:
    """The arms' names from their shapes: of all shapes as a base, the one whose arms are most of
    them."""
    best: dict[str, Shape] = {}
    # Rows know shapes only. Every shape is tried as the base; the right one explains most of the
    # others.
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


# ---- runs in two rounds


def runs(s: LeanerSettings) -> list[Run]:
    """The tuning: every arm at every rate, one seed."""
    out = []
    for task in map(s.task, s.tasks):
        base = shape_for(task, s.dim, s.depth, s.heads, s.dim // s.heads, s.ffn_dim)
        shapes = dict.fromkeys(arms(base, s.more).values())
        out += [s.run(shape, task, 0, protocol="stream", lr=lr) for shape in shapes for lr in s.lrs]
    return out


def then(s: LeanerSettings, rows: list[Row]) -> list[Run]:
    """The measurement: every arm at its best rate, `seeds` other seeds."""
    return next_round(runs(s), rows, s.seeds, s.further)


def later(s: LeanerSettings) -> tuple[int, int]:
    """How many runs that will be, at least and at most."""
    return later_runs(runs(s), s.seeds, s.further)


# ---- points


@dataclass(frozen=True, kw_only=True)
class Arm(Tuned):
    """One arm on one task, and its difference from the base."""

    task: str
    arm: str
    depth: int
    heads: int
    rank: int
    ffn: int
    params: int
    off: float | None  # parameters against the base's
    gap: Mean | None
    change: str | None  # the gap in words

    @property
    def name(self) -> str:
        """Heads, rank, layers and feed-forward in words."""
        layers = plural(self.depth, "layer")
        return f"{self.heads} x {self.rank} in {layers}, feed-forward {self.ffn}"

    @property
    def cut(self) -> str:
        """What is halved: HALF, THIN, or nothing."""
        if self.arm in (HALF, THIN):
            return self.arm
        return self.arm.partition(", ")[2]


def summary(rows: list[Row]) -> list[Arm]:
    """One point per task and arm."""
    out = []
    for (task,), of_task in group(labelled(rows), "task").items():
        by_shape: dict[Shape, list[Row]] = {}
        for row in of_task:
            by_shape.setdefault(shape_of_row(row), []).append(row)
        found = named(set(by_shape))
        base, own = found.get(BASE), "model" in of_task[0]
        for arm, shape in found.items():
            gap = change = None
            if base is not None and arm != BASE:
                gap, change = gap_between(by_shape[shape], by_shape[base])
            out.append(
                Arm(
                    task=task,
                    arm=arm,
                    depth=shape.depth,
                    heads=shape.num_heads,
                    rank=shape.head_dim,
                    ffn=shape.ffn_dim,
                    params=by_shape[shape][0]["params"],
                    off=None if base is None or own else shape.params / base.params - 1,
                    **tuned(by_shape[shape]),
                    gap=gap,
                    change=change,
                )
            )
    return out


def headline(points: Sequence[Arm]) -> list[str]:
    """What half the layers cost, without and with more heads; then the arms at the base's
    parameters."""
    lines = []
    for (task,), of_task in groups(points, "task").items():
        # First the price of half the layers, without and with more heads. Then the arms that cost
        # what the base costs.
        by_name = {p.arm: p for p in of_task if p.held_out is not None}
        if BASE not in by_name:
            continue
        base = by_name[BASE]
        lines.append(f"{task}: base {base.name}, held-out loss {base.error}")
        if HALF in by_name:
            costs = [f"without more heads {by_name[HALF].change}"]
            for arm, p in by_name.items():
                if arm.endswith(f", {HALF}"):
                    costs.append(f"{arm.removesuffix(f', {HALF}')} {p.change}")
            lines.append(f"{task}, {HALF}: " + "; ".join(costs))
        equal = [
            f"{arm} {p.change}"
            for arm, p in by_name.items()
            if arm.startswith(("split", "widen-iso", "trade"))
            and p.off is not None
            and abs(p.off) < 0.01
        ]
        if equal:
            lines.append(f"{task}, the base's parameters: " + "; ".join(equal))
        lines += [f"{task}: {line}" for line in edge_warning(list(by_name.values()), "arms")]
    return lines


# ---- the figure


def figure(points: Sequence[Arm]) -> LineFigure:
    """A row of panels per task: loss against heads at full size, at half the layers, at half the
    feed-forward; split and widened."""
    panels = []
    for (task,), of_task in groups(points, "task").items():
        known = [p for p in of_task if p.held_out is not None]
        for cut in ("", HALF, THIN):
            lines = _grown(known, cut)
            if not cut:
                lines += _instead(known)
            panels.append(LinePanel(title=f"{task}, {cut or 'full size'}", lines=lines))
    return LineFigure(
        title="More heads, fewer layers: every arm beside its control",
        x_label="heads",
        y_label="held-out loss",
        y_scale="linear",
        panels=panels,
        columns=3,
    )


def _grown(known: list[Arm], cut: str) -> list[Line]:
    """Split and widened, each from the arm with the base's heads at the same cut."""
    out = []
    for colour, how in enumerate(("split", "widen")):
        # A line begins at the arm with the base's heads and the same cut, the control.
        along = [
            p
            for p in known
            if p.arm == (cut or BASE) or (p.arm.startswith(f"{how} to") and p.cut == cut)
        ]
        along.sort(key=lambda p: p.heads)
        if along:
            out.append(error_line(how, colour, [p.heads for p in along], along))
    return out


def _instead(known: list[Arm]) -> list[Line]:
    """Where others pay for the heads, or their price is spent otherwise, at the heads they are
    compared with."""
    out = []
    for colour, (beginning, label) in enumerate(PAYING.items(), 2):
        here = [p for p in known if p.arm.startswith(f"{beginning} ")]
        if here:
            heads = [int(p.arm.rsplit(" ", 1)[1]) for p in here]
            losses = [p.held_out for p in here]
            out.append(Line(label=label, colour=colour, style="dots", x=heads, y=losses))
    return out


EXPERIMENT = Experiment(
    name="leaner",
    question="Do more heads let you drop layers?",
    about="more heads for fewer layers, every arm beside its control",
    presets=PRESETS,
    columns=(
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
    ),
    main_columns=("arm", "held_out", "change", "depth", "heads", "rank", "task", "accuracy", "n"),
    caption=(
        "Held-out loss, mean over seeds at the tuned learning rate with its 95 % interval. Dots: "
        "arms with the parameters of the base or of the widened arm. Hollow: only the seed that "
        "chose the rate, which is not to be set beside means of others."
    ),
    notes=NOTES,
    runs=runs,
    then=then,
    later=later,
    summary=summary,
    headline=headline,
    answer=of_leaner,
    figure=figure,
    meanings={
        "heads": "heads of the base",
        "more": "times the heads of the base",
    },
)
