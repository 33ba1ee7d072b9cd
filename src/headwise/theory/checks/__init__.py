"""Every statement of the rank paper, measured: groups of checks by name, in the paper's order.

>>> [check.row()["holds"] for check in CHECKS["growth"](0)][:2]
[True, True]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headwise.theory.checks.check import Check
from headwise.theory.checks.fact1 import full_rank_head
from headwise.theory.checks.figures import continuum, plane, random_features
from headwise.theory.checks.theorem2 import degrees, floor, growth, kernels, subspace
from headwise.theory.checks.theorem3 import biased
from headwise.theory.checks.theorem5 import lengths, majority

CHECKS: dict[str, Callable[[int], Iterator[Check]]] = {
    "full-rank-head": full_rank_head,
    "kernels": kernels,
    "degrees": degrees,
    "floor": floor,
    "growth": growth,
    "subspace": subspace,
    "biased": biased,
    "majority": majority,
    "lengths": lengths,
    "plane": plane,
    "continuum": continuum,
    "random-features": random_features,
}
