"""The condition number of a matrix of independent Gaussians, in closed form. Without torch, so that
tables and figures of stored rows need none."""

from __future__ import annotations

import math

from headwise.errors import UsageError


def gaussian_kappa(tokens: int, width: int) -> float:
    """kappa of an N x w matrix of independent Gaussians for large sizes: (sqrt(M) + sqrt(m)) /
    (sqrt(M) - sqrt(m)), M and m the larger and the smaller of N and w = h d. Infinite at N = w,
    where it peaks.

    >>> [round(gaussian_kappa(197, 64 * heads), 2) for heads in (1, 2, 4, 12, 16)]
    [3.65, 9.31, 15.29, 3.05, 2.56]
    """
    check_matrix_sizes(tokens, width)
    # Marchenko-Pastur: the singular values of the matrix fill [sqrt(M) - sqrt(m), sqrt(M) +
    # sqrt(m)].
    least, most = math.sqrt(min(tokens, width)), math.sqrt(max(tokens, width))
    return math.inf if tokens == width else (most + least) / (most - least)


def check_matrix_sizes(tokens: int, width: int) -> None:
    """Refuse sizes that no matrix of tokens by width has."""
    for name, value, least in (("tokens", tokens, 2), ("width", width, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")
