"""Do more heads make attention better conditioned? The statement of "Leaner Transformers"
(2505.20802) at random weights.

    headwise run conditioning
    headwise run conditioning --preset paper

On 2 CPU cores: quick (one scale, 3 seeds) half a minute, paper (both, 48 heads, 5 seeds) two.

Nothing is trained: singular values in float64 (headwise.theory.conditioning). Matrices: independent
Gaussians, for which the paper has a theorem; the heads' outputs [A_1..A_h] of a layer with random
weights, as they are and without their mean token; the Jacobian of a small layer with respect to
W_Q, W_K, W_V, before and after W_O. Policies: split (head_dim = dim / heads), widen (kept).

Expected at 197 tokens, 12 heads of 64: Gaussian 3.0, outputs of a layer of width 768 with weights
of std 0.02 about 145, centred 7.4. Jacobian, 8 tokens, heads of 8 in width 16, from 2 to 8 heads:
before W_O no better, after W_O from thousands to about 20.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.errors import UsageError, nearest
from headwise.experiments.base import Computed, Experiment, Note, Settings
from headwise.experiments.leaner_paper.answers import of_conditioning
from headwise.experiments.leaner_paper.known_kappas import Known, known_kappas
from headwise.experiments.points import Point
from headwise.experiments.settings import check_lists
from headwise.rows import Row
from headwise.seeds import derive
from headwise.show.figure import Line, LineFigure, LinePanel
from headwise.stats import group, mean

if TYPE_CHECKING:
    import torch

NOTE = Note(
    "Known values are our own, from another program and other draws; the paper's are not known to "
    "us. Kappas with different k are kappas of different things: k grows with the heads until "
    "heads x head dim reaches the tokens. Near: within 3 standard deviations (Gaussian), 20 % "
    "(outputs), a factor of 10 (Jacobian and outputs of the small layer, which differ that much "
    "from draw to draw)."
)
MATRICES = {
    "gaussian": "Gaussian",
    "outputs": "outputs of heads",
    "centred": "outputs, mean token removed",
    "before": "Jacobian before W_O",
    "after": "Jacobian after W_O",
}
POLICIES = ("split", "widen")
INVERSE = "1/sqrt(D)"
MANY = 4  # so many times the seeds where a draw is cheap and differs much from the next


def deviation(text: str, dim: int) -> float:
    """The standard deviation of weights that a setting names: a number, or 1/sqrt(D)."""
    try:
        value = dim**-0.5 if text == INVERSE else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"weights must be positive numbers or {INVERSE}, got {text!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class ConditioningSettings(Settings):
    """Which matrices are drawn. `small_*` is the layer whose Jacobian is written out."""

    heads: tuple[int, ...]
    weights: tuple[str, ...]
    seeds: int
    tokens: int = 197
    dim: int = 768
    head_dim: int = 64
    gaussian_heads: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    policies: tuple[str, ...] = POLICIES
    small_tokens: int = 8
    small_dim: int = 16
    small_head_dim: int = 8
    small_heads: tuple[int, ...] = (1, 2, 4, 8)

    def __post_init__(self) -> None:
        check_lists(self, ("heads", "gaussian_heads", "small_heads"), ("weights", "policies"))
        least = {"tokens": 2, "dim": 1, "head_dim": 1}
        for name, smallest in [*least.items(), *((f"small_{n}", v) for n, v in least.items())]:
            if getattr(self, name) < smallest:
                raise UsageError(f"{name} must be at least {smallest}, got {getattr(self, name)}")
        for policy in self.policies:
            if policy not in POLICIES:
                raise UsageError(f"unknown policy {policy!r}; {nearest(policy, POLICIES)}")
        for text in self.weights:
            deviation(text, self.dim)
        self._check_split("heads", self.dim, self.heads)
        self._check_split("small_heads", self.small_dim, self.small_heads)

    def _check_split(self, name: str, dim: int, heads: Sequence[int]) -> None:
        bad = [h for h in heads if "split" in self.policies and dim % h]
        if bad:
            raise UsageError(f"{name} must divide the width {dim} where it is split, got {bad[0]}")


PRESETS = {
    "quick": ConditioningSettings(heads=(1, 2, 4, 8, 12, 16), weights=("0.02",), seeds=3),
    "paper": ConditioningSettings(
        heads=(1, 2, 4, 8, 12, 16, 24, 48), weights=("0.02", INVERSE), seeds=5
    ),
}


# ---- the matrices


@dataclass(frozen=True)
class Matrix(Computed):
    """One matrix. The same sizes and seed are the same draw, whatever is measured of it."""

    experiment = "conditioning"
    kind: str  # of MATRICES
    policy: str
    weights: str  # their standard deviation; "": no weights
    tokens: int
    dim: int  # 0: no weights
    heads: int
    head_dim: int
    seed: int


def runs(s: ConditioningSettings) -> list[Matrix]:
    """Every matrix, seeds innermost."""
    out = [
        Matrix("gaussian", "widen", "", s.tokens, 0, heads, s.head_dim, seed)
        for heads in s.gaussian_heads
        for seed in range(MANY * s.seeds)
    ]
    for policy in s.policies:
        for heads in s.heads:
            rank = s.dim // heads if policy == "split" else s.head_dim
            out += [
                Matrix(kind, policy, weights, s.tokens, s.dim, heads, rank, seed)
                for weights in s.weights
                for kind in ("outputs", "centred")
                for seed in range(s.seeds)
            ]
        for heads in s.small_heads:
            rank = s.small_dim // heads if policy == "split" else s.small_head_dim
            out += [
                Matrix(kind, policy, INVERSE, s.small_tokens, s.small_dim, heads, rank, seed)
                for kind in ("outputs", "before", "after")
                for seed in range(MANY * s.seeds)
            ]
    return list({matrix.id: matrix for matrix in out}.values())


def make(matrix: Matrix, device: str) -> Row:
    """Draw a matrix and measure it; an infinite kappa is null in its row."""
    import torch

    from headwise.theory.spectrum import spectrum

    began, m = time.monotonic(), matrix
    seed = derive(m.seed, "conditioning", m.weights, m.tokens, m.dim, m.heads, m.head_dim)
    drawn, worst_head = _draw(m, torch.Generator(device).manual_seed(seed))
    found = spectrum(drawn, centred=m.kind == "centred")
    return {
        "id": m.id,
        "status": "done",
        **m.columns(),
        "k": found.k,
        "largest": found.largest.item(),
        "smallest": found.smallest.item(),
        "kappa": _finite(found.kappa.item()),
        "stable_rank": found.stable_rank.item(),
        "effective_rank": found.effective_rank.item(),
        "rank": found.rank.item(),
        "worst_head": worst_head,
        "seconds": round(time.monotonic() - began, 3),
    }


def _draw(m: Matrix, generator: torch.Generator) -> tuple[torch.Tensor, float | None]:
    """The matrix, and of a Jacobian before W_O the kappa of the worst head's block."""
    from headwise.theory import conditioning as theory
    from headwise.theory import jacobian as derivatives
    from headwise.theory.spectrum import spectrum

    if m.kind == "gaussian":
        width = m.heads * m.head_dim
        return theory.random_tokens(m.tokens, width, generator, normalised=False), None
    x = theory.random_tokens(m.tokens, m.dim, generator)
    std = deviation(m.weights, m.dim)
    layer = theory.random_attention(m.dim, m.heads, m.head_dim, std, generator)
    if m.kind in ("outputs", "centred"):
        return theory.layer_outputs(layer, x), None
    jacobian = derivatives.jacobian(layer, x, after=m.kind == "after")
    if m.kind == "after":
        return jacobian, None
    blocks = spectrum(derivatives.head_blocks(layer, jacobian)[0])
    return jacobian, _finite(blocks.kappa.max().item())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---- points


SIZES = ("kind", "policy", "weights", "tokens", "dim", "heads", "head_dim")


@dataclass(frozen=True, kw_only=True)
class Condition(Point):
    """One matrix: kappa over its draws with the interval, the ranks, the closed form and the known
    value."""

    kind: str
    policy: str
    weights: str
    tokens: int
    dim: int
    heads: int
    head_dim: int
    matrix: str  # the kind in words
    n: int
    kappa: float | None  # None: infinite, of a draw without full rank
    low: float | None
    high: float | None
    spread: float | None  # the standard deviation of its logarithms
    shown: str  # kappa with its interval
    k: int
    rank: int
    stable_rank: float | None
    effective_rank: float | None
    worst_head: float | None
    closed_form: float | None
    known: float | None
    known_sd: float | None
    known_n: int
    near: bool | None  # to the known value, as NOTE says; None: nothing to compare

    @property
    def name(self) -> str:
        layer = f", width {self.dim}, std {self.weights}, {self.policy}" if self.dim else ""
        return f"{self.matrix}, {self.tokens} tokens{layer}"


def summary(rows: list[Row]) -> list[Condition]:
    """One point per matrix."""
    from headwise.theory.gaussian import gaussian_kappa

    known, out = known_kappas(), []
    for sizes, draws in group(rows, *SIZES).items():
        fields = dict(zip(SIZES, sizes, strict=True))
        kind, width = fields["kind"], fields["heads"] * fields["head_dim"]
        closed = gaussian_kappa(fields["tokens"], width) if kind == "gaussian" else math.inf
        kappa = _kappa(kind, [row["kappa"] for row in draws])
        theirs = known.get(sizes, Known())
        out.append(
            Condition(
                **fields,
                matrix=MATRICES[kind],
                n=len(draws),
                **kappa,
                k=draws[0]["k"],
                rank=min(row["rank"] for row in draws),
                stable_rank=_geometric_mean([row["stable_rank"] for row in draws]),
                effective_rank=_geometric_mean([row["effective_rank"] for row in draws]),
                worst_head=_geometric_mean([row["worst_head"] for row in draws]),
                closed_form=_finite(closed),
                known=theirs.kappa,
                known_sd=theirs.deviation,
                known_n=theirs.draws,
                near=_near(kind, fields["dim"], kappa["kappa"], theirs),
            )
        )
    return sorted(out, key=lambda p: (-p.tokens, [*MATRICES].index(p.kind)))


def _kappa(kind: str, kappas: Sequence[float | None]) -> dict[str, Any]:
    """Mean and interval over the draws: of kappa itself for Gaussians, else of its logarithm."""
    finite = [kappa for kappa in kappas if kappa is not None]
    if len(finite) < len(kappas):
        return {"kappa": None, "low": None, "high": None, "spread": None, "shown": "infinite"}
    logs = [math.log(kappa) for kappa in finite]
    if kind == "gaussian":
        value, low, high, _ = mean(finite)
    else:
        found = mean(logs)
        value = math.exp(found.mean)
        low, high = (None if v is None else math.exp(v) for v in (found.low, found.high))
    return {
        "kappa": value,
        "low": low,
        "high": high,
        "spread": statistics.stdev(logs) if len(logs) > 1 else None,
        "shown": f"{value:.4g}" if low is None else f"{value:.4g} ({low:.4g} to {high:.4g})",
    }


def _geometric_mean(values: Sequence[float | None]) -> float | None:
    """None where a draw has none."""
    logs = [math.log(v) for v in values if v]
    return math.exp(math.fsum(logs) / len(logs)) if len(logs) == len(values) else None


def _near(kind: str, dim: int, kappa: float | None, known: Known) -> bool | None:
    """Whether kappa is as near to the known value as NOTE says."""
    if known.kappa is None or kappa is None:
        return None
    if kind == "gaussian":
        assert known.deviation is not None
        return abs(kappa - known.kappa) <= 3 * known.deviation
    if dim == 16:
        return abs(math.log(kappa / known.kappa)) <= math.log(10)
    return abs(kappa / known.kappa - 1) <= 0.2


# ---- the claim in numbers


def headline(points: Sequence[Condition]) -> list[str]:
    """From the fewest to the most heads, by matrix and policy; then how many are near the known
    values."""
    lines = []
    for line in _by_heads(points):
        shown = {line[0].heads: line[0], line[-1].heads: line[-1]}
        if line[0].kind == "gaussian":
            worst = max(line, key=lambda p: p.kappa or 0)
            shown[worst.heads] = worst
        values = ", ".join(
            f"{p.shown.partition(' (')[0]} with {p.heads} of {p.head_dim}"
            for _, p in sorted(shown.items())
        )
        lines.append(f"{line[0].name}: kappa {values}")
    compared = [p for p in points if p.near is not None]
    far = [p for p in compared if not p.near]
    farther = [p for p in far if not _scatters(p)]
    if compared:
        lines.append(
            f"{len(compared) - len(far)} of {len(compared)} near the known values, "
            f"{len(far) - len(farther)} more within what draws scatter"
        )
    lines += [
        f"  farther: {p.name}, {p.heads} heads: {p.shown} against {p.known:.4g}" for p in farther
    ]
    return lines


def _scatters(p: Condition) -> bool:
    """Whether two such means differ as much by chance, by 3 standard errors."""
    assert p.kappa is not None
    assert p.known is not None
    room = 3 * (p.spread or 0.0) * math.sqrt(1 / p.known_n + 1 / p.n)
    return abs(math.log(p.kappa / p.known)) <= room


def _by_heads(points: Sequence[Condition]) -> list[list[Condition]]:
    """The points of one matrix, size, policy and scale each, by heads."""
    found: dict[tuple[Any, ...], list[Condition]] = {}
    for p in points:
        found.setdefault((p.kind, p.tokens, p.dim, p.policy, p.weights), []).append(p)
    return [sorted(line, key=lambda p: p.heads) for line in found.values()]


# ---- the figure


def figure(points: Sequence[Condition]) -> LineFigure:
    """A panel per matrix and size, a line per policy and scale of weights, known values dashed."""
    panels: dict[str, list[Line]] = {}
    scales = sorted({p.weights for p in points if p.weights})
    for along in _by_heads(points):
        first = along[0]
        label, colour = "independent entries", 4
        if first.weights:
            label = f"{first.policy}, std {first.weights}"
            colour = POLICIES.index(first.policy) + 2 * scales.index(first.weights)
        lines = panels.setdefault(f"{first.matrix}, {first.tokens} tokens", [])
        lines.append(
            Line(
                label=label,
                colour=colour,
                x=[p.heads for p in along],
                y=[p.kappa for p in along],
                low=[p.low for p in along],
                high=[p.high for p in along],
            )
        )
        if closed := [(p.heads, p.closed_form) for p in along if p.closed_form is not None]:
            xs, ys = zip(*closed, strict=True)
            lines.append(Line(label="closed form", colour=4, style="line", x=xs, y=ys))
        # Where ours is infinite, theirs is rounding.
        known = [(p.heads, p.known) for p in along if p.known is not None and p.kappa is not None]
        if known:
            xs, ys = zip(*known, strict=True)
            lines.append(Line(label=f"known, {label}", colour=colour, style="dashed", x=xs, y=ys))
    return LineFigure(
        title="Condition numbers at random weights",
        x_label="heads",
        y_label="kappa",
        panels=[LinePanel(title=title, lines=lines) for title, lines in panels.items()],
        columns=3,
    )


EXPERIMENT = Experiment(
    name="conditioning",
    question="Do more heads make attention better conditioned?",
    about="condition numbers of attention by heads, at random weights",
    presets=PRESETS,
    columns=(
        ("matrix", "matrix"),
        ("policy", "policy"),
        ("weights", "std of weights"),
        ("tokens", "tokens"),
        ("heads", "heads"),
        ("head_dim", "head dim"),
        ("k", "k"),
        ("rank", "rank"),
        ("shown", "kappa"),
        ("n", "n"),
        ("closed_form", "closed form"),
        ("known", "known"),
        ("near", "near known"),
        ("stable_rank", "stable rank"),
        ("effective_rank", "effective rank"),
        ("worst_head", "worst head alone"),
    ),
    main_columns=("shown", "heads", "head_dim", "policy", "matrix", "tokens"),
    caption=(
        "Solid: kappa = largest over smallest of the k singular values, geometric mean over draws "
        "(of Gaussian matrices the mean) with its 95 % interval. Thin: the closed form for "
        "Gaussian matrices. Dashed: values known from an earlier computation of our own; none is "
        "published. A gap: infinite, because the matrix has less than full rank."
    ),
    notes={"quick": NOTE, "paper": NOTE},
    runs=runs,
    make=make,
    summary=summary,
    headline=headline,
    answer=of_conditioning,
    figure=figure,
)
