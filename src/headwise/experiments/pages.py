"""A store's page, `STORE/report.html`.

Built-in experiments are computed from their rows again. An experiment of one's own is shown by what
its run left in the store: a store is data, and no code that it names is ever imported.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwise.errors import UsageError
from headwise.experiments import EXPERIMENTS, PAGES, built_in, find
from headwise.experiments.base import Experiment
from headwise.experiments.measured import measured_page
from headwise.experiments.points import ONE_MODEL
from headwise.experiments.shapes import heads_in_words, shape_of_row
from headwise.experiments.state import State, noted_later, tuning_only
from headwise.files import NotReadableError, read_file
from headwise.rows import SAMPLE_FILE, Row, check_shown
from headwise.show.explorer_page import made_explorer_page
from headwise.show.figure import Figure, has_panels
from headwise.show.report import Page, Sample, Section, made_page, write_page
from headwise.show.serve import Followed
from headwise.store import MOST_NAMED, Store

MOST_SAMPLES, MOST_SAMPLE_BYTES = 3, 1 << 16  # of decoders' texts
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError)


def shown_by(name: str) -> Experiment[Any, Any]:
    """What a store's rows of that name are shown by."""
    return built_in(PAGES[name]) if name in PAGES else find(name)


def page_of(
    experiment: Experiment[Any, Any],
    preset: str,
    points: Sequence[Any],
    settings: Mapping[str, Any] | None = None,
) -> Page:
    """What the page says about an experiment's points. Of a preset's note it says what holds in
    these settings."""
    headings, *cells = experiment.table(points)
    return Page(
        question=experiment.question,
        answer=experiment.answered(points),
        about=experiment.about,
        headline=experiment.headline(points),
        note=experiment.note(preset, settings or {}),
        caption=experiment.caption,
        figures=_figures(experiment, points) if points else (),
        headings=headings,
        cells=cells,
        trains=experiment.trains,
    )


def remarked(figure: Figure, remarks: Sequence[str]) -> Figure:
    """A figure whose caption says what to know of its rows."""
    if not remarks:
        return figure
    return dataclasses.replace(figure, caption=_with(figure.caption, remarks))


def _with(caption: str, remarks: Sequence[str]) -> str:
    """A caption, and sentences behind it."""
    sentences = [f"{one[:1].upper()}{one[1:]}." for one in remarks]
    return " ".join([*([caption] if caption else []), *sentences])


def _figures(experiment: Experiment[Any, Any], points: Sequence[Any]) -> list[Figure]:
    """The figure, and its other views that have something in every panel."""
    views = [view(points) for view in experiment.views.values()]
    return [experiment.figure(points), *(view for view in views if has_panels(view))]


def write_report(store: Store, path: Path | None = None) -> Path:
    """Write the page of everything that was asked for in a store; returns where it is
    (STORE/report.html)."""
    path = path or store.path / "report.html"
    sections, lost = sections_of(store)
    write_page(path, sections, lost, explorer_of(sections))
    return path


def followed(store: Path) -> Followed:
    """A store's page that follows it, for `headwise.show.serve`."""

    def made(state: str) -> str:
        sections, lost = sections_of(Store(store, create=False))
        return made_page(sections, lost, explorer_of(sections), follow=state)

    return Followed(lambda: _state_of(store), made)


def _state_of(path: Path) -> str:
    """What changes when a store does: its rows by number and time, and what was asked for."""
    newest, count = 0, 0
    for pattern in ("runs/*/rows.jsonl", "experiments/*.json", "runs/*/sample.json"):
        for file in path.glob(pattern):
            try:
                newest = max(newest, file.stat().st_mtime_ns)
            except OSError:  # it was replaced this moment
                continue
            count += 1
    return f"{count}-{newest}"


def sections_of(store: Store) -> tuple[list[Section], list[str]]:
    """A section per experiment of a store, and a line for each that cannot be shown."""
    sections: list[Section] = []
    lost: list[str] = []
    noted = store.experiments()
    for name in [name for name, asked in noted.items() if not _is_note(asked)]:
        del noted[name]
        store.name({store.path / "experiments" / f"{name}.json": "it does not say what was asked"})
    # A page shows what it can: an experiment whose rows cannot be read is a line on it.
    for name, asked in noted.items():
        try:
            sections.append(_section(store, name, asked))
        except UsageError as e:  # the others are shown
            lost.append(f"{name}: {e}")
        except UNREADABLE as e:
            lost.append(f"{name}: its rows cannot be read ({type(e).__name__}: {e})")
    for name, found in (("pretrain", single_decoders), ("other_runs", other_runs)):
        try:
            sections += found(store, noted)
        except UsageError as e:
            lost.append(f"{name}: {e}")
        except UNREADABLE as e:
            lost.append(f"{name}: its rows cannot be read ({type(e).__name__}: {e})")
    return sections, lost + damaged_files(store)


def explorer_of(sections: Sequence[Section]) -> str:
    """The explorer on what these sections measured, from the best shape of the largest map; empty:
    there is no shape among their rows."""
    try:
        return made_explorer_page(measured_page({one.name: one.rows for one in sections}))
    except (UsageError, *UNREADABLE):  # of an experiment of one's own, whose rows may be any
        return ""


def damaged_files(store: Store) -> list[str]:
    """One line for each file that was left out, the first ones of many."""
    lines = [
        f"{os.path.relpath(path, store.path)} is damaged and left out: {why}"
        for path, why in store.damaged.items()
    ]
    more = len(lines) - MOST_NAMED
    return lines if more <= 0 else [*lines[:MOST_NAMED], f"and {more} more damaged files"]


def _is_note(asked: Any) -> bool:
    """Whether this says what was asked for."""
    kinds = (("ids", list), ("command", str), ("preset", str), ("settings", dict))
    return (
        isinstance(asked, dict)
        and all(isinstance(asked.get(name), kind) for name, kind in kinds)
        and all(isinstance(one, str) for one in asked["ids"])
    )


def _section(store: Store, name: str, asked: Mapping[str, Any]) -> Section:
    """By the experiment's own code where it is one of headwise's, else by what its run left."""
    rows = []
    for row in store.rows(asked["ids"]):
        if why := check_shown(row):
            store.name({store.runs_path / row["id"]: why})
        else:
            rows.append(row)
    # A user's file may have changed or gone since, so its page is kept in the store.
    tuning = False
    if (name in EXPERIMENTS or name in PAGES) and "source" not in asked:
        experiment = shown_by(name)
        points = experiment.summary(rows)
        page = page_of(experiment, asked["preset"], points, asked["settings"])
        tuning = tuning_only(points)
    elif "page" in asked:
        page = Page.from_json(asked["page"])
    else:
        page = Page(
            question=name,
            about="Its figure and table are not kept in this store yet: its command writes them.",
        )
    there = {row["id"] for row in rows}
    state = State(
        there=len(rows),
        asked=len(asked["ids"]),
        later=noted_later(asked, tuning),
        tuning=tuning,
        trains=page.trains,
        made=asked.get("made") is not False,
    )
    return Section(
        name=name,
        command=asked["command"],
        preset=asked["preset"],
        state=state.in_words,
        rows=rows,
        page=page,
        missing=[run_id for run_id in asked["ids"] if run_id not in there],
        remarks=[f"{one[:1].upper()}{one[1:]}." for one in map(str, asked.get("remarks", ()))],
        settings=_settings(rows),
    )


def _settings(rows: Sequence[Row]) -> list[str]:
    """The columns that say what a run is."""
    columns = dict.fromkeys(column for row in rows for column in row)
    own = ("task", "model", "positions", "seed")
    return [c for c in columns if c in (*ONE_MODEL, *own) or c.startswith(("task_", "model_"))]


def single_decoders(store: Store, noted: Mapping[str, Mapping[str, Any]]) -> list[Section]:
    """Decoders trained one by one, which none of the experiments asked for, as one section."""
    # Runs of an experiment are shown with it, so only the others are left for this section.
    asked = {run_id for about in noted.values() for run_id in about["ids"]}
    rows = [row for row in store.rows() if row.get("task") == "language" and row["id"] not in asked]
    rows.sort(key=lambda row: row["finished"])
    if not rows:
        return []
    experiment = shown_by("pretrain")
    points = experiment.summary(rows)
    page = page_of(experiment, "", points)
    if len(points) == 1:  # nothing to compare: its learning curve and its text are what there is
        page = dataclasses.replace(page, figures=())
    commands = dict.fromkeys(row["command"] for row in rows if row.get("command"))
    return [
        Section(
            name="pretrain",
            command="\n".join(commands),
            preset="",
            state=State(there=len(rows), asked=len(rows)).in_words,
            rows=rows,
            page=page,
            settings=_settings(rows),
            samples=_samples(store, rows),
        )
    ]


def _samples(store: Store, rows: Sequence[Row]) -> list[Sample]:
    """What the decoders with the fewest bits wrote when they were trained."""
    known = [row for row in rows if row.get("bits_per_byte") is not None]
    out = []
    for row in sorted(known, key=lambda row: row["bits_per_byte"]):
        if len(out) == MOST_SAMPLES:
            break
        try:
            data = read_file(store.runs_path / row["id"] / SAMPLE_FILE, MOST_SAMPLE_BYTES)
            found = json.loads(data)
        except (OSError, NotReadableError, *UNREADABLE):
            continue  # there is none, or it is damaged: the numbers are shown without it
        if not isinstance(found, dict):
            continue
        prompt, text = found.get("prompt"), found.get("text")
        if isinstance(prompt, str) and isinstance(text, str):
            shape = heads_in_words(shape_of_row(row))
            about = (
                f"{row['id']}, {shape}, {row['bits_per_byte']:.4g} bits per byte, continues the "
                "marked words of the held-out text (temperature 0.8):"
            )
            out.append(Sample(about=about, prompt=prompt, text=text))
    return out


def other_runs(store: Store, noted: Mapping[str, Mapping[str, Any]]) -> list[Section]:
    """Runs that none of the experiments asked for, such as those made in Python, as one section."""
    asked = {run_id for about in noted.values() for run_id in about["ids"]}
    rows = [row for row in store.rows() if row["id"] not in asked and not check_shown(row)]
    rows = [row for row in rows if row.get("task") != "language"]
    if not rows:
        return []
    experiment = shown_by("other_runs")
    points = experiment.summary(rows)
    commands = dict.fromkeys(row["command"] for row in rows if row.get("command"))
    return [
        Section(
            name="other_runs",
            command="\n".join(commands) or "made in Python: the rows have their settings",
            preset="",
            state=State(there=len(rows), asked=len(rows)).in_words,
            rows=rows,
            page=page_of(experiment, "", points),
            settings=_settings(rows),
        )
    ]
