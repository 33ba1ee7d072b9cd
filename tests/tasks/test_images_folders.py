"""Folders of images read back exactly, and every fault of theirs one line."""

import collections
import itertools
import random
import re
import struct
import sys

import numpy as np
import pytest
from support.data import refused, written
from support.images import check_sampled

from headwise.errors import UsageError
from headwise.tasks import Images
from headwise.tasks import images as images_module

pytestmark = pytest.mark.usefixtures("no_network")


def picture(path, array, **options):
    image = pytest.importorskip(
        "PIL.Image", reason="folders of images are read with pillow, which is not installed"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(array).save(path, **options)


def pictures(folder, size=6, held="test"):
    """Two parts of three classes, four and two images a class; their arrays and labels in order of
    name."""
    rng, parts = np.random.default_rng(3), {}
    for part, count in (("train", 4), (held, 2)):
        found = []
        for label, name in enumerate(("cat", "dog", "eel")):
            for i in range(count):
                array = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
                picture(folder / part / name / f"{i}.{('png', 'bmp')[i % 2]}", array)
                found.append((array.transpose(2, 0, 1), label))
        parts[part] = np.stack([a for a, _ in found]), np.array([y for _, y in found])
    return parts["train"], parts[held]


@pytest.mark.parametrize("held", ["test", "val"])
def test_folders_of_images_are_read_exactly(tmp_path, held):
    (train, labels), (test, test_labels) = pictures(tmp_path / "f", held=held)
    (tmp_path / "f" / "train" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "f" / "README").write_text("nor this")
    task = Images(3, str(tmp_path / "f"))
    assert (task.tokens, task.in_dim, task.classes) == (4, 27, 3)
    data = images_module._load(task.source)
    assert np.array_equal(data.images.numpy(), train)
    assert np.array_equal(data.labels.numpy(), labels)
    assert np.array_equal(data.held_images.numpy(), test)
    assert np.array_equal(data.held_labels.numpy(), test_labels)
    check_sampled(task, 0, train, labels, train)
    check_sampled(task, None, test, test_labels, train)


def test_grey_images_have_three_equal_channels_and_test_comes_before_val(tmp_path):
    pictures(tmp_path / "f")
    pictures(tmp_path / "f", held="val")
    grey = np.arange(36, dtype=np.uint8).reshape(6, 6)
    picture(tmp_path / "f" / "train" / "cat" / "0.png", grey)
    picture(tmp_path / "f" / "test" / "cat" / "0.png", grey)
    data = images_module._load(str(tmp_path / "f"))
    for images in (data.images, data.held_images):
        assert np.array_equal(images[0].numpy(), np.stack([grey] * 3))


def spoil(what):
    """Folders of images with one fault."""

    def make(folder):
        pictures(folder)
        what(folder)

    return make


def remove(folder):
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def square(size):
    return np.zeros((size, size, 3), np.uint8)


BAD_FOLDERS = {
    "no test": (lambda f: remove(f / "test"), "{0} has a folder train but neither test nor val"),
    "one class": (
        lambda f: [
            remove(f / part / name) for part in ("train", "test") for name in ("dog", "eel")
        ],
        "{0}/train must hold a folder a class, at least two, got 1",
    ),
    "a class of test alone": (
        lambda f: picture(f / "test" / "fox" / "0.png", square(6)),
        ("{0}/test has the class fox, which {0}/train has not"),
    ),
    "a class without images": (
        lambda f: [
            path.rename(path.with_suffix(".tiff")) for path in (f / "train" / "dog").iterdir()
        ],
        "{0}/train/dog holds no images; their names must end in .png, .jpg, .jpeg, .bmp, .webp",
    ),
    "several sizes": (
        lambda f: picture(f / "train" / "eel" / "1.bmp", np.zeros((5, 7, 3), np.uint8)),
        "images must have one size: {0}/train/cat/0.png is 6 x 6, {0}/train/eel/1.bmp is 7 x 5",
    ),
    "another size in test": (
        lambda f: [picture(p, square(4)) for p in sorted((f / "test").rglob("*.*"))],
        "training and held-out images differ in size: 6 x 6 x 3 and 4 x 4 x 3 in {0}",
    ),
    "not square": (
        lambda f: [picture(p, np.zeros((6, 4, 3), np.uint8)) for p in sorted(f.rglob("*.*"))],
        ("images must be square, got 4 x 6 in {0}"),
    ),
    "no image": (
        lambda f: (f / "train" / "dog" / "0.png").write_text("<html>"),
        "{0}/train/dog/0.png is not an image that can be read (UnidentifiedImageError)",
    ),
    "an empty one": (
        lambda f: (f / "test" / "dog" / "1.bmp").write_bytes(b""),
        ("{0}/test/dog/1.bmp is not an image that can be read "),
    ),
    "cut off": (
        lambda f: (f / "train" / "dog" / "0.png").write_bytes(
            (f / "train" / "dog" / "0.png").read_bytes()[:90]
        ),
        "{0}/train/dog/0.png is not an image that can be read (OSError)",
    ),
    "a folder as an image": (
        lambda f: (f / "train" / "dog" / "9.png").mkdir(),
        ("{0}/train/dog/9.png is not an image that can be read "),
    ),
    "nothing in test": (
        lambda f: [p.unlink() for p in (f / "test").rglob("*.*")],
        ("{0} holds no held-out images"),
    ),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_bad_folders_of_images_die_with_one_line(tmp_path, name):
    what, message = BAD_FOLDERS[name]
    spoil(what)(tmp_path / "source")
    assert refused(Images, 3, str(tmp_path / "source")).startswith(
        message.format(tmp_path / "source")
    )


def test_damaged_images_are_one_line_whatever_pillow_raises(tmp_path):
    """300 times a few bytes changed or cut off, seed 0; among them a size of billions of pixels."""
    rng, good = random.Random(0), {}
    for kind in ("png", "bmp", "jpg"):
        picture(
            tmp_path / f"good.{kind}",
            np.random.default_rng(0).integers(0, 256, (6, 6, 3), dtype=np.uint8),
        )
        good[kind] = (tmp_path / f"good.{kind}").read_bytes()
    bomb = bytearray(good["bmp"])
    bomb[18:26] = struct.pack("<ii", 60_000, 60_000)
    cases = [("bmp", bytes(bomb))]
    for _ in range(300):
        kind = rng.choice(list(good))
        damaged = bytearray(good[kind])
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        cases.append(
            (kind, bytes(damaged[: rng.randrange(len(damaged))] if rng.random() < 0.3 else damaged))
        )
    seen = collections.Counter()
    for kind, content in cases:
        path = tmp_path / kind / "a" / f"x.{kind}"
        written(path, content)
        try:
            images_module._class_images(tmp_path / kind, ["a"])
        except UsageError as e:
            found = re.fullmatch(rf"{path} is not an image that can be read \((\w+)\)", str(e))
            assert found, e  # noqa: PT017
            seen[found[1]] += 1
    assert seen["DecompressionBombError"] >= 1
    assert sum(seen.values()) > 150


def test_folders_without_pillow_are_refused_with_the_remedy(tmp_path, monkeypatch):
    for part, name in itertools.product(("train", "test"), ("cat", "dog")):
        written(tmp_path / "f" / part / name / "0.png", b"")
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert (
        refused(Images, 3, str(tmp_path / "f"))
        == "folders of images need pillow: pip install pillow"
    )
