"""Fact 1: one head of full rank picks the nearest point."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from headwise.tasks import Farthest
from headwise.theory import constructions
from headwise.theory.checks.check import Check, generator_of, nearest_point, squared_error

NAME = "Fact 1"


def full_rank_head(seed: int = 0) -> Iterator[Check]:
    """One head of full rank: exact under hardmax for any number of points, error ~ 1/beta under
    softmax."""
    g = generator_of(seed)
    for dim, points in ((3, 2), (8, 16), (64, 256)):
        # Fact 1 with hardmax: the head's answer is the nearest point itself, for any N.
        x = constructions.sphere(g, 400, points, dim)
        y = constructions.sphere(g, 400, dim)
        off = constructions.full_rank_head(x, y) - nearest_point(x, y)
        yield Check(
            statement=NAME,
            what="hardmax, largest error of any coordinate",
            at={"d": dim, "N": points},
            kind="equal",
            bound=0.0,
            measured=off.abs().max().item(),
            source="paper",
            allowed=1e-12,
        )
    for dim, beta in ((3, 5.0), (8, 10.0), (64, 100.0)):
        # Fact 1 with softmax at finite beta: the mean over samples is 2 E (1/(1 + exp(sqrt(2) beta
        # |t|)))^2.
        x, y = constructions.pairs(g, 40_000, dim)
        errors = squared_error(constructions.full_rank_head(x, y, beta), nearest_point(x, y))
        measured, se = constructions.mean_and_error(errors)
        yield Check(
            statement=NAME,
            what="softmax error, samples against quadrature",
            at={"d": dim, "N": 2, "beta": beta},
            kind="equal",
            bound=constructions.softmax_error(dim, beta),
            measured=measured,
            source="derived",
            se=se,
        )
    for dim in (3, 8, 64):
        # The error falls as 1/beta, with a known constant.
        exact = constructions.softmax_error(dim, 1e4)
        yield Check(
            statement=NAME,
            what="softmax error at large beta over its limit",
            at={"d": dim, "N": 2, "beta": 1e4},
            kind="equal",
            bound=1.0,
            measured=exact / constructions.softmax_limit(dim, 1e4),
            source="derived",
            allowed=1e-5,
        )
    for points in (4, 16, 64):
        # More points, in the trained task's setting: the query is one of the points, and the
        # exponent is still -1.
        exponent, se = _exponent_in_beta(points, g)
        yield Check(
            statement=NAME,
            what="farthest neighbour in its own sequence: exponent of the softmax error in beta",
            at={"d": 64, "N": points, "beta": [300, 1000]},
            kind="equal",
            bound=-1.0,
            measured=exponent,
            source="derived",
            se=se,
        )
    for depth in (1, 3):
        # Weights that answer exist in the trained architecture too, so what training misses is not
        # for want of expressiveness.
        task = Farthest(64, 16)
        x, target = task.sample(generator_of(seed), 256)
        with torch.no_grad():
            error = task.loss(constructions.perfect_encoder(64, depth)(x)[0], target).item()
        yield Check(
            statement=NAME,
            what="weights in the trained architecture that answer, float32",
            at={"d": 64, "N": 16, "L": depth},
            kind="most",
            bound=5e-4,
            measured=error,
            source="derived",
        )


def _exponent_in_beta(points: int, g: torch.Generator) -> tuple[float, float]:
    """The slope of log error between beta 300 and 1000, and its standard error; d = 64."""
    x = constructions.sphere(g, 4096 // points * 8, points, 64)
    # The farthest point from a unit vector is the nearest one to its negative. Both betas see the
    # same samples, so most of the noise cancels.
    want = nearest_point(x, -x[:, 0])
    errors = [
        squared_error(constructions.full_rank_head(x, -x[:, 0], beta), want)
        for beta in (300.0, 1000.0)
    ]
    run = math.log(1000 / 300)
    slope = math.log((errors[1].mean() / errors[0].mean()).item()) / run
    relative = [e / e.mean() for e in errors]  # the linear part of the logarithm, token by token
    _, se = constructions.mean_and_error(relative[1] - relative[0])
    return slope, math.hypot(se / run, 0.02)  # and a little because beta = 300 is not infinite
