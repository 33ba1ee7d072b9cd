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

from collections.abc import Sequence

from headwise.experiments.base import Experiment
from headwise.experiments.best import TOGETHER, best_in_words
from headwise.experiments.leaner_paper.answers import of_map
from headwise.experiments.leaner_paper.budget_map_figures import figure, over_tasks
from headwise.experiments.leaner_paper.budget_map_points import (
    PATHS,
    PREDICTORS,
    Cell,
    ends_of,
    goes_with,
    loss_of,
    summary,
)
from headwise.experiments.leaner_paper.budget_map_shapes import (
    PRESETS,
    MapSettings,
    cells,
    distinct,
)
from headwise.experiments.leaner_paper.shared import NOTES
from headwise.experiments.points import BEATEN, groups, plural, signed
from headwise.experiments.probes import condition_probe
from headwise.experiments.tuning import (
    edge_warning,
    later_runs,
    next_round,
)
from headwise.rows import Row
from headwise.stats import difference
from headwise.training.run import Run

# ---- runs in two rounds


def runs(s: MapSettings) -> list[Run]:
    """The tuning: every cell at every rate, one seed."""
    return [
        s.run(shape, task, 0, protocol="stream", lr=lr)
        for task in map(s.task, s.tasks)
        for shape in distinct(task, s, cells(task, s))
        for lr in s.lrs
    ]


def then(s: MapSettings, rows: list[Row]) -> list[Run]:
    """The measurement: every cell at its best rate, `seeds` other seeds."""
    return next_round(runs(s), rows, s.seeds, s.further)


def later(s: MapSettings) -> tuple[int, int]:
    """How many runs that will be, at least and at most."""
    return later_runs(runs(s), s.seeds, s.further)


def headline(points: Sequence[Cell]) -> list[str]:
    """For each task: the best cell, what each path does from its first to its last cell, and what
    the loss goes with at each depth."""
    lines = []
    for (task,), of_task in groups(points, "task").items():
        # Cells of the tuning's seed alone are not compared: their losses chose their rates.
        known = [cell for cell in of_task if cell.held_out is not None and not cell.tuning]
        if all(cell.held_out is None for cell in of_task):
            continue
        lines += [f"{task}: {line}" for line in (*_sizes(of_task), *_beaten(known))]
        lines.append(f"{task}: {best_in_words(of_task, lambda cell: cell.name, 'cells')}")
        found = {path: ends for path in PATHS if (ends := ends_of(known, path))}
        lines += [f"{task}, {path}: {_verdict(*ends)}" for path, ends in found.items()]
        for (depth,), same in groups(known, "depth").items():
            rhos = [f"{name} {words}" for name in PREDICTORS if (words := _predicts(same, name))]
            if rhos:
                single = " of one seed" if all(cell.one_seed for cell in same) else ""
                lines.append(
                    f"{task}, {plural(depth, 'layer')}: rank correlation of the loss over "
                    f"{len(same)} cells{single} with " + ", ".join(rhos)
                )
        lines += [f"{task}: {line}" for line in edge_warning(known, "cells")]
    return lines


def _sizes(cells: Sequence[Cell]) -> list[str]:
    """How large a model of one's own is in these cells."""
    if not cells[0].model:
        return []
    least, most = min(cell.params for cell in cells), max(cell.params for cell in cells)
    size = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return [
        f"{plural(len(cells), 'distinct model')}, parameters as the model has them ({size}); of "
        "cells that build the same model the first is trained"
    ]


def _beaten(cells: Sequence[Cell]) -> list[str]:
    """Whether any cell is better than the best answer that needs no training. For a task of one's
    own the line says what that answer is in any case."""
    known = [cell for cell in cells if cell.baseline is not None]
    if not known:
        return []
    baseline = known[0].baseline or 0.0
    answer = f"the best answer without attention ({known[0].answer}: {baseline:.4g})"
    best = min(map(loss_of, known))
    if best > BEATEN * baseline:
        return [f"no cell beats {answer} by 1 %, so this compares nothing"]
    built_in = known[0].baseline_name is None
    return [] if built_in else [f"the smallest loss is {best / baseline:.2g} of {answer}"]


def _predicts(cells: Sequence[Cell], field: str) -> str:
    rho = goes_with(cells, field)
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
        ("paths", "path"),
    ),
    main_columns=("heads", "held_out", "rank", "depth", "task", "n", "params", "lr", "paths"),
    caption=(
        "Colour and number: held-out loss, mean over seeds at the tuned learning rate; darker is "
        "better, one seed in brackets. Framed: the best cell of a task; with dashes the cells that "
        f"cannot be told apart from it. {TOGETHER} No frame: none can be told apart, or rates are "
        "still being tuned. Empty cells cannot be built within the budget, or "
        "a model of one's own is there the same as in the first. "
        "Lines: ways to add heads, from few to many. Star: what the rank paper advises, one head "
        "of full rank; diamond: what the leaner paper does, more heads of the same rank in half of "
        "the layers. Kappa is the condition number of the heads' outputs side by side: compare it "
        "only between cells of equal min(tokens, heads x rank); a dash: it is infinite (outputs "
        "of less than full rank), or was not measured."
    ),
    notes=NOTES,
    runs=runs,
    then=then,
    later=later,
    probe=condition_probe,
    summary=summary,
    headline=headline,
    answer=of_map,
    figure=figure,
    views={"summary": over_tasks},
    meanings={
        "base": "layers,heads,rank,feed-forward: the shape that sets the budget",
        "budget": "params or flops",
        "ffn_dim": "follows from the budget",
    },
)
