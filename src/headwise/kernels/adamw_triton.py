"""AdamW on a GPU in one pass over weights, moments and gradients.

`adamw_rows` moves an ensemble's flat rows, a program 1,024 numbers of one model; its plain twin is
training/optim.py `plain_adamw`. `adamw` moves one large parameter of one decoder: it reads the
gradient once and leaves it as it is, also where it is clipped. Its plain twin is
`torch.optim.adamw.adamw` with `fused` and `grad_scale`, which writes clipped gradients back.
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
    # Both moments, then the weight: decay first, then the step, as torch's AdamW has them.
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
    # A program moves BLOCK numbers; the gradient is divided while it is read, and stays as it is.
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seen = i < size
    g = tl.load(grad + i, mask=seen, other=0.0)
    if CLIPPED:
        g = g / tl.load(over)
    a = tl.load(mean + i, mask=seen, other=0.0)
    b = tl.load(square + i, mask=seen, other=0.0)
    x = tl.load(w + i, mask=seen, other=0.0)
    x, a, b = stepped(x, a, b, g, beta1, beta2, rate, root, eps, keep)
    tl.store(mean + i, a, mask=seen)
    tl.store(square + i, b, mask=seen)
    tl.store(w + i, x, mask=seen)


@triton.jit
def adamw_rows(
    w,
    mean,
    square,
    grad,
    half,
    rates,
    total,
    inverse,
    P,
    M,
    beta1,
    beta2,
    eps,
    HALF: tl.constexpr,
    CHECK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One AdamW update of flat rows; rates holds step size, 1/sqrt(1 - beta2^t) and decay, each
    (M,). `half` gets the operands' copy. With CHECK a model whose `total` is not finite stays as it
    is, and gradients are taken times the model's `inverse`."""
    m = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # A model whose gradients are not finite keeps everything: its mask hides all numbers.
    end = P
    if CHECK:
        # NaN is not below; a mask with a number of each lane would have a thread load one number at
        # a time
        end = tl.where(tl.abs(tl.load(total + m)) < float("inf"), P, 0)
    seen = i < end
    at = m * P + i
    g = tl.load(grad + at, mask=seen, other=0.0)
    if CHECK:
        g = g * tl.load(inverse + m)
    a = tl.load(mean + at, mask=seen, other=0.0)
    b = tl.load(square + at, mask=seen, other=0.0)
    old = tl.load(w + at, mask=seen, other=0.0)
    # Three numbers per model, in rows of M: the step's size, 1/sqrt(1 - beta2^t), and what decay
    # leaves.
    rate, root, keep = tl.load(rates + m), tl.load(rates + M + m), tl.load(rates + 2 * M + m)
    new, a, b = stepped(old, a, b, g, beta1, beta2, rate, root, eps, keep)
    tl.store(mean + at, a, mask=seen)
    tl.store(square + at, b, mask=seen)
    tl.store(w + at, new, mask=seen)
    if HALF:
        tl.store(half + at, new.to(half.dtype.element_ty), mask=seen)


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
    # The corrections of both moments for step t.
    grad = grad.contiguous()
    rate, root = lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
    with torch.cuda.device_of(w):  # triton launches on the current device
        _moved[(-(-w.numel() // BLOCK),)](
            w=w,
            mean=mean,
            square=square,
            grad=grad,
            over=grad if over is None else over,
            size=w.numel(),
            beta1=beta1,
            beta2=beta2,
            rate=rate,
            root=root,
            eps=eps,
            keep=1 - lr * decay,
            CLIPPED=over is not None,
            BLOCK=BLOCK,
        )
