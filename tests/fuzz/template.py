"""The good store that cases spoil: finished runs, unfinished ones with checkpoints, pages and
weights. Made once per campaign."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

import torch
from support.commands import CHOOSE, run_words
from support.groups import idle_group, tiny_runs
from support.lm_runs import make_run, stop, trained_row

from headwise.cli import main
from headwise.rows import CHECKPOINT_FILE
from headwise.store import Store
from headwise.tensor_files import read_tensors, write_tensors
from headwise.training.checkpoint import begin, save

BOOK = "a small book, of which every line is one more line.\n" * 40
OWN = """import dataclasses
from headwise.experiments import find
EXPERIMENT = dataclasses.replace(find("fig1"), name="mine", question="Is mine better?")
"""


CHOICE = [*CHOOSE, "--store", "store", "--seeds", "3"]
MEASURED = {"seconds": 1.0, "finished": "2026-01-01T00:00:00Z", "memory_bytes": 1}


def make_template(folder: Path) -> Path:
    """A store in `folder`, with rows of fig1, of an own experiment and of decoders, and with a
    checkpoint of each kind; the same bytes whenever one machine makes it."""
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        store, mine, book = Path("store"), Path("mine.py"), Path("book.txt")
        mine.write_text(OWN)
        book.write_text(BOOK)
        _fill(store, mine, book)
        for run_id in (path.parent.name for path in sorted(store.glob("runs/*/rows.jsonl"))):
            row = Store(store).row(run_id)
            assert row is not None
            timed = {name: 1.0 for name in ("tokens_per_second", "mfu") if row.get(name)}
            (store / "runs" / run_id / "rows.jsonl").unlink()
            Store(store).add({**row, **MEASURED, **timed})
        assert main([*CHOICE, "--no-report"]) == 0  # now of rows that all have the same times
        idle_group(store, tiny_runs(3))  # rows are of two seeds
        for path in store.rglob("*.safetensors"):
            path.write_bytes(_in_order(path.read_bytes()))
    return folder / "store"


def _in_order(data: bytes) -> bytes:
    """A file of tensors with its metadata in order; the library writes it in any."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def _fill(store: Path, mine: Path, book: Path) -> None:
    words = run_words(store, "--seeds", "2", "--keep-weights")
    with torch.random.fork_rng():
        assert main([*CHOICE, "--no-report"]) == 0
        assert main(words) == 0
        assert main(["run", str(mine), *words[2:]]) == 0
        for run in tiny_runs(3):
            if Store(store).row(run.id) is None:
                state = begin(run)
                state.epoch, state.curve = 1, [0.5]
                save(store / "runs", state)
                (store / "runs" / run.id / "run.json").write_text("{}\n")
        done, begun = (make_run(str(book), seed=seed, lr=1e-3) for seed in (0, 1))
        Store(store).add(trained_row(done, folder=store / "runs"))
        stop(begun, 2, store / "runs")
        path = store / "runs" / begun.id / CHECKPOINT_FILE
        about, tensors = read_tensors(path)
        about["state"] = json.dumps({**json.loads(about["state"]), "seconds": 1.0})
        write_tensors(path, tensors, about)
