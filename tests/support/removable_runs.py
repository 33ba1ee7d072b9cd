"""Settings of the experiment on starts."""

import dataclasses

from headwise.experiments.leaner_paper import removable

QUICK = removable.PRESETS["quick"]
TWO = dataclasses.replace(
    QUICK,
    tasks=("recall", "farthest"),
    depths=(2, 5, 3),
    lrs=(0.01, 0.03, 0.1),
    starts=("orthogonal", "normal", "spectral"),
)


def best_rate(run):
    """Another one for each start, depth and task beside each other."""
    return TWO.lrs[
        (TWO.starts.index(run.recipe.init) + run.shape.depth + (run.shape.vocab_size > 0)) % 3
    ]


def tuned(run):
    """Losses of which the least is at `best_rate`, at a level that differs by start and depth."""
    return (
        0.1 * TWO.starts.index(run.recipe.init)
        + run.shape.depth
        + (run.recipe.lr != best_rate(run))
    )
