"""Our CUDA C++ on a CPU: the same lines with a warp as a vector of 32 (warp.h)."""

import ctypes
import functools
import getpass
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from headwise.kernels import cuda

HERE = Path(__file__).parent


@functools.cache
def library(name, **defined):
    """kernels/<name>.cu by way of <name>.cpp, made once for all workers and tests of the same sources."""
    words = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", *(f"-D{key}={value}" for key, value in defined.items())]
    sources = [HERE / f"{name}.cpp", HERE / "warp.h", Path(cuda.__file__).parent / f"{name}.cu"]
    key = hashlib.sha256(b"".join([" ".join(words).encode(), *(p.read_bytes() for p in sources)])).hexdigest()[:16]
    made = Path(tempfile.gettempdir()) / f"headwise-{name}-{getpass.getuser()}-{key}.so"
    if not made.exists():
        unfinished = made.with_suffix(f".{os.getpid()}")
        subprocess.run([*words, f"-I{HERE}", f"-I{sources[-1].parent}", "-o", str(unfinished), str(sources[0])], check=True)
        unfinished.rename(made)
    return ctypes.CDLL(str(made))


def call(made, name, grid, warps, shared, args):
    """A kernel of such a library on a grid of blocks."""
    getattr(made, f"run_{name}")(*grid, warps, shared, *map(cuda._argument, args))


def needs_a_compiler():
    if not shutil.which("g++"):
        pytest.skip("needs a GPU, or g++")
