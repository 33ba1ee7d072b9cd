"""The words of `headwise export` and of `--track`."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def add_export(add: Callable[[str, str, str], argparse.ArgumentParser], default_store: str) -> None:
    """`headwise export`; `add` makes a command of its name, what it does and an example."""
    command = add(
        "export",
        "Give the rows of a store to a tracker, each run once, or write them as a table.",
        "headwise export --to tensorboard runs/\n"
        "own tracker: headwise export --to my_tracker.py:MyTracker",
    )
    command.add_argument(
        "--to", required=True, metavar="NAME",
        help=(
            "tensorboard, wandb, mlflow or trackio, your own my_tracker.py or "
            "my_tracker.py:MyTracker, or a table: parquet or csv"
        ),
    )  # fmt: skip
    command.add_argument(
        "destination", nargs="?", metavar="DEST",
        help=(
            "tensorboard: a folder, default STORE/tensorboard; wandb: PROJECT or ENTITY/PROJECT; "
            "mlflow: a tracking URI; trackio: a project; a table: a file, default in the store"
        ),
    )  # fmt: skip
    command.add_argument(
        "--store", default=default_store, metavar="DIR", help=f"default {default_store}"
    )
    command.add_argument("--experiment", metavar="NAME", help="only the runs of this experiment")


def add_track(command: argparse.ArgumentParser) -> None:
    """`--track` of a command that trains."""
    text = "give each finished run to a tracker, named as for headwise export --to"
    command.add_argument("--track", metavar="NAME[=DEST]", help=text)
