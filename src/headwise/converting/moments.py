"""Second moments of a layer's queries, keys, values and outputs: what an approximation of its heads
is weighed by. From the weights alone (inputs of unit variance in every direction), or from data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.converting.maps import HeadMaps
from headwise.diagnose.layouts import Heads
from headwise.diagnose.running import Call, Running


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Of one layer. Keys and values of all KV heads lie side by side: K R and K V wide.

    From data, the mean of a sequence's keys is taken off, where they rotate after that: the softmax
    does not see what all keys of a query have in common.
    """

    q: Tensor  # (H, R, R)
    k: Tensor  # (K R, K R)
    v: Tensor  # (K V, K V), as heads read them: averaged by their weights
    own: Tensor  # (K, V, V): the same by the KV head's own query heads
    o: Tensor  # (H, V, V): O_h O_h^T
    kv: Tensor  # (K R + K V, K R + K V) of keys and values of one token, their means taken off
    mean: Tensor  # (K R + K V,)
    scale: float  # of the scores
    near: Tensor | None = None  # (H, N): how much a head looks at each distance, from data

    @property
    def kv_heads(self) -> int:
        return self.own.shape[0]

    @property
    def group(self) -> int:
        return self.q.shape[0] // self.kv_heads

    def importance(self) -> Tensor:
        """What an error of one in a score of each head does to what the layer writes, squared:
        about the energy of what the head writes (H,)."""
        own = self.own.repeat_interleave(self.group, 0)
        return self.scale**2 * (self.o * own).sum((-2, -1)).clamp_min(0)

    def through(self, maps: HeadMaps) -> Moments:
        """Of the heads that maps make, each KV head of one old one."""
        first = maps.members[:, 0]
        K = self.kv_heads
        k, v = maps.k[:, 0], maps.v[:, 0]
        to_k = _beside(k, first, K)  # (K R, K' R')
        to_v = _beside(v, first, K)
        both = torch.block_diag(to_k, to_v)
        own = self.own[first]
        return Moments(
            q=maps.q.mT @ self.q[maps.source] @ maps.q,
            k=to_k.T @ self.k @ to_k,
            v=to_v.T @ self.v @ to_v,
            own=v.mT @ own @ v,
            o=maps.o.mT @ self.o[maps.source] @ maps.o,
            kv=both.T @ self.kv @ both,
            mean=self.mean @ both,
            scale=self.scale,
            near=None if self.near is None else self.near[maps.source],
        )


def _beside(maps: Tensor, first: Tensor, K: int) -> Tensor:
    """Maps (K', A, B) from member `first` as one matrix (K A, K' B)."""
    new, A, B = maps.shape
    out = maps.new_zeros(K, A, new, B)
    for g, i in enumerate(first.tolist()):
        out[i, :, g] = maps[g]
    return out.view(K * A, new * B)


def moments_of_weights(heads: Heads, scale: float) -> Moments:
    """At inputs of unit variance, whatever their direction."""
    rows_k, rows_v = heads.k.flatten(0, 1), heads.v.flatten(0, 1)
    q = heads.q @ heads.q.mT
    if "q" in heads.biases:
        q = q + heads.biases["q"][..., None] * heads.biases["q"][:, None]
    k = rows_k @ rows_k.T
    if len(heads.pairs) and "k" in heads.biases:
        moving = torch.zeros_like(heads.biases["k"])
        moving[:, heads.pairs.flatten()] = heads.biases["k"][:, heads.pairs.flatten()]
        k = k + torch.outer(moving.flatten(), moving.flatten())
    v = rows_v @ rows_v.T
    if "v" in heads.biases:
        v = v + torch.outer(heads.biases["v"].flatten(), heads.biases["v"].flatten())
    K, V = heads.v.shape[:2]
    rows = torch.cat((rows_k, rows_v))
    zero = rows.new_zeros(())
    mean = [
        heads.biases.get(n, zero.expand(t.shape[:2])).flatten()
        for n, t in (("k", heads.k), ("v", heads.v))
    ]
    return Moments(
        q=q, k=k, v=v, own=_blocks(v, K, V), o=heads.o @ heads.o.mT, kv=rows @ rows.T,
        mean=torch.cat(mean), scale=scale,
    )  # fmt: skip


def _blocks(joint: Tensor, K: int, width: int) -> Tensor:
    """The diagonal blocks (K, width, width) of a matrix."""
    by_head = joint.view(K, width, K, width)
    return torch.stack([by_head[i, :, i] for i in range(K)])


class _Sums:
    """Sums over one layer's tokens; with a rotation those of queries, and of keys and values of one
    token, are of before it."""

    def __init__(self, rotation: tuple[Tensor, Tensor] | None = None) -> None:
        self.rotation = rotation
        self.sums: dict[str, Tensor] = {}
        self.tokens = self.length = 0

    def add(self, call: Call) -> Tensor:
        """Note one sequence, and attend."""
        weights = call.weights(call.scores())
        out = call.output(weights)
        q, k, v, z = (t[0].double() for t in (call.q, call.k, call.v, out))
        K, group = len(k), len(q) // len(k)
        still = k
        if self.rotation is not None and len(self.rotation[0]):
            pairs, frequencies = self.rotation
            q, still = (turned(t, pairs, -frequencies) for t in (q, k))
        beside = torch.cat((still.transpose(0, 1).flatten(1), v.transpose(0, 1).flatten(1)), 1)
        keys = (k - k.mean(1, keepdim=True)).transpose(0, 1).flatten(1)
        # Every head's weights on all values, since merged heads read each other's.
        read = weights[0].double() @ v.transpose(0, 1).flatten(1)
        own = z.unflatten(0, (K, group))
        found = {
            "q": q.mT @ q,
            "k": keys.T @ keys,
            "kv": beside.T @ beside,
            "mean": beside.sum(0),
            "v": (read.mT @ read).mean(0),
            "own": (own.mT @ own).mean(1),
        }
        if self.rotation is not None:
            found["near"] = by_distance(weights[0].double())
        for name, value in found.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.length = q.shape[1]
        self.tokens += self.length
        return out

    def moments(self, heads: Heads, scale: float) -> Moments:
        """Of all tokens seen."""
        mean = {name: value / self.tokens for name, value in self.sums.items()}
        joint, middle = mean["kv"], mean["mean"]
        return Moments(
            q=mean["q"], k=mean["k"], v=mean["v"], own=mean["own"], o=heads.o @ heads.o.mT,
            kv=joint - torch.outer(middle, middle), mean=middle, scale=scale,
            near=mean.get("near"),
        )  # fmt: skip


def by_distance(weights: Tensor) -> Tensor:
    """Attention weights (H, N, N) summed by how far back they look (H, N)."""
    N = weights.shape[-1]
    i = torch.arange(N)
    back = (i[:, None] - i).clamp_min(0).flatten()
    return weights.new_zeros(len(weights), N).index_add_(1, back, weights.flatten(1))


def turned(t: Tensor, pairs: Tensor, frequencies: Tensor) -> Tensor:
    """Queries or keys (..., N, R) turned on, each by its position."""
    angles = torch.outer(torch.arange(t.shape[-2]).double(), frequencies)
    cos, sin = angles.cos().to(t), angles.sin().to(t)
    a, b = t[..., pairs[:, 0]], t[..., pairs[:, 1]]
    out = t.clone()
    out[..., pairs[:, 0]] = a * cos - b * sin
    out[..., pairs[:, 1]] = b * cos + a * sin
    return out


def watch(
    model: Running, rows: Tensor, rotations: Sequence[tuple[Tensor, Tensor]] | None = None
) -> list[_Sums]:
    """Sums of every layer over sequences (count, tokens)."""
    found: dict[int, _Sums] = {}

    def watcher(call: Call) -> Tensor:
        if call.layer not in found:
            found[call.layer] = _Sums(None if rotations is None else rotations[call.layer])
        return found[call.layer].add(call)

    for row in rows:
        model.run(row[None], watcher)
    return [found[i] for i in sorted(found)]
