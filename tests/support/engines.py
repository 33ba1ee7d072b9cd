"""A sweep of 40 tiny runs on an engine, as a command in a process of its own, and what its rows
have to be."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise.digests import unsigned
from headwise.execute.leases import read_beat
from headwise.execute.sweep import sweep
from headwise.experiments.rank_paper import fig1
from headwise.experiments.settings import settings_of
from headwise.rows import MEASURED
from headwise.store import Store
from headwise.training.run import Run

SEEDS = 5
CHANGES = ["dim=8", "points=4", "ffn_dim=16", "ranks=8,2", "steps=240", "epoch=2", "batch=16"]
CHANGES += ["held_out=128", "evals=3"]  # eight points
SMALL = ["depths=1", "widths=1", "ranks=2", "lr=0.05"]  # one of them


def runs_of(changes: list[str] | None = None, seeds: int = SEEDS) -> list[Run]:
    """The runs of the sweep."""
    return fig1.runs(settings_of(fig1.EXPERIMENT, "quick", [*CHANGES, *(changes or [])], seeds))


def command(
    store: Path, *words: str, changes: list[str] | None = None, seeds: int = SEEDS
) -> list[str]:
    """The sweep as a command."""
    sets = [word for change in [*CHANGES, *(changes or [])] for word in ("--set", change)]
    head = [sys.executable, "-m", "headwise", "run", "fig1", "--device", "cpu", "--no-report"]
    return [
        *head,
        *("--json", "--seeds", str(seeds), "--store", str(store), "--checkpoint-every", "0"),
        *sets,
        *words,
    ]


def begin(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own; what it prints goes to a file."""
    with log.open("ab") as out:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a command, and to all that it started on this machine as its children."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finished(process: subprocess.Popen[bytes], log: Path, seconds: float = 240) -> str:
    """What a command that has to succeed prints."""
    code = process.wait(seconds)
    assert code == 0, log.read_text()
    return log.read_text()


def wait_for(what: Callable[[], Any], seconds: float = 90.0) -> Any:
    """Poll until something is so; how long it takes does not count."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
    return found


def beats(store: Path, group: str = "*") -> dict[Path, dict[str, Any]]:
    """The signs of life of workers that have not ended."""
    found = {path: read_beat(path) for path in store.glob(f"groups/{group}/*.beat")}
    return {path: beat for path, beat in found.items() if beat and not beat.get("state")}


def checkpoints(store: Path, group: str) -> list[Path]:
    """The checkpoints of a group's runs."""
    ids = json.loads((store / "groups" / group / "group.json").read_text())["ids"]
    paths = [store / "runs" / run_id / "checkpoint.safetensors" for run_id in ids]
    return [path for path in paths if path.exists()]


def attempts(store: Path) -> dict[str, list[dict[str, Any]]]:
    """What drivers have noted of each group's attempts."""
    paths = store.glob("groups/*/attempts.json")
    return {path.parent.name: json.loads(path.read_text())["attempts"] for path in paths}


def bits(row: dict[str, Any]) -> str:
    """A row without what is measured."""
    return json.dumps({k: v for k, v in row.items() if k not in MEASURED}, sort_keys=True)


def made_here(runs: list[Run], store: Path) -> dict[str, str]:
    """The rows of a sweep that nobody touched, made in this process."""
    return {row["id"]: bits(row) for row in sweep(runs, Store(store), device="cpu", workers=1)}


def assert_whole(store: Path, runs: list[Run], reference: dict[str, str]) -> None:
    """Every row there, once, bit for bit the undisturbed one; nothing half-made is left."""
    assert {path.name for path in (store / "runs").iterdir()} == {run.id for run in runs}
    for run in runs:
        folder = store / "runs" / run.id
        (line,) = (folder / "rows.jsonl").read_text().splitlines()
        assert bits(unsigned(json.loads(line))) == reference[run.id]
        names = {path.name for path in folder.iterdir()}
        assert names - {"lock"} == {"rows.jsonl", "run.json"}
