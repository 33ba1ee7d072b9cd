"""State dicts as torch.save writes them: tensors by name, mapped, nothing executed."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.diagnose.sources import (
    MOST_TENSORS,
    Entry,
    Source,
    check_name,
    check_shape,
    regular_file,
)
from headwise.errors import UsageError, one_line, shown

MOST_PICKLE = 256 << 20  # bytes of the part that says what the tensors are
MOST_OLD = 8 << 30  # bytes of a file from before 2020, which is read as one
# Where a state dict lies in what else is saved with it.
INNER = ("state_dict", "model", "model_state_dict", "module", "weights", "net", "params")


def open_torch(paths: list[Path]) -> Source:
    """The tensors of one file, or of all shards of a model."""
    entries: dict[str, Entry] = {}
    tensors: dict[str, Tensor] = {}
    about: dict[str, Any] = {}
    for path in paths:
        loaded = _load(path)
        state, rest = _state_of(loaded, path)
        about |= rest
        for name, tensor in state.items():
            if name in tensors:
                raise UsageError(f"{shown(name)} lies in {entries[name].path} and in {path}")
            shape = check_shape(tuple(tensor.shape), name, path)
            tensors[name] = tensor
            size = tensor.numel() * tensor.itemsize
            entries[name] = Entry(shape, str(tensor.dtype).removeprefix("torch."), path, 0, size)

    def read(name: str) -> Tensor:
        tensor = tensors[name].detach()
        # A tensor of another layout, or one that repeats its storage, grows when it is copied.
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise UsageError(f"{shown(name)} must be a dense tensor, got {tensor.layout}")
        if tensor.is_meta or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise UsageError(f"{shown(name)} says more numbers than its file holds")
        return tensor

    return Source("PyTorch", entries, read, about)


def _load(path: Path) -> Any:
    """What a file holds: tensors and plain values alone."""
    size = regular_file(path).st_size
    packed = zipfile.is_zipfile(path)
    if packed:
        _check_zip(path, size)
    elif size > MOST_OLD:
        raise UsageError(f"{path} is in torch.save's old format and has {size:,} bytes; save it "
                         "again, or as safetensors")  # fmt: skip
    if not packed:
        with path.open("rb") as f:
            if f.read(1) != b"\x80":  # of every pickle since 2001
                raise UsageError(f"{str(path)!r} is no file of tensors that is known here")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=packed)
    except Exception as error:  # damaged pickles raise nearly anything
        said = one_line(error)
        if "weights_only" in said or "Unsupported" in said or "GLOBAL" in said:
            said = "it holds Python objects besides tensors, which would have to be executed"
        raise UsageError(f"{str(path)!r} must be tensors by name, as torch.save writes them or "
                         f"safetensors; {said}") from None  # fmt: skip


def _check_zip(path: Path, size: int) -> None:
    """Refuse an archive that would grow: torch.save stores, it does not compress."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise UsageError(f"{str(path)!r} is damaged: {one_line(error)}") from None
    if len(infos) > MOST_TENSORS:
        raise UsageError(f"{path} has {len(infos):,} parts, at most {MOST_TENSORS:,} are read")
    if any(info.compress_type for info in infos) or sum(i.file_size for i in infos) > size:
        raise UsageError(f"{path} is packed in a way that torch.save does not write")
    if any(i.filename.endswith(".pkl") and i.file_size > MOST_PICKLE for i in infos):
        raise UsageError(f"{path} has a description of more than {MOST_PICKLE:,} bytes")


def _state_of(loaded: Any, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by name, and plain values that lie beside them."""
    rest: dict[str, Any] = {}
    for _ in range(3):
        if not isinstance(loaded, Mapping):
            break
        if any(isinstance(value, Tensor) for value in loaded.values()):
            state = {
                check_name(name, path).removeprefix("_orig_mod.").removeprefix("module."): value
                for name, value in loaded.items()
                if isinstance(value, Tensor)
            }
            return state, rest
        rest |= {str(k): v for k, v in loaded.items() if isinstance(v, str | int | float | dict)}
        inner = [loaded[key] for key in INNER if isinstance(loaded.get(key), Mapping)]
        if not inner:
            break
        loaded = inner[0]
    raise UsageError(
        f"{str(path)!r} must hold tensors by name, or have them under {', '.join(INNER)}; got "
        f"{type(loaded).__name__}"
    )
