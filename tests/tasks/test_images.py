"""Images: files of every kind read back exactly, patches, scaling, and every fault of the data one
line."""

import collections
import dataclasses
import gzip
import io
import itertools
import math
import os
import pickle
import random
import re
import struct
import sys

import numpy as np
import pytest
import torch
from support.data import NAMES, digits, forget, idx, letters, mnist, refused, written
from support.tolerance import STANDARD_ERRORS, close, same, seeded

from headwise.errors import UsageError
from headwise.tasks import Images, task_of
from headwise.tasks import images as images_module
from headwise.tasks.images import patches

pytestmark = pytest.mark.usefixtures("no_network")


# ---- images


def test_patches_equal_nested_loops():
    x = torch.randn(3, 5, 14, 21, generator=seeded(1))
    found = patches(x, 7)
    assert found.shape == (3, 2 * 3, 7 * 7 * 5)
    for b, i, j in itertools.product(range(3), range(2), range(3)):
        cut = [
            x[b, c, 7 * i + v, 7 * j + u].item()
            for v in range(7)
            for u in range(7)
            for c in range(5)
        ]
        assert found[b, 3 * i + j].tolist() == cut
    same(patches(x, 1), x.permute(0, 2, 3, 1).flatten(1, 2))


def check_sampled(task, step, images, labels, training):
    """Every sample is one of these images, scaled by the training part's mean and spread by channel
    and cut into patches."""
    mean = training.mean((0, 2, 3), keepdims=True, dtype=np.float64)
    spread = training.astype(np.float64).std((0, 2, 3), keepdims=True)
    known = patches(torch.from_numpy((images - mean) / spread), task.patch).flatten(1)
    x, y = task.sample(seeded(1), 40 * len(images), step)
    assert x.dtype == torch.float32
    assert x.shape == (40 * len(images), task.tokens, task.in_dim)
    far, which = torch.cdist(x.flatten(1).double(), known).min(1)
    assert far.max() < 1e-4
    assert set(which.tolist()) == set(range(len(images))), "every image is drawn"
    same(y, torch.from_numpy(labels.astype(np.int64))[which])


@pytest.mark.parametrize("gz", [False, True])
def test_files_of_mnist_are_read_exactly(tmp_path, gz):
    arrays = digits()
    task = Images(3, mnist(tmp_path / "m", arrays, gz))
    assert (task.tokens, task.in_dim, task.classes, task.answer_dim, task.vocab) == (4, 9, 3, 3, 0)
    data = images_module._load(task.source)
    for found, expected in zip(
        (data.images, data.labels, data.held_images, data.held_labels), arrays, strict=True
    ):
        assert np.array_equal(found.numpy().squeeze(), expected)
    check_sampled(task, 0, arrays[0][:, None], arrays[1], arrays[0][:, None])
    check_sampled(task, None, arrays[2][:, None], arrays[3], arrays[0][:, None])
    assert Images(2, task.source).tokens == 9
    assert Images(6, task.source).tokens == 1


def test_plain_and_gzipped_files_may_stand_side_by_side(tmp_path):
    arrays = digits()
    mnist(tmp_path / "a", arrays)
    mnist(tmp_path / "a", [*arrays[:2], *arrays[2:]], gz=True)
    (tmp_path / "a" / NAMES[0]).unlink()
    (tmp_path / "a" / f"{NAMES[3]}.gz").unlink()
    assert Images(3, str(tmp_path / "a")).digest == Images(3, mnist(tmp_path / "b", arrays)).digest


def test_images_are_scaled_by_the_whole_training_part(tmp_path):
    """Also where images are sorted by class, and there are more than thousands of them."""
    arrays = digits(size=2, train=6007, held=3, classes=2)
    arrays[0][:5003] //= 8
    task = Images(1, mnist(tmp_path / "m", arrays))
    check_scale = images_module._part(task.source, False, torch.device("cpu"))
    close(
        check_scale[2].flatten().double(),
        torch.tensor([arrays[0].mean(dtype=np.float64)]).float().double(),
    )
    close(
        check_scale[3].flatten().double(),
        torch.tensor([1 / arrays[0].astype(np.float64).std()]).float().double(),
    )


def test_images_of_one_grey_are_no_numbers_beyond_reach(tmp_path):
    arrays = digits()
    arrays[0][:], arrays[2][:] = 77, 77
    x, _ = Images(3, mnist(tmp_path / "m", arrays)).sample(seeded(0), 5)
    same(x, torch.zeros(5, 4, 9))


def test_images_that_changed_are_refused(tmp_path):
    """Training or held-out, pixels or labels."""
    arrays = digits()
    source = mnist(tmp_path / "m", arrays)
    task = Images(3, source)
    forget()
    assert task_of("images", dataclasses.asdict(task)) == task
    for i in range(4):
        changed = [a.copy() for a in arrays]
        changed[i].flat[-1] = (changed[i].flat[-1] + 1) % 3
        mnist(tmp_path / "m", changed)
        forget()
        message = refused(task_of, "images", dataclasses.asdict(task))
        assert re.fullmatch(
            rf"{source} are not what they were: digest \w{{12}}, expected {task.digest}", message
        )
    assert refused(Images, digest="0" * 12).startswith(
        "the drawn images are not what they were: digest "
    )


class Python2Pickler(pickle._Pickler):
    """CIFAR-10's batches were written by Python 2: protocol 2, byte strings as strings, numpy's old
    module."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_bytes(self, obj):
        self.write(b"T" + struct.pack("<i", len(obj)) + obj)
        self.memoize(obj)

    dispatch[bytes] = save_bytes


def pickled(batch, protocol):
    if protocol != "python 2":
        return pickle.dumps(batch, protocol)
    out = io.BytesIO()
    Python2Pickler(out, 2).dump(batch)
    return out.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def cifar_arrays(seed=0):
    rng = np.random.default_rng(seed)
    counts = (2, 3, 1, 2, 4, 5)
    labels = [
        np.arange(10)[:2],
        *(rng.integers(0, 10, n) for n in counts[1:4]),
        np.array([9, 1, 5, 7]),
        rng.integers(0, 10, 5),
    ]
    return [
        (rng.integers(0, 256, (n, 3072), dtype=np.uint8), y)
        for n, y in zip(counts, labels, strict=True)
    ]


def cifar_batch(data, labels):
    return {
        b"batch_label": b"testing batch 1 of 1",
        b"labels": [int(n) for n in labels],
        b"data": data,
        b"filenames": [b"a.png"] * len(data),
    }


def cifar(folder, protocol="python 2", **changes):
    """Batches of a few images; a change is the bytes of a file, or None for none."""
    folder.mkdir(parents=True)
    for name, (data, labels) in zip(BATCHES, cifar_arrays(), strict=True):
        if protocol == "bin":
            path, content = (
                folder / f"{name}.bin",
                np.concatenate((labels[:, None].astype(np.uint8), data), 1).tobytes(),
            )
        else:
            path, content = folder / name, pickled(cifar_batch(data, labels), protocol)
        content = changes.get(name, content)
        if content is not None:
            path.write_bytes(content)
    return str(folder)


@pytest.mark.parametrize("protocol", ["python 2", 3, 4, "bin"])
def test_batches_of_cifar_are_read_exactly(tmp_path, protocol):
    task = Images(16, cifar(tmp_path / "c", protocol))
    assert (task.tokens, task.in_dim, task.classes) == (4, 16 * 16 * 3, 10)
    data, arrays = images_module._load(task.source), cifar_arrays()
    planes = [
        np.stack([row.reshape(3, 32, 32) for row in x]) for x, _ in arrays
    ]  # red, green, blue, each from the top left
    train, labels = np.concatenate(planes[:5]), np.concatenate([y for _, y in arrays[:5]])
    assert np.array_equal(data.images.numpy(), train)
    assert np.array_equal(data.labels.numpy(), labels)
    assert np.array_equal(data.held_images.numpy(), planes[5])
    assert np.array_equal(data.held_labels.numpy(), arrays[5][1])
    check_sampled(task, 0, train, labels, train)
    check_sampled(task, None, planes[5], arrays[5][1], train)


def test_gzipped_batches_of_cifar_are_read_too(tmp_path):
    for protocol, suffix in (("bin", ".bin"), ("python 2", "")):
        plain, folder = cifar(tmp_path / f"plain {protocol}", protocol), tmp_path / f"gz {protocol}"
        cifar(folder, protocol)
        for name in BATCHES:
            path = folder / (name + suffix)
            (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
        assert Images(16, str(folder)).digest == Images(16, plain).digest


class Runs:
    """A pickle that calls something when it is read."""

    def __init__(self, function, *given):
        self.function, self.given = function, given

    def __reduce__(self):
        return self.function, self.given


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("place", ["alone", "data", "labels", "another key"])
def test_pickle_that_runs_code_is_refused_before_it_runs(tmp_path, protocol, place):
    mark = tmp_path / "it ran"
    for evil in (
        Runs(os.system, f"touch '{mark}'"),
        Runs(eval, f"open({str(mark)!r}, 'w')"),
        Runs(open, str(mark), "w"),
        Runs(np.save, str(mark), 1),
        Runs(np.zeros(3).tofile, str(mark)),
    ):
        batch = cifar_batch(*cifar_arrays()[0])
        key = {"data": b"data", "labels": b"labels", "another key": b"more"}.get(place)
        content = pickle.dumps(batch | {key: evil} if key else evil, protocol)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        message = refused(Images, 16, cifar(folder, 4, data_batch_1=content))
        assert (
            message
            == f"{folder / 'data_batch_1'} is not one of CIFAR-10's batches (UnpicklingError)"
        )
        assert not mark.exists()
        assert not list(tmp_path.glob("it ran*"))


def test_damaged_pickle_is_refused_or_another_one(tmp_path):
    """400 times a few bytes of it changed or cut off, seed 0: whatever that makes pickle do, it is
    one line."""
    rng, good, folder = (
        random.Random(0),
        pickled(cifar_batch(*cifar_arrays()[0]), "python 2"),
        tmp_path / "c",
    )
    folder.mkdir()
    head = good.index(b"T" + struct.pack("<i", 2 * 3072))  # pixels may be anything
    refusals = 0
    for _ in range(400):
        damaged = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(good) - 6144)
            damaged[at if at < head else at + 6144] = rng.randrange(256)
        (folder / "a").write_bytes(
            damaged[: rng.randrange(len(damaged))] if rng.random() < 0.2 else damaged
        )
        try:
            images_module._cifar_batch(folder, "a")
        except UsageError as e:
            refusals += 1
            assert str(e).startswith(f"{folder / 'a'} ")  # noqa: PT017
            assert "\n" not in str(e)  # noqa: PT017
    assert refusals > 200


def edited(change):
    """MNIST's files with one of the four arrays, or files, changed."""
    return lambda folder: mnist(folder, change(digits()))


def without(name):
    def make(folder):
        mnist(folder, digits())
        (folder / name).unlink()

    return make


def cut_gzip(folder):
    mnist(folder, digits(), gz=True)
    path = folder / f"{NAMES[0]}.gz"
    path.write_bytes(path.read_bytes()[:-20])


def scrambled_gzip(folder):
    mnist(folder, digits(), gz=True)
    path = folder / f"{NAMES[0]}.gz"
    data = bytearray(path.read_bytes())
    data[10:14] = b"\xff\xff\xff\xff"  # the kind of block
    path.write_bytes(data)


def no_gzip(folder):
    mnist(folder, digits(), gz=True)
    (folder / f"{NAMES[1]}.gz").write_bytes(idx(digits()[1]))


def several(**changes):
    """The first, second, third or fourth file of MNIST replaced."""
    places = ("images", "labels", "held_images", "held_labels")
    return edited(
        lambda arrays: [
            changes.get(place, array) for place, array in zip(places, arrays, strict=True)
        ]
    )


def batch_of(**changes):
    """One of CIFAR-10's batches with something else in it."""
    batch = {k.decode(): v for k, v in cifar_batch(*cifar_arrays()[0]).items()} | changes
    return pickle.dumps({k.encode(): v for k, v in batch.items() if v is not None}, 4)


PIXELS, LABELS = cifar_arrays()[0]
NOT_IDX = "{}/train-images-idx3-ubyte is not a file of bytes with 3 axes in MNIST's format"
NO_BATCH = "{}/data_batch_1 is not one of CIFAR-10's batches "
NO_ROWS = "{}/data_batch_1 should hold rows of 3,072 bytes and whole numbers as labels, got "
BAD_SOURCES = {
    "no folder": (
        lambda folder: None,
        (
            "there is no folder of images at {}; give one with MNIST's or CIFAR-10's files or "
            "train "
            "and test"
        ),
    ),
    "a file": (lambda folder: folder.write_bytes(b"x"), "there is no folder of images at {}; "),
    "an empty folder": (
        lambda folder: folder.mkdir(),
        ("{} holds neither MNIST's files (train-images-idx3-ubyte), nor CIFAR-10's "),
    ),
    **{f"without {name}": (without(name), f"{{}} lacks {name}") for name in NAMES[1:]},
    "without the first": (without(NAMES[0]), "{} holds neither MNIST's files"),
    "truncated": (
        several(images=idx(digits()[0])[:-1]),
        ("{}/train-images-idx3-ubyte should hold 396 bytes for 11 x 6 x 6, got 395"),
    ),
    "too long": (
        several(held_labels=idx(digits()[3]) + b"!"),
        ("{}/t10k-labels-idx1-ubyte should hold 7 bytes for 7, got 8"),
    ),
    "cut in its head": (several(images=idx(digits()[0])[:9]), NOT_IDX),
    "empty file": (several(images=b""), NOT_IDX),
    "wrong magic": (several(images=b"\0\0\x09" + idx(digits()[0])[3:]), NOT_IDX),
    "another format": (several(images=b"PK\3\4" + bytes(200)), NOT_IDX),
    "labels as images": (several(images=digits()[1]), NOT_IDX),
    "no axes": (several(images=b"\0\0\x08\0\x07"), NOT_IDX),
    "images as labels": (
        several(labels=digits()[0]),
        ("{}/train-labels-idx1-ubyte is not a file of bytes with 1 axes in MNIST's format"),
    ),
    "gzip cut off": (cut_gzip, "{}/train-images-idx3-ubyte.gz is cut off or not gzip"),
    "gzip scrambled": (scrambled_gzip, "{}/train-images-idx3-ubyte.gz is cut off or not gzip"),
    "not gzip": (no_gzip, "{}/train-labels-idx1-ubyte.gz is cut off or not gzip"),
    "fewer labels": (several(labels=digits()[1][:-1]), "{} holds 11 training images and 10 labels"),
    "more labels": (several(held_labels=np.zeros(9)), "{} holds 7 held-out images and 9 labels"),
    "no images": (
        several(images=digits()[0][:0], labels=digits()[1][:0]),
        "{} holds no training images",
    ),
    "none held out": (
        several(held_images=digits()[2][:0], held_labels=digits()[3][:0]),
        "{} holds no held-out images",
    ),
    "images of no size": (several(images=digits()[0][:, :0, :0]), "{} holds no training images"),
    "not square": (
        several(images=digits()[0][:, :, :4], held_images=digits()[2][:, :, :4]),
        ("images must be square, got 4 x 6 in {}"),
    ),
    "two sizes": (
        several(held_images=digits()[2][:, :4, :4]),
        ("training and held-out images differ in size: 6 x 6 x 1 and 4 x 4 x 1 in {}"),
    ),
    "a class more": (
        several(held_labels=np.full(7, 3)),
        ("held-out labels must be among the training part's, 0 to 2, got 3 in {}"),
    ),
    "one class": (
        several(labels=np.zeros(11), held_labels=np.zeros(7)),
        ("images must be of at least two classes, got one in {}"),
    ),
    "a batch too few": (
        lambda folder: cifar(folder, 4, data_batch_3=None),
        "{} lacks data_batch_3",
    ),
    "no test batch": (lambda folder: cifar(folder, "bin", test_batch=None), "{} lacks test_batch"),
    "half a record": (
        lambda folder: cifar(folder, "bin", data_batch_2=bytes(3 * 3073 - 1)),
        "{}/data_batch_2.bin should hold whole records of 3,073 bytes, got 9,218 bytes",
    ),
    "no record": (
        lambda folder: cifar(folder, "bin", data_batch_2=b""),
        ("{}/data_batch_2.bin should hold whole records of 3,073 bytes, got 0 bytes"),
    ),
    "records of CIFAR-100": (
        lambda folder: cifar(folder, "bin", data_batch_1=bytes([11]) * 3073),
        "{}/data_batch_1.bin should hold labels from 0 to 9, got 11 to 11",
    ),
    "pickle cut off": (lambda folder: cifar(folder, 4, data_batch_1=batch_of()[:-99]), NO_BATCH),
    "no pickle": (lambda folder: cifar(folder, 4, data_batch_1=b"<html>404</html>"), NO_BATCH),
    "empty pickle": (lambda folder: cifar(folder, 4, data_batch_1=b""), NO_BATCH),
    "a list": (lambda folder: cifar(folder, 4, data_batch_1=pickle.dumps([1, 2])), NO_BATCH),
    "without data": (lambda folder: cifar(folder, 4, data_batch_1=batch_of(data=None)), NO_BATCH),
    "without labels": (
        lambda folder: cifar(folder, 4, data_batch_1=batch_of(labels=None)),
        NO_BATCH,
    ),
    "other rows": (
        lambda folder: cifar(folder, 4, data_batch_1=batch_of(data=PIXELS[:, :-1])),
        NO_ROWS,
    ),
    "one number": (
        lambda folder: cifar(folder, 4, data_batch_1=batch_of(data=np.array(7, np.uint8))),
        NO_ROWS + "uint8 and ",
    ),
    "floats": (
        lambda folder: cifar(folder, 4, data_batch_1=batch_of(data=PIXELS / 255)),
        NO_ROWS + "float64 and ",
    ),
    "large numbers": (
        lambda folder: cifar(folder, 4, data_batch_1=batch_of(data=PIXELS.astype(np.int64) + 256)),
        NO_ROWS + "int64 and ",
    ),
    "words as labels": (
        lambda folder: cifar(folder, 4, data_batch_1=batch_of(labels=["cat", "dog"])),
        NO_ROWS,
    ),
    "a label too few": (
        lambda folder: cifar(folder, 4, data_batch_1=batch_of(labels=[1])),
        "{}/data_batch_1 should hold a label for each of its 2 images, got 1",
    ),
    "labels below 0": (
        lambda folder: cifar(folder, 4, data_batch_1=batch_of(labels=[-1, 9])),
        "{}/data_batch_1 should hold labels from 0 to 9, got -1 to 9",
    ),
}


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_bad_images_die_with_one_line(tmp_path, name):
    make, message = BAD_SOURCES[name]
    make(tmp_path / "source")
    assert refused(Images, 2, str(tmp_path / "source")).startswith(
        message.format(tmp_path / "source")
    )


def test_mistakes_of_images(tmp_path):
    source = mnist(tmp_path / "m", digits())
    assert refused(Images, 4, source) == f"patch must divide the size 6 of {source}, got 4"
    assert refused(Images, 5) == "patch must divide the size 16 of the drawn images, got 5"
    assert refused(Images, 7, source) == f"patch must divide the size 6 of {source}, got 7"
    assert refused(Images, source=5) == "source must be text, got 5"
    assert (
        refused(Images, source=letters(3000))
        == f"{letters(3000)} cannot be read: File name too long"
    )


# ---- folders of images


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


# ---- drawn images


def test_drawn_images_are_always_the_same():
    """A literal: the ids of runs hold it. Both parts have every class, and patterns differ from
    noise."""
    task = Images()
    assert task.digest == "f7f1a67dec59"
    data = images_module._load("")
    assert (data.images.shape, data.held_images.shape) == ((20_000, 1, 16, 16), (4000, 1, 16, 16))
    for labels in (data.labels, data.held_labels):
        counts = torch.bincount(labels, minlength=10)
        spread = math.sqrt(len(labels) * 0.09)
        assert (counts - len(labels) / 10).abs().max() < STANDARD_ERRORS * spread
    held = {row.tobytes() for row in data.held_images.numpy()}
    assert not held & {row.tobytes() for row in data.images.numpy()}, "no image is in both parts"
    brightness = data.images.double().mean((1, 2, 3))
    assert len({round(brightness[data.labels == c].mean().item()) for c in range(10)}) > 3, (
        "patterns differ"
    )
