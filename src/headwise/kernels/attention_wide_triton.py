"""Attention of large rank in Triton: both passes.

A head of rank 448 or 1792 does not fit a fused kernel, but its scores are few beside its operands.
So each product of a pass is one launch over all heads, a program makes one tile of the result, and
only tiles that some query sees are made. What follows a product is done at the end of its tile.

    forward    scores         s = q k^T                           float32, of the queries in work
               softmax_rows   p = softmax(scale s), lse           a program per row
               weighted_sums  o = p v
    backward   row_dots       delta = rows of g times rows of o
               score_gradients  ds = scale p (g v^T - delta)      p as kept, or made again
               weighted_sums  dq = ds k
               key_gradients  dk = ds^T q, dv = p^T g             summed over heads that share keys

Temporary memory is about `work` bytes. Where a pass over everything takes more, sequences are cut
into pieces; where one sequence does, its queries (forward) or its keys (backward, with dq added up
in float32). attention_wide_plain.py is the twin without Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.kernels.attention_wide_launch import (
    launch_key_gradients,
    launch_score_gradients,
    launch_scores,
    launch_softmax,
    launch_weighted_sums,
    launches,
    layout_of,
    row_dots,
)
from headwise.kernels.attention_wide_span import TILE, Backward, Span, pieces, straight

# ---- the forward pass


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    p: Tensor | None,
    scale: float,
    span: Span,
    work: int,
) -> None:
    """Write outputs, log sums and, where there is memory for them, weights; operands as in
    `attend_wide`."""
    # Bytes of scores, and of weights that are not kept, for one row of queries over all heads.
    B, H, Q, _ = q.shape
    q, k, v = straight(q), straight(k), straight(v)
    row_bytes = H * span.padded_keys * (4 if p is not None else 4 + q.itemsize)
    most = work // (row_bytes * span.padded_queries)
    # Usually everything fits. Else several sequences at once, or if not even one fits, some of its
    # queries.
    if most >= B:
        _forward(q, k, v, o, lse, p, scale, span)
        return
    rows = Q if most else max(1, work // row_bytes // TILE) * TILE
    for batch in pieces(B, most):
        for first in range(0, Q, rows):
            last = min(first + rows, Q)
            part = batch, slice(None), slice(first, last)
            weights = None if p is None else p[batch, :, first:]
            its = span.part(first, last)
            _forward(q[part], k[batch], v[batch], o[part], lse[part], weights, scale, its)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    p: Tensor | None,
    scale: float,
    span: Span,
) -> None:
    # Scores in float32 and weights in the operands' type, both in whole tiles.
    B, H = q.shape[:2]
    table = B, H, span.padded_queries, span.padded_keys
    s = torch.empty(table, dtype=torch.float32, device=q.device)
    p = q.new_empty(table) if p is None else p
    # The three launches of this layout, if they were made before.
    key = scale, span, k.shape[1], v.shape[3], layout_of(q, k, v, o, lse, p)
    if known := launches.get(key):
        scores, softmax, outputs = known
        scores(q, k, s)
        softmax(s, p, lse)
        outputs(p, v, o)
        return
    launches.keep(
        key,
        launch_scores(q, k, s, span),
        launch_softmax(s, p, lse, scale, span),
        launch_weighted_sums(p, v, o, span),
    )


# ---- the backward pass


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    p: Tensor | None,
    scale: float,
    span: Span,
    work: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    g, q = straight(g), straight(q)
    k, v = straight(k), straight(v)
    B, H = q.shape[:2]
    delta = row_dots(g, o)
    # How many sequences fit; if not one, keys go in chunks, and dq is added up in float32.
    tables = 2 if p is None else 1  # of weights and of scores' gradients, or of these alone
    column_bytes = H * span.padded_queries * q.itemsize * tables
    most = work // (column_bytes * span.padded_keys)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    if not most:
        chunk = max(1, work // column_bytes // TILE) * TILE
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        _backward_by_keys(Backward(q, k, v, g, lse, delta, dq, dk, dv), p, scale, span, chunk)
        return torch.empty_like(q).copy_(dq), dk, dv
    # One piece of memory serves all pieces of the batch.
    tensors = Backward(q, k, v, g, lse, delta, torch.empty_like(q), dk, dv)
    parts = pieces(B, most)
    room = _tables(q, tables, parts[0].stop if parts else 0, span)  # one for all pieces
    for batch in parts:
        size = batch.stop - batch.start
        part = tensors if size == B else tensors.part(batch)
        kept = p if p is None or size == B else p[batch]
        weights = _table(room, 1, size, H, span) if kept is None else kept
        ds = _table(room, 0, size, H, span)
        _backward(part, weights, ds, scale, span, kept=p is not None)
    return tensors.dq, dk, dv


def _backward(
    t: Backward, p: Tensor, ds: Tensor, scale: float, span: Span, kept: bool, add: bool = False
) -> None:
    """Of whole heads, or of some queries and keys; dq is added to what is there (`add`), or
    written."""
    layout = layout_of(t.q, t.k, t.v, t.g, t.lse, t.delta, t.dq, t.dk, t.dv, p, ds)
    key = scale, span, kept, add, t.k.shape[1], t.v.shape[3], layout
    if known := launches.get(key):
        score_gradients, query_gradients, key_gradients = known
        score_gradients(t.q, t.k, t.v, t.g, p, ds, t.lse, t.delta)
        query_gradients(ds, t.k, t.dq)
        key_gradients(ds, t.q, t.dk, p, t.g, t.dv)
        return
    launches.keep(
        key,
        launch_score_gradients(t, p, ds, scale, span, kept),
        launch_weighted_sums(ds, t.k, t.dq, span, add),
        launch_key_gradients(t, p, ds, span),
    )


def _backward_by_keys(t: Backward, p: Tensor | None, scale: float, span: Span, chunk: int) -> None:
    """A sequence and a chunk of keys at a time: the gradients of these are complete; those of
    queries are added up."""
    # Memory for the largest chunk, used again for all.
    B, H, Q, _ = t.q.shape
    largest = Span(Q, min(chunk, span.keys), 0, False, 0)
    room = _tables(t.q, 2 if p is None else 1, 1, largest)
    for n in range(B):
        one = slice(n, n + 1)
        for start in range(0, span.keys, chunk):
            stop = min(start + chunk, span.keys)
            # Only queries that see the chunk; where none does, its gradients are zero.
            first, last = span.queries_of(start, stop)
            keys = one, slice(None), slice(start, stop)
            if last <= first:
                t.dk[keys] = t.dv[keys] = 0
                continue
            rows = one, slice(None), slice(first, last)
            # Query i of the part stands at its key i + offset.
            offset = span.offset + first - start
            its = Span(last - first, stop - start, offset, span.causal, span.window)
            part = Backward(
                q=t.q[rows],
                k=t.k[keys],
                v=t.v[keys],
                g=t.g[rows],
                lse=t.lse[rows],
                delta=t.delta[rows],
                dq=t.dq[rows],
                dk=t.dk[keys],
                dv=t.dv[keys],
            )
            weights = _table(room, 1, 1, H, its) if p is None else p[one, :, first:, start:]
            ds = _table(room, 0, 1, H, its)
            _backward(part, weights, ds, scale, its, kept=p is not None, add=True)


def _tables(like: Tensor, count: int, batch: int, span: Span) -> Tensor:
    """Memory for `count` tables of so many sequences."""
    table = batch * like.shape[1] * span.padded_queries * span.padded_keys
    return like.new_empty(count * table)


def _table(room: Tensor, index: int, batch: int, heads: int, span: Span) -> Tensor:
    shape = batch, heads, span.padded_queries, span.padded_keys
    size = batch * heads * span.padded_queries * span.padded_keys
    return room[index * size : (index + 1) * size].view(shape)
