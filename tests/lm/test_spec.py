"""`Pretraining` as a value: its id, and that it needs no torch."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.data import refused, written
from support.lm_runs import SHAPE, make_run

from headwise.lm.spec import Pretraining


def test_spec_loads_neither_torch_nor_numpy() -> None:
    code = """
import sys
from headwise.lm import Pretraining
from headwise.shape import Shape
shape = Shape(dim=8, depth=1, num_heads=2, causal=True, vocab_size=257)
Pretraining(shape=shape, steps=1, batch_tokens=16, length=16).id
print(sorted({"torch", "numpy", "safetensors"} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_id_is_of_values_not_of_paths(book: str, tmp_path: Path) -> None:
    run = make_run(book)
    assert Pretraining.of(json.loads(json.dumps(run.spec()))) == run
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in Path(book).iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    assert make_run(str(moved)).id == run.id
    written(moved / "b.txt", "other words. " * 99)
    assert make_run(str(moved)).id != run.id
    assert "is not what it was" in refused(make_run, str(moved), digest=run.digest)
    changes: dict[str, Any] = {
        "steps": 7,
        "batch_tokens": 77,
        "length": 8,
        "optimiser": "adamw",
        "lr": 0.1,
        "schedule": "cosine",
        "warmup": 0.3,
        "warmdown": 0.3,
        "weight_decay": 0.1,
        "clip": 2,
        "precision": "bf16",
        "evals": 2,
        "eval_tokens": 99,
        "evaluated_on": "test",
        "seed": 1,
        "shape": SHAPE.replace(depth=3),
    }
    assert set(changes) == {f.name for f in dataclasses.fields(run)} - {
        "source",
        "tokenizer",
        "digest",
    }
    ids = [make_run(book, **{name: value}).id for name, value in changes.items()]
    assert len({run.id, *ids}) == 1 + len(changes)
