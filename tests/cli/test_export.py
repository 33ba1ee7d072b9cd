"""`headwise export` and `--track`: what they write, say and refuse."""

import json
from pathlib import Path

import pytest
from support.commands import refused, run_words
from support.pretrain_command import words_of
from support.tracked_rows import DECODER, SMALL, tracked_store

from headwise.cli import main
from headwise.store import Store

OWN = """
from pathlib import Path

class Lines:
    def __init__(self, path="lines.txt"):
        self.path = Path(path)

    def __call__(self, run):
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        if run.id in lines:
            return False
        self.path.write_text("\\n".join([*lines, run.id]))

def broken(run):
    raise OSError("no ink")
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(OWN)
    return str(tmp_path / "mine.py")


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ---- export


def test_export_to_a_tracker_twice_adds_each_run_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tracked_store(tmp_path / "s")
    words = ["export", "--to", "tensorboard", "--store", str(store.path)]
    first, second = answer(words, capsys), answer(words, capsys)
    assert first == {
        "store": str(store.path),
        "to": "tensorboard",
        "destination": None,
        "added": 4,
        "already": 0,
    }
    assert second == {**first, "added": 0, "already": 4}
    assert len(files(store.path / "tensorboard")) == 4


def test_export_of_an_experiment_leaves_the_others(
    tmp_path: Path, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tracked_store(tmp_path / "s")
    out = tmp_path / "ids.txt"
    words = ["export", "--to", f"{own}:Lines", str(out), "--store", str(store.path)]
    assert answer([*words, "--experiment", "mine"], capsys)["added"] == 3
    assert DECODER.id not in out.read_text()
    assert (answer(words, capsys)["added"], DECODER.id in out.read_text()) == (1, True)
    only = ["--store", str(store.path), "--experiment", "mine"]
    for kind in ("csv", "parquet"):
        found = answer(["export", "--to", kind, *only], capsys)
        assert found["rows"] == 3
        assert Path(found["destination"]) == store.path / f"rows.{kind}"
        assert Path(found["destination"]).stat().st_size > 100


def test_export_of_what_fails_says_where(
    tmp_path: Path, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tracked_store(tmp_path / "s")
    assert main(["export", "--to", f"{own}:broken", "--store", str(store.path)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("headwise: error: mine.py line 15 at run ")
    assert "OSError: no ink" in last


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--to wandbb", "unknown destination 'wandbb'; did you mean wandb? choices: csv, mlflow, "),
        ("--to none.py", "there is no file none.py"),
        ("--to csv --experiment mien", "has no experiment 'mien'; did you mean mine?"),
        ("--to csv {tmp}/none/rows.csv", "there is no folder"),
        ("--to parquet {tmp}", "a table is a file, got"),
        ("--to tensorboard {tmp}/s/headwise.json", "cannot be made: "),
        ("--to csv a b", "unrecognized arguments: b"),
        ("x", "the following arguments are required: --to"),
    ],
)
def test_mistake_is_one_line(
    tmp_path: Path, words: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tracked_store(tmp_path / "s")
    given = words.format(tmp=tmp_path).split()
    assert error in refused(["export", "--store", str(tmp_path / "s"), *given], capsys)


# ---- --track


def test_track_of_run_gives_what_export_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = run_words(tmp_path / "s", "--seeds", "1", "--no-report")
    live, after = tmp_path / "live", tmp_path / "after"
    track = ["--track", f"tensorboard={live}"]
    assert answer([*words, *track], capsys)["made"] == 4
    assert (
        answer(
            ["export", "--to", "tensorboard", str(after), "--store", str(tmp_path / "s")], capsys
        )["added"]
        == 4
    )
    assert files(live) == files(after)
    # What was made by an earlier command that was not tracked, or was killed, is given too.
    next(live.rglob("*.headwise")).unlink()
    assert answer([*words, *track], capsys)["made"] == 0
    assert files(live) == files(after)


def test_track_of_run_leaves_what_others_made(
    tmp_path: Path, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store, out = tracked_store(tmp_path / "s"), tmp_path / "ids.txt"
    words = run_words(store.path, "--seeds", "1", "--no-report", "--track", f"{own}:Lines={out}")
    answer(words, capsys)
    ids = set(out.read_text().split())
    assert len(ids) == 4
    assert not {SMALL.id, DECODER.id} & ids


def test_track_of_run_that_fails_leaves_the_rows(
    tmp_path: Path, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = run_words(tmp_path / "s", "--seeds", "1", "--no-report", "--track", f"{own}:broken")
    assert main(words) == 0
    assert "tracking has ended, training has not" in capsys.readouterr().err
    assert len(Store(tmp_path / "s").rows()) == 4


def test_track_of_pretrain_gives_its_run(
    tmp_path: Path, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "book.txt").write_text("all work and no play makes jack a dull boy. " * 200)
    words = words_of(tmp_path / "s", str(tmp_path / "book.txt"), "--steps", "4")
    out = tmp_path / "ids.txt"
    first = answer([*words, "--track", f"{own}:Lines={out}"], capsys)
    assert out.read_text() == first["row"]["id"]
    out.unlink()
    assert answer([*words, "--track", f"{own}:Lines={out}"], capsys)["row"] == first["row"]
    assert out.read_text() == first["row"]["id"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("tensorbord", "unknown tracker 'tensorbord'; did you mean tensorboard?"),
        ("csv", "csv is a table of all rows: headwise export --to csv writes it"),
        ("tensorboard=/dev/null", "the folder /dev/null cannot be made"),
    ],
)
def test_track_that_cannot_be_is_refused_before_training(
    tmp_path: Path, name: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error in refused(run_words(tmp_path / "s", "--track", name), capsys)
    assert not (tmp_path / "s").exists()
