"""What a worker does with a group's folder: hold its runs, train them, write their rows.

    python -m headwise worker STORE/groups/ID --attempt 1 --code my_task.py

The same function runs in this process, in a process of a pool, on Ray and on Slurm. Everything it
knows comes from the folder and its own command line, everything it does lands in the store.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import headwise
from headwise.errors import UsageError, bounded, one_line
from headwise.execute.groups import Group, cancelled, read_group
from headwise.execute.leases import Beat, Watch, claimed, free_lost
from headwise.progress import Free
from headwise.signals import Stop, Stopped, message
from headwise.store import Store

WAIT = 0.5  # seconds between two looks at runs that somebody else has

# How a worker ends -> the exit code of its process
CODES = {"done": 0, "failed": 1, "refused": 2, "stopped": 143}


@dataclass(frozen=True)
class Outcome:
    """How a worker ended."""

    state: str  # a key of CODES
    cause: str = ""


def work_on(
    folder: Path,
    attempt: int = 1,
    *,
    code: Sequence[str] = (),
    probe: str | Callable[..., Any] | None = None,
    runs: Sequence[Any] | None = None,
    stop: Stop | None = None,
) -> Outcome:
    """Train a group's runs until each has a row; runs that somebody else holds are waited for.

    `code` and `probe` are words of the command line (own_code.py). Over an engine that carries
    values, `runs` and `probe` are those values. Every error becomes the outcome, which the beat
    says as well.
    """
    stop = stop or Stop(lambda number: None)
    group = read_group(folder)  # a folder that is none is the caller's mistake

    def asked() -> None:
        if cancelled(folder):
            stop.number = stop.number or signal.SIGTERM

    try:
        with Beat(folder, {"attempt": attempt}, group.options.beat, asked) as beat:
            outcome = _outcome(group, beat, code, probe, runs, stop)
            beat.end(outcome.state, outcome.cause)
            return outcome
    except OSError as e:  # no beat can be written: a full disk
        return Outcome("failed", one_line(e))


def _outcome(
    group: Group,
    beat: Beat,
    code: Sequence[str],
    probe: str | Callable[..., Any] | None,
    runs: Sequence[Any] | None,
    stop: Stop,
) -> Outcome:
    try:
        check_version(group)
        from headwise.execute.own_code import probe_of, runs_of

        if runs is None:
            runs = runs_of(group.work, group.ids, group.specs, code, dict(group.digests))
        _train(group, beat, runs, probe_of(probe) if isinstance(probe, str) else probe, stop)
        return Outcome("done")
    except Stopped as e:
        return Outcome("stopped", message(e.number, e.saved))
    except UsageError as e:
        return Outcome("refused", str(e))
    except Exception as e:
        traceback.print_exc()
        return Outcome("failed", bounded(f"{type(e).__name__}: {' '.join(str(e).split())}"))


def check_version(group: Group) -> None:
    """Refuse what another version of headwise has cut: its numbers may be others."""
    if group.version != headwise.__version__:
        raise UsageError(
            f"this worker has headwise {headwise.__version__}, the driver {group.version}: install "
            "the same version on every machine"
        )


def _train(
    group: Group,
    beat: Beat,
    runs: Sequence[Any],
    probe: Callable[..., Any] | None,
    stop: Stop,
) -> None:
    store, watch = Store(group.store, create=False), Watch(group.options.lost_after)
    while missing := store.missing(runs):
        free_lost(store, [run.id for run in missing], watch)
        with claimed(store, missing, beat) as mine:
            if mine and group.work == "pretrain":
                _pretrain(group, store, beat, mine, stop)
            elif mine:
                _sweep(group, store, beat, mine, probe, stop)
        if not mine:
            time.sleep(WAIT)
        if stop.asked():
            raise Stopped(stop.number)


def _sweep(
    group: Group,
    store: Store,
    beat: Beat,
    runs: Sequence[Any],
    probe: Callable[..., Any] | None,
    stop: Stop,
) -> None:
    """Runs of the engine, in ensembles."""
    from headwise.execute.memory import check_memory
    from headwise.execute.sources import note_sources
    from headwise.training.engine import pick_device, train

    def done(row: dict[str, Any]) -> None:
        store.add_once(row)
        beat.add(rows=1)

    check_memory(runs, pick_device(group.options.device))
    note_sources(store, runs)
    train(
        runs,
        device=group.options.device,
        folder=store.runs_path,
        done=done,
        advance=lambda steps: beat.add(0 if isinstance(steps, Free) else steps),
        keep_weights=group.options.keep_weights,
        checkpoint_every=group.options.checkpoint_every,
        probe=probe,
        stop=stop,
    )


def _pretrain(group: Group, store: Store, beat: Beat, runs: Sequence[Any], stop: Stop) -> None:
    """Decoders, one after the other, compiled on a GPU."""
    from headwise.execute.memory import check_memory
    from headwise.lm.trainer import pick_device, pretrain

    device = pick_device(group.options.device)

    def done(row: dict[str, Any]) -> None:
        store.add_once(row)
        beat.add(rows=1)

    for run in runs:
        check_memory([run], device)
        pretrain(
            run,
            device=group.options.device,
            folder=store.runs_path,
            cache=store.path / "tokens",
            compiled="blocks" if device.type == "cuda" else "",
            checkpoint_every=group.options.checkpoint_every,
            keep=group.options.keep_weights,
            done=done,
            quiet=True,
            stop=stop,
        )
        beat.add(run.steps)


def end_with_parent() -> None:
    """Have this process asked to stop when the one that started it ends, where
    HEADWISE_PARENT names it: a worker of this machine is no orphan."""
    parent = os.environ.pop("HEADWISE_PARENT", "")
    if not parent.isdecimal():
        return
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):
        with contextlib.suppress(ProcessLookupError):
            os.kill(os.getpid(), signal.SIGTERM)
