"""CUDA C++ compiled where it runs, by the compiler that comes with PyTorch (NVRTC): for what Triton
cannot say.

Machine code is kept in ~/.cache/headwise (or under XDG_CACHE_HOME), by a hash of everything it
depends on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import numbers
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.files import write_whole

RIGHT = 3e-3  # relative error of a layer with operands of 11 bits
REGISTERS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS
MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    # The library of PyTorch's own CUDA version: where the loader finds it, then in the packages
    # that PyTorch installs.
    version = (torch.version.cuda or "").partition(".")[0]
    name = f"libnvrtc.so.{version}"
    places = [name]
    if not version:
        return None
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else spec.submodule_search_locations or []
    for root in roots:
        places += sorted(str(p) for p in Path(root).glob(f"*/lib/{name}"))
    for place in places:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    return None


def has_compiler() -> bool:
    """Whether CUDA C++ can be compiled here."""
    return os.name == "posix" and not torch.version.hip and _nvrtc() is not None


def missing(device: torch.device) -> str:
    """What our kernels in CUDA C++ need that is not there; empty when nothing is."""
    if device.type != "cuda":
        return f"a GPU, the device is {device.type}"
    if torch.version.hip or torch.cuda.get_device_capability(device) != (9, 0):
        return "a GPU of compute capability 9.0 (H100, H200)"
    return "" if has_compiler() else "NVRTC, the compiler that comes with PyTorch"


def numbered(device: torch.device) -> torch.device:
    """The same device with its number."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def worst(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The largest relative error of what was computed against what was wanted; not a number where
    one is not."""
    errors = []
    for computed, wanted in pairs:
        exact = wanted.detach()
        errors.append((computed.double() - exact).norm() / exact.norm())
    return float(torch.stack(errors).max())


def proven(what: str, trial: Callable[[], float], device: torch.device) -> bool:
    """Whether a trial's relative error is that of the operands' rounding. Where it is not, or
    nothing could be compiled, a warning says so."""
    try:
        with (
            torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext(),
            torch.inference_mode(False),
        ):
            off = trial()
    except torch.OutOfMemoryError:
        raise  # it says nothing of the kernels: the ensemble is halved, and they are tried again
    except (RuntimeError, OSError) as error:  # no compiler after all, or one without such a card
        warnings.warn(
            f"{what} in CUDA C++ was not compiled, Triton takes over: {error}", stacklevel=2
        )
        return False
    if not off <= RIGHT:
        warnings.warn(
            f"{what} in CUDA C++ is off by {off:.1e} on this GPU, Triton takes over", stacklevel=2
        )
    return off <= RIGHT


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _done(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {(text.value or b'').decode() or status}")


def compiled(names: Sequence[str], architecture: str, defined: dict[str, int]) -> bytes:
    """Machine code of files beside this one, compiled as one source for a GPU architecture such as
    sm_90a."""
    source = "".join((Path(__file__).parent / name).read_text() for name in names)
    # The key of the cache holds all that machine code depends on: source, options and the
    # compiler's version.
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        *(f"-D{name}={value}" for name, value in defined.items()),
    ]
    nvrtc, major, minor = _nvrtc(), ctypes.c_int(), ctypes.c_int()
    assert nvrtc is not None
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = hashlib.sha256(
        "\n".join([source, *options, f"{major.value}.{minor.value}"]).encode()
    ).hexdigest()
    folder = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
    kept = folder / "headwise" / f"{key}.cubin"
    with contextlib.suppress(OSError):
        return kept.read_bytes()
    code = _compile(nvrtc, source, options)
    with contextlib.suppress(OSError):  # a cache that cannot be written is none
        write_whole(kept, code)
    return code


def _compile(nvrtc: ctypes.CDLL, source: str, options: list[str]) -> bytes:
    # Create, compile, read the code; on failure the compiler's log is the message.
    program = ctypes.c_void_p()
    words = (ctypes.c_char_p * len(options))(*(word.encode() for word in options))
    if nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"source.cu", 0, None, None
    ):
        raise RuntimeError("NVRTC: no program")
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(options), words)
        size = ctypes.c_size_t()
        if failed:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC: {log.value.decode()}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its number, and 64 bytes of value, of which a cluster's size takes three
    numbers."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class Module:
    """Kernels of one source on one GPU, the current one."""

    def __init__(self, code: bytes) -> None:
        torch.cuda.synchronize()  # makes a context, where nothing did before
        self.handle = ctypes.c_void_p()
        _done(_driver().cuModuleLoadData(ctypes.byref(self.handle), code))
        self.found: dict[str, ctypes.c_void_p] = {}

    def _kernel(self, name: str, shared: int) -> ctypes.c_void_p:
        if name not in self.found:
            kernel = ctypes.c_void_p()
            _done(_driver().cuModuleGetFunction(ctypes.byref(kernel), self.handle, name.encode()))
            _done(_driver().cuFuncSetAttribute(kernel, MOST_SHARED, shared))
            self.found[name] = kernel
        return self.found[name]

    def registers(self, name: str, shared: int) -> int:
        """Of a thread of a kernel, where its warps do not give each other some."""
        found = ctypes.c_int()
        _done(
            _driver().cuFuncGetAttribute(ctypes.byref(found), REGISTERS, self._kernel(name, shared))
        )
        return found.value

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        shared: int,
        args: tuple[Any, ...],
        cluster: int = 1,
    ) -> None:
        """Launch on the current stream; arguments are tensors, ints (32 bits) and floats. So many
        neighbours along the grid form a cluster: they run at the same time and reach each other's
        shared memory."""
        # The driver takes a pointer to each argument, so `values` must live until the launch.
        values = [_argument(arg) for arg in args]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        # The only launch attribute is the cluster's size.
        size = ctypes.pointer(_Attribute(CLUSTER, b"", (cluster, 1, 1)))
        config = _Config((*grid, 1), (threads, 1, 1), shared, stream, size, 1)
        _done(
            _driver().cuLaunchKernelEx(
                ctypes.byref(config), self._kernel(name, shared), places, None
            )
        )


def _argument(arg: Any) -> Any:
    match arg:
        case Tensor():
            return ctypes.c_void_p(arg.data_ptr())
        case float():
            return ctypes.c_float(arg)
        case numbers.Integral():
            return ctypes.c_int(int(arg))
    raise TypeError(f"a kernel takes tensors, ints and floats, got {type(arg).__name__}")
