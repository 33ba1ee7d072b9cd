"""Rows -> one self-contained HTML page. A pure function of the store: delete the page and nothing
else changes."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from headwise import __version__, experiments
from headwise.errors import UsageError
from headwise.experiments.pages import Page, page_of
from headwise.experiments.points import plural
from headwise.files import write_whole
from headwise.progress import clock
from headwise.rows import Row
from headwise.show.plotly_figure import plotly_figure
from headwise.store import Store

HIDDEN = {  # long columns: in the store, not in the table
    "command", "curve", "held_out_curve", "angle", "size", "checks",
    "score_angle", "score_norm", "score_angle_transposed", "score_norm_transposed",
}  # fmt: skip


def write_report(store: Store, path: Path | None = None) -> Path:
    """Write the page of everything that was asked for in a store; returns where it is
    (STORE/report.html)."""
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    path = path or store.path / "report.html"
    template = resources.files("headwise").joinpath("show/templates/report.html").read_text()
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = _number
    environment.filters["raised"] = _raised
    sections, lost, everything = [], [], store.experiments()
    for name, asked in everything.items():
        if not _whole(asked):
            raise UsageError(
                f"{store.path / 'experiments' / name}.json cannot be read; remove it and run the "
                "experiment again"
            )
        try:
            sections.append(_section(store, name, asked))
        except UsageError as e:  # the others are shown
            lost.append(f"{name}: {e}")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
            lost.append(f"{name}: its rows cannot be read ({type(e).__name__}: {e})")
    single = _single(store, everything)
    if single["ids"]:
        sections.append(_section(store, "pretrain", single))
    page = environment.from_string(template).render(
        version=__version__,
        sections=sections,
        lost=lost,
        plotly=get_plotlyjs(),
        embed=_embed,
    )
    write_whole(path, page)
    return path


def _whole(asked: Any) -> bool:
    """Whether this says what was asked for."""
    kinds = (("ids", list), ("command", str), ("preset", str), ("settings", dict))
    return (
        isinstance(asked, dict)
        and all(isinstance(asked.get(n), k) for n, k in kinds)
        and all(isinstance(i, str) for i in asked["ids"])
    )


def _single(store: Store, everything: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Decoders trained one by one, which none of the experiments asked for, as if one had."""
    asked = {run_id for about in everything.values() for run_id in about["ids"]}
    rows = [row for row in store.rows() if row.get("task") == "language" and row["id"] not in asked]
    rows.sort(key=lambda row: row["finished"])
    command = "\n".join(dict.fromkeys(row["command"] for row in rows if row.get("command")))
    return {"ids": [row["id"] for row in rows], "command": command, "preset": "", "settings": {}}


def _page(name: str, asked: dict[str, Any], rows: list[Row]) -> Page:
    """A built-in experiment's page from its rows, that of one's own as the store keeps it."""
    if name in experiments.EXPERIMENTS or name in experiments.PAGES:
        experiment = experiments.page(name)
        return page_of(experiment, asked["preset"], experiment.summary(rows))
    if "page" not in asked:
        raise UsageError("an experiment of your own that was not finished; run it again")
    return Page.of(asked["page"])


def _section(store: Store, name: str, asked: dict[str, Any]) -> dict[str, Any]:
    rows = store.rows(asked["ids"])
    page = _page(name, asked, rows)
    columns = list(
        dict.fromkeys(c for row in rows for c in row if c not in HIDDEN)
    )  # versions may differ in them
    same = {c: rows[0][c] for c in columns if all(c in r and r[c] == rows[0][c] for r in rows)}
    return {
        "name": name,
        "question": page.question,
        "about": page.about,
        "command": asked["command"],
        "preset": asked["preset"],
        "settings": asked["settings"],
        "headline": page.headline,
        "note": page.note,
        "figures": [{**plotly_figure(f), "caption": f.caption} for f in page.figures],
        "caption": page.caption,
        "trained": page.trains,
        "headings": page.headings,
        "points": page.table,
        "prose": [
            i == 0 or any(row[i][:1].isalpha() and " " in row[i] for row in page.table)
            for i in range(len(page.headings))
        ],
        "rows": rows,
        "varying": [c for c in columns if c not in same],
        "same": same,
        "asked": len(asked["ids"]),
        "time": clock(sum(r["seconds"] for r in rows)),
        "protocols": sorted({r["protocol"] for r in rows if "protocol" in r}),
        "commits": sorted({r["commit"] or "unknown" for r in rows}),
        "devices": sorted({r["device"] for r in rows}),
        "curves": _curves([r for r in rows if "curve" in r]),
    }


def _curves(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every run's learning curve, at most 200 points each."""
    out, rates = [], len({row.get("lr") for row in rows}) > 1
    for row in rows:
        step = max(1, len(row["curve"]) // 200)
        sizes = (
            f"{plural(row['depth'], 'layer')}, {plural(row['num_heads'], 'head')} of rank "
            f"{row['head_dim']}"
        )
        more = [
            *([row["protocol"]] if "protocol" in row else []),
            *([f"rate {row['lr']:g}"] if rates and "lr" in row else []),
        ]
        label = ", ".join((sizes, *more, f"seed {row['seed']}"))
        unit = row.get(
            "epoch", 1
        )  # a language model's curve is by steps, in nats a token; judged in bits a byte
        per = row["held_out"] / row["bits_per_byte"] if row.get("bits_per_byte") else 1.0
        out.append(
            {
                "label": label,
                "id": row["id"],
                "every": step * row.get("curve_every", unit),
                "train": [_short(v) for v in row["curve"][::step]],
                "held_out": [
                    [e * unit, None if v is None else _short(v * per)]
                    for e, v in row["held_out_curve"]
                ],
                "mean": "training, mean of an epoch" if "epoch" in row else "training",
                "loss": "loss, nats a token" if "bits_per_byte" in row else "loss",
            }
        )
    return out


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _embed(value: Any) -> str:
    """JSON that is safe inside a script element."""
    from markupsafe import Markup

    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))


def _raised(text: str) -> Any:
    """d^2.5 with its exponent raised."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"\^([\d.]+)", r"<sup>\1</sup>", str(escape(text))))


def _number(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_number, value)) or "–"
    return str(value)
