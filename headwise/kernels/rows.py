"""Rows of scores that matrix products wrote out: softmax under a mask, and its gradient, each in one pass over memory.

A row r of a block of queries stands at token query0 + r mod per: `per` queries for each of the heads that share keys, one head
after the other. Column c is key key0 + c. Scores are float32 or the operands' type; sums are float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 4096  # scores of a row that a program holds at once
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _seen(key, token, some, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    if CAUSAL:
        some = some & (key <= token)
    if WINDOW:
        some = some & (tl.abs(key - token) < window)
    return some


@triton.jit
def soften(
    s, p, lse, n, scale, per, query0, key0, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """p = softmax(scale s) of one row where it is seen, 0 elsewhere; lse = log sum exp(scale s). ONE: the row fits a block."""
    r = tl.program_id(0).to(tl.int64)
    token = query0 + (r % per).to(tl.int32)
    c = tl.arange(0, BLOCK)
    steep = scale * LOG2E
    if ONE:
        seen = _seen(key0 + c, token, c < n, window, CAUSAL, WINDOW)
        x = tl.where(seen, tl.load(s + r * n + c, mask=c < n, other=0.0).to(tl.float32) * steep, -float("inf"))
        top = tl.max(x, 0)
        e = tl.exp2(x - top)
        total = tl.sum(e, 0)
        tl.store(p + r * n + c, (e / total).to(p.dtype.element_ty), mask=c < n)
    else:
        tops = tl.full([BLOCK], -float("inf"), tl.float32)
        for first in range(0, n, BLOCK):
            at = first + c
            seen = _seen(key0 + at, token, at < n, window, CAUSAL, WINDOW)
            x = tl.where(seen, tl.load(s + r * n + at, mask=at < n, other=0.0).to(tl.float32) * steep, -float("inf"))
            tops = tl.maximum(tops, x)
        top = tl.max(tops, 0)
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, n, BLOCK):
            at = first + c
            seen = _seen(key0 + at, token, at < n, window, CAUSAL, WINDOW)
            x = tl.load(s + r * n + at, mask=at < n, other=0.0).to(tl.float32) * steep
            sums += tl.where(seen, tl.exp2(x - top), 0.0)
        total = tl.sum(sums, 0)
        for first in range(0, n, BLOCK):
            at = first + c
            seen = _seen(key0 + at, token, at < n, window, CAUSAL, WINDOW)
            x = tl.load(s + r * n + at, mask=at < n, other=0.0).to(tl.float32) * steep
            tl.store(p + r * n + at, tl.where(seen, tl.exp2(x - top) / total, 0.0).to(p.dtype.element_ty), mask=at < n)
    tl.store(lse + r, (top + tl.log2(total)) / LOG2E)


@triton.jit
def slope(
    s, dp, lse, delta, p, ds, n, scale, per, query0, key0, window, rows, batch_step, row_step,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """p again (if KEEP) and ds = p (dp - delta) scale, into places whose batches and rows lie batch_step and row_step apart."""
    r = tl.program_id(0).to(tl.int64)
    token = query0 + (r % per).to(tl.int32)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    some = c < n
    seen = _seen(key0 + c, token, some, window, CAUSAL, WINDOW)
    x = tl.load(s + r * n + c, mask=some, other=0.0).to(tl.float32) * (scale * LOG2E)
    e = tl.where(seen, tl.exp2(x - tl.load(lse + r) * LOG2E), 0.0)
    g = e * (tl.load(dp + r * n + c, mask=some, other=0.0).to(tl.float32) - tl.load(delta + r)) * scale
    to = (r // rows) * batch_step + (r % rows) * row_step + c
    if KEEP:
        tl.store(p + to, e.to(p.dtype.element_ty), mask=some)
    tl.store(ds + to, g.to(ds.dtype.element_ty), mask=some)


@triton.jit
def dots(a, b, out, n, BLOCK: tl.constexpr):
    """The inner product of each row of a with that of b."""
    r = tl.program_id(0).to(tl.int64)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        c = first + tl.arange(0, BLOCK)
        x = tl.load(a + r * n + c, mask=c < n, other=0.0).to(tl.float32)
        sums += x * tl.load(b + r * n + c, mask=c < n, other=0.0).to(tl.float32)
    tl.store(out + r, tl.sum(sums, 0))


# ---- launching


def soften_rows(s: Tensor, p: Tensor, lse: Tensor, scale: float, per: int, query0: int, key0: int, causal: bool, window: int) -> None:
    """Of contiguous (..., rows, n) scores; p and lse are contiguous too."""
    n = s.shape[-1]
    block = min(MOST, triton.next_power_of_2(n))
    soften[(s.numel() // n,)](
        s, p, lse, n, scale, per, query0, key0, window, CAUSAL=causal, WINDOW=window > 0, BLOCK=block, ONE=n <= block,
        num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip


def slope_rows(
    s: Tensor, dp: Tensor, lse: Tensor, delta: Tensor, p: Tensor | None, ds: Tensor,
    scale: float, per: int, query0: int, key0: int, causal: bool, window: int,
) -> None:  # fmt: skip
    """Of contiguous (batch, rows, n) scores; p and ds are views of that size, alike strided, the last axis without gaps."""
    _, rows, n = s.shape
    block = min(1024, triton.next_power_of_2(n))
    slope[(s.numel() // n, triton.cdiv(n, block))](
        s, dp, lse, delta, ds if p is None else p, ds, n, scale, per, query0, key0, window, rows, ds.stride(0), ds.stride(1),
        CAUSAL=causal, WINDOW=window > 0, BLOCK=block, KEEP=p is not None, num_warps=4,
    )  # fmt: skip


def dots_of(a: Tensor, b: Tensor) -> Tensor:
    """Inner products over the last axis of contiguous tensors, float32."""
    out = torch.empty(a.shape[:-1], dtype=torch.float32, device=a.device)
    sizes: dict[str, Any] = {"BLOCK": min(1024, triton.next_power_of_2(a.shape[-1])), "num_warps": 4}
    dots[(out.numel(),)](a, b, out, a.shape[-1], **sizes)
    return out
