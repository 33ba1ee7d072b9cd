"""All rows of a store as one table in a file: CSV with the standard library, Parquet by DuckDB."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.errors import UsageError
from headwise.files import whole_file, write_whole
from headwise.store import Store

TABLES = ("csv", "parquet")


def write_csv(store: Store, path: Path, ids: Sequence[str] | None = None) -> int:
    """Write a line per row, its columns those of all rows; a list is JSON, what a row has not is
    empty. Returns how many rows there are."""
    rows = store.rows(ids)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    write_whole(path, text.getvalue())
    return len(rows)


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict | bool) else value


def write_parquet(store: Store, path: Path, ids: Sequence[str] | None = None) -> int:
    """Write the table `rows` of `Store.query`: curves are columns of lists, `finished` is a time.
    Returns how many rows there are."""
    try:
        import duckdb
    except ModuleNotFoundError:
        raise UsageError("Parquet needs duckdb: pip install 'headwise[report]'") from None
    relation = store.query()
    if ids is not None:
        wanted = map(duckdb.ConstantExpression, ids)
        relation = relation.filter(duckdb.ColumnExpression("id").isin(*wanted))
    with whole_file(path) as temporary:
        relation.write_parquet(str(temporary))
    return len(relation)


def write_table(kind: str, store: Store, path: Path, ids: Sequence[str] | None = None) -> int:
    """Write a table of one of the `TABLES`; returns how many rows it has."""
    return (write_csv if kind == "csv" else write_parquet)(store, path, ids)


def check_path(path: Path) -> None:
    """Refuse a place where no file can be written."""
    if path.exists() and not path.is_file():
        raise UsageError(f"a table is a file, got {path}, which is a folder, a device or a pipe")
    if path.is_symlink() and not path.exists():
        raise UsageError(f"a table is a file, got {path}, a link that leads nowhere")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.absolute().parent} to write into")
