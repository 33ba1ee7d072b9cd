"""The candidates of a space, as columns of whole numbers: heads first, then widths, depths and
feed-forwards.

Heads are enumerated by divisors: every number of heads within the aspect, every number of KV heads
that divides it. What `Shape` would refuse is left out here by the same rules, so that every
candidate is a shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from headwise.errors import UsageError
from headwise.planning.space import MOST_HEADS, ROTATED, Space
from headwise.planning.straight import Ints

# Sizes of a head; each is a straight line of every cost.
HEADS = (
    *("num_heads", "num_kv_heads", "head_dim", "v_head_dim"),
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"),
)
CHUNK = 250_000  # candidates that are looked at together
MOST_CANDIDATES = 100_000_000
MOST_FAMILIES = 20_000
Columns = dict[str, Ints]


@dataclass(frozen=True)
class Chunk:
    """Some candidates of one family: heads and widths in `rows`, of which each candidate has one,
    its depth, and its feed-forward where that is not solved for."""

    rows: Columns
    row: Ints
    depth: Ints
    ffn: Ints | None


def families(space: Space) -> list[dict[str, Any]]:
    """Every choice of the fields that are no size of a head, width, depth or feed-forward."""
    apart = {"dim", "depth", space.solved, *HEADS}
    names = [name for name in space.choices if name not in apart]
    count = math.prod(len(space.values(name)) for name in names)
    if count > MOST_FAMILIES:
        raise UsageError(
            f"at most {MOST_FAMILIES:,} combinations of {', '.join(names)} are considered, got "
            f"{count:,}; give fewer choices"
        )
    if space.like is not None and space.like.layers:
        names.append("depth")
    chosen = itertools.product(*(space.values(name) for name in names))
    return [{**space.fixed, **dict(zip(names, values, strict=True))} for values in chosen]


# ---- heads


def heads_of(space: Space, family: Mapping[str, Any]) -> Columns:
    """Every combination of the sizes of heads that is allowed, at any width."""

    def choices(name: str, default: int) -> Ints:
        given = space.values(name) or (family.get(name, default),)
        return np.array(given, np.int64)

    dims, ranks = space.values("dim"), choices("head_dim", 64)
    if space.rule("num_heads") == "free":
        most = _most_heads(space, max(dims), int(ranks.min()))
        heads = np.arange(1, most + 1, dtype=np.int64)
    else:
        heads = choices("num_heads", 1)
    tied_values = space.rule("v_head_dim") == "head_dim"
    mesh = np.meshgrid(
        heads,
        ranks,
        np.zeros(1, np.int64) if tied_values else choices("v_head_dim", 64),
        choices("kv_lora_rank", 0),
        choices("q_lora_rank", 0),
        np.zeros(1, np.int64) if space.rotated is not None else choices("qk_rope_head_dim", 0),
        indexing="ij",
    )
    H, R, V, C, Q, P = (column.ravel() for column in mesh)
    V = R if tied_values else V
    if space.rotated is not None:
        P = _rotated(R, C, space.rotated, space.like is None)
    kept = np.ones(len(H), bool)
    unit = max(1, math.lcm(family.get("average", 1), family.get("o_groups", 1)))
    kept &= (P <= R) & (P % 2 == 0) & (H % unit == 0)
    if family.get("shared_kv"):
        kept &= V == R
    if space.rule("num_heads") == "free":
        own = () if space.like is None else (space.like.num_heads * space.like.head_dim,)
        kept &= ((H * R) % space.inner == 0) | np.isin(H * R, own)
    found = [column[kept] for column in (H, R, V, C, Q, P)]
    H, R, V, C, Q, P, KV = _with_kv_heads(space, family, found)
    columns = (H, KV, R, V, C, Q, P)
    return dict(zip(HEADS, columns, strict=True))


def _most_heads(space: Space, widest: int, rank: int) -> int:
    high = space.ratios.get("inner/dim", (Fraction(0), Fraction(2)))[1]
    own = 0 if space.like is None else space.like.num_heads
    return max(own, 1, min(MOST_HEADS, int(widest * high // max(rank, 1))))


def _rotated(R: Ints, C: Ints, share: Fraction, default: bool) -> Ints:
    """Rotated coordinates of each head: the share of its rank, even; behind a latent at most 64 and
    half of the rank."""
    if share == 1:
        return np.where(C > 0, np.minimum(ROTATED, R // 4 * 2), R) if default else R
    part = R * share.numerator // share.denominator
    return part - part % 2


def _with_kv_heads(space: Space, family: Mapping[str, Any], columns: list[Ints]) -> list[Ints]:
    """The same with a column of KV heads: those asked for that divide the heads. A latent has as
    many as heads."""
    H, C = columns[0], columns[3]
    rule = space.rule("num_kv_heads")
    given = space.values("num_kv_heads")
    options: dict[int, list[int]] = {}
    for h in np.unique(H).tolist():
        if rule == "divisors":
            options[h] = [k for k in range(1, h + 1) if h % k == 0]
        elif rule == "num_heads" or not given:
            options[h] = [h]
        else:
            options[h] = [k for k in given if k and h % k == 0]
    # A latent replaces groups: one KV head for each head, if that is among what was asked for.
    alone = {h: [h] if h in options[h] else [] for h in options}
    lists = [(alone if c else options)[h] for h, c in zip(H.tolist(), C.tolist(), strict=True)]
    counts = np.array([len(one) for one in lists], np.int64)
    KV = np.array([k for one in lists for k in one], np.int64)
    return [*(np.repeat(column, counts) for column in columns), KV]


# ---- widths, depths, feed-forwards


def chunks(space: Space, family: Mapping[str, Any], heads: Columns) -> Iterator[Chunk]:
    """Every candidate of a family, in chunks."""
    ffn = np.array(space.values(space.solved), np.int64) if space.values(space.solved) else None
    if ffn is None and space.rule(space.solved) == "" and space.solved in family:
        ffn = np.array([family[space.solved]], np.int64)
    own_depth = (family["depth"],) if "depth" in family else space.values("depth")
    depths = np.array(own_depth, np.int64)
    inner = heads["num_heads"] * heads["head_dim"]
    for dim in space.values("dim"):
        allowed = depths[_within(np.full_like(depths, dim), depths, space.ratios.get("dim/depth"))]
        rows = np.flatnonzero(
            _within(inner, np.full_like(inner, dim), space.ratios.get("inner/dim"))
        )
        widths = ffn
        if widths is not None:
            ratio = space.ratios.get("ffn/dim")
            widths = widths[_within(widths, np.full_like(widths, dim), ratio)]
        per_row = len(allowed) * (1 if widths is None else len(widths))
        if not per_row or not len(rows):
            continue
        size = max(1, CHUNK // per_row)
        for start in range(0, len(rows), size):
            yield _chunk(heads, rows[start : start + size], dim, allowed, widths)


def _within(a: Ints, b: Ints, ratio: tuple[Fraction, Fraction] | None) -> np.ndarray:
    """Where a / b lies between two ratios, in whole numbers."""
    if ratio is None:
        return np.ones(len(a), bool)
    low, high = ratio
    return (a * low.denominator >= b * low.numerator) & (a * high.denominator <= b * high.numerator)


def _chunk(heads: Columns, rows: Ints, dim: int, depths: Ints, widths: Ints | None) -> Chunk:
    table = {name: column[rows] for name, column in heads.items()}
    table["dim"] = np.full(len(rows), dim, np.int64)
    numbers = np.arange(len(rows), dtype=np.int64)
    if widths is None:
        return Chunk(table, np.repeat(numbers, len(depths)), np.tile(depths, len(rows)), None)
    row, depth, ffn = np.meshgrid(numbers, depths, widths, indexing="ij")
    return Chunk(table, row.ravel(), depth.ravel(), ffn.ravel())
