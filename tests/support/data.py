"""What the tests of tasks with data share: mistakes that are one line, texts and files in MNIST's
format."""

import gzip
import random
import struct

import numpy as np
import pytest

from headwise.errors import UsageError
from headwise.tasks import hub as hub_module
from headwise.tasks import images as images_module
from headwise.tasks import sentences as sentences_module
from headwise.tasks import text as text_module


def refused(make, *given, **named):
    """The message of a user's mistake: one line, and no other error behind it."""
    with pytest.raises(UsageError) as caught:
        make(*given, **named)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) > 20
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__, (
        "another traceback is shown before it"
    )
    return message


def letters(count, seed=0, alphabet="abcdefghijklmnopqrstuvwxyz"):
    """A text in which nearly every few characters stand once."""
    return "".join(random.Random(seed).choices(alphabet, k=count))


def written(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def forget():
    """What a new process knows of files."""
    for module, names in (
        (text_module, ("_read", "_part", "_counted")),
        (images_module, ("_load", "_part")),
        (sentences_module, ("_load", "_vocabulary", "_ids", "_part")),
        (hub_module, ("_load",)),
    ):
        for name in names:
            getattr(module, name).cache_clear()


def idx(array):
    """MNIST's format."""
    return (
        b"\0\0\x08"
        + bytes([array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(np.uint8).tobytes()
    )


NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def digits(size=6, train=11, held=7, classes=3, seed=0):
    """Images and labels of both parts; every class is among the training ones."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 256, (train, size, size), dtype=np.uint8),
        np.concatenate((np.arange(classes), rng.integers(0, classes, train - classes))).astype(
            np.uint8
        ),
        rng.integers(0, 256, (held, size, size), dtype=np.uint8),
        rng.integers(0, classes, held).astype(np.uint8),
    ]


def mnist(folder, arrays, gz=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(NAMES, arrays, strict=True):
        data = array if isinstance(array, bytes) else idx(array)
        (folder / (name + ".gz" * gz)).write_bytes(gzip.compress(data) if gz else data)
    return str(folder)
