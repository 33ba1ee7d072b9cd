"""`headwise run`: the words of the command line for `headwise.experiments.runner`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from headwise.cli.output import print_points, say


def run(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.experiments import find
    from headwise.experiments.runner import make, model_of, tasks_of
    from headwise.experiments.settings import settings_of
    from headwise.store import Store

    experiment = find(args.experiment)
    tasks = tasks_of([*args.tasks, *([args.task] if args.task else [])])
    model = model_of(args.model) if args.model else None
    settings = settings_of(experiment, args.preset, args.changes, args.seeds, tasks, model)
    made = make(
        experiment,
        settings,
        Store(args.store),
        preset=args.preset,
        device=args.device,
        workers=args.workers,
        rows=args.rows,
        train=not args.no_train,
        keep_weights=args.keep_weights,
        checkpoint_every=args.checkpoint_every,
        report=not args.no_report,
        say=say,
        command=shlex.join(["headwise", *words]),
    )
    return print_made(made, show=args.no_train)


def print_made(made: Any, show: bool = False) -> dict[str, Any]:
    """The table, the claim and the files; returns what --json prints."""
    from headwise.experiments.points import plain_point

    print_points(made.experiment, made.points)
    for line in (*made.headline, *([made.note] if made.note else [])):
        print(line)
    files = {"figure": made.picture, "report": made.page}
    written = {what: str(path) for what, path in files.items() if path}
    for what, path in written.items():
        print(f"{what}: {path}")
    counts = made.counts
    if counts.failed:
        say(f"headwise: {counts.failed} of {len(made.points)} checks do not hold")
    return {
        "experiment": made.name,
        "preset": made.preset,
        "store": str(made.store.path),
        "runs": counts.runs,
        "made": counts.made,
        **({"missing": counts.missing} if show else {}),
        "taken": counts.taken,
        "points": [plain_point(point) for point in made.points],
        **({"failed": counts.failed} if counts.failed else {}),
        **written,
    }
