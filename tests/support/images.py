"""Files of images as MNIST and CIFAR-10 have them."""

import io
import pickle
import struct

import numpy as np
import torch
from support.tolerance import same, seeded

from headwise.tasks.images import patches


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
