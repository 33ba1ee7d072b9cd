"""Tables and bars fit the terminal, whatever its width; pipes get everything."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from support.commands import CHOOSE, run_words
from support.groups import idle_group, tiny_runs
from support.planted_heads import planted, separate, write
from support.terminal import screen, terminal

from headwise.cli import main
from headwise.cli.output import print_table
from headwise.experiments import EXPERIMENTS, PAGES, built_in
from headwise.progress import Progress

ROWS = Path(__file__).parents[2] / "results" / "fig1" / "rows.jsonl"
SHAPE = ["dim=768", "depth=12", "num_heads=12"]


@pytest.fixture(autouse=True)
def _no_columns_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def test_screen_wraps_full_lines_and_writes_over_returned_ones() -> None:
    assert screen("abcd\r\nx\ry\r\n", 4).lines == ["abcd", "y", ""]
    assert (screen("abcde", 4).lines, screen("abcde", 4).wraps) == (["abcd", "e"], 1)
    assert screen("abcd\rxy", 4).lines == ["xycd"]


# ---- tables


def printed(words: list[str], columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a command shows on a terminal, where no line may be full."""
    with terminal(columns) as ours, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", ours.stream)
        patch.setattr("sys.stderr", ours.stream)
        assert main(words) == 0
    assert ours.shown.wraps == 0, "\n".join(ours.shown.lines)
    return ours.shown.lines


COMMANDS = {
    "list": ["list"],
    "settings": ["list", "map"],
    "cost": ["cost", "--set", *SHAPE],
    "policies": ["policies", "--set", *SHAPE, "--policy", "widen-iso", "--to", "2,24"],
    "explain": ["explain", "--set", *SHAPE, "--device", "cpu"],
    "explain a GPU": ["explain", "--set", *SHAPE, "--device", "cuda"],
    "check": ["check", str(Path(__file__).parents[2] / "examples" / "my_task.py")],
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_command_fits_80_columns(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(printed(words, 80, monkeypatch)) > 3


def test_policies_need_80_columns_less_than_they_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = COMMANDS["policies"]
    narrow = printed(words, 80, monkeypatch)
    assert any(line.startswith("--wide shows 2 more columns: params allowed") for line in narrow)
    assert main(words) == 0
    piped = capsys.readouterr().out.splitlines()
    assert max(map(len, piped)) > 100
    assert printed([*words, "--wide"], 200, monkeypatch)[:-1] == piped


def test_store_and_drawing_fit_80_columns(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # paths are printed as they were given
    drawn = printed(["draw", "fig1", str(ROWS), "--output", "f.png"], 80, monkeypatch)
    assert "rank" in drawn[1].split()
    assert any("0.0197 ± 0.0002" in line for line in drawn)
    listed = printed(["list", "--store", str(store)], 80, monkeypatch)
    assert listed[0].startswith("id ")
    again = printed(run_words(store, "--seeds", "2", "--no-report"), 80, monkeypatch)
    assert any(line.endswith("paper's") for line in again), "its heading takes two lines"


def test_commands_of_a_store_and_its_groups_fit_80_columns(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begun = Path(shutil.copytree(store, tmp_path / "begun"))
    group = idle_group(begun, tiny_runs(3))
    (group.folder / "log.1").write_text("a word, and " * 40)
    live = printed(["list", "--store", "begun", "--live"], 80, monkeypatch)
    assert live[0].startswith("group ")
    assert "1 groups, 1 running, 0 done" in live
    for beat in group.beats():
        os.utime(beat, (1e9, 1e9))
    live = printed(["list", "--store", "begun", "--live"], 80, monkeypatch)
    assert live[1].split()[1] == "lost", "nobody has heard of it for years"
    for words in (["cancel"], ["export", "--to", "csv"], ["export", "--to", "tensorboard"]):
        assert printed([*words, "--store", "begun"], 80, monkeypatch)
    assert printed(["report", "--store", "begun"], 80, monkeypatch)


def test_plan_choose_and_inspect_fit_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "model", *separate(*planted()))
    plan = ["plan", "--params", "350M", "--kv-bytes", "48KiB"]
    assert len(printed(plan, 80, monkeypatch)) > 10
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 4}
    sizes |= {"intermediate_size": 704, "vocab_size": 1000}
    Path("config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    like = ["plan", "--like", "config.json", "--keep", "params", "--kv-bytes", "-50%"]
    assert len(printed(like, 80, monkeypatch)) > 3
    assert len(printed([*CHOOSE, "--seeds", "2", "--store", "c"], 80, monkeypatch)) > 6
    assert len(printed(["inspect", "model", "--page", "page.html"], 80, monkeypatch)) > 3
    assert len(printed(["inspect", "model", "model", "--no-page"], 80, monkeypatch)) > 3


def test_theory_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["theory", "--only", "plane", "--store", "theory", "--no-report"]
    assert len(printed(words, 80, monkeypatch)) > 3


@pytest.mark.parametrize("name", [*EXPERIMENTS, *PAGES])
def test_table_of_an_experiment_fits_80_columns(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = built_in((EXPERIMENTS | PAGES)[name])
    assert len(experiment.main_columns) >= 2
    headings = [heading for _, heading in experiment.columns]
    keys = [key for key, _ in experiment.columns]
    main_columns = [keys.index(key) for key in experiment.main_columns]
    # Cells as wide as numbers with an interval are, which differ from row to row.
    table = [headings, *([f"0.{row}234 ± 0.0123"] * len(headings) for row in range(3))]
    print_table(table, 80, main_columns)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert 4 <= sum(line.count("0.1234") for line in lines) < len(headings) or len(headings) < 7
    for i in main_columns[:2]:
        shown = " ".join(lines[: next(n for n, line in enumerate(lines) if "0.0234" in line)])
        assert set(headings[i].split()) <= set(shown.split())


def test_table_of_any_cells_fits_and_says_what_it_leaves_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng = random.Random(0)
    for _ in range(300):
        width, columns = rng.choice((20, 40, 80, 132)), rng.randint(1, 24)
        words = ["rate", "layers", "held-out error", "x" * rng.randint(1, 19), "a b c " * 20, "7"]
        headings = [f"c{i} {rng.choice(words[:3])}" for i in range(columns)]
        rows = rng.choice((0, 1, 5, 60))
        table = [headings, *([rng.choice(words) for _ in range(columns)] for _ in range(rows))]
        main_columns = rng.sample(range(columns), rng.randint(0, columns))
        print_table(table, width, main_columns)
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= width, out
        for i in range(columns):
            assert f"c{i}" in out.split() or f"c{i}" in out.replace(",", " ").split()
        if columns > 1 and main_columns:
            assert f"c{main_columns[0]}" in out.partition("--wide")[0].split()


# ---- bars


@pytest.mark.parametrize("columns", [20, 40, 80, 120])
def test_bar_stays_on_one_line(columns: int) -> None:
    notes = ["loss 2.3456", "step 100000 of 100000", "1,234,567 tokens/s", "48.1% of peak"]
    with terminal(columns) as ours:
        bar = Progress(10, "pretrain 0123456789abcdef", ours.stream)
        for step in range(4):
            bar.shown -= 1  # a second ago
            bar.advance(1, ", ".join(notes[: 4 - step]))
        bar.close("held out 1.2345 bits per byte, " + ", ".join(notes))
    assert ours.shown.wraps == 0
    line, rest = ours.shown.lines
    assert (line[-1:] != "", rest) == (True, "")
    assert len(line) < columns, "a full line begins a new one on some terminals"
    if columns >= 80:
        assert line.startswith("[##########              ] pretrain 0123456789abcdef  40%, 0s in")
    if columns >= 120:
        assert line.endswith(", held out 1.2345 bits per byte, loss 2.3456")


def test_bar_is_as_wide_as_its_terminal_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(120) as ours:
        bar = Progress(10, "fig1: 12 runs", ours.stream)
        bar.close("a note that is long enough, " * 3)
        monkeypatch.setenv("COLUMNS", "30")
        bar.close("a note that is long enough, " * 3)
    wide, narrow, _ = ours.shown.lines
    assert 80 < len(wide) < 120
    assert len(narrow) < 30


def test_pretrain_leaves_one_line_of_its_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["pretrain", "--set", "dim=12", "depth=1", "num_heads=2", "--steps", "12"]
    words += ["--eval-tokens", "512", "--device", "cpu", "--store", str(tmp_path / "store")]
    lines = printed(words, 80, monkeypatch)
    assert sum("%, " in line for line in lines) == 1
