"""`plan`: limits and fields -> every shape that meets them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from headwise.errors import UsageError, nearest, shown
from headwise.planning.costs import COSTS, MEASURED, At
from headwise.planning.fields import KINDS, RATIOS
from headwise.planning.limits import Limit, limit_of
from headwise.planning.pareto import front
from headwise.planning.result import HEADINGS, SIZES, Plan
from headwise.planning.search import SOLVABLE, Found, nearest_ones, search
from headwise.planning.space import Space, space_of
from headwise.planning.units import LONGEST, NUMBER
from headwise.shape import Shape
from headwise.shape.names import field_of

TOLERANCE = Fraction(1, 100)
PARETO = ("params", "kv_bytes_per_token", "train_flops_per_token", "activation_bytes")
MORE = ("decode_flops", "prefill_flops")  # where limits leave fewer than two of these free


def plan(
    like: Shape | str | Path | Mapping[str, Any] | None = None,
    *,
    keep: str | Sequence[str] = (),
    context: int = 2048,
    batch: int = 1,
    dtype: str = "bf16",
    tolerance: float | str = 0.01,
    multiple: int = 64,
    sort: str = "",
    pareto: str | Sequence[str] = (),
    columns: str | Sequence[str] | None = None,
    fields: Mapping[str, Any] | None = None,
    **given: Any,
) -> Plan:
    """Every shape that meets limits on its costs, with exact costs.

    Limits are named as the columns (params, active_params, train_flops_per_token, prefill_flops,
    decode_flops, kv_bytes_per_token, kv_bytes_at_context, activation_bytes, weight_bytes) and
    written as 350M, <=350M, 300M..400M or, of the model in `like`, -50% and same. All other names
    are fields of `Shape` with a value, choices or a range. `fields` takes those whose names are no
    words, such as dim/depth.

    >>> found = plan(params="30M", kv_bytes_per_token="<=8KiB", vocab_size=4096, head_dim=64)
    >>> row = found.rows[0]
    >>> row.shape.params == row.costs["params"], abs(row.shape.params / 30e6 - 1) <= 0.01
    (True, True)
    """
    at = At(context=context, batch=batch, dtype=dtype)
    start = _shape_of(like)
    limits_given, fields_given = _sorted_out({**(fields or {}), **given})
    for name in _names("keep", keep, COSTS):
        if name in limits_given:
            raise UsageError(f"{name} is kept and limited at once: give one of them")
        limits_given[name] = "same"
    limits = tuple(
        _limit(name, text, start, at, _tolerance(tolerance)) for name, text in limits_given.items()
    )
    if not isinstance(multiple, int) or isinstance(multiple, bool) or not 1 <= multiple <= 2**20:
        raise UsageError(f"multiple must be a whole number of at least 1, got {shown(multiple)}")
    space = space_of(
        fields_given,
        start,
        largest=_least(limit.high for limit in limits if limit.cost in ("params", "active_params")),
        smallest=_least(limit.low for limit in limits if limit.cost == "params"),
        solvable=any(limit.cost in SOLVABLE for limit in limits),
        multiple=multiple,
    )
    found = search(space, limits, at, tuple(COSTS))
    return _plan_of(space, at, limits, found, sort, pareto, columns)


def _plan_of(
    space: Space,
    at: At,
    limits: tuple[Limit, ...],
    found: Found,
    sort: str,
    pareto: str | Sequence[str],
    columns: str | Sequence[str] | None,
) -> Plan:
    pinned = {limit.cost for limit in limits if limit.low is not None and limit.high is not None}
    chosen = _names("pareto", pareto, COSTS) or _free_costs(pinned, found)
    marks = front([found.totals[name] for name in chosen])
    order, sorted_by = _order(space, found, marks, sort, chosen)
    like = space.like
    relax = () if len(found) or not limits else tuple(nearest_ones(space, limits, at))
    made = Plan(
        space=space,
        at=at,
        limits=limits,
        found=found,
        order=order,
        marks=marks,
        pareto_costs=tuple(chosen),
        sorted_by=sorted_by,
        columns=_columns(space, limits, chosen, found),
        relax=relax,
        like_costs={}
        if like is None
        else {name: c.of(like, at) for name, c in COSTS.items() if not c.missing(like, at)},
    )
    if columns is None:
        return made
    names = columns.split(",") if isinstance(columns, str) else columns
    return _with_columns(made, names)


def _with_columns(made: Plan, names: Iterable[str]) -> Plan:
    return dataclasses.replace(made, columns=made.column_names([n.strip() for n in names]))


# ---- what was given


def _shape_of(like: Any) -> Shape | None:
    if like is None or isinstance(like, Shape):
        return like
    return Shape.from_hf(like)


def _sorted_out(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Limits and fields of what was given; None is not given."""
    limits, fields = {}, {}
    for name, value in given.items():
        if value is None:
            continue
        if name in COSTS:
            limits[name] = value
        elif name in RATIOS or field_of(name) in KINDS:
            fields[name] = value
        elif name in MEASURED:
            raise UsageError(f"{name} is measured: give it to Plan.measure or with --measure")
        else:
            known = {*COSTS, *KINDS, *RATIOS}
            raise UsageError(f"unknown limit or field {shown(name)}; {nearest(name, known)}")
    return limits, fields


def _names(what: str, given: str | Sequence[str], known: Iterable[str]) -> list[str]:
    names = [n.strip() for n in given.split(",")] if isinstance(given, str) else list(given)
    names = [name for name in names if name]
    for name in names:
        if name not in known:
            raise UsageError(f"unknown cost {shown(name)} of {what}; {nearest(str(name), known)}")
    return list(dict.fromkeys(names))


def _tolerance(given: float | str) -> Fraction:
    text = str(given).strip()
    number = text.removesuffix("%").strip()
    value = Fraction(-1)
    if re.fullmatch(NUMBER, number) and len(number) <= LONGEST:
        value = Fraction(number) / (100 if text.endswith("%") else 1)
    if not 0 <= value < 1:
        raise UsageError(
            f"tolerance must be a share such as 0.01 or 1%, from 0 to below 1, got {shown(given)}"
        )
    return value


def _limit(name: str, text: Any, like: Shape | None, at: At, tolerance: Fraction) -> Limit:
    cost = COSTS[name]
    base = None
    if like is not None:
        base = Fraction(cost.of(like, at)).limit_denominator(10**6)
    return limit_of(
        name, text, kind=cost.kind, tolerance=tolerance, base=base, flag=cost.flag.lstrip("-")
    )


def _least(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return min(known) if known else None


# ---- order


def _free_costs(pinned: set[str], found: Found) -> list[str]:
    """The costs of the Pareto front unless chosen: the usual ones that no limit holds in place."""

    def known(name: str) -> bool:
        return not len(found) or int(found.totals[name].min()) >= 0

    free = [name for name in PARETO if name not in pinned and known(name)]
    more = [name for name in (*MORE, "weight_bytes") if name not in pinned and known(name)]
    return free + more[: max(0, 2 - len(free))]


def _order(
    space: Space, found: Found, marks: np.ndarray, sort: str, pareto: Sequence[str]
) -> tuple[np.ndarray, str]:
    """The places of rows in order, and what that order is."""
    if not sort:
        if space.like is not None:
            return np.argsort(_distance(space, found), kind="stable"), "nearness to the model"
        keys = [found.totals[pareto[0]], ~marks]
        return np.lexsort([_ranks(key) for key in keys]), f"Pareto first, then {pareto[0]}"
    keys = []
    for part in sort.split(","):
        name, down = part.strip().removeprefix("-"), part.strip().startswith("-")
        known = (*COSTS, *SIZES, space.solved, "pareto", "near")
        if name not in known:
            raise UsageError(f"unknown column {shown(name)} to sort by; {nearest(name, known)}")
        key = _key(space, found, marks, name)
        keys.append(-key if down else key)
    return np.lexsort([_ranks(key) for key in reversed(keys)]), sort


def _key(space: Space, found: Found, marks: np.ndarray, name: str) -> np.ndarray:
    if name == "pareto":
        return (~marks).astype(np.int64)
    if name == "near":
        return _distance(space, found)
    return found.totals[name] if name in found.totals else found.sizes[_size(space, name)]


def _size(space: Space, name: str) -> str:
    return "ffn" if name == space.solved else name


def _ranks(key: np.ndarray) -> np.ndarray:
    """The same order in 64 bits."""
    return np.unique(key, return_inverse=True)[1].reshape(-1)


def _distance(space: Space, found: Found) -> np.ndarray:
    """How far the sizes of rows are from the model's: factors, as sums of logarithms."""
    like, far = space.like, np.zeros(len(found))
    if like is None:
        raise UsageError("near sorts by nearness to a model: give --like config.json")
    for name in (*SIZES, space.solved):
        own = getattr(like, name)
        if own:
            values = found.sizes[_size(space, name)].astype(float)
            far += np.abs(np.log(np.maximum(values, 1) / own))
    return far


def _columns(
    space: Space, limits: Sequence[Limit], pareto: Sequence[str], found: Found
) -> tuple[str, ...]:
    """The columns of the table unless chosen: sizes, costs with a limit, costs of the front."""
    sizes = ["dim", "depth", "num_heads", "num_kv_heads", "head_dim"]
    for name in ("v_head_dim", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"):
        column, rank = found.sizes[name], found.sizes["head_dim"]
        usual = rank if name in ("v_head_dim", "qk_rope_head_dim") else np.zeros_like(rank)
        if len(column) and bool((column != usual).any()):
            sizes.append(name)
    sizes.append(space.solved)
    free = [n for n in space.choices if n in HEADINGS and n not in sizes and space.values(n)]
    costs = dict.fromkeys([*(limit.cost for limit in limits), "params", *pareto])
    known = [n for n in costs if not len(found) or int(found.totals[n].max()) >= 0]
    fixed = [n for n in free if len(space.values(n)) > 1]
    return ("number", *sizes, *(n for n in fixed if n not in SIZES), *known, "pareto")
