"""Classify images cut into patches, as a vision transformer sees them.

A source is a folder: MNIST's files (`train-images-idx3-ubyte` and so on, also gzipped), CIFAR-10's
(`data_batch_1` ... or `data_batch_1.bin` ...), or folders `train` and `test` (or `val`) with one
folder of images a class; or a data set of the hub (`hf:NAME`). Without one, `source` "" is a set
that is drawn: ten patterns, each shifted at random on a noisy ground. Channels are scaled by the
training part's mean and standard deviation. The test part is what is held out.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import math
import pickle
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.errors import UsageError, check_texts, check_whole_numbers
from headwise.files import NotReadableError, read_file
from headwise.tasks import hub
from headwise.tasks.task import Classified

DRAWN_SIZE, DRAWN_CLASSES, DRAWN = 16, 10, (20_000, 4_000)  # images in training and held out
MOST_BYTES = 640 << 20  # of a file, also unpacked; the largest MNIST, EMNIST, has 522 MiB
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


@dataclass(frozen=True)
class Images(Classified):
    """Which class does an image belong to?

    >>> task = Images(patch=4)
    >>> task.tokens, task.in_dim, task.classes
    (16, 16, 10)
    """

    name = "images"
    patch: int = 4
    source: str = ""  # a folder of images, hf:NAME, or "" for drawn ones
    digest: str = ""  # of both parts; found when not given, checked when given

    def __post_init__(self) -> None:
        check_whole_numbers(self, 1, "patch")
        check_texts(self, "source", "digest")
        # The digest is a field, so it is in the run id: other images give other runs.
        data = _load(self.source)
        if self.digest and self.digest != data.digest:
            raise UsageError(
                f"{self.source or 'the drawn images'} are not what they were: digest "
                f"{data.digest}, expected {self.digest}"
            )
        object.__setattr__(self, "digest", data.digest)
        if data.size % self.patch:
            raise UsageError(
                f"patch must divide the size {data.size} of {self.source or 'the drawn images'}, "
                f"got {self.patch}"
            )

    @property
    def tokens(self) -> int:
        """Patches of an image."""
        return (_load(self.source).size // self.patch) ** 2

    @property
    def in_dim(self) -> int:
        """Numbers in a patch: patch x patch x channels."""
        return self.patch**2 * _load(self.source).images.shape[1]

    @property
    def classes(self) -> int:
        """Classes of the training part."""
        return _load(self.source).classes

    def sample(
        self, generator: torch.Generator, batch: int, step: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Patches (batch, tokens, patch x patch x channels) and classes (batch,)."""
        # Images stay bytes until they are drawn; only the batch becomes floats.
        images, labels, mean, scale = _part(self.source, step is None, generator.device)
        rows = torch.randint(len(images), (batch,), generator=generator, device=generator.device)
        x_BCHW = (images[rows].float() - mean) * scale
        return patches(x_BCHW, self.patch), labels[rows]


def patches(x_BCHW: Tensor, patch: int) -> Tensor:
    """(batch, channels, height, width) -> (batch, patches, patch x patch x channels), rows of
    patches from the top left."""
    cut = x_BCHW.unflatten(2, (-1, patch)).unflatten(4, (-1, patch))  # B C h p w p
    return cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


# ---- reading


@dataclass(frozen=True)
class _Data:
    images: Tensor  # (count, channels, size, size), bytes
    labels: Tensor
    held_images: Tensor
    held_labels: Tensor
    classes: int
    digest: str

    @property
    def size(self) -> int:
        """Height and width of the images in pixels."""
        return self.images.shape[-1]


@functools.lru_cache(4)
def _load(source: str) -> _Data:
    found = _read(source)
    # A source is checked once, when it is read: sizes, classes, and that both parts fit each other.
    images, labels, held_images, held_labels = found
    for what, x, y in (("training", images, labels), ("held-out", held_images, held_labels)):
        if not x.size:
            raise UsageError(f"{source} holds no {what} images")
        if len(x) != len(y):
            raise UsageError(f"{source} holds {len(x)} {what} images and {len(y)} labels")
    if images.shape[2] != images.shape[3]:
        raise UsageError(
            f"images must be square, got {images.shape[3]} x {images.shape[2]} in {source}"
        )
    if images.shape[1:] != held_images.shape[1:]:
        raise UsageError(
            f"training and held-out images differ in size: {_size(images)} and "
            f"{_size(held_images)} in {source}"
        )
    # The classes are those of the training part; a held-out label beyond them could never be
    # learned.
    classes = int(labels.max()) + 1
    if classes < 2:
        raise UsageError(f"images must be of at least two classes, got one in {source}")
    if held_labels.max() >= classes:
        raise UsageError(
            f"held-out labels must be among the training part's, 0 to {classes - 1}, got "
            f"{held_labels.max()} in {source}"
        )
    # copies, since what is read from a file may not be written to
    digest = hashlib.sha256()
    parts: list[Tensor] = []
    for part, dtype in zip(found, (np.uint8, np.int64) * 2, strict=True):
        array = np.array(part, dtype, order="C")
        digest.update(array.data)
        parts.append(torch.from_numpy(array))
    return _Data(*parts, classes=classes, digest=digest.hexdigest()[:12])


def _size(images: Any) -> str:
    return f"{images.shape[3]} x {images.shape[2]} x {images.shape[1]}"


def _read(source: str) -> tuple[Any, Any, Any, Any]:
    """Training images (count, channels, height, width) and labels, then the held-out ones."""
    if not source:
        return drawn()
    if hub.on_hub(source):
        return *_from_hub(source, "train"), *_from_hub(source, "test", "validation")
    folder = Path(source)
    try:
        if not folder.is_dir():
            raise UsageError(
                f"there is no folder of images at {source}; "
                "give one with MNIST's or CIFAR-10's files or train and test, or \"\" for drawn "
                "ones"
            )
        if _there(folder, "train-images-idx3-ubyte"):
            return _mnist(folder)
        if _there(folder, "data_batch_1") or _there(folder, "data_batch_1.bin"):
            return _cifar(folder)
        if (folder / "train").is_dir():
            return _folders(folder)
    except OSError as e:
        raise UsageError(f"{source} cannot be read: {e.strerror or e}") from None
    raise UsageError(
        f"{source} holds neither MNIST's files (train-images-idx3-ubyte), nor CIFAR-10's "
        "(data_batch_1), nor a folder train"
    )


def _from_hub(source: str, *splits: str) -> tuple[Any, Any]:
    # Data sets of the hub name their columns image or img, label or fine_label.
    table = hub.part(source, *splits)
    labels = np.asarray(hub.column(source, table, "label", "fine_label"))
    if labels.dtype.kind not in "iu":
        raise UsageError(f"{source} should hold whole numbers as labels, got {labels.dtype}")
    try:
        images = [
            np.atleast_3d(np.asarray(image, np.uint8))
            for image in hub.column(source, table, "image", "img")
        ]
    except UsageError:
        raise
    except (TypeError, ValueError, OSError, ImportError) as e:
        raise UsageError(
            f"{source} holds images that cannot be read ({type(e).__name__})"
        ) from None
    if len({image.shape for image in images}) > 1:
        raise UsageError(
            f"images must have one size, got {len({image.shape for image in images})} sizes in "
            f"{source}"
        )
    if not images:
        return np.zeros((0, 3, 1, 1), np.uint8), labels
    return np.stack(images).transpose(0, 3, 1, 2), labels


def _there(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def _mnist(folder: Path) -> tuple[Any, Any, Any, Any]:
    def part(name: str) -> tuple[Any, Any]:
        images = _idx(folder, f"{name}-images-idx3-ubyte", 3)
        return images[:, None], _idx(folder, f"{name}-labels-idx1-ubyte", 1)  # one channel

    return *part("train"), *part("t10k")


def _bytes(path: Path) -> bytes | bytearray:
    try:
        data = read_file(path, MOST_BYTES, links=True)
        return _unpacked(path, data) if path.suffix == ".gz" else data
    except NotReadableError as e:
        raise UsageError(f"{path} cannot be read: {e}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise UsageError(f"{path} is cut off or not gzip") from None


def _unpacked(path: Path, packed: bytes) -> bytearray:
    """What a gzip file holds: a small one may swell to any size."""
    data = bytearray()
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as f:
        while part := f.read(1 << 20):
            data += part
            if len(data) > MOST_BYTES:
                raise UsageError(f"{path} unpacks to more than {MOST_BYTES:,} bytes")
    return data


def _idx(folder: Path, name: str, axes: int) -> Any:
    """An array in MNIST's format: two zero bytes, a type, the number of axes, their lengths, the
    bytes."""
    path = _there(folder, name)
    if path is None:
        raise UsageError(f"{folder} lacks {name}")
    data, start = _bytes(path), 4 + 4 * axes
    if data[:4] != bytes((0, 0, 8, axes)) or len(data) < start:
        raise UsageError(f"{path} is not a file of bytes with {axes} axes in MNIST's format")
    shape, body = struct.unpack(f">{axes}I", data[4:start]), memoryview(data)[start:]
    if len(body) != math.prod(shape):
        raise UsageError(
            f"{path} should hold {math.prod(shape):,} bytes for {' x '.join(map(str, shape))}, "
            f"got {len(body):,}"
        )
    return np.frombuffer(body, np.uint8).reshape(shape)


def _cifar(folder: Path) -> tuple[Any, Any, Any, Any]:
    parts = [_cifar_batch(folder, f"data_batch_{i}") for i in range(1, 6)]
    held = _cifar_batch(folder, "test_batch")
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]), *held


def _cifar_batch(folder: Path, name: str) -> tuple[Any, Any]:
    path = _there(folder, name) or _there(folder, f"{name}.bin")
    if path is None:
        raise UsageError(f"{folder} lacks {name}")
    data = _bytes(path)
    if ".bin" in path.suffixes:
        if not data or len(data) % 3073:
            raise UsageError(
                f"{path} should hold whole records of 3,073 bytes, got {len(data):,} bytes"
            )
        # A record is a label and 3 x 32 x 32 bytes, channels first.
        rows = np.frombuffer(data, np.uint8).reshape(-1, 3073)
        images, labels = rows[:, 1:], rows[:, 0]
    else:
        try:
            held = _Plain(data).load()
            images, labels = np.asarray(held[b"data"]), np.asarray(held[b"labels"])
        except Exception as e:  # damaged pickles raise nearly anything
            raise UsageError(
                f"{path} is not one of CIFAR-10's batches ({type(e).__name__})"
            ) from None
    if (
        images.dtype != np.uint8
        or images.ndim != 2
        or images.shape[1] != 3072
        or labels.dtype.kind not in "iu"
    ):
        raise UsageError(
            f"{path} should hold rows of 3,072 bytes and whole numbers as labels, got "
            f"{images.dtype} and {labels.dtype}"
        )
    if labels.shape != images.shape[:1]:
        raise UsageError(
            f"{path} should hold a label for each of its {len(images)} images, got {labels.size}"
        )
    if labels.size and not 0 <= labels.min() <= labels.max() <= 9:
        raise UsageError(
            f"{path} should hold labels from 0 to 9, got {labels.min()} to {labels.max()}"
        )
    return images.reshape(-1, 3, 32, 32), labels


class _Plain(pickle.Unpickler):
    """A pickle may run any code; CIFAR-10's hold arrays and nothing else, and nothing else is let
    in."""

    def __init__(self, data: bytes | bytearray) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray", "numpy") and name in (
            "_reconstruct",
            "ndarray",
            "dtype",
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def _folders(folder: Path) -> tuple[Any, Any, Any, Any]:
    held = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if held is None:
        raise UsageError(f"{folder} has a folder train but neither test nor val")
    # A class is a folder of train; its number is its place in the order of names.
    names = sorted(p.name for p in (folder / "train").iterdir() if p.is_dir())
    if len(names) < 2:
        raise UsageError(
            f"{folder}/train must hold a folder a class, at least two, got {len(names)}"
        )
    unknown = sorted({p.name for p in held.iterdir() if p.is_dir()} - set(names))
    if unknown:
        raise UsageError(f"{held} has the class {unknown[0]}, which {folder}/train has not")
    images, labels = _class_images(folder / "train", names)
    for label, name in enumerate(names):
        if label not in labels:
            raise UsageError(
                f"{folder}/train/{name} holds no images; their names must end in "
                f"{', '.join(SUFFIXES)}"
            )
    return images, labels, *_class_images(held, names)


def _class_images(folder: Path, names: list[str]) -> tuple[Any, Any]:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise UsageError("folders of images need pillow: pip install pillow") from None
    images, labels, first = [], [], None
    for label, name in enumerate(names):
        for path in sorted(p for p in (folder / name).glob("*") if p.suffix.lower() in SUFFIXES):
            try:
                with Image.open(path) as opened:
                    image = np.asarray(opened.convert("RGB"))
            except (
                Exception
            ) as e:  # OSError mostly, but also SyntaxError, ValueError, DecompressionBombError
                raise UsageError(
                    f"{path} is not an image that can be read ({type(e).__name__})"
                ) from None
            first = first or (path, image.shape)
            if image.shape != first[1]:
                sizes = [f"{w} x {h}" for h, w, _ in (first[1], image.shape)]
                raise UsageError(
                    f"images must have one size: {first[0]} is {sizes[0]}, {path} is {sizes[1]}"
                )
            images.append(image.transpose(2, 0, 1))
            labels.append(label)
    return np.stack(images) if images else np.zeros((0, 3, 1, 1), np.uint8), np.asarray(labels)


def drawn(seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Ten smooth patterns of 9 x 9, each put anywhere on a noisy ground of 16 x 16, brighter or
    darker."""
    rng = np.random.default_rng(seed)
    coarse = rng.standard_normal((DRAWN_CLASSES, 3, 3))
    # Each class is a 3 x 3 pattern of normal numbers, blown up to 9 x 9 pixels.
    patterns = np.kron(coarse, np.ones((3, 3)))
    parts: list[Any] = []
    for count in DRAWN:
        labels = rng.integers(0, DRAWN_CLASSES, count)
        # An image is noise, its pattern at a random place, and a random brightness.
        at = rng.integers(0, DRAWN_SIZE - 9 + 1, (count, 2))
        images = rng.standard_normal((count, DRAWN_SIZE, DRAWN_SIZE)) * 0.8
        for i in range(count):
            y, x = at[i]
            images[i, y : y + 9, x : x + 9] += patterns[labels[i]]
        images += rng.standard_normal((count, 1, 1)) * 0.5
        parts += [np.clip(128 + 40 * images, 0, 255).astype(np.uint8)[:, None], labels]
    return parts[0], parts[1], parts[2], parts[3]


@functools.lru_cache(8)
def _part(
    source: str, held_out: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels of a part, and the training part's mean and one over its standard
    deviation, by channel."""
    data = _load(source)
    images, labels = data.images, data.labels
    if held_out:
        images, labels = data.held_images, data.held_labels
    # Mean and variance come from how often each of 256 levels occurs: all images as floats may not
    # fit the memory.
    levels = torch.arange(256, dtype=torch.float64)
    counts = torch.stack(
        [torch.bincount(channel.flatten(), minlength=256) for channel in data.images.unbind(1)]
    ).double()
    mean = counts @ levels / counts.sum(1)
    spread = (counts @ levels.square() / counts.sum(1) - mean.square()).clamp_min(1e-6).sqrt()
    mean, scale = (t.float().view(-1, 1, 1).to(device) for t in (mean, 1 / spread))
    return images.to(device), labels.to(device), mean, scale
