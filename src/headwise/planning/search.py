"""Every candidate of a space that meets all limits, with exact totals of its costs; and where none
does, the nearest one for each limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from headwise.errors import UsageError
from headwise.planning.costs import COSTS, At
from headwise.planning.counts import Counter, Straight, shape_fields
from headwise.planning.grid import HEADS, Chunk, chunks, families, heads_of
from headwise.planning.limits import Limit
from headwise.planning.space import Space
from headwise.planning.straight import Ints
from headwise.shape import GATED, Shape

# Costs that a feed-forward can be solved for, the first that has a limit.
SOLVABLE = (
    *("params", "active_params", "weight_bytes", "train_flops_per_token"),
    *("prefill_flops", "decode_flops", "activation_bytes"),
)
USUAL = {True: Fraction(8, 3), False: Fraction(4)}  # feed-forward over width, with a gate, without
MOST_KEPT = 2_000_000
MOST_ASKED = 100_000
MOST_TIMES = 2**24  # of the multiple in a feed-forward
ASPECT = "ffn/dim"
NO_HEADS = (
    "no heads have these sizes: num_heads must be a multiple of num_kv_heads (equal to it with a "
    "latent), head_dim even where it is rotated and no smaller than qk_rope_head_dim"
)
SIZES = (*HEADS, "dim", "depth", "ffn")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What meets the limits: columns of sizes and of totals, a family for each, and how many
    candidates each limit removed, in order."""

    families: list[dict[str, Any]]
    family: Ints
    sizes: dict[str, Ints]
    totals: dict[str, Ints]
    considered: int
    removed: tuple[tuple[str, int], ...]
    faults: tuple[str, ...] = ()  # why whole families are no shapes

    def __len__(self) -> int:
        return len(self.family)

    def fields(self, i: int, solved: str) -> dict[str, Any]:
        """The keyword arguments of a row's shape."""
        sizes = {name: int(self.sizes[name][i]) for name in (*HEADS, "dim")}
        family = self.families[int(self.family[i])]
        depth, ffn = int(self.sizes["depth"][i]), int(self.sizes["ffn"][i])
        return shape_fields(family, sizes, depth, ffn, solved)


@dataclass(frozen=True)
class _Part:
    """Candidates of one chunk, with ways to count their costs."""

    family: int
    chunk: Chunk
    ffn: Ints
    total: Callable[[str, Ints], Ints]  # of a cost, for the candidates at some places

    def column(self, name: str) -> Ints:
        if name == "ffn":
            return self.ffn
        return self.chunk.depth if name == "depth" else self.chunk.rows[name][self.chunk.row]


def solved_limit(space: Space, limits: Sequence[Limit]) -> Limit | None:
    """The limit that the feed-forward is solved for; None: it is given, or the usual one."""
    if space.rule(space.solved) != "solved":
        return None
    named = {limit.cost: limit for limit in reversed(limits)}
    return next((named[name] for name in SOLVABLE if name in named), None)


def search(space: Space, limits: Sequence[Limit], at: At, names: Sequence[str]) -> Found:
    """All candidates within the limits; `names` are the costs that rows have."""
    counted = tuple(dict.fromkeys([*names, *(limit.cost for limit in limits)]))
    spans = [COSTS[limit.cost].span(limit, at) for limit in limits]
    removed = [0] * len(limits)
    aspect = considered = kept = 0
    columns: dict[str, list[Ints]] = {name: [] for name in (*SIZES, *counted, "family")}
    all_families, faults = families(space), []
    for part in _parts(space, all_families, limits, at, counted, faults):
        considered += len(part.ffn)
        chosen = np.flatnonzero(_aspects(space, part))
        aspect += len(part.ffn) - len(chosen)
        totals: dict[str, Ints] = {}
        for i, (limit, span) in enumerate(zip(limits, spans, strict=True)):
            values = part.total(limit.cost, chosen)
            inside = _inside(values, span)
            removed[i] += len(chosen) - int(inside.sum())
            chosen = chosen[inside]
            totals = {name: old[inside] for name, old in totals.items()}
            totals[limit.cost] = values[inside]
        kept += len(chosen)
        if kept > MOST_KEPT:
            raise UsageError(
                f"at most {MOST_KEPT:,} shapes are listed, and more meet these limits: give a "
                "limit, or fix fields with --set"
            )
        if not len(chosen):
            continue
        for name in counted:
            columns[name].append(totals[name] if name in totals else part.total(name, chosen))
        for name in SIZES:
            columns[name].append(part.column(name)[chosen])
        columns["family"].append(np.full(len(chosen), part.family, np.int64))
    if not considered and faults:
        raise UsageError(faults[0])
    if not considered:
        raise UsageError(
            "no shape has these fields at these aspects; change --set dim/depth=..., inner/dim=... "
            f"or ffn/dim=... (they are {_ratios(space)})"
        )
    joined = {
        name: np.concatenate(parts) if parts else np.zeros(0, np.int64)
        for name, parts in columns.items()
    }
    first = ((f"{ASPECT} {_ratio(space, ASPECT)}", aspect),) if aspect else ()
    texts = zip((str(limit) for limit in limits), removed, strict=True)
    return Found(
        families=all_families,
        family=joined["family"],
        sizes={name: joined[name] for name in SIZES},
        totals={name: joined[name] for name in counted},
        considered=considered,
        removed=(*first, *texts),
        faults=tuple(faults),
    )


def _ratio(space: Space, name: str) -> str:
    low, high = space.ratios[name]
    return f"{float(low):g}..{float(high):g}"


def _ratios(space: Space) -> str:
    return ", ".join(f"{name} {_ratio(space, name)}" for name in space.ratios) or "free"


def _inside(values: Ints, span: tuple[int | None, int | None]) -> np.ndarray:
    low, high = span
    inside = np.ones(len(values), bool)
    if low is not None:
        inside &= values >= low
    if high is not None:
        inside &= values <= high
    return inside.astype(bool)


def _aspects(space: Space, part: _Part) -> np.ndarray:
    """Which candidates have a feed-forward within the aspect; one that was given alone has."""
    if ASPECT not in space.ratios or space.values(space.solved):
        return np.ones(len(part.ffn), bool)
    low, high = space.ratios[ASPECT]
    dim = part.column("dim")
    return (part.ffn * low.denominator >= dim * low.numerator) & (
        part.ffn * high.denominator <= dim * high.numerator
    )


# ---- candidates, chunk by chunk


def _parts(
    space: Space,
    all_families: Sequence[Mapping[str, Any]],
    limits: Sequence[Limit],
    at: At,
    counted: Sequence[str],
    faults: list[str],
) -> Iterator[_Part]:
    goal = solved_limit(space, limits)
    asked = 0
    for number, family in enumerate(all_families):
        heads = heads_of(space, family)
        if not len(heads["num_heads"]):
            faults.append(NO_HEADS)
            continue
        names = _countable(space, family, heads, at, counted, limits, faults)
        if names is None:
            continue
        counter = Counter(family, space.solved, at, names)
        for chunk in chunks(space, family, heads):
            no_ffn = chunk.ffn is not None and not chunk.ffn.any()
            straight = counter.straight(chunk.rows, no_ffn)
            if straight is None or (chunk.ffn is not None and not no_ffn and not chunk.ffn.all()):
                asked += len(chunk.row)
                if asked > MOST_ASKED or (goal is not None and chunk.ffn is None):
                    raise UsageError(_too_many(asked, space))
                yield _asked(number, counter, chunk)
                continue
            yield _counted(number, counter, straight, space, goal, limits, chunk, family)


def _too_many(asked: int, space: Space) -> str:
    return (
        f"costs of such shapes are counted one by one, for at most {MOST_ASKED:,} candidates with "
        f"{space.solved} given, got {asked:,}; fix fields with --set, such as --set "
        f"{space.solved}=... dim=..."
    )


def _countable(
    space: Space,
    family: Mapping[str, Any],
    heads: Mapping[str, Ints],
    at: At,
    counted: Sequence[str],
    limits: Sequence[Limit],
    faults: list[str],
) -> tuple[str, ...] | None:
    """The costs that shapes of a family have; None, with the fault, where there is no such
    shape."""
    sizes = {name: int(heads[name][0]) for name in HEADS} | {"dim": space.values("dim")[-1]}
    depth = family.get("depth", space.values("depth")[-1])
    ffn = (space.values(space.solved) or (family.get(space.solved) or 64,))[-1]
    try:
        shape = Shape.of(shape_fields(family, sizes, depth, ffn, space.solved))
        missing = {name: COSTS[name].missing(shape, at) for name in counted}
        for limit in limits:
            if missing[limit.cost]:
                raise UsageError(missing[limit.cost])
    except UsageError as fault:
        faults.append(str(fault))
        return None
    return tuple(name for name in counted if not missing[name])


def _counted(
    number: int,
    counter: Counter,
    straight: Straight,
    space: Space,
    goal: Limit | None,
    limits: Sequence[Limit],
    chunk: Chunk,
    family: Mapping[str, Any],
) -> _Part:
    ffn = chunk.ffn
    if ffn is None and goal is not None:
        ffn = _solved(counter, straight, space, [goal, *limits], chunk)
    elif ffn is None:
        usual = USUAL[family.get("activation", "relu") in GATED]
        dim = chunk.rows["dim"][chunk.row]
        unit = space.multiple * usual.denominator
        ffn = np.maximum(1, (2 * dim * usual.numerator + unit) // (2 * unit)) * space.multiple
    widths = ffn

    def total(name: str, places: Ints) -> Ints:
        if name not in counter.names:
            return np.full(len(places), -1, np.int64)
        line = counter.line(straight, name, chunk.row[places], chunk.depth[places])
        return counter.totals(line, widths[places])

    return _Part(number, chunk, widths, total)


def _solved(
    counter: Counter, straight: Straight, space: Space, limits: Sequence[Limit], chunk: Chunk
) -> Ints:
    """The feed-forward nearest to what the first limit means, moved to where all limits and the
    aspect are met, if there is such a multiple."""
    dim = chunk.rows["dim"][chunk.row]
    ends = []
    if ASPECT in space.ratios:
        low, high = space.ratios[ASPECT]
        least = -(-dim * low.numerator // (space.multiple * low.denominator))
        ends.append((least, dim * high.numerator // (space.multiple * high.denominator)))
    times = None
    for limit in limits:
        if limit.cost not in SOLVABLE:
            continue
        cost = COSTS[limit.cost]
        at_zero, slope = counter.line(straight, limit.cost, chunk.row, chunk.depth)
        step = np.maximum(slope * space.multiple, 1)
        if times is None:
            times = nearest_times(at_zero, step, limit, cost.over(counter.at))
        low_total, high_total = cost.span(limit, counter.at)
        bottom = np.ones_like(times) if low_total is None else -((at_zero - low_total) // step)
        top = np.full_like(times, MOST_TIMES)
        if high_total is not None:
            top = (high_total - at_zero) // step
        ends.append((bottom, top))
    assert times is not None
    lowest = np.maximum.reduce([np.ones_like(times), *(low for low, _ in ends)])
    highest = np.minimum.reduce([np.full_like(times, MOST_TIMES), *(high for _, high in ends)])
    inside = np.minimum(np.maximum(times, lowest), highest)
    times = np.where(lowest <= highest, inside, np.clip(times, 1, MOST_TIMES))
    return times.astype(np.int64) * space.multiple


def nearest_times(at_zero: Ints, step: Ints, goal: Limit, over: int) -> Ints:
    """How many steps bring a total nearest to what a limit means: of two as near the fewer; at most
    to an upper end; at least to a lower one."""
    rest = goal.target * over - at_zero
    times = rest // step
    left = rest - times * step
    if goal.low is None:
        return times
    if goal.high is None:
        return times + (left > 0)
    return times + (left > step - left)


def _asked(number: int, counter: Counter, chunk: Chunk) -> _Part:
    """Candidates whose shapes are made one by one; what is no shape is left out."""
    ffn = chunk.ffn
    assert ffn is not None
    shapes = counter.shapes(chunk, ffn)
    valid = np.array([shape is not None for shape in shapes], bool)
    kept = [shape for shape in shapes if shape is not None]
    fewer = Chunk(chunk.rows, chunk.row[valid], chunk.depth[valid], ffn[valid])

    def total(name: str, places: Ints) -> Ints:
        if name not in counter.names:
            return np.full(len(places), -1, np.int64)
        return counter.asked([kept[i] for i in places.tolist()], name)

    return _Part(number, fewer, ffn[valid], total)


# ---- what to relax


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """The candidate that comes nearest to a limit while it meets all others, or all of them
    together (`limit` is None)."""

    limit: Limit | None
    costs: dict[str, float]
    fields: dict[str, Any]
    outside: float  # as a share of the end that it misses, of all limits together


def nearest_ones(space: Space, limits: Sequence[Limit], at: At) -> list[Nearest]:
    """What to relax where nothing is left: for each limit the nearest candidate that meets all the
    others; where there is none, the one that misses them all by the least."""
    names = tuple(limit.cost for limit in limits)
    spans = [COSTS[name].span(limit, at) for name, limit in zip(names, limits, strict=True)]
    best: dict[int, tuple[float, _Part, int]] = {}
    all_families = families(space)
    for part in _parts(space, all_families, limits, at, names, []):
        places = np.flatnonzero(_aspects(space, part))
        if not len(places):
            continue
        far = np.stack(
            [_outside(part.total(n, places), s) for n, s in zip(names, spans, strict=True)]
        )
        misses = far > 0
        for k in range(-1, len(limits)):
            others = misses.sum(0) - (misses[k] if k >= 0 else 0)
            fits = np.flatnonzero(others == 0) if k >= 0 else np.arange(len(places))
            if not len(fits):
                continue
            by = far.sum(0) if k < 0 else far[k]
            i = int(fits[np.argmin(by[fits])])
            if k not in best or by[i] < best[k][0]:
                best[k] = float(by[i]), part, int(places[i])
    alone = [k for k in best if k >= 0] or [k for k in best if k < 0]
    return [
        Nearest(
            limit=limits[k] if k >= 0 else None,
            costs={
                n: COSTS[n].value(best[k][1].total(n, np.array([best[k][2]]))[0], at) for n in names
            },
            fields=_fields_of(all_families, space, best[k][1], best[k][2]),
            outside=best[k][0],
        )
        for k in sorted(alone, key=lambda k: best[k][0])
    ]


def _outside(values: Ints, span: tuple[int | None, int | None]) -> np.ndarray:
    low, high = span
    amounts = values.astype(float)
    far = np.zeros(len(amounts))
    if low is not None:
        far = np.maximum(far, (low - amounts) / max(low, 1))
    if high is not None:
        far = np.maximum(far, (amounts - high) / max(high, 1))
    return far


def _fields_of(
    all_families: Sequence[Mapping[str, Any]], space: Space, part: _Part, place: int
) -> dict[str, Any]:
    sizes = {name: int(part.column(name)[place]) for name in (*HEADS, "dim")}
    depth, ffn = int(part.chunk.depth[place]), int(part.ffn[place])
    return shape_fields(all_families[part.family], sizes, depth, ffn, space.solved)
