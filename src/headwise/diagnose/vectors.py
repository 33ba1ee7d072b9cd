"""Data that are no tokens: images for vision models, rows of vectors for runs on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import UsageError, one_line
from headwise.files import read_json

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
MOST = 10_000  # images of a folder that are listed
MOST_PIXELS = 64_000_000  # of one image
MOST_BYTES = 4 << 30  # of an array


@dataclass(frozen=True)
class Wanted:
    """What one sample of a model looks like: (channels, height, width) of an image, or (None,
    width) of as many vectors as there are."""

    shape: tuple[int | None, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def words(self) -> str:
        return " x ".join("tokens" if n is None else str(n) for n in self.shape)


def wanted_images(config: Any, folder: Path) -> Wanted:
    """The images of a Hugging Face model, and how their values are shifted and scaled."""
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(sides) != 2 or not all(type(n) is int and 0 < n <= 4096 for n in (*sides, channels)):
        raise UsageError(f"the model's image size cannot be, got {size} with {channels} channels")
    mean = std = (0.5,) * channels
    path = folder / "preprocessor_config.json"
    if path.is_file():
        try:
            found = read_json(path.read_bytes())
            mean, std = (tuple(map(float, found[f"image_{name}"])) for name in ("mean", "std"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} has no mean and std: {one_line(error)}") from None
        if not len(mean) == len(std) == channels or 0.0 in std:
            raise UsageError(f"{path} must have mean and std of {channels} channels")
    return Wanted((channels, *sides), mean, std)


def samples_of(data: Any, wanted: Wanted, most: int) -> Tensor:
    """At most so many samples, in float32: a tensor, an array file (.npy), an image or a folder of
    them."""
    if not isinstance(data, str | Path):
        return _checked(torch.as_tensor(data), wanted)[:most]
    path = Path(data)
    try:
        if path.suffix == ".npy":
            return _checked(_array(path), wanted)[:most]
        if len(wanted.shape) == 3:
            return _pictures(path, wanted, most)
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r} ({error.strerror or error})") from None
    raise UsageError(f"the model reads {wanted.words} numbers: give them as an array (.npy), got "
                     f"{str(path)!r}")  # fmt: skip


def _array(path: Path) -> Tensor:
    import numpy as np

    if path.stat().st_size > MOST_BYTES:
        raise UsageError(f"{str(path)!r} has {path.stat().st_size:,} bytes, at most {MOST_BYTES:,}")
    try:
        found = np.load(path, allow_pickle=False)
        return torch.from_numpy(np.ascontiguousarray(found))
    except (ValueError, TypeError, EOFError) as error:
        raise UsageError(f"{str(path)!r} is no array of numbers: {one_line(error)}") from None


def _checked(found: Tensor, wanted: Wanted) -> Tensor:
    fits = found.ndim == len(wanted.shape) + 1 and all(
        b is None or a == b for a, b in zip(found.shape[1:], wanted.shape, strict=True)
    )
    if not fits or not found.is_floating_point() or not found.numel():
        raise UsageError(
            f"data must be floating-point numbers (samples x {wanted.words}), got "
            f"{tuple(found.shape)} of {str(found.dtype).removeprefix('torch.')}"
        )
    if not bool(found.isfinite().all()):
        raise UsageError("data must be finite numbers")
    return found.float()


def _pictures(path: Path, wanted: Wanted, most: int) -> Tensor:
    """Images, resized as a whole, their values from 0 to 1 shifted and scaled."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError(f"images are read by Pillow: {error}") from None
    files = [path]
    if path.is_dir():
        files = sorted(p for p in list(path.iterdir())[:MOST] if p.suffix.lower() in IMAGES)
    if not files:
        raise UsageError(f"no images ({', '.join(IMAGES)}) in {str(path)!r}")
    channels, height, width = (n or 0 for n in wanted.shape)
    if channels not in (1, 3):
        raise UsageError(f"images have one or three channels, this model reads {channels}")
    out = []
    for file in files[:most]:
        try:
            with Image.open(file) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise UsageError(f"{str(file)!r} has more than {MOST_PIXELS:,} pixels")
                small = image.convert("RGB" if channels == 3 else "L").resize((width, height))
                values = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise UsageError(f"{str(file)!r} is no image: {one_line(error)}") from None
        pixels = values.view(height, width, channels).permute(2, 0, 1) / 255
        mean, std = (torch.tensor(t).view(-1, 1, 1) for t in (wanted.mean, wanted.std))
        out.append((pixels - mean) / std)
    return torch.stack(out)
