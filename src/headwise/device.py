"""Devices, and where and by what a row was made. Loads torch only where it is used."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import headwise
from headwise.errors import UsageError, nearest
from headwise.rows import Row

if TYPE_CHECKING:
    import torch

# A container's limit on its memory, by the version of control groups.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def pick_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:1 as a device that is there."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise UsageError(f"unknown device {name!r}; {nearest(name, ('auto', 'cpu', 'cuda'))}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"device {name} is not there: torch {torch.__version__} sees no GPU; choices: auto, cpu"
        )
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {name} is not there: torch sees {torch.cuda.device_count()} GPUs")
    return torch.device(name)


@functools.cache
def commit() -> str:
    """The commit of the code that runs, with a + if the tree differs from it; HEADWISE_COMMIT where
    there is no checkout."""
    if "HEADWISE_COMMIT" in os.environ:
        return os.environ["HEADWISE_COMMIT"]
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return ""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=False
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "src/headwise")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except OSError:
        return ""


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory(device: torch.device) -> int:
    """The most bytes that this process held so far, on the GPU or at all."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has: a GPU's, or the machine's within a container's limit."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max": there is none
            found.append(int(Path(limit).read_text()))
    return min(found)


def provenance(device: torch.device) -> Row:
    """Where and by what a row was made, and when."""
    import torch

    return {
        "device": device_name(device),
        "host_cpus": os.cpu_count(),
        "commit": commit(),
        "headwise": headwise.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@contextlib.contextmanager
def numerics(precision: str, device: torch.device) -> Iterator[None]:
    """One thread on a CPU, so that bits depend on no core count, and no denormals, which sharp
    softmaxes are full of and which cost a hundred times a normal number; products on a GPU with
    TF32's 11 bits only where they are asked for, and kernels launched on the GPU that was asked
    for."""
    import torch

    threads, tf32 = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    try:
        if device.type == "cpu":
            torch.set_num_threads(1)
            torch.set_flush_denormal(True)
        torch.backends.cuda.matmul.allow_tf32 = precision in ("tf32", "fp16")
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
        torch.backends.cuda.matmul.allow_tf32 = tf32
