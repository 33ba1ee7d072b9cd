"""Tables are read back as the rows are."""

import csv
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.tracked_rows import DECODER, SMALL, tracked_store

from headwise.errors import UsageError
from headwise.store import Store, read_rows
from headwise.tracking.tables import check_path, write_csv, write_parquet

duckdb = pytest.importorskip("duckdb")
pytest.importorskip("pandas")
RESULTS = Path(__file__).parents[2] / "results"
KINDS = ("fig1/quick", "regression/short", "features/rows", "finetune/rows", "nanochat/rows")


def read_parquet(path: Path) -> list[dict[str, Any]]:
    found = duckdb.connect().execute("select * from read_parquet($path)", {"path": str(path)})
    names = [column[0] for column in found.description]
    return [dict(zip(names, values, strict=True)) for values in found.fetchall()]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what it has not, its time as a time."""
    times = {"finished": datetime.fromisoformat(row["finished"]).replace(tzinfo=None)}
    return {key: value for key, value in {**row, **times}.items() if value is not None}


def test_parquet_is_read_back_equal_with_its_curves(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    for kind in KINDS:  # of several experiments, some columns in some of them only
        for row in read_rows(RESULTS / f"{kind}.jsonl")[:13]:
            store.add(row)
    assert write_parquet(store, tmp_path / "rows.parquet") == 65
    found = read_parquet(tmp_path / "rows.parquet")
    known = {row["id"]: row for row in store.rows()}
    assert len(known) == len(found) == 65
    for row in found:
        there = {key: value for key, value in row.items() if value is not None}
        assert there == plain(known[row["id"]])


def test_parquet_of_some_runs_has_those(tmp_path: Path) -> None:
    store = tracked_store(tmp_path / "s")
    assert write_parquet(store, tmp_path / "rows.parquet", [SMALL.id, "'; drop"]) == 1
    assert [row["id"] for row in read_parquet(tmp_path / "rows.parquet")] == [SMALL.id]


def test_frame_is_the_table_in_pandas(tmp_path: Path) -> None:
    frame = tracked_store(tmp_path / "s").frame().set_index("id")
    assert frame.loc[SMALL.id, "held_out"] == 0.55
    assert [list(map(float, point)) for point in frame.loc[DECODER.id, "held_out_curve"]] == [
        [18, 6.5],
        [35, 6.25],
    ]


def test_csv_is_read_back_equal(tmp_path: Path) -> None:
    store = tracked_store(tmp_path / "s")
    assert write_csv(store, tmp_path / "rows.csv") == 4
    with (tmp_path / "rows.csv").open(newline="") as f:
        found = {row["id"]: row for row in csv.DictReader(f)}
    for row in store.rows():
        for key, text in found[row["id"]].items():
            value = row.get(key)
            if value is None:
                assert text == ""
            else:
                assert (text if isinstance(value, str) else json.loads(text)) == value, key


def test_tables_of_an_empty_store_have_no_rows(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    assert write_csv(store, tmp_path / "rows.csv") == 0
    assert write_parquet(store, tmp_path / "rows.parquet") == 0
    assert read_parquet(tmp_path / "rows.parquet") == []


def test_place_that_is_no_file_is_refused(tmp_path: Path) -> None:
    for path, error in (
        (tmp_path, "a table is a file"),
        (Path("/dev/null"), "a table is a file"),
        (tmp_path / "none" / "x.csv", "there is no folder"),
    ):
        with pytest.raises(UsageError, match=error):
            check_path(path)
