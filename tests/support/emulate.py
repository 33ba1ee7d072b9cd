"""Our CUDA C++ on a CPU: the same lines with a warp as a vector of 32 (warp.h)."""

import ctypes
import functools
import getpass
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from support.gpu import INTERPRETED

from headwise.kernels import decoder_cuda, encoder_attention_cuda, encoder_mlp_cuda, nvrtc

HERE = Path(__file__).parent
# the machine's own conversions of half precision, and no product that is rounded with its sum
FAST = ("-O1", "-march=native", "-ffp-contract=off")


@functools.cache
def library(module, **defined):
    """A module's CUDA sources by way of <module>.cpp, made once for all workers and tests of the
    same sources."""
    name = module.__name__.rpartition(".")[2]
    words = [
        "g++",
        "-std=c++20",
        *FAST,
        "-shared",
        "-fPIC",
        "-pthread",
        *(f"-D{key}={value}" for key, value in defined.items()),
    ]
    kernels = Path(nvrtc.__file__).parent
    sources = [HERE / f"{name}.cpp", HERE / "warp.h", *(kernels / n for n in module.SOURCES)]
    key = hashlib.sha256(
        b"".join([" ".join(words).encode(), *(p.read_bytes() for p in sources)])
    ).hexdigest()[:16]
    made = Path(tempfile.gettempdir()) / f"headwise-{name}-{getpass.getuser()}-{key}.so"
    if not made.exists():
        unfinished = made.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [
                *words,
                f"-I{HERE}",
                f"-I{kernels}",
                "-o",
                str(unfinished),
                str(sources[0]),
            ],
            check=True,
        )
        unfinished.rename(made)
    return ctypes.CDLL(str(made))


def call(made, name, grid, warps, shared, args):
    """A kernel of such a library on a grid of blocks."""
    getattr(made, f"run_{name}")(*grid, warps, shared, *map(nvrtc._argument, args))


def trusting(module, run, monkeypatch):
    """For a fixture: a module's kernels, which nobody has tried yet, without a GPU by `run`."""
    if INTERPRETED:
        if not shutil.which("g++"):
            pytest.skip("needs a GPU, or g++")
        monkeypatch.setattr(module, "_run", run)
        monkeypatch.setattr(nvrtc, "missing", lambda device: "")
    module._proven.cache_clear()
    yield
    module._proven.cache_clear()


def run_attention(name, rank, programs, models, warps, shared, cluster, *arguments):
    """`encoder_attention_cuda._run` on a CPU."""
    made = library(encoder_attention_cuda, R=rank, WARPS=encoder_attention_cuda.WARPS[rank])
    call(made, name, (programs, models), warps, shared, arguments)


def run_mlp(name, programs, models, warps, shared, cluster, *arguments):
    """`encoder_mlp_cuda._run` on a CPU."""
    call(library(encoder_mlp_cuda), name, (programs, models), warps, shared, arguments)


def run_decoder(name, sizes, grid, warps, *arguments):
    """`decoder_cuda._run` on a CPU."""
    defined = {"HIDDEN": sizes.hidden, "TOKENS": sizes.tokens, "R": sizes.rank}
    made = library(decoder_cuda, WIDTH=sizes.width, **defined)
    call(made, name, grid, warps, sizes.shared[name], arguments)


def check_races(module, dropped, folder, **defined):
    """<module>_races.cpp under a sanitizer that sees what two threads do to one place: nothing, but
    where one of the waits is dropped."""
    if not INTERPRETED:
        pytest.skip("races are looked for on a CPU")
    name, kernels = module.__name__.rpartition(".")[2], Path(nvrtc.__file__).parent
    sources = {n: (kernels / n).read_text() for n in module.SOURCES}
    if dropped:
        (found,) = (n for n, source in sources.items() if dropped in source)
        assert sources[found].count(dropped) == 1
        waits = re.sub(r"\b(together|meet|wait_for_post)(?=\()", "left_out", dropped)
        (folder / found).write_text(sources[found].replace(dropped, waits))
    words = [
        "g++",
        "-std=c++20",
        "-Og",  # half the time of -O1 to compile, which is most of it
        "-fsanitize=thread",
        "-pthread",
        *(f"-D{key}={value}" for key, value in defined.items()),
    ]
    words += [
        f"-I{folder}",
        f"-I{HERE}",
        f"-I{kernels}",
        "-o",
        folder / "races",
        HERE / f"{name}_races.cpp",
    ]
    made = subprocess.run(words, capture_output=True, text=True)
    if made.returncode:
        assert "tsan" in made.stderr, made.stderr
        pytest.skip("g++ has no thread sanitizer here")
    ran = subprocess.run(
        [folder / "races"], capture_output=True, text=True, env={"TSAN_OPTIONS": "halt_on_error=1"}
    )
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("the thread sanitizer does not know this kernel's memory")
    assert ("data race" in ran.stderr) == bool(dropped), ran.stdout + ran.stderr
    assert dropped or ran.stdout == "finite\n"
