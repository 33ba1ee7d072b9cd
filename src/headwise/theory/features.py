"""Random rank-1 heads with the best weights: how little do H of them err on the nearest of two
points?

Head h is a unit query q_h and a unit key k_h; it picks the point with the larger (x.k)(q.y). For a
weighted sum of heads the error is 1 - 2 b.a + a^T C a, where b_h is the probability that head h is
right (`harmonics.head_target` of q.k) and C_hg that heads h and g agree (`harmonics.head_head`).
The best weights solve C a = b and leave 1 - b.a.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import UsageError, nearest
from headwise.tasks.neighbors import sphere
from headwise.theory.harmonics import check_dim, check_heads, energy, sign_coefficient

DRAWS = ("cos-uniform", "independent", "published")
BLOCK = 4096  # rows of the agreement matrix at a time, fewer where they do not fit


@dataclass(frozen=True)
class Solution:
    """The best weights of a layer of heads."""

    error: float  # of the layer, 1 - b.a
    residual: float  # ||C a - b|| / ||b||
    iterations: int  # 0: solved directly
    weights: Tensor


def draw_heads(
    dim: int, heads: int, generator: torch.Generator, draw: str = "cos-uniform"
) -> tuple[Tensor, Tensor]:
    """Queries and keys, (heads, dim) each, float64.

    cos-uniform   the cosine between a head's query and key is uniform on (-1, 1)
    independent   both uniform on the sphere
    published     what the published code draws: as cos-uniform, but without scaling the part of the
                  key at right angles to the query back to length 1, so keys are shorter than 1
    """
    check_dim(dim)
    check_heads(heads)
    if draw not in DRAWS:
        raise UsageError(f"unknown draw {draw!r}; {nearest(draw, DRAWS)}")

    # e is a direction beside q: the key is cos q + sin e', with e' the part of e at right angles to
    # q.
    q, e = (sphere(generator, heads, dim, dtype=torch.float64) for _ in range(2))
    if draw == "independent":
        return q, e
    cosine = (
        2 * torch.rand(heads, 1, dtype=torch.float64, generator=generator, device=generator.device)
        - 1
    )
    e = e - (e * q).sum(1, keepdim=True) * q
    if draw == "cos-uniform":
        e = e / e.norm(dim=1, keepdim=True)
    return q, cosine * q + (1 - cosine.square()).sqrt() * e


def right(q: Tensor, k: Tensor, most: int = 49) -> Tensor:
    """b: the probability that each head is right, differentiable in q and k."""
    t, dim = (q * k).sum(1).clamp(-1, 1), q.shape[1]
    # b_h = 1/2 + 1/2 sum_l N lambda_l^3 P_l(q.k), odd l only. P_l comes from its three-term
    # recurrence, so the sum is differentiable.
    before, now, total = torch.ones_like(t), t, torch.zeros_like(t)
    for n in range(1, most + 1):
        if n % 2:
            total = total + energy(dim, n) * sign_coefficient(dim, n) * now
        before, now = now, ((2 * n + dim - 2) * t * now - n * before) / (n + dim - 2)
    return 0.5 + 0.5 * total


def agree(q: Tensor, k: Tensor, q2: Tensor, k2: Tensor) -> Tensor:
    """C: the probability that heads of one set agree with heads of another."""
    near = (
        1 - 1e-12 if q.requires_grad or k.requires_grad else 1.0
    )  # the arcsine's slope is infinite at 1
    # C = 1/2 + (2/pi^2) arcsin(q.q') arcsin(k.k'), Theorem 2's kernel of two heads.
    turn, other = ((a @ b.T).clamp(-near, near).asin() for a, b in ((q, q2), (k, k2)))
    return 0.5 + (2 / torch.pi**2) * turn * other


def best_weights(
    q: Tensor, k: Tensor, *, tolerance: float = 1e-6, limit: int = 4000, memory: int = 4 << 30
) -> Solution:
    """The weights with the least error.

    Directly in float64 where the matrix and its factor fit `memory` bytes. Else by conjugate
    gradients in float64 on a matrix in float32, kept where it fits and made again block by block
    where it does not, until the residual of the float64 system is below `tolerance`: each
    correction is solved for, so that float32 entries do not limit it.
    """
    if not 0 < tolerance < 1:
        raise UsageError(f"tolerance must lie between 0 and 1, got {tolerance!r}")
    heads, b = len(q), right(q, k)
    # Direct: C a = b by Cholesky. C is nearly singular for many heads, so the residual decides
    # whether the result counts.
    if 16 * heads * heads <= memory and heads <= 8192:
        matrix = agree(q, k, q, k)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if not failed:
            a = torch.cholesky_solve(b.unsqueeze(1), factor).squeeze(1)
            residual = ((matrix @ a - b).norm() / b.norm()).item()
            if residual <= tolerance:
                return Solution((1 - b @ a).item(), residual, 0, a)
    return _iterate(q, k, b, tolerance, limit, memory)


def _blocks(q: Tensor, k: Tensor, memory: int) -> list[Tensor] | None:
    """The agreement matrix in float32 by blocks of rows, if it fits."""
    # Float32 takes 4 bytes per entry.
    if 4 * len(q) * len(q) > memory:
        return None
    return [block.float() for block in _rows(q, k, memory)]


def _rows(q: Tensor, k: Tensor, memory: int) -> Iterator[Tensor]:
    """The agreement matrix, some rows at a time: as many as fit with what is made on the way."""
    # An arcsine of both cosines, in float64, needs about four matrices on the way.
    step = max(1, min(BLOCK, memory // (32 * len(q))))
    return (
        agree(some, keys, q, k) for some, keys in zip(q.split(step), k.split(step), strict=True)
    )


def _product(q: Tensor, k: Tensor, blocks: list[Tensor] | None, x: Tensor, memory: int) -> Tensor:
    """C x with float32 entries; sums over the blocks' rows in float32 chunks, added up in
    float64."""
    out, low = [], x.float()
    for block in blocks if blocks is not None else _rows(q.float(), k.float(), memory):
        part = torch.zeros(len(block), dtype=x.dtype, device=x.device)
        # Short float32 sums lose little. Their totals are added in float64.
        for j in range(0, len(q), BLOCK):
            part += (block[:, j : j + BLOCK] @ low[j : j + BLOCK]).double()
        out.append(part)
    return torch.cat(out)


def _iterate(
    q: Tensor, k: Tensor, b: Tensor, tolerance: float, limit: int, memory: int
) -> Solution:
    # Iterative refinement: the outer loop keeps the float64 residual r = b - C x, the inner one
    # solves C c = r by conjugate gradients with float32 entries and corrects x by c.
    blocks, x, made = _blocks(q, k, memory), torch.zeros_like(b), 0
    scale = b.norm()
    r = b.clone()
    while made < limit and (r.norm() / scale).item() > tolerance:
        # solve C c = r in the cheap arithmetic to a tenth of what is asked for, or as far as
        # float32 entries carry
        c, rr, p = torch.zeros_like(b), r.clone(), r.clone()
        old, goal = rr @ rr, (max(0.1 * tolerance * scale.item(), 1e-4 * r.norm().item())) ** 2
        while made < limit and old > goal:
            cp = _product(q, k, blocks, p, memory)
            curve = p @ cp
            # Rounding made the float32 matrix indefinite along p; what is solved so far still
            # helps.
            if curve <= 0:
                break
            step = old / curve
            c, rr = c + step * p, rr - step * cp
            new = rr @ rr
            p, old, made = rr + (new / old) * p, new, made + 1
        x = x + c
        # The residual is computed anew with float64 entries. It stops falling where float32 carries
        # no further.
        before, r = r.norm(), b - torch.cat([block @ x for block in _rows(q, k, memory)])
        if r.norm() > 0.9 * before:
            break
    residual = (r.norm() / scale).item()
    return Solution((1 - 2 * b @ x + x @ (b - r)).item(), residual, made, x)


def measured_error(
    q: Tensor, k: Tensor, weights: Tensor, samples: int, generator: torch.Generator
) -> tuple[float, float]:
    """The error of the layer on drawn points and queries, with its standard error: nothing but hard
    heads voting."""
    dim, errors = q.shape[1], []
    for _ in range(max(1, samples // 4096)):
        # Orthonormal pairs with random signs, as in constructions.pairs, but on the generator's
        # device.
        x = torch.linalg.qr(
            torch.randn(
                4096, dim, 2, dtype=torch.float64, generator=generator, device=generator.device
            )
        )[0]
        x = x * (
            2 * torch.randint(0, 2, (4096, 1, 2), generator=generator, device=generator.device) - 1
        )
        y = torch.randn(
            4096, dim, dtype=torch.float64, generator=generator, device=generator.device
        )
        # A hard head picks x_1 where (x_1 - x_2).k and q.y have the same sign. Its weight goes to
        # the point that it picks.
        first = ((x[..., 0] - x[..., 1]) @ k.T) * (y @ q.T) > 0
        share = (first.double() @ weights).unsqueeze(1)
        out = share * x[..., 0] + (weights.sum() - share) * x[..., 1]
        target = torch.where(
            ((x[..., 0] - x[..., 1]) * y).sum(1, keepdim=True) > 0, x[..., 0], x[..., 1]
        )
        errors.append((out - target).square().sum(1))
    all_errors = torch.cat(errors)
    return all_errors.mean().item(), (all_errors.std() / len(all_errors) ** 0.5).item()


def optimise_heads(
    dim: int, heads: int, generator: torch.Generator, steps: int = 300, rate: float = 0.03
) -> float:
    """The error after moving queries and keys downhill on the exact error, from a random start;
    weights are always the best ones."""
    q, k = (t.clone().requires_grad_() for t in draw_heads(dim, heads, generator))
    optimiser = torch.optim.Adam((q, k), lr=rate)
    # Heads may move onto each other, which makes C singular. The ridge keeps the solve and its
    # gradient finite.
    ridge = 1e-9 * torch.eye(heads, dtype=torch.float64, device=q.device)

    def error() -> Tensor:
        # Only directions count, so q and k are normalised inside the loss.
        qn, kn = q / q.norm(dim=1, keepdim=True), k / k.norm(dim=1, keepdim=True)
        b = right(qn, kn)
        return 1 - b @ torch.linalg.solve(agree(qn, kn, qn, kn) + ridge, b)

    best = error().item()
    for _ in range(steps):
        optimiser.zero_grad()
        value = error()
        value.backward()
        optimiser.step()
        best = min(best, value.item())
    return best
