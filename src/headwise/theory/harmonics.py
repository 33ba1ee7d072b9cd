"""Spherical harmonics as far as the rank paper needs them, exact and stable in any dimension d >=
3.

Conventions: P_l is the ultraspherical polynomial of parameter d/2 - 1 with P_l(1) = 1; N(d, l) the
number of harmonics of degree l; u_d(t) = omega_d (1 - t^2)^((d-3)/2) the density of one coordinate
of a uniform unit vector; G_l = sqrt(N) P_l is orthonormal under it. sign(t) has the coefficients
lambda_l = E sign(t) P_l(t), zero for even l, and the energies shat_l^2 = N lambda_l^2, which sum to
1.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from headwise.errors import UsageError

PI = Decimal(
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798"
)
# of u(t), whose coefficients grow like a factorial; beyond it 100 digits are not known to be enough
MOST_DEGREE = 400


def check_dim(dim: int, least: int = 3) -> None:
    """Refuse a dimension in which these formulas say nothing."""
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < least:
        raise UsageError(f"dim must be a whole number of at least {least}, got {dim!r}")


def check_degree(degree: int) -> None:
    """Refuse a degree that no harmonic has."""
    if not isinstance(degree, int) or isinstance(degree, bool) or degree < 0:
        raise UsageError(f"degree must be a whole number of at least 0, got {degree!r}")


def multiplicity(dim: int, degree: int) -> int:
    """N(d, l): how many independent harmonics of a degree there are.

    >>> [multiplicity(8, degree) for degree in (0, 1, 3)]
    [1, 8, 112]
    """
    check_dim(dim)
    check_degree(degree)
    if degree == 0:
        return 1
    return (2 * degree + dim - 2) * math.comb(degree + dim - 3, degree - 1) // degree


def log_omega(dim: int) -> float:
    """log of omega_d, the height of u_d at 0."""
    check_dim(dim)
    return math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2) - 0.5 * math.log(math.pi)


@lru_cache(maxsize=65536)
def sign_coefficient(dim: int, degree: int) -> float:
    """lambda_l = E sign(t) P_l(t), by log-gamma so that nothing overflows.

    >>> round(sign_coefficient(8, 3), 7)
    -0.0323362
    """
    check_dim(dim)
    check_degree(degree)
    if degree % 2 == 0:
        return 0.0
    # Rodrigues' formula turns the integral over (0, 1) into the derivative of order l - 1 of (1 -
    # t^2)^(l + (d-3)/2) at 0. Both factors are ratios of gamma functions.
    m = degree // 2
    half = (dim - 3) / 2
    log = (
        math.log(2)
        + log_omega(dim)
        + math.lgamma((dim - 1) / 2)
        - degree * math.log(2)
        - math.lgamma(degree + (dim - 1) / 2)
    )
    log += (
        math.lgamma(2 * m + 1)
        + math.lgamma(degree + half + 1)
        - math.lgamma(m + 1)
        - math.lgamma(degree + half - m + 1)
    )
    return (-1) ** m * math.exp(log)


def energy(dim: int, degree: int) -> float:
    """shat_l^2 = N lambda_l^2: how much of sign(w.y) lies in a degree."""
    coefficient = sign_coefficient(dim, degree)
    if coefficient == 0:
        return 0.0
    # In logs: N overflows a float long before N lambda^2 leaves [0, 1].
    return math.exp(math.log(multiplicity(dim, degree)) + 2 * math.log(abs(coefficient)))


def plateau(dim: int, degree: int) -> float:
    """The least error of a layer that has captured every degree up to this one: half of what is
    left of the sign.

    >>> round(plateau(64, 1), 4)
    0.1792
    """
    return 0.5 * (1 - sum(energy(dim, odd) for odd in range(1, degree + 1, 2)))


def polynomials(dim: int, most: int, t: Any) -> Any:
    """P_0 ... P_most at t, by the three-term recurrence, which is stable on [-1, 1]: (most + 1,
    ...) in float64."""
    check_dim(dim)
    check_degree(most)
    t = np.asarray(t, dtype=np.float64)
    out = np.empty((most + 1, *t.shape))
    out[0] = 1.0
    if most:
        out[1] = t
    for n in range(1, most):
        out[n + 1] = ((2 * n + dim - 2) * t * out[n] - n * out[n - 1]) / (n + dim - 2)
    return out


@lru_cache(maxsize=16)
def legendre(nodes: int) -> tuple[Any, Any]:
    """Gauss-Legendre nodes and weights on [-1, 1]; finding them takes longer than using them."""
    return np.polynomial.legendre.leggauss(nodes)


def quadrature(dim: int, nodes: int) -> tuple[Any, Any]:
    """Nodes and weights of E f(t) under u_d, for f smooth on [0, 1] and on [-1, 0]: Gauss-Legendre
    in the angle, each half."""
    check_dim(dim)
    # t = sin(angle) removes the end-point singularity of (1 - t^2)^((d-3)/2). Each half of [-1, 1]
    # has an own rule, because sign(t) jumps at 0.
    x, w = legendre(nodes)
    angle = (x + 1) * np.pi / 4
    t = np.sin(angle)  # u_d(t) dt = omega_d cos^(d-2) dangle
    weight = w * np.pi / 4 * np.exp(log_omega(dim) + (dim - 2) * np.log(np.cos(angle)))
    return np.concatenate((-t, t)), np.concatenate((weight, weight))


# ---- what a rank-1 hard head knows


def head_head(cosines_q: Any, cosines_k: Any) -> Any:
    """The probability that two heads agree, from the cosines between their unit queries and between
    their unit keys."""
    turn, other = (
        np.arcsin(np.clip(np.asarray(c, dtype=np.float64), -1, 1)) for c in (cosines_q, cosines_k)
    )
    return 0.5 + (2 / np.pi**2) * turn * other


def head_target(dim: int, cosine: Any, most: int = 49) -> Any:
    """The probability that a head with this cosine between query and key is right: 1/2 + 1/2 sum N
    lambda^3 P_l, odd degrees."""
    # E sign * head: the target has the coefficient lambda_l, the head lambda_l^2 P_l(q.k), N times
    # each.
    values = polynomials(dim, most, cosine)
    total = np.zeros_like(values[0])
    for odd in range(1, most + 1, 2):
        total += energy(dim, odd) * sign_coefficient(dim, odd) * values[odd]
    return 0.5 + 0.5 * total


def singular_floor(dim: int, heads: int) -> float:
    """No layer of this many hard rank-1 heads, whatever their value matrices, errs less.

    A head is a function of the points times a function of the query, so a layer is an operator of
    rank at most heads + 1; sign(w.y) has the singular values |lambda_l|, each N(d, l) times. What
    is left beyond the largest is half the error.

    >>> singular_floor(8, 7) == plateau(8, 1)
    True
    """
    check_dim(dim)
    check_heads(heads)
    # The best operator of rank H + 1 takes the largest singular values first (Eckart-Young). They
    # fall with the degree, so degrees are filled one after the other, the last one in part.
    left, floor, degree = heads + 1, 0.5, 1
    while left > 0 and floor > 1e-12:
        count = multiplicity(dim, degree)
        floor -= 0.5 * energy(dim, degree) * min(1.0, left / count)
        left -= count
        degree += 2
    return max(floor, 0.0)


def check_heads(heads: int) -> None:
    """Refuse a number of heads that is none."""
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
        raise UsageError(f"heads must be a whole number of at least 1, got {heads!r}")


def heads_for(dim: int, error: float) -> int:
    """The fewest hard rank-1 heads that the floor allows at an error."""
    check_dim(dim)
    if not 0 < error < 0.5:
        raise UsageError(f"error must lie between 0 and 0.5, got {error!r}")
    # The floor falls with H: double until it is low enough, then halve the interval.
    low, high = 1, 2
    while singular_floor(dim, high) > error:
        low, high = high, 2 * high
        if high > 1 << 200:
            raise UsageError(f"error {error} needs more than 2^200 heads in {dim} dimensions")
    while low < high:
        middle = (low + high) // 2
        if singular_floor(dim, middle) > error:
            low = middle + 1
        else:
            high = middle
    return low


# ---- the continuum of heads: sign(w.y) = E u(q.k) sign(w.k) sign(q.y)


def _omega_exact(dim: int) -> Decimal:
    """omega_d to the context's precision: 1/2 for d = 3, 2/pi for d = 4, times d/(d-1) every second
    dimension."""
    value, start = (Decimal(1) / 2, 3) if dim % 2 else (2 / PI, 4)
    for d in range(start, dim, 2):
        value = value * d / (d - 1)
    return value


def _sign_exact(dim: int, degree: int) -> Decimal:
    """lambda_l to the context's precision: lambda_1 = 2 omega_d/(d-1), and a rational ratio from
    each odd degree to the next."""
    value = 2 * _omega_exact(dim) / (dim - 1)
    for odd in range(1, degree, 2):
        ratio = -Fraction(odd, odd + dim)
        value = value * ratio.numerator / ratio.denominator
    return value


def representation(dim: int, t: Any, most: int = 49, published: bool = False) -> Any:
    """u(t) = sum over odd degrees up to `most` of (N/shat) G_l(t), which represents sign(w.y) by
    rank-1 heads.

    In 100 digits, because the terms reach 1e16 and cancel. `published`: with the published code's
    N^(3/2)/shat, which does not satisfy the identity.
    """
    check_dim(dim)
    check_degree(most)
    if most > MOST_DEGREE:
        raise UsageError(f"degree must be at most {MOST_DEGREE}, got {most}")
    t = np.atleast_1d(np.asarray(t, dtype=np.float64))
    with localcontext() as context:
        context.prec = 100
        terms = []
        for odd in range(1, most + 1, 2):
            count = Decimal(multiplicity(dim, odd))
            # (N/shat) G_l = (N/lambda) P_l, since shat = sqrt(N) lambda
            term = count / _sign_exact(dim, odd)
            terms.append(term * count.sqrt() if published else term)
        return np.array([_sum_odd(dim, Decimal(float(x)), terms) for x in t])


def _sum_odd(dim: int, x: Decimal, terms: list[Decimal]) -> float:
    # The recurrence gives P_l for every l; only odd degrees enter the sum.
    before, now, total = Decimal(1), x, Decimal(0)
    for i, term in enumerate(terms):
        total += term * now
        for n in (2 * i + 1, 2 * i + 2):
            before, now = now, ((2 * n + dim - 2) * x * now - n * before) / (n + dim - 2)
    return float(total)
