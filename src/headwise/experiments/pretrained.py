"""Decoders trained one by one with headwise pretrain, side by side.

    headwise pretrain --text book.txt --set dim=256 depth=6 num_heads=2
    headwise pretrain --text book.txt --set dim=256 depth=6 num_heads=8
    headwise report

Nothing is held equal but what you held equal: each decoder is named by what sets it apart, and the
table has its arithmetic. Seeds of one decoder (`--seed`) are one point with an interval.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headwise.experiments.base import Experiment, Settings
from headwise.experiments.best import TOGETHER, best_in_words
from headwise.experiments.points import Measured, gap_in_words, groups, interval
from headwise.experiments.shapes import heads_in_words, shape_of_row
from headwise.lm.spec import Pretraining
from headwise.rows import Row
from headwise.shape import Shape
from headwise.show.figure import Range, RangeFigure, RangePanel
from headwise.stats import Mean, difference, group

# What two decoders on one text may differ in: everything in the specification but the seed.
COLUMNS = (
    *Shape.__dataclass_fields__,
    *(
        field.name
        for field in dataclasses.fields(Pretraining)
        if field.name not in ("shape", "seed", "source", "tokenizer")
    ),
)
IN_HEADS = (  # columns that `heads_in_words` says most of
    "num_heads",
    "head_dim",
    "v_head_dim",
    "num_kv_heads",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "input_dim",
    "output_dim",
)
WORDS = {
    "depth": "{} layers",
    "dim": "dim {}",
    "ffn_dim": "feed-forward {}",
    "lr": "rate {}",
    "steps": "{} steps",
    "qk_rope_head_dim": "{} rotated",
}


@dataclass(frozen=True, kw_only=True)
class Pretrained(Measured):
    """One decoder on one text; the held-out error is in bits per byte."""

    text: str
    digest: str  # of the text's content
    name: str
    params: int
    flops: str  # of the training
    tokens: int
    lr: float
    kv_bytes: int
    repeats: float | None  # recall in text
    tokens_per_second: float | None
    mfu: float | None
    gap: Mean | None = None  # to the best on the same text
    change: str | None = None  # the gap in words


# ---- points


def summary(rows: list[Row]) -> list[Pretrained]:
    """One point per text and decoder, seeds together, the best first."""
    out = [point for of_text in group(rows, "digest").values() for point in _on_one_text(of_text)]
    return sorted(out, key=lambda p: (p.text, p.digest))


def _on_one_text(rows: list[Row]) -> list[Pretrained]:
    """Its decoders, the best first, each with its gap to the best."""
    # Rows that agree in all but the seed are one decoder. A list of values as text is a key that
    # any value allows.
    by_decoder: dict[str, list[Row]] = {}
    for row in rows:
        by_decoder.setdefault(repr([row.get(column) for column in COLUMNS]), []).append(row)
    decoders = list(by_decoder.values())
    names = _names([of_decoder[0] for of_decoder in decoders])
    # One content may have several names.
    text = " = ".join(sorted({_text_name(row) for row in rows}))
    points = [
        _point(of_decoder, name, text) for of_decoder, name in zip(decoders, names, strict=True)
    ]
    points.sort(key=lambda p: (p.held_out is None, p.held_out, p.name))
    best, *others = points
    return [best, *(_against(p, best) for p in others)]


def _text_name(row: Row) -> str:
    name = Path(row["source"]).name if row["source"] else "generated text"
    return name + (f", {Path(row['tokenizer']).name}" if row["tokenizer"] else "")


def _point(rows: list[Row], name: str, text: str) -> Pretrained:
    first, shape = rows[0], shape_of_row(rows[0])
    values = [row["bits_per_byte"] for row in rows if row["status"] == "done"]
    repeats = [row["repeats"] for row in rows if row.get("repeats") is not None]
    return Pretrained(
        text=text,
        digest=first["digest"],
        name=name,
        params=shape.params,
        flops=f"{first['flops'] * first['steps']:.3g}",
        tokens=first["steps"] * first["batch_tokens"],
        lr=first["lr"],
        kv_bytes=shape.kv_bytes(),
        n=len(values),
        diverged=len(rows) - len(values),
        values=values,
        runs=[row["id"] for row in rows if row["status"] == "done"],
        **interval(values),
        repeats=sum(repeats) / len(repeats) if repeats else None,
        tokens_per_second=_largest(rows, "tokens_per_second"),
        mfu=_largest(rows, "mfu"),
    )


def _largest(rows: list[Row], column: str) -> float | None:
    return max((row[column] for row in rows if row.get(column)), default=None)


def _against(p: Pretrained, best: Pretrained) -> Pretrained:
    if not p.values:
        return p
    gap = difference(p.values, best.values)
    return dataclasses.replace(p, gap=gap, change=gap_in_words(gap))


# ---- names


def _names(decoders: list[Row]) -> list[str]:
    """Each by its heads and by what sets it apart from the others. Where that leaves two alike,
    they are named by everything they differ in."""
    # First what differs among all decoders, without what the heads' words say anyhow; then what
    # tells the rest apart.
    differing = [c for c in COLUMNS if c not in IN_HEADS and _differ(decoders, c)]
    names = [_in_words(row, differing) for row in decoders]
    out = []
    for row, name in zip(decoders, names, strict=True):
        alike = [other for other, its in zip(decoders, names, strict=True) if its == name]
        further = [c for c in IN_HEADS if _differ(alike, c)]
        out.append(_in_words(row, [*differing, *further]))
    return out


def _differ(rows: list[Row], column: str) -> bool:
    return len({repr(row.get(column)) for row in rows}) > 1


def _in_words(row: Row, columns: list[str]) -> str:
    said = [WORDS.get(column, column + " {}").format(row.get(column)) for column in columns]
    return ", ".join([heads_in_words(shape_of_row(row)), *said])


# ---- the claim in numbers, and the figure


def headline(points: Sequence[Pretrained]) -> list[str]:
    """For every text the best, and which cannot be told apart from it."""
    lines = []
    for of_text in groups(points, "text", "digest").values():
        if of_text[0].held_out is None:
            continue
        words = best_in_words(of_text, lambda p: p.name, "decoders", "bits per byte")
        more = " (more seeds with --seed)" if len(of_text) > 1 and of_text[0].one_seed else ""
        lines.append(f"{of_text[0].text}: {words}{more}")
    return lines


def answer(points: Sequence[Pretrained]) -> str:
    """The best decoder of every text."""
    said = []
    for of_text in groups(points, "text", "digest").values():
        known = [p for p in of_text if p.held_out is not None]
        if len(known) == 1:
            said.append(f"{known[0].name} says {known[0].text} in {known[0].error} bits per byte")
        elif known:
            words = best_in_words(known, lambda p: p.name, "decoders", "bits per byte")
            said.append(f"on {known[0].text}: {words}")
    return "; ".join(said[:2]) + (f"; and {len(said) - 2} more texts" if len(said) > 2 else "")


def figure(points: Sequence[Pretrained]) -> RangeFigure:
    """A panel per text with something to compare: every decoder's bits per byte beyond the best
    one's."""
    # A text with a single decoder has nothing to compare; it is shown only where there is no other.
    known = [
        [p for p in of_text if p.held_out is not None]
        for of_text in groups(points, "text", "digest").values()
    ]
    compared = [of_text for of_text in known if len(of_text) > 1] or known[:1]
    panels = [
        RangePanel(
            title=of_text[0].text if of_text else "",
            x_label="bits per byte more than the fewest",
            ranges=[_range(p) for p in of_text],
        )
        for of_text in compared
    ]
    return RangeFigure(title="Decoders trained one by one", panels=panels)


def _range(p: Pretrained) -> Range:
    """The gap to the best; the best itself stands at zero."""
    if p.gap is None:
        return Range(name=p.name, label="held out", colour=0, mean=0.0, hollow=p.one_seed)
    ends = {"low": p.gap.low, "high": p.gap.high, "hollow": p.gap.low is None}
    return Range(name=p.name, label="held out", colour=0, mean=p.gap.mean, **ends)


def _no_runs(settings: Settings) -> list[Pretraining]:
    """They are trained by `headwise pretrain`, one at a time."""
    return []


EXPERIMENT = Experiment(
    name="pretrain",
    question="Which of the decoders trained here says its text in the fewest bits?",
    about="decoders trained one by one with headwise pretrain",
    presets={},
    columns=(
        ("text", "text"),
        ("name", "decoder"),
        ("params", "parameters"),
        ("flops", "training FLOPs"),
        ("tokens", "tokens"),
        ("lr", "rate"),
        ("kv_bytes", "cache bytes per token"),
        ("held_out", "bits per byte"),
        ("n", "n"),
        ("diverged", "diverged"),
        ("change", "against fewest"),
        ("repeats", "recall in text"),
        ("tokens_per_second", "tokens/s"),
        ("mfu", "of the peak"),
    ),
    main_columns=("name", "held_out", "params", "tokens", "change"),
    caption=(
        "Held-out bits per byte beyond the fewest on the same text; a 95 % interval where both "
        f"have several seeds. {TOGETHER} Budgets differ unless you made them equal: see the table."
    ),
    runs=_no_runs,
    summary=summary,
    headline=headline,
    answer=answer,
    figure=figure,
)
