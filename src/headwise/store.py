"""Rows on disk: one folder per run, written by whoever holds that run, safe against kill -9 and
many writers.

    STORE/headwise.json                    whose it is, and the format
    STORE/experiments/NAME.json            what was asked for: command, preset, settings, ids; of
                                           an own experiment also its page
    STORE/runs/ID/run.json                 the run's specification
    STORE/runs/ID/source.json              of a user's own task or model: a digest of its code
    STORE/runs/ID/rows.jsonl               its rows, appended; the last complete one counts
    STORE/runs/ID/checkpoint.safetensors   where an unfinished run is
    STORE/runs/ID/weights.safetensors      its weights, where they were kept
    STORE/runs/ID/lock                     held by who works on it; freed when they die

There is no index and no shared file, so a store can be copied, merged with cp -r and read while it
grows. A store is data: nothing that it names is ever imported or run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headwise.errors import UsageError
from headwise.files import write_whole
from headwise.rows import CHECKPOINT_FILE, MEASURED, Row, Specified, check_row

S = TypeVar("S", bound=Specified)
FORMAT = 1
MARK = "headwise.json"


class Store:
    """A folder of rows.

    >>> import tempfile
    >>> Store(tempfile.mkdtemp()).rows()
    []
    """

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path = Path(path)
        mark = self.path / MARK
        there = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if not there.is_dir():
            raise UsageError(f"a store is a folder, got {self.path} where {there} is a file")
        # a mark in the making is a hidden file beside its place
        strange = self.path.exists() and not all(
            p.name.startswith(f".{MARK}.") for p in self.path.iterdir()
        )
        # asked last: another process may be making the store, and its mark comes before the rest
        if mark.exists():
            self._check_format(mark)
        elif strange:
            raise UsageError(
                f"{self.path} is not a headwise store: it has files but no {MARK}; name an empty "
                "or new folder"
            )
        elif not create:
            raise UsageError(
                f"there is no store at {self.path}; make one with: headwise run fig1 --store "
                f"{self.path}"
            )

    def _check_format(self, mark: Path) -> None:
        try:
            found = json.loads(mark.read_text())["format"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f"{self.path} is not a headwise store: its {MARK} cannot be read"
            ) from None
        if found != FORMAT:
            raise UsageError(
                f"store {self.path} has format {found}, this headwise reads {FORMAT}: use a newer "
                "headwise, or another folder"
            )

    def open(self) -> None:
        """Make the folder and its mark if they are not there yet."""
        if not (self.path / MARK).exists():
            write_whole(self.path / MARK, json.dumps({"format": FORMAT}) + "\n")

    # ---- rows

    @property
    def runs_path(self) -> Path:
        return self.path / "runs"

    def add(self, row: Row) -> None:
        """Append a row to its run's folder."""
        self.open()
        append_line(self.runs_path / row["id"] / "rows.jsonl", json.dumps(row, allow_nan=False))

    def row(self, run_id: str) -> Row | None:
        """The run's last complete row."""
        for line in reversed(read_lines(self.runs_path / run_id / "rows.jsonl")):
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and row.get("id") == run_id:
                    return row
        return None

    def rows(self, ids: Sequence[str] | None = None, *, not_commit: str | None = None) -> list[Row]:
        """One row per finished run, by id or all of them; `not_commit` leaves those made by other
        commits."""
        if ids is None:
            ids = (
                sorted(p.name for p in self.runs_path.iterdir()) if self.runs_path.exists() else []
            )
        found = [row for row in map(self.row, ids) if row is not None]
        return found if not_commit is None else [r for r in found if r.get("commit") != not_commit]

    def missing(self, runs: Sequence[S]) -> list[S]:
        """The runs that have no row yet, each once."""
        return [run for run in {r.id: r for r in runs}.values() if self.row(run.id) is None]

    def begun(self, runs: Sequence[S]) -> int:
        """How many of the runs have a checkpoint to resume from."""
        return sum((self.runs_path / run.id / CHECKPOINT_FILE).exists() for run in runs)

    def tidy(self, runs: Sequence[S]) -> None:
        """Remove checkpoints of finished runs, left by a kill between the row and the removal."""
        for run in runs:
            left = self.runs_path / run.id / CHECKPOINT_FILE
            if left.exists() and self.row(run.id) is not None:
                left.unlink(missing_ok=True)

    @contextlib.contextmanager
    def claim(self, runs: Sequence[S]) -> Iterator[list[S]]:
        """Hold the runs that nobody else holds and that are not finished; frees them at the end."""
        self.open()
        with contextlib.ExitStack() as held:
            mine = []
            for run in runs:
                folder = self.runs_path / run.id
                folder.mkdir(parents=True, exist_ok=True)
                handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
                held.callback(os.close, handle)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                for left in folder.glob(".*"):  # half-written by somebody who was killed
                    left.unlink(missing_ok=True)
                if self.row(run.id) is None:
                    if not (folder / "run.json").exists():
                        write_whole(folder / "run.json", json.dumps(run.spec()) + "\n")
                    mine.append(run)
            yield mine

    # ---- experiments

    def note(self, name: str, about: dict[str, Any]) -> None:
        """Record what was asked for under an experiment's name."""
        self.open()
        write_whole(self.path / "experiments" / f"{name}.json", json.dumps(about, indent=1) + "\n")

    def experiments(self) -> dict[str, dict[str, Any]]:
        """What was asked for, by experiment."""
        found = {}
        for path in sorted((self.path / "experiments").glob("*.json")):
            try:
                found[path.stem] = json.loads(path.read_text())
            except ValueError:
                raise UsageError(
                    f"{path} cannot be read; remove it and run the experiment again"
                ) from None
        return found

    def noted_ids(self, name: str) -> set[str]:
        """The runs that were asked for under an experiment's name so far."""
        noted = self.experiments().get(name)
        return set(noted.get("ids") or []) if isinstance(noted, dict) else set()

    # ---- questions

    def query(self, sql: str = "select * from rows") -> Any:
        """A DuckDB relation over the table `rows`, the same as `rows()`; `.df()` makes it a pandas
        data frame."""
        import duckdb

        connection = duckdb.connect()
        rows = self.rows()
        if not rows:
            connection.execute("create table rows as select null::varchar as id where false")
            return connection.sql(sql)
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)
            lines.flush()
            connection.execute(
                """create table rows as select * from read_json($lines,
                format = 'newline_delimited', union_by_name = true, sample_size = -1,
                maximum_object_size = 134217728, timestampformat = '%Y-%m-%dT%H:%M:%SZ')""",
                {"lines": lines.name},
            )
        return connection.sql(sql)

    def frame(self, sql: str = "select * from rows") -> Any:
        """The answer to a question as a pandas data frame, by default every row."""
        return self.query(sql).df()


# ---- rows in files


def append_line(path: Path, line: str) -> None:
    """Add one line in one write; a torn line left by a kill is closed off first, so it spoils
    itself alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # a line that is being written is not a torn one
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        data = (b"\n" if torn else b"") + line.encode() + b"\n"
        if os.write(handle, data) != len(data):
            raise OSError(28, "No space left on device", str(path))
        os.fsync(handle)
    finally:
        os.close(handle)


def read_lines(path: Path) -> list[str]:
    """The complete lines of a file; none if there is no file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [line for line in text.split("\n") if line]


def read_rows(source: Path) -> list[Row]:
    """The rows of a file, one JSON object per line, each checked."""
    if not source.exists() or source.is_dir():
        folder = ": it is a folder" if source.is_dir() else ""
        raise UsageError(f"there is no file of rows at {source}{folder}")
    rows = []
    for number, line in enumerate(read_lines(source), 1):
        if not line.strip("\ufeff \t\r"):
            continue
        try:
            row = json.loads(line.lstrip("\ufeff"), parse_constant=_number, parse_float=_number)
        except _NoNumberError as e:
            raise UsageError(f"{source} holds a row, line {number}, that cannot be: {e}") from None
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise UsageError(
                f"{source} does not hold rows, one JSON object per line: line {number} is none"
            )
        if why := check_row(row):
            raise UsageError(f"{source} holds a row, line {number}, that cannot be: {why}")
        rows.append(row)
    if not rows:
        raise UsageError(f"{source} holds no rows")
    return rows


def rows_by_id(sources: Sequence[Path]) -> dict[str, Row]:
    """The rows of files by their run's id; rows of one run may differ in what is measured only."""
    out: dict[str, Row] = {}
    for source in sources:
        for row in read_rows(source):
            known = out.setdefault(str(row.get("id")), row)
            compared = (known.keys() | row.keys()) - MEASURED
            if any(known.get(key) != row.get(key) for key in compared):
                raise UsageError(
                    f"{source} holds a row of run {row.get('id')} that contradicts another of its "
                    "rows"
                )
    return out


class _NoNumberError(ValueError):
    """NaN, Infinity or a number too large, where JSON has none."""


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise _NoNumberError(f"{text} is no number")
    return value
