"""What a lead is worth in training: how much longer the shape behind would train to catch up.

A learning curve is fitted to the leader's own evaluations along the way, mean over seeds:

    loss(share of the training) = floor + height * share^-slope

A shape whose loss is `above` at the end stands where the leader stood at an earlier share of its
training, so the lead is worth

    ((above - floor) / (leader - floor))^(1 / slope) * (FLOPs of the other / FLOPs of the leader)

times the training. Evaluations along the way are made at rates that have not fallen to zero yet,
and a training that had been meant to end there would have done better. So the curve is too steep,
and the number is too small rather than too large. Standard library only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

FIRST = 0.15  # share of the training; earlier evaluations see the warm-up
LEAST_POINTS = 5
FLOORS = 200
MOST_SCATTER = 0.25  # of the fit, as a share of the fall that it is fitted to


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A fitted learning curve."""

    floor: float
    height: float
    slope: float
    scatter: float  # root mean square of the residuals
    first: float  # the share from which it was fitted

    def at(self, share: float) -> float:
        """The loss there."""
        return self.floor + self.height * share**-self.slope


@dataclass(frozen=True, kw_only=True)
class Worth:
    """A lead as a factor of training, with the ends that belong to the lead's interval; `beyond`
    says that the other shape stands before the first evaluation that was fitted."""

    factor: float
    low: float
    high: float
    beyond: bool = False

    def __str__(self) -> str:
        if self.beyond:
            return f"more than {self.factor:.2g} times the training"
        return f"{self.factor:.2f} times the training ({self.low:.2f} to {self.high:.2f})"


def fit(points: Sequence[tuple[float, float]]) -> Curve | str:
    """A curve through (share, loss), or why there is none.

    >>> found = fit([(i / 10, 0.5 + 0.1 * (i / 10) ** -0.5) for i in range(1, 11)])
    >>> round(found.floor, 2), round(found.slope, 2)
    (0.5, 0.5)
    """
    used = [(share, loss) for share, loss in points if share >= FIRST and math.isfinite(loss)]
    if len(used) < LEAST_POINTS:
        return f"there are {len(used)} evaluations behind the warm-up, {LEAST_POINTS} are needed"
    fall = used[0][1] - used[-1][1]
    if fall <= 0:
        return "the leader's error does not fall along its training"
    least = min(loss for _, loss in used)
    # A floor near the last losses is tried in small steps, one far below in large ones.
    floors = [least - fall * 10 ** (4 * i / FLOORS - 2.5) for i in range(FLOORS)]
    tried = sorted({0.0, *(floor for floor in floors if 0 < floor < least)})
    for _ in range(2):  # a second time between the neighbours of the best one
        found = min((_line(used, floor) for floor in tried), key=lambda curve: curve.scatter)
        i = tried.index(found.floor)
        low, high = tried[max(0, i - 1)], tried[min(len(tried) - 1, i + 1)]
        tried = [found.floor, *(low + (high - low) * k / FLOORS for k in range(FLOORS))]
    if found.slope < 0.01:
        return "the leader's error does not fall like a power of its training"
    if found.scatter > MOST_SCATTER * fall:
        return "the leader's evaluations scatter too much around a curve"
    return found


def _line(points: Sequence[tuple[float, float]], floor: float) -> Curve:
    """The least squares of log(loss - floor) over log(share)."""
    x = [math.log(share) for share, _ in points]
    y = [math.log(loss - floor) for _, loss in points]
    mx, my = math.fsum(x) / len(x), math.fsum(y) / len(y)
    slope = math.fsum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    slope /= -math.fsum((a - mx) ** 2 for a in x)
    curve = Curve(
        floor=floor, height=math.exp(my + slope * mx), slope=slope, scatter=0.0, first=points[0][0]
    )
    squares = math.fsum((loss - curve.at(share)) ** 2 for share, loss in points)
    return dataclasses.replace(curve, scatter=math.sqrt(squares / len(points)))


def worth(
    points: Sequence[tuple[float, float]],
    lead: tuple[float, float, float],
    flops_ratio: float = 1.0,
) -> Worth | str:
    """What a lead (mean, low, high) is worth, or why that cannot be said."""
    curve = fit(points)
    if isinstance(curve, str):
        return curve
    end = curve.at(1.0) - curve.floor

    def factor(by: float) -> float:
        return max(0.0, (end + by) / end) ** (1 / curve.slope) * flops_ratio

    mean, low, high = map(factor, lead)
    most = flops_ratio / curve.first
    if mean > most:
        return Worth(factor=most, low=most, high=math.inf, beyond=True)
    return Worth(factor=mean, low=low, high=high)
