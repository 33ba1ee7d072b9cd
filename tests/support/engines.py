"""Drivers in processes of their own that write to files, and what they have noted in a store."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from support.clusters import environment

from headwise.execute.leases import read_beat

SMALL = ["depths=1", "widths=1", "ranks=2", "lr=0.05"]  # one point of a sweep


def begin(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own; what it prints goes to a file."""
    here = environment()
    if more := os.environ.get("PYTHONPATH"):
        here["PYTHONPATH"] += f":{more}"
    with log.open("ab") as out:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=here,
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
