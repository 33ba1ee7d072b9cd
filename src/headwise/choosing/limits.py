"""Limits in the grammar of `headwise plan`: the one seam to it.

Parameters alone are met by the shapes of `candidates`. Where there are other limits, `plan` lists
every shape that meets them all, with what the task asks of a shape held fixed, and a few that
differ in layers and heads are raced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headwise.choosing.candidates import candidates, spread
from headwise.choosing.trainings import Training
from headwise.errors import UsageError
from headwise.planning.units import read_amount

if TYPE_CHECKING:
    from headwise.shape import Shape

MOST_SEEN = 1000  # shapes whose sizes give the grid of a plan
FREE = {
    *("dim", "depth", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "ffn_dim"),
    *("layers", "extras", "qk_rope_head_dim"),
}


def amount(name: str, given: int | str) -> int:
    """A number of parameters, as 300k, 1.1B or 124439808.

    >>> amount("params", "300k"), amount("params", 7)
    (300000, 7)
    """
    value = round(read_amount(name, str(given), "count"))
    if value < 1:
        raise UsageError(f"{name} must be at least 1, got {given}")
    return value


def shapes_within(
    training: Training,
    params: int | str,
    limits: Mapping[str, str],
    *,
    dim: int | None,
    depths: Sequence[int],
    heads: Sequence[int],
    ranks: Sequence[int],
    most: int,
) -> tuple[Shape, ...]:
    """The shapes that are raced: those of a number of parameters, or those that `plan` finds within
    limits, at most so many."""
    from headwise.planning.limits import limit_of

    grid = {"depths": depths, "heads": heads, "ranks": ranks}
    limit = limit_of("params", str(params))
    ends = [float(end) for end in (limit.low, limit.high) if end is not None]
    size = max(1, round(sum(ends) / len(ends)))
    if not limits and len(ends) == 2 and ends[1] <= 1.03 * ends[0]:
        return candidates(training, amount("params", params), dim=dim, most=most, **grid)
    like = candidates(training, size, dim=dim, most=MOST_SEEN)
    found = planned(like, {"params": str(params), **limits}, tokens=training.tokens, **grid)
    return tuple(spread(found, most))


def planned(
    like: Sequence[Shape],
    limits: Mapping[str, str],
    *,
    tokens: int,
    depths: Sequence[int] = (),
    heads: Sequence[int] = (),
    ranks: Sequence[int] = (),
) -> list[Shape]:
    """Shapes that meet all limits, in the style and in the width of `like`; of those with the same
    layers, heads and KV heads the one with the largest rank."""
    from headwise.planning.fields import KINDS
    from headwise.planning.plan import plan

    first = like[0]
    fields = {
        f.name: getattr(first, f.name)
        for f in dataclasses.fields(first)
        if f.name in KINDS and f.name not in FREE
    }
    fields |= {
        "dim": first.dim,
        "depth": list(depths) or sorted({shape.depth for shape in like}),
        "num_heads": list(heads) or sorted({shape.num_heads for shape in like}),
        "head_dim": list(ranks) or sorted({shape.head_dim for shape in like}),
    }
    if first.causal:
        fields["num_kv_heads"] = sorted({1, *fields["num_heads"]})
        if first.qk_rope_head_dim:
            fields["qk_rope_head_dim"] = "head_dim"
    given: dict[str, Any] = dict(limits)
    found = plan(context=tokens, multiple=1, fields=fields, **given)
    best: dict[tuple[int, int, int], Shape] = {}
    for row in found.rows:
        shape = row.shape
        key = (shape.depth, shape.num_heads, shape.num_kv_heads)
        if key not in best or shape.head_dim > best[key].head_dim:
            best[key] = shape
    if len(best) < 2:
        words = ", ".join(f"{name} {text}" for name, text in limits.items())
        raise UsageError(
            f"{'only one shape' if best else 'no shape'} of width {first.dim} meets {words}; "
            "headwise plan says which limit to relax"
        )
    return [best[key] for key in sorted(best)]
