"""Attention as the formula says, scores written out: what every kernel is compared with, and what
computes a call that no kernel takes.

Axes: B batch, H heads, Q queries, N keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise.model.masks import Terms, mask_of, opened
from headwise.model.tracing import hooks_allowed, sure, symbolic

__all__ = ["blocked", "in_query_blocks", "mask_of", "plain", "repeat_kv", "weights_of"]

BLOCK_BYTES = 256 << 20  # more scores than this are computed in blocks of queries


def weights_of(
    scores_BHQN: Tensor, mask: Tensor | None, hard: bool, sinks_H: Tensor | None = None
) -> Tensor:
    """Scores to attention weights: softmax, or (hard) all weight on the first largest score. A mask
    is bool (true where seen) or added. A sink is one more score that takes weight."""
    if mask is not None and mask.dtype == torch.bool:
        scores_BHQN = scores_BHQN.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores_BHQN = scores_BHQN + mask
    keys = scores_BHQN.shape[-1]
    if sinks_H is not None:
        sinks_BHQ1 = sinks_H.to(scores_BHQN.dtype).view(-1, 1, 1)
        sinks_BHQ1 = sinks_BHQ1.expand(*scores_BHQN.shape[:-1], 1)
        scores_BHQN = torch.cat((scores_BHQN, sinks_BHQ1), -1)
    if hard and scores_BHQN.shape[-1]:
        best_BHQ1 = scores_BHQN.argmax(-1, keepdim=True)
        weights_BHQN = torch.zeros_like(scores_BHQN).scatter_(-1, best_BHQ1, 1.0)
    else:
        weights_BHQN = scores_BHQN.softmax(-1)
    return weights_BHQN if sinks_H is None else weights_BHQN[..., :keys]


def repeat_kv(x: Tensor, heads: int) -> Tensor:
    """Keys or values (batch, kv heads, keys, width) once for every query head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, hard: bool = False
) -> Tensor:
    """softmax(scale q k^T) v with the scores written out; operands as in `attend`."""
    return with_weights(q, k, v, scale, mask, hard)[0]


def with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None = None,
    hard: bool = False,
    terms: Terms | None = None,
) -> tuple[Tensor, Tensor]:
    """`plain` and the weights (B, H, Q, N) that it gave the values; `terms` has what a mask cannot
    say: softcap, sinks, dropout, and whether some query may see nothing."""
    dtype, heads = v.dtype, q.shape[1]
    # Scores of 16 bits are too coarse, and float16 ends at 65504.
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    k, v = repeat_kv(k, heads), repeat_kv(v, heads)
    scores_BHQN = q @ k.mT * scale
    if terms is None:
        weights_BHQN = weights_of(scores_BHQN, mask, hard).to(v.dtype)
        return (weights_BHQN @ v).to(dtype), weights_BHQN
    if terms.softcap:
        scores_BHQN = terms.softcap * (scores_BHQN / terms.softcap).tanh()
    # A sink takes the weight of a query that sees nothing; without one its answer is put to zero.
    blind = None
    if mask is not None and terms.hides and terms.sinks is None:
        mask, blind = opened(mask)
    weights_BHQN = weights_of(scores_BHQN, mask, hard, terms.sinks).to(v.dtype)
    if blind is not None:
        weights_BHQN = weights_BHQN.masked_fill(blind, 0.0)
    if terms.dropout:
        weights_BHQN = F.dropout(weights_BHQN, terms.dropout)
    return (weights_BHQN @ v).to(dtype), weights_BHQN


def blocked(q: Tensor, k: Tensor, v: Tensor, scale: float, terms: Terms, hard: bool) -> Tensor:
    """`plain`, a block of queries at a time: at most BLOCK_BYTES of scores exist at once.

    A block reads only the keys that some query of it sees. The backward pass computes the scores
    of a block again instead of keeping them.
    """
    queries, keys, offset, window = terms.queries, terms.keys, terms.offset, terms.window

    def attend_block(start: int, stop: int) -> Tensor:
        # The keys [first, last) that some query of the block sees; the mask only decides among
        # those.
        first, last = 0, keys
        if symbolic(queries, keys) and (start, stop) == (0, queries):
            table = terms.table(q.device)
            return with_weights(q, k, v, scale, table, hard, terms)[0]
        if terms.causal:
            last = max(0, min(keys, offset + stop))
        if window:
            first = min(last, max(0, offset + start - window + 1))
            last = max(first, min(last, offset + stop + window - 1))
        table = terms.table(q.device, (start, stop, first, last))
        k_block, v_block = k[..., first:last, :], v[..., first:last, :]
        return with_weights(q[..., start:stop, :], k_block, v_block, scale, table, hard, terms)[0]

    return in_query_blocks(attend_block, q, keys)


def in_query_blocks(attend_block: Callable[[int, int], Tensor], q: Tensor, keys: int) -> Tensor:
    """attend_block(start, stop) for blocks of queries, joined: at most BLOCK_BYTES of scores exist
    at once, and the backward pass computes a block's scores again."""
    # As many queries at once as fit, at four bytes per score or more. A compiled program for any
    # size has one block.
    batch, heads, queries, _ = q.shape
    query_bytes = batch * heads * keys * max(4, q.dtype.itemsize)
    if symbolic(queries, query_bytes) and not sure(queries * query_bytes > BLOCK_BYTES):
        return attend_block(0, queries)
    block = max(1, BLOCK_BYTES // query_bytes)
    spans = [(start, min(start + block, queries)) for start in range(0, queries, block)]
    if not hooks_allowed():
        return torch.cat([attend_block(*span) for span in spans], -2)
    return torch.cat([checkpoint(attend_block, *span, use_reentrant=False) for span in spans], -2)
