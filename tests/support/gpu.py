"""What the tests of GPU kernels share: the device they run on, and the interpreter's arithmetic
made a GPU's."""

import math

import numpy as np
import pytest
import torch
from support.tolerance import seeded

pytest.importorskip("triton", reason="the kernels are written in triton")
import triton.language as tl

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NAN = math.nan
# where a product is the first thing that autograd's own thread does, PyTorch warns that it has no
# context
if not INTERPRETED:
    torch.ones(1, device=DEVICE, requires_grad=True).exp().backward()


def patch_language_once_per_launch():
    """Triton's interpreter replaces the functions of its language by numpy's at every launch, and
    again at every call of a function within it, which is half of its time. Within a launch the
    first replacement is still there."""
    from triton.runtime import interpreter

    replace, languages, of_function = interpreter._patch_lang, set(), {}

    class Launch:
        def __init__(self, scope):
            self.scope = scope

        def restore(self):
            languages.clear()
            self.scope.restore()

    def replace_once(function):
        if function not in of_function:
            seen = list(map(id, function.__globals__.values()))
            of_function[function] = {x.__name__ for x in (tl, tl.core) if id(x) in seen}
        if of_function[function] <= languages:
            return None
        languages.update(of_function[function])
        return Launch(replace(function))

    interpreter._patch_lang = replace_once


if INTERPRETED:
    patch_language_once_per_launch()


def multiply_as_a_gpu(monkeypatch):
    """The interpreter multiplies the bit patterns of bfloat16, cuts where a GPU rounds to it, and
    does not know TF32."""
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def operand(x, precision):
        if x.dtype.scalar == tl.bfloat16:
            return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        if x.dtype.scalar == tl.float32 and precision.name == "TF32":
            return TensorHandle(
                (np.ascontiguousarray(x.data).view(np.uint32) & np.uint32(0xFFFFE000)).view(
                    np.float32
                ),
                tl.float32,
            )
        return x

    def create_dot(self, a, b, d, precision, *rest):
        return dot(self, operand(a, precision), operand(b, precision), d, precision, *rest)

    def cast_impl(self, x, to):
        if (x.dtype.scalar, to.scalar) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(x.data)).to(BF16).view(torch.int16)
            return TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)
        return cast(self, x, to)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)


def normal(seed, *size, dtype=FP32):
    return torch.randn(size, generator=seeded(seed)).to(DEVICE, dtype)


def near(actual, expected, bound, what="", largest=None):
    """max |actual - expected| <= bound max |expected|; NaN never passes."""
    assert actual.shape == expected.shape, (
        f"{what}: shapes {tuple(actual.shape)} and {tuple(expected.shape)}"
    )
    largest = expected.abs().max().item() if largest is None else largest
    error = (actual.detach().double() - expected.detach()).abs().max().item()
    assert error <= bound * largest, (
        f"{what}: off by {error:.3g}, allowed {bound:.3g} of {largest:.3g}"
    )
