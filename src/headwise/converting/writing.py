"""Safetensors written a tensor at a time, and folders that appear when they are complete."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.diagnose.sources import SAFETENSORS, Source
from headwise.errors import UsageError, shown
from headwise.files import own_mark
from headwise.tensor_files import DIGEST

CHUNK = 64 << 20  # bytes that are copied at once
SHARD = 4 << 30  # bytes of a file
NAMES = {dtype: name for name, dtype in SAFETENSORS.items()} | {
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Piece:
    """One tensor to come: what the header says of it, and how its bytes are had."""

    name: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    data: Callable[[], Iterator[bytes | memoryview]]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def made(name: str, dtype: str, shape: tuple[int, ...], make: Callable[[], Tensor]) -> Piece:
    """A piece that is computed when its turn comes."""

    def data() -> Iterator[bytes | memoryview]:
        tensor = make().to(DTYPES[dtype]).contiguous()
        if tuple(tensor.shape) != shape:
            raise UsageError(f"{name} came out as {tuple(tensor.shape)}, not {shape}")
        numbers: Any = tensor.view(-1).view(torch.uint8).numpy()
        yield memoryview(numbers)

    return Piece(name, dtype, shape, data)


def copied(source: Source, name: str, new_name: str | None = None) -> Piece:
    """A piece that is as it was, a part of it in memory at a time."""
    entry = source.entries[name]
    if source.kind == "safetensors":
        if entry.dtype not in DTYPES:
            raise UsageError(f"{shown(name)} is {entry.dtype}, which is not written")

        def data() -> Iterator[bytes | memoryview]:
            with entry.path.open("rb") as f:
                f.seek(entry.start)
                left = entry.size
                while left:
                    part = f.read(min(left, CHUNK))
                    if not part:
                        raise UsageError(f"{entry.path} is truncated")
                    left -= len(part)
                    yield part

        return Piece(new_name or name, entry.dtype, entry.shape, data)
    tensor = source.reader(name)
    if tensor.dtype not in NAMES:
        raise UsageError(f"{shown(name)} is {tensor.dtype}, which is not written")
    return made(new_name or name, NAMES[tensor.dtype], tuple(tensor.shape), lambda: tensor)


def write_pieces(path: Path, pieces: Sequence[Piece], about: Mapping[str, str]) -> None:
    """One safetensors file with a digest, as `tensor_files` writes it, one tensor at a time."""
    pieces = sorted(pieces, key=lambda piece: piece.name)
    header: dict[str, object] = {"__metadata__": {**about, DIGEST: "0" * 64}}
    place = 0
    for piece in pieces:
        header[piece.name] = {
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "data_offsets": [place, place + piece.size],
        }
        place += piece.size
    digest = hashlib.sha256()
    for name, text in sorted(about.items()):
        digest.update(f"{name}={text}\n".encode())
    with path.open("xb") as f:
        head = _encoded(header)
        f.write(head)
        for piece in pieces:
            digest.update(f"{piece.name} {DTYPES[piece.dtype]} {piece.shape}\n".encode())
            for part in piece.data() if piece.size else ():
                digest.update(part)
                f.write(part)
        header["__metadata__"] = {**about, DIGEST: digest.hexdigest()}
        f.seek(0)
        f.write(_encoded(header))
        f.flush()
        os.fsync(f.fileno())


def _encoded(header: Mapping[str, object]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_model(folder: Path, pieces: Sequence[Piece], about: Mapping[str, str]) -> None:
    """model.safetensors, or shards of it and their index."""
    pieces = sorted(pieces, key=lambda piece: piece.name)
    shards: list[list[Piece]] = [[]]
    for piece in pieces:
        if shards[-1] and sum(one.size for one in shards[-1]) + piece.size > SHARD:
            shards.append([])
        shards[-1].append(piece)
    if len(shards) == 1:
        write_pieces(folder / "model.safetensors", pieces, about)
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_pieces(folder / name, shard, about)
        weight_map |= {piece.name: name for piece in shard}
    index = {"metadata": {"total_size": sum(p.size for p in pieces)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


@contextlib.contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """A folder beside its place, which it takes when it is complete; what is there is never
    overwritten."""
    check_place(place)
    made_here = place.with_name(f".{place.name}.{own_mark()}")
    made_here.mkdir()
    try:
        yield made_here
        check_place(place)
        os.rename(made_here, place)
    finally:
        shutil.rmtree(made_here, ignore_errors=True)


def check_place(place: Path) -> None:
    """Refuse a place that is taken, or that has no folder around it."""
    if os.path.lexists(place):
        raise UsageError(f"{str(place)!r} is there already; a conversion wants a new folder")
    if not place.parent.is_dir():
        raise UsageError(f"cannot write {str(place)!r}: there is no folder {str(place.parent)!r}")
