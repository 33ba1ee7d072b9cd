"""Rows of experiments with results of our own, so that summaries have known answers."""

import json
from typing import Any

import torch

from headwise.experiments.base import Experiment
from headwise.experiments.rank_paper import fig1
from headwise.model.geometry import score_geometry
from headwise.training.checkpoint import begin
from headwise.training.engine import row_of
from headwise.training.ensemble import Ensemble
from headwise.training.run import Run


def rows_with_losses(runs, loss):
    """Rows as the engine makes them, with losses of our own."""
    out = []
    for run in runs:
        value, spec = loss(run), run.spec()
        task = spec["task"]
        out.append(
            {
                "id": run.id,
                "status": "diverged" if value is None else "done",
                **spec["shape"],
                **spec["recipe"],
                "seed": run.seed,
                "task": task["name"],
                "params": run.shape.params,
                "flops": run.shape.flops(run.task.tokens),
                "held_out": value,
                "kappa_start": 10.0 + run.shape.num_heads,
                "kappa_end": 5.0 * run.shape.head_dim,
            }
        )
    return out


def a_row(run: Run, error: float | None, best: float = 0.5) -> dict[str, Any]:
    """The engine's own row of a run that ended with these errors; None: it diverged."""
    state = begin(run)
    state.curve, state.epoch = [2.0, best, best * 1.5], 3
    errors = None if error is None else torch.tensor([error, error], dtype=torch.float64)
    learned = (
        {}
        if error is None
        else score_geometry(run.shape, Ensemble([state], torch.device("cpu")).named_weights(0))
    )
    return json.loads(
        json.dumps(
            {**row_of(state, errors, 1, torch.device("cpu")), **learned, **profile_of(run, error)}
        )
    )


def profile_of(run: Run, error: float | None) -> dict[str, Any]:
    """An error of this mean that falls along the prompt, where the task tells its queries apart."""
    _, targets = run.task.sample(torch.Generator().manual_seed(0), 2)
    measures = run.task.measures(torch.zeros(2, run.task.tokens, run.task.answer_dim), targets)
    if error is None or "profile" not in measures:
        return {}
    falling = torch.linspace(1.5, 0.5, len(measures["profile"]), dtype=torch.float64)
    return {"held_out_profile": [error * share for share in falling.tolist()]}


def counted(
    experiment: Experiment[Any, Any], settings: Any
) -> tuple[list[Run], list[dict[str, Any]]]:
    """The runs that points are made of, and the rows of those that only choose them, where there
    are two rounds."""
    first = list(experiment.runs(settings))
    if not in_rounds(experiment, settings):
        return first, []
    assert experiment.then is not None
    rows = [a_row(run, 0.3) for run in first]
    runs = list(experiment.then(settings, rows))
    # Rates beyond a grid choose, too.
    while all(run.seed == 0 for run in runs):
        rows += [a_row(run, 0.3) for run in runs]
        runs = list(experiment.then(settings, rows))
    return runs, rows


def in_rounds(experiment: Experiment[Any, Any], settings: Any) -> bool:
    """Whether some runs depend on others' rows; those of fig1 where it is asked to try several
    rates."""
    if isinstance(settings, fig1.Settings):
        return len(settings.rates) > 1
    return experiment.then is not None


def some_rows(
    experiment: Experiment[Any, Any],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A few rows of every point of the quick preset, each error different, and those that are not
    counted."""
    runs, others = counted(experiment, experiment.preset("quick", seeds=2))
    return [a_row(run, 0.1 + i / 1000) for i, run in enumerate(runs)], others
