"""`headwise choose`: the words of the command line for `headwise.choosing`."""

from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Sequence
from typing import Any

from headwise.cli.cluster_arguments import place_of
from headwise.cli.output import print_prose, print_table, say, width_for
from headwise.errors import UsageError

OF_TEXTS = ("length", "batch_tokens", "eval_tokens", "tokenizer", "optimiser", "precision")
LISTS = ("most", "rates", "depths", "heads", "ranks")
MAIN = (0, 2, 1, 3, 5, 4)  # columns of the table that stay longest


def choose(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """Race, and print the recommendation."""
    from headwise.experiments import own_mistakes

    with own_mistakes("choose"):
        return _choose(args, words)


def _choose(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.choosing.extrapolate import extrapolate
    from headwise.choosing.recommend import choose as race
    from headwise.planning.costs import COSTS

    if args.extrapolate and args.params is None:
        raise UsageError("--extrapolate needs the size to predict: --params")
    same = ("dim", "steps", "batch", "trials", "model", "delta", "epsilon", "seeds", "hours",
            "seconds", "store", "device", "workers", "checkpoint_every", "params")  # fmt: skip
    given: dict[str, Any] = {name: getattr(args, name) for name in (*same, *LISTS)}
    given = {name: value for name, value in given.items() if value is not None}
    limits = {name: getattr(args, name) for name in COSTS if name != "params"}
    limits = {name: text for name, text in limits.items() if text is not None}
    if limits:
        given["limits"] = limits
    given["on"] = place_of(args)
    how: Any = race
    if args.extrapolate:
        if unused := [name for name in ("dim", "ranks", "limits") if name in given]:
            raise UsageError(f"{unused[0]} follows from the size of --extrapolate")
        how = functools.partial(extrapolate, sizes=args.extrapolate)
    choice = how(
        _task(args),
        **given,
        report=not args.no_report,
        say=say,
        stop=args.stop,
        command=shlex.join(["headwise", *words]),
    )
    width = width_for(args.wide)
    for line in choice.lines:
        print_prose(line, width)
    print_table(choice.table, width, MAIN)
    if page := next((c.page for c in getattr(choice, "choices", [choice]) if c.page), None):
        print(f"report: {page}")
    print_prose(choice.lines[0], width)  # the answer, which the page begins with
    return choice.to_json()


def _task(args: argparse.Namespace) -> Any:
    """What is trained: the task that is named, or a text."""
    given = {name: getattr(args, name) for name in OF_TEXTS if getattr(args, name) is not None}
    if args.text is None:
        if args.task is None:
            raise UsageError("choose needs a task, as in my_task.py, or a text (--text PATH)")
        if given:
            option = next(iter(given)).replace("_", "-")
            raise UsageError(f"--{option} goes with --text, got the task {args.task}")
        return args.task
    if args.task is not None:
        raise UsageError(f"choose takes a task or a text, got {args.task} and --text")
    from headwise.choosing.trainings import text
    from headwise.device import pick_device

    cuda = pick_device(args.device).type == "cuda"
    more: dict[str, Any] = {"precision": "bf16" if cuda else "fp32", **given}
    if args.steps is not None:
        more["steps"] = args.steps
    return text(args.text, **more)
