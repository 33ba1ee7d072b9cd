"""Sizes that differ by layer: `Layer`, and the one form in which a `Shape` holds them.

A shape's own sizes are those of its most common layer; where any layer has experts, of the most
common one with experts (and its `ffn_dim` is that of the most common dense layer). `Shape.layers`
says what the other layers have instead, cut to the shortest run that tiles the depth. So shapes
whose layers are equal are equal, however they were written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.errors import MOST_LAYERS, MOST_SIZE, UsageError, nearest, shown

Sizes = dict[str, Any]


@dataclass(frozen=True, kw_only=True, repr=False)
class Layer:
    """What one layer has in the place of its shape's own sizes; None is as the shape has it.

    A layer that `reuses_kv` projects no keys and values and keeps no cache: it reads those of the
    last layer before it that makes its own in the same sizes (Gemma 3n, cross-layer attention).

    >>> from headwise.shape import Shape
    >>> wide = Layer(num_heads=4, head_dim=16)
    >>> Shape(dim=64, depth=4, num_heads=8, layers=(Layer(), wide)).layer(1).head_dim
    16
    """

    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    ffn_dim: int | None = None
    shared_kv: bool | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    reuses_kv: bool = False

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if value is not None:
                _check_size(f"{name} of a layer", name, value)
        if not isinstance(self.reuses_kv, bool):
            raise UsageError(f"reuses_kv of a layer must be true or false, got {self.reuses_kv!r}")

    def __repr__(self) -> str:
        return f"Layer({', '.join(f'{name}={value!r}' for name, value in self.plain().items())})"

    def given(self) -> Sizes:
        """The sizes that it has of its own."""
        return {name: value for name in SIZES if (value := getattr(self, name)) is not None}

    def plain(self) -> dict[str, Any]:
        """The same as plain values, with `reuses_kv` where it does."""
        return self.given() | ({"reuses_kv": True} if self.reuses_kv else {})


SIZES = tuple(f.name for f in dataclasses.fields(Layer) if f.name != "reuses_kv")
_FOLLOWING = ("head_dim", "v_head_dim", "num_kv_heads", "ffn_dim")  # from others, unless given
_KV = ("num_kv_heads", "head_dim", "v_head_dim", "shared_kv")  # what one cache must fit


# ---- one form


def settled(own: Sizes, layers: Any, depth: int, dim: int) -> tuple[Sizes, tuple[Layer, ...]]:
    """A shape's own sizes and its layers, in the one form that this module describes.

    `own` are the sizes as they were given: None where they follow from others, and sequences where
    they are listed by layer.
    """
    if not 1 <= depth <= MOST_LAYERS:
        raise UsageError(f"depth must be from 1 to {MOST_LAYERS:,} layers, got {shown(depth)}")
    listed = {name: tuple(v) for name, v in own.items() if isinstance(v, list | tuple)}
    given = _layers(layers, depth)
    for name, values in own.items():
        if name in listed:
            _check_list(name, listed[name], depth)
            if any(getattr(layer, name) is not None for layer in given):
                raise UsageError(f"{name} is given twice: as a list and in layers")
        elif values is not None or name not in _FOLLOWING:
            _check_size(name, name, values)
    single = {name: value for name, value in own.items() if name not in listed}
    # Every layer in full, over the shortest run that holds all patterns, and once more: only then
    # does a shorter run within it hold for the whole depth (Fine and Wilf).
    run = min(depth, math.lcm(len(given) or 1, *map(len, listed.values())))
    rows = []
    for i in range(min(depth, 2 * run)):
        layer = given[i % len(given)] if given else Layer()
        mine = single | {name: values[i % len(values)] for name, values in listed.items()}
        sizes = _derived(mine | layer.given(), dim, f"layer {i}: ")
        rows.append((tuple(sizes.items()), layer.reuses_kv))
    # The most common layer gives the shape its own sizes.
    counts: dict[tuple[tuple[str, Any], ...], int] = {}
    for i, (sizes, _) in enumerate(rows[:run]):
        counts[sizes] = counts.get(sizes, 0) + -(-(depth - i) // run)
    experts = [sizes for sizes in counts if dict(sizes)["num_experts"]]
    dense = [sizes for sizes in counts if not dict(sizes)["num_experts"]]
    base = dict(max(experts or dense, key=counts.__getitem__))  # the first of equals
    if experts and dense:
        base["ffn_dim"] = dict(max(dense, key=counts.__getitem__))["ffn_dim"]
    found = tuple(_difference(dict(sizes), base, reuses) for sizes, reuses in rows)
    return base, () if set(found) == {Layer()} else found[: shortest_run(found)]


def _layers(layers: Any, depth: int) -> tuple[Layer, ...]:
    rule = f"layers must be at most depth ({depth}) values of Layer"
    if not isinstance(layers, list | tuple) or len(layers) > depth:
        raise UsageError(f"{rule}, got {shown(layers)}")
    found = []
    for layer in layers:
        if isinstance(layer, Mapping):
            known = {f.name for f in dataclasses.fields(Layer)}
            for name in layer:
                if name not in known:
                    raise UsageError(f"unknown layer key {shown(name)}; {nearest(name, known)}")
            layer = Layer(**layer)
        if not isinstance(layer, Layer):
            raise UsageError(f"{rule}, got {shown(layer)}")
        found.append(layer)
    return tuple(found)


def _check_list(name: str, values: Sequence[Any], depth: int) -> None:
    if not 1 <= len(values) <= depth:
        raise UsageError(
            f"{name} by layer must be 1 to depth ({depth}) values, which tile the layers, got "
            f"{shown(values)}"
        )
    for value in values:
        _check_size(f"{name} by layer", name, value)


def _check_size(what: str, name: str, value: Any) -> None:
    if name == "shared_kv":
        if not isinstance(value, bool):
            raise UsageError(f"{what} must be true or false, got {shown(value)}")
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{what} must be a whole number, got {shown(value)}")
    if not 0 <= value <= MOST_SIZE:
        raise UsageError(f"{what} must be from 0 to {MOST_SIZE:,}, got {shown(value)}")


def _derived(sizes: Sizes, dim: int, where: str) -> Sizes:
    """One layer's sizes, with those that follow from others."""
    H = sizes["num_heads"]
    if sizes["head_dim"] is None:
        sizes["head_dim"] = derived_head_dim(dim, H, where)
    follows = {"v_head_dim": sizes["head_dim"], "num_kv_heads": H, "ffn_dim": 4 * dim}
    sizes |= {name: value for name, value in follows.items() if sizes[name] is None}
    if not sizes["num_experts"]:
        sizes["num_experts_per_tok"] = 0
    return {name: sizes[name] for name in SIZES}


def derived_head_dim(dim: int, num_heads: int, where: str = "") -> int:
    """The rank of heads that share `dim` evenly."""
    if num_heads < 1:
        raise UsageError(f"{where}num_heads must be at least 1, got {shown(num_heads)}")
    if dim % num_heads:
        raise UsageError(
            f"{where}head_dim must be given when num_heads does not divide dim, got dim "
            f"{shown(dim)}, num_heads {shown(num_heads)}"
        )
    return dim // num_heads


def _difference(sizes: Sizes, base: Sizes, reuses: bool) -> Layer:
    """What a layer has that the base has not; a size that has no effect is as the base's."""
    idle = "ffn_dim" if sizes["num_experts"] else "num_experts_per_tok"
    own = {name: v for name, v in sizes.items() if v != base[name] and name != idle}
    return Layer(**own, reuses_kv=reuses)


def shortest_run(values: Sequence[Any]) -> int:
    """The length of the shortest run that tiles a sequence, the last tile maybe cut off."""
    # border[i] is how long a beginning of values[: i + 1] is also its end (Knuth, Morris, Pratt):
    # in time that grows with the length alone.
    border, length = [0], 0
    for value in values[1:]:
        while length and value != values[length]:
            length = border[length - 1]
        length += value == values[length]
        border.append(length)
    return len(values) - border[-1]


def unread(layers: Sequence[tuple[Sizes, bool]]) -> int | None:
    """The first layer that reuses keys and values which no layer before it makes; None: none.

    Each layer is its sizes in full and whether it reuses keys and values; one layer alone is a view
    of a larger stack and may.
    """
    made = set()
    for i, (sizes, reuses) in enumerate(layers):
        kv = tuple(sizes[name] for name in _KV)
        if not reuses:
            made.add(kv)
        elif kv not in made:
            return i
    return None
