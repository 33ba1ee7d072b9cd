"""Whether a user's own task or model is still the one that a store's runs were begun with.

A run's id holds a class's name, version and fields, and not its code. So beside the run lies a
digest of that code, by which an edit without a new version is noticed and said. It is no part of
the specification, and a run without it, as before it was written, is taken as it is.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import functools
import hashlib
import json
import linecache
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType

from headwise.digests import read_signed, signed
from headwise.files import DamagedError, write_whole
from headwise.rows import CHECKPOINT_FILE, Specified
from headwise.store import ROWS_FILE, Store, append_line, read_lines
from headwise.training.run import Run

# In a run's folder, of own classes: {"task": digest, "model": digest}, and as "checked" the digest
# of the task's code whose data were tested.
SOURCE_FILE = "source.json"
OLDER_FILE = "older-rows.jsonl"  # rows of other code, whose run was made again


def note_sources(store: Store, runs: Sequence[Run]) -> None:
    """Write down which code the runs are begun with, where that is not written yet. The data of
    their tasks were tested (`check_tasks`)."""
    for run in runs:
        path = store.runs_path / run.id / SOURCE_FILE
        found = {part: digest(kind) for part, kind in _own_classes(run).items()}
        known = {part: text for part, text in found.items() if text}
        if "task" in known:
            known["checked"] = known["task"]
        if known and not path.exists():
            write_whole(path, json.dumps(signed(known)) + "\n")


def check_tasks(store: Store, runs: Sequence[Specified], missing: Sequence[Specified]) -> None:
    """Refuse a task of one's own whose data make its numbers meaningless, before its first run in a
    store and wherever its code has changed since; `missing` are the runs to be made."""
    from headwise.tasks.check_data import check_meaning
    from headwise.tasks.first_check import check_baselines, check_first_sample

    waiting = {run.task for run in missing if isinstance(run, Run)}
    for task in sorted(waiting, key=repr):
        if type(task).__module__.startswith("headwise."):
            continue
        current = digest(type(task))
        of_task = [run for run in runs if isinstance(run, Run) and run.task == task]
        if current and any(_noted(store, run).get("checked") == current for run in of_task):
            continue
        check_first_sample(task)
        check_baselines(task)
        check_meaning(task)


def _noted(store: Store, run: Run) -> dict[str, str]:
    """Which code a run was begun with, as far as it is known."""
    path = store.runs_path / run.id / SOURCE_FILE
    try:
        return read_signed(path)
    except FileNotFoundError:
        return {}
    except DamagedError as e:
        store.name({path: str(e)})
        return {}


def _changed_parts(store: Store, run: Run) -> list[tuple[str, type]]:
    """Which of a run's task and model have other code now than when it was begun."""
    noted = _noted(store, run)
    parts = [(part, kind, digest(kind)) for part, kind in _own_classes(run).items()]
    return [(part, kind) for part, kind, now in parts if now and noted.get(part, now) != now]


def set_aside(store: Store, runs: Sequence[Specified]) -> int:
    """Have those runs made again that other code has begun; returns how many.

    Their rows go to another file of their folder, OLDER_FILE, and their checkpoints away. A run
    that another process holds is left alone.
    """
    count = 0
    for run in runs:
        if not isinstance(run, Run) or not _changed_parts(store, run):
            continue
        folder = store.runs_path / run.id
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with contextlib.closing(os.fdopen(lock, "w")):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            for line in read_lines(folder / ROWS_FILE):
                append_line(folder / OLDER_FILE, line)
            # The digest goes last: until then the run counts as one of other code.
            for name in (ROWS_FILE, CHECKPOINT_FILE, SOURCE_FILE):
                (folder / name).unlink(missing_ok=True)
        count += 1
    return count


def edited(store: Store, runs: Sequence[Specified], now: bool = True) -> list[str]:
    """One line for each task or model whose code is not that of all its runs in the store, or whose
    rows are taken though its code cannot be seen. Afterwards (not `now`) the first alone."""
    changed: Counter[tuple[str, str]] = Counter()
    unseen: Counter[tuple[str, str]] = Counter()
    for run in runs:
        if not isinstance(run, Run):
            continue
        for part, kind in _changed_parts(store, run):
            changed[part, kind.__name__] += 1
        for part, kind in _own_classes(run).items():
            if now and not digest(kind):
                unseen[part, kind.__name__] += store.row(run.id) is not None
    lines = [
        f"the code of {part} {name} changed since {count} of these runs were begun; they are taken "
        "as they are: --fresh (fresh=True) makes them again, or raise its version"
        for (part, name), count in changed.items()
    ]
    lines += [
        f"the code of {part} {name} is in no file, so an edit cannot be seen: {count} of these "
        "runs are taken as they are, raise its version to make them again"
        for (part, name), count in unseen.items()
        if count
    ]
    return lines


def _own_classes(run: Run) -> dict[str, type]:
    """The classes of a run that are not headwise's."""
    kinds = {"task": type(run.task), "model": type(run.model)}
    if run.model is None:
        del kinds["model"]
    return {
        part: kind for part, kind in kinds.items() if not kind.__module__.startswith("headwise.")
    }


@functools.cache
def digest(kind: type) -> str:
    """A digest of a class and of what it uses of its own file or notebook cell, without comments,
    docstrings and layout; empty where its source cannot be found.

    Other files and cells that this one uses are not followed.
    """
    try:
        statements = ast.parse(_source_of(kind)).body
    except (OSError, SyntaxError, ValueError):
        return ""
    used = {kind.__qualname__.split(".")[0]}
    taken: list[ast.stmt] = []
    while more := [s for s in statements if s not in taken and used & _bound(s)]:
        taken += more
        used |= {n.id for s in more for n in ast.walk(s) if isinstance(n, ast.Name)}
    if not taken:
        return ""
    text = "\n".join(ast.unparse(_without_docstrings(s)) for s in statements if s in taken)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source_of(kind: type) -> str:
    """The text of the file that a class comes from, or of its cell in a notebook, which keeps the
    cells' texts in `linecache`; empty: it comes from neither."""
    module = sys.modules.get(kind.__module__)
    file = None if module is None else vars(module).get("__file__")
    if file is not None:
        return Path(file).read_text(encoding="utf-8")
    functions = [value for value in vars(kind).values() if isinstance(value, FunctionType)]
    # A dataclass has generated functions as well, whose text is nowhere.
    cells = ("".join(linecache.getlines(f.__code__.co_filename)) for f in functions)
    return next(filter(None, cells), "")


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement of a file gives a value to."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def _without_docstrings(statement: ast.stmt) -> ast.stmt:
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = node.body[0]
            is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            if is_text and len(node.body) > 1:
                del node.body[0]
    return statement
