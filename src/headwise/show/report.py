"""One self-contained HTML page from rows and descriptions of figures: the question, the answer in a
sentence, then the evidence.

The same sections give the same bytes. The page is only written: delete it and nothing else changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise import __version__
from headwise.errors import UsageError
from headwise.files import write_whole
from headwise.progress import clock
from headwise.rows import Row
from headwise.show import figure as figures
from headwise.show.colours import dark_colours
from headwise.show.explorer_page import scripts_of
from headwise.show.figure import Figure
from headwise.show.pages import digest, embed, environment, part, plotly
from headwise.show.plotly_figure import plotly_figure
from headwise.show.report_data import columns_of, curves_of, label_of, runs_of

FINDINGS = 5  # lines at the top, the answer among them; the others stand below the figures
SCRIPTS = ("theme", "tables", "figures", "curves", "explorer", "follow")
HELP = (
    "A point under the mouse, or under the arrow keys, says what it is; a click shows its runs. "
    "Drag to zoom, double-click to reset."
)


# ---- what a section is made of


@dataclass(frozen=True, kw_only=True)
class Page:
    """What the page says about an experiment besides its rows. A store keeps it as plain values, so
    that the page of an experiment of one's own needs no code."""

    question: str
    answer: str = ""  # in a sentence
    about: str = ""
    headline: Sequence[str] = ()  # the claim in numbers
    note: str = ""  # what to bear in mind
    caption: str = ""  # of the first figure
    figures: Sequence[Figure] = ()
    headings: Sequence[str] = ()
    cells: Sequence[Sequence[str]] = ()  # a row per point
    trains: bool = True  # otherwise its rows are computed

    def to_json(self) -> dict[str, Any]:
        """As values that JSON has."""
        return {
            "question": self.question,
            "answer": self.answer,
            "about": self.about,
            "headline": list(self.headline),
            "note": self.note,
            "caption": self.caption,
            "figures": [figures.to_json(one) for one in self.figures],
            "headings": list(self.headings),
            "cells": [list(row) for row in self.cells],
            "trains": self.trains,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Page:
        """What `to_json` gave these values for; refused if they are something else."""
        # The page of a user's experiment comes from a file, so its types are checked before the
        # template sees them.
        texts = ("question", "about", "note", "caption")
        cells = [cell for row in value["cells"] for cell in row]
        lines = [value.get("answer", ""), *value["headline"], *value["headings"], *cells]
        if not all(isinstance(text, str) for text in [*(value[name] for name in texts), *lines]):
            raise UsageError("what a page says must be text")
        if {len(row) for row in value["cells"]} - {len(value["headings"])}:
            raise UsageError("a table needs a cell per heading in every row")
        known = {name: part for name, part in value.items() if name in Page.__dataclass_fields__}
        drawn: Any = tuple(figures.from_json(one) for one in value["figures"])
        for one in drawn:  # what cannot be drawn is refused here, not while the page is written
            embed(plotly_figure(one))
        return Page(**dict(known, figures=drawn))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a decoder wrote: its beginning was given, the rest is its own."""

    about: str
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """One experiment of a store: what was asked for, its rows, and what the page says of them."""

    name: str
    command: str
    preset: str
    state: str  # how far it is
    rows: Sequence[Row]
    page: Page
    missing: Sequence[str] = ()  # ids of runs that were asked for and are not there
    remarks: Sequence[str] = ()  # what to know of its rows, such as that other code made them
    settings: Sequence[str] = ()  # columns that say what a run is, not what came out
    samples: Sequence[Sample] = ()

    @property
    def answer(self) -> str:
        """The sentence that the section begins with, and the terminal ends with."""
        return answer_of(self.page.answer, self.page.headline)


def answer_of(answer: str, headline: Sequence[str]) -> str:
    """The answer in a sentence; without one the first line of the claim.

    >>> answer_of("", ["mine is better"])
    'Mine is better.'
    """
    said = answer or (headline[0].strip() if headline else "")
    if not said:
        return "There is no answer yet."
    return f"{said[:1].upper()}{said[1:]}{'' if said[-1] in '.!?' else '.'}"


def _says(line: str, answer: str) -> bool:
    """Whether a line begins as the answer does."""
    line, answer = (text.lower().strip(" .").removeprefix("on ") for text in (line, answer))
    return line.startswith(answer)


# ---- the page


def write_page(
    path: Path, sections: Sequence[Section], lost: Sequence[str] = (), explorer: str = ""
) -> None:
    """Write the page of these sections; `lost` says in a line each what cannot be page, `explorer`
    is the page of the explorer."""
    write_whole(path, made_page(sections, lost, explorer))


def made_page(
    sections: Sequence[Section], lost: Sequence[str] = (), explorer: str = "", follow: str = ""
) -> str:
    """The page as text. With `follow`, the state of a store, the page asks its own host whether
    that has changed, and loads itself again."""
    made = environment()
    made.filters["number"] = _number
    made.filters["raised"] = _raised
    library = plotly()
    script = "\n".join(part(f"report_{name}.js") for name in SCRIPTS)
    shown = [_values(section, number) for number, section in enumerate(sections)]
    return made.from_string(part("report.html")).render(
        version=__version__,
        title=_title(sections),
        sections=shown,
        lost=lost,
        css=part("page.css") + part("report.css"),
        plotly=library,
        script=script,
        explorer=bool(explorer),
        policy=_policy([library, script, *scripts_of(explorer)], bool(follow)),
        data={
            "sections": [one["data"] for one in shown],
            "dark": dark_colours(),
            "follow": follow,
            "explorer": explorer,
        },
        embed=embed,
    )


def _policy(scripts: Sequence[str], follow: bool) -> str:
    """What a browser lets the page do: run these scripts, which it knows by their digests, and
    ask nobody for anything; with `follow` its own host alone."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(digest, scripts))}",
            "style-src 'unsafe-inline'",
            "img-src data: blob:",
            *(["connect-src 'self'"] if follow else []),
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _title(sections: Sequence[Section]) -> str:
    names = ", ".join(section.name for section in sections[:4])
    return f"headwise report: {names}" if names else "headwise report"


def _values(section: Section, number: int) -> dict[str, Any]:
    """A section as the template takes it, and the `data` for its figures and tables."""
    rows, page = section.rows, section.page
    columns, same = columns_of(rows)
    answer = section.answer
    # Without an answer of its own the first line of the claim is the answer.
    findings = [line for line in page.headline if not _says(line, answer)]
    curves = curves_of([(i, r) for i, r in enumerate(rows) if r.get("curve")])
    diverged = [r for r in rows if r.get("status") == "diverged"]
    first = [page.caption, *(one.caption for one in page.figures[:1])]
    captions = [" ".join([*filter(None, dict.fromkeys(first)), HELP])]
    captions += [one.caption for one in page.figures[1:]]
    drawn = [plotly_figure(one) for one in page.figures]
    anchor = section.name if re.fullmatch(r"[A-Za-z0-9_-]+", section.name) else f"s{number}"
    parts = [
        ("figure", "Figure", drawn),
        ("points", "Every point", page.headings),
        ("text", "What it writes", section.samples),
        ("runs", "Every run" if page.trains else "Every row", rows),
        ("missing", "Missing and diverged", section.missing or diverged),
        ("again", "Make it again", True),
    ]
    return {
        "name": section.name,
        "anchor": anchor,
        "parts": [(part, name) for part, name, there in parts if there],
        "question": page.question,
        "answer": answer,
        "findings": findings[: FINDINGS - 1],
        "further": findings[FINDINGS - 1 :],
        "remarks": section.remarks,
        "about": page.about,
        "command": section.command,
        "preset": section.preset,
        "note": page.note,
        "figures": [
            {"title": one.title, "caption": caption}
            for one, caption in zip(page.figures, captions, strict=False)
        ],
        "trained": page.trains,
        "headings": page.headings,
        "rows": bool(rows),
        "curves": bool(curves),
        "same": same,
        "samples": section.samples,
        "missing": section.missing,
        "diverged": [f"{r.get('id', '')}: {label_of(r)}" for r in diverged],
        "state": section.state,
        "time": clock(sum(r["seconds"] for r in rows)),
        "protocols": sorted({r["protocol"] for r in rows if "protocol" in r}),
        "commits": sorted({r["commit"] or "unknown" for r in rows}),
        "devices": sorted({r["device"] for r in rows}),
        "data": {
            "name": section.name,
            "anchor": anchor,
            "figures": drawn,
            "points": {
                "headings": page.headings,
                "cells": page.cells,
                "prose": [_is_prose(page.cells, i) for i in range(len(page.headings))],
            },
            "runs": runs_of(rows, columns, same, section.settings),
            "curves": curves,
        },
    }


def _is_prose(cells: Sequence[Sequence[str]], column: int) -> bool:
    """Whether a column of the table is text: the first one, and any with a cell of several
    words."""
    return column == 0 or any(
        ", " in row[column] or (row[column][:1].isalpha() and " " in row[column]) for row in cells
    )


# ---- what the template calls


def _raised(text: str) -> Any:
    """d^2.5 with its exponent raised."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"\^([\d.]*\d)", r"<sup>\1</sup>", str(escape(text))))


def _number(value: Any) -> str:
    """A value of a row for people."""
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
