"""Everything that is measured of one layer, as plain numbers, and the same of its control."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headwise.diagnose import between, forms
from headwise.diagnose.control import random_parts
from headwise.diagnose.layouts import Heads, Layout, Parts, heads_of

DISTANCES = (0, 1, 16, 256)
SHARES = forms.SHARES
WITHIN = 0.05  # of the energy of forms, a loss at which sharing is counted
SPECTRUM = 64  # singular values of a head that are kept for the page at most


@dataclass(frozen=True, kw_only=True)
class FormMeasures:
    """One form (query-key or value-output) of every head of a layer; lists by head."""

    width: int  # the rank that is paid for
    spectrum: list[list[float]]  # singular values over the largest
    norm: list[float]
    effective: list[float]
    stable: list[float]
    r90: list[int]
    r99: list[int]
    r999: list[int]
    condition: list[float | None]  # None: infinite
    symmetric: list[float | None]
    angle: list[float | None]
    trace: list[float | None]
    cosines: list[list[float]]  # between heads
    effective_heads: float
    sharing: list[list[float | None]]  # losses of KV heads that share keys (values)
    shareable: int  # KV heads with a partner within WITHIN


@dataclass(frozen=True, kw_only=True)
class LayerMeasures:
    """What the weights of one layer's attention say."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dim: int
    qk: FormMeasures
    vo: FormMeasures | None
    distances: list[int]  # of which the next lists say the effective rank and the 90 % rank
    effective_at: list[list[float]]  # (distances, heads); one row without rotary positions
    r90_at: list[list[int]]
    pairs: int  # of coordinates that rotate
    pairs90: list[int]  # how many of a head's pairs hold 90 % of its energy over all distances
    bias_share: list[float] | None  # of a form's energy, what biases add
    kv_width: int  # rows of all keys and values, or of the latent
    kv_ranks: list[int]  # dimensions that hold SHARES of their energy

    def to_json(self) -> dict[str, Any]:
        """As values that JSON has."""
        return dataclasses.asdict(self)


def measure(heads: Heads, layer: int, distances: Sequence[int] = DISTANCES) -> LayerMeasures:
    """One layer's figures."""
    H, R, _ = heads.q.shape
    K, V, _ = heads.v.shape
    at = forms.rotated_spectra(heads, tuple(distances))
    cross = forms.cross_of(heads)
    qk = _form(at[0], cross, heads.dim, between.query_key_gram(heads), _sharing(heads, "k"))
    vo = None
    if heads.o.shape[1]:
        s = forms.product_spectrum(heads.o, heads.v)
        gram = between.value_output_gram(heads)
        vo = _form(s, heads.ov, heads.dim, gram, _sharing(heads, "v"))
    energies = forms.pair_energies(heads) if len(heads.pairs) else None
    width, kv_ranks = between.latent_widths(heads, SHARES)
    share = forms.bias_share(heads)
    return LayerMeasures(
        layer=layer, num_heads=H, num_kv_heads=K, head_dim=R, v_head_dim=V, dim=heads.dim,
        qk=qk, vo=vo,
        distances=list(distances) if len(heads.pairs) else [0],
        effective_at=forms.effective_rank(at).tolist(),
        r90_at=forms.energy_rank(at, 0.9).tolist(),
        pairs=len(heads.pairs),
        pairs90=[] if energies is None else _most(energies, 0.9),
        bias_share=None if share is None else share.tolist(),
        kv_width=width, kv_ranks=kv_ranks,
    )  # fmt: skip


def control_of(parts: Parts, layout: Layout, distances: Sequence[int] = DISTANCES) -> LayerMeasures:
    """The figures of random weights of a layer's sizes."""
    return measure(heads_of(random_parts(parts, layout), layout), -1, distances)


def _sharing(heads: Heads, part: str) -> Tensor | None:
    """Losses of sharing; a latent is shared by all heads already, and of very many heads the
    products would not fit."""
    rows = heads.k if part == "k" else heads.v
    if heads.latent is not None or rows.shape[0] * rows.shape[1] > 8192:
        return None
    return between.sharing_losses(heads, part)


def _form(s: Tensor, cross: Tensor, dim: int, gram: Tensor, sharing: Tensor | None) -> FormMeasures:
    ranks = [forms.energy_rank(s, share).tolist() for share in SHARES]
    lie = forms.symmetry(cross, s, dim)
    cosines = between.cosines(gram)
    top = s[:, :1].clamp_min(forms.TINY)
    return FormMeasures(
        width=s.shape[1],
        spectrum=(s / top)[:, :: max(1, -(-s.shape[1] // SPECTRUM))].tolist(),
        norm=s.square().sum(-1).sqrt().tolist(),
        effective=forms.effective_rank(s).tolist(),
        stable=forms.stable_rank(s).tolist(),
        r90=ranks[0], r99=ranks[1], r999=ranks[2],
        condition=_finite(forms.condition(s)),
        symmetric=_finite(lie.symmetric), angle=_finite(lie.angle), trace=_finite(lie.trace),
        cosines=cosines.tolist(),
        effective_heads=between.effective_heads(cosines),
        sharing=[] if sharing is None else [_finite(row) for row in sharing],
        shareable=0 if sharing is None else between.shareable(sharing, WITHIN),
    )  # fmt: skip


def _most(energies: Tensor, share: float) -> list[int]:
    """How many of the largest hold a share of the sum."""
    ordered = energies.sort(-1, descending=True).values.clamp_min(0).sqrt()
    return forms.energy_rank(ordered, share).tolist()


def _finite(values: Tensor) -> list[float | None]:
    return [v if math.isfinite(v) else None for v in values.tolist()]
