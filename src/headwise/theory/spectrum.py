"""Condition numbers of matrices: singular values in float64.

kappa(A) = s_1/s_k with s_k the smallest of the k = min(rows, columns) singular values. Two kappas
with different k are kappas of different things, so k is always stated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import UsageError

EPS = torch.finfo(torch.float64).eps
TINY = torch.finfo(torch.float64).tiny
MEASURES = ("largest", "smallest", "kappa", "stable_rank", "effective_rank")


@dataclass(frozen=True)
class Spectrum:
    """What the singular values s_1 >= ... >= s_k say; tensors of the matrices' leading axes.

    1 <= stable rank <= effective rank <= rank <= k.
    """

    largest: Tensor
    # s_k, or 0 where it is rounding: below s_1 eps max(sizes); for centred matrices ||A||_F before
    # centring stands in place of s_1
    smallest: Tensor
    kappa: Tensor  # s_1 / s_k, infinite when s_k is 0
    stable_rank: Tensor  # ||A||_F^2 / s_1^2
    effective_rank: Tensor  # exp(-sum p log p), p = s / sum s
    rank: Tensor  # how many are more than rounding
    k: int


def spectrum(A: Tensor, *, centred: bool = False) -> Spectrum:
    """The spectrum of matrices (..., tokens, width); `centred` removes the mean token first, and
    then k = min(tokens - 1, width).

    >>> s = spectrum(torch.diag(torch.tensor([4.0, 2.0, 1.0])))
    >>> s.kappa.item(), s.stable_rank.item(), s.k
    (4.0, 1.3125, 3)
    """
    check_matrix(A)
    A = A.detach().double()
    scale = A.norm(dim=(-2, -1))
    if centred:
        A = A - A.mean(-2, keepdim=True)
    # Without its mean, N tokens span at most N - 1 directions, so the last singular value is always
    # 0.
    k = min(A.shape[-2] - centred, A.shape[-1])
    s = torch.linalg.svdvals(A)[..., :k]
    scale = scale if centred else s[..., 0]
    # A singular value below the rounding of the matrix is 0, and kappa is infinite.
    s = torch.where(s > EPS * max(A.shape[-2:]) * scale.unsqueeze(-1), s, 0.0)
    # Effective rank: the exponential of the entropy of the singular values as shares.
    share = s / s.sum(-1, keepdim=True).clamp_min(TINY)
    top = s[..., 0].clamp_min(TINY)
    rank = (s > 0).sum(-1)
    return Spectrum(
        largest=s[..., 0],
        smallest=s[..., -1],
        kappa=torch.where(s[..., -1] > 0, s[..., 0] / s[..., -1], math.inf),
        stable_rank=(s / top.unsqueeze(-1)).square().sum(-1),
        effective_rank=torch.where(rank > 0, (-torch.xlogy(share, share).sum(-1)).exp(), 0.0),
        rank=rank,
        k=k,
    )


def check_matrix(A: Tensor) -> None:
    """Refuse what is no matrix (..., tokens, width) of finite real numbers."""
    if A.ndim < 2 or A.shape[-1] < 1:
        raise UsageError(f"a matrix (..., tokens, width) is needed, got shape {tuple(A.shape)}")
    if A.shape[-2] < 2:
        raise UsageError(f"tokens must be at least 2, got {A.shape[-2]}")
    if A.is_complex():
        raise UsageError("a matrix of finite real numbers is needed, got complex ones")
    if not A.isfinite().all():
        raise UsageError("a matrix of finite real numbers is needed, got NaN or infinity")


def geometric_mean(values: Tensor) -> float:
    """exp of the mean logarithm."""
    return values.double().log().mean().exp().item()
