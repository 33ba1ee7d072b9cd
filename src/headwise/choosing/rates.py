"""Which learning rates a shape tries, and which one it gets.

Every shape makes the same number of trials, on one seed, evaluated on validation data: first the
grid, then one rate at a time where the losses so far point to. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headwise.errors import LARGEST, UsageError

GRID = (0.001, 0.003, 0.01)
TRIALS = 5  # of every shape, the grid among them
Tried = Mapping[float, float]  # rate -> loss, infinite where it diverged


def check_grid(grid: Sequence[float], trials: int) -> None:
    """Refuse rates that are none, and fewer trials than rates."""
    if not grid or len(set(grid)) < len(grid):
        raise UsageError(
            f"rates must be there and differ, got {', '.join(map(str, grid)) or 'none'}"
        )
    for rate in grid:
        if not 0 < rate < LARGEST:
            raise UsageError(f"rates must be above 0, got {rate}")
    if trials < len(grid):
        raise UsageError(
            f"trials must be at least as many as rates, got {trials} for {len(grid)} rates"
        )
    if len(grid) == 1 and trials > 1:
        raise UsageError(f"one rate has no neighbours to try: trials must be 1, got {trials}")


def best_rate(tried: Tried) -> float:
    """The rate of the smallest loss, the smaller one of equal ones.

    >>> best_rate({0.01: 0.5, 0.003: 0.4, 0.03: math.inf})
    0.003
    """
    return min(tried, key=lambda rate: (tried[rate], rate))


def at_edge(tried: Tried) -> bool:
    """Whether the best rate is the smallest or the largest of several that were tried."""
    return len(tried) > 2 and best_rate(tried) in (min(tried), max(tried))


def next_trials(tried: Tried, grid: Sequence[float], trials: int) -> list[float]:
    """The rates to try next: what the grid still lacks, or one more; none when all are made.

    >>> next_trials({0.01: 0.5, 0.03: 0.4}, (0.01, 0.03), 3)
    [0.09]
    """
    lacking = [rate for rate in grid if rate not in tried]
    if lacking:
        return lacking
    return [_next(tried)] if len(tried) < trials else []


def _next(tried: Tried) -> float:
    """Beyond the edge where the best rate is at one, else at the lowest point of the parabola
    through the best rate and its neighbours, over the logarithm of the rate."""
    rates = sorted(tried)
    best = best_rate(tried)
    i = rates.index(best)
    if i == 0:
        return _short(best * best / rates[1])
    if i == len(rates) - 1:
        return _short(best * best / rates[-2])
    x = [math.log(rate) for rate in rates[i - 1 : i + 2]]
    y = [tried[rate] for rate in rates[i - 1 : i + 2]]
    if not all(map(math.isfinite, y)):  # towards the side that does not diverge
        side = 0 if math.isfinite(y[0]) else 2
        return _short(math.exp((x[1] + x[side]) / 2))
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    curve = right - left
    lowest = (x[0] + x[1]) / 2 - left * (x[2] - x[0]) / 2 / curve if curve > 0 else x[1]
    # Too near to the best rate it would tell nothing new: at least a quarter of the way to a
    # neighbour.
    side = 0 if lowest < x[1] else 2
    way = max(abs(lowest - x[1]), abs(x[side] - x[1]) / 4)
    way = min(way, abs(x[side] - x[1]) * 3 / 4)
    return _short(math.exp(x[1] + math.copysign(way, x[side] - x[1])))


def _short(rate: float) -> float:
    """Six digits make the same id on every machine."""
    return float(f"{rate:.6g}")
