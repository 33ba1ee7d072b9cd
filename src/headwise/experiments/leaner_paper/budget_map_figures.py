"""The figures of `map`: colours over heads and ranks, and all tasks at a glance."""

from __future__ import annotations

from collections.abc import Sequence

from headwise.experiments.best import ranking
from headwise.experiments.leaner_paper.budget_map_points import (
    PATHS,
    PREDICTORS,
    Cell,
    along,
    bare_task,
    ends_of,
    goes_with,
    loss_of,
)
from headwise.experiments.points import groups, plural
from headwise.experiments.state import tuning_only
from headwise.show.colours import SECOND
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
from headwise.stats import difference

SYMBOLS: dict[str, Symbol] = {"the rank paper": "star", "the leaner paper": "diamond"}


def figure(points: Sequence[Cell]) -> HeatFigure:
    """A panel per task and depth: rank across, heads up, loss as colour, the paths as lines."""
    ranks = sorted({cell.rank for cell in points})
    heads = sorted({cell.heads for cell in points})
    panels = []
    for (task,), of_task in groups(points, "task").items():
        # Mine and ours of one task have one scale of colours.
        losses = [c.held_out for c in points if bare_task(c) == bare_task(of_task[0]) if c.held_out]
        found = ranking(of_task)
        best = [found.best] if found.best else []
        alike = found.alike if found.best else []
        for (depth,), of_depth in groups(of_task, "depth").items():
            loss = {(cell.heads, cell.rank): cell.held_out for cell in of_depth}
            about = {(cell.heads, cell.rank): _about(cell) for cell in of_depth}
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
                    text=[[about.get((h, r), "") for r in ranks] for h in heads],
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
        title=_title(points),
        caption=_caption(points),
        x_label="rank of a head",
        y_label="heads",
        x_names=[str(rank) for rank in ranks],
        y_names=[str(count) for count in heads],
        panels=panels,
        columns=len({cell.depth for cell in points}),
    )


def _about(cell: Cell) -> str:
    """What is shown for a cell under the mouse."""
    rate = f", rate {cell.lr:g}" if cell.lr is not None else ""
    return (
        f"{cell.cell('held_out')}, n={cell.n}, {plural(cell.depth, 'layer')}, "
        f"{cell.params:,} parameters{rate}"
    )


def _title(points: Sequence[Cell]) -> str:
    own = sorted({cell.model for cell in points if cell.model})
    if not own:
        return "Held-out loss at one budget"
    if any(cell.model is None for cell in points):
        return f"Held-out loss: headwise at one budget, {' and '.join(own)} as large as built"
    return f"Held-out loss of {' and '.join(own)}; parameters as the model has them"


def _caption(points: Sequence[Cell]) -> str:
    """What the image itself says; the page has more."""
    parts = ["Solid frame: the best of a task; dashed: what cannot be told apart from it."]
    if any(cell.paths for cell in points):
        parts.append(
            "Split: rank x heads kept; widen: rank kept, the feed-forward pays; trade: rank kept, "
            "layers pay."
        )
    if any(cell.model for cell in points):
        parts.append("Of cells that build the same model the first is trained, the others empty.")
    known = {bare_task(cell): cell for cell in points if cell.baseline is not None}
    if known:
        said = ", ".join(f"{t} {c.baseline:.4g} ({c.answer})" for t, c in known.items())
        parts.append(f"Best answer without attention: {said}.")
    return " ".join(parts)


def _places(
    cells: Sequence[Cell], depth: int, ranks: list[int], heads: list[int]
) -> list[tuple[int, int]]:
    """Where the cells of one depth stand in its panel."""
    return [(ranks.index(c.rank), heads.index(c.heads)) for c in cells if c.depth == depth]


def _drawn_paths(cells: list[Cell], ranks: list[int], heads: list[int]) -> list[Path]:
    """The parts of the paths that lie at one depth."""
    out = []
    for colour, path in enumerate(PATHS):
        if found := along(cells, path):
            x = [ranks.index(cell.rank) for cell in found]
            y = [heads.index(cell.heads) for cell in found]
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
            for colour, field in enumerate(PREDICTORS, SECOND):
                rho = goes_with(same, field)
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
    losses = [loss_of(cell) for cell in cells]
    if len(set(losses)) < 2:
        return []
    percent = (max(losses) - min(losses)) / 100
    out = []
    for colour, path in enumerate(PATHS):
        if first_and_last := ends_of(cells, path):
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
