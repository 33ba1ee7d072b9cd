"""One training over several nodes of Slurm: a job of one task per node, and each task is torchrun.

    batch script, on the first node:   its name and a free port are where all processes meet
      srun, one task per node
        torchrun --nnodes NODES --node-rank SLURM_NODEID --nproc-per-node GPUS
          python -m headwise pretrain ... --group STORE/groups/ID --attempt 1

To its driver the job is a group of one run like any other: the first process holds the run, shows
signs of life and says how it ended. A lost node ends the job, and Slurm starts it again from its
checkpoint. Standard library only.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headwise.errors import UsageError, bounded, one_line
from headwise.execute.base import Handle, Job
from headwise.execute.driver import Driver
from headwise.execute.groups import Group, Options, cancelled, group_of, read_group
from headwise.execute.leases import Beat, Watch, claimed, free_lost
from headwise.execute.slurm import NAME, Slurm, flags_of, log_to, setup_of, submitted
from headwise.lm.spec import Pretraining
from headwise.rows import Row
from headwise.signals import Stop, Stopped, message
from headwise.store import Store

# Options that are not for the job itself, and how many values they take; None: all that follow
HERE = {
    **{"--on": 1, "--slurm": None, "--nodes": 1, "--gpus-per-node": 1, "--lost-after": 1},
    **{"--tries": 1, "--group": 1, "--attempt": 1, "--json": 0},
}
FREE_PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"


def words_of_job(words: Sequence[str]) -> list[str]:
    """A command line without the options that say where it runs and how it reports.

    >>> words_of_job("pretrain --on slurm --slurm gpus=1 time=9 --nodes=2 --steps 5".split())
    ['pretrain', '--steps', '5']
    """
    kept, skip = [], 0
    for word in words:
        name, equals, _ = word.partition("=")
        if word.startswith("-"):
            skip = 0
            if name in HERE:
                values = HERE[name]
                skip = len(words) if values is None else 0 if equals else values
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
        f"#!/bin/sh\n{setup_of()}{log_to(log)}\n"
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
        f"--job-name={NAME}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--output=/dev/null",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        *([] if "no-requeue" in options else ["--requeue"]),
        *flags_of(options),
    ]
    return submitted(flags, nodes_script(words, nodes, max(1, gpus), log))


class SlurmNodes(Slurm):
    """One job at a time, over several nodes; `words` are those of the command line that trains."""

    def __init__(self, options: Sequence[str], nodes: int, gpus: int, words: Sequence[str]) -> None:
        super().__init__([*options, "submitit=no"])
        self.nodes, self.gpus, self.words = nodes, gpus, list(words)

    def slots(self) -> int:
        """One job."""
        return 1

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        """Queue jobs, each over all nodes."""
        handles = []
        for job in jobs:
            words = [*self.words, "--group", str(job.folder), "--attempt", str(job.attempt)]
            job_id = submit_nodes(words, self.nodes, self.gpus, job.log, self.options)
            handles.append(Handle(self.name, job_id, job.group, job.attempt, str(job.log)))
        self.ask_soon()
        return handles


def train_on_nodes(
    run: Pretraining,
    store: Store,
    executor: SlurmNodes,
    options: Options,
    tries: int,
    stop: Stop | None = None,
) -> Row:
    """Have a decoder trained by a job over several nodes; returns its row. A job that a former
    driver submitted is found again."""
    driver = Driver(
        store,
        executor,
        tries=tries,
        lost_after=options.lost_after,
        label=f"pretrain {run.id}",
    )

    def cut(runs: list[Any]) -> list[Group]:
        return [group_of(store.path, runs, run.steps, run.flops * run.steps, options, {})]

    driver.plan([run], cut)
    driver.run(stop)
    row = store.row(run.id)
    assert row is not None
    return row


# ---- in the job's first process


@contextlib.contextmanager
def reporting(folder: str, attempt: int, stop: Stop | None) -> Iterator[Beat | None]:
    """Signs of life in a group's folder, and at the end how it ended; empty: nobody asks."""
    if not folder:
        yield None
        return
    path = Path(folder)
    every = read_group(path).options.beat

    def asked() -> None:
        if stop is not None and cancelled(path):
            stop.number = stop.number or signal.SIGTERM

    with Beat(path, {"attempt": attempt}, every, asked) as beat:
        try:
            yield beat
            beat.end("done")
        except Stopped as e:
            beat.end("stopped", message(e.number, e.saved))
            raise
        except UsageError as e:
            beat.end("refused", str(e))
            raise
        except Exception as e:
            beat.end("failed", bounded(f"{type(e).__name__}: {one_line(e)}"))
            raise


def hold(
    store: Store, run: Pretraining, beat: Beat | None, held: contextlib.ExitStack, stop: Stop | None
) -> bool:
    """Hold a run until `held` ends; False: it is finished, or somebody else's. A job waits until
    who has it ends, is lost, or is done: Slurm may have started it twice."""
    watch = Watch() if beat is None else Watch(read_group(beat.path.parent).options.lost_after)
    while True:
        with contextlib.ExitStack() as attempt:
            claim = store.claim([run]) if beat is None else claimed(store, [run], beat)
            if attempt.enter_context(claim):
                held.enter_context(attempt.pop_all())
                return True
        if beat is None or store.row(run.id) is not None:
            return False
        free_lost(store, [run.id], watch)
        time.sleep(0.5)
        if stop is not None and stop.asked():
            raise Stopped(stop.number)
