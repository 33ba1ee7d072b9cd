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
    STORE/runs/ID/lease.N                  held by a worker of another machine (execute/leases.py)
    STORE/groups/ID                        runs that one device trains at once (execute/groups.py)

There is no index and no shared file, so a store can be copied, merged with cp -r and read while it
grows. A store is data: nothing that it names is ever imported or run. Rows, specifications and what
was asked for carry a digest (digests.py). What is damaged is named in one line on standard error
and left out; its run counts as missing. A row of before has no digest: it is compared with its
run's specification.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headwise.digests import DIGEST, parse, read_bytes, read_signed, signed, unsigned
from headwise.errors import UsageError, bounded
from headwise.files import (
    MOST_TEXT,
    DamagedError,
    NotReadableError,
    check_regular,
    lock,
    may_remove,
    read_file,
    remove_leftovers,
    write_whole,
)
from headwise.rows import (
    CHECKPOINT_FILE,
    MEASURED,
    Row,
    Specified,
    check_columns,
    check_row,
    id_of,
)

S = TypeVar("S", bound=Specified)
FORMAT = 1
MARK = "headwise.json"
SPEC_FILE = "run.json"  # in a run's folder
ROWS_FILE = "rows.jsonl"
MOST_ROWS = 128 << 20  # bytes of a file of rows, twenty times the largest one that is published
MOST_NAMED = 20  # damaged files, one line each


class Store:
    """A folder of rows.

    >>> import tempfile
    >>> Store(tempfile.mkdtemp()).rows()
    []
    """

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path = Path(path)
        self.damaged: dict[Path, str] = {}  # files that were left out, and what is wrong with them
        mark = self.path / MARK
        there = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if not there.is_dir():
            raise UsageError(f"a store is a folder, got {self.path} where {there} is a file")
        for path in (self.path, *self.path.absolute().parents):
            if path.is_symlink() and not path.exists():
                raise UsageError(f"a store is a folder, got {path}, a link that leads nowhere")
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
            found = read_signed(mark)["format"]
        except (DamagedError, KeyError):
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
        # JSON has no number that is none, so such a row is refused before anything is written.
        line = json.dumps(signed(row), allow_nan=False)
        append_line(self.runs_path / row["id"] / ROWS_FILE, line)

    def add_once(self, row: Row) -> None:
        """Add a row unless its run has one. Of several writers of one run, on machines that share
        no locks, one row is kept: the file is renamed into its place."""
        self.open()
        path = self.runs_path / row["id"] / ROWS_FILE
        check_regular(path)
        # What is there is read before the row is looked for: a row that comes between is found, and
        # one that comes later is replaced.
        before = path.read_bytes() if path.exists() else b""  # damaged lines stay
        if self.row(row["id"]) is not None:
            return
        line = json.dumps(signed(row), allow_nan=False)
        torn = b"\n" if before and not before.endswith(b"\n") else b""
        write_whole(path, before + torn + line.encode() + b"\n")

    def row(self, run_id: str) -> Row | None:
        """The run's last row that is as it was written."""
        row, problems = _read_run(self.runs_path, run_id)
        self.name(problems)
        return row

    def spec(self, run_id: str) -> dict[str, Any] | None:
        """The run's specification; None: there is none that can be read, as where its row was taken
        from a file."""
        if os.path.basename(run_id) != run_id:  # an id must not lead out of the store
            return None
        with contextlib.suppress(FileNotFoundError, DamagedError):
            return read_signed(self.runs_path / run_id / SPEC_FILE)
        return None

    def name(self, problems: Mapping[Path, str]) -> None:
        """Say in one line each which files are damaged and left out, once."""
        for path, why in problems.items():
            if path in self.damaged:
                continue
            self.damaged[path] = why
            line = f"{path} is damaged and left out: {why}"
            if len(self.damaged) > MOST_NAMED:
                line = f"more files of {self.path} are damaged and left out"
            if len(self.damaged) <= MOST_NAMED + 1:
                print(f"headwise: {bounded(line)}", file=sys.stderr, flush=True)

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
        """Remove checkpoints of finished runs, left by a kill between the row and the removal, and
        write specifications again that were found damaged."""
        for run in runs:
            left = self.runs_path / run.id / CHECKPOINT_FILE
            if left.is_file() and self.row(run.id) is not None:
                left.unlink(missing_ok=True)
            if self.runs_path / run.id / SPEC_FILE in self.damaged:
                self._write_spec(run)

    def _write_spec(self, run: Specified) -> None:
        path = self.runs_path / run.id / SPEC_FILE
        write_whole(path, json.dumps(signed(run.spec())) + "\n")

    @contextlib.contextmanager
    def claim(self, runs: Sequence[S]) -> Iterator[list[S]]:
        """Hold the runs that nobody else holds and that are not finished; frees them at the end."""
        self.open()
        with contextlib.ExitStack() as held:
            mine = []
            for run in runs:
                folder = self.runs_path / run.id
                folder.mkdir(parents=True, exist_ok=True)
                # Both are written in place. A link in somebody's store could lead anywhere.
                for name in ("lock", ROWS_FILE):
                    check_regular(folder / name)
                handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                held.callback(os.close, handle)
                if not lock(handle, wait=False):
                    continue
                for left in folder.glob(".*"):  # half-written by somebody who was killed
                    if may_remove(left):
                        left.unlink(missing_ok=True)
                # What is damaged was named by whoever asked for the row, and not by every worker.
                row, problems = _read_run(self.runs_path, run.id)
                if row is None:
                    spec = folder / SPEC_FILE
                    if not spec.exists() or spec in problems:
                        self._write_spec(run)
                    mine.append(run)
            yield mine

    # ---- experiments

    def note(self, name: str, about: dict[str, Any]) -> None:
        """Record what was asked for under an experiment's name."""
        self.open()
        remove_leftovers(self.path, MARK)
        remove_leftovers(self.path / "experiments", "*.json")
        path = self.path / "experiments" / f"{name}.json"
        if path.is_dir():
            raise UsageError(f"{path} is a folder where a file belongs: move it away")
        write_whole(path, json.dumps(signed(about), indent=1) + "\n")

    def experiments(self) -> dict[str, dict[str, Any]]:
        """What was asked for, by experiment."""
        found = {}
        for path in sorted((self.path / "experiments").glob("*.json")):
            with contextlib.suppress(FileNotFoundError):
                try:
                    about = read_signed(path)
                    ids = about.get("ids", [])
                    if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
                        raise DamagedError("its ids must be a list of names")
                    found[path.stem] = about
                except DamagedError as e:
                    self.name({path: str(e)})
        return found

    def noted_ids(self, name: str) -> set[str]:
        """The runs that were asked for under an experiment's name so far."""
        return set(self.experiments().get(name, {}).get("ids", []))

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


def _read_run(runs_path: Path, run_id: str) -> tuple[Row | None, dict[Path, str]]:
    """A run's last row that is as it was written, and which of its files are damaged."""
    # An id may come from a file, and must not lead out of the store.
    if os.path.basename(run_id) != run_id or run_id in ("", ".", ".."):
        return None, {}
    folder = runs_path / run_id
    spec_path, rows_path = folder / SPEC_FILE, folder / ROWS_FILE
    problems = {}
    spec: dict[str, Any] = {}
    try:
        found = parse(read_bytes(spec_path, MOST_TEXT))
        spec = unsigned(found)
        # One of before has no digest, but its id is a hash of it. A class of one's own that is
        # computed may have an id of its own.
        if DIGEST not in found and "experiment" not in spec and id_of(spec) not in ("", run_id):
            raise DamagedError("it is not what its run's id says")
    except FileNotFoundError:
        pass
    except (DamagedError, TypeError) as e:
        problems[spec_path] = str(e)
    broken = bool(problems)
    row, why = _last_row(rows_path, lambda line: _row_of(line, run_id, spec, broken))
    if why:
        problems[rows_path] = why
    return row, problems


def _last_row(path: Path, read: Callable[[bytes], Row]) -> tuple[Row | None, str]:
    """The last line that can be read as a row, and what is wrong with the lines behind it."""
    try:
        data = read_bytes(path, MOST_ROWS)
    except FileNotFoundError:
        return None, ""
    except DamagedError as e:
        return None, str(e)
    *lines, rest = data.split(b"\n")
    # A line without an end was cut short by a kill or is being written, unless its end alone is
    # wrong.
    for ended in filter(None, (rest, rest[:-1])):
        with contextlib.suppress(DamagedError):
            return read(ended), ""
    why = ""
    for number in range(len(lines), 0, -1):
        if line := lines[number - 1]:
            try:
                return read(line), why
            except DamagedError as e:
                why = why or f"line {number}: {e}"
    return None, why


def _row_of(line: bytes, run_id: str, spec: Mapping[str, Any], broken: bool) -> Row:
    """The row in a line, which must be of this run."""
    found = parse(line)
    row = unsigned(found)
    if row.get("id") != run_id:
        raise DamagedError(f"it is a row of {row.get('id')!r:.40}")
    if DIGEST in found:
        return row
    # A row of before has the specification alone to be checked by.
    if broken:
        raise DamagedError(f"it has no digest, and {SPEC_FILE} is damaged")
    if id_of(spec) and (why := check_columns(row, spec)):
        raise DamagedError(why)
    return row


def append_line(path: Path, line: str) -> None:
    """Add one line in one write; a torn line left by a kill is closed off first, so it spoils
    itself alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        lock(handle)  # a line that is being written is not a torn one
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
        text = read_file(path, MOST_ROWS, links=True).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except NotReadableError as e:
        raise UsageError(f"the rows in {path} cannot be read: {e}") from None
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
        try:
            row = unsigned(row)
        except DamagedError as e:
            raise UsageError(f"{source} holds a row, line {number}, that cannot be: {e}") from None
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
