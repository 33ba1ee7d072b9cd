"""A store of before opens, resumes and reports; and so are rows of before still rows.

`tests/data/old-store` was made by commit f348246, before the package had folders, and killed: two
of its four runs are finished, two have checkpoints. `old-store-rows.jsonl` are its rows as that
commit finished them.
"""

import json
import shlex
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
from support.small_runs import bits
from training.test_run_ids import run_of_row

from headwise.cli import main
from headwise.experiments import find
from headwise.experiments.given_rows import readable
from headwise.rows import MEASURED, check_row
from headwise.store import Store, read_rows
from headwise.tasks import TASKS

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data"
NO_ROWS = {"speed/infer.jsonl"}  # of a benchmark
CHOSEN = {"choose/farthest.jsonl"}  # of a choice, which shows itself
FILES = [
    path
    for path in sorted(ROOT.glob("results/*/*.jsonl"))
    if f"{path.parent.name}/{path.name}" not in NO_ROWS
]
MADE_BY = {  # a folder or a file of results -> its experiment, where that has another name
    "map/leaner-farthest": "leaner",
    "map/leaner-text": "leaner",
    "map/removable": "removable",
    "nanochat": "nanochat_heads",
}


@pytest.fixture
def store(tmp_path, monkeypatch):
    shutil.copytree(DATA / "old-store", tmp_path / "old-store")
    monkeypatch.chdir(tmp_path)
    return Store("old-store", create=False)


def close(row):
    """A row to what every CPU agrees in: floats to four digits, nothing that was measured."""

    def rounded(value):
        if isinstance(value, float):
            return pytest.approx(value, rel=1e-4)
        return list(map(rounded, value)) if isinstance(value, list) else value

    return {key: rounded(value) for key, value in row.items() if key not in MEASURED}


def test_old_store_resumes_and_reports(store, capsys):
    finished = {row["id"]: bits(row) for row in store.rows()}
    assert len(finished) == 2
    assert main(["list", "--store", "old-store"]) == 0
    assert "2 rows, 2 unfinished runs" in capsys.readouterr().out

    asked = shlex.split(store.experiments()["fig1"]["command"])
    assert main(asked[1:]) == 0
    assert "4 runs, 2 already in old-store, 2 to resume" in capsys.readouterr().err
    rows, expected = store.rows(), read_rows(DATA / "old-store-rows.jsonl")
    assert [row["resumed"] for row in rows] == [0, 0, 1, 1]
    for row, old in zip(rows, expected, strict=True):
        assert row == {**close(old), **{key: row[key] for key in MEASURED & row.keys()}}
        assert finished.get(row["id"], bits(row)) == bits(row)
    assert not list(store.path.rglob("checkpoint*"))

    assert main(["report", "--store", "old-store"]) == 0
    assert "0.9999" in (store.path / "report.html").read_text()
    assert main(["draw", "fig1", "old-store", "--output", "drawn.png"]) == 0
    assert Path("drawn.png").stat().st_size > 5000


def test_old_page_is_shown_before_anything_is_resumed(store):
    assert main(["report", "--store", "old-store"]) == 0
    assert "fig1" in (store.path / "report.html").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_rows_in_results_are_accepted(path):
    """As `--rows` accepts them: each is what its run's id says, and their experiment shows them."""
    rows = read_rows(path)
    for row in rows:
        if row.get("task") in TASKS and not row.get("task_source"):  # its data are not here
            run = run_of_row(row)
            assert run.id == row["id"]
            assert check_row(row, run) == ""
    if f"{path.parent.name}/{path.name}" in CHOSEN:
        return
    part = f"{path.parent.name}/{path.stem}"
    experiment = find(MADE_BY.get(part) or MADE_BY.get(path.parent.name) or path.parent.name)
    parts = defaultdict(list)  # a command has one precision and one number of steps
    for row in rows:
        key = (row.get("precision"), row.get("steps")) if experiment.name == "fig1" else ()
        parts[key].append(row)
    for chosen in parts.values():
        with readable(str(path), experiment.name):
            points = experiment.summary(chosen)
            assert points
            experiment.headline(points)
            experiment.figure(points)


def test_files_that_hold_no_rows_have_no_ids():
    for name in NO_ROWS:
        first = json.loads((ROOT / "results" / name).read_text().splitlines()[0])
        assert "id" not in first
