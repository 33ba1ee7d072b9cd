"""Expectations in high precision, and the choices of hard heads."""

import math
from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np
import torch
from support.tolerance import seeded


def exact_omega(dim: int) -> Any:
    return mp.gamma(mp.mpf(dim) / 2) / (mp.sqrt(mp.pi) * mp.gamma(mp.mpf(dim - 1) / 2))


def expected(dim: int, f: Callable[[Any], Any]) -> Any:
    """E f(|t|) under u_d, with t the sine of an angle."""
    return (
        2
        * exact_omega(dim)
        * mp.quad(lambda a: mp.cos(a) ** (dim - 2) * f(mp.sin(a)), mp.linspace(0, mp.pi / 2, 5))
    )


def hard_choices(
    q: torch.Tensor, k: torch.Tensor, samples: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of two orthonormal points each head picks, and which is nearer."""
    g = seeded(seed)
    x = torch.linalg.qr(torch.randn(samples, q.shape[1], 2, dtype=torch.float64, generator=g))[0]
    x = (
        x * torch.randn(samples, 1, 2, dtype=torch.float64, generator=g).sign()
    )  # the decomposition fixes them
    y = torch.randn(samples, q.shape[1], dtype=torch.float64, generator=g)
    first, second = x[..., 0], x[..., 1]
    picks = (first @ k.T) * (y @ q.T) > (second @ k.T) * (y @ q.T)
    return picks, (first * y).sum(1) > (second * y).sum(1)


def distance(sample: np.ndarray, law: Callable[[np.ndarray], np.ndarray]) -> float:
    """Kolmogorov and Smirnov's, times the root of the sample's size: below 1.95 in 999 of 1000
    samples of that law."""
    x = np.sort(sample)
    below = law(x)
    steps = np.arange(len(x) + 1) / len(x)
    return float(max(np.max(steps[1:] - below), np.max(below - steps[:-1]))) * math.sqrt(len(x))
