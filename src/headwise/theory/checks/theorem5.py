"""Theorem 5, two layers of rank-1 heads; and Conjecture 6, the length of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from headwise.theory import constructions
from headwise.theory.checks.check import Check, generator_of, nearest_point, squared_error


def majority(seed: int = 0) -> Iterator[Check]:
    """Two layers of rank-1 heads: votes into scratch coordinates, then a count."""
    g, name = generator_of(seed), "Theorem 5"
    for dim, heads, draws in ((8, 11, 400), (16, 101, 200)):
        errors = []
        # New heads for each batch: given the data, votes are independent only over heads.
        for _ in range(draws):
            x, y = constructions.pairs(g, 100, dim)
            directions = constructions.sphere(g, heads, dim)
            voted = constructions.vote(x, y, directions)
            errors.append(squared_error(voted, nearest_point(x, y)).mean())
        measured, se = constructions.mean_and_error(torch.stack(errors))
        yield Check(
            statement=name,
            what="majority of rank-1 heads in two layers of hard attention against the exact error",
            at={"d": dim, "N": 2, "H": heads},
            kind="equal",
            bound=constructions.vote_error(dim, heads),
            measured=measured,
            source="derived",
            se=se,
        )
    for dim in (8, 64):
        # Many heads in a fixed dimension: the error falls as sqrt(d/H).
        exact = constructions.vote_error(dim, 1_000_001)
        yield Check(
            statement=name,
            what="exact error with many heads over omega_d sqrt(2 pi/H)",
            at={"d": dim, "H": 1_000_001},
            kind="equal",
            bound=1.0,
            measured=exact / constructions.vote_limit(dim, 1_000_001),
            source="derived",
            allowed=0.01,
        )
    for dim in (512, 4096):
        # High dimension at a fixed ratio H/d.
        exact = constructions.vote_error(dim, 4 * dim + 1)
        yield Check(
            statement=name,
            what="exact error in high dimension over (2/pi) arctan((pi/2) sqrt(d/H))",
            at={"d": dim, "H": 4 * dim + 1},
            kind="equal",
            bound=1.0,
            measured=exact / constructions.vote_wide(dim, 4 * dim + 1),
            source="derived",
            allowed=0.01,
        )
    # Theorem 5 says polynomially many heads: the slope of log error over log H.
    counts = np.array([1001, 4001, 16001])
    for dim in (8, 64):
        logs = np.log([constructions.vote_error(dim, int(heads)) for heads in counts])
        yield Check(
            statement=name,
            what="polynomially many heads: exponent of the error in H, -1/2 in the limit",
            at={"d": dim, "H": counts.tolist()},
            kind="most",
            bound=-0.4,
            measured=float(np.polyfit(np.log(counts), logs, 1)[0]),
            source="paper",
        )
    for dim in (8, 64):
        yield Check(
            statement=name,
            what="averaged in one layer, infinitely many such heads stay above 0.3",
            at={"d": dim},
            kind="least",
            bound=0.3,
            measured=constructions.averaging_error(dim),
            source="derived",
        )
    before = 0.0
    for points in (2, 4, 8, 16):
        # More points than two: positions are unit vectors, and the second layer picks the one with
        # most votes.
        x = constructions.sphere(g, 2000, points, 16)
        y = constructions.sphere(g, 2000, 16)
        directions = constructions.sphere(g, 401, 16)
        errors = squared_error(constructions.vote(x, y, directions), nearest_point(x, y))
        measured, se = constructions.mean_and_error(errors)
        yield Check(
            statement=name,
            what="the same votes among more points, positions as unit vectors: the error grows "
            "with N",
            at={"d": 16, "N": points, "H": 401},
            kind="least",
            bound=before,
            measured=measured,
            source="paper",
            se=se,
        )
        before = measured


def lengths(seed: int = 0) -> Iterator[Check]:
    """A low-rank layer with fixed weights errs more as the sequence grows; the full-rank head does
    not."""
    g, name = generator_of(seed), "Conjecture 6"
    # Conjecture 6: the layer is fitted at N = 3 and then sees longer sequences with the same
    # weights.
    low_rank = _fitted_layer(8, 2, g)
    full_rank_errors = []
    before = 0.0
    for points in (3, 6, 12, 24):
        x = constructions.sphere(g, 4000, points, 8)
        want = nearest_point(x, -x[:, 0])
        measured, se = constructions.mean_and_error(squared_error(low_rank(x), want))
        yield Check(
            statement=name,
            what="a layer of rank-2 heads fitted at N=3, fixed weights, fresh data: the error "
            "grows with N",
            at={"d": 8, "r": 2, "N": points},
            kind="least",
            bound=before,
            measured=measured,
            source="paper",
            se=se,
        )
        before = measured
        # The full-rank head of Fact 1 at the same lengths.
        answer = constructions.full_rank_head(x, -x[:, 0], 1000.0)
        full_rank_errors.append(squared_error(answer, want).mean().item())
    yield Check(
        statement=name,
        what="one full-rank head at the same lengths, largest error",
        at={"d": 8, "N": [3, 6, 12, 24]},
        kind="most",
        bound=0.02,
        measured=max(full_rank_errors),
        source="paper",
    )


def _fitted_layer(dim: int, rank: int, g: torch.Generator) -> Callable[[Tensor], Tensor]:
    """One layer of 16 rank-r softmax heads with full value matrices for the first token's farthest
    neighbour, fitted at N=3."""
    heads = 16
    size = (heads, dim, rank)
    q, k = (torch.randn(size, dtype=torch.float64, generator=g).requires_grad_() for _ in range(2))
    v = (0.1 * torch.randn(heads, dim, dim, dtype=torch.float64, generator=g)).requires_grad_()

    def layer(x: Tensor) -> Tensor:
        # The first token is the query. Head h scores token n by (x_0 Q_h).(x_n K_h), over rank r.
        scores = torch.einsum("bd,hdr,her,bne->bhn", x[:, 0], q, k, x)
        return torch.einsum("bhn,bnd,hde->be", scores.softmax(-1), x, v)

    optimiser = torch.optim.Adam((q, k, v), lr=0.02)
    for _ in range(400):
        x = constructions.sphere(g, 256, 3, dim)
        loss = squared_error(layer(x), nearest_point(x, -x[:, 0])).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    def fixed(x: Tensor) -> Tensor:
        with torch.no_grad():
            return layer(x)

    return fixed
