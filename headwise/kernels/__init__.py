"""Fast paths, each beside a plain twin that the tests compare it with."""

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Whether kernels for the GPU can be compiled here."""
    return importlib.util.find_spec("triton") is not None
