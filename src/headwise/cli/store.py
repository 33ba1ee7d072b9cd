"""Commands that show what is in a store: `list`, `report`, `draw`. None of them loads torch."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.cli.output import print_points, print_prose, print_table, say, width_for
from headwise.errors import UsageError, nearest

LISTED = (
    "id",
    "status",
    "task",
    "dim",
    "depth",
    "num_heads",
    "head_dim",
    "steps",
    "lr",
    "protocol",
    "seed",
    "held_out",
    "bits_per_byte",
    "commit",
    "finished",
)
MAIN = ("id", "held_out", "num_heads", "head_dim", "depth", "task", "seed", "status", "lr")


# ---- list


def list_runs(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    if args.live:
        return _list_live(args, width_for(args.wide))
    if args.older and not args.store:
        raise UsageError("--older lists rows of a store: add --store DIR")
    if args.experiment and args.store:
        raise UsageError(
            f"list shows the settings of an experiment or a store, got {args.experiment} and "
            f"{args.store}"
        )
    if args.experiment:
        return _list_settings(args.experiment, width_for(args.wide))
    if args.store:
        return _list_rows(args.store, args.older, width_for(args.wide))
    from headwise.experiments import EXPERIMENTS, find

    about = {name: find(name).about for name in EXPERIMENTS}
    print_table([("experiment", "what"), *about.items()], width_for(args.wide))
    return {"experiments": about}


def _list_settings(name: str, width: int | None) -> dict[str, Any]:
    """What --set can change in an experiment, by preset."""
    from headwise.experiments import find
    from headwise.experiments.settings import meaning_of

    experiment = find(name)
    presets = {preset: settings.plain() for preset, settings in experiment.presets.items()}
    settings = list(dict.fromkeys(key for values in presets.values() for key in values))
    meanings = {key: meaning_of(experiment, key) for key in settings}
    print_prose(experiment.question, width)
    print()
    values = [[_shown(given.get(key)) for given in presets.values()] for key in settings]
    table = [[key, *of, meanings[key]] for key, of in zip(settings, values, strict=True)]
    print_table([["setting", *presets, "what"], *table], width, [0, 1, 2])
    return {"experiment": name, "presets": presets, "meanings": meanings}


def _shown(value: Any) -> str:
    """A value as --set takes it."""
    if value is None:
        return ""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _list_rows(path: str, older: bool, width: int | None) -> dict[str, Any]:
    from headwise.device import commit
    from headwise.experiments.points import labelled
    from headwise.store import Store

    store = Store(path, create=False)
    rows = labelled(store.rows(not_commit=commit() if older else None))
    decoders = any(row.get("bits_per_byte") is not None for row in rows)
    keys = [key for key in LISTED if key != "bits_per_byte" or decoders]
    short = [{key: row.get(key) for key in keys} for row in rows]
    cells = [[f"{v:.4f}" if isinstance(v, float) else str(v) for v in r.values()] for r in short]
    print_table([keys, *cells], width, [keys.index(key) for key in MAIN])
    begun = (path.parent.name for path in store.runs_path.glob("*/run.json"))
    unfinished = sorted(run_id for run_id in begun if store.row(run_id) is None)
    others = " made by other commits" if older else ""
    print(f"{len(rows)} rows{others}, {len(unfinished)} unfinished runs")
    return {"rows": short, "unfinished": unfinished, "experiments": sorted(store.experiments())}


def _list_live(args: argparse.Namespace, width: int | None) -> dict[str, Any]:
    """The groups of a store as they are now."""
    from headwise.execute.live import live
    from headwise.store import Store

    if not args.store:
        raise UsageError("--live shows the groups of a store: add --store DIR")
    groups = live(Store(args.store, create=False))
    heads = ["group", "state", "runs", "made", "engine", "attempt", "host", "heard", "log"]
    lines = [
        [
            group.group,
            group.state,
            f"{group.rows} of {group.runs}",
            f"{group.share:.0%}",
            group.engine,
            str(group.attempt),
            group.host,
            "" if group.heard is None else f"{group.heard:.0f}s ago",
            group.line[:60],
        ]
        for group in groups
    ]
    print_table([heads, *lines], width, [0, 1, 2, 3])
    count = {state: sum(g.state == state for g in groups) for state in ("running", "done")}
    print(f"{len(groups)} groups, {count['running']} running, {count['done']} done")
    return {"groups": [dataclasses.asdict(group) for group in groups]}


# ---- report


def report(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.store import Store

    store, output = Store(args.store, create=False), Path(args.output) if args.output else None
    _check_output(output)
    if args.port is not None and not args.serve:
        raise UsageError("--port goes with --serve")
    try:
        from headwise.experiments.pages import explorer_of, sections_of
        from headwise.show.report import write_page

        path, (sections, lost) = output or store.path / "report.html", sections_of(store)
        write_page(path, sections, lost, explorer_of(sections))
    except ModuleNotFoundError as e:
        raise UsageError(f"the report needs {e.name}: pip install 'headwise[report]'") from None
    print(f"report: {path}")
    # The terminal ends with the sentences that the page begins with.
    answers = {section.name: section.answer for section in sections}
    width = width_for(False)
    for name, answer in answers.items():
        print_prose(answer if len(answers) == 1 else f"{name}: {answer}", width)
    if args.serve:
        _serve(store.path, args.port)
    return {"report": str(path), "answers": answers}


def _serve(path: Path, port: int | None) -> None:
    """Show the page to this machine's browsers until Ctrl-C."""
    from headwise.cli.show_arguments import PORT
    from headwise.experiments.pages import followed
    from headwise.show.serve import server, server_near

    page = followed(path)
    with server_near(page, PORT) if port is None else server(page, port) as listening:
        address = f"http://127.0.0.1:{listening.server_address[1]}/"
        say(f"following {path} at {address}, until Ctrl-C")
        listening.serve_forever(poll_interval=0.2)


def _check_output(output: Path | None) -> None:
    """Refuse to write in the place of what is no file: a rename would replace a device."""
    if output and output.is_dir():
        raise UsageError(f"--output names a file, got the folder {output}")
    if output and output.exists() and not output.is_file():
        raise UsageError(f"--output names a file, got {output}, which is a device or a pipe")


# ---- draw


def draw(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.experiments.given_rows import readable
    from headwise.experiments.pages import remarked, shown_by
    from headwise.experiments.points import plain_point
    from headwise.show.matplotlib_figure import save
    from headwise.show.report import answer_of

    experiment = shown_by(args.experiment)
    view = _view(experiment, args.view)
    sources = [Path(name) for name in args.rows]
    where = ", ".join(map(str, sources))
    output = _output(args.output, experiment.name, args.view, sources[0], args.format)
    rows = [row for source in sources for row in _rows_at(source, experiment.name)]
    remarks = [line for source in sources for line in _remarks_at(source, experiment.name)]
    with readable(where, experiment.name):
        # A row of two files is one.
        distinct = {row.get("id", i): row for i, row in enumerate(rows)}
        points = experiment.summary(list(distinct.values()))
        description = view(points)
    if not points:
        raise UsageError(f"{where} holds no rows of {experiment.name}")
    if not description.panels:
        raise UsageError(
            f"the view {args.view} of {experiment.name} has nothing to compare in {where}"
        )
    try:
        save(remarked(description, remarks), output, paper=args.format in ("pdf", "svg"))
    except ModuleNotFoundError as e:
        raise UsageError(f"the figure needs {e.name}: pip install 'headwise[report]'") from None
    width = width_for(args.wide)
    print_points(experiment, points, width)
    headline = experiment.headline(points)
    for line in (*headline, *remarks):
        print_prose(line, width)
    print(f"figure: {output}")
    answer = answer_of(experiment.answered(points), headline)
    print_prose(answer, width)
    return {
        "figure": str(output),
        "answer": answer,
        "points": [plain_point(point) for point in points],
    }


def _view(experiment: Any, name: str | None) -> Any:
    """The experiment's figure, or another view of it by name."""
    if name is None:
        return experiment.figure
    if name not in experiment.views:
        choices = nearest(name, experiment.views) if experiment.views else "it has one figure"
        raise UsageError(f"unknown view {name!r} of {experiment.name}; {choices}")
    return experiment.views[name]


def _output(given: str | None, name: str, view: str | None, source: Path, form: str | None) -> Path:
    """Where the figure goes: beside the first rows unless it is said."""
    file = f"{name}-{view}" if view else name
    file = f"{file}.{form or 'png'}"
    beside = source / file if source.is_dir() else source.with_name(file)
    output = Path(given) if given else beside
    if output.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"a figure ends in .png, .pdf or .svg, got {output.name}")
    if form and output.suffix != f".{form}":
        raise UsageError(f"--format {form} needs --output to end in .{form}, got {output.name}")
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {output.parent} to draw into")
    _check_output(output)
    return output


def _rows_at(source: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a file, or an experiment's in a store."""
    from headwise.experiments.given_rows import readable
    from headwise.store import MARK, Store, read_rows

    if not (source / MARK).exists():
        return read_rows(source)
    store = Store(source)
    asked = store.experiments()
    if name not in asked:
        raise UsageError(
            f"the store {source} has no {name}; it has {', '.join(asked) or 'no experiment yet'}"
        )
    with readable(str(source), name):
        return store.rows(asked[name]["ids"])


def _remarks_at(source: Path, name: str) -> list[str]:
    """What a store has noted to know of an experiment's rows."""
    from headwise.store import MARK, Store

    noted = Store(source).experiments() if (source / MARK).exists() else {}
    return [str(one) for one in noted.get(name, {}).get("remarks", ())]
