"""Fast paths, each beside a plain twin that the tests compare it with."""

import importlib.util


def _found() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ModuleNotFoundError:
        return False


_TRITON = _found()


def has_triton() -> bool:
    """Whether kernels for the GPU can be compiled here."""
    return _TRITON
