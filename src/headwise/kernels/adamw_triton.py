"""AdamW of one large parameter on a GPU in one pass: it reads a gradient once and leaves it as it
is, also where that is clipped.

The plain twin is `torch.optim.adamw.adamw` with `fused` and `grad_scale`, which writes clipped
gradients back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def stepped(w, a, b, g, beta1, beta2, rate, root, eps, keep):
    """A weight and its moments after one step: `rate` is the step's size, `root` 1/sqrt(1 -
    beta2^t), `keep` what decay leaves."""
    a += (1 - beta1) * (g - a)
    b = b * beta2 + (1 - beta2) * g * g
    return w * keep - a / (tl.sqrt(b) * root + eps) * rate, a, b


@triton.jit
def _moved(
    w,
    mean,
    square,
    grad,
    over,
    size,
    beta1,
    beta2,
    rate,
    root,
    eps,
    keep,
    CLIPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seen = i < size
    g = tl.load(grad + i, mask=seen, other=0.0)
    if CLIPPED:
        g = g / tl.load(over)
    a, b, x = (
        tl.load(mean + i, mask=seen, other=0.0),
        tl.load(square + i, mask=seen, other=0.0),
        tl.load(w + i, mask=seen, other=0.0),
    )
    x, a, b = stepped(x, a, b, g, beta1, beta2, rate, root, eps, keep)
    tl.store(mean + i, a, mask=seen)
    tl.store(square + i, b, mask=seen)
    tl.store(w + i, x, mask=seen)


def adamw(
    w: Tensor,
    mean: Tensor,
    square: Tensor,
    grad: Tensor,
    over: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    step: int,
) -> None:
    """Step number `step`, from 1, of contiguous float32 tensors in place; the gradient counts
    divided by `over` and stays as it is."""
    grad = grad.contiguous()
    rate, root = lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
    with torch.cuda.device_of(w):  # triton launches on the current device
        _moved[(-(-w.numel() // BLOCK),)](
            w,
            mean,
            square,
            grad,
            grad if over is None else over,
            w.numel(),
            beta1,
            beta2,
            rate,
            root,
            eps,
            1 - lr * decay,
            CLIPPED=over is not None,
            BLOCK=BLOCK,
        )
