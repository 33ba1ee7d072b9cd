"""Theorem 3: a biased target that heads below full rank cannot see."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headwise.theory import constructions
from headwise.theory.checks.check import SIGMAS, Check, generator_of

NAME = "Theorem 3"


def biased(seed: int = 0) -> Iterator[Check]:
    """The biased target (our reconstruction; the authors' coefficients are not public): full rank
    is exact, lower rank sees nothing."""
    g = generator_of(seed)
    for dim in (4, 7, 16):
        # Full rank: the bank of 2 d^2 + 1 biased heads is the target where |(x_1 - x_2).y| < d, the
        # range of its thresholds.
        x, _ = constructions.pairs(g, 4000, dim)
        y = torch.randn(4000, dim, dtype=torch.float64, generator=g)
        inside = ((x[:, 0] - x[:, 1]) * y).sum(1).abs() < dim
        off = constructions.biased_bank(x, y, dim) - constructions.biased_target(x, y, dim)
        yield Check(
            statement=NAME,
            what="2 d^2 + 1 biased full-rank heads against the target, largest difference",
            at={"d": dim, "H": 2 * dim**2 + 1},
            kind="equal",
            bound=0.0,
            measured=off[inside].abs().max().item(),
            source="derived",
            allowed=1e-12,
        )
    for dim, rank in ((4, 2), (8, 4), (8, 6), (16, 12), (32, 24)):
        # Theorem 3: below full rank no head errs less than 1/40. The bound is kept with room for
        # the samples' error.
        share, se = constructions.explained(dim, rank, 200_000, g, wave=1 / dim)
        yield Check(
            statement=NAME,
            what="least error of any rank-r head (half of the wave that r coordinates leave), 4 "
            "standard errors down, against 1/40",
            at={"d": dim, "r": rank},
            kind="least",
            bound=1 / 40,
            measured=0.5 * (1 - share) - SIGMAS * se / 2,
            source="paper",
            se=se / 2,
        )
    # What is seen falls exponentially in d. So small a share needs many twins of each sample.
    before, _ = constructions.explained(4, 2, 12_000, g, wave=1 / 4, twins=256)
    for dim in (6, 8):
        share, se = constructions.explained(dim, dim // 2, 12_000, g, wave=1 / dim, twins=256)
        yield Check(
            statement=NAME,
            what="share of the wave that half the coordinates explain, 4 standard errors up, "
            "against half of that two dimensions below",
            at={"d": dim, "r": dim // 2, "share": share, "below": before},
            kind="most",
            bound=before / 2,
            measured=share + SIGMAS * se,
            source="paper",
            se=se,
        )
        before = share
