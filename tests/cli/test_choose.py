"""`headwise choose` as it is typed: mistakes in one line, and an answer that fits the terminal."""

from pathlib import Path

import pytest
from support.planted import SHAPES, Planted
from support.terminal import terminal

from headwise.choosing import recommend
from headwise.cli import main
from headwise.cli.output import print_prose, print_table

MISTAKES = (
    ("choose", "choose needs a task, as in my_task.py, or a text (--text PATH)"),
    ("choose farthest", "choose needs shapes, or the parameters that they are to have (params)"),
    ("choose farthst --params 9k", "unknown task 'farthst'; did you mean farthest?"),
    ("choose none.py --params 9k", "there is no "),
    ("choose farthest --params 9x", "unknown unit 'x' of params; "),
    ("choose farthest --text --params 9k", "choose takes a task or a text, got farthest and"),
    ("choose farthest --params 9k --length 8", "--length goes with --text, got the task farthest"),
    ("choose --text none.txt --params 9k", "there is no text at none.txt"),
    ("choose --text --params 9k --batch 8", "batch does not go with a text"),
    ("choose farthest --params 9k --hours 1 --seconds 9", "time is given in seconds or in hours"),
    ("choose farthest --params 9k --delta 2", "delta must lie between 0 and 1, got 2.0"),
    ("choose farthest --params 9k --epsilon -1", "epsilon must be 0 or more, got -1.0"),
    ("choose farthest --params 9k --seeds 1", "seeds must be 2 to 10,000, got 1"),
    ("choose farthest --params 9k --rates 0", "rates must be above 0, got 0.0"),
    ("choose farthest --params 9k --rates a", "argument --rates: must be a number, got 'a'"),
    ("choose farthest --params 9k --heads 0", "argument --heads: must be at least 1, got 0"),
    ("choose farthest --params 9k --heads 999", "fewer than two shapes of 9,000 parameters"),
    ("choose farthest --params 9k --most 1", "at least 2 shapes can be compared, got 1"),
    ("choose farthest --params 9k --device mars", "unknown device 'mars'; "),
    ("choose farthest --extrapolate 3k,4k", "--extrapolate needs the size to predict: --params"),
    ("choose farthest --params 9k --extrapolate 3k", "extrapolate needs at least two sizes below"),
    ("choose farthest --params 9k --extrapolate 3k,4k --dim 8", "dim follows from the size of"),
    ("choose farthest --params 9k --kv-bytes 8KiB", "kv_bytes_per_token needs "),
)


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistake_is_one_line_and_makes_no_store(
    words: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"headwise: error: {message}"), said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_answer_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    question = recommend.Question(Planted(), SHAPES, (0.001, 0.003), 2)
    found, _ = recommend.answer(
        question, recommend.Rule(seeds=4), recommend.Store(tmp_path), began=0.0, seconds=None,
        how={"device": "cpu", "workers": None, "checkpoint_every": 30.0}, report=False,
        say=lambda line: None, stop=None, command="",
    )  # fmt: skip
    with terminal(80) as ours, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", ours.stream)
        for line in found.lines:
            print_prose(line, 80)
        print_table(found.table, 80, (0, 2, 1, 3, 5, 4))
    assert ours.shown.wraps == 0
    assert any("4 x 4 in 1 layer" in line for line in ours.shown.lines)
