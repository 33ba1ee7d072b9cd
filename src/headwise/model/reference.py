"""Attention as the formula says, scores written out: what every kernel is compared with, and what
computes a call that no kernel takes.

Axes: B batch, H heads, Q queries, N keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BLOCK_BYTES = 256 << 20  # more scores than this are computed in blocks of queries


def mask_of(
    queries: int, keys: int, causal: bool, window: int, device: torch.device | str = "cpu"
) -> Tensor | None:
    """Which query sees which key, (Q, N), true where seen; None when every query sees every key.

    The last query stands at the last key. A window of w keeps |i - j| < w.

    >>> mask_of(2, 3, causal=True, window=2).int().tolist()
    [[1, 1, 0], [0, 1, 1]]
    """
    if not causal and not 0 < window < keys:
        return None
    # Positions are those of keys; queries take the last ones.
    at_Q1 = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    at_N = torch.arange(keys, device=device)
    if causal:
        seen_QN = at_N <= at_Q1
    else:
        seen_QN = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return seen_QN & ((at_Q1 - at_N).abs() < window) if window else seen_QN


def weights_of(scores_BHQN: Tensor, seen_QN: Tensor | None, hard: bool) -> Tensor:
    """Scores to attention weights: softmax, or (hard) all weight on the first largest score."""
    if seen_QN is not None:
        scores_BHQN = scores_BHQN.masked_fill(~seen_QN, -math.inf)
    if hard:
        best_BHQ1 = scores_BHQN.argmax(-1, keepdim=True)
        return torch.zeros_like(scores_BHQN).scatter_(-1, best_BHQ1, 1.0)
    return scores_BHQN.softmax(-1)


def repeat_kv(x: Tensor, heads: int) -> Tensor:
    """Keys or values (batch, kv heads, keys, width) once for every query head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen_QN: Tensor | None = None, hard: bool = False
) -> Tensor:
    """softmax(scale q k^T) v with the scores written out; operands as in `attend`."""
    k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    return weights_of(q @ k.mT * scale, seen_QN, hard).to(v.dtype) @ v


def blocked(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int, hard: bool
) -> Tensor:
    """`plain`, a block of queries at a time: at most BLOCK_BYTES of scores exist at once.

    A block reads only the keys that some query of it sees. The backward pass computes the scores
    of a block again instead of keeping them.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    offset = keys - queries  # query i stands at key i + offset

    def attend_block(start: int, stop: int) -> Tensor:
        # The keys [first, last) that some query of the block sees; the mask only decides among
        # those.
        first = 0
        last = offset + stop if causal else keys
        if window:
            first = max(0, offset + start - window + 1)
        if window and not causal:
            last = min(keys, offset + stop + window - 1)
        at_Q1 = torch.arange(offset + start, offset + stop, device=q.device).unsqueeze(1)
        at_N = torch.arange(first, last, device=q.device)
        seen = at_N <= at_Q1 if causal else None
        if window:
            near = (at_Q1 - at_N).abs() < window
            seen = near if seen is None else seen & near
        k_block, v_block = k[..., first:last, :], v[..., first:last, :]
        return plain(q[..., start:stop, :], k_block, v_block, scale, seen, hard)

    return in_query_blocks(attend_block, q, keys)


def in_query_blocks(attend_block: Callable[[int, int], Tensor], q: Tensor, keys: int) -> Tensor:
    """attend_block(start, stop) for blocks of queries, joined: at most BLOCK_BYTES of scores exist
    at once, and the backward pass computes a block's scores again."""
    # As many queries at once as fit, at four bytes per score or more.
    batch, heads, queries, _ = q.shape
    query_bytes = batch * heads * keys * max(4, q.dtype.itemsize)
    block = max(1, BLOCK_BYTES // query_bytes)
    outputs = [
        checkpoint(attend_block, start, min(start + block, queries), use_reentrant=False)
        for start in range(0, queries, block)
    ]
    return torch.cat(outputs, -2)
