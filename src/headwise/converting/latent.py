"""Keys and values of a layer through one latent (MLA); what rotates goes beside it (turning.py).

The latent's C - 1 free coordinates are the leading principal components of all keys and values
side by side, each weighed by what reads it. Our latents (as DeepSeek's) are normalised, which would
divide by a size that differs by token. So the last coordinate is a constant far larger than the
others: the norm then divides by a constant, to seven digits, and gains undo it. The same coordinate
carries what keys and values have in common at all tokens: means and biases are exact.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.converting.joining import roots, symmetric
from headwise.converting.moments import Moments
from headwise.converting.turning import Turning
from headwise.diagnose.forms import TINY
from headwise.diagnose.layouts import Heads
from headwise.diagnose.running import Call
from headwise.errors import UsageError

LARGE = 3000.0  # of the constant coordinate, in sizes of the others: 6e-8 relative


@dataclass(frozen=True, kw_only=True)
class LatentMaps:
    """All keys and values side by side, less their mean, to a latent and back."""

    down: Tensor  # (S, C - 1)
    up: Tensor  # (C - 1, S)
    mean: Tensor  # (S,)
    size: float  # the root mean square of the latent of a token
    lost: float  # share of the energy
    turning: Turning | None = None  # where positions rotate

    def converted(self, call: Call) -> Call:
        """A call whose keys and values went through the latent."""
        turning = None
        if self.turning is not None:
            call, *turning = self.turning.split(call)
        K, R, V = call.k.shape[1], call.k.shape[-1], call.v.shape[-1]
        flat = [t.transpose(1, 2).flatten(2) for t in (call.k, call.v)]
        mean = self.mean.to(call.q)
        rows = (torch.cat(flat, -1) - mean) @ (self.down @ self.up).to(call.q) + mean
        k, v = rows.split((K * R, K * V), -1)
        k, v = (t.unflatten(-1, (K, -1)).transpose(1, 2) for t in (k, v))
        if turning is None:
            return dataclasses.replace(call, k=k, v=v)
        q, k = (torch.cat(parts, -1) for parts in zip((call.q, k), turning, strict=True))
        return dataclasses.replace(call, q=q, k=k, v=v)

    def parts(self, heads: Heads, norm: InputNorm | None) -> dict[str, Tensor]:
        """The weights of an attention with a latent by the names of ours; `norm1.bias` is there
        where biases of queries went into it."""
        turning = None
        if self.turning is not None:
            heads, *turning = self.turning.heads(heads)
        rows = torch.cat((heads.k.flatten(0, 1), heads.v.flatten(0, 1)))
        own = [
            heads.biases[n].flatten() if n in heads.biases else t.new_zeros(t.shape[:2].numel())
            for n, t in (("k", heads.k), ("v", heads.v))
        ]
        C = self.down.shape[1] + 1
        constant = LARGE * self.size
        down = self.down.T @ rows
        bias = (torch.cat(own) - self.mean) @ self.down
        out = {"q.weight": heads.q.flatten(0, 1), "out.weight": heads.o.flatten(0, 1).T}
        if heads.biases.get("q", rows.new_zeros(1)).any():
            out |= _absorbed(heads, norm)
            bias = bias - down @ out.pop("moved")
        # Divided by the norm, the constant is the root of C, and the others are multiplied by the
        # root of C over the constant.
        gains = torch.full((C,), constant / C**0.5, dtype=torch.float64)
        gains[-1] = C**-0.5
        up = torch.cat((self.up.T, self.mean[:, None]), 1)  # (S, C)
        K, R, V = heads.k.shape[0], heads.k.shape[1], heads.v.shape[1]
        k, v = up.split((K * R, K * V))
        both = torch.cat((k.view(K, R, C), v.view(K, V, C)), 1)
        downs = [down, down.new_zeros(1, down.shape[1])]
        biases = [bias, bias.new_full((1,), constant)]
        if turning is not None:  # the part that rotates stands last
            out["q.weight"] = torch.cat((heads.q, turning[0]), 1).flatten(0, 1)
            downs.append(turning[1])
            biases.append(turning[2])
        return out | {
            "kv_down.weight": torch.cat(downs),
            "kv_down.bias": torch.cat(biases),
            "kv_norm.weight": gains,
            "kv.weight": both.repeat_interleave(heads.group, 0).flatten(0, 1),
        }


@dataclass(frozen=True)
class InputNorm:
    """Gain and bias of the layer norm before an attention that nothing else reads."""

    gain: Tensor
    bias: Tensor


def _absorbed(heads: Heads, norm: InputNorm | None) -> dict[str, Tensor]:
    """Queries without biases, where a layer norm x = n g + b comes before.

    The n of a token sums to zero, so w = 1 / g gives w x = sum b / g, the same for all tokens. With
    b moved by t g that constant is D, and Q + u w^T has the bias u D: all exact, and undone for
    keys and values, whose latent has a bias. `moved` is t g.
    """
    if norm is None or norm.gain.abs().min() < 1e-3 * norm.gain.abs().max():
        raise UsageError(
            "queries have biases, which a latent has no place for: that needs a layer norm with a "
            "bias before attention alone (norm='layer', norm_at='pre'), its gains not near zero"
        )
    D = len(norm.gain)
    moved = (1 - (norm.bias / norm.gain).sum() / D) * norm.gain
    q = heads.q.flatten(0, 1)
    rest = (heads.biases["q"].flatten() - q @ moved) / D
    return {
        "q.weight": q + torch.outer(rest, 1 / norm.gain),
        "norm1.bias": norm.bias + moved,
        "moved": moved,
    }


def to_latent(moments: Moments, width: int, turning: Turning | None = None) -> LatentMaps:
    """The latent of this width, its constant coordinate included."""
    moments = moments if turning is None else turning.moments(moments)
    K, group = moments.kv_heads, moments.group
    R, V = moments.q.shape[-1], moments.o.shape[-1]
    queries = moments.q * moments.importance()[:, None, None]
    weights = [*queries.view(K, group, R, R).sum(1), *moments.o.view(K, group, V, V).sum(1)]
    # A floor: what no head reads yet is kept where there is room.
    floors = [1e-9 * w.trace().clamp_min(TINY) / len(w) * torch.eye(len(w)) for w in weights]
    pairs = [roots(w + floor) for w, floor in zip(weights, floors, strict=True)]
    root, inverse = (torch.block_diag(*(pair[i] for pair in pairs)) for i in (0, 1))
    energy, E = torch.linalg.eigh(symmetric(root @ moments.kv @ root))
    count = min(width - 1, len(energy))
    E = E.flip(1)[:, :count]
    energy = energy.flip(0).clamp_min(0)
    down, up = root @ E, E.T @ inverse
    # Every coordinate of the latent of the same size.
    sizes = (down.T @ moments.kv @ down).diagonal().clamp_min(0).sqrt()
    sizes = torch.where(sizes > 1e-7 * sizes.max().clamp_min(TINY), sizes, 1.0)
    missing = width - 1 - count
    pad = torch.nn.functional.pad
    return LatentMaps(
        down=pad(down / sizes, (0, missing)), up=pad(up * sizes[:, None], (0, 0, 0, missing)),
        mean=moments.mean, size=max(count, 1) ** 0.5,
        lost=float(energy[count:].sum() / energy.sum().clamp_min(TINY)), turning=turning,
    )  # fmt: skip
