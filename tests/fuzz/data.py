"""Bad data sets: texts, images and tables of sentences."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from support.data import NAMES, digits, idx
from support.images import BATCHES, cifar_arrays, cifar_batch, pickled
from support.sentences import GOOD, HELD

from tests.fuzz.cases import Case, File, Special, special, spoiled_file
from tests.fuzz.formats import Runs
from tests.fuzz.options import QUICKLY, SMALL
from tests.fuzz.values import STRANGE_TEXTS, any_value, spoiled_bytes, typed

TEXT = b"the quick brown fox jumps over the lazy dog, again and again.\n" * 60


def of_task(rng: random.Random, task: str, files: dict[str, File], **fields: Any) -> Case:
    """A task with these fields: made and sampled, or its runs named by a command that trains
    nothing."""
    if rng.random() < 0.7:
        return Case(("task", task, json.dumps(fields)), files, command="python")
    changes = [f"{key}={value}" for key, value in fields.items() if key in ("source", "length")]
    sizes = [size for size in SMALL["map"] if not size.startswith("points")]
    words = ["run", "map", task, *QUICKLY, "--no-train", "--seeds", "1", "--set", *sizes]
    return Case((*words, *changes), files)


def texts(rng: random.Random) -> Case:
    """A text, or a folder of texts, for `pretrain` and for the task `text`."""
    data = rng.choice(
        (
            spoiled_bytes(rng, TEXT),
            spoiled_bytes(rng, TEXT),
            rng.choice(STRANGE_TEXTS).encode("utf-8", "replace"),
            b"",
            b" \n\t" * 50,
            b"\xff" * 100,
            "é".encode() * 999,
            b"a",
            b"a" * 9000,
            TEXT + b"\xf0\x9f\x99",
            "\ufeff".encode() + TEXT,
            "\ud800".encode("utf-8", "surrogatepass") + TEXT,
        )
    )
    name, source = rng.choice(
        (("book.txt", "book.txt"), ("texts/a.txt", "texts"), ("x.bin", "x.bin"))
    )
    files: dict[str, File] = {name: data}
    how = rng.random()
    if how < 0.12:
        files[name] = special(rng, name)
    elif how < 0.2:
        files = {"texts/a.txt": TEXT, "texts/b.txt": special(rng, "b.txt")}
        source = "texts"
    elif how < 0.25:
        files["texts/deeper"] = Special("link", "..")
    if rng.random() < 0.5:
        length = rng.choice((8, 8, 3, 4000, 10**8))
        return of_task(rng, "text", files, length=length, source=source)
    words = ["pretrain", "--text", source, "--device", "cpu", "--steps", "1", "--evals", "1"]
    words += ["--batch-tokens", "8", "--length", "4", "--eval-tokens", "8"]
    return Case((*words, "--set", "dim=8", "depth=1", "num_heads=1"), files)


# ---- images


def mnist(rng: random.Random) -> dict[str, File]:
    """MNIST's four files, some of them spoiled, some gzipped."""
    files: dict[str, File] = {}
    for name, array in zip(NAMES, digits(size=4, train=6, held=4), strict=True):
        data = idx(array)
        if rng.random() < 0.25:
            data = spoiled_header(rng, data)
        if rng.random() < 0.3:
            zipped = gzip.compress(data)
            files[f"images/{name}.gz"] = (
                spoiled_file(rng, name, zipped) if rng.random() < 0.4 else zipped
            )
        else:
            files[f"images/{name}"] = spoiled_file(rng, name, data) if rng.random() < 0.2 else data
    return files


def spoiled_header(rng: random.Random, data: bytes) -> bytes:
    """Other lengths of axes than the bytes have."""
    axes = data[3]
    sizes = [rng.choice((0, 1, 4, 6, 7, 2**16, 2**31, 2**32 - 1)) for _ in range(axes)]
    return data[:4] + struct.pack(f">{axes}I", *sizes) + data[4 + 4 * axes :]


def bomb(rng: random.Random) -> dict[str, File]:
    """A gzip of some megabytes that swells to gigabytes; made of equal members."""
    member = gzip.compress(bytes(1 << 24))
    files = dict(mnist(rng))
    head = idx(np.zeros((1, 4, 4), np.uint8))[:16]
    files.pop("images/train-images-idx3-ubyte", None)
    files["images/train-images-idx3-ubyte.gz"] = gzip.compress(head) + member * 150
    return files


def cifar(rng: random.Random) -> dict[str, File]:
    """CIFAR-10's batches, as pickles or as records."""
    files: dict[str, File] = {}
    form = rng.choice(("python 2", 4, "bin"))
    for name, (images, labels) in zip(BATCHES, cifar_arrays(), strict=True):
        if form == "bin":
            records = np.concatenate((labels[:, None].astype(np.uint8), images), 1)
            data, path = records.tobytes(), f"images/{name}.bin"
        else:
            batch = cifar_batch(images, labels)
            if rng.random() < 0.15:
                batch[rng.choice((b"labels", b"data"))] = rng.choice(
                    (any_value(rng), [10**9], np.zeros((2, 3)), Runs())
                )
            data, path = pickled_or(batch, form), f"images/{name}"
        files[path] = spoiled_file(rng, name, data) if rng.random() < 0.12 else data
    if rng.random() < 0.2:
        files[rng.choice(sorted(files))] = pickle.dumps(Runs())
    return files


def pickled_or(batch: object, form: object) -> bytes:
    """Python 2 has no words for some of the values that are put in."""
    try:
        return pickled(batch, form)
    except Exception:
        return pickle.dumps(batch)


def pictures(rng: random.Random) -> dict[str, File]:
    """Folders of pictures by class."""
    from PIL import Image

    files: dict[str, File] = {}
    for part in ("train", rng.choice(("test", "test", "val", "tset"))):
        for name in ("a", "b"):
            size = rng.choice(((4, 4),) * 8 + ((4, 5), (1, 1), (0, 3)))
            out = io.BytesIO()
            with_alpha = rng.choice(("RGB", "RGB", "L", "RGBA", "1"))
            if min(size):
                Image.new(with_alpha, size).save(out, "PNG")
            data = out.getvalue()
            path = f"images/{part}/{name}/1.{rng.choice(('png',) * 5 + ('jpg', 'txt'))}"
            files[path] = spoiled_file(rng, "1.png", data) if rng.random() < 0.25 else data
    return files


def images(rng: random.Random) -> Case:
    """A folder of images for the task `images`."""
    makers: tuple[Callable[[random.Random], dict[str, File]], ...] = (
        mnist, mnist, mnist, cifar, cifar, pictures, pictures,
    )  # fmt: skip
    make = bomb if rng.random() < 0.02 else rng.choice(makers)
    patch, source = rng.choice((1, 2, 4, 4, 3)), rng.choice(("images",) * 9 + ("images/train",))
    return of_task(rng, "images", make(rng), patch=patch, source=source)


# ---- sentences


def sentences(rng: random.Random) -> Case:
    """Tables of sentences for the task `sentences`."""
    files: dict[str, File] = {}
    for name, table in (("train.tsv", GOOD), ("dev.tsv", HELD)):
        header = rng.choice(("sentence\tlabel",) * 6 + ("label\tsentence", "a\tb", "", "label"))
        lines = [header, *("\t".join(map(str, row)) for row in table)]
        for _ in range(rng.randint(0, 2)):
            i = rng.randrange(len(lines))
            strange = typed(rng.choice(STRANGE_TEXTS))
            lines[i] = rng.choice(
                (
                    strange,
                    lines[i] + "\t" + strange,
                    strange + "\t1",
                    "",
                    "good\t",
                    "good\t7",
                    "\t\t\t",
                )
            )
        data = rng.choice(("\n", "\r\n", "\r")).join(lines).encode("utf-8", "replace")
        files[f"glue/{name}"] = spoiled_file(rng, name, data) if rng.random() < 0.3 else data
    if rng.random() < 0.1:
        del files[rng.choice(sorted(files))]
    level = rng.choice(("word", "byte", "char"))
    return of_task(
        rng, "sentences", files, length=rng.choice((4, 8, 1)), source="glue", level=level
    )
