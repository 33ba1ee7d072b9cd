"""`headwise plan`: words in, a table of at most 80 columns, JSON, files; mistakes in one line."""

import csv
import json
from pathlib import Path

import pytest
from support.terminal import terminal

from headwise import Shape
from headwise.cli import main

SMALL = ["plan", "--params", "2M", "--set", "vocab_size=512", "head_dim=32", "dim=96,128"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A model's config.json."""
    fields = {"model_type": "llama", "hidden_size": 128, "num_hidden_layers": 6}
    fields |= {"num_attention_heads": 4, "intermediate_size": 384, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path / "config.json"


def answer(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict:
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_plan_prints_space_removals_and_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--rows", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("space: dim=96,128, depth=")
    assert any(line.endswith("removed by params 1.98M to 2.02M") for line in lines)
    assert any("meet the limits, sorted by" in line for line in lines)
    heads = next(i for i, line in enumerate(lines) if line.split()[:2] == ["#", "dim"])
    assert [line.split()[0] for line in lines[heads + 1 : heads + 5]] == ["1", "2", "3", "4"]


def test_json_has_exact_costs_of_the_rows_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer([*SMALL, "--kv-bytes", "<=2KiB", "--rows", "3"], capsys)
    assert found["listed"] == found["meeting"] > len(found["rows"]) == 3
    assert found["considered"] == found["meeting"] + sum(r["candidates"] for r in found["removed"])
    assert (found["context"], found["batch"], found["dtype"]) == (2048, 1, "bf16")
    for row in found["rows"]:
        shape = Shape.of(row["shape"])
        assert row["params"] == shape.params
        assert row["kv_bytes_per_token"] == shape.kv_bytes(1) <= 2048
        assert isinstance(row["pareto"], bool)


def test_option_takes_a_percentage_as_its_value(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--like", str(config), "--keep", "params", "--kv-bytes", "-50%"]
    found = answer([*words, "--rows", "2"], capsys)
    assert found["limits"][0]["text"] == "-50%"
    assert found["rows"][0]["change"]["kv_bytes_per_token"] == pytest.approx(-0.5, abs=0.006)
    assert found["like"]["params"] == Shape.from_hf(config).params


def test_plan_without_rows_fails_and_says_what_to_relax(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--kv-bytes", "<=1B"]) == 1
    out = capsys.readouterr().out
    assert "0 meet the limits" in out
    assert "relax kv_bytes_per_token at most 1B by" in out
    found = answer([*SMALL, "--kv-bytes", "<=1B"], capsys, code=1)
    assert found["relax"][0]["limit"] == "kv_bytes_per_token"


@pytest.mark.parametrize("columns", [80, 100, 40])
def test_table_fits_the_terminal(
    columns: int, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with terminal(columns) as ours, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", ours.stream)
        assert main(["plan", "--like", str(config), "--keep", "params", "--rows", "5"]) == 0
    assert ours.shown.wraps == 0, "\n".join(ours.shown.lines)
    lines = ours.shown.lines
    heads = next(line for line in lines if line.lstrip().startswith("#"))
    assert {"#", "dim", "layers", "heads"} <= set(heads.split())
    assert any(line.startswith("--wide shows") for line in lines)


def test_csv_and_settings_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--csv", str(tmp_path / "rows.csv"), "--write", str(tmp_path / "row")]
    found = answer([*words, "--row", "3", "--rows", "3"], capsys)
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert len(rows) == found["listed"]
    assert Shape.from_hf(tmp_path / "row") == Shape.of(found["rows"][2]["shape"])
    assert int(rows[2]["params"]) == found["rows"][2]["params"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--params", "350Q"], "unknown unit 'Q' of params; choices: B, G, M, T, k"),
        (["--params", "2M", "--kv-bytes", "-50%"], "kv-bytes '-50%' is relative to a model"),
        (["--params", "2M", "--set", "heads"], "--set takes field=choices, got 'heads'"),
        (["--params", "2M", "--set", "dim=1", "dim=2"], "dim is set twice"),
        (["--params", "2M", "--set", "loss=1"], "unknown limit or field 'loss'"),
        (["--params", "2M", "--train-ms", "<=3ms"], "a limit on train_ms needs --measure"),
        (["--params", "2M", "--row", "99999"], "row must be from 1 to"),
        (["--like", "nowhere/config.json"], "nowhere/config.json"),
    ],
)
def test_mistake_is_one_line_and_nothing_is_written(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--write", str(tmp_path / "row"), "--csv", str(tmp_path / "rows.csv")]
    assert main(["plan", "--set", "vocab_size=512", "head_dim=32", *words, *files]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1, "one line"
    assert list(tmp_path.iterdir()) == []


def test_backends_of_the_rows_shown_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL[:4], "vocab_size=512", "dim=128", "head_dim=32", "v_head_dim=16,32"]
    found = answer([*words, "--backends", "--device", "cpu", "--rows", "40"], capsys)
    rows = found["rows"]
    assert {row["backend"] for row in rows} == {"flash"}
    assert {(row["shape"]["v_head_dim"], tuple(row["pad"])) for row in rows} <= {
        (16, (0, 16)),
        (32, (0, 0)),
    }
    assert {row["waste"] for row in rows} <= {0, 16 / 48}


def test_rows_are_measured_here_within_the_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--params", "20k", "--set", "vocab_size=64", "dim=32", "head_dim=8", "depth=1"]
    words += [
        "--context",
        "32",
        "--dtype",
        "fp32",
        "--tolerance",
        "5%",
        "--measure",
        "--device",
        "cpu",
        "--rows",
        "2",
    ]
    found = answer([*words, "--measure-seconds", "20"], capsys)
    for row in found["rows"]:
        low, high = row["train_range"]
        assert 0 < low <= row["train_ms"] <= high
        assert row["decode_ms"] > 0
        assert row["train_repeats"] >= 2
    assert "rows measured on" in found["notes"][-1]
    none = answer([*words, "--train-ms", "<=1us"], capsys, code=1)
    assert none["listed"] == 0
    assert "0 of them with train_ms at most" in none["notes"][-1]
