"""Find a neighbour: the rank paper's targets.

Points lie on the unit sphere of R^d. `Farthest` is what the paper trains: every token of a sequence
asks for the point of its own sequence with the smallest inner product. `Nearest` asks one separate
query y; it enters as the token -y, the last one, because attention over a set that holds y itself
would answer y. `BiasedNearest` adds a bias to the first point's score. The error is E ||f - g||^2;
the targets have norm 1, so predicting zero scores 1.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import exp, isfinite, lgamma, pi, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.errors import UsageError, check_whole_numbers, nearest
from headwise.kernels import has_triton
from headwise.tasks.task import SquaredError

LAWS = ("uniform", "orthogonal", "doubled")


def sphere(generator: torch.Generator, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform points on the unit sphere of the last axis."""
    return _unit(torch.randn(*size, dtype=dtype, generator=generator, device=generator.device))


def _unit(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def draw_points(generator: torch.Generator, law: str, batch: int, points: int, dim: int) -> Tensor:
    """(batch, tokens, dim) points: independent, orthonormal, or each with its antipode."""
    if law == "orthogonal":
        q_BDN, r_BNN = torch.linalg.qr(
            torch.randn(batch, dim, points, generator=generator, device=generator.device)
        )
        signs_BN = torch.where(
            r_BNN.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0
        )  # without them q is not uniform
        return (q_BDN * signs_BN.unsqueeze(1)).mT.contiguous()
    x = sphere(generator, batch, points, dim)
    return torch.cat((x, -x), 1) if law == "doubled" else x


@dataclass(frozen=True)
class Neighbors(SquaredError):
    """Points of a law, and one of them to be named."""

    dim: int
    points: int
    law: str = "uniform"
    ordered = False

    def __post_init__(self) -> None:
        check_whole_numbers(self, 2, "dim", "points")
        if self.law not in LAWS:
            raise UsageError(f"unknown law {self.law!r}; {nearest(str(self.law), LAWS)}")
        if self.law == "orthogonal" and self.points > self.dim:
            raise UsageError(
                f"at most dim {self.dim} points are orthogonal, got points {self.points}"
            )

    @property
    def in_dim(self) -> int:
        """A token is a point."""
        return self.dim

    @property
    def answer_dim(self) -> int:
        """An answer is a point."""
        return self.dim

    @property
    def tokens(self) -> int:
        """Length of a sequence."""
        return self.points * (2 if self.law == "doubled" else 1)

    def baselines(self) -> dict[str, float]:
        """Exact errors of predictors that need no training: zero; the best multiple of the query
        token, and of the mean point."""
        return {"zero": 1.0}


@dataclass(frozen=True)
class Farthest(Neighbors):
    """g(X; x_i) = the point of X with the smallest inner product with x_i, for every token i.

    >>> round(Farthest(dim=64, points=16).baselines()["query"], 3)
    0.953
    """

    name = "farthest"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.law == "orthogonal":
            raise UsageError(
                "orthogonal points are all equally far from each other; choices: uniform, doubled"
            )

    def sample(
        self, generator: torch.Generator, batch: int, step: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Points (batch, tokens, dim), and for each of them the farthest."""
        if self.law == "uniform":
            return _directions(
                torch.randn(
                    batch, self.points, self.dim, generator=generator, device=generator.device
                )
            )
        return _labelled(draw_points(generator, self.law, batch, self.points, self.dim))

    def fill(
        self, x: Tensor, target: Tensor, generator: torch.Generator, step: int | None = None
    ) -> None:
        """On a GPU one kernel normalises the draws and finds the farthest points, right where the
        engine wants them."""
        if self.law != "uniform" or not x.is_cuda or not has_triton():
            super().fill(x, target, generator, step)
            return
        from headwise.kernels.farthest_data_triton import farthest

        farthest(
            torch.randn(
                x.shape[0] * x.shape[1], self.points, self.dim, generator=generator, device=x.device
            ),
            (x, target),
        )

    @property
    def has_original(self) -> bool:
        """The published code draws uniform points."""
        return self.law == "uniform"

    def original(
        self, seed: int, batch: int, epoch: int, at: int, steps: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The published code's points, and for each of them the farthest."""
        draws = _original_draws(self.dim, self.points, seed, batch, epoch, device)
        return _directions(draws[at : at + steps].flatten(0, 1))

    def baselines(self) -> dict[str, float]:
        """Exact errors of zero, and of the best multiples of the query token and of the mean
        point."""
        if self.law == "doubled":  # the farthest point is always the antipode
            return {"zero": 1.0, "query": 0.0, "mean": 1.0}
        # first = E max of N - 1 products: the farthest point lies at -first from its query on
        # average.
        first, cross = _extreme(self.dim, self.points - 1)
        overlap = (1 - first + cross) / self.points  # the least inner product has mean -first
        return {"zero": 1.0, "query": 1 - first**2, "mean": 1 - self.points * overlap**2}


def _directions(draws_BND: Tensor) -> tuple[Tensor, Tensor]:
    """Points on the sphere from normal draws, and for each the farthest."""
    if draws_BND.is_cuda and has_triton():
        from headwise.kernels.farthest_data_triton import farthest

        return farthest(draws_BND)
    return _labelled(_unit(draws_BND))


def _labelled(x_BND: Tensor) -> tuple[Tensor, Tensor]:
    # Indices into all B x N points, so that one index_select gathers the answers.
    far_BN = torch.bmm(x_BND, x_BND.mT).argmin(-1)
    far_BN += torch.arange(len(x_BND), device=x_BND.device).unsqueeze(1) * x_BND.shape[1]
    return x_BND, x_BND.flatten(0, 1).index_select(0, far_BN.flatten()).view_as(x_BND)


# of the published code's loader: each has a generator, from the seed on, and they take turns with a
# batch each
WORKERS = 7


@functools.lru_cache(maxsize=16)
def _original_draws(
    dim: int, points: int, seed: int, batch: int, epoch: int, device: torch.device
) -> Tensor:
    """The normal draws of the published code's epoch, which it repeats: (steps, batch, points,
    dim). Drawn on the CPU, as there."""
    draws = torch.empty(epoch, batch, points, dim)
    generators = [torch.Generator().manual_seed(seed + worker) for worker in range(WORKERS)]
    # Worker k makes batches k, k + 7, ... from its own generator; a sequence is drawn as (dim,
    # points).
    for step, sequences in enumerate(draws):
        for sequence in sequences:
            sequence.copy_(torch.randn(dim, points, generator=generators[step % WORKERS]).mT)
    return draws.to(device)


@dataclass(frozen=True)
class Nearest(Neighbors):
    """f(X; y) = the point of X with the largest inner product with y; y is uniform and enters as
    the last token, -y."""

    name = "nearest"

    def sample(
        self, generator: torch.Generator, batch: int, step: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The points and behind them -y, (batch, points + 1, dim); the nearest point, (batch, 1,
        dim)."""
        x_BND = draw_points(generator, self.law, batch, self.points, self.dim)
        y_BD = sphere(generator, batch, self.dim)
        # The hardmax of the target: the largest score names the point.
        scores_BN = (x_BND @ y_BD.unsqueeze(-1)).squeeze(-1) + self._bias(x_BND)
        near_B = scores_BN.argmax(-1)
        rows = torch.arange(batch, device=x_BND.device)
        return torch.cat((x_BND, -y_BD.unsqueeze(1)), 1), x_BND[rows, near_B].unsqueeze(1)

    def _bias(self, x_BND: Tensor) -> Tensor | float:
        return 0.0

    @property
    def tokens(self) -> int:
        """The points and the query."""
        return super().tokens + 1

    def baselines(self) -> dict[str, float]:
        """Exact errors of zero, and of the best multiples of the query token and of the mean
        point."""
        count = self.points
        if self.law == "uniform":
            first, cross = _extreme(self.dim, count)
            return {"zero": 1.0, "query": 1 - first**2, "mean": 1 - (1 + cross) ** 2 / count}
        if self.law == "orthogonal":  # y = gaussian/chi, so E max y_j = E max g_j / E chi_d
            chi = sqrt(2) * exp(lgamma((self.dim + 1) / 2) - lgamma(self.dim / 2))
            return {"zero": 1.0, "query": 1 - (_gauss_max(count) / chi) ** 2, "mean": 1 - 1 / count}
        return {"zero": 1.0, "query": 1 - _folded_max(self.dim, count) ** 2, "mean": 1.0}


@dataclass(frozen=True)
class BiasedNearest(Nearest):
    """f_b(X; y) = X hardmax(X^T y + b e_1): the nearest neighbour with a bias for the first
    point."""

    name = "biased-nearest"
    bias: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            isinstance(self.bias, bool)
            or not isinstance(self.bias, int | float)
            or not isfinite(self.bias)
        ):
            raise UsageError(f"bias must be a finite number, got {self.bias!r}")
        object.__setattr__(self, "bias", float(self.bias))

    def _bias(self, x_BND: Tensor) -> Tensor | float:
        shift = torch.zeros(x_BND.shape[1], device=x_BND.device)
        shift[0] = self.bias
        return shift

    def baselines(self) -> dict[str, float]:
        """Those that have a closed form with a bias."""
        if self.bias == 0:
            return super().baselines()
        return (
            {"zero": 1.0, "mean": 1 - 1 / self.points}
            if self.law == "orthogonal"
            else {"zero": 1.0}
        )


# ---- order statistics of t = x.y, whose density is u_d(t) ~ (1 - t^2)^((d-3)/2)


def _grid(dim: int) -> tuple[Any, Any, Any, Any]:
    """Midpoint rule in the angle: nodes t, weights u_d(t) dt, the distribution function, and
    int_{-1}^t s u_d(s) ds."""
    nodes = 20_000
    # The substitution t = -cos(angle) makes the density smooth at both ends.
    angle, weight = (np.arange(nodes) + 0.5) * pi / nodes, pi / nodes
    t = -np.cos(angle)
    log_omega = lgamma(dim / 2) - lgamma((dim - 1) / 2) - 0.5 * np.log(pi)
    mass = weight * np.exp(log_omega + (dim - 2) * np.log(np.sin(angle)))
    # half of a node's own mass lies below it
    return t, mass, np.cumsum(mass) - mass / 2, np.cumsum(t * mass) - t * mass / 2


def _extreme(dim: int, count: int) -> tuple[float, float]:
    """For t_1..t_n independent under u_d: E max, and E[max * sum of the others]."""
    t, mass, below, mean_below = _grid(dim)
    # The maximum of n has the density n u_d(t) F(t)^(n-1).
    first = float(np.sum(mass * count * below ** (count - 1) * t))
    cross = (
        float(np.sum(mass * count * (count - 1) * below ** max(count - 2, 0) * t * mean_below))
        if count > 1
        else 0.0
    )
    return first, cross


def _folded_max(dim: int, count: int) -> float:
    """E max |t_j|."""
    t, mass, below, _ = _grid(dim)
    up = t > 0
    # |t| has the distribution function 2 F(t) - 1 on (0, 1).
    return float(np.sum((2 * mass * count * np.clip(2 * below - 1, 0, 1) ** (count - 1) * t)[up]))


def _gauss_max(count: int) -> float:
    """E max of n standard normals."""
    x = np.linspace(-10, 10, 40_001)
    density = np.exp(-(x**2) / 2) / sqrt(2 * pi)
    below = np.cumsum(density) * (x[1] - x[0]) - density * (x[1] - x[0]) / 2
    return float(np.sum(x * count * density * below ** (count - 1)) * (x[1] - x[0]))
