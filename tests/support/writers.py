"""Processes that write at once, and what they write."""

import subprocess
import sys
from typing import Any

from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.tasks import Farthest
from headwise.training.run import Recipe, Run


def make(seed: int = 0) -> Run:
    return Run(paper_shape(dim=4, rank=2, ffn_dim=3), Farthest(4, 3), Recipe(steps=100), seed)


def row(name: str, at: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "commit": "abc",
        "finished": f"2026-01-01T00:00:{at:02d}Z",
        "held_out": 0.5,
        **more,
    }


def parallel(code: str, *words: object) -> list[str]:
    """What the lines of `code` print; it forks real processes itself, so that torch is imported
    once."""
    head = (
        "import json, os, random, signal, sys, time\nfrom pathlib import Path\nfrom "
        "headwise.store import Store\n"
    )
    head += "def start(work, *args):\n    pid = os.fork()\n    if pid:\n        return pid\n"
    head += "    try:\n        work(*args)\n        os._exit(0)\n    except BaseException as e:\n"
    head += "        print(repr(e), file=sys.stderr, flush=True)\n        os._exit(1)\n"
    command = [sys.executable, "-c", head + code, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
