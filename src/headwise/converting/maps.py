"""How a layer's new heads are made of its old ones: `HeadMaps`, the one description that weights,
running models and predictions share.

A row of queries q_h (1, R) becomes q_h M, so weights Q_h (R, D) become M^T Q_h. A new KV head is a
sum over the old ones that it stands for. What a new head writes goes through its old head's output
map: O'_h = M^T O_h, so that z' M^T is what the old output map would have read.

Axes: H heads, K KV heads, J members of a KV head, R rank, V width of values, N tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.diagnose.layouts import Heads
from headwise.diagnose.running import Call


@dataclass(frozen=True, kw_only=True)
class HeadMaps:
    """New heads of old ones; primes are new sizes."""

    source: Tensor  # (H',): the old head of each new one
    q: Tensor  # (H', R, R')
    members: Tensor  # (K', J): the old KV heads of each new one
    k: Tensor  # (K', J, R, R')
    v: Tensor  # (K', J, V, V')
    o: Tensor  # (H', V, V')

    def then(self, other: HeadMaps) -> HeadMaps:
        """These maps, and `other` on what they make. One of the two has single members."""
        first = other.members
        if first.shape[1] == 1:
            members, pick = self.members[first[:, 0]], first[:, 0]
            k, v = self.k[pick] @ other.k, self.v[pick] @ other.v
        else:
            members = self.members[:, 0][first]
            k, v = self.k[:, 0][first] @ other.k, self.v[:, 0][first] @ other.v
        return HeadMaps(
            source=self.source[other.source], q=self.q[other.source] @ other.q, members=members,
            k=k, v=v, o=self.o[other.source] @ other.o,
        )  # fmt: skip

    def weights(self, heads: Heads, scale: float = 1.0) -> Heads:
        """The new heads' weights; `scale` is a factor of their queries."""

        def grown(old: Tensor, maps: Tensor) -> Tensor:
            return (maps.mT @ old[self.members]).sum(1)

        biases = {}
        if "q" in heads.biases:
            bias = heads.biases["q"][self.source, None]
            biases["q"] = (bias @ self.q)[:, 0] * scale
        for name, maps in (("k", self.k), ("v", self.v)):
            if name in heads.biases:
                biases[name] = grown(heads.biases[name][..., None], maps)[..., 0]
        return dataclasses.replace(
            heads,
            q=self.q.mT @ heads.q[self.source] * scale,
            k=grown(heads.k, self.k),
            v=grown(heads.v, self.v),
            o=self.o.mT @ heads.o[self.source],
            ov=heads.ov[:0],
            biases=biases,
        )

    def converted(self, call: Call) -> Call:
        """A call as the new heads make it."""

        def grown(old: Tensor, maps: Tensor) -> Tensor:
            return (old[:, self.members] @ maps.to(old)).sum(2)

        return dataclasses.replace(
            call,
            q=call.q[:, self.source] @ self.q.to(call.q),
            k=grown(call.k, self.k),
            v=grown(call.v, self.v),
            sinks=None if call.sinks is None else call.sinks[self.source],
        )

    def written(self, z: Tensor, heads: int) -> Tensor:
        """What new heads read (B, H', N, V'), as the old output map would read it (B, H, N, V)."""
        z = z @ self.o.mT.to(z)
        return z.new_zeros(len(z), heads, *z.shape[2:]).index_add_(1, self.source, z)


def unchanged(H: int, K: int, R: int, V: int) -> HeadMaps:
    """Every head as it is."""
    return spread(H, K, R, V, 1, 1)


def spread(H: int, K: int, R: int, V: int, more: int, more_kv: int) -> HeadMaps:
    """`more` heads of each one, `more_kv` KV heads of each one: exactly the same function.

    New heads compare as the old one does, and each writes a part of what it wrote: its part of the
    coordinates of the values, so that no two are alike.
    """
    source = torch.arange(H).repeat_interleave(more)
    part = torch.arange(V) * more // V  # the new head of each coordinate
    kept = (part == torch.arange(more)[:, None]).double()
    return HeadMaps(
        source=source,
        q=torch.eye(R).double().expand(H * more, R, R),
        members=torch.arange(K).repeat_interleave(more_kv)[:, None],
        k=torch.eye(R).double().expand(K * more_kv, 1, R, R),
        v=torch.eye(V).double().expand(K * more_kv, 1, V, V),
        o=torch.diag_embed(kept).repeat(H, 1, 1),
    )


def padded(H: int, K: int, places: Tensor, R: int, V: int, new_V: int) -> HeadMaps:
    """Wider heads, the new coordinates zero: coordinate i goes to places[i] of R."""
    rank = torch.zeros(len(places), R, dtype=torch.float64)
    rank[torch.arange(len(places)), places] = 1
    width = torch.eye(V, new_V, dtype=torch.float64)
    return HeadMaps(
        source=torch.arange(H),
        q=rank.expand(H, -1, -1),
        members=torch.arange(K)[:, None],
        k=rank.expand(K, 1, -1, -1),
        v=width.expand(K, 1, -1, -1),
        o=width.expand(H, -1, -1),
    )
