"""What the leaner paper's experiments say to their questions, in a sentence each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headwise.experiments.best import ranking
from headwise.experiments.points import groups, plural

if TYPE_CHECKING:
    from headwise.experiments.leaner_paper.budget_map_points import Cell
    from headwise.experiments.leaner_paper.conditioning import Condition
    from headwise.experiments.leaner_paper.leaner import Arm


def of_map(points: Sequence[Cell]) -> str:
    """The best shape of every task, and how many cannot be told apart from it."""
    said = [_on_task(task, cells) for (task,), cells in groups(points, "task").items()]
    # Of many tasks each has its line below.
    return "; ".join(said[:3]) + (f"; and {len(said) - 3} more tasks" if len(said) > 3 else "")


def _on_task(task: str, cells: Sequence[Cell]) -> str:
    found = ranking(cells)
    if found.first is None:
        return f"on {task} nothing is known yet" + (": tuning only" if found.tuning else "")
    first = found.first
    waiting = f"; {found.tuning} more are only tuned yet" if found.tuning else ""
    shape = f"{plural(first.heads, 'head')} of rank {first.rank} in {plural(first.depth, 'layer')}"
    if found.best is None and found.measured > 1:
        return (
            f"on {task} no shape of {found.measured} can be told apart from the best, {shape}"
            f"{waiting}"
        )
    if not found.alike:
        return f"on {task} the best of {plural(found.measured, 'shape')} is {shape}{waiting}"
    others = plural(len(found.alike), "other")
    return (
        f"on {task} the smallest loss is that of {shape}, and {others} of {found.measured} shapes "
        f"cannot be told apart from it{waiting}"
    )


def of_leaner(points: Sequence[Arm]) -> str:
    """What half the layers cost, without and with more heads."""
    said = []
    for (task,), arms in groups(points, "task").items():
        by_name = {arm.arm: arm for arm in arms if arm.held_out is not None}
        half = by_name.get("half the layers")
        more = [arm for name, arm in by_name.items() if name.endswith(", half the layers")]
        if half is None or half.change is None or not more:
            continue
        best = min(more, key=lambda arm: arm.held_out or 0.0)
        how = best.arm.removesuffix(", half the layers")
        said.append(
            f"on {task} half the layers change the loss by {_found(half.change)}, with more heads "
            f"by {_found(best.change or 'nothing')} at best ({how})"
        )
    return "; ".join(said)


def _found(change: str) -> str:
    """A difference inside a sentence."""
    return change.replace("none found", "nothing that could be seen")


def of_conditioning(points: Sequence[Condition]) -> str:
    """The fewest heads against the most, over every kind of matrix that attention makes."""
    lower, higher, factors = 0, 0, []
    compared = groups(
        [p for p in points if p.dim], "kind", "policy", "weights", "tokens", "dim"
    ).values()
    for same in compared:
        few, many = min(same, key=lambda p: p.heads), max(same, key=lambda p: p.heads)
        # An infinite one has no interval, and is above every finite one.
        if few.heads == many.heads or (few.kappa is None and many.kappa is None):
            continue
        lower += _above(few, many)
        higher += _above(many, few)
        if few.kappa and many.kappa and _above(few, many):
            factors.append(few.kappa / many.kappa)
    if not lower + higher:
        return "No difference between few and many heads is found" if compared else ""
    # Of those against an infinite one there is no factor.
    ends = [f"{float(f'{f:.2g}'):g}" for f in sorted(factors)]
    by = f", by factors of {ends[0]} to {ends[-1]}" if len(ends) > 1 else ""
    said = (
        f"with the most heads the condition number is lower than with the fewest in {lower} of "
        f"{plural(len(compared), 'comparison')}{by}, and higher in {higher}"
    )
    return f"At random weights, {said}"


def _above(one: Condition, other: Condition) -> bool:
    """Whether a condition number is above another, their intervals apart."""
    if one.kappa is None or other.kappa is None:
        return one.kappa is None and other.kappa is not None
    return one.low is not None and other.high is not None and one.low > other.high
