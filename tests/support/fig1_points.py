"""Points of the rank paper's main figure, made by hand."""

from typing import Any

from headwise.experiments.rank_paper import fig1


def point(
    rank: int, value: float | None, low: float | None = None, high: float | None = None, **more: Any
) -> fig1.Point:
    base = {
        "task": "farthest",
        "protocol": "stream",
        "layers": 1,
        "width": 1,
        "budget": "d^2",
        "heads": 64 // rank,
        "dim": 64,
        "params": 7,
        "lr": 0.1,
        "rates": 1,
        "edge": False,
        "tuning": False,
        "n": 2,
        "published": None,
    }
    measured = {"held_out": value, "low": low, "high": high, "train_best": value}
    return fig1.Point(**{**base, "rank": rank, **measured, **more})


CASES = {
    "one point": [point(64, 0.5)],
    "no interval": [point(64, 0.5), point(32, 0.7)],
    "an interval that reaches zero": [point(64, 0.5, -3.0, 4.0), point(32, 0.7, 0.6, 0.8)],
    "one diverged": [point(64, None), point(32, 0.7, 0.6, 0.8)],
    "all diverged": [point(64, None), point(32, None)],
    "five panels": [
        point(r, 0.5, layers=n, protocol=p)
        for r in (64, 1)
        for n in (1, 2, 3)
        for p in "ab"
        if (n, p) != (3, "b")
    ],
}
