"""What joins the scores of an attention call beside queries and keys: who sees whom, what is added,
and what takes weight without a value.

`Terms` holds all of it for one call; `Terms.table` is the one mask that it comes to, for all
queries or for a block of them.

Axes: B batch, H heads, Q queries, N keys. Every axis of a table may be 1 where all rows are alike.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Terms(NamedTuple):
    """Of one call. Query i stands at key i + offset."""

    queries: int
    keys: int
    causal: bool = False
    window: int = 0
    offset: int = 0
    mask: Tensor | None = None  # four axes, bool (true where seen) or floating (added)
    query_documents: Tensor | None = None  # (B or 1, Q)
    key_documents: Tensor | None = None  # (B or 1, N)
    alibi: Tensor | None = None  # (H,) slopes
    softcap: float = 0.0
    sinks: Tensor | None = None  # (H,) logits
    dropout: float = 0.0
    hides: bool = False  # whether some query may see nothing

    def table(self, device: torch.device, block: tuple[int, int, int, int] | None = None) -> Table:
        """Everything that hides a key or adds to a score, joined: bool (true where seen), floating
        (added), or None; `block` is (first query, last, first key, last), all of them unless given.
        """
        start, stop, first, last = block or (0, self.queries, 0, self.keys)
        seen = added = None
        # The logical and of all that hides; the sum of all that is added, in float32 at least.
        if self.causal or self.window or self.alibi is not None:
            at_Q = torch.arange(self.offset + start, self.offset + stop, device=device)
            at_Q1 = at_Q.unsqueeze(1)
            at_N = torch.arange(first, last, device=device)
            if self.causal:
                seen = at_N <= at_Q1
            if self.window:
                seen = _both(seen, (at_Q1 - at_N).abs() < self.window)
            if self.alibi is not None:
                slopes_H11 = _exact(self.alibi).view(-1, 1, 1)
                added = (slopes_H11 * (at_N - at_Q1)).unsqueeze(0)
        if self.query_documents is not None and self.key_documents is not None:
            of_queries = self.query_documents[:, None, start:stop, None]
            seen = _both(seen, of_queries == self.key_documents[:, None, None, first:last])
        if self.mask is not None:
            mask = cut(self.mask, start, stop, first, last)
            if mask.dtype == torch.bool:
                seen = _both(seen, mask)
            else:
                added = mask if added is None else added + mask
        if added is None or seen is None:
            return seen if added is None else added
        return torch.where(seen, added, -math.inf)


Table = Tensor | None


def mask_of(
    queries: int, keys: int, causal: bool, window: int, device: torch.device | str = "cpu"
) -> Table:
    """Which query sees which key, (Q, N), true where seen; None when every query sees every key.

    The last query stands at the last key. A window of w keeps |i - j| < w.

    >>> mask_of(2, 3, causal=True, window=2).int().tolist()
    [[1, 1, 0], [0, 1, 1]]
    """
    if not causal and not 0 < window < keys:
        return None
    return Terms(queries, keys, causal, window, keys - queries).table(torch.device(device))


def cut(mask: Tensor, start: int, stop: int, first: int, last: int) -> Tensor:
    """Queries [start, stop) and keys [first, last) of a mask; an axis of 1 serves them all."""
    if mask.shape[-2] != 1:
        mask = mask[..., start:stop, :]
    return mask if mask.shape[-1] == 1 else mask[..., first:last]


def opened(table: Tensor) -> tuple[Tensor, Tensor]:
    """The table with queries that see nothing let see everything, and which those are (.., Q, 1).

    The softmax of a row of nothing is NaN, and so are its gradients. Such a row is computed as if
    it saw all keys, and its answer is put to zero.
    """
    if table.dtype == torch.bool:
        blind = ~table.any(-1, keepdim=True)
        return table | blind, blind
    blind = (table == -math.inf).all(-1, keepdim=True)
    return table.masked_fill(blind, 0.0), blind


def _both(seen: Table, other: Tensor) -> Tensor:
    return other if seen is None else seen & other


def _exact(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()
