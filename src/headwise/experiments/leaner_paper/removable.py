"""Do layers become removable once attention is well conditioned? The leaner-transformers paper's
mechanism, tested by intervention.

    headwise run removable
    headwise run removable --preset paper --task text

quick: width 32, 2 and 1 layers, three starts; 2 CPU cores, about 2 minutes. paper (the larger
preset, no paper's size): width 64, 8, 4 and 2 layers; one GPU, a minute or two per task.

The paper holds that more heads condition attention better and that layers can therefore go. Here
heads and sizes stay as they are and the condition number is changed by the start: `normal`
(GPT-2's), `spectral` (the identity added to every head's queries, keys and values) and `orthogonal`
(orthonormal queries and keys, values the identity's rows). Both also make the heads' outputs larger
and the softmax sharper; spectral starts near a copy of each token. Each start and depth has its
learning rate tuned with the same effort. Expected, if conditioning is the cause: the better
conditioned the start, the less it costs to drop half of the layers. Choose sizes at which heads x
rank is not the number of tokens: there the condition number is at its peak, as it is with `paper`
on the text, and a test says little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headwise.errors import UsageError, nearest
from headwise.experiments.base import Experiment
from headwise.experiments.figure_parts import error_line
from headwise.experiments.leaner_paper.shared import (
    NOTES,
    PAPER,
    QUICK,
    Conditioned,
    kappas,
)
from headwise.experiments.points import gap_in_words, groups, labelled, plural
from headwise.experiments.probes import condition_probe
from headwise.experiments.settings import OverTasks, check_lists
from headwise.experiments.shapes import shape_for
from headwise.experiments.tuning import (
    edge_warning,
    later_runs,
    next_round,
    rows_at_best_rate,
    tuned,
)
from headwise.model import INITS
from headwise.rows import Row
from headwise.show.figure import Line, LineFigure, LinePanel
from headwise.stats import difference, group
from headwise.training.run import Run

if TYPE_CHECKING:
    from typing import Self

    from headwise.model.own import Model

PLAIN = "normal"  # the start that the others are compared with
STARTS = (PLAIN, "spectral", "orthogonal")


@dataclass(frozen=True, kw_only=True)
class RemovableSettings(OverTasks):
    """The shape, the numbers of layers, and the starts."""

    depths: tuple[int, ...]
    heads: int
    starts: tuple[str, ...]

    def idle(self) -> dict[str, str]:
        """As for other tasks, and `init`, which the starts replace."""
        return {**super().idle(), "init": "starts says how weights begin"}

    def with_model(self, model: Model) -> Self:
        """Refused: the starts are ways to draw headwise's own weights."""
        raise UsageError(
            "removable compares initial weights, and a model of your own draws its own; models go "
            "with fig1, leaner, map"
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lists(self, ("depths",), ("starts",))
        for start in self.starts:
            if start not in INITS:
                raise UsageError(f"unknown start {start!r}; {nearest(start, INITS)}")
        if self.heads < 1 or self.dim % self.heads:
            raise UsageError(f"heads must divide dim, got heads {self.heads}, dim {self.dim}")


PRESETS = {
    "quick": RemovableSettings(
        **QUICK, tasks=("farthest",), depths=(2, 1), heads=2, ffn_dim=128, starts=STARTS
    ),
    "paper": RemovableSettings(
        **PAPER, tasks=("text",), depths=(8, 4, 2), heads=4, ffn_dim=256, starts=STARTS
    ),
}


# ---- runs in two rounds


def runs(s: RemovableSettings) -> list[Run]:
    """The tuning: every start and depth at every rate, one seed."""
    out = []
    for task in map(s.task, s.tasks):
        for depth in s.depths:
            shape = shape_for(task, s.dim, depth, s.heads, s.dim // s.heads, s.ffn_dim)
            out += [
                s.run(shape, task, 0, protocol="stream", lr=lr, init=start)
                for start in s.starts
                for lr in s.lrs
            ]
    return out


def then(s: RemovableSettings, rows: list[Row]) -> list[Run]:
    """The measurement: every start and depth at its best rate, `seeds` other seeds."""
    return next_round(runs(s), rows, s.seeds, s.further)


def later(s: RemovableSettings) -> tuple[int, int]:
    """How many runs that will be, at least and at most."""
    return later_runs(runs(s), s.seeds, s.further)


# ---- points


@dataclass(frozen=True, kw_only=True)
class Start(Conditioned):
    """One start at one depth on one task."""

    task: str
    init: str
    depth: int
    heads: int
    rank: int
    dim: int
    params: int
    costs: list[float] | None = None  # of going here from the most layers, seed by seed
    cost: str | None = None  # the same in words
    gain: str | None = None  # how that differs from the normal start's, in words

    @property
    def name(self) -> str:
        """The start, and its condition number where it was measured."""
        if self.kappa_start is None:
            return self.init
        return f"{self.init} (kappa {self.kappa_start:.3g})"


def summary(rows: list[Row]) -> list[Start]:
    """One point per task, start and depth, most layers first."""
    out = []
    for (task, init, depth), of_point in group(labelled(rows), "task", "init", "depth").items():
        first = of_point[0]
        out.append(
            Start(
                task=task,
                init=init,
                depth=depth,
                heads=first["num_heads"],
                rank=first["head_dim"],
                dim=first["dim"],
                params=first["params"],
                **tuned(of_point),
                **kappas(rows_at_best_rate(of_point)),
            )
        )
    compared = [p for of_task in groups(out, "task").values() for p in _with_costs(of_task)]
    return sorted(compared, key=lambda p: (p.task, -p.depth))


def _with_costs(points: list[Start]) -> list[Start]:
    """The points of one task, each with what it costs to go there from the most layers, and whether
    that is less than from the normal start."""
    # The cost of a start is a difference of its own two depths. The gain is a difference of two
    # costs: this start's and the normal one's.
    at = {(p.init, p.depth): p for p in points}
    most = max(p.depth for p in points)
    out = []
    for p in points:
        costs = _costs(at.get((p.init, p.depth)), at.get((p.init, most)))
        plain = _costs(at.get((PLAIN, p.depth)), at.get((PLAIN, most)))
        cost = gain = None
        if p.depth < most and costs:
            cost = gap_in_words(difference(p.values, at[p.init, most].values))
            if p.init != PLAIN and plain:
                gain = gap_in_words(difference(costs, plain))
        out.append(replace(p, costs=costs if p.depth < most else [], cost=cost, gain=gain))
    return out


def _costs(shallow: Start | None, deep: Start | None) -> list[float]:
    """What dropping layers costs, seed by seed."""
    # Losses of the tuning's seed chose the rates they were had at.
    if shallow is None or deep is None or shallow.tuning or deep.tuning:
        return []
    # Paired by seed, so that what a seed has in common cancels.
    before = dict(zip(deep.seeds, deep.values, strict=True))
    after = zip(shallow.seeds, shallow.values, strict=True)
    return [loss - before[seed] for seed, loss in after if seed in before]


def headline(points: Sequence[Start]) -> list[str]:
    """For each task and fewer layers: what going there costs from each start, with its condition
    number."""
    lines = []
    for (task,), of_task in groups(points, "task").items():
        most = max(p.depth for p in of_task)
        by_depth = groups(of_task, "depth")
        for (depth,), here in sorted(by_depth.items(), reverse=True):
            layers = plural(depth, "layer")
            # The full depth has a loss, fewer layers have a cost.
            if depth == most:
                what = f"loss with {layers}"
                found = [f"{p.name} {p.cell('held_out')}" for p in here if p.held_out is not None]
            else:
                what = f"from {most} to {layers} the loss changes by"
                found = [f"{p.name} {p.cost}" for p in here if p.cost]
            if not found:
                continue
            lines.append(f"{task}, {what}: " + "; ".join(found))
            if gains := [f"{p.init} {p.gain}" for p in here if p.gain]:
                lines.append(f"{task}, that cost against the normal start's: " + "; ".join(gains))
        measured = [p for p in of_task if p.values]
        lines += [f"{task}: {line}" for line in edge_warning(measured, "starts and depths")]
    return lines


def answer(points: Sequence[Start]) -> str:
    """What the first step to fewer layers costs from each start."""
    said = []
    for (task,), of_task in groups(points, "task").items():
        most = max(p.depth for p in of_task)
        fewer = max((p.depth for p in of_task if p.depth < most and p.cost), default=None)
        costs = [f"{p.init} {p.cost}" for p in of_task if p.depth == fewer and p.cost]
        if costs:
            said.append(
                f"on {task} going from {most} to {plural(fewer or 0, 'layer')} changes the loss, "
                f"by start: {'; '.join(costs)}"
            )
    return "; ".join(said[:2])


# ---- the figure


def figure(points: Sequence[Start]) -> LineFigure:
    """A panel per task: loss against layers, a line per start."""
    panels = [
        LinePanel(title=task, lines=_lines(of_task))
        for (task,), of_task in groups(points, "task").items()
    ]
    return LineFigure(
        title="Layers dropped from three starts",
        x_label="layers",
        y_label="held-out loss",
        y_scale="linear",
        share_y=False,
        panels=panels,
        columns=min(3, max(1, len(panels))),
    )


def _lines(points: list[Start]) -> list[Line]:
    out = []
    for colour, ((init,), of_start) in enumerate(groups(points, "init").items()):
        known = sorted((p for p in of_start if p.held_out is not None), key=lambda p: p.depth)
        if known:
            out.append(error_line(init, colour, [p.depth for p in known], known))
    return out


EXPERIMENT = Experiment(
    name="removable",
    question="Heads and sizes kept, do layers become removable once attention is well conditioned?",
    about="fewer layers from three starts, by condition number",
    presets=PRESETS,
    columns=(
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
    ),
    main_columns=("heads", "held_out", "depth", "cost", "rank", "task", "init", "accuracy"),
    caption=(
        "Held-out loss against layers, mean over seeds at the tuned learning rate with its 95 % "
        "interval, from three starts that differ in how well conditioned attention is. Layers are "
        "removable where a line is flat. Where heads x rank is the number of tokens the condition "
        "number peaks whatever the start, and this tests little."
    ),
    notes=NOTES,
    runs=runs,
    then=then,
    later=later,
    probe=condition_probe,
    summary=summary,
    headline=headline,
    answer=answer,
    figure=figure,
    meanings={
        "heads": "heads",
        "starts": "how weights start: normal, spectral, orthogonal",
    },
)
