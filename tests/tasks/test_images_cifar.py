"""Batches of CIFAR-10 read back exactly, and pickles that are refused before they run."""

import gzip
import os
import pickle
import random
import struct

import numpy as np
import pytest
from support.data import refused
from support.images import BATCHES, check_sampled, cifar, cifar_arrays, cifar_batch, pickled

from headwise.errors import UsageError
from headwise.tasks import Images
from headwise.tasks import images as images_module

pytestmark = pytest.mark.usefixtures("no_network")


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
