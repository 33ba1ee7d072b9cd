"""Images: files of MNIST read back exactly, patches, scaling, drawn images, and every fault of the
data one line."""

import dataclasses
import itertools
import math
import pickle
import re

import numpy as np
import pytest
import torch
from support.data import NAMES, digits, forget, idx, letters, mnist, refused
from support.images import check_sampled, cifar, cifar_arrays, cifar_batch
from support.tolerance import STANDARD_ERRORS, close, same, seeded

from headwise.errors import bounded
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
    assert refused(Images, source=letters(3000)) == bounded(
        f"{letters(3000)} cannot be read: File name too long"
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
