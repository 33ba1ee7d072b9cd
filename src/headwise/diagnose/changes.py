"""How far every head's forms moved from one checkpoint to another."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headwise.diagnose.checkpoints import Checkpoint
from headwise.diagnose.forms import TINY


@dataclass(frozen=True)
class FormChange:
    """|A' - A| / |A| in the Frobenius norm, and the cosine between A and A', by head."""

    qk: list[float]
    qk_cosine: list[float]
    vo: list[float] | None
    vo_cosine: list[float] | None


def change_of(first: Checkpoint, other: Checkpoint, i: int) -> FormChange | None:
    """The change of one layer's forms, at distance 0; None where its sizes differ."""
    a, b = first.heads(i), other.heads(i)
    sizes = [[t.shape for t in (x.q, x.k, x.v, x.o)] for x in (a, b)]
    if sizes[0] != sizes[1] or a.latent is not None or b.latent is not None:
        return None
    qk = _moved(a.q, a.paired(a.k), b.q, b.paired(b.k))
    if not a.o.shape[1]:
        return FormChange(*qk, None, None)
    return FormChange(*qk, *_moved(a.o, a.paired(a.v), b.o, b.paired(b.v)))


def _moved(q: Tensor, k: Tensor, q2: Tensor, k2: Tensor) -> tuple[list[float], list[float]]:
    """<A, A'> = sum((Q Q'^T) * (K K'^T)): exact, in products of a head's own size."""
    same = ((q @ q.mT) * (k @ k.mT)).sum((-2, -1))
    new = ((q2 @ q2.mT) * (k2 @ k2.mT)).sum((-2, -1))
    inner = ((q @ q2.mT) * (k @ k2.mT)).sum((-2, -1))
    # |A' - A|^2 = |A|^2 + |A'|^2 - 2 <A, A'> loses digits where A' is nearly A, so the difference
    # is a form of its own: Q'^T K' - Q^T K = (Q' - Q)^T K' + Q^T (K' - K).
    dq, dk = q2 - q, k2 - k
    change = ((dq @ dq.mT) * (k2 @ k2.mT)).sum((-2, -1))
    change = change + ((q @ q.mT) * (dk @ dk.mT)).sum((-2, -1))
    change = change + 2 * ((dq @ q.mT) * (k2 @ dk.mT)).sum((-2, -1))
    relative = (change.clamp_min(0) / same.clamp_min(TINY)).sqrt()
    cosine = inner / (same * new).clamp_min(TINY).sqrt()
    return relative.tolist(), cosine.clamp(-1, 1).tolist()
