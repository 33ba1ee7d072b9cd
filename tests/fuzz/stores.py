"""Damaged and hostile stores: marks, rows, notes, specifications, checkpoints, weights, folders."""

from __future__ import annotations

import functools
import json
import pickle
import random
import struct
from pathlib import Path
from typing import Any

from support.commands import TINY

from tests.fuzz.cases import Case, File, Special, special, spoiled_file
from tests.fuzz.formats import Runs, row_of
from tests.fuzz.options import QUICKLY
from tests.fuzz.values import any_value, document_text, spoiled, spoiled_bytes, text_of

HOSTILE = b"open('RAN', 'w')\n"


@functools.cache
def store_files(template: Path) -> dict[str, bytes]:
    """The files of the good store by their names within it."""
    return {
        str(path.relative_to(template)): path.read_bytes()
        for path in sorted(template.rglob("*"))
        if path.is_file()
    }


def commands(rng: random.Random) -> tuple[str, ...]:
    """What reads a store."""
    run = ("run", "fig1", *QUICKLY, "--store", "store", "--seeds", "3", "--checkpoint-every", "0")
    settings = ("--set", *TINY)
    return rng.choice(
        (
            ("list", "--store", "store"),
            ("list", "--store", "store", "--json", "--older"),
            ("report", "--store", "store"),
            ("report", "--store", "store"),
            ("draw", "fig1", "store", "--output", "out.svg"),
            (*run, "--no-train", *settings),
            (*run, *settings),
            (*run, "--keep-weights", *settings),
        )
    )


def stores(rng: random.Random, template: Path) -> Case:
    """One or two files of a store spoiled, or strange ones put beside them."""
    files = spoil_store(rng, store_files(template))
    return Case(commands(rng), {f"store/{name}": file for name, file in files.items()}, store=True)


def spoil_store(rng: random.Random, good: dict[str, bytes]) -> dict[str, File]:
    """One or two files of a store as they should not be, by their names within it."""
    files: dict[str, File] = {}
    for _ in range(rng.randint(1, 2)):
        files |= rng.choice((_spoiled, _spoiled, _spoiled, _note, _row, _strange, _checkpoint))(
            rng, good
        )
    return files


def decoders(rng: random.Random, template: Path) -> Case:
    """The weights of a finished decoder, read in Python."""
    good = store_files(template)
    sizes = {name: len(data) for name, data in good.items() if name.endswith("weights.safetensors")}
    name = max(sizes, key=lambda name: sizes[name])  # the decoder's are the largest
    content: File = good[name]
    if rng.random() < 0.9:
        content = spoiled_file(rng, name, good[name])
    if rng.random() < 0.5:
        content = _forged(rng, good[name], "run")
    return Case(("decoder", "."), {"weights.safetensors": content}, command="python")


def _spoiled(rng: random.Random, good: dict[str, bytes]) -> dict[str, File]:
    """A file with spoiled bytes; kinds of files are as likely as each other."""
    kinds: dict[str, list[str]] = {}
    for name in good:
        if not name.endswith((".png", ".html", "lock")):
            kinds.setdefault(name.rsplit("/", 1)[-1], []).append(name)
    name = rng.choice(kinds[rng.choice(sorted(kinds))])
    if name.endswith((".json", ".jsonl")) and rng.random() < 0.5:
        lines = (
            [json.loads(line) for line in good[name].decode().splitlines() if "\n" not in line]
            if name.endswith(".jsonl")
            else [json.loads(good[name])]
        )
        return {name: b"\n".join(document_text(rng, line) for line in lines) + b"\n"}
    if rng.random() < 0.1:
        return {name: Special("removed")}
    return {name: spoiled_file(rng, name, good[name])}


def _note(rng: random.Random, good: dict[str, bytes]) -> dict[str, File]:
    """A note that names code, or strange runs."""
    note = json.loads(good["experiments/fig1.json"])
    code = rng.choice(("x.py", "store/x.py", "./store/nested/x.py", "/tmp/x.py", "x", "store"))
    note |= rng.choice(
        (
            {"source": code},
            {"source": any_value(rng)},
            {"ids": ["..", "../../x", "/", "", "a" * 300, "\0"]},
            {"ids": [any_value(rng)]},
            {"page": any_value(rng)},
            {"settings": {"task": code, "model": code}},
            {"preset": any_value(rng), "command": any_value(rng)},
        )
    )
    name = rng.choice(("fig1", "mine", "map", "pretrain", "x", "é", "-", "a b", "theory", "RAN.py"))
    files: dict[str, File] = {f"experiments/{name}.json": text_of(note)}
    files |= dict.fromkeys(("x.py", "nested/x.py", "experiments/x.py"), HOSTILE)
    if name == "mine" and "experiments/mine.json" in good:
        own = json.loads(good["experiments/mine.json"])
        files["experiments/mine.json"] = text_of({**own, "page": spoiled(rng, own.get("page"))})
    return files


def _row(rng: random.Random, good: dict[str, bytes]) -> dict[str, File]:
    """Rows of other runs, of no run, or with values that no row has."""
    names = [name for name in good if name.endswith("rows.jsonl")]
    name = rng.choice(names)
    row: dict[str, Any] = json.loads(good[name].decode().splitlines()[-1])
    how = rng.randrange(5)
    if how == 0:
        row[rng.choice(sorted(row))] = any_value(rng)
    elif how == 1:
        row = json.loads(good[rng.choice(names)].decode().splitlines()[-1])
    elif how == 2:
        row = spoiled(rng, row)
    elif how == 3:
        row |= {"task": rng.choice(("x.py", "language", "x" * 999)), "commit": any_value(rng)}
    line = text_of(row)
    if how == 4:
        folder = rng.choice(("x", "é", "0" * 16, "a" * 255, "RAN"))
        return {f"runs/{folder}/rows.jsonl": text_of({**row_of(0), "id": folder}) + b"\n"}
    return {name: rng.choice((good[name], b"")) + line + rng.choice((b"\n", b""))}


def _strange(rng: random.Random, good: dict[str, bytes]) -> dict[str, File]:
    """What does not belong into a store."""
    name = rng.choice(
        ("headwise.json", "experiments/fig1.json", "experiments/x.json", "runs/x/rows.jsonl",
         "runs/x", "experiments/x.json/y", "runs/x/run.json", "x.jsonl", "report.html",
         next(name for name in good if name.endswith("rows.jsonl")),
         next(name for name in good if name.endswith("checkpoint.safetensors")))
    )  # fmt: skip
    if rng.random() < 0.6:
        return {name: special(rng, name)}
    return {name: spoiled_bytes(rng, b'{"format": 1}\n')}


def _checkpoint(rng: random.Random, good: dict[str, bytes]) -> dict[str, File]:
    """A checkpoint or weights whose header says other than its bytes."""
    names = [name for name in good if name.endswith(".safetensors")]
    begun = [name for name in names if "checkpoint" in name]
    name = rng.choice(begun * 3 + names)
    if rng.random() < 0.15:
        return {name: rng.choice((pickle.dumps(Runs()), good[rng.choice(names)]))}
    return {name: _forged(rng, good[name], "state")}


def _forged(rng: random.Random, data: bytes, key: str) -> bytes:
    """A file of tensors whose header was spoiled, or what is JSON in its metadata."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    about = header["__metadata__"]
    how = rng.random()
    if how < 0.2:
        size = rng.choice((0, 1, size - 1, 2**31, 2**63, 2**64 - 1))
        return struct.pack("<Q", size) + data[8:]
    if how < 0.6 and key in about:
        about[key] = text_of(spoiled(rng, json.loads(about[key]))).decode("utf-8", "replace")
        if rng.random() < 0.7:  # as a forger would
            about.pop("digest", None)
    else:
        header = spoiled(rng, header)
    text = text_of(header)
    return struct.pack("<Q", len(text)) + text + data[8 + size :]
