"""`headwise run`: the words of the command line for `headwise.experiments.runner`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from headwise.cli.cluster_arguments import place_of
from headwise.cli.export import tracking
from headwise.cli.output import print_made, say


def run(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.experiments import own_mistakes

    with own_mistakes(args.experiment):
        return _run(args, words)


def _run(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.execute.engine import Engine
    from headwise.experiments import find
    from headwise.experiments.runner import make, model_of, tasks_of
    from headwise.experiments.settings import settings_of
    from headwise.store import Store

    experiment = find(args.experiment)
    named = [*args.tasks, *([args.task] if args.task else [])]
    tasks = tasks_of(named) if named else []
    model = model_of(args.model) if args.model else None
    settings = settings_of(experiment, args.preset, args.changes, args.seeds, tasks, model)
    store = Store(args.store)
    with Engine(place_of(args)) as engine, tracking(args.track, store) as also:
        made = make(
            experiment,
            settings,
            store,
            preset=args.preset,
            device=args.device,
            workers=args.workers,
            engine=engine,
            rows=args.rows,
            train=not args.no_train,
            fresh=args.fresh,
            keep_weights=args.keep_weights,
            checkpoint_every=args.checkpoint_every,
            report=not args.no_report,
            say=say,
            stop=args.stop,
            command=shlex.join(["headwise", *words]),
        )
        also([row["id"] for row in made.rows])
    return print_made(made, show=args.no_train, wide=args.wide)
