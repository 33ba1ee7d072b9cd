"""Words of the command line for where runs are trained: options of `run`; `worker`, `cancel`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from headwise.cli.values import seconds, whole

Add = Callable[[str, str, str], Any]


def add_place(command: argparse.ArgumentParser) -> None:
    """Options that `place_of` reads."""
    command.add_argument(
        "--on",
        default="local",
        metavar="ENGINE",
        help=(
            "where to train: local, ray (started here), ray:auto (the one of this machine), "
            "ray://HOST:PORT or slurm; default local"
        ),
    )
    command.add_argument(
        "--devices",
        default="",
        metavar="N,N",
        help="several devices of this machine, a process each: 0,1 or all (GPUs), or cpu:N",
    )
    command.add_argument(
        "--slurm",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help=(
            "options of sbatch for --on slurm: partition=gpu time=8:00:00 gpus=1, and any other; "
            "also jobs=N, how many at once, and submitit=no, where it is installed"
        ),
    )
    command.add_argument(
        "--lost-after",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="a worker without a sign of life for so long is lost; default 60",
    )
    command.add_argument(
        "--tries",
        type=whole,
        default=3,
        metavar="N",
        help="attempts at a group whose workers are lost or fail; default 3",
    )


def add_nodes(command: argparse.ArgumentParser) -> None:
    """Options of `pretrain` for a job over several nodes."""
    command.add_argument(
        "--nodes",
        type=whole,
        default=0,
        metavar="N",
        help="of --on slurm: one training over N nodes; default one device",
    )
    command.add_argument(
        "--gpus-per-node",
        type=whole,
        default=0,
        metavar="N",
        help="with --nodes: a process for each GPU; without them one per node, on its CPU",
    )
    command.add_argument(
        "--group", default="", metavar="DIR", help="of the job itself: STORE/groups/ID"
    )
    command.add_argument(
        "--attempt", type=whole, default=1, metavar="N", help="of the job itself; default 1"
    )


def add_live(command: argparse.ArgumentParser) -> None:
    """`headwise list --live`."""
    command.add_argument(
        "--live", action="store_true", help="the groups of this store: who trains what just now"
    )


def add_groups(add: Add) -> None:
    """The commands that groups have."""
    _add_cancel(add)
    _add_worker(add)


def place_of(args: argparse.Namespace) -> Any:
    """The place that the options name."""
    from headwise.execute.engine import Place

    return Place(args.on, args.devices, tuple(args.slurm), args.lost_after, args.tries)


def _add_cancel(add: Add) -> None:
    command = add(
        "cancel",
        "Have the groups of a store that are waiting or running save and end, wherever they run.",
        "headwise cancel --store headwise-store",
    )
    command.add_argument("groups", nargs="*", metavar="GROUP", help="some of them; default all")
    command.add_argument(
        "--on",
        default="",
        metavar="ENGINE",
        help="ask this engine too, where no driver runs or its workers do not see the store",
    )
    command.add_argument(
        "--store", default="headwise-store", metavar="DIR", help="default headwise-store"
    )


def _add_worker(add: Add) -> None:
    command = add(
        "worker",
        "Train one group of runs; this is what an engine starts, wherever the store is seen.",
        "headwise worker headwise-store/groups/9ea40d6d7ea98ecb",
    )
    command.add_argument("folder", help="STORE/groups/ID")
    command.add_argument("--attempt", type=whole, default=1, metavar="N", help="default 1")
    command.add_argument(
        "--code",
        action="append",
        default=[],
        metavar="FILE",
        help="where tasks and models of your own are: a file or a module; nothing else is loaded",
    )
    command.add_argument(
        "--probe", default="", metavar="FILE:NAME", help="what is measured on each trained model"
    )
