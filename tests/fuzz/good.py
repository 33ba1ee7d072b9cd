"""The inputs that cases spoil, unspoiled: every one is taken with exit 0, so a refusal is not for
another reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from support.commands import TINY
from support.data import NAMES, digits, idx
from support.groups import tiny_runs
from support.images import BATCHES, cifar_arrays
from support.sentences import GOOD, HELD

from headwise.execute.groups import Options, group_of
from tests.fuzz.cases import Case, File
from tests.fuzz.code import EXPERIMENT, MODEL, TASK
from tests.fuzz.data import TEXT
from tests.fuzz.formats import FAMILIES, OWN_NANOCHAT, nanochat_files, row_of, tokenizer_text
from tests.fuzz.options import QUICKLY
from tests.fuzz.template import CHOICE
from tests.fuzz.tools import MAPPING, TRACKER, checkpoint
from tests.fuzz.values import text_of

SMALL_TEXT = ["--text", "book.txt", "--device", "cpu", "--steps", "1", "--evals", "1"]
SMALL_TEXT += ["--batch-tokens", "8", "--length", "4", "--eval-tokens", "8"]
SIZES = ["dim=8", "depth=1", "num_heads=1"]
RUN = ["run", "fig1", *QUICKLY, "--seeds", "1"]


def _task(name: str, files: dict[str, File], **fields: object) -> Case:
    return _good(("task", name, json.dumps(fields)), files, "python")


def _good(words: tuple[str, ...], files: dict[str, File], command: str = "headwise") -> Case:
    return Case(words, files, "python" if command == "python" else "headwise", "good")


def _table(rows: list[tuple[str, int]]) -> bytes:
    return "\n".join(["sentence\tlabel", *(f"{text}\t{label}" for text, label in rows)]).encode()


def good_cases() -> dict[str, Case]:
    """A case by what it reads."""
    book: dict[str, File] = {"book.txt": TEXT}
    found = {
        f"config of {name or 'nanochat itself'}": _good(
            ("cost", "config.json"), {"config.json": text_of(document)}
        )
        for name, document in {
            **{name: {**keys, "model_type": name} for name, keys in FAMILIES.items()},
            "": OWN_NANOCHAT,
        }.items()
    }
    rows = b"\n".join(text_of(row_of(seed)) for seed in range(3))
    for name in ("fig1", "map", "leaner"):
        words = ("draw", name, "rows.jsonl", "--output", "out.svg")
        found[f"rows of {name}"] = _good(words, {"rows.jsonl": rows})
    words = ("pretrain", *SMALL_TEXT, "--set", *SIZES)
    found["text"] = _good(words, book)
    tokenizer = {**book, "t.json": tokenizer_text()}
    found["tokenizer"] = _good((*words[:1], "--tokenizer", "t.json", *words[1:]), tokenizer)
    arrays = digits(size=4, train=6, held=4)
    mnist: dict[str, File] = {
        f"images/{name}": idx(array) for name, array in zip(NAMES, arrays, strict=True)
    }
    found["images of MNIST"] = _task("images", mnist, patch=2, source="images")
    cifar: dict[str, File] = {
        f"images/{name}.bin": np.concatenate((y[:, None].astype(np.uint8), x), 1).tobytes()
        for name, (x, y) in zip(BATCHES, cifar_arrays(), strict=True)
    }
    found["images of CIFAR"] = _task("images", cifar, patch=4, source="images")
    glue: dict[str, File] = {"glue/train.tsv": _table(GOOD), "glue/dev.tsv": _table(HELD)}
    found["sentences"] = _task("sentences", glue, length=8, source="glue", level="word")
    found["text as a task"] = _task("text", book, length=8, source="book.txt")
    found["nanochat checkpoint"] = _good(("nanochat", "."), nanochat_files(), "python")
    code: dict[str, File] = {
        "my_task.py": TASK.encode(),
        "my_model.py": MODEL.encode(),
        "my_experiment.py": EXPERIMENT.encode(),
    }
    tiny = [change for change in TINY if not change.startswith("points=")]
    found["own task"] = _good(("run", "fig1", "my_task.py", *RUN[2:], "--set", *tiny), code)
    found["own model"] = _good((*RUN, "--model", "my_model.py", "--set", *TINY), code)
    found["own experiment"] = _good(("run", "my_experiment.py", *RUN[2:], "--set", *TINY), code)
    for words in (("list",), ("report",), ("draw", "fig1")):
        place = ("store",) if words[0] == "draw" else ("--store", "store")
        found[f"store of {words[0]}"] = Case((*words, *place), store=True, expected="good")
    begun = [run for run in tiny_runs(3) if run.seed == 2]
    group = group_of(Path("store"), begun, 8, 1e6, Options(), {})
    for words in (
        (*CHOICE, "--no-report"),
        ("list", "--store", "store", "--live"),
        ("cancel", "--store", "store"),
        ("worker", f"store/groups/{group.id}"),
        *(("export", "--store", "store", "--to", to) for to in ("csv", "parquet", "tensorboard")),
        ("export", "--store", "store", "--to", "mine.py:Mine"),
    ):
        mine: dict[str, File] = {"mine.py": TRACKER}
        name = f"store of {words[0]} {words[-1]}"
        found[name] = Case(tuple(words), mine, store=True, expected="good")
    files: dict[str, File] = {
        key: checkpoint()[key] for key in ("config.json", "model.safetensors")
    }
    found["checkpoint"] = _good(("inspect", ".", "--no-page"), dict(files))
    mapped = ("inspect", "model.safetensors", "--mapping", "map.toml", "--no-page")
    del files["config.json"]
    found["mapping"] = _good(mapped, {**files, "map.toml": MAPPING})
    document = {"config.json": text_of({**FAMILIES["llama"], "model_type": "llama"})}
    found["plan like"] = _good(("plan", "--like", "config.json", "--keep", "params"), document)
    again = (*RUN[:-1], "3", "--store", "store", "--checkpoint-every", "0", "--set", *TINY)
    found["store of run"] = Case(again, store=True, expected="good")
    return found
