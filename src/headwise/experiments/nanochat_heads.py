"""The nanochat question: fewer, larger heads, queries wider than values, fewer KV heads, a latent,
at one exact budget of arithmetic?

    headwise run nanochat_heads
    headwise run nanochat_heads --preset paper --set source=FOLDER

quick: width 64, bytes of a generated text; 2 CPU cores, minutes. paper (the larger preset, no
paper's size and none of nanochat's): width 512, 8 layers; one GPU, seven seconds per run.

A nanochat-style decoder (RMS norm, rotary positions, norms of queries and keys without gains,
squared ReLU, untied head) of one width and depth. Every arm sees the same tokens and costs the same
FLOPs per token: what its attention does not use goes into the feed-forward, in whole numbers, and
the table has what remains. Under the norm of queries and keys scores grow with the root of the
rank, so every arm has the same largest score; `logit` makes it larger, `scale` lets it grow, so
that random scores spread alike at every rank. Rates are tuned per arm, on a seed that is not
counted: the same values for all, and further from the smallest or the largest where that is best.

Expected of the quick preset: two heads of 32 and four of 16 do best, no difference found between
them, one of 64 and eight of 8 are 0.01 bits worse than the best. Of the paper preset: heads of 64
and 32 are 0.03 and 0.06 bits worse than of 128, of 256 and 512 no difference found; queries and
keys of rank 256 0.015 better, two KV heads for four 0.015 worse, a latent of a third of the width
0.04 (`docs/nanochat.md`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwise.experiments.base import Experiment, Note
from headwise.experiments.best import TOGETHER, best_in_words
from headwise.experiments.nanochat_arms import (
    FAMILIES,
    PRESETS,
    NanochatSettings,
    arms,
    base_among,
    families_of,
    has_bases_heads,
)
from headwise.experiments.points import Tuned
from headwise.experiments.shapes import heads_in_words, shape_of_row
from headwise.experiments.tuning import (
    edge_warning,
    gap_between,
    later_runs,
    next_round,
    rows_at_best_rate,
    tuned,
)
from headwise.lm.spec import Pretraining
from headwise.rows import Row
from headwise.shape import Shape
from headwise.show.figure import Range, RangeFigure, RangePanel

Gap = tuple[float, float | None, float | None]  # a mean difference and the ends of its interval
TREATMENT = {"scale": ", one spread", "unnormed": ", not normed", "mla": ", not normed"}


# ---- runs in two rounds


def runs(s: NanochatSettings) -> list[Pretraining]:
    """The tuning: every arm at every rate, one seed."""
    shapes = dict.fromkeys(arms(s).values())
    return [_pretraining(s, shape, lr) for shape in shapes for lr in s.lrs]


def _pretraining(s: NanochatSettings, shape: Shape, lr: float) -> Pretraining:
    return Pretraining(
        shape=shape,
        steps=s.steps,
        batch_tokens=s.batch_tokens,
        length=s.length,
        source=s.source,
        tokenizer=s.tokenizer,
        optimiser=s.optimiser,
        lr=lr,
        precision=s.precision,
        eval_tokens=s.eval_tokens,
        evals=1,
        seed=0,
    )


def then(s: NanochatSettings, rows: list[Row]) -> list[Pretraining]:
    """More tuning for an arm whose best rate is the last to a side; for the others the
    measurement."""
    return next_round(runs(s), [_in_bits(row) for row in rows], s.seeds, s.further)


def later(s: NanochatSettings) -> tuple[int, int]:
    """How many runs that will be, at least and at most."""
    return later_runs(runs(s), s.seeds, s.further)


def _in_bits(row: Row) -> Row:
    """The row with its held-out error in bits per byte."""
    return {**row, "held_out": row["bits_per_byte"]}


# ---- points


@dataclass(frozen=True, kw_only=True)
class Arm(Tuned):
    """One arm and what it varies: bits per byte, recall, and the difference from the base."""

    family: str
    arm: str
    logit: float | None
    heads: int
    kv: int
    rank: int
    width: int  # of a head's values
    latent: int | None
    ffn: int
    params: int
    off: float  # FLOPs against the base's
    kv_bytes: int
    recall: float | None  # of random pairs
    repeats: float | None  # recall in text
    tokens_per_second: float | None
    base: bool  # whether its family is compared with it
    gap: Gap | None
    change: str | None  # the gap in words
    repeats_gap: Gap | None
    repeats_change: str | None


def summary(rows: list[Row]) -> list[Arm]:
    """One point per arm and what it varies.

    Arms without the norm of queries and keys, or with scores that grow, are compared with the
    base's heads treated alike.
    """
    # Shapes tell the base, the base tells the families, and each family has a member that the
    # others are compared with.
    by_shape: dict[Shape, list[Row]] = {}
    for row in rows:
        by_shape.setdefault(shape_of_row(row), []).append(_in_bits(row))
    if not by_shape:
        return []
    base = base_among(set(by_shape))
    # The base is in several families; an arm alone in its family has nothing beside it and is left
    # out.
    members = [(family, shape) for shape in by_shape for family in families_of(shape, base)]
    compared_with = {family: shape for family, shape in members if has_bases_heads(shape, base)}
    sizes = Counter(family for family, _ in members)
    points = [
        _arm(family, shape, base, compared_with.get(family, shape), by_shape)
        for family, shape in members
        if sizes[family] > 1 or len(by_shape) == 1
    ]
    order = list(FAMILIES)
    return sorted(
        points,
        key=lambda p: (order.index(p.family), p.logit or 0, -p.rank, -p.kv, p.latent or 0),
    )


def _arm(
    family: str, shape: Shape, base: Shape, like: Shape, by_shape: dict[Shape, list[Row]]
) -> Arm:
    """The point of one arm; `like` is the shape that it is compared with."""
    # Numbers that need no comparison are of the rows at the best rate.
    rows = by_shape[shape]
    name = heads_in_words(shape)
    if shape.max_logit and shape.max_logit != base.max_logit:
        name += f", to {shape.max_logit:g}"
    counted = rows_at_best_rate(rows)
    speeds = [row["tokens_per_second"] for row in counted if row["tokens_per_second"]]
    return Arm(
        family=family,
        arm=name,
        logit=shape.max_logit,
        heads=shape.num_heads,
        kv=shape.num_kv_heads,
        rank=shape.head_dim,
        width=shape.v_head_dim,
        latent=shape.kv_lora_rank or None,
        ffn=shape.ffn_dim,
        params=shape.params,
        off=rows[0]["flops"] / by_shape[base][0]["flops"] - 1,
        kv_bytes=shape.kv_bytes(),
        **tuned(rows),
        recall=_mean_of(counted, "recall"),
        repeats=_mean_of(counted, "repeats"),
        tokens_per_second=max(speeds, default=None),
        base=has_bases_heads(shape, base),
        **_gaps(rows, by_shape[like] if like != shape else None),
    )


def _mean_of(rows: list[Row], column: str) -> float | None:
    values = [row[column] for row in rows if row.get(column) is not None]
    return sum(values) / len(values) if values else None


def _gaps(rows: list[Row], base: list[Row] | None) -> dict[str, Any]:
    """The differences from the base in bits per byte and in recall; None of the base itself."""
    if base is None:
        return dict.fromkeys(("gap", "change", "repeats_gap", "repeats_change"))
    gap, change = gap_between(rows, base)
    repeats_gap, repeats_change = gap_between(rows, base, "repeats")
    return {
        "gap": gap and (gap.mean, gap.low, gap.high),
        "change": change,
        "repeats_gap": repeats_gap and (repeats_gap.mean, repeats_gap.low, repeats_gap.high),
        "repeats_change": repeats_change,
    }


# ---- the claim in numbers


def headline(points: Sequence[Arm]) -> list[str]:
    """For each thing that is varied: its arms against the base."""
    lines = []
    for family in FAMILIES:
        known = [
            f"{p.arm} {p.cell('held_out')}" + (f" ({p.change})" if p.change else "")
            for p in points
            if p.family == family and p.held_out is not None
        ]
        if known:
            lines.append(f"{family}: " + "; ".join(known))
    cuts = [p for p in points if p.family == "split" and p.values]
    if len(cuts) > 1:
        lines.append("cuts: " + best_in_words(cuts, lambda p: p.arm, "cuts", "bits per byte"))
    return lines + edge_warning(_each_once(points), "arms")


def answer(points: Sequence[Arm]) -> str:
    """The best way to cut one width into heads."""
    cuts = [p for p in points if p.family == "split" and p.values]
    best = best_in_words(cuts, lambda p: p.arm, "cuts", "bits per byte")
    return f"Of {len(cuts)} ways to cut one width into heads: {best}" if len(cuts) > 1 else ""


def _each_once(points: Sequence[Arm]) -> list[Arm]:
    """The base is in several families."""
    found = {}
    for p in points:
        own = p.logit is None or p.family == "latent"
        found[p.arm, p.family if own else ""] = p
    return list(found.values())


# ---- the figure


def figure(points: Sequence[Arm]) -> RangeFigure:
    """Every arm's difference from the base with its interval, a colour for what it varies; bits per
    byte, and recall in text."""
    base = next((p.arm for p in points if p.base), "the base")
    bits = [_range(p, p.gap) for p in points if p.gap is not None]
    repeats = [_range(p, p.repeats_gap) for p in points if p.repeats_gap is not None]
    panels = [
        RangePanel(
            title="held-out bits per byte, less is better",
            x_label=f"more than {base} of its kind",
            ranges=bits,
        ),
        RangePanel(
            title="recall in text, more is better",
            x_label=f"more often right than {base} of its kind",
            ranges=repeats,
        ),
    ]
    panels = [panel for panel in panels if not panel.empty]
    return RangeFigure(
        title="Heads of a language model at one budget of arithmetic",
        columns=len(panels) or 1,
        panels=panels,
    )


def _range(p: Arm, gap: Gap) -> Range:
    mean, low, high = gap
    return Range(
        name=p.arm + TREATMENT.get(p.family, ""),
        label=FAMILIES[p.family],
        colour=list(FAMILIES).index(p.family),
        mean=mean,
        low=low,
        high=high,
        hollow=low is None,
    )


EXPERIMENT = Experiment(
    name="nanochat_heads",
    question="At one budget of arithmetic, which heads does a language model want?",
    about="heads, KV heads and latents of a decoder at equal FLOPs",
    presets=PRESETS,
    columns=(
        ("family", "varied"),
        ("arm", "arm"),
        ("heads", "heads"),
        ("kv", "KV heads"),
        ("rank", "rank"),
        ("width", "value width"),
        ("latent", "latent"),
        ("ffn", "feed-forward"),
        ("params", "parameters"),
        ("off", "off budget"),
        ("kv_bytes", "cache bytes per token"),
        ("lr", "tuned rate"),
        ("held_out", "bits per byte"),
        ("n", "n"),
        ("diverged", "diverged"),
        ("change", "against base"),
        ("repeats", "recall in text"),
        ("repeats_change", "against base"),
        ("recall", "recall of random pairs"),
        ("tokens_per_second", "tokens/s"),
    ),
    main_columns=("arm", "held_out", "change", "heads", "rank", "family", "params", "n"),
    caption=(
        "Held-out bits per byte, mean over seeds at the tuned learning rate with its 95 % "
        f"interval; every arm has the FLOPs of the base. {TOGETHER} In the figure a colour has a "
        "base of its own, treated alike, except for larger scores: bars of two colours do not "
        "start from one loss. "
        "Recall in text: how often the same model has a token right whose pair with the one before "
        "is rare but occurred before in the window; of random pairs: how often, shown pairs of "
        "random tokens, it tells the second of a pair from the first."
    ),
    notes={
        "paper": Note(
            "This preset is named paper for being the larger one: width 512, with 8.2 million "
            "tokens for 29 million parameters, is no paper's size and none of nanochat's.",
            ("dim", "depth", "vocab", "steps", "batch_tokens"),
        )
    },
    runs=runs,
    then=then,
    later=later,
    summary=summary,
    headline=headline,
    answer=answer,
    figure=figure,
    meanings={
        "rank": "rank of the base's heads",
        "families": "what is varied: split, logit, scale, unnormed, query, kv, latent, mla",
        "ranks": "split: heads are dim / rank",
        "controls": "ranks of logit, scale and unnormed, beside the base's",
        "logits": "other largest scores than max_logit",
        "queries": "query/key ranks of the base's heads",
        "kv_heads": "numbers of KV heads",
        "latents": "widths of the latent",
        "max_logit": "largest score of the base",
        "tokenizer": "a tokenizers file; bytes where empty",
        "vocab": "ids of the tables",
        "length": "tokens per sequence",
        "batch_tokens": "tokens per step",
        "optimiser": "muon or adamw",
        "eval_tokens": "tokens that the held-out loss is measured on",
        "source": "a text file or a folder of them; generated where empty",
    },
)
