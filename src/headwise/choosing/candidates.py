"""Limits -> shapes: what is raced when no shapes are given.

One width, several depths, numbers of heads and ranks; what the heads do not use goes into the
feed-forward, so that every shape has the same number of parameters, as in the budget map.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from headwise.choosing.trainings import OnText, Training, decoder
from headwise.errors import UsageError
from headwise.experiments.points import plural
from headwise.experiments.shapes import shape_for
from headwise.shape import Shape

T = TypeVar("T")
ASPECT = 32  # width per layer of the shape in the middle
LEAST_RANK = 4
MOST = 12  # shapes that are raced unless more are asked for


def candidates(
    training: Training,
    params: int,
    *,
    dim: int | None = None,
    depths: Sequence[int] = (),
    heads: Sequence[int] = (),
    ranks: Sequence[int] = (),
    most: int = MOST,
) -> tuple[Shape, ...]:
    """Shapes of `params` parameters, to the nearest whole feed-forward, for a task or text.

    Unless they are said: the width whose layers have four widths of feed-forward, half as many
    layers, as many and twice as many, and heads that share the width between them.
    """
    if params < 1:
        raise UsageError(f"params must be at least 1, got {params}")
    middle = _layers(params)
    depths = depths or sorted({max(1, middle // 2), middle, 2 * middle})
    # Where tables of tokens take most of the parameters, a smaller width leaves some for layers.
    wanted = dim or max(8, round(math.sqrt(params / (12 * middle)) / 8) * 8)
    widths = [wanted] if dim else range(wanted, 7, -8)
    for width in widths:
        build, pairs = _builder(training, width), _pairs(width, heads, ranks)
        found = [
            shape
            for depth in depths
            for h, r in pairs
            if (shape := _at(build, params, width, depth, h, r)) is not None
        ]
        if len(found) > 1:
            return tuple(spread(found, most))
    raise UsageError(
        f"fewer than two shapes of {params:,} parameters, width {wanted}, {_words(depths)} layers "
        "leave a quarter of the width for the feed-forward; give another dim, depths, heads or "
        "ranks"
    )


def _pairs(dim: int, heads: Sequence[int], ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Heads and ranks: those that are said, or such that the heads share the width."""
    powers = [1 << i for i in range(12)]
    if heads and ranks:
        found = [(h, r) for h in heads for r in ranks]
    elif heads:
        found = [(h, max(1, dim // h)) for h in heads]
    elif ranks:
        found = [(h, r) for h in powers for r in ranks if h * r <= 2 * dim]
    else:
        found = [(h, dim // h) for h in powers if dim % h == 0 and dim // h >= LEAST_RANK]
    return list(dict.fromkeys(found))


def designs(
    training: Training,
    sizes: Sequence[int],
    *,
    depths: Sequence[int] = (),
    heads: Sequence[int] = (),
    most: int = MOST,
) -> dict[int, dict[str, Shape]]:
    """For every size the shapes of the same numbers of layers and heads, by name; the last size is
    the one whose width sets the depths. Designs that cannot be built at some size are left out."""
    middle = _layers(sizes[-1])
    depths = depths or sorted({max(1, middle // 2), middle, 2 * middle})
    found: dict[int, dict[str, Shape]] = {}
    for size in sizes:
        centre = depths[len(depths) // 2]
        dim = max(8, round(math.sqrt(size / (12 * centre)) / 8) * 8)
        build = _builder(training, dim)
        found[size] = {
            f"{plural(h, 'head')} in {plural(depth, 'layer')}": shape
            for depth in depths
            for h in heads or (1, 2, 4, 8)
            if dim % h == 0 and dim // h >= 2
            if (shape := _at(build, size, dim, depth, h, dim // h)) is not None
        }
    everywhere = [n for n in found[sizes[-1]] if all(n in found[size] for size in sizes)]
    if len(everywhere) < 2:
        raise UsageError(
            f"{plural(len(everywhere), 'design')} can be built at all of "
            f"{', '.join(f'{size:,}' for size in sizes)} parameters; give other depths or heads"
        )
    chosen = spread(everywhere, most)
    return {size: {name: found[size][name] for name in chosen} for size in sizes}


def _layers(params: int) -> int:
    """Layers of a shape of this size whose width is so many times them."""
    return max(1, round((params / (12 * ASPECT**2)) ** (1 / 3)))


def _words(values: Sequence[int]) -> str:
    return " or ".join(map(str, values))


def _builder(training: Training, dim: int) -> Callable[..., Shape]:
    """depth, heads, rank, feed-forward -> a shape of this width."""
    if isinstance(training, OnText):
        tokenizer = training.pretraining.tokenizer
        return lambda depth, h, r, f: decoder(
            tokenizer, dim=dim, depth=depth, heads=h, rank=r, ffn_dim=f
        )
    return lambda depth, h, r, f: shape_for(training.task, dim, depth, h, r, f)


def _at(
    build: Callable[..., Shape], params: int, dim: int, depth: int, heads: int, rank: int
) -> Shape | None:
    """The shape whose feed-forward brings it nearest to the budget; None: nothing worth the name is
    left for it."""
    narrow = build(depth, heads, rank, 1)
    step = narrow.replace(ffn_dim=2).params - narrow.params
    ffn_dim = round(1 + (params - narrow.params) / step)
    return build(depth, heads, rank, ffn_dim) if ffn_dim >= max(1, dim // 4) else None


def spread(found: list[T], most: int) -> list[T]:
    """At most so many of them, evenly over the list."""
    if most < 2:
        raise UsageError(f"at least 2 shapes can be compared, got {most}")
    if len(found) <= most:
        return found
    return [found[round(i * (len(found) - 1) / (most - 1))] for i in range(most)]
