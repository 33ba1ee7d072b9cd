"""What a model's attention uses on data: ranks of the scores that it makes, how it spreads, heads
that do nothing, conditioning of the heads side by side, and the loss when a layer's rank is cut.

Scores are centred by row: the softmax does not see what is added to all keys of a query. Their
singular values are those of q (k - mean k)^T over the tokens of a sequence, so a rank is at most
head_dim and at most the tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.diagnose import forms
from headwise.diagnose.checkpoints import Checkpoint
from headwise.diagnose.forms import TINY
from headwise.diagnose.running import Call, Running, Watcher, plainly, rows_of, running

DEAD = 0.001  # share of its layer's output below which a head is called dead
FRACTIONS = (1 / 8, 1 / 4, 1 / 2)  # of a head's rank, for the rank-loss curve


@dataclass(frozen=True, kw_only=True)
class LayerOnData:
    """Figures of one layer on data; lists by head are means over sequences."""

    layer: int
    r90: list[float]  # of the row-centred scores
    r99: list[float]
    effective: list[float]
    entropy: list[float]  # of the weights of a query over log of the keys that it sees
    first: list[float]  # weight on the first token
    largest: list[float]  # score, in absolute value
    share: list[float]  # of the energy of the layer's heads, before the output map
    dead: list[int]  # heads with less than DEAD of it
    k: int  # singular values of the heads side by side that kappa is over
    kappa: float | None  # their condition number at that k, geometric mean
    ranks: list[int]  # to which all heads of the layer were cut
    losses: list[float]  # and what the loss was then


@dataclass(frozen=True, kw_only=True)
class OnData:
    """What data say. `loss` is in nats per token of a decoder; of an encoder there is none, and
    `losses` are relative changes of its last states."""

    sequences: int
    tokens: int  # of a sequence
    loss: float | None
    layers: list[LayerOnData]

    def of_layer(self, number: int) -> LayerOnData | None:
        """One layer's figures, by its number."""
        return next((layer for layer in self.layers if layer.layer == number), None)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def measure_on_data(
    checkpoint: Checkpoint,
    data: str | Path | Sequence[int] | Tensor,
    *,
    tokens: int = 128,
    sequences: int = 8,
    curve: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> OnData:
    """The figures of a checkpoint on a text or on token ids, cut into sequences; of a vision model
    on images, of a run on vectors on an array of them.

    With `curve` every layer's scores are cut to lower rank, one layer at a time: the best
    approximation of q k^T over the first half of the sequences, tried on the second half.
    """
    model = running(checkpoint)
    rows = rows_of(data, model, tokens, sequences)
    count = len(rows)
    watched: dict[int, _Sums] = {}

    def watch(call: Call) -> Tensor:
        return watched.setdefault(call.layer, _Sums()).add(call)

    outputs = torch.cat([model.run(row[None], watch) for row in rows])
    half = rows[count // 2 :]
    baseline = outputs[count // 2 :]
    loss = _loss(baseline, half) if model.causal else None
    found = []
    for n, (layer, sums) in enumerate(sorted(watched.items())):
        ranks, losses = [], []
        if curve:
            factors = _factors(model, rows[: count // 2], layer)
            width = sums.width
            ranks = sorted({max(1, round(width * f)) for f in FRACTIONS})
            for rank in ranks:
                cut = torch.cat([model.run(row[None], _cut(layer, factors, rank)) for row in half])
                changed = (cut - baseline).norm() / baseline.norm().clamp_min(TINY)
                losses.append(_loss(cut, half) if model.causal else float(changed))
        number = checkpoint.layers[n].index if n < checkpoint.depth else layer
        found.append(sums.layer(number, ranks, losses))
        if progress is not None:
            progress(n + 1, len(watched))
    tokens = next(iter(watched.values())).tokens
    return OnData(sequences=count, tokens=tokens, loss=loss, layers=found)


def _loss(logits: Tensor, ids: Tensor) -> float:
    """Nats per token that follows another."""
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


# ---- figures of one layer


class _Sums:
    """One layer's figures, a sequence at a time."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Tensor]] = []
        self.kappas: list[float] = []
        self.k = 0
        self.width = self.tokens = 0

    def add(self, call: Call) -> Tensor:
        """Note one sequence, and attend."""
        scores = call.scores()
        weights = call.weights(scores)
        out = call.output(weights)
        self.width, self.tokens = call.q.shape[-1], call.q.shape[-2]
        q, o = call.q[0].double(), out[0].double()
        k = call.k[0].double().repeat_interleave(len(q) // len(call.k[0]), 0)
        # Row-centred: with the mean key taken off, which adds one number to all scores of a query.
        s = forms.product_spectrum(q.mT, (k - k.mean(1, keepdim=True)).mT)
        s = s[:, : min(call.q.shape[-1], call.q.shape[-2] - 1)]
        seen = torch.ones_like(weights[0, 0], dtype=torch.bool)
        if call.seen is not None:
            seen = call.seen.reshape(-1, *call.seen.shape[-2:])[0].expand_as(seen)
        counts = seen.sum(-1)
        several = counts > 1
        p = weights[0].double()[:, several]
        entropy = -torch.xlogy(p, p).sum(-1) / counts[several].double().log()
        energy = o.square().sum((-2, -1))
        self.rows.append(
            {
                "r90": forms.energy_rank(s, 0.9).double(),
                "r99": forms.energy_rank(s, 0.99).double(),
                "effective": forms.effective_rank(s),
                "entropy": entropy.mean(-1),
                "first": p[..., 0].mean(-1),
                "largest": scores[0].double().masked_fill(~seen, 0).abs().amax((-2, -1)),
                "share": energy / energy.sum().clamp_min(TINY),
            }
        )
        beside = o.transpose(0, 1).flatten(1)
        values = torch.linalg.svdvals(beside)
        self.k = min(beside.shape)
        least = float(values[self.k - 1])
        self.kappas.append(
            float(values[0]) / least if least > 1e-12 * float(values[0]) else math.inf
        )
        return out

    def layer(self, number: int, ranks: list[int], losses: list[float]) -> LayerOnData:
        """The means."""
        means = {name: torch.stack([r[name] for r in self.rows]).mean(0) for name in self.rows[0]}
        means["largest"] = torch.stack([r["largest"] for r in self.rows]).amax(0)
        finite = all(map(math.isfinite, self.kappas))
        kappa = math.exp(sum(map(math.log, self.kappas)) / len(self.kappas)) if finite else None
        dead = (means["share"] < DEAD).nonzero()[:, 0].tolist()
        lists: dict[str, Any] = {name: values.tolist() for name, values in means.items()}
        return LayerOnData(layer=number, dead=dead, k=self.k, kappa=kappa, ranks=ranks,
                           losses=losses, **lists)  # fmt: skip


# ---- cutting the rank


def _factors(model: Running, rows: Tensor, layer: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Per head what the best approximation of its scores over these sequences is made of."""
    queries: list[Tensor] = []
    keys: list[Tensor] = []

    def watch(call: Call) -> Tensor:
        if call.layer == layer:
            queries.append(call.q[0].double())
            keys.append(call.k[0].double())
        return plainly(call)

    for row in rows:
        model.run(row[None], watch)
    q, k = torch.cat(queries, 1), torch.cat(keys, 1)
    k = k.repeat_interleave(len(q) // len(k), 0)
    out = []
    for head_q, head_k in zip(q, k, strict=True):
        # q k^T = U_q (T_q T_k^T) U_k^T with orthonormal U: the SVD of the small product gives the
        # best approximation over all pairs of these tokens (KQ-SVD).
        T_q, T_k = (torch.linalg.qr(t, mode="r").R for t in (head_q, head_k))
        u, s, vh = torch.linalg.svd(T_q @ T_k.T)
        out.append((torch.linalg.pinv(T_q) @ u, s, vh @ torch.linalg.pinv(T_k).T))
    return out


def _cut(layer: int, factors: list[Any], rank: int) -> Watcher:
    """Attention with one layer's scores q M k^T, M of this rank."""
    maps = torch.stack([(u[:, :rank] * s[:rank]) @ v[:rank] for u, s, v in factors])

    def watch(call: Call) -> Tensor:
        if call.layer == layer:
            call = dataclasses.replace(call, q=call.q @ maps.to(call.q.dtype)[None])
        return plainly(call)

    return watch
