"""Rows of scores that matrix products wrote out: softmax under a mask, and its gradient, each in one pass over memory.

Scores are contiguous (batch, rows, n): `per` queries for each of the heads that share keys, one head after the other, so that row r
stands at token query0 + r mod per; column c is key key0 + c. What is kept for a row (its log sum and the like) lies at [batch, head,
query] of a larger table: `z_step`, `g_step` and 1 apart. Weights and slopes are written into (and read from) places whose batches
and rows lie `batch_step` and `row_step` apart. Sums are float32.
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
def _places(rows, per, z_step, g_step, batch_step, row_step):
    """Of this program's row: its number, its query's, where what is kept for it lies, and where its weights do."""
    r = tl.program_id(0).to(tl.int64)
    z = r // rows
    row = r % rows
    at = row % per
    return r, at.to(tl.int32), z * z_step + row // per * g_step + at, z * batch_step + row * row_step


@triton.jit
def soften(
    s, p, lse, n, scale, rows, per, z_step, g_step, batch_step, row_step, query0, key0, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """p = softmax(scale s) of one row where it is seen, 0 elsewhere; lse = log sum exp(scale s). ONE: the row fits a block."""
    r, at, kept, to = _places(rows, per, z_step, g_step, batch_step, row_step)
    token = query0 + at
    c = tl.arange(0, BLOCK)
    steep = scale * LOG2E
    if ONE:
        seen = _seen(key0 + c, token, c < n, window, CAUSAL, WINDOW)
        x = tl.where(seen, tl.load(s + r * n + c, mask=c < n, other=0.0).to(tl.float32) * steep, -float("inf"))
        top = tl.max(x, 0)
        e = tl.exp2(x - top)
        total = tl.sum(e, 0)
        tl.store(p + to + c, (e / total).to(p.dtype.element_ty), mask=c < n)
    else:
        tops = tl.full([BLOCK], -float("inf"), tl.float32)
        for first in range(0, n, BLOCK):
            i = first + c
            seen = _seen(key0 + i, token, i < n, window, CAUSAL, WINDOW)
            x = tl.where(seen, tl.load(s + r * n + i, mask=i < n, other=0.0).to(tl.float32) * steep, -float("inf"))
            tops = tl.maximum(tops, x)
        top = tl.max(tops, 0)
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, n, BLOCK):
            i = first + c
            seen = _seen(key0 + i, token, i < n, window, CAUSAL, WINDOW)
            x = tl.load(s + r * n + i, mask=i < n, other=0.0).to(tl.float32) * steep
            sums += tl.where(seen, tl.exp2(x - top), 0.0)
        total = tl.sum(sums, 0)
        for first in range(0, n, BLOCK):
            i = first + c
            seen = _seen(key0 + i, token, i < n, window, CAUSAL, WINDOW)
            x = tl.load(s + r * n + i, mask=i < n, other=0.0).to(tl.float32) * steep
            tl.store(p + to + i, tl.where(seen, tl.exp2(x - top) / total, 0.0).to(p.dtype.element_ty), mask=i < n)
    tl.store(lse + kept, (top + tl.log2(total)) / LOG2E)


@triton.jit
def slope(
    s, dp, lse, delta, p, ds, n, scale, rows, per, z_step, g_step, batch_step, row_step, query0, key0, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """ds = p (dp - delta) scale; p is there (KEPT), or made from the scores again, and written too (WRITE)."""
    r, at, kept, to = _places(rows, per, z_step, g_step, batch_step, row_step)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    some = c < n
    if KEPT:
        e = tl.load(p + to + c, mask=some, other=0.0).to(tl.float32)
    else:
        seen = _seen(key0 + c, query0 + at, some, window, CAUSAL, WINDOW)
        x = tl.load(s + r * n + c, mask=some, other=0.0).to(tl.float32) * (scale * LOG2E)
        e = tl.where(seen, tl.exp2(x - tl.load(lse + kept) * LOG2E), 0.0)
    g = e * (tl.load(dp + r * n + c, mask=some, other=0.0).to(tl.float32) - tl.load(delta + kept)) * scale
    if WRITE:
        tl.store(p + to + c, e.to(p.dtype.element_ty), mask=some)
    tl.store(ds + to + c, g.to(ds.dtype.element_ty), mask=some)


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


def soften_rows(s: Tensor, p: Tensor, lse: Tensor, scale: float, query0: int, key0: int, causal: bool, window: int) -> None:
    """p and lse from scores (Z, G x queries, n); p is a view of that size, lse one of (Z, G, queries), their last axes without gaps."""
    _, rows, n = s.shape
    block = min(MOST, triton.next_power_of_2(n))
    soften[(s.numel() // n,)](
        s, p, lse, n, scale, rows, lse.shape[2], lse.stride(0), lse.stride(1), p.stride(0), p.stride(1), query0, key0, window,
        CAUSAL=causal, WINDOW=window > 0, BLOCK=block, ONE=n <= block, num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip


def slope_rows(
    s: Tensor | None, dp: Tensor, lse: Tensor, delta: Tensor, p: Tensor | None, ds: Tensor,
    scale: float, query0: int, key0: int, causal: bool, window: int,
) -> None:  # fmt: skip
    """ds, and p where there are scores to make it from; without scores p is read. Views as in `soften_rows`, those of p and ds and those
    of lse and delta alike strided."""
    _, rows, n = dp.shape
    block = min(1024, triton.next_power_of_2(n))
    slope[(dp.numel() // n, triton.cdiv(n, block))](
        dp if s is None else s, dp, lse, delta, ds if p is None else p, ds, n, scale, rows, lse.shape[2], lse.stride(0), lse.stride(1),
        ds.stride(0), ds.stride(1), query0, key0, window,
        CAUSAL=causal, WINDOW=window > 0, BLOCK=block, KEPT=s is None, WRITE=s is not None and p is not None, num_warps=4,
    )  # fmt: skip


def dots_of(a: Tensor, b: Tensor) -> Tensor:
    """Inner products over the last axis of contiguous tensors, float32."""
    out = torch.empty(a.shape[:-1], dtype=torch.float32, device=a.device)
    sizes: dict[str, Any] = {"BLOCK": min(1024, triton.next_power_of_2(a.shape[-1])), "num_warps": 4}
    dots[(out.numel(),)](a, b, out, a.shape[-1], **sizes)
    return out
