"""Do more heads make attention better conditioned? The statement of "Leaner Transformers"
(2505.20802) at random weights.

    headwise run conditioning                    quick: one scale of weights, 3 seeds; 2 CPU cores, about half a minute
    headwise run conditioning --preset paper     both scales, 48 heads, 5 seeds; 2 CPU cores, about 2 minutes; no GPU needed

Nothing is trained: singular values in float64 (headwise.theory.conditioning). Matrices: independent
Gaussians, for which the paper has a theorem; the heads' outputs [A_1..A_h] of a layer with random
weights, as they are and without their mean token; the Jacobian of a small layer with respect to
W_Q, W_K, W_V, before and after W_O. Policies: split (head_dim = dim / heads), widen (head_dim
kept). Expected at 197 tokens, 12 heads of 64: Gaussian 3.0, outputs of a layer of width 768 with
weights of std 0.02 about 145, centred 7.4. Jacobian, 8 tokens, heads of 8 in width 16, from 2 to 8
heads: before W_O no better, after W_O from thousands to about 20.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headwise.errors import UsageError, nearest
from headwise.experiments import base
from headwise.experiments.common import Computed, check_lists, published
from headwise.rows import Row
from headwise.seeds import derive
from headwise.stats import group, mean

if TYPE_CHECKING:
    import torch

QUESTION = "Do more heads make attention better conditioned?"
CAPTION = (
    "Solid: kappa = largest over smallest of the k singular values, geometric mean over draws (of "
    "Gaussian matrices the mean) with its "
    "95 % interval. Thin: the closed form for Gaussian matrices. Dashed: values known from an "
    "earlier computation of our own; none is "
    "published. A gap: infinite, because the matrix has less than full rank."
)
COLUMNS = (
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
)
NOTE = (
    "Known values are our own, from another program and other draws; the paper's are not known to "
    "us. Kappas with different k are kappas "
    "of different things: k grows with the heads until heads x head dim reaches the tokens. Near: "
    "within 3 standard deviations "
    "(Gaussian), 20 % (outputs), a factor of 10 (Jacobian and outputs of the small layer, which "
    "differ that much from draw to draw)."
)
NOTES = {"quick": NOTE, "paper": NOTE}
MATRICES = {
    "gaussian": "Gaussian", "outputs": "outputs of heads", "centred": "outputs, mean token removed",
    "before": "Jacobian before W_O", "after": "Jacobian after W_O",
}  # fmt: skip
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
class Settings(base.Settings):
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
        for name, least in (
            ("tokens", 2),
            ("dim", 1),
            ("head_dim", 1),
            ("small_tokens", 2),
            ("small_dim", 1),
            ("small_head_dim", 1),
        ):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for policy in self.policies:
            if policy not in POLICIES:
                raise UsageError(f"unknown policy {policy!r}; {nearest(policy, POLICIES)}")
        for text in self.weights:
            deviation(text, self.dim)
        for name, dim, heads in (
            ("heads", self.dim, self.heads),
            ("small_heads", self.small_dim, self.small_heads),
        ):
            bad = [h for h in heads if "split" in self.policies and dim % h]
            if bad:
                raise UsageError(
                    f"{name} must divide the width {dim} where it is split, got {bad[0]}"
                )


PRESETS = {
    "quick": Settings(heads=(1, 2, 4, 8, 12, 16), weights=("0.02",), seeds=3),
    "paper": Settings(heads=(1, 2, 4, 8, 12, 16, 24, 48), weights=("0.02", INVERSE), seeds=5),
}


@dataclass(frozen=True)
class Case(Computed):
    """One matrix. The same sizes and seed are the same draw, whatever is looked at."""

    experiment = "conditioning"
    kind: str  # of MATRICES
    policy: str
    weights: str  # their standard deviation; "": no weights
    tokens: int
    dim: int  # 0: no weights
    heads: int
    head_dim: int
    seed: int


def runs(settings: Settings) -> list[Case]:
    """Every matrix, seeds innermost."""
    s = settings
    many, out = range(MANY * s.seeds), []
    out += [
        Case("gaussian", "widen", "", s.tokens, 0, h, s.head_dim, seed)
        for h in s.gaussian_heads
        for seed in many
    ]
    for policy in s.policies:
        for h in s.heads:
            width = s.dim // h if policy == "split" else s.head_dim
            for weights in s.weights:
                for kind in ("outputs", "centred"):
                    out += [
                        Case(kind, policy, weights, s.tokens, s.dim, h, width, seed)
                        for seed in range(s.seeds)
                    ]
        for h in s.small_heads:
            width = s.small_dim // h if policy == "split" else s.small_head_dim
            for kind in ("outputs", "before", "after"):
                out += [
                    Case(kind, policy, INVERSE, s.small_tokens, s.small_dim, h, width, seed)
                    for seed in many
                ]
    return list({case.id: case for case in out}.values())


def make(case: Case, device: str) -> Row:
    """Draw a matrix and measure it; an infinite kappa is null in its row."""
    import torch

    from headwise.theory.spectrum import spectrum

    began, c = time.monotonic(), case
    seed = derive(c.seed, "conditioning", c.weights, c.tokens, c.dim, c.heads, c.head_dim)
    matrix, worst = _draw(c, torch.Generator(device).manual_seed(seed))
    found = spectrum(matrix, centred=c.kind == "centred")
    values = {
        name: getattr(found, name).item()
        for name in ("largest", "smallest", "kappa", "stable_rank", "effective_rank", "rank")
    }
    values["kappa"] = _finite(values["kappa"])
    return {
        "id": c.id,
        "status": "done",
        **asdict(c),
        "k": found.k,
        **values,
        "worst_head": worst,
        "seconds": round(time.monotonic() - began, 3),
    }


def _draw(c: Case, generator: torch.Generator) -> tuple[torch.Tensor, float | None]:
    """The matrix, and of a Jacobian before W_O the kappa of the worst head's block."""
    from headwise.theory import conditioning as theory
    from headwise.theory.jacobian import head_blocks, jacobian
    from headwise.theory.spectrum import spectrum

    if c.kind == "gaussian":
        return theory.random_tokens(
            c.tokens, c.heads * c.head_dim, generator, normalised=False
        ), None
    x = theory.random_tokens(c.tokens, c.dim, generator)
    layer = theory.random_attention(
        c.dim, c.heads, c.head_dim, deviation(c.weights, c.dim), generator
    )
    if c.kind in ("outputs", "centred"):
        return theory.layer_outputs(layer, x), None
    J = jacobian(layer, x, after=c.kind == "after")
    return J, None if c.kind == "after" else _finite(
        spectrum(head_blocks(layer, J)[0]).kappa.max().item()
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _known() -> dict[tuple[Any, ...], tuple[float, float | None, int]]:
    """(kind, policy, weights, tokens, dim, heads, head_dim) -> (kappa, its standard deviation if
    known, how many draws)."""
    out: dict[tuple[Any, ...], tuple[float, float | None, int]] = {}
    for r in published("leaner_kappa_gaussian"):
        out["gaussian", "widen", "", int(r["N"]), 0, int(r["heads"]), int(r["head_dim"])] = (
            float(r["mc_mean"]),
            float(r["mc_std"]),
            20,
        )
    for r in published("leaner_kappa_init_attention"):
        key = (
            {"fixed64": "widen", "shrinking": "split"}[r["policy"]],
            r["weight_std"],
            197,
            768,
            int(r["heads"]),
            int(r["head_dim"]),
        )
        for kind, column in (("outputs", "kappa"), ("centred", "kappa_centred")):
            out[kind, *key] = float(r[column]), None, 5
    for r in published("leaner_kappa_jacobian_toy"):
        key = (
            {"fixed": "widen", "split": "split"}[r["policy"]],
            INVERSE,
            8,
            16,
            int(r["heads"]),
            int(r["head_dim"]),
        )
        for kind, column in (
            ("outputs", "kappa_A"),
            ("before", "kappa_J_concat"),
            ("after", "kappa_J_after_WO"),
        ):
            out[kind, *key] = float(r[column]), None, 4
    return out


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """One point a matrix: kappa over the draws with its interval, the ranks, the closed form and
    the known value."""
    from headwise.theory.spectrum import gaussian_kappa

    known, out, keys = (
        _known(),
        [],
        ("kind", "policy", "weights", "tokens", "dim", "heads", "head_dim"),
    )
    for key, same in group(rows, *keys).items():
        point = dict(zip(keys, key, strict=True))
        value, sd, draws = known.get(key, (None, None, 0))
        point |= {
            "matrix": MATRICES[point["kind"]],
            "n": len(same),
            **_kappa(point["kind"], [r["kappa"] for r in same]),
        }
        point |= {"k": same[0]["k"], "rank": min(r["rank"] for r in same)}
        point |= {
            name: _geometric([r[name] for r in same])
            for name in ("stable_rank", "effective_rank", "worst_head")
        }
        width = point["heads"] * point["head_dim"]
        point["closed_form"] = (
            _finite(gaussian_kappa(point["tokens"], width)) if point["kind"] == "gaussian" else None
        )
        point |= {"known": value, "known_sd": sd, "known_n": draws, "near": None}
        point["near"] = _near(point)
        out.append(point)
    return sorted(out, key=lambda p: (-p["tokens"], list(MATRICES).index(p["kind"])))


def _kappa(kind: str, kappas: Sequence[float | None]) -> dict[str, Any]:
    """Mean and interval, of logarithms unless Gaussian; None if a draw has no full rank. `spread`
    is the logarithms' deviation."""
    finite = [k for k in kappas if k is not None]
    if len(finite) < len(kappas):
        return {"kappa": None, "low": None, "high": None, "spread": None, "shown": "infinite"}
    logs = [math.log(k) for k in finite]
    found = mean(finite if kind == "gaussian" else logs)
    back = (lambda v: v) if kind == "gaussian" else math.exp
    low, high = (None if v is None else back(v) for v in (found.low, found.high))
    value = back(found.mean)
    shown = f"{value:.4g}" if low is None else f"{value:.4g} ({low:.4g} to {high:.4g})"
    return {
        "kappa": value,
        "low": low,
        "high": high,
        "spread": statistics.stdev(logs) if len(logs) > 1 else None,
        "shown": shown,
    }


def _geometric(values: Sequence[float | None]) -> float | None:
    logs = [math.log(v) for v in values if v]
    return math.exp(math.fsum(logs) / len(logs)) if len(logs) == len(values) else None


def _near(p: dict[str, Any]) -> bool | None:
    """Whether kappa is as near to the known value as NOTE says; None where there is nothing to
    compare."""
    if p["known"] is None or p["kappa"] is None:
        return None
    if p["kind"] == "gaussian":
        return abs(p["kappa"] - p["known"]) <= 3 * p["known_sd"]
    if p["dim"] == 16:
        return abs(math.log(p["kappa"] / p["known"])) <= math.log(10)
    return abs(p["kappa"] / p["known"] - 1) <= 0.2


def headline(points: list[dict[str, Any]]) -> list[str]:
    """From the fewest to the most heads, by matrix and policy; then how many are near the known
    values."""
    lines = []
    for line in _lines(points):
        ends = [line[0], line[-1]] if line[0] is not line[-1] else line
        if ends[0]["kind"] == "gaussian":
            ends = sorted(
                {id(p): p for p in (*ends, max(line, key=lambda p: p["kappa"] or 0))}.values(),
                key=lambda p: p["heads"],
            )
        told = ", ".join(
            f"{p['shown'].partition(' (')[0]} with {p['heads']} of {p['head_dim']}" for p in ends
        )
        lines.append(f"{_name(line[0])}: kappa {told}")
    known = [p for p in points if p["near"] is not None]
    far = [p for p in known if not p["near"]]
    if known:
        odd = [p for p in far if not _scatters(p)]
        lines.append(
            f"{len(known) - len(far)} of {len(known)} near the known values, "
            f"{len(far) - len(odd)} more within what draws scatter"
        )
        lines += [
            f"  farther: {_name(p)}, {p['heads']} heads: {p['shown']} against {p['known']:.4g}"
            for p in odd
        ]
    return lines


def _scatters(p: dict[str, Any]) -> bool:
    """Whether two such means differ as much by chance, by 3 standard errors."""
    room = 3 * (p["spread"] or 0.0) * math.sqrt(1 / p["known_n"] + 1 / p["n"])
    return abs(math.log(p["kappa"] / p["known"])) <= room


def _lines(points: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The points of one matrix, size, policy and scale each, by heads."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for p in points:
        found.setdefault(
            tuple(p[key] for key in ("kind", "tokens", "dim", "policy", "weights")), []
        ).append(p)
    return [sorted(line, key=lambda p: p["heads"]) for line in found.values()]


def _name(p: dict[str, Any]) -> str:
    layer = f", width {p['dim']}, std {p['weights']}, {p['policy']}" if p["dim"] else ""
    return f"{p['matrix']}, {p['tokens']} tokens{layer}"


def figure(points: list[dict[str, Any]]) -> dict[str, Any]:
    """A panel per matrix and size, a line per policy and scale of weights, known values dashed."""
    panels: dict[str, list[dict[str, Any]]] = {}
    scales = sorted({p["weights"] for p in points if p["weights"]})
    for line in _lines(points):
        p = line[0]
        drawn = panels.setdefault(f"{p['matrix']}, {p['tokens']} tokens", [])
        label = f"{p['policy']}, std {p['weights']}" if p["weights"] else "independent entries"
        colour = POLICIES.index(p["policy"]) + 2 * scales.index(p["weights"]) if p["weights"] else 4
        values = {
            key: [q[of] for q in line]
            for key, of in (("x", "heads"), ("y", "kappa"), ("low", "low"), ("high", "high"))
        }
        drawn.append({"label": label, "colour": colour, "style": "solid", **values})
        closed = [q for q in line if q["closed_form"] is not None]
        if closed:
            none = [None] * len(closed)
            values = {
                "x": [q["heads"] for q in closed],
                "y": [q["closed_form"] for q in closed],
                "low": none,
                "high": none,
            }
            drawn.append({"label": "closed form", "colour": 4, "style": "line", **values})
        known = [
            q for q in line if q["known"] is not None and q["kappa"] is not None
        ]  # where ours is infinite, theirs is rounding
        if known:
            values = {"x": [q["heads"] for q in known], "y": [q["known"] for q in known]}
            drawn.append(
                {"label": f"known, {label}", "colour": colour, "style": "dashed", **values}
            )
    return {
        "title": "Condition numbers at random weights",
        "x_label": "heads",
        "y_label": "kappa",
        "panels": [{"title": title, "lines": lines} for title, lines in panels.items()],
        "columns": 3,
    }
