"""`headwise inspect` from the command line: sentences, a table that fits, JSON, CSV and a page."""

import csv
import json

import pytest
from support.planted_heads import planted, separate, write

from headwise.cli import main


@pytest.fixture
def folder(tmp_path):
    q, k, v, o = planted()
    q[:, 2:] *= 0.01  # two directions hold nearly all
    return write(tmp_path / "model", *separate(q, k, v, o))


@pytest.mark.parametrize("columns", ["80", "200"])
def test_inspect_says_and_tabulates(columns, folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["inspect", str(folder), "--no-page"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert lines[0].startswith("2.0 of 8 dimensions hold 90 % of a head's query-key form")
    assert "6 of 6 heads hold 90 %" in " ".join(lines)


def test_inspect_answers_json_csv_and_page(folder, tmp_path, capsys):
    page, table = tmp_path / "p.html", tmp_path / "t.csv"
    words = [
        "inspect",
        str(folder),
        str(folder),
        "--json",
        "--page",
        str(page),
        "--csv",
        str(table),
    ]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["page"], found["csv"]) == (str(page), str(table))
    assert found["family"] == "llama"
    assert found["untrained"] == [False]
    assert found["layers"][0]["qk"]["r90"] == [2] * 6
    assert found["changes"][0]["moved"][0]["qk"] == [0.0] * 6
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["head"] for row in rows] == list("012345")
    assert {row["qk_r90"] for row in rows} == {"2"}
    assert page.stat().st_size > 10**6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layers", "0-x"], "--layers must be numbers such as 0-3,7"),
        (["--layers", "3-1"], "--layers must count up"),
        (["--layers", "4"], "no attention in layer 4; there: 0 to 0"),
        (["--kv-heads", "3"], "--kv-heads needs --heads"),
        (["--heads", "5"], "5 heads do not divide the 48 rows of q"),
        (["--prefix", "vision"], "no stack 'vision'"),
        (["--csv", "/nowhere/at/all.csv"], "cannot write '/nowhere/at/all.csv'"),
        (["--config", "/nowhere.json"], "cannot read '/nowhere.json'"),
    ],
)
def test_mistake_is_one_line(words, said, folder, capsys):
    assert main(["inspect", str(folder), "--no-page", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
