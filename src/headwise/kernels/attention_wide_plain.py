"""Attention of large rank by matrix products of whole blocks: the twin of attention_wide_triton.py,
on any device and in any precision.

Forward: for each block of queries one product gives its scores against the keys it sees, a softmax
its weights, a second product its outputs.

Backward: gradients of keys and values are sums over queries. So the weights p and the scores'
gradients ds of all queries that see a chunk of keys stand side by side, each gradient is one
product, and no sum is rounded on the way. When one chunk takes all keys, ds serves for the queries'
gradient too; for longer sequences it is made once more.

Axes: Z batch x KV heads, G query heads that share keys, Q queries, N keys, R rank, V value width.
Tables of scores are (Z, G x queries of a block, keys of a block), one head after the other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise.kernels.attention_wide_span import Backward, Span, pieces, sums_type


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
    block: int,
) -> None:
    """Write outputs, log sums and, where there is memory for them, weights; operands as in
    `attend_wide`."""
    (B, H, Q, R), (KV, N, V) = q.shape, (k.shape[1], k.shape[2], v.shape[3])
    # Heads that share keys stand below each other, so that one product serves them all: (Z, G Q, R)
    # times (Z, N, R).
    Z, G = B * KV, H // KV
    q_ZGQR, k_ZNR, v_ZNV = q.reshape(Z, G, Q, R), k.reshape(Z, N, R), v.reshape(Z, N, V)
    o_ZGQV, lse_ZGQ = o.view(Z, G, Q, V), lse.view(Z, G, Q)
    # As many (batch x KV heads) at once as temporary memory allows.
    bytes_Z = _bytes(G, q.dtype, block, 1, block if p is None else 0, N)
    for z in pieces(Z, work // bytes_Z):
        kept = None if p is None else p[z]
        for first, last in span.blocks(block):
            # Scores of a block of queries against the keys it sees, weights, outputs.
            low, high = span.keys_of(first, last, block)
            s = _scores(_rows(q_ZGQR[z], first, last), k_ZNR[z, low:high])
            if kept is None:
                weights = s.new_empty(s.shape, dtype=q.dtype)
            else:
                weights = kept[:, G * first : G * last, low:high]
            _softmax(s, weights, lse_ZGQ[z, :, first:last], scale, first, low, span)
            _product(weights, v_ZNV[z, low:high], o_ZGQV[z, :, first:last])


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    p: Tensor | None,
    scale: float,
    span: Span,
    work: int,
    block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    (B, H, Q, _), KV = q.shape, k.shape[1]
    Z, G = B * KV, H // KV
    # The same axes as forward.
    q_ZGQR, g_ZGQV, o_ZGQV = (t.reshape(Z, G, Q, t.shape[-1]) for t in (q, grad.contiguous(), o))
    k_ZNR, v_ZNV = (t.reshape(Z, *t.shape[2:]) for t in (k, v))
    lse = lse.view(Z, G, Q)
    # Keys before every query's window are never written: they stay at zero.
    start = torch.zeros if span.window else torch.empty
    tensors = Backward(
        q=q_ZGQR,
        k=k_ZNR,
        v=v_ZNV,
        g=g_ZGQV,
        lse=lse,
        delta=(g_ZGQV.to(lse.dtype) * o_ZGQV).sum(-1),
        dq=start(q_ZGQR.shape, dtype=q.dtype, device=q.device),
        dk=start(k_ZNR.shape, dtype=k.dtype, device=k.device),
        dv=start(v_ZNV.shape, dtype=v.dtype, device=v.device),
    )
    # Memory for whole sequences if it is there, else for one sequence and some keys at a time.
    tables = 2 if p is None else 1  # of weights and of their gradients, or of these alone
    most = work // _bytes(G, q.dtype, block, tables, tables * Q, span.keys)
    chunk = span.keys
    if not most and p is None:
        chunk = max(1, work // _bytes(G, q.dtype, block, 2, 2 * Q, block)) * block
    for z in pieces(Z, most):
        _backward(tensors.part(z), None if p is None else p[z], span, scale, block, chunk)
    return tensors.dq.view(q.shape), tensors.dk.view(k.shape), tensors.dv.view(v.shape)


def _backward(
    t: Backward, kept: Tensor | None, span: Span, scale: float, block: int, chunk: int
) -> None:
    """Some of Z: a chunk of keys at a time."""
    (Z, G, _, _), N = t.q.shape, span.keys
    blocks = span.blocks(block)
    one_chunk = chunk >= N
    for start in range(0, N, chunk):
        stop = min(start + chunk, N)
        # Blocks of queries that see some of this chunk; they follow each other.
        seeing = [b for b in blocks if _overlap(span.keys_of(*b, block), start, stop)]
        if not seeing:
            continue
        top, rows = seeing[0][0], seeing[-1][1] - seeing[0][0]
        # Tables for all of them over the chunk: ds always, p where it was not kept.
        ds = t.q.new_empty(Z, G * rows, stop - start)
        if kept is None:
            p = t.q.new_empty(Z, G * rows, stop - start)
        else:
            p = kept[:, G * top : G * (top + rows)]
        for first, last in seeing:
            # The part of the chunk that this block sees.
            low, high = span.keys_of(first, last, block)
            low, high = max(low, start), min(high, stop)
            cell = slice(G * (first - top), G * (last - top)), slice(low - start, high - start)
            queries, keys = (first, last), (low, high)
            _score_gradients(
                t, p[:, *cell], ds[:, *cell], queries, keys, span, scale, kept is not None
            )
            # All keys are here, so the queries' gradient is complete.
            if one_chunk:
                _product(ds[:, *cell], t.k[:, low:high], t.dq[:, :, first:last])
        # Rows in the order of the tables: block by block, within it head by head.
        if G > 1:
            q_rows = torch.cat([_rows(t.q, *b) for b in seeing], 1)
            g_rows = torch.cat([_rows(t.g, *b) for b in seeing], 1)
        else:
            q_rows, g_rows = t.q[:, 0, top : top + rows], t.g[:, 0, top : top + rows]
        # dv = p^T g and dk = ds^T q, for a block of keys over the queries that see it.
        for low in range(start, stop, block):
            high = min(low + block, stop)
            its = [b for b in seeing if _overlap(span.keys_of(*b, block), low, high)]
            if not its:
                continue
            these = slice(G * (its[0][0] - top), G * (its[-1][1] - top))
            columns = slice(low - start, high - start)
            torch.bmm(p[:, these, columns].mT, g_rows[:, these], out=t.dv[:, low:high])
            torch.bmm(ds[:, these, columns].mT, q_rows[:, these], out=t.dk[:, low:high])
    # Several chunks: ds of each block once more over all of its keys, for dq = ds k in one sum.
    if one_chunk:
        return
    for first, last in blocks:
        low, high = span.keys_of(first, last, block)
        ds = t.q.new_empty(Z, G * (last - first), high - low)
        _score_gradients(t, None, ds, (first, last), (low, high), span, scale, False)
        _product(ds, t.k[:, low:high], t.dq[:, :, first:last])


def _score_gradients(
    t: Backward,
    p: Tensor | None,
    ds: Tensor,
    queries: tuple[int, int],
    keys: tuple[int, int],
    span: Span,
    scale: float,
    kept: bool,
) -> None:
    """ds = p (dp - delta) scale of a block of queries over some keys, into a view.

    p is there when it was kept. Else it is made from the scores, and written if there is memory for
    it.
    """
    # Scores' gradients need p: as it was kept, or from the scores and the log sum.
    (first, last), (low, high) = queries, keys
    lse, delta = t.lse[:, :, first:last], t.delta[:, :, first:last]
    s = None if kept else _scores(_rows(t.q, first, last), t.k[:, low:high])
    dp = _scores(_rows(t.g, first, last), t.v[:, low:high])
    if s is None:
        assert p is not None
        weights = p.to(dp.dtype)
    else:
        weights = (s * scale - lse.flatten(1).unsqueeze(-1)).exp()
        unseen = _unseen(span, last - first, s, first, low)
        if unseen is not None:
            weights = weights.masked_fill(unseen, 0.0)
        if p is not None:
            p.copy_(weights)
    ds.copy_(weights * (dp - delta.flatten(1).unsqueeze(-1)) * scale)


# ---- rows of scores


def _scores(a: Tensor, b: Tensor) -> Tensor:
    """a b^T with sums that are not rounded to the operands' type."""
    exact = sums_type(a.dtype)
    return torch.bmm(a.to(exact), b.to(exact).mT)


def _softmax(
    s: Tensor, p: Tensor, lse: Tensor, scale: float, first: int, low: int, span: Span
) -> None:
    """p = softmax(scale s) and lse = log sum exp(scale s) over what each row sees, into views; the
    rows begin with query `first`, the columns with key `low`."""
    s = s * scale
    unseen = _unseen(span, lse.shape[2], s, first, low)
    if unseen is not None:
        s = s.masked_fill(unseen, -math.inf)
    lse.copy_(s.logsumexp(-1).view(lse.shape))
    p.copy_(s.softmax(-1))


def _unseen(span: Span, queries: int, s: Tensor, first: int, low: int) -> Tensor | None:
    """Which entries of a table are hidden; `queries` rows of each head stand below each other."""
    if not span.causal and not span.window:
        return None
    _, rows, columns = s.shape
    row = torch.arange(rows, device=s.device).unsqueeze(1)
    token = span.offset + first + row % queries
    key = low + torch.arange(columns, device=s.device)
    if span.causal:
        unseen = key > token
    else:
        unseen = torch.zeros(rows, columns, dtype=torch.bool, device=s.device)
    return unseen | ((key - token).abs() >= span.window) if span.window else unseen


# ---- blocks


def _overlap(keys: tuple[int, int], start: int, stop: int) -> bool:
    return keys[0] < stop and start < keys[1]


def _rows(t_ZGQR: Tensor, first: int, last: int) -> Tensor:
    """Queries [first, last) of all heads that share keys, one head after the other: (Z, G x
    queries, R)."""
    return t_ZGQR[:, :, first:last].flatten(1, 2)


def _product(a: Tensor, b: Tensor, out_ZGQR: Tensor) -> None:
    """a b into a block of queries."""
    if out_ZGQR.shape[1] == 1:
        torch.bmm(a, b, out=out_ZGQR[:, 0])
    else:
        out_ZGQR.copy_(torch.bmm(a, b).view(out_ZGQR.shape))


def _bytes(group: int, dtype: torch.dtype, block: int, tables: int, rows: int, keys: int) -> int:
    """Of one z: `tables` blocks of scores, and `rows` rows per head of what is made of them, over
    `keys` keys."""
    return group * keys * (tables * block * sums_type(dtype).itemsize + rows * dtype.itemsize)
