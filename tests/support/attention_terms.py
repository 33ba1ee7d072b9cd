"""Attention with everything that may join its scores, one query at a time in float64: nothing
shared with the package."""

import math

import torch


def reference_terms(
    q, k, v, scale, *, causal=False, window=0, hard=False, mask=None, documents=None, offset=None,
    softcap=0.0, sinks=None, alibi=None,
):  # fmt: skip
    """The keys that a query sees are picked one by one, so that nothing is ever masked."""
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    group = heads // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("bhqr,bhnr->bhqn", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    start = keys - queries if offset is None else offset
    at, key = torch.arange(queries)[:, None] + start, torch.arange(keys)[None]
    seen = torch.ones(scores.shape, dtype=torch.bool)
    if causal:
        seen = seen & (key <= at)
    if window:
        seen = seen & ((key - at).abs() < window)
    if documents is not None:
        pair = isinstance(documents, tuple)
        of_keys = documents[1] if pair else documents
        of_queries = documents[0] if pair else documents[:, start : start + queries]
        seen = seen & (of_queries[:, None, :, None] == of_keys[:, None, None, :])
    if alibi is not None:
        scores = scores + alibi.double()[:, None, None] * (key - at)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores, seen = scores + mask.double(), seen & (mask != -math.inf)
    rows = [
        _row(scores[b, h, i], v[b, h], seen[b, h, i], None if sinks is None else sinks[h], hard)
        for b in range(q.shape[0])
        for h in range(heads)
        for i in range(queries)
    ]
    return torch.stack(rows).view(*scores.shape[:3], v.shape[-1])


def _row(scores, v, seen, sink, hard):
    """One query: (N,), (N, V), (N,) -> (V,)."""
    keys = seen.nonzero()[:, 0]
    if not len(keys):
        return torch.zeros(v.shape[-1], dtype=torch.float64)
    logits = scores[keys]
    if sink is not None:
        logits = torch.cat((logits, sink.double().view(1)))
    if hard:
        best = int(logits.argmax())
        return v[keys[best]] if best < len(keys) else 0 * v[0]
    return logits.softmax(0)[: len(keys)] @ v[keys]
