"""How exact `attend` is beside PyTorch's own attention, both against float64: a grid of masks,
types, dropout, sizes of scores, lengths and backends.

    python -m benchmarks.attention_errors            # the whole grid, a minute or two of one core
    python -m benchmarks.attention_errors --sample 40

A cell's figure is our root mean square error over PyTorch's, of the answer and of the gradients of
queries, keys and values. `tests/model/test_attend_half.py` holds a sample of it to 1.5.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.errors import UsageError
from headwise.model.dispatch import attend

MASKS = ("none", "causal", "window", "padding", "blind", "documents", "added", "head bias", "both")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DROPOUT = (0.0, 0.3)
SIZES = (1.0, 4.0)  # of queries and keys: even weights, and peaked ones
LENGTHS = ((1, 37), (37, 37), (101, 131), (131, 101), (7, 7))
BACKENDS = ("auto", "flash", "plain", "blocked", "wide", "short")
BATCH, HEADS, KV, RANK = 2, 6, 2, 19


class Cell(NamedTuple):
    """One place of the grid."""

    mask: str
    dtype: torch.dtype
    dropout: float
    size: float
    lengths: tuple[int, int]
    backend: str


def grid() -> list[Cell]:
    """All cells."""
    return [Cell(*c) for c in itertools.product(MASKS, DTYPES, DROPOUT, SIZES, LENGTHS, BACKENDS)]


def sample(count: int, seed: int = 0) -> list[Cell]:
    """Some cells, the same ones every time."""
    return random.Random(seed).sample(grid(), count)


class Ratio(NamedTuple):
    """Our error over PyTorch's, of the answer and of the gradients, and whether we have a NaN where
    PyTorch has none."""

    value: float
    gradient: float
    nan: bool


def measured(cell: Cell) -> Ratio | None:
    """Of one cell; None where the backend does not take the call.

    A handful of queries shows luck, not exactness: such cells are drawn again until a hundred
    queries of each head are seen.
    """
    squares, nans = torch.zeros(2, 2, dtype=torch.float64), [False, False]
    for draw in range(math.ceil(100 / cell.lengths[0])):
        found = _drawn(cell, draw)
        if found is None:
            return None
        for side, (value, gradient, nan) in enumerate(found):
            squares[side] += torch.tensor((value, gradient), dtype=torch.float64)
            nans[side] |= nan
    ours, theirs = squares.sqrt().tolist()
    return Ratio(_over(ours[0], theirs[0]), _over(ours[1], theirs[1]), nans[0] and not nans[1])


def _drawn(cell: Cell, draw: int) -> list[tuple[float, float, bool]] | None:
    """Our errors and PyTorch's on one draw of operands and mask."""
    queries, keys = cell.lengths
    rank = 2 if cell.backend == "short" else RANK
    generator = torch.Generator().manual_seed(hash_of(cell) + draw)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    q = (randn(BATCH, HEADS, queries, rank) * cell.size).to(cell.dtype)
    k = (randn(BATCH, KV, keys, rank) * cell.size).to(cell.dtype)
    v = randn(BATCH, KV, keys, rank).to(cell.dtype)
    options, table = _mask(cell, queries, keys, generator)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, dropout=cell.dropout, backend=cell.backend, **options)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = table if table is None or table.dtype == torch.bool else table.to(q.dtype)
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p=cell.dropout, enable_gqa=True
        )

    try:
        return [_errors(f, q, k, v, table, cell.dropout) for f in (ours, theirs)]
    except UsageError:
        return None


def hash_of(cell: Cell) -> int:
    """A seed for the numbers of a cell, the same for all its backends."""
    return random.Random(str(cell[:-1])).randrange(2**31)


def _over(ours: float, theirs: float) -> float:
    if ours == theirs:
        return 1.0
    return ours / theirs if theirs else math.inf


def _mask(
    cell: Cell, queries: int, keys: int, generator: torch.Generator
) -> tuple[dict[str, Any], Tensor | None]:
    """The options of `attend`, and the same as one table for PyTorch."""
    at, key = torch.arange(keys - queries, keys).unsqueeze(1), torch.arange(keys)
    padding = (torch.rand(BATCH, 1, 1, keys, generator=generator) > 0.3) | (key == 0)
    added = torch.randn(BATCH, 1, queries, keys, generator=generator)
    head_bias = torch.randn(1, HEADS, queries, keys, generator=generator)
    ids = torch.randint(0, 3, (BATCH, queries), generator=generator)
    key_ids = torch.randint(0, 3, (BATCH, keys), generator=generator)
    # Added numbers that every type holds, so that both read the same mask.
    added, head_bias = added.bfloat16().float() / 4, head_bias.bfloat16().float() / 4
    blind = torch.rand(BATCH, 1, queries, keys, generator=generator) > 0.3
    blind[:, :, ::3] = False
    causal = key <= at
    forms: dict[str, tuple[dict[str, Any], Tensor | None]] = {
        "none": ({}, None),
        "causal": ({"causal": True}, causal),
        "window": ({"causal": True, "window": 17}, causal & (at - key < 17)),
        "padding": ({"mask": padding}, padding),
        "blind": ({"mask": blind}, blind),
        "documents": (
            {"documents": (ids, key_ids)},
            (ids.unsqueeze(2) == key_ids.unsqueeze(1)).unsqueeze(1),
        ),
        "added": ({"mask": added}, added),
        "head bias": ({"mask": head_bias}, head_bias),
        "both": (
            {"mask": padding, "causal": True},
            padding & causal,
        ),
    }
    options, table = forms[cell.mask]
    return options, table


def _errors(
    function: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    dropout: float,
) -> tuple[float, float, bool]:
    """Mean square errors of the answer and of the gradients, and whether there is a NaN."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    torch.manual_seed(3)
    y = function(*leaves)
    pattern = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    gradients = torch.autograd.grad(y, leaves, pattern)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    kept = None
    if dropout:  # which weights are kept, from the same seed and values that are unit vectors
        eye = torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1)
        torch.manual_seed(3)
        kept = function(*(0 * t.detach().float() for t in (q, k)), eye) > 0
    expected = _exact(exact, table, kept, dropout)
    expected_gradients = torch.autograd.grad(expected, exact, pattern.double())
    largest = [g.abs().max().item() or 1.0 for g in expected_gradients]
    off = [
        ((a.double() - b) / m).square().mean()
        for a, b, m in zip(gradients, expected_gradients, largest, strict=True)
    ]
    nan = any(bool(t.isnan().any()) for t in (y, *gradients))
    return (y.double() - expected).square().mean().item(), sum(t.item() for t in off), nan


def _exact(
    operands: list[Tensor], table: Tensor | None, kept: Tensor | None, dropout: float
) -> Tensor:
    q, k, v = operands
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if table is not None and table.dtype == torch.bool:
        blind = ~table.any(-1, keepdim=True)
        scores = scores.masked_fill(~(table | blind), -math.inf)
        weights = scores.softmax(-1).masked_fill(blind, 0.0)
    else:
        weights = (scores if table is None else scores + table).softmax(-1)
    if kept is not None:
        weights = weights * kept / (1 - dropout)
    return weights @ v


def main() -> None:
    """Print the worst and the median ratio of every backend and type, and the worst cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=0)
    args = parser.parse_args()
    cells = sample(args.sample) if args.sample else grid()
    found = {cell: ratio for cell in cells if (ratio := measured(cell)) is not None}
    print(f"{len(found)} of {len(cells)} cells are taken; NaN where PyTorch has none: "
          f"{sum(r.nan for r in found.values())}")  # fmt: skip
    for backend, dtype in itertools.product(BACKENDS, DTYPES):
        of = [r for c, r in found.items() if (c.backend, c.dtype) == (backend, dtype)]
        if of:
            values, gradients = sorted(r.value for r in of), sorted(r.gradient for r in of)
            print(
                f"{backend:8} {str(dtype)[6:]:9} {len(of):4} cells  "
                f"answer median {values[len(of) // 2]:.2f} worst {values[-1]:.2f}  "
                f"gradients median {gradients[len(of) // 2]:.2f} worst {gradients[-1]:.2f}"
            )
    above = [(c, r) for c, r in found.items() if max(r.value, r.gradient) > 1.5]
    print(f"above 1.5: {len(above)}")
    for cell, ratio in sorted(above, key=lambda pair: -max(pair[1][:2]))[:20]:
        print(f"  {cell}  {ratio}")


if __name__ == "__main__":
    main()
