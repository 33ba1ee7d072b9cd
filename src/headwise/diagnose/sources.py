"""Tensors on disk by name, read when they are asked for: headers first, then one tensor at a time.

A source is a list of entries and a way to read one. Nothing in a file is executed, and what a
header says is checked before a byte is set aside for it. A file that is not what it says is a
`UsageError` of one line.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import UsageError, one_line, shown
from headwise.files import NotReadableError, read_file, read_json

MOST_HEADER = 100 << 20  # bytes of a header, as safetensors itself allows
MOST_TENSORS = 1_000_000
MOST_SHARDS = 10_000
MOST_NAME = 1_000  # characters
MOST_AXES = 8
MOST_VALUE = 1e30  # of a weight; products of four of them must fit 64 bits
MOST_READ = 16 << 30  # bytes of one tensor that is read

SAFETENSORS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_OTHER_SIZES = {"I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8, "U16": 16, "U32": 32}
_OTHER_SIZES |= {"U64": 64, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its shape, the name of its type, and where its bytes lie."""

    shape: tuple[int, ...]
    dtype: str
    path: Path
    start: int = 0  # of its first byte
    size: int = 0  # in bytes

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Source:
    """The tensors of a checkpoint by name. `read` gives one as it is stored."""

    kind: str  # such as "safetensors"
    entries: Mapping[str, Entry]
    reader: Callable[[str], Tensor]
    about: Mapping[str, Any] = field(default_factory=dict)  # what its header says beside tensors

    def read(self, name: str) -> Tensor:
        """One tensor, of finite numbers."""
        entry = self.entries[name]
        if entry.count * 2 > MOST_READ:
            raise UsageError(f"{shown(name)} is too large to be read: {entry.count:,} numbers")
        tensor = self.reader(name)
        if not tensor.is_floating_point():
            raise UsageError(
                f"{shown(name)} must hold floating-point numbers, got {tensor.dtype}; quantised "
                "weights are not read"
            )
        if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            tensor = tensor.float()
        least, most = (float(value) for value in tensor.aminmax()) if tensor.numel() else (0, 0)
        if not -MOST_VALUE <= least <= most <= MOST_VALUE:
            what = f"numbers beyond {MOST_VALUE:g}" if least <= most else "NaN"
            raise UsageError(f"{shown(name)} in {self.path_of(name)} holds {what}: it is damaged")
        return tensor

    def path_of(self, name: str) -> str:
        return str(self.entries[name].path)


def check_name(name: Any, path: Path) -> str:
    """A name of a tensor, if it is text of a sane length."""
    if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME:
        raise UsageError(f"{path}: names of tensors must be text, got {shown(name)}")
    return name


def check_shape(shape: Any, name: str, path: Path) -> tuple[int, ...]:
    """The sizes of a tensor, if they are whole numbers whose product 64 bits can hold."""
    sizes = tuple(shape) if isinstance(shape, list | tuple) else None
    if (
        sizes is None
        or len(sizes) > MOST_AXES
        or not all(type(n) is int and n >= 0 for n in sizes)
        or math.prod(max(n, 1) for n in sizes) >= 2**62
    ):
        raise UsageError(f"{path}: the shape of {shown(name)} cannot be, got {shown(shape)}")
    return sizes


def regular_file(path: Path) -> os.stat_result:
    """What the system says of a file that may be read; links are followed, since hubs use them."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r} ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{str(path)!r} is not a regular file")
    return found


def read_bytes(path: Path, start: int, size: int) -> bytearray:
    """A range of a file."""
    data = bytearray(size)
    with path.open("rb") as f:
        f.seek(start)
        if f.readinto(data) != size:
            raise UsageError(f"{path} is truncated")
    return data


def read_table(path: Path, what: str) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        found = read_json(read_file(path, links=True))
    except (NotReadableError, ValueError) as error:
        raise UsageError(f"{str(path)!r} is no {what}: {one_line(error)}") from None
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r} ({error.strerror})") from None
    if not isinstance(found, dict):
        raise UsageError(f"{str(path)!r} must hold a JSON object, got {type(found).__name__}")
    return found


# ---- safetensors


def safetensors_header(path: Path) -> tuple[dict[str, Entry], dict[str, Any]]:
    """The entries and the metadata of one file, from its header alone."""
    size = regular_file(path).st_size
    if size < 8:
        raise UsageError(f"{path} is no safetensors file: it has {size} bytes")
    length = int.from_bytes(read_bytes(path, 0, 8), "little")
    if length > min(MOST_HEADER, size - 8):
        raise UsageError(
            f"{path} is no safetensors file, or truncated: its header has {length:,} bytes, the "
            f"file {size:,}"
        )
    try:
        header = read_json(bytes(read_bytes(path, 8, length)))
    except ValueError as error:
        raise UsageError(
            f"{path} is no safetensors file: its header is {one_line(error)}"
        ) from None
    if not isinstance(header, dict) or len(header) > MOST_TENSORS:
        raise UsageError(f"{path} is no safetensors file: its header must list tensors")
    metadata = header.pop("__metadata__", {})
    room, found = size - 8 - length, {}
    for name, about in header.items():
        check_name(name, path)
        if not isinstance(about, dict):
            raise UsageError(f"{path}: {shown(name)} must have dtype, shape and data_offsets")
        shape, dtype = check_shape(about.get("shape"), name, path), about.get("dtype")
        offsets = about.get("data_offsets")
        if not (isinstance(offsets, list) and len(offsets) == 2):
            raise UsageError(f"{path}: {shown(name)} must have data_offsets")
        start, end = offsets
        if not (type(start) is int and type(end) is int and 0 <= start <= end <= room):
            raise UsageError(
                f"{path}: {shown(name)} lies outside the file, or it is truncated: bytes "
                f"{shown(offsets)} of {room:,}"
            )
        if isinstance(dtype, str) and dtype in SAFETENSORS:
            bits = SAFETENSORS[dtype].itemsize * 8
        elif isinstance(dtype, str) and dtype in _OTHER_SIZES:
            bits = _OTHER_SIZES[dtype]
        else:
            raise UsageError(f"{path}: {shown(name)} has an unknown dtype {shown(dtype)}")
        if math.prod(shape) * bits != (end - start) * 8:
            raise UsageError(
                f"{path}: {shown(name)} of shape {shown(shape)} and {dtype} cannot have "
                f"{end - start:,} bytes"
            )
        found[name] = Entry(shape, dtype, path, 8 + length + start, end - start)
    _check_overlap(found, path)
    return found, metadata if isinstance(metadata, dict) else {}


def _check_overlap(entries: Mapping[str, Entry], path: Path) -> None:
    """Refuse tensors that lie on top of each other."""
    ordered = sorted((e.start, e.start + e.size, name) for name, e in entries.items() if e.size)
    for (_, end, one), (start, _, other) in itertools.pairwise(ordered):
        if start < end:
            raise UsageError(f"{path}: {shown(one)} and {shown(other)} overlap")


def open_safetensors(paths: list[Path]) -> Source:
    """One file, or all shards of a model."""
    entries: dict[str, Entry] = {}
    about: dict[str, Any] = {}
    for path in paths:
        found, metadata = safetensors_header(path)
        if twice := entries.keys() & found.keys():
            name = min(twice)
            raise UsageError(f"{shown(name)} lies in {entries[name].path} and in {path}")
        entries |= found
        about |= metadata

    def read(name: str) -> Tensor:
        entry = entries[name]
        if entry.dtype not in SAFETENSORS:
            raise UsageError(
                f"{shown(name)} must hold floating-point numbers, got {entry.dtype}; quantised "
                "weights are not read"
            )
        if not entry.size:
            return torch.zeros(entry.shape, dtype=SAFETENSORS[entry.dtype])
        data = read_bytes(entry.path, entry.start, entry.size)
        return torch.frombuffer(data, dtype=SAFETENSORS[entry.dtype]).view(entry.shape)

    return Source("safetensors", entries, read, about)


def shards_of(index: Path) -> list[Path]:
    """The files that an index names, which lie beside it."""
    weights = read_table(index, "index of shards").get("weight_map")
    if not isinstance(weights, dict):
        raise UsageError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weights.values()})
    if not 0 < len(names) <= MOST_SHARDS:
        raise UsageError(f"{index} names {len(names):,} files, at most {MOST_SHARDS:,} are read")
    for name in names:
        if Path(name).name != name or name in ("", ".", ".."):
            raise UsageError(f"{index}: a shard must lie beside it, got {shown(name)}")
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise UsageError(
            f"{index} names {len(names)} files, {len(missing)} are not there: {shown(missing[0])}"
        )
    return [index.parent / name for name in names]


# ---- TensorFlow.js: a manifest and shards of bytes


def open_tfjs(path: Path) -> Source:
    """The weights of a TensorFlow.js model.json (its graph is not looked at)."""
    groups = read_table(path, "TensorFlow.js model").get("weightsManifest")
    if not isinstance(groups, list):
        raise UsageError(f"{path} has no weightsManifest")
    entries: dict[str, Entry] = {}
    parts: dict[str, list[tuple[Path, int, int]]] = {}
    for group in groups:
        try:
            files = [path.parent / Path(str(name)).name for name in group["paths"]]
            weights = [(w["name"], w["shape"], w["dtype"], w.get("quantization")) for w in
                       group["weights"]]  # fmt: skip
        except (KeyError, TypeError, AttributeError):
            raise UsageError(f"{path}: a group of weights needs paths and weights") from None
        sizes = [regular_file(file).st_size for file in files]
        start = 0
        for name, shape, dtype, packed in weights:
            name = check_name(name, path)
            shape = check_shape(shape, name, path)
            size = math.prod(shape) * 4
            if dtype not in ("float32", "int32") or packed:
                raise UsageError(f"{path}: {shown(name)} must be float32, quantised ones are not "
                                 "read")  # fmt: skip
            if start + size > sum(sizes):
                raise UsageError(f"{path}: {shown(name)} lies outside its files")
            kind = "F32" if dtype == "float32" else "I32"
            entries[name] = Entry(shape, kind, files[0], start, size)
            parts[name] = _ranges(files, sizes, start, size)
            start += size

    def read(name: str) -> Tensor:
        entry = entries[name]
        if entry.dtype != "F32":
            raise UsageError(f"{shown(name)} must hold floating-point numbers, got {entry.dtype}")
        if not entry.size:
            return torch.zeros(entry.shape)
        data = bytearray().join(read_bytes(*part) for part in parts[name])
        return torch.frombuffer(data, dtype=torch.float32).view(entry.shape)

    return Source("TensorFlow.js", entries, read)


def _ranges(files: list[Path], sizes: list[int], start: int, size: int) -> list[Any]:
    """Where the bytes from `start` lie in files that follow each other."""
    found, before = [], 0
    for file, length in zip(files, sizes, strict=True):
        low, high = max(start, before), min(start + size, before + length)
        if low < high:
            found.append((file, low - before, high - low))
        before += length
    return found


def is_json_with(path: Path, key: str) -> bool:
    """Whether a file is a JSON object that has a key."""
    try:
        return key in json.loads(read_file(path, links=True))
    except (OSError, ValueError, TypeError, RecursionError):
        return False
