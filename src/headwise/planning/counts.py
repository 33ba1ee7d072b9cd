"""Exact costs of candidates, in columns: straight lines in every size, asked of `Shape` at a few.

A stack is its ends and its layers, and layers of one window cost the same:

    cost = ends + sum over windows w of layers_w * layer_w,    each a + b * feed-forward

`ends` and `layer_w` come from shapes of one and two layers. Where layers differ by more than their
window the depth is a family of its own, and the cost is all ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.errors import UsageError
from headwise.planning.costs import COSTS, At
from headwise.planning.grid import HEADS, Chunk, Columns
from headwise.planning.straight import LARGEST, Ints, Lines, fitted
from headwise.shape import Shape

FFN = 64, 65  # feed-forwards at which a cost is asked


def shape_fields(
    family: Mapping[str, Any], sizes: Mapping[str, int], depth: int, ffn: int, solved: str
) -> dict[str, Any]:
    """The keyword arguments of one candidate's shape; windows tile the layers."""
    windows = tuple(family.get("windows", (0,)))[:depth]
    own = {**family, **sizes, "depth": depth, solved: ffn, "windows": windows}
    return {name: value for name, value in own.items() if value is not None}


@dataclass(frozen=True)
class Straight:
    """Coefficients of the rows of a chunk: for each cost and window, ends and layer at feed-forward
    0 and their slopes."""

    ends: dict[str, tuple[Ints, Ints]]
    layers: dict[str, list[tuple[Ints, Ints]]]


class Counter:
    """Costs of one family's candidates."""

    def __init__(
        self, family: Mapping[str, Any], solved: str, at: At, names: Sequence[str]
    ) -> None:
        self.family, self.solved, self.at, self.names = family, solved, at, tuple(names)
        pattern = tuple(family.get("windows", (0,)))
        self.pattern = pattern
        self.windows = tuple(dict.fromkeys(pattern))
        self.depths = (1, 2)
        if family.get("layers"):  # all of the stack is its ends
            self.windows, self.depths = (0,), ()
        self._lines: dict[tuple[Any, ...], Lines | None] = {}

    # ---- a chunk

    def straight(self, rows: Columns, without_ffn: bool = False) -> Straight | None:
        """The coefficients of rows; None where costs are no straight lines there."""
        count = len(rows["dim"])
        signs = _signature(rows)
        parts = len(self.windows) * 4
        table = np.zeros((len(self.names) * parts, count), object)
        small = True
        for key in np.unique(signs).tolist():
            chosen = np.flatnonzero(signs == key)
            group = {name: column[chosen] for name, column in rows.items()}
            lines, points = self._fit(group, without_ffn)
            if lines is None:
                return None
            values = lines.at({name: group[name] for name in points}, len(chosen))
            small &= all(value.dtype != object for value in values)
            for k, value in enumerate(values):
                table[k, chosen] = value
        if small:
            table = table.astype(np.int64)
        ends, layers = {}, {}
        for k, name in enumerate(self.names):
            own = table[k * parts : (k + 1) * parts]
            ends[name] = own[0], own[1]
            layers[name] = [(own[4 * i + 2], own[4 * i + 3]) for i in range(len(self.windows))]
        return Straight(ends, layers)

    def line(self, straight: Straight, name: str, row: Ints, depth: Ints) -> tuple[Ints, Ints]:
        """A total as a line over the feed-forward: its value at 0, and its slope."""
        a, b = (part[row] for part in straight.ends[name])
        most = float(depth.max(initial=0))
        for window, (value, slope) in zip(self.windows, straight.layers[name], strict=True):
            if max(_largest(value), _largest(slope)) * most > LARGEST:
                value, slope = value.astype(object), slope.astype(object)
            layers = self._layers_of(window, depth)
            a, b = a + value[row] * layers, b + slope[row] * layers
        return a, b

    def totals(self, line: tuple[Ints, Ints], ffn: Ints) -> Ints:
        """Totals at feed-forwards."""
        a, b = line
        if _largest(b) * float(ffn.max(initial=0)) + _largest(a) > LARGEST:
            a, b = a.astype(object), b.astype(object)
        return a + b * ffn

    def asked(self, shapes: Sequence[Shape], name: str) -> Ints:
        """The same of shapes that were made one by one, where costs are not straight."""
        found = [COSTS[name].total(shape, self.at) for shape in shapes]
        return np.array(found, object if max(found, default=0) > LARGEST else np.int64)

    def shapes(self, chunk: Chunk, ffn: Ints) -> list[Shape | None]:
        """Every candidate of a chunk as a shape; None where it is none."""
        rows = {name: column.tolist() for name, column in chunk.rows.items()}
        found: list[Shape | None] = []
        places = zip(chunk.row.tolist(), chunk.depth.tolist(), ffn.tolist(), strict=True)
        for i, depth, width in places:
            sizes = {name: rows[name][i] for name in (*HEADS, "dim")}
            try:
                found.append(Shape.of(shape_fields(self.family, sizes, depth, width, self.solved)))
            except UsageError:
                found.append(None)
        return found

    def _layers_of(self, window: int, depth: Ints) -> Ints:
        """How many layers of a stack have a window."""
        if not self.depths:
            return np.zeros_like(depth)
        period, count = len(self.pattern), np.zeros_like(depth)
        for place, own in enumerate(self.pattern):
            if own == window:
                count += np.maximum(0, -(-(depth - place) // period))
        return count

    # ---- the fit

    def _fit(self, group: Columns, without_ffn: bool) -> tuple[Lines | None, tuple[str, ...]]:
        """The lines of the rows that bend at the same places, and their sizes."""
        first = {name: int(column[0]) for name, column in group.items()}
        key = *_bends(first), without_ffn
        points, tied = self._points(first)
        if key not in self._lines:
            try:
                lines = fitted(lambda p: self._parts(p, tied, without_ffn), points)
            except UsageError:  # sizes of single layers may not go with small ones of the others
                lines = None
            self._lines[key] = lines
        return self._lines[key], tuple(points)

    def _points(
        self, first: Mapping[str, int]
    ) -> tuple[dict[str, tuple[int, int]], Mapping[str, str | int]]:
        """Two values of each size that is free, and what the other sizes equal: each holds every
        rule of Shape, also some steps further out."""
        H, KV, R, V, C, Q, P = (first[name] for name in HEADS)
        unit = max(1, math.lcm(self.family.get("average", 1), self.family.get("o_groups", 1)))
        start = 64 + int(self.family.get("position_dim", 0))
        points = {"dim": (start, start + 1)}
        tied: dict[str, str | int] = {}
        if H == 1:
            tied |= {"num_heads": 1, "num_kv_heads": 1}
        elif KV == H:
            points["num_heads"] = 2 * unit, 4 * unit
            tied["num_kv_heads"] = "num_heads"
        else:
            points |= {"num_heads": (4 * unit, 8 * unit), "num_kv_heads": (1, 2)}
        points["head_dim"] = (10, 12) if R > V else (6, 8)
        if R == V:
            tied["v_head_dim"] = "head_dim"
        else:
            points["v_head_dim"] = (6, 8) if R > V else (10, 12)
        for name, value in (("kv_lora_rank", C), ("q_lora_rank", Q)):
            if value:
                points[name] = 1, 2
            else:
                tied[name] = 0
        if P in (0, R):
            tied["qk_rope_head_dim"] = "head_dim" if P else 0
        else:
            points["qk_rope_head_dim"] = 2, 4
        return points, tied

    def _parts(
        self, point: Mapping[str, int], tied: Mapping[str, str | int], without_ffn: bool
    ) -> list[int]:
        """For each cost and window: ends, their slope over the feed-forward, layer, its slope."""
        sizes = dict(point)
        for name, what in tied.items():
            sizes[name] = sizes[what] if isinstance(what, str) else what
        widths = (0, 0) if without_ffn else FFN
        shapes = {}
        if not self.depths:
            return self._whole(sizes, widths)
        for window in self.windows:
            for depth in self.depths:
                for ffn in set(widths):
                    fields = shape_fields(self.family, sizes, depth, ffn, self.solved)
                    fields["windows"] = (window,)
                    shapes[window, depth, ffn] = Shape.of(fields)
        found = []
        for name in self.names:
            total = COSTS[name].total
            for window in self.windows:
                one, two = (
                    [total(shapes[window, depth, ffn], self.at) for ffn in widths]
                    for depth in (1, 2)
                )
                layer = [b - a for a, b in zip(one, two, strict=True)]
                ends = [a - c for a, c in zip(one, layer, strict=True)]
                for low, high in (ends, layer):
                    slope = high - low
                    found += [low - slope * widths[0], slope]
        return found

    def _whole(self, sizes: Mapping[str, int], widths: Sequence[int]) -> list[int]:
        """The same of a stack that is all ends."""
        depth = self.family["depth"]
        low, high = (
            Shape.of(shape_fields(self.family, sizes, depth, ffn, self.solved)) for ffn in widths
        )
        found = []
        for name in self.names:
            a, b = (COSTS[name].total(shape, self.at) for shape in (low, high))
            found += [a - (b - a) * widths[0], b - a, 0, 0]
        return found


def _largest(values: Ints) -> float:
    return float(max(abs(values.max()), abs(values.min()))) if len(values) else 0.0


def _bends(sizes: Mapping[str, Any]) -> tuple[Any, ...]:
    """On which side of each bend of the costs some sizes lie; of columns as well."""
    H, KV, R, V, C, Q, P = (sizes[name] for name in HEADS)
    return H == 1, KV == H, R == V, R > V, C > 0, Q > 0, P == 0, P == R


def _signature(rows: Columns) -> Ints:
    """The sides of all bends as one number."""
    signs = np.zeros(len(rows["dim"]), np.int64)
    for place, bend in enumerate(_bends(rows)):
        signs += bend.astype(np.int64) << place
    return signs
