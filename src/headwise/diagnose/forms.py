"""The bilinear forms of each head: A_h = Q_h^T K_g, what a head compares, and B_h = O_h^T V_g, what
it writes. Their spectra through factors of the head's own size; nothing is as wide as the model.

The singular values of Q^T K squared are the eigenvalues of L^T (K K^T) L, where Q Q^T = L L^T. That
squares the condition number, so heads where it shows are computed again from QR factors.

Rotary positions turn A into Q^T Rot(distance) K: a spectrum for every distance. Averaged over all
distances, coordinates that turn at different speeds do not interfere, so a head is a sum over pairs
of coordinates, each of energy (|q|^2 |k|^2) / 2 with q and k complex.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.diagnose.layouts import Heads

TINY = torch.finfo(torch.float64).tiny
ILL = 1e-8  # ratio of squared singular values below which QR takes over
FLOOR = 1e-13  # singular values below this share of the largest are rounding
SHARES = (0.9, 0.99, 0.999)


# ---- spectra


def product_spectrum(left: Tensor, right: Tensor) -> Tensor:
    """Singular values of left^T right by head, for left (H, R, D) and right (H, S, D), descending:
    (H, min(R, S))."""
    if not min(left.shape[1], right.shape[1]):
        return left.new_zeros(left.shape[0], 0)
    if left.shape[1] > right.shape[1]:
        left, right = right, left
    return _spectrum(left, right, left @ left.mT, _gram(right, left), None)


def _gram(right: Tensor, left: Tensor) -> Tensor:
    """right right^T of every head; heads that share `right` share it."""
    if right.shape[0] == left.shape[0]:
        return right @ right.mT
    return (right @ right.mT).repeat_interleave(left.shape[0] // right.shape[0], 0)


def _spectrum(
    left: Tensor, right: Tensor, gram_left: Tensor, gram_right: Tensor, turn: Tensor | None
) -> Tensor:
    """The same from the Gram matrices; `turn` (S, S) is applied to `right`."""
    if turn is not None:
        gram_right = turn @ gram_right @ turn.T
    L, failed = torch.linalg.cholesky_ex(gram_left)
    safe = torch.where((failed == 0)[:, None, None], L, 0.0)
    squares = torch.linalg.eigvalsh(safe.mT @ gram_right @ safe).flip(-1)
    diagonal = safe.diagonal(dim1=-2, dim2=-1)
    ill = (failed != 0) | (squares[:, -1] <= ILL * squares[:, 0])
    ill |= diagonal.amin(-1) <= ILL**0.5 * diagonal.amax(-1)
    found = squares.clamp_min(0).sqrt()
    group = left.shape[0] // right.shape[0]
    for h in ill.nonzero()[:, 0].tolist():
        other = right[h // group] if turn is None else turn @ right[h // group]
        found[h] = _exact(left[h], other)
    return found


def _exact(left: Tensor, right: Tensor) -> Tensor:
    """Singular values of left^T right for one head, with QR factors."""
    a = torch.linalg.qr(left.T, mode="r").R
    b = torch.linalg.qr(right.T, mode="r").R
    s = torch.linalg.svdvals(a @ b.T)[: left.shape[0]]
    s = torch.where(s > FLOOR * s[0].clamp_min(TINY), s, 0.0)
    return torch.cat((s, s.new_zeros(left.shape[0] - len(s))))


def turn_of(heads: Heads, distance: float) -> Tensor:
    """What turns keys that lie `distance` tokens before their query (R, R)."""
    R = heads.q.shape[1]
    turn = torch.eye(R, dtype=torch.float64)
    if len(heads.pairs):
        i, j = heads.pairs.T
        angle = -heads.frequencies * distance
        turn[i, i] = turn[j, j] = angle.cos()
        turn[i, j], turn[j, i] = -angle.sin(), angle.sin()
    return turn


def rotated_spectra(heads: Heads, distances: tuple[int, ...]) -> Tensor:
    """Singular values of Q^T Rot(distance) K: (distances, H, R). Without rotary positions all are
    the same, and there is one."""
    k = heads.k
    gram_q, gram_k = heads.q @ heads.q.mT, _gram(k, heads.q)
    turns = [None] if not len(heads.pairs) else [turn_of(heads, d) for d in distances]
    return torch.stack([_spectrum(heads.q, k, gram_q, gram_k, turn) for turn in turns])


def effective_rank(s: Tensor) -> Tensor:
    """exp of the entropy of squared singular values as shares of their sum: energies, as the energy
    ranks count them. (`theory.spectrum` takes the singular values themselves, which gives more.)"""
    energy = (s / s[..., :1].clamp_min(TINY)).square()
    share = energy / energy.sum(-1, keepdim=True).clamp_min(TINY)
    return torch.where(s[..., 0] > 0, (-torch.xlogy(share, share).sum(-1)).exp(), 0.0)


def stable_rank(s: Tensor) -> Tensor:
    """The sum of squares over the largest square."""
    return (s / s[..., :1].clamp_min(TINY)).square().sum(-1)


def energy_rank(s: Tensor, share: float) -> Tensor:
    """How many of the largest singular values hold this share of the sum of squares."""
    energy = s.square().cumsum(-1)
    enough = energy < share * energy[..., -1:] * (1 - 1e-12)
    return torch.where(s[..., 0] > 0, enough.sum(-1) + 1, 0)


def condition(s: Tensor) -> Tensor:
    """The largest over the smallest; infinite where that is rounding."""
    least = torch.where(s[..., -1] > FLOOR * s[..., 0], s[..., -1], 0.0)
    return torch.where(least > 0, s[..., 0] / least.clamp_min(TINY), math.inf)


# ---- symmetry, identity


@dataclass(frozen=True)
class Symmetry:
    """How a form on the model's own space lies to its transpose and to the identity, by head."""

    symmetric: Tensor  # share of the energy in (A + A^T) / 2; the rest is antisymmetric
    angle: Tensor  # to the identity in degrees; 180 is minus the identity
    trace: Tensor  # trace over the sum of singular values: 1 where A is positive semidefinite


def symmetry(cross: Tensor, s: Tensor, dim: int) -> Symmetry:
    """From cross = K Q^T (H, R, R) and the singular values: tr A = tr K Q^T and
    tr A A = tr (K Q^T)^2."""
    energy = s.square().sum(-1).clamp_min(TINY)
    trace = cross.diagonal(dim1=-2, dim2=-1).sum(-1)
    square = (cross * cross.mT).sum((-2, -1))
    cosine = trace / (energy * dim).sqrt()
    return Symmetry(
        symmetric=torch.where(s[..., 0] > 0, (1 + square / energy) / 2, math.nan),
        angle=torch.where(s[..., 0] > 0, cosine.clamp(-1, 1).acos().rad2deg(), math.nan),
        trace=torch.where(s[..., 0] > 0, trace / s.sum(-1).clamp_min(TINY), math.nan),
    )


def cross_of(heads: Heads) -> Tensor:
    """K_g Q_h^T by head."""
    return heads.paired(heads.k) @ heads.q.mT


def bias_share(heads: Heads) -> Tensor | None:
    """The share of a form's energy that its biases bring, with a homogeneous coordinate: of
    [Q b_q]^T [K b_k], what lies in its last row and column."""
    if "q" not in heads.biases and "k" not in heads.biases:
        return None
    zero = heads.q.new_zeros(())
    bq = heads.biases.get("q", zero.expand(heads.q.shape[:2]))[..., None]
    bk = heads.paired(heads.biases.get("k", zero.expand(heads.k.shape[:2]))[..., None])
    k = heads.paired(heads.k)
    plain = ((heads.q @ heads.q.mT) * (k @ k.mT)).sum((-2, -1))
    row = (bq.mT @ k).square().sum((-2, -1))
    column = (heads.q.mT @ bk).square().sum((-2, -1))
    corner = (bq.mT @ bk).square().sum((-2, -1))
    added = row + column + corner
    return added / (added + plain).clamp_min(TINY)


# ---- frequencies


def pair_energies(heads: Heads) -> Tensor:
    """The energy of every pair of coordinates that rotate, averaged over all distances (H, P);
    where some coordinates stand still, theirs is the last column (H, P + 1)."""
    q = heads.q[:, heads.pairs].square().sum((-2, -1))
    k = heads.paired(heads.k[:, heads.pairs].square().sum((-2, -1)))
    energies = q * k / 2
    still = heads.still
    if len(still):
        qs, ks = heads.q[:, still], heads.paired(heads.k[:, still])
        rest = ((qs @ qs.mT) * (ks @ ks.mT)).sum((-2, -1))
        energies = torch.cat((energies, rest[:, None]), 1)
    return energies
