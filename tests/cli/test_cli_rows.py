"""Rows from files: `headwise run --rows` and `headwise draw`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.commands import refused, run_words, sets

from headwise.cli import main
from headwise.store import Store


def test_draw_takes_several_files_and_rows_that_have_no_id(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Store(store).rows()
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    first.write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    second.write_text(
        "".join(json.dumps({k: v for k, v in row.items() if k != "id"}) + "\n" for row in rows[5:])
    )
    assert main(["draw", "fig1", str(first), str(second), "--json"]) == 0
    points = json.loads(capsys.readouterr().out.splitlines()[-1])["points"]
    assert sum(point["n"] for point in points) == len(rows)
    assert (tmp_path / "fig1.png").is_file()
    assert (
        refused(["draw", "fig1", str(first), str(tmp_path / "no.jsonl")], capsys)
        == f"there is no file of rows at {tmp_path / 'no.jsonl'}"
    )


def test_draw_takes_a_store(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = Path(shutil.copytree(store, tmp_path / "mine"))
    (mine / "fig1.png").unlink()
    assert main(["draw", "fig1", str(mine), "--json"]) == 0
    assert (mine / "fig1.png").read_bytes() == (store / "fig1.png").read_bytes()
    assert (
        refused(["draw", "map", str(mine)], capsys) == f"the store {mine} has no map; it has fig1"
    )
    assert (
        refused(["draw", "fig1", str(tmp_path)], capsys)
        == f"there is no file of rows at {tmp_path}: it is a folder"
    )


def test_rows_that_are_there_are_shown_and_nothing_is_trained(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, rows = tmp_path / "new", tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps(row) + "\n" for row in Store(store).rows() if row["seed"] == 0)
    )
    words = run_words(new, "--seeds", "3", "--no-train", "--json")
    assert main(words) == 2
    assert (
        f"error: none of these 12 runs is in {new}, and only what is there was asked for "
        "(--no-train, train=False)\n" in capsys.readouterr().err
    )
    assert main([*words, "--rows", str(rows)]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["runs"], answer["taken"], answer["made"], answer["missing"]) == (12, 4, 0, 8)
    assert [point["n"] for point in answer["points"]] == [1] * 4
    assert len(Store(new).rows()) == 4
    page = (new / "report.html").read_text()
    state = "4 runs are shown of the 12 that these settings ask for; the others are not here."
    assert state in page


def test_rates_are_shown_as_far_as_they_are_there(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    assert main(run_words(new, "--seeds", "1", "--set", "rates=1,0.5", "--json")) == 0
    whole = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (whole["runs"], [point["n"] for point in whole["points"]]) == (8 + 4, [1] * 4)
    assert main(run_words(new, "--seeds", "2", "--set", "rates=1,0.5", "--no-train", "--json")) == 0
    part = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert part["points"] == whole["points"]
    assert (part["runs"], part["made"], part["missing"]) == (8 + 8, 0, 4)
    assert main(["draw", "fig1", str(new)]) == 0
    assert "4 of 4 points were tried at several learning rates on seed 0" in capsys.readouterr().out


def test_rows_made_before_are_taken_and_only_the_rest_is_made(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, new = Store(store).rows(), tmp_path / "new"
    for number, some in enumerate((rows[:3], [*rows[3:6], {**rows[6], "id": "0" * 16}])):
        (tmp_path / f"{number}.jsonl").write_text(
            "".join(json.dumps({**row, "host_cpus": 77}) + "\n" for row in some)
        )
    words = [
        *run_words(new, "--seeds", "2"),
        "--rows",
        str(tmp_path / "0.jsonl"),
        str(tmp_path / "1.jsonl"),
        "--json",
    ]
    assert main(words) == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out.splitlines()[-1])
    assert (
        f"8 runs, 6 already in {new}, 6 of them from {tmp_path / '0.jsonl'}, "
        f"{tmp_path / '1.jsonl'}, 2 to make" in printed.err + printed.out
    )
    assert (answer["runs"], answer["taken"], answer["made"]) == (8, 6, 2)
    made = Store(new).rows()
    assert {r["id"] for r in made} == {r["id"] for r in rows}, "a row of another run stays outside"
    assert sorted(r["host_cpus"] == 77 for r in made) == [False] * 2 + [True] * 6, "as it was given"
    assert [r["held_out"] for r in made] == [r["held_out"] for r in rows]
    assert main(words) == 0
    assert "8 already in" in capsys.readouterr().err
    assert len((new / "runs" / rows[0]["id"] / "rows.jsonl").read_text().splitlines()) == 1, (
        "taken once"
    )


NO_ROWS = [
    "",
    " \n\n",
    "{",
    "[1]\n",
    '"x"\n',
    "3\n",
    "\x00\x01",
    "[" * 9999,
    '{"id": "a"}\n',
    '{"id": "a", "status": "done"}\n',
    '{"id": "a", "status": NaN, "commit": "c"}\n',
]


@pytest.mark.parametrize("text", NO_ROWS)
def test_rows_that_are_none_are_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    for words in (run_words(tmp_path / "store"), ["draw", "fig1"]):
        message = refused(
            [*words, *(["--rows"] if words[0] == "run" else []), str(tmp_path / "rows.jsonl")],
            capsys,
        )
        assert message.startswith(f"{tmp_path / 'rows.jsonl'} ")
        assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]


SWAPPED: list[tuple[dict[str, Any], str]] = [
    ({"head_dim": 7}, "head_dim is "),
    ({"seed": 5}, "seed is "),
    ({"task_points": 9}, "task_points is "),
    ({"steps": 99}, "steps is "),
    ({"held_out": None}, "held_out must be a number of at least 0, got None"),
    ({"held_out": "x"}, "held_out must be a number of at least 0, got 'x'"),
    ({"held_out": -5.0}, "held_out must be a number of at least 0, got -5.0"),
    ({"held_out": True}, "held_out must be a number of at least 0, got True"),
    ({"train_best": "x"}, "train_best must be a number of at least 0, got 'x'"),
    ({"status": "banana"}, "status must be done or diverged, got 'banana'"),
    ({"commit": None}, "commit must be a name, got None"),
    ({"seconds": 10**400}, "seconds must be a finite number, got 1000"),
    ({"seconds": "x"}, "seconds must be a number of at least 0, got 'x'"),
    ({"device": None}, "device must be a name, got None"),
    ({"params": 5}, "params is "),
    ({"curve": "x"}, "curve must be a list of numbers, got 'x'"),
    ({"curve": [0.5, "x"]}, "curve must be a list of numbers, got [0.5, 'x']"),
    ({"held_out_curve": None}, "held_out_curve must be a list of numbers, got None"),
    ({"num_heads": "x"}, "num_heads is "),
]


@pytest.mark.parametrize(("change", "message"), SWAPPED, ids=str)
def test_row_of_another_run_is_refused_and_nothing_is_written(
    change: dict[str, Any],
    message: str,
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = Store(store).rows()
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in (*rows[:3], {**rows[3], **change}))
    )
    assert message in refused(
        [*run_words(tmp_path / "new", "--seeds", "2"), "--rows", str(tmp_path / "rows.jsonl")],
        capsys,
    )
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]


SHOWN = [
    "seconds",
    "device",
    "params",
    "protocol",
    "average",
    "curve",
    "held_out_curve",
    "train_best",
    "zero_error",
]


@pytest.mark.parametrize("key", SHOWN)
def test_row_that_lacks_what_is_shown_is_refused(
    key: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {k: v for k, v in Store(store).rows()[0].items() if k != key}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    message = refused(
        [*run_words(tmp_path / "new", "--seeds", "2"), "--rows", str(tmp_path / "rows.jsonl")],
        capsys,
    )
    assert message.endswith(f"does not fit the run: it has no {key}")
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("text", "number"), [("NaN", "NaN"), ("-Infinity", "-Infinity"), ("[1.0, 1e999]", "1e999")]
)
def test_value_that_is_no_number_is_named(
    text: str, number: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = json.dumps({**Store(store).rows()[0], "curve": "HERE"}).replace('"HERE"', text)
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    for words in ([*run_words(tmp_path / "new", "--seeds", "2"), "--rows"], ["draw", "fig1"]):
        file = tmp_path / "rows.jsonl"
        assert (
            refused([*words, str(file)], capsys)
            == f"{file} holds a row, line 1, that cannot be: {number} is no number"
        )


COMPUTED: list[tuple[dict[str, Any], str]] = [
    ({"dim": 64}, "dim is 8 in that run, got 64"),
    ({"error": "x"}, "--rows does not hold rows of features, one JSON object per line: "),
    ({"seconds": None}, "seconds must be a number of at least 0, got None"),
]


@pytest.mark.parametrize(("change", "message"), COMPUTED, ids=str)
def test_rows_that_were_computed_are_looked_at_too(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "run",
        "features",
        *sets(["dims=8", "heads=512", "draws=published"]),
        "--seeds",
        "2",
        "--no-report",
    ]
    assert main([*words, "--store", str(tmp_path / "made")]) == 0
    first, *others = Store(tmp_path / "made").rows()
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (*others, {**first, **change})))
    capsys.readouterr()
    assert message in refused(
        [*words, "--store", str(tmp_path / "new"), "--rows", str(file)], capsys
    )
    assert not (tmp_path / "new").exists()
    file.write_text("".join(json.dumps(row) + "\n" for row in (first, *others)))
    assert main([*words, "--store", str(tmp_path / "new"), "--rows", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["taken"] == 1 + len(others)


def test_row_that_cannot_be_shown_is_named_and_left_out_of_the_page(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(store, tmp_path / "store")
    assert (
        main(
            [
                "run",
                "representation",
                *sets(["dims=4", "angles=9"]),
                "--store",
                str(tmp_path / "store"),
            ]
        )
        == 0
    )
    row = next((tmp_path / "store" / "runs").glob("*/rows.jsonl"))
    name = json.loads(row.read_text())["id"]
    row.write_text(json.dumps({"id": name}) + "\n")
    assert main(["report", "--store", str(tmp_path / "store")]) == 0
    page = (tmp_path / "store" / "report.html").read_text()
    assert page.count("<section") == 3, "two experiments and the explorer"
    assert f"runs/{name}/rows.jsonl is damaged and left out: line 1: it has no " in page
    assert (
        f"{name}/rows.jsonl is damaged and left out: line 1: it has no " in capsys.readouterr().err
    )
    assert main(["list", "--store", str(tmp_path / "store"), "--older"]) == 0


def test_rows_of_no_run_and_rows_that_contradict_each_other_are_refused(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, file = Store(store).rows()[0], tmp_path / "rows.jsonl"
    words = [*run_words(tmp_path / "new", "--seeds", "2"), "--rows", str(file)]
    file.write_text(json.dumps({**row, "id": "0" * 16}) + "\n")
    assert (
        refused(words, capsys)
        == f"none of the 1 rows of {file} is one of these 8 runs; see --set and --seeds, "
        "or show them as they are with headwise draw"
    )
    file.write_text(json.dumps(row) + "\n" + json.dumps({**row, "held_out": 9.0}) + "\n")
    assert (
        refused(words, capsys)
        == f"{file} holds a row of run {row['id']} that contradicts another of its rows"
    )


def test_models_of_several_kinds_are_not_seeds_of_one_point(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Store(store).rows()
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({**row, "depth": 1 + i % 2}) + "\n" for i, row in enumerate(rows))
    )
    message = refused(["draw", "length", str(tmp_path / "rows.jsonl")], capsys)
    assert message.startswith("runs of one point may differ in their seeds only, these differ in ")
