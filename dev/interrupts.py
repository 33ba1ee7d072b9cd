"""Kills and interrupts at random moments over `run`, `map` and `pretrain`: is a row ever another,
and how much work is lost?

    python dev/interrupts.py                  100 kills, 80 signals, 20 pairs of signals
    python dev/interrupts.py --cases 20       a fifth of each

A store is started again and again, each time with one blow at a random moment, half of them in its
training, until everything in it is made. Then its rows are compared bit by bit with those of a
store that nobody touched. Most commands are forks of this process, which has imported everything;
every tenth is a process from its first instruction. Forks count every step that they make, so that
steps made twice are known.

    kill    SIGKILL of the whole process group
    once    SIGINT, SIGTERM, SIGHUP, two of them at once, or one twice at once; half of them to the
            whole group, as a terminal does. Nothing may be lost, and one line be said
    again   a second signal some milliseconds after the first, which is to end it at once
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import json
import mmap
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwise import signals
from headwise.__main__ import main
from headwise.lm import trainer
from headwise.lm.trainer import Trainer
from headwise.rows import MEASURED
from headwise.store import Store
from headwise.training.optim import AdamW

# What a fork need not import again.
IMPORTED = (
    *("headwise.execute.sweep", "headwise.experiments.leaner_paper.budget_map"),
    *("headwise.show.matplotlib_figure", "headwise.show.report", "jinja2"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg"),
)
COMMON = ["--device", "cpu", "--checkpoint-every", "0.3", "--seeds", "2"]
FIG1 = "dim=8 points=4 ffn_dim=16 ranks=8,2 depths=1 widths=1,2 lr=0.01 steps=240 epoch=60 batch=16"
MAP = "dim=8 heads=1,2 ranks=4,8 depths=1 base=1,1,8,16 steps=60 epoch=30 batch=16 points=4"
DECODER = "dim=22 depth=2 num_heads=3 head_dim=10 qk_rope_head_dim=10"
LM = "--steps 120 --batch-tokens 88 --length 11 --evals 3 --eval-tokens 88"
COMMANDS = {
    "run": ["run", "fig1", *COMMON, "--workers", "1", "--set", *f"{FIG1} held_out=64".split()],
    "map": ["run", "map", *COMMON, "--workers", "1", "--set", *f"{MAP} held_out=64".split()],
    "pretrain": ["pretrain", *COMMON[:4], *LM.split(), "--set", *DECODER.split()],
    "pool": ["run", "fig1", *COMMON, "--workers", "2", "--set", *f"{FIG1} held_out=64".split()],
}
MOST = 6  # blows to one store
NAMES = ("run", "map", "pretrain", "pool")
SPEED = ("tokens_per_second", "mfu", "command")
ONE_LINE = re.compile(
    r"headwise: interrupted( by SIG\w+)?(; saved [^;]+)?; run the same command to resume"
)


@dataclass
class Counts:
    """What came of one kind of blow."""

    blows: int = 0
    late: int = 0  # the command was finished before
    trained: int = 0  # it had made a step in this start
    stores: int = 0
    rows: int = 0
    counted: int = 0  # stores whose every start was a fork, so that their steps are counted
    lost_steps: int = 0
    wrong: list[str] = field(default_factory=list)
    codes: collections.Counter[int] = field(default_factory=collections.Counter)


class Steps:
    """Steps made so far, counted by forks in memory that they share."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 8)

    def get(self) -> int:
        return struct.unpack("q", self.memory[:])[0]

    def add(self, steps: int) -> None:
        self.memory[:] = struct.pack("q", self.get() + steps)


def count_steps(steps: Steps) -> None:
    """Have the training of this process count its steps."""
    ensemble_step, decoder_step = AdamW.step, Trainer.step

    def adamw(self: AdamW, i: int, models: slice, *rest: Any) -> None:
        ensemble_step(self, i, models, *rest)
        steps.add(models.stop - models.start)

    def step(self: Trainer, flag: float = 0.0) -> float:
        raised = decoder_step(self, flag)
        steps.add(1)
        return raised

    AdamW.step = adamw
    trainer.Trainer.step = step


def fork(words: Sequence[str], errors: Path, steps: Steps, at_once: float) -> int:
    """The command as a fork of this process, in a session of its own."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    out = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(out, 2)
    sys.argv = ["headwise", *words]
    signals.AT_ONCE = at_once
    count_steps(steps)
    os._exit(main())


def begin(words: Sequence[str], errors: Path) -> int:
    """The command as a process of its own, from its first instruction."""
    with errors.open("a") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "headwise", *words],
            stdout=subprocess.DEVNULL,
            stderr=out,
            start_new_session=True,
        ).pid


def strike(kind: str, pid: int, rng: random.Random) -> set[int]:
    """One blow; returns the signals that it was."""
    send = os.killpg if kind == "kill" or rng.random() < 0.5 else os.kill
    numbers = [signal.SIGKILL]
    if kind != "kill":
        numbers = rng.sample(signals.SIGNALS, 2 if rng.random() < 0.3 else 1)
        if kind == "again" or rng.random() < 0.3:
            numbers = [numbers[0], numbers[-1]]
    for i, number in enumerate(numbers):
        if i and kind == "again":
            time.sleep(rng.uniform(0.0, 0.02))
        with contextlib.suppress(ProcessLookupError):
            send(pid, number)
    return set(map(int, numbers))


def left_alive(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def bits(row: dict[str, Any]) -> str:
    """A row without what is measured."""
    return json.dumps({k: v for k, v in row.items() if k not in (*MEASURED, *SPEED)})


def ended(pid: int) -> bool:
    """Whether a child has ended; its exit code is still to be asked for."""
    return bool(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))


def wait(pid: int) -> int:
    """The exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def faults(kind: str, code: int, sent: set[int], said: str, store: Path, pid: int) -> list[str]:
    """What a blow left that it should not."""
    found = []
    end = time.monotonic() + 20
    while (alive := left_alive(pid)) and time.monotonic() < end:
        time.sleep(0.02)
    if alive:
        found.append(f"orphans {alive}")
    if kind == "kill":
        return found
    words = ("Traceback", "semaphore", "terminate", "Exception ignored", "leaked")
    found += [f"{word}: {said[-1500:]}" for word in words if word in said]
    if store.exists() and (hidden := list(store.rglob(".*"))):
        found.append(f"temporary files {hidden}")
    lines = [line for line in said.splitlines() if line.startswith("headwise:")]
    # Before its handlers are there, or after its work, a process ends without a word.
    if code in {-number for number in sent}:
        lines = lines or ["headwise: interrupted; run the same command to resume"]
    elif code not in {128 + number for number in sent}:
        found.append(f"exit code {code} after signals {sent}")
    if len(lines) != 1 or not ONE_LINE.fullmatch(lines[0]):
        found.append(f"said {lines}")
    return found


def campaign(kind: str, blows: int, folder: Path, reference: dict[str, Any], seed: int) -> Counts:
    rng, counts, steps, number = random.Random(f"{kind} {seed}"), Counts(), Steps(), 0
    while counts.blows < blows:
        name = NAMES[number % 3] if number % 9 < 8 else "pool"
        store, errors = folder / f"{kind} {number}", folder / f"{kind} {number}.txt"
        number += 1
        words, before = [*COMMANDS[name], "--store", str(store)], steps.get()
        known, counted = reference[name], name != "pool"
        code, struck = None, 0
        while code != 0 and counts.blows < blows + 1:
            size = errors.stat().st_size if errors.exists() else 0
            whole = counts.blows % 10 == 9 and name != "pool"
            counted = counted and not whole
            last = counts.blows == blows or struck == MOST
            if whole:
                pid = begin(words, errors)
                limit = known["start"]
            else:
                pid = fork(words, errors, steps, 0.0 if kind == "again" else 0.5)
                limit = known["seconds"] * 0.6
            sent: set[int] = set()
            if not last:
                made = steps.get()
                if not whole and name != "pool" and rng.random() < 0.5:  # within its training
                    while steps.get() == made and not ended(pid):
                        time.sleep(0.001)
                    limit *= 0.4
                end = time.monotonic() + rng.uniform(0.0, limit)
                while time.monotonic() < end and not ended(pid):
                    time.sleep(0.002)
                if ended(pid):
                    counts.late += 1
                else:
                    sent = strike(kind, pid, rng)
            code = wait(pid)
            said = errors.read_text()[size:]
            if sent and code != 0:
                counts.blows, struck = counts.blows + 1, struck + 1
                counts.trained += steps.get() > made
                counts.codes[code] += 1
                wrong = faults(kind, code, sent, said, store, pid)
                counts.wrong += [f"{name} in {store.name}: {fault}" for fault in wrong]
            elif code != 0:
                counts.wrong.append(f"{name} in {store.name}: exit code {code}, {said[-1500:]}")
                break
        rows = {row["id"]: bits(row) for row in Store(store).rows()}
        counts.stores, counts.rows = counts.stores + 1, counts.rows + len(rows)
        if rows != known["rows"]:
            counts.wrong.append(f"{name} in {store.name}: rows differ")
        lost = steps.get() - before - known["steps"]
        if counted:
            counts.counted, counts.lost_steps = counts.counted + 1, counts.lost_steps + lost
            if kind == "once" and lost:
                counts.wrong.append(f"{name} in {store.name}: {lost} steps made twice")
        shutil.rmtree(store)
        print(f"{kind} {number} {name}: {counts.blows} blows", file=sys.stderr, flush=True)
    return counts


def undisturbed(folder: Path) -> dict[str, Any]:
    """By command: rows as bits, steps, and seconds of a fork and of a process of its own."""
    found = {}
    for name, words in COMMANDS.items():
        store, errors, steps = folder / f"{name} alone", folder / f"{name}.txt", Steps()
        begun = time.monotonic()
        code = wait(fork([*words, "--store", str(store)], errors, steps, 0.5))
        assert code == 0, errors.read_text()
        seconds = time.monotonic() - begun
        rows = {row["id"]: bits(row) for row in Store(store).rows()}
        found[name] = {"rows": rows, "steps": steps.get(), "seconds": seconds}
        print(f"{name}: {len(rows)} rows, {steps.get()} steps, {seconds:.1f} s", flush=True)
    begun = time.monotonic()
    wait(begin([*COMMANDS["run"], "--store", str(folder / "started")], folder / "started.txt"))
    whole = time.monotonic() - begun
    return {name: about | {"start": whole} for name, about in found.items()}


def run() -> int:
    given = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    given.add_argument("--cases", type=int, default=100)
    given.add_argument("--seed", type=int, default=0)
    given.add_argument("--kinds", nargs="*", default=["kill", "once", "again"])
    args = given.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    for name in IMPORTED:
        importlib.import_module(name)
    sizes = {"kill": args.cases, "once": args.cases * 4 // 5, "again": args.cases // 5}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        reference = undisturbed(Path(name))
        for kind in args.kinds:
            counts = campaign(kind, sizes[kind], Path(name), reference, args.seed)
            codes = ", ".join(f"{code}: {n}" for code, n in sorted(counts.codes.items()))
            print(
                f"{kind}: {counts.blows} blows, {counts.rows} rows, {counts.stores} stores, "
                f"{counts.lost_steps} steps made twice in {counts.counted} of them, "
                f"{len(counts.wrong)} wrong; "
                f"{counts.trained} came after a step, {counts.late} too late; exit codes {codes}",
                flush=True,
            )
            wrong += counts.wrong
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(run())
