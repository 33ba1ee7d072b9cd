"""`headwise export`, and `--track` of commands that train: rows for the trackers people have."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headwise.cli.output import say
from headwise.errors import UsageError, nearest, shown
from headwise.progress import Progress
from headwise.store import Store
from headwise.tracking.export import export as export_rows
from headwise.tracking.export import following
from headwise.tracking.find import OWN, TRACKERS, find
from headwise.tracking.tables import TABLES, check_path, write_table

Also = Callable[[Sequence[str]], None]


def export(args: argparse.Namespace, words: Any) -> dict[str, Any]:
    store = Store(args.store, create=False)
    ids = _asked(store, args.experiment)
    if args.to in TABLES:
        return _table(store, args.to, args.destination, ids)
    _check_name(args.to, (*TRACKERS, *TABLES))
    tracker = find(args.to, args.destination or "", store.path)
    count = len(store.rows(ids))
    bar = Progress(count, f"export to {args.to}: {count} runs")
    found = export_rows(store, tracker, ids, bar.advance)
    if count:
        bar.close()
    print(f"{args.to}: {found.added} runs added, {found.already} there already")
    return {
        "store": str(store.path),
        "to": args.to,
        "destination": args.destination,
        "added": found.added,
        "already": found.already,
    }


def _asked(store: Store, experiment: str | None) -> list[str] | None:
    """The runs of an experiment; None: all of them."""
    if experiment is None:
        return None
    known = store.experiments()
    if experiment not in known:
        hint = nearest(experiment, known) if known else "it has none"
        raise UsageError(f"{store.path} has no experiment {shown(experiment)}; {hint}")
    return list(known[experiment].get("ids", []))


def _table(
    store: Store, kind: str, destination: str | None, ids: list[str] | None
) -> dict[str, Any]:
    path = Path(destination) if destination else store.path / f"rows.{kind}"
    check_path(path)
    count = write_table(kind, store, path, ids)
    print(f"{kind}: {count} rows in {path}")
    return {"store": str(store.path), "to": kind, "destination": str(path), "rows": count}


def _check_name(name: str, choices: Any) -> None:
    """Refuse a name that is neither built in nor a file's."""
    if name not in choices and not name.partition(":")[0].endswith(".py"):
        raise UsageError(f"unknown destination {shown(name)}; {nearest(name, choices)}; {OWN}")


@contextlib.contextmanager
def tracking(given: str | None, store: Store, enabled: bool = True) -> Iterator[Also]:
    """What `--track NAME` or `--track NAME=DEST` asks for, while the body makes rows; the body says
    which of those it found belong to it. A tracker that cannot be used is refused before anything
    is trained."""
    if given is None or not enabled:
        yield lambda ids: None
        return
    name, _, destination = given.partition("=")
    if name in TABLES:
        raise UsageError(
            f"{name} is a table of all rows: headwise export --to {name} writes it when the runs "
            "are made"
        )
    with following(store, find(name, destination, store.path), say) as also:
        yield also
