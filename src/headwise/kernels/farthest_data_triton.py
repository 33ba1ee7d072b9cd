"""The farthest-neighbour task's data from normal draws in one pass on a GPU. The plain twin is
`Farthest.sample` on a CPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _farthest(
    raw,
    x,
    target,
    batch,
    apart_x,
    apart_target,
    N: tl.constexpr,
    D: tl.constexpr,
    NP: tl.constexpr,
    DP: tl.constexpr,
):
    # A program makes one sequence: where its draws are, and where its points go within their step.
    at = tl.program_id(0).to(tl.int64) * N * D
    step = (tl.program_id(0) // batch).to(tl.int64)
    within = (tl.program_id(0) % batch).to(tl.int64) * N * D
    x += step * apart_x + within
    target += step * apart_target + within
    # Points (N, D) on the sphere; padding stays zero.
    n = tl.arange(0, NP)
    d = tl.arange(0, DP)[None, :]
    here = n[:, None] * D + d
    seen = (n < N)[:, None] & (d < D)
    points = tl.load(raw + at + here, mask=seen, other=0.0)
    points = points / tl.sqrt(tl.maximum(tl.sum(points * points, 1), 1e-38))[:, None]
    tl.store(x + here, points, mask=seen)
    # The farthest point has the smallest inner product. Padded points are no candidates.
    products = tl.dot(points, tl.trans(points), input_precision="ieee")
    far = tl.argmin(tl.where((n < N)[None, :], products, float("inf")), 1)
    # The target is that point, normed again from its draw: a row cannot be looked up in registers.
    found = tl.load(raw + at + far[:, None] * D + d, mask=seen, other=0.0)
    found = found / tl.sqrt(tl.maximum(tl.sum(found * found, 1), 1e-38))[:, None]
    tl.store(target + here, found, mask=seen)


def farthest(raw_BND: Tensor, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Normal draws -> points on the sphere, and for each the point of its sequence with the
    smallest inner product; written to tensors (steps, batch, tokens, dim) whose steps may lie
    apart, where there are such."""
    # Without given tensors all sequences lie in one step.
    batch, tokens, dim = raw_BND.shape
    if into is None:
        x, target = torch.empty_like(raw_BND), torch.empty_like(raw_BND)
        places = (batch, 0, 0)
    else:
        x, target = into
        assert x.shape == target.shape == (batch // x.shape[1], x.shape[1], tokens, dim)
        assert x[0].is_contiguous()
        assert target[0].is_contiguous()
        places = (x.shape[1], x.stride(0), target.stride(0))
    padded = max(16, triton.next_power_of_2(tokens))
    sizes = {"N": tokens, "D": dim, "NP": padded, "DP": max(16, triton.next_power_of_2(dim))}
    _farthest[(batch,)](raw_BND, x, target, *places, **sizes, num_warps=min(8, padded // 16))
    return x, target
