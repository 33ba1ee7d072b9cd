"""`headwise theory`: the theory experiment with words of its own; it fails when a check does."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from headwise.cli.output import print_made, say


def theory(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.experiments import find
    from headwise.experiments.runner import make
    from headwise.store import Store

    experiment = find("theory")
    changes = {"seed": args.seed, **({"only": tuple(args.only)} if args.only else {})}
    made = make(
        experiment,
        experiment.preset("quick", **changes),
        Store(args.store),
        preset="quick",
        device="cpu",
        report=not args.no_report and not args.only,
        note=not args.only,  # some checks alone do not replace the page of all
        say=say,
        command=shlex.join(["headwise", *words]),
    )
    answer = print_made(made, wide=args.wide)
    return {"checks": answer.pop("points"), "failed": 0, **answer}
