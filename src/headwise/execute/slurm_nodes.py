"""One training over several nodes of Slurm: a job of one task per node, and each task is torchrun.

    batch script, on the first node:   its name and a free port are where all processes meet
      srun, one task per node
        torchrun --nnodes NODES --node-rank SLURM_NODEID --nproc-per-node GPUS
          python -m headwise pretrain ...              one process per GPU

A node that is lost ends the job, and Slurm starts it again from its checkpoint. Standard library
only.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from headwise.execute.slurm import flags_of, setup_of, submitted

HERE = {"--on": 1, "--slurm": None, "--nodes": 1, "--gpus-per-node": 1}  # not for the job itself
FREE_PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"


def words_of_job(words: Sequence[str]) -> list[str]:
    """A command line without the options that say where it runs.

    >>> words_of_job("pretrain --on slurm --slurm gpus=1 time=9 --nodes=2 --steps 5".split())
    ['pretrain', '--steps', '5']
    """
    kept, skip = [], 0
    for word in words:
        name, equals, _ = word.partition("=")
        if word.startswith("-"):
            skip = 0
            if name in HERE:
                skip = 0 if equals and HERE[name] else HERE[name] or len(words)
                continue
        if skip:
            skip -= 1
            continue
        kept.append(word)
    return kept


def nodes_script(words: Sequence[str], nodes: int, processes: int, log: Path) -> str:
    """The batch script of a job with `processes` on each of `nodes`; `words` are those after
    `headwise`."""
    python = shlex.quote(sys.executable)
    torchrun = (
        f"exec {python} -m torch.distributed.run --nnodes {nodes} --nproc-per-node {processes} "
        '--node-rank "$SLURM_NODEID" --master-addr "$MEETING_HOST" --master-port "$MEETING_PORT" '
        f"-m headwise {shlex.join(words)}"
    )
    # srun forgets --cpus-per-task, from Slurm 22.05 on. It replaces the shell, so that SIGTERM
    # reaches all there is.
    return (
        f"#!/bin/sh\n{setup_of()}exec >>{shlex.quote(str(log))} 2>&1\n"
        f'MEETING_HOST=$(hostname) MEETING_PORT=$({python} -c "{FREE_PORT}")\n'
        "export MEETING_HOST MEETING_PORT\n"
        "exec srun --kill-on-bad-exit=1 "
        "${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} "
        f"sh -c {shlex.quote(torchrun)}\n"
    )


def submit_nodes(
    words: Sequence[str], nodes: int, gpus: int, log: Path, options: Mapping[str, str]
) -> str:
    """Queue one training over `nodes`, on `gpus` of each; none: a process on each node's CPU.
    Returns the job's id."""
    flags = [
        "--job-name=headwise",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--output=/dev/null",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        *([] if "no-requeue" in options else ["--requeue"]),
        *flags_of(options),
    ]
    return submitted(flags, nodes_script(words, nodes, max(1, gpus), log))
