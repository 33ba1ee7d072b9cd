"""Decoders trained one by one with headwise pretrain, side by side.

    headwise pretrain --text book.txt --set dim=256 depth=6 num_heads=2
    headwise pretrain --text book.txt --set dim=256 depth=6 num_heads=8
    headwise report

Nothing is held equal but what you held equal: each is named by what sets it apart, and the table
has its arithmetic. Seeds of one decoder (`--seed`) are one line with an interval.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from headwise.experiments.common import change, interval, name_of, shape_in
from headwise.lm.spec import Pretraining
from headwise.rows import Row
from headwise.shape import Shape
from headwise.stats import difference, group

QUESTION = "Which of the decoders trained here says its text in the fewest bits?"
COLUMNS = (
    ("text", "text"),
    ("name", "decoder"),
    ("params", "parameters"),
    ("flops", "training FLOPs"),
    ("tokens", "tokens"),
    ("lr", "rate"),
    ("kv_bytes", "cache bytes a token"),
    ("held_out", "bits per byte"),
    ("n", "n"),
    ("diverged", "diverged"),
    ("change", "against best"),
    ("repeats", "recall in text"),
    ("tokens_per_second", "tokens/s"),
    ("mfu", "of the peak"),
)
CAPTION = (
    "Held-out bits per byte beyond those of the best decoder on the same text; a 95 % interval "
    "where both have several seeds. "
    "Budgets differ unless you made them equal: see the table."
)
KNOBS = (
    *Shape.__dataclass_fields__,
    *(
        f.name
        for f in fields(Pretraining)
        if f.name not in ("shape", "seed", "source", "tokenizer")
    ),
)


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """One point per text and decoder, seeds together, the best first."""
    out: list[dict[str, Any]] = []
    for of_text in group(rows, "digest").values():
        alike: dict[str, list[Row]] = {}
        for row in of_text:
            alike.setdefault(repr([row.get(knob) for knob in KNOBS]), []).append(row)
        decoders = list(alike.values())
        points = [
            _point(same, name)
            for same, name in zip(decoders, _names([same[0] for same in decoders]), strict=True)
        ]
        points.sort(key=lambda p: (p["held_out"] is None, p["held_out"], p["name"]))
        text = " = ".join(
            sorted({_text(row) for row in of_text})
        )  # one content may have several names
        for point in points:
            gap = (
                difference(point["values"], points[0]["values"])
                if point["values"] and point is not points[0]
                else None
            )
            point |= {"text": text, "gap": gap, "change": change(gap) if gap else None}
        out += points
    return sorted(out, key=lambda p: (p["text"], p["digest"]))


def _text(row: Row) -> str:
    name = Path(row["source"]).name if row["source"] else "generated text"
    return name + (f", {Path(row['tokenizer']).name}" if row["tokenizer"] else "")


def _names(decoders: list[Row]) -> list[str]:
    """Each by its heads and by what sets it apart from the others; where that leaves two alike, by
    everything they differ in."""
    told = [knob for knob in KNOBS if knob not in _IN_NAME and _vary(decoders, knob)]
    names = [_said(row, told) for row in decoders]
    out = []
    for row, name in zip(decoders, names, strict=True):
        same = [other for other, its in zip(decoders, names, strict=True) if its == name]
        out.append(
            _said(row, [*told, *(k for k in _IN_NAME if _vary(same, k))]) if len(same) > 1 else name
        )
    return out


def _vary(rows: list[Row], knob: str) -> bool:
    return len({repr(row.get(knob)) for row in rows}) > 1


def _said(row: Row, knobs: list[str]) -> str:
    return ", ".join(
        (name_of(shape_in(row)), *(_SAID.get(k, k + " {}").format(row.get(k)) for k in knobs))
    )


_IN_NAME = (
    "num_heads",
    "head_dim",
    "v_head_dim",
    "num_kv_heads",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "input_dim",
    "output_dim",
)
_SAID = {
    "depth": "{} layers",
    "dim": "dim {}",
    "ffn_dim": "feed-forward {}",
    "lr": "rate {}",
    "steps": "{} steps",
    "qk_rope_head_dim": "{} rotated",
}


def _point(same: list[Row], name: str) -> dict[str, Any]:
    first, shape = same[0], shape_in(same[0])
    values = [r["bits_per_byte"] for r in same if r["status"] == "done"]
    repeated = [r["repeats"] for r in same if r.get("repeats") is not None]
    speeds, shares = ([r[key] for r in same if r.get(key)] for key in ("tokens_per_second", "mfu"))
    return {
        "digest": first["digest"],
        "name": name,
        "params": shape.params,
        "flops": (f"{first['flops'] * first['steps']:.3g}"),
        "tokens": first["steps"] * first["batch_tokens"],
        "lr": first["lr"],
        "kv_bytes": shape.kv_bytes(),
        "n": len(values),
        "diverged": len(same) - len(values),
        "values": values,
        **interval(values),
        "repeats": sum(repeated) / len(repeated) if repeated else None,
        "tokens_per_second": max(speeds, default=None),
        "mfu": max(shares, default=None),
    }


def headline(points: list[dict[str, Any]]) -> list[str]:
    """For every text the best, and which cannot be told from it."""
    lines = []
    for same in group(points, "text", "digest").values():
        best, others = same[0], [p for p in same[1:] if p["gap"] is not None]
        if best["held_out"] is None:
            continue
        line = f"{best['text']}: fewest bits per byte {best['held_out']:.4f}, {best['name']}"
        alike = [
            p["name"]
            for p in others
            if p["gap"].low is not None and p["gap"].low <= 0 <= p["gap"].high
        ]
        alone = sum(p["gap"].low is None for p in others)
        line += f"; no difference found from it: {'; '.join(alike)}" if alike else ""
        lines.append(
            line + (f"; {alone} without an interval (more seeds with --seed)" if alone else "")
        )
    return lines


def figure(points: list[dict[str, Any]]) -> dict[str, Any]:
    """A panel per text with something to compare: every decoder's bits per byte beyond the best
    one's."""
    panels, texts = (
        [],
        [
            [p for p in same if p["held_out"] is not None]
            for same in group(points, "text", "digest").values()
        ],
    )
    for known in [some for some in texts if len(some) > 1] or texts[:1]:
        rows = [{"name": p["name"], "label": "held out", "colour": 0, **_range(p)} for p in known]
        panels.append(
            {
                "title": known[0]["text"] if known else "",
                "x_label": "bits per byte more than the best",
                "rows": rows,
            }
        )
    return {
        "kind": "ranges",
        "title": "Decoders trained one by one",
        "columns": 1,
        "panels": panels,
    }


def _range(point: dict[str, Any]) -> dict[str, float | None]:
    gap = point["gap"]
    return (
        {"mean": gap.mean, "low": gap.low, "high": gap.high}
        if gap
        else {"mean": 0.0, "low": None, "high": None}
    )
