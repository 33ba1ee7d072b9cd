"""Files of tensors that are read as they were written, or not at all: safetensors with a digest.

A file holds numbers and text, never code. Its digest lies in its metadata and covers the names,
types, sizes and bytes of its tensors and the rest of the metadata. Files of before have none and
are read without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.files import DamagedError, whole_file

DIGEST = "digest"  # its key in the metadata


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write tensors on the CPU and what they are about; a reader finds the file of before or this
    one."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {**about, DIGEST: digest_of(content, about)}
    try:
        with whole_file(path) as temporary:
            save_file(content, temporary, metadata)
    except SafetensorError as e:
        # A full disk is the system's error, here wrapped in the library's own.
        number = re.search(r"os error (\d+)", str(e))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


def read_tensors(path: Path, most: int | None = None) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What a file is about, and its tensors. `most` is the largest size in bytes that it may
    have."""
    from safetensors import SafetensorError, safe_open

    # A link may lead anywhere, and the opening of a named pipe would wait for a writer.
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise DamagedError("it is not a regular file")
    if most is not None and found.st_size > most:
        raise DamagedError(f"it has {found.st_size:,} bytes, such a file has at most {most:,}")
    try:
        with safe_open(path, "pt") as f:
            about = dict(f.metadata() or {})
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError) as e:
        raise DamagedError(" ".join(f"{type(e).__name__}: {e}".split())[:200]) from None
    digest = about.pop(DIGEST, None)
    if digest is not None and digest != digest_of(tensors, about):
        raise DamagedError("its content does not have its digest")
    return about, tensors


def digest_of(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """A digest of tensors and of what they are about, in any order."""
    digest = hashlib.sha256()
    for name, text in sorted(about.items()):
        digest.update(f"{name}={text}\n".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            # NumPy lacks some of torch's types, so the tensor is hashed as bytes.
            data: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            digest.update(data)
    return digest.hexdigest()


def set_aside(path: Path, run_id: str, error: Exception) -> None:
    """Rename a checkpoint that cannot be used, so that a new one can take its place, and say so in
    one line. A checkpoint holds nothing that training cannot make again."""
    aside = aside_of(path)
    os.replace(path, aside)
    kind = "" if isinstance(error, DamagedError) else f"{type(error).__name__}: "
    why = " ".join(f"{kind}{error}".split())[:300]
    print(
        f"headwise: run {run_id} starts again, its checkpoint cannot be used ({why}); it is kept "
        f"as {aside}",
        file=sys.stderr,
        flush=True,
    )


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint and what was set aside; a folder that lay in its place stays."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(IsADirectoryError, PermissionError):
        aside_of(path).unlink(missing_ok=True)


def aside_of(path: Path) -> Path:
    """Where `set_aside` puts a file: checkpoint.safetensors becomes checkpoint.damaged."""
    return path.with_suffix(".damaged")
