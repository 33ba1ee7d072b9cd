"""Weights and heads that solve a task without training, and the exact errors they have.

N = 2 means: points x_1, x_2 orthonormal and uniform, a query y uniform on the sphere, answer the
nearer point; only w = (x_1 - x_2)/sqrt(2) matters for the choice.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.errors import UsageError
from headwise.model.dispatch import attend
from headwise.model.transformer import Encoder, build
from headwise.shape import Shape
from headwise.tasks import neighbors
from headwise.theory.harmonics import check_dim, check_heads, legendre, log_omega, quadrature


def sphere(generator: torch.Generator, *size: int) -> Tensor:
    """Uniform directions in float64, the last axis theirs."""
    return neighbors.sphere(generator, *size, dtype=torch.float64)


def pairs(generator: torch.Generator, samples: int, dim: int) -> tuple[Tensor, Tensor]:
    """Orthonormal pairs (samples, 2, dim) and queries (samples, dim)."""
    # QR of a Gaussian matrix gives orthonormal columns. LAPACK fixes their signs, so random signs
    # make them uniform.
    x = torch.linalg.qr(torch.randn(samples, dim, 2, dtype=torch.float64, generator=generator))[0]
    sign = 2 * torch.randint(0, 2, (samples, 1, 2), generator=generator) - 1
    return (x * sign).mT, sphere(generator, samples, dim)


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """The mean of independent values and its standard error."""
    return values.mean().item(), (values.std() / math.sqrt(len(values))).item()


# ---- Fact 1: one head of full rank


def full_rank_head(x: Tensor, y: Tensor, beta: float = math.inf) -> Tensor:
    """K = Q = V = I: sum_i softmax(beta x_i.y) x_i, or the nearest point itself at infinite beta.

    x is (batch, points, dim), y (batch, dim).
    """
    if not beta > 0:
        raise UsageError(f"beta, the inverse temperature, must be positive, got {beta!r}")
    # Fact 1: one head with W_Q = W_K = W_V = I. The query attends to the points themselves.
    q, k = y[:, None, None, :], x[:, None]
    if math.isinf(beta):
        return attend(q, k, k, hard=True)[:, 0, 0]
    return attend(q, k, k, scale=beta)[:, 0, 0]


def softmax_error(dim: int, beta: float) -> float:
    """The head's exact error for two points: 2 E (1/(1 + exp(sqrt(2) beta |t|)))^2, by quadrature
    in u = beta t."""
    check_dim(dim)
    if not beta > 0:
        raise UsageError(f"beta, the inverse temperature, must be positive, got {beta!r}")
    if math.isinf(beta):
        return 0.0
    # The integrand falls off at t = 1/beta. Panels of geometric width in u = beta t resolve it for
    # every beta.
    x, w = legendre(100)
    edges = np.concatenate(([0.0], np.geomspace(0.01, 60, 24)))
    total = 0.0
    for start, stop in itertools.pairwise(edges):
        low, high = min(start / beta, 1.0), min(stop / beta, 1.0)
        # Gauss-Legendre nodes of [-1, 1] move to the panel. The density is u_d(t) of one
        # coordinate.
        t = low + (x + 1) * (high - low) / 2
        density = np.exp(log_omega(dim) + (dim - 3) / 2 * np.log1p(-np.minimum(t * t, 1 - 1e-16)))
        total += np.sum(
            w * (high - low) / 2 * density * 2 / (1 + np.exp(math.sqrt(2) * beta * t)) ** 2
        )
    # The integrand is even, so the half t > 0 counts twice.
    return 2 * float(total)


def softmax_limit(dim: int, beta: float) -> float:
    """What the error tends to as beta grows: 4 omega_d (ln 2 - 1/2)/(sqrt(2) beta)."""
    return 4 * math.exp(log_omega(dim)) * (math.log(2) - 0.5) / (math.sqrt(2) * beta)


def perfect_encoder(dim: int, depth: int, swamp: float = 1e6) -> Encoder:
    """The rank paper's encoder with weights that answer farthest neighbour: a head -c I, its output
    swamping the skip.

    Later layers add nothing, and their norms pass the answer on.
    """
    # The architecture is the rank paper's: post-norm by one scalar, ReLU, biases everywhere.
    shape = Shape(
        dim=dim,
        depth=depth,
        num_heads=1,
        ffn_dim=dim,
        activation="relu",
        norm="scalar",
        norm_at="post",
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
    )
    model = build(shape)
    assert isinstance(model, Encoder)
    with torch.no_grad():
        for name, p in model.named_parameters():
            # Everything but the norms starts at zero, so later layers add nothing to the skip.
            p.fill_(1.0) if "norm" in name else p.zero_()
        # Query and key have opposite signs: the largest score is that of the farthest point. W_O is
        # so large that the head's answer swamps the skip.
        first, eye = model.get_submodule("blocks.0.attention"), torch.eye(dim)
        first.get_parameter("qkv.weight").copy_(torch.cat((-swamp * eye, eye, eye)))
        first.get_parameter("out.weight").copy_(swamp * eye)
    return model


# ---- Theorem 5: rank-1 heads vote, a second layer counts


def vote_error(dim: int, heads: int) -> float:
    """The exact error of a majority of an odd number of random rank-1 heads, two points: 2
    P(majority wrong)."""
    check_dim(dim)
    check_heads(heads)
    if heads % 2 == 0:
        raise UsageError(f"a majority needs an odd number of heads, got {heads}")
    t, w = quadrature(dim, 400)
    t, w = t[t > 0], 2 * w[t > 0]
    return 2 * float(np.sum(w * _at_most_half(heads, 0.5 + np.arcsin(t) / np.pi)))


def _at_most_half(heads: int, p: Any) -> Any:
    """P(Binomial(heads, p) <= (heads - 1)/2) for p >= 1/2, in logs; below 8 sqrt(heads) under the
    middle nothing is left to add."""
    # A wrong majority has at most (H - 1)/2 right votes. Terms further below the middle are under
    # the rounding.
    most = (heads - 1) // 2
    k = np.arange(max(0, most - int(8 * math.sqrt(heads)) - 8), most + 1)
    log_choose = np.array(
        [math.lgamma(heads + 1) - math.lgamma(i + 1) - math.lgamma(heads - i + 1) for i in k]
    )
    out = np.empty_like(p)
    # 256 nodes at a time, so that (nodes, terms) fits memory for a million heads.
    for at in range(0, len(p), 256):
        here = p[at : at + 256, None]
        with np.errstate(divide="ignore"):
            out[at : at + 256] = np.exp(
                log_choose + k * np.log(here) + (heads - k) * np.log1p(-here)
            ).sum(1)
    return np.minimum(out, 1.0)


def vote_limit(dim: int, heads: int) -> float:
    """What it tends to with many heads in a fixed dimension: omega_d sqrt(2 pi/H), about
    sqrt(d/H)."""
    return math.exp(log_omega(dim)) * math.sqrt(2 * math.pi / heads)


def vote_wide(dim: int, heads: int) -> float:
    """What it tends to in high dimension at fixed H/d: (2/pi) arctan((pi/2) sqrt(d/H))."""
    return 2 / math.pi * math.atan(math.pi / 2 * math.sqrt(dim / heads))


def averaging_error(dim: int) -> float:
    """Infinitely many such heads averaged in one layer instead of counted: 2 E (1/2 -
    arcsin|t|/pi)^2."""
    t, w = quadrature(dim, 400)
    return 2 * float(np.sum(w * (0.5 - np.arcsin(np.abs(t)) / np.pi) ** 2))


def vote(x: Tensor, y: Tensor, directions: Tensor) -> Tensor:
    """Two layers of hard attention: rank-1 heads vote into scratch coordinates, a second layer
    reads them.

    x is (batch, points, dim), y (batch, dim), directions (heads, dim). Points carry a position in
    coordinates of their own: +1 and -1 in one coordinate for two points, so that the second layer
    has rank 1 too; the unit vectors for more, where the second layer needs the rank of the
    positions.
    """
    batch, points, _ = x.shape
    position = (
        torch.tensor([[1.0], [-1.0]], dtype=x.dtype)
        if points == 2
        else torch.eye(points, dtype=x.dtype)
    )
    # Theorem 5, first layer: each head compares (x.k)(q.y) with q = k = its direction, and adds the
    # position of its choice to the query's scratch.
    q = (y @ directions.T).T.reshape(len(directions), batch, 1, 1).transpose(0, 1)
    k = (x @ directions.T).permute(0, 2, 1).unsqueeze(-1)
    v = position.expand(batch, len(directions), *position.shape)
    counted = attend(q, k, v, hard=True).mean(
        1
    )  # (batch, 1, scratch): what the query token holds after the first layer
    return attend(
        counted.unsqueeze(1), position.expand(batch, 1, *position.shape), x.unsqueeze(1), hard=True
    )[:, 0, 0]


# ---- two dimensions


def spaced_error(heads: int, weight: float = 1.0) -> float:
    """H rank-1 heads at equal angles in the plane with weights weight/H, by the closed forms of two
    heads and of head and target."""
    check_heads(heads)
    turn = (
        np.abs(np.subtract.outer(np.arange(heads), np.arange(heads))) / heads
    )  # angle between two heads over pi
    turn = np.minimum(turn, 1 - turn)
    # Two heads agree with probability (1 - turn)^2 + turn^2; a head is right with probability 3/4.
    both = (
        (1 - turn) ** 2 + turn** 2
    )  # q and k turn together: agree if both coordinates keep their side, or both change it
    return 1 - 2 * weight * 0.75 + weight**2 * float(both.mean())


def spaced_closed(heads: int) -> float:
    """1/6 + 1/(3 H^2)."""
    check_heads(heads)
    return 1 / 6 + 1 / (3 * heads**2)


# ---- what a subspace shows


def explained(
    dim: int, rank: int, samples: int, generator: torch.Generator, wave: float = 0.0, twins: int = 2
) -> tuple[float, float]:
    """The share of the choice that a head of this rank can know: E (E[choice | r coordinates of w,
    and y])^2, and its standard error.

    By twins that share what the head sees and differ in what it does not, so that the mean product
    of two is unbiased; small shares want many twins of a sample rather than many samples. `wave` =
    0: the nearest neighbour's sign(w.y), y on the sphere. Else the biased target's square wave of
    sqrt(2) w.y with that half-period, y Gaussian.
    """
    check_dim(dim)
    if not 0 < rank < dim:
        raise UsageError(f"rank must lie between 0 and dim {dim}, got {rank}")
    # Twins share the first r coordinates of w and all of y. The rest of w has a fixed length and an
    # own random direction in each twin.
    w = sphere(generator, samples, dim)
    y = torch.randn(samples, dim, dtype=torch.float64, generator=generator)
    hidden = w[:, rank:].norm(dim=1, keepdim=True)
    seen, total = (w[:, :rank] * y[:, :rank]).sum(1), torch.zeros(samples, dtype=torch.float64)
    for _ in range(twins):
        s = seen + (hidden * sphere(generator, samples, dim - rank) * y[:, rank:]).sum(1)
        total += square_wave(math.sqrt(2) * s, wave) if wave else s.sign()
    return mean_and_error(
        (total**2 - twins) / (twins * (twins - 1))
    )  # (sum)^2 = the squares, all 1, and twice the products of pairs


def square_wave(s: Tensor, half_period: float) -> Tensor:
    """+1 and -1, changing at every multiple of the half-period; 1 just above 0."""
    return 1.0 - 2.0 * (torch.floor(s / half_period) % 2)


def biased_bank(x: Tensor, y: Tensor, dim: int) -> Tensor:
    """Our reconstruction of the biased target: 2 d^2 + 1 biased full-rank hard heads, signs
    alternating, thresholds j/d."""
    s = ((x[:, 0] - x[:, 1]) * y).sum(1)
    j = torch.arange(-(dim**2), dim**2 + 1)
    picks = s.unsqueeze(1) + j / dim > 0  # the j-th head picks x_1
    signs = torch.where(j % 2 == 0, 1.0, -1.0).double()
    # Heads that pick x_1 add their signs to it, the others to x_2.
    first = (picks.double() @ signs).unsqueeze(1)
    return first * x[:, 0] + (signs.sum() - first) * x[:, 1]


def biased_target(x: Tensor, y: Tensor, dim: int) -> Tensor:
    """The same function written down: (x_1 + x_2)/2 up to a sign, plus a square wave of (x_1 -
    x_2).y times (x_1 - x_2)/2."""
    s = ((x[:, 0] - x[:, 1]) * y).sum(1)
    total = 1.0 if dim % 2 == 0 else -1.0  # sum of the alternating signs
    wave = total * (2.0 * ((torch.ceil(s * dim) + dim) % 2) - 1.0)
    return total * (x[:, 0] + x[:, 1]) / 2 + wave.unsqueeze(1) * (x[:, 0] - x[:, 1]) / 2
