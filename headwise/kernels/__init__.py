"""Fast paths, each beside a plain twin that the tests compare it with."""

import importlib.util

_TRITON = importlib.util.find_spec("triton") is not None


def has_triton() -> bool:
    """Whether kernels for the GPU can be compiled here."""
    return _TRITON
