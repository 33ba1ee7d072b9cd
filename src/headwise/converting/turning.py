"""A latent where positions rotate (MLA's decoupled keys): one key that rotates for all heads, and
keys that do not rotate grown from the latent.

Pair p of coordinates is a complex number k_gp in every KV head g, and all of them turn alike. So
the best single one for all heads is their leading complex component, each weighed by what reads it:
k'_p, which rotates as before. What it leaves over of every head's key, and pairs that do not stay,
loses its rotation: a score Re(conj(q) k e^(-i w d)) at distance d becomes Re(conj(q) k c), with c
the mean of e^(-i w d) over the distances at which a head looks. That is an approximation, however
wide the latent is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.converting.joining import Rotated, keys_of_pairs, pair_grams
from headwise.converting.moments import Moments, turned
from headwise.diagnose.forms import TINY
from headwise.diagnose.layouts import Heads
from headwise.diagnose.running import Call

FAR = 1024  # without data heads look at distance d as often as 1 / (1 + d), up to here


@dataclass(frozen=True, kw_only=True)
class Turning:
    """What keeps rotating, and what is left for the latent. S = K R, W coordinates rotate."""

    q: Tensor  # (H, R, W): of queries, what meets the rotating key
    k: Tensor  # (S, W): keys of all heads to the one that rotates
    rest: Tensor  # (S, S): keys of all heads less what that one carries
    still: Tensor  # (H, R, R): of queries, what meets the rest
    pairs: Tensor
    frequencies: Tensor

    def heads(self, heads: Heads) -> tuple[Heads, Tensor, Tensor, Tensor]:
        """The heads that a latent stands for; and the rotating part's weights (H, W, D) of queries
        and (W, D) of the key, and its bias (W,)."""
        K, R, D = heads.k.shape
        rows = heads.k.flatten(0, 1)
        bias = heads.biases.get("k", rows.new_zeros(K, R)).flatten()
        biases = {**heads.biases, "k": (bias @ self.rest).view(K, R)}
        rest = dataclasses.replace(
            heads, q=self.still.mT @ heads.q, k=(self.rest.T @ rows).view(K, R, D), biases=biases
        )
        return rest, self.q.mT @ heads.q, self.k.T @ rows, bias @ self.k

    def moments(self, moments: Moments) -> Moments:
        """Those of what the latent stands for."""
        both = torch.block_diag(self.rest, torch.eye(len(moments.v), dtype=torch.float64))
        return dataclasses.replace(
            moments, q=self.still.mT @ moments.q @ self.still, kv=both.T @ moments.kv @ both,
            mean=moments.mean @ both,
        )  # fmt: skip

    def split(self, call: Call) -> tuple[Call, Tensor, Tensor]:
        """A call without what rotates, and the rotating queries (B, H, N, W) and key
        (B, K, N, W)."""
        K = call.k.shape[1]
        flat = call.k.transpose(1, 2).flatten(2)
        turning = call.q @ self.q.to(call.q), (flat @ self.k.to(flat)).unsqueeze(1)
        q, k = (turned(t, self.pairs, -self.frequencies) for t in (call.q, call.k))
        rest = k.transpose(1, 2).flatten(2) @ self.rest.to(k)
        still = dataclasses.replace(
            call, q=q @ self.still.to(q), k=rest.unflatten(-1, (K, -1)).transpose(1, 2)
        )
        return still, turning[0], turning[1].expand(-1, K, -1, -1)


def turning_of(
    moments: Moments, pairs: Tensor, frequencies: Tensor, kept: Sequence[int], width: int
) -> Turning:
    """What rotates and what is left; the kept pairs lie in order in `width` coordinates, as halves
    of them."""
    K, group, R = moments.kv_heads, moments.group, moments.q.shape[-1]
    i = torch.arange(width // 2)
    rotated = Rotated(
        pairs=pairs, still=i[:0], kept=kept, new_pairs=torch.stack((i, i + width // 2), 1),
        new_still=i[:0],
    )  # fmt: skip
    to_key, to_query, _ = keys_of_pairs(_readers(moments), moments.k, width, rotated)
    flat = to_key.flatten(0, 1)
    back = to_query.mT.transpose(0, 1).flatten(1)  # (W, K R): keys of all heads from the one
    still = torch.eye(R, dtype=torch.float64).repeat(K * group, 1, 1)
    c = phases(moments, frequencies)
    for p, (a, b) in enumerate(pairs.tolist()):  # q times conj(c)
        still[:, a, a] = still[:, b, b] = c[:, p].real
        still[:, a, b], still[:, b, a] = -c[:, p].imag, c[:, p].imag
    rest = torch.eye(K * R, dtype=torch.float64) - flat @ back
    return Turning(
        q=to_query.repeat_interleave(group, 0), k=flat, rest=rest, still=still, pairs=pairs,
        frequencies=frequencies,
    )  # fmt: skip


def _readers(moments: Moments) -> Tensor:
    """Second moments of what reads the keys of each KV head (K, R, R)."""
    importance = moments.importance()
    importance = importance + 1e-9 * importance.mean() + TINY
    R = moments.q.shape[-1]
    weighed = moments.q * importance[:, None, None]
    return weighed.view(moments.kv_heads, moments.group, R, R).sum(1)


def phases(moments: Moments, frequencies: Tensor) -> Tensor:
    """The mean of e^(-i w d) over the distances at which each head looks (H, P)."""
    near = moments.near
    if near is None:
        near = (1 / (1 + torch.arange(FAR).double())).expand(len(moments.q), FAR)
    near = near / near.sum(1, keepdim=True).clamp_min(TINY)
    angles = torch.outer(torch.arange(near.shape[1]).double(), frequencies)
    return torch.complex(near @ angles.cos(), -near @ angles.sin())


def gains(moments: Moments, pairs: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """For every pair, as shares of the energy of all rotating scores: what one key for all heads
    carries, and how much of that would be lost without rotation (P,) each."""
    readers = _readers(moments)
    c = phases(moments, frequencies).abs().square().mean(0)
    carried, total = [], []
    for size, gram in pair_grams(readers, moments.k, pairs):
        root = size.sqrt()
        values = torch.linalg.eigvalsh(root[:, None] * gram * root).clamp_min(0)
        carried.append(values[-1])
        total.append(values.sum())
    share = torch.stack(carried) / torch.stack(total).sum().clamp_min(TINY)
    return share, share * (1 - c).clamp_min(0)
