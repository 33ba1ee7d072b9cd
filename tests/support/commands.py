"""What tests of the command line share: a tiny experiment, and that a mistake is one line."""

import sys
from pathlib import Path

import pytest

from headwise.cli import main

HEADWISE = [sys.executable, "-m", "headwise"]
TINY = [
    "dim=4",
    "points=4",
    "ffn_dim=8",
    "ranks=4,1",
    "depths=1",
    "widths=1,2",
    "lr=0.01",
    "steps=4",
    "epoch=2",
    "batch=4",
    "held_out=8",
]
LONG = [
    "dim=8",
    "points=4",
    "ffn_dim=16",
    "ranks=8",
    "depths=1",
    "widths=1,2",
    "lr=0.01",
    "steps=1600",
    "epoch=2",
    "batch=16",
    "held_out=8",
]
# A question of a second: two shapes, one rate
CHOOSE = ["choose", "farthest", "--params", "2k", "--dim", "8", "--heads", "1,2", "--depths", "1"]
CHOOSE += ["--steps", "4", "--batch", "4", "--rates", "0.01", "--trials", "1", "--workers", "1"]
CHOOSE += ["--device", "cpu"]


def sets(changes: list[str]) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def run_words(store: Path, *words: str, changes: list[str] = TINY, workers: int = 1) -> list[str]:
    return [
        "run",
        "fig1",
        "--device",
        "cpu",
        "--store",
        str(store),
        "--workers",
        str(workers),
        *sets(changes),
        *words,
    ]


def finished(folder: Path) -> Path:
    """The store of a tiny experiment with figure and report."""
    assert main(run_words(folder / "store", "--seeds", "2")) == 0
    return folder / "store"


def one_line(err: str) -> str:
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert err.startswith("headwise: error: ")
    return err.removeprefix("headwise: error: ").rstrip("\n")


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return one_line(err)
