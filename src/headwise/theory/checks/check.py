"""One check: a number that a statement bounds or predicts, the number that was measured, and
whether the statement holds.

`kind` says how a check is decided:

equal   |measured - bound| is at most `allowed`: closed forms against each other (1e-10) or against
        samples (4 standard errors)
least   measured is at least the bound: a lower bound on an error
most    measured is at most the bound: a construction that reaches an error

`source` says whose statement it is:

paper       stated by the authors
derived     ours, from the paper's definitions
published   a number read off the authors' figure, or printed by their code
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from headwise.rows import Row

Kind = Literal["equal", "least", "most"]
Source = Literal["paper", "derived", "published"]

SIGMAS = 4.0  # standard errors that a sample may be off
INTERVAL = 1.96  # standard errors to either side, for 95 %


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison of a measured number with what a statement says."""

    statement: str
    what: str  # what is compared
    at: dict[str, Any]  # the parameters: d, r, H, N ...
    kind: Kind
    bound: float
    measured: float
    source: Source
    se: float | None = None  # standard error of `measured`
    allowed: float | None = None  # difference, for kind equal; by default SIGMAS standard errors
    residual: float | None = None  # of the linear system that was solved

    @property
    def tolerance(self) -> float:
        """The difference that kind equal allows."""
        if self.allowed is not None:
            return self.allowed
        assert self.se is not None, "kind equal needs allowed or se"
        return SIGMAS * self.se

    @property
    def margin(self) -> float:
        """How far it is from failing, as a share of what is allowed: 1 is exact, 0 is the edge, a
        negative margin fails."""
        if self.kind == "equal":
            return 1 - abs(self.measured - self.bound) / self.tolerance
        gap = self.measured - self.bound
        if self.kind == "most":
            gap = self.bound - self.measured
        return gap / max(abs(self.bound), abs(self.measured), 1e-300)

    @property
    def holds(self) -> bool:
        """Whether the statement holds here."""
        return bool(self.margin >= 0)

    def row(self) -> Row:
        """The check as plain values."""
        low = high = None
        if self.se is not None:
            low = self.measured - INTERVAL * self.se
            high = self.measured + INTERVAL * self.se
        row = {
            "statement": self.statement,
            "what": self.what,
            "parameters": self.at,
            "kind": self.kind,
            "bound": self.bound,
            "measured": self.measured,
            "low": low,
            "high": high,
            "allowed": self.tolerance if self.kind == "equal" else self.allowed,
            "margin": self.margin,
            "holds": self.holds,
            "source": self.source,
        }
        return row if self.residual is None else {**row, "residual": self.residual}


def generator_of(seed: int) -> torch.Generator:
    """The generator of a group of checks."""
    return torch.Generator().manual_seed(seed)


def nearest_point(points_BND: Tensor, query_BD: Tensor) -> Tensor:
    """The point with the largest product with the query, (B, D)."""
    products = (points_BND @ query_BD.unsqueeze(-1)).squeeze(-1)
    return points_BND[torch.arange(len(points_BND)), products.argmax(1)]


def squared_error(output_BD: Tensor, target_BD: Tensor) -> Tensor:
    """Per sample, summed over coordinates, (B,)."""
    return (output_BD - target_BD).square().sum(1)
