"""More heads or fewer? Held-out loss over heads x rank x depth at one exact budget, with both
papers' advice on it.

    headwise run map --task farthest
    headwise run map --preset paper --task text --set source=FILE

quick: width 32, 28 cells; 2 CPU cores, minutes. paper (the larger preset, no paper's size): width
64, 3 seeds after tuning; one GPU, minutes per task. Tasks: farthest, recall, text, images, listops,
sentences, or a file of your own.

Every cell is a model of the same number of parameters (or FLOPs): what its heads do not use goes
into the feed-forward. Ways to add heads are paths across it: `split` (rank x heads kept), `widen`
(rank kept, the feed-forward pays), `trade` (rank kept, layers pay). Every cell's learning rate is
tuned with the same effort, on a seed that is not counted.

Expected: on `farthest` the error falls with rank at every number of heads, `recall` needs two
layers; elsewhere see results/map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headwise.experiments.base import Experiment
from headwise.experiments.best import TOGETHER, best_in_words, ranking
from headwise.experiments.leaner_paper.budget_map_shapes import (
    BUDGETS,
    PRESETS,
    MapSettings,
    cells,
)
from headwise.experiments.leaner_paper.shared import NOTES, Conditioned, kappas
from headwise.experiments.points import groups, plural, signed
from headwise.experiments.probes import condition_probe
from headwise.experiments.state import tuning_only
from headwise.experiments.tuning import (
    edge_warning,
    later_runs,
    next_round,
    rows_at_best_rate,
    tuned,
)
from headwise.rows import Row
from headwise.show.figure import (
    HeatFigure,
    HeatPanel,
    Mark,
    Path,
    Range,
    RangeFigure,
    RangePanel,
    Symbol,
)
from headwise.stats import Mean, difference, group, rank_correlation
from headwise.training.run import Run

PATHS = ("split", "widen", "trade")
SYMBOLS: dict[str, Symbol] = {"the rank paper": "star", "the leaner paper": "diamond"}
# What the loss may go with, within one depth: over all depths heads that help in four layers and
# hurt in one cancel. A condition number is not among them: cells of another min(tokens, heads x
# rank) have matrices of another size, and its order is then that size's.
PREDICTORS = ("rank", "heads")


# ---- runs in two rounds


def runs(s: MapSettings) -> list[Run]:
    """The tuning: every cell at every rate, one seed."""
    return [
        s.run(shape, task, 0, protocol="stream", lr=lr)
        for task in map(s.task, s.tasks)
        for shape in cells(task, s)
        for lr in s.lrs
    ]


def then(s: MapSettings, rows: list[Row]) -> list[Run]:
    """The measurement: every cell at its best rate, `seeds` other seeds."""
    return next_round(runs(s), rows, s.seeds, s.further)


def later(s: MapSettings) -> tuple[int, int]:
    """How many runs that will be, at least and at most."""
    return later_runs(runs(s), s.seeds, s.further)


# ---- points


@dataclass(frozen=True, kw_only=True)
class Cell(Conditioned):
    """One shape on one task: its tuned rate, its loss over the other seeds, and where it stands."""

    task: str
    depth: int
    heads: int
    rank: int
    ffn: int
    dim: int
    params: int
    flops: int
    off: float | None = None  # how far off the budget
    paths: str | None = None  # which of PATHS it lies on
    advice: str | None = None  # whose advice it is

    @property
    def name(self) -> str:
        return f"{self.heads} x {self.rank} in {plural(self.depth, 'layer')}"


def summary(rows: list[Row]) -> list[Cell]:
    """One point per task and cell."""
    out = []
    shapes = group(rows, "task", "depth", "num_heads", "head_dim")
    for (task, depth, heads, rank), rows_of_point in shapes.items():
        first = rows_of_point[0]
        out.append(
            Cell(
                task=task,
                depth=depth,
                heads=heads,
                rank=rank,
                ffn=first["ffn_dim"],
                dim=first["dim"],
                params=first["params"],
                flops=first["flops"],
                **tuned(rows_of_point),
                **kappas(rows_at_best_rate(rows_of_point)),
            )
        )
    return [cell for of_task in groups(out, "task").values() for cell in _placed(of_task)]


def _placed(cells: list[Cell]) -> list[Cell]:
    """The cells of one task with how far each is off the budget that most of them share, the paths
    it lies on, and whose advice it is.

    The base of the paths is the deepest cell whose heads have the model's width between them and
    whose rank is nearest to 16.
    """
    budget = _budget_of(cells)
    target = sorted(getattr(cell, budget) for cell in cells)[len(cells) // 2]
    deepest = max(cell.depth for cell in cells)
    dim = cells[0].dim
    square = [cell for cell in cells if cell.depth == deepest and cell.heads * cell.rank == dim]
    base = min(square, key=lambda cell: abs(cell.rank - min(16, dim // 4)), default=None)
    out = []
    for cell in cells:
        paths = [] if base is None else _paths_through(cell, base)
        advice = None
        if (cell.depth, cell.heads, cell.rank) == (deepest, 1, dim):
            advice = "the rank paper"
        elif "trade" in paths and 2 * cell.depth == deepest:
            advice = "the leaner paper"
        off = getattr(cell, budget) / target - 1
        out.append(replace(cell, off=off, paths=", ".join(paths) or None, advice=advice))
    return out


def _budget_of(cells: list[Cell]) -> str:
    """The budget that the cells share: the count in which they differ least. Of a model of one's
    own only parameters are counted."""
    counts = {key: [getattr(cell, key) for cell in cells] for key in BUDGETS}
    known = [key for key in BUDGETS if None not in counts[key]]
    return min(known, key=lambda key: max(counts[key]) / min(counts[key]))


def _paths_through(cell: Cell, base: Cell) -> list[str]:
    """Which ways to add heads to the base lead to a cell, or from it to the base."""
    out = []
    if cell.depth == base.depth and cell.heads * cell.rank == cell.dim:
        out.append("split")
    if cell.depth == base.depth and cell.rank == base.rank:
        out.append("widen")
    if cell.rank == base.rank and cell.heads * cell.depth == base.heads * base.depth:
        out.append("trade")
    return out


def headline(points: Sequence[Cell]) -> list[str]:
    """For each task: the best cell, what each path does from its first to its last cell, and what
    the loss goes with at each depth."""
    lines = []
    for (task,), of_task in groups(points, "task").items():
        # Cells of the tuning's seed alone are not compared: their losses chose their rates.
        known = [cell for cell in of_task if cell.held_out is not None and not cell.tuning]
        if all(cell.held_out is None for cell in of_task):
            continue
        lines.append(f"{task}: {best_in_words(of_task, lambda cell: cell.name, 'cells')}")
        ends_of = {path: ends for path in PATHS if (ends := _ends(known, path))}
        lines += [f"{task}, {path}: {_verdict(*ends)}" for path, ends in ends_of.items()]
        for (depth,), same in groups(known, "depth").items():
            found = [f"{name} {words}" for name in PREDICTORS if (words := _predicts(same, name))]
            if found:
                single = " of one seed" if all(cell.one_seed for cell in same) else ""
                lines.append(
                    f"{task}, {plural(depth, 'layer')}: rank correlation of the loss over "
                    f"{len(same)} cells{single} with " + ", ".join(found)
                )
        lines += [f"{task}: {line}" for line in edge_warning(known, "cells")]
    return lines


def _loss(cell: Cell) -> float:
    """The loss of a cell that has one."""
    return math.inf if cell.held_out is None else cell.held_out


def _ends(cells: Sequence[Cell], path: str) -> tuple[Cell, Cell] | None:
    """A path's cells of fewest and of most heads."""
    along = _along(cells, path)
    return (along[0], along[-1]) if len(along) > 1 else None


def _along(cells: Sequence[Cell], path: str) -> list[Cell]:
    """A path's cells by heads."""
    there = [cell for cell in cells if cell.paths and path in cell.paths]
    return sorted(there, key=lambda cell: cell.heads)


def _goes_with(cells: Sequence[Cell], field: str) -> Mean:
    """The rank correlation of the loss with a field of the cells."""
    return rank_correlation([getattr(c, field) for c in cells], [_loss(c) for c in cells])


def _predicts(cells: Sequence[Cell], field: str) -> str:
    rho = _goes_with(cells, field)
    return "" if rho.low is None else f"{rho.mean:+.2f} ({rho.low:+.2f} to {rho.high:+.2f})"


def _verdict(few: Cell, many: Cell) -> str:
    """What a path does to the loss."""
    gap = difference(many.values, few.values)
    way = f"from {few.name} to {many.name}"
    if gap.low is None or gap.high is None:
        return f"{way} the loss changes by {signed(gap.mean)} (one seed)"
    words = f"{signed(gap.mean)} ± {signed((gap.high - gap.low) / 2)[1:]}"
    if gap.low <= 0 <= gap.high:
        return f"{way} no difference is found ({words})"
    return f"{way} the loss changes by {words}"


# ---- the figures


def figure(points: Sequence[Cell]) -> HeatFigure:
    """A panel per task and depth: rank across, heads up, loss as colour, the paths as lines."""
    ranks = sorted({cell.rank for cell in points})
    heads = sorted({cell.heads for cell in points})
    panels = []
    for (task,), of_task in groups(points, "task").items():
        losses = [cell.held_out for cell in of_task if cell.held_out is not None]
        found = ranking(of_task)
        best = [found.best] if found.best else []
        alike = found.alike if found.best else []
        for (depth,), of_depth in groups(of_task, "depth").items():
            loss = {(cell.heads, cell.rank): cell.held_out for cell in of_depth}
            only = " (tuning only)" if tuning_only(of_depth) else ""
            panels.append(
                HeatPanel(
                    title=f"{task}, {plural(depth, 'layer')}{only}",
                    cells=[[loss.get((h, r)) for r in ranks] for h in heads],
                    least=min(losses, default=None),
                    most=max(losses, default=None),
                    paths=_drawn_paths(of_depth, ranks, heads),
                    best=_places(best, depth, ranks, heads),
                    alike=_places(alike, depth, ranks, heads),
                    single=_places([c for c in of_depth if c.one_seed], depth, ranks, heads),
                    marks=[
                        Mark(
                            label=cell.advice,
                            symbol=SYMBOLS[cell.advice],
                            x=ranks.index(cell.rank),
                            y=heads.index(cell.heads),
                        )
                        for cell in of_depth
                        if cell.advice
                    ],
                )
            )
    return HeatFigure(
        title="Held-out loss at one budget",
        x_label="rank of a head",
        y_label="heads",
        x_names=[str(rank) for rank in ranks],
        y_names=[str(count) for count in heads],
        panels=panels,
        columns=len({cell.depth for cell in points}),
    )


def _places(
    cells: Sequence[Cell], depth: int, ranks: list[int], heads: list[int]
) -> list[tuple[int, int]]:
    """Where the cells of one depth stand in its panel."""
    return [(ranks.index(c.rank), heads.index(c.heads)) for c in cells if c.depth == depth]


def _drawn_paths(cells: list[Cell], ranks: list[int], heads: list[int]) -> list[Path]:
    """The parts of the paths that lie at one depth."""
    out = []
    for colour, path in enumerate(PATHS):
        if along := _along(cells, path):
            x = [ranks.index(cell.rank) for cell in along]
            y = [heads.index(cell.heads) for cell in along]
            out.append(Path(label=path, colour=colour, x=x, y=y))
    return out


def over_tasks(points: Sequence[Cell]) -> RangeFigure:
    """All tasks at a glance: what each way to add heads does to the loss, and what the loss goes
    with at each depth."""
    changes: list[Range] = []
    correlations: list[Range] = []
    for (task,), of_task in groups(points, "task").items():
        known = [cell for cell in of_task if cell.held_out is not None and not cell.tuning]
        changes += _changes(task, known)
        for (depth,), same in groups(known, "depth").items():
            name = f"{task}, {plural(depth, 'layer')}"
            for colour, field in enumerate(PREDICTORS):
                rho = _goes_with(same, field)
                if rho.low is not None:
                    ends = {"mean": rho.mean, "low": rho.low, "high": rho.high}
                    correlations.append(Range(name=name, label=field, colour=colour, **ends))
    panels = [
        RangePanel(
            title="from few heads to many",
            x_label="change of the held-out loss, % of best to worst cell, 95 % interval",
            ranges=changes,
        ),
        RangePanel(
            title="what the loss goes with, at each depth",
            x_label="rank correlation, 95 % interval over cells",
            ranges=correlations,
        ),
    ]
    return RangeFigure(title="More heads or fewer, at one budget", columns=2, panels=panels)


def _changes(task: str, cells: list[Cell]) -> list[Range]:
    """What each path does to one task's loss, in percent of the way from the best to the worst
    cell."""
    losses = [_loss(cell) for cell in cells]
    if len(set(losses)) < 2:
        return []
    percent = (max(losses) - min(losses)) / 100
    out = []
    for colour, path in enumerate(PATHS):
        if first_and_last := _ends(cells, path):
            few, many = first_and_last
            gap = difference(many.values, few.values)
            depths = f"{few.depth}" if few.depth == many.depth else f"{few.depth} to {many.depth}"
            heads = f"{few.heads} x {few.rank} to {many.heads} x {many.rank}"
            label = f"{path}: {heads}, {depths} layers"
            low, high = (None if v is None else v / percent for v in (gap.low, gap.high))
            mean = gap.mean / percent
            ends = {"mean": mean, "low": low, "high": high, "hollow": low is None}
            out.append(Range(name=task, label=label, colour=colour, **ends))
    return out


EXPERIMENT = Experiment(
    name="map",
    question="At one exact budget, how many heads, of what rank, how deep?",
    about="loss over heads x rank x depth at one exact budget",
    presets=PRESETS,
    columns=(
        ("task", "task"),
        ("depth", "layers"),
        ("heads", "heads"),
        ("rank", "rank"),
        ("ffn", "feed-forward"),
        ("params", "parameters"),
        ("off", "off budget"),
        ("lr", "tuned rate"),
        ("held_out", "held-out loss"),
        ("n", "n"),
        ("diverged", "diverged"),
        ("accuracy", "accuracy"),
        ("kappa_start", "kappa at start"),
        ("kappa_end", "at end"),
        ("paths", "on the path of"),
    ),
    main_columns=("heads", "held_out", "rank", "depth", "task", "n", "params", "lr", "paths"),
    caption=(
        "Colour and number: held-out loss, mean over seeds at the tuned learning rate; darker is "
        "better, one seed in brackets. Framed: the best cell of a task; with dashes the cells that "
        f"cannot be told apart from it. {TOGETHER} No frame: none can be told apart, or rates are "
        "still being tuned. Empty cells cannot be built within the budget. "
        "Lines: ways to add heads, from few to many. Star: what the rank paper advises, one head "
        "of full rank; diamond: what the leaner paper does, more heads of the same rank in half of "
        "the layers. Kappa is the condition number of the heads' outputs side by side: compare it "
        "only between cells of equal min(tokens, heads x rank)."
    ),
    notes=NOTES,
    runs=runs,
    then=then,
    later=later,
    probe=condition_probe,
    summary=summary,
    headline=headline,
    figure=figure,
    views={"summary": over_tasks},
    meanings={
        "base": "layers,heads,rank,feed-forward: the shape that sets the budget",
        "budget": "params or flops",
        "ffn_dim": "follows from the budget",
    },
)
