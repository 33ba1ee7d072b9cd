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
    add_slurm(command)
    _add_patience(command)


def _add_patience(command: argparse.ArgumentParser) -> None:
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


def add_slurm(command: argparse.ArgumentParser) -> None:
    """The options of sbatch."""
    command.add_argument(
        "--slurm",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help=(
            "options of sbatch for --on slurm: partition=gpu time=8:00:00 gpus=1, and any other; "
            "submitit=no has sbatch used where submitit is installed"
        ),
    )


def add_nodes(command: argparse.ArgumentParser) -> None:
    """Options of `pretrain` for a job over several nodes."""
    command.add_argument(
        "--on",
        default="local",
        metavar="ENGINE",
        help="where to train: local (or the processes of torchrun), or slurm; default local",
    )
    add_slurm(command)
    command.add_argument(
        "--nodes", type=whole, default=0, metavar="N", help="nodes of the job; default 1"
    )
    command.add_argument(
        "--gpus-per-node",
        type=whole,
        default=0,
        metavar="N",
        help="GPUs of each node, a process for each; without them one process on its CPU",
    )
    _add_patience(command)
    command.add_argument(
        "--group", default="", metavar="DIR", help="of a job of --on slurm: STORE/groups/ID"
    )
    command.add_argument(
        "--attempt", type=whole, default=1, metavar="N", help="of a job of --on slurm; default 1"
    )


def place_of(args: argparse.Namespace) -> Any:
    """The place that the options name."""
    from headwise.execute.engine import Place

    return Place(args.on, args.devices, tuple(args.slurm), args.lost_after, args.tries)


def add_cancel(add: Add) -> None:
    """`headwise cancel`."""
    command = add(
        "cancel",
        "Have the groups of a store that are waiting or running save and end, wherever they run.",
        "headwise cancel --store headwise-store",
    )
    command.add_argument("groups", nargs="*", metavar="GROUP", help="some of them; default all")
    command.add_argument(
        "--store", default="headwise-store", metavar="DIR", help="default headwise-store"
    )


def add_worker(add: Add) -> None:
    """`headwise worker`."""
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
