"""What the tests of engines share: a sweep of 40 runs, its undisturbed rows, and how it is seen."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.small_runs import bits

from headwise.digests import unsigned
from headwise.execute.groups import groups_in
from headwise.execute.leases import ended_here, read_beat
from headwise.execute.sweep import sweep
from headwise.experiments.rank_paper import fig1
from headwise.experiments.settings import settings_of
from headwise.store import Store
from headwise.training.run import Run

CHANGES = [
    "dim=8",
    "points=4",
    "ffn_dim=16",
    "ranks=8,2",
    "steps=180",
    "epoch=2",
    "batch=16",
    "held_out=128",
    "evals=3",
]
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


def runs_of(seeds: int, *changes: str) -> list[Run]:
    return fig1.runs(settings_of(fig1.EXPERIMENT, "quick", [*CHANGES, *changes], seeds=seeds))


def command(store: Path, on: list[str], seeds: int, *changes: str) -> list[str]:
    """`headwise run fig1 --on ENGINE`."""
    sets = [word for change in [*CHANGES, *changes] for word in ("--set", change)]
    words = ["run", "fig1", "--device", "cpu", "--no-report", "--json", "--seeds", str(seeds)]
    every = ["--checkpoint-every", "0", "--store", str(store)]
    return [sys.executable, "-m", "headwise", *words, *every, *on, *sets]


def environment() -> dict[str, str]:
    """For processes that are to find headwise wherever they start."""
    root = Path(__file__).parent.parent.parent
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{root / 'src'}:{root / 'tests'}"}


@contextlib.contextmanager
def driver(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A driver in a process of its own, killed at the end."""
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(what: Callable[[], Any], seconds: float = 300.0) -> Any:
    """Poll until something is so; how long it takes does not count."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
    return found


def count_rows(store: Path) -> int:
    return len(list(store.glob("runs/*/rows.jsonl")))


def living(store: Path) -> list[int]:
    """The processes of this machine that train groups now."""
    beats = [read_beat(path) for path in store.glob("groups/*/*.beat")]
    return [
        beat["pid"] for beat in beats if beat and not beat.get("state") and not ended_here(beat)
    ]


def undisturbed(folder: Path, runs: list[Run]) -> dict[str, str]:
    """Rows made in this process without checkpoints."""
    return {row["id"]: bits(row) for row in sweep(runs, Store(folder), device="cpu", workers=1)}


def assert_complete(store: Path, reference: dict[str, str]) -> None:
    """Every row there, once, bit for bit the undisturbed one; nothing half-made is left."""
    assert {p.name for p in (store / "runs").iterdir()} == set(reference)
    for run_id, expected in reference.items():
        folder = store / "runs" / run_id
        (line,) = (folder / "rows.jsonl").read_text().splitlines()
        assert bits(unsigned(json.loads(line))) == expected
        names = {p.name for p in folder.iterdir()}
        assert names - {"lock", "rows.jsonl", "run.json"} == set(), run_id
    for group in groups_in(store):
        assert not group.beats()
