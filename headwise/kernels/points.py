"""The farthest-neighbour task's data from normal draws in one pass on a GPU. The plain twin is `Farthest.sample` on a CPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _farthest(raw, x, target, N: tl.constexpr, D: tl.constexpr, NP: tl.constexpr, DP: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * N * D
    n = tl.arange(0, NP)
    d = tl.arange(0, DP)[None, :]
    here = n[:, None] * D + d
    seen = (n < N)[:, None] & (d < D)
    points = tl.load(raw + at + here, mask=seen, other=0.0)
    points = points / tl.sqrt(tl.maximum(tl.sum(points * points, 1), 1e-38))[:, None]
    tl.store(x + at + here, points, mask=seen)
    products = tl.dot(points, tl.trans(points), input_precision="ieee")
    far = tl.argmin(tl.where((n < N)[None, :], products, float("inf")), 1)
    found = tl.load(raw + at + far[:, None] * D + d, mask=seen, other=0.0)
    found = found / tl.sqrt(tl.maximum(tl.sum(found * found, 1), 1e-38))[:, None]
    tl.store(target + at + here, found, mask=seen)


def farthest(raw_BND: Tensor) -> tuple[Tensor, Tensor]:
    """Normal draws -> points on the sphere, and for each the point of its sequence with the smallest inner product."""
    batch, tokens, dim = raw_BND.shape
    x, target = torch.empty_like(raw_BND), torch.empty_like(raw_BND)
    padded = max(16, triton.next_power_of_2(tokens))
    sizes = {"N": tokens, "D": dim, "NP": padded, "DP": max(16, triton.next_power_of_2(dim))}
    _farthest[(batch,)](raw_BND, x, target, **sizes, num_warps=min(8, padded // 16))
    return x, target
