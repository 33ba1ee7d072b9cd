"""A bit that flips in a store is harmless or named: the row is left out, its run counts as missing,
and is made again. The whole campaign is `dev/damaged_stores.py`."""

import ast
import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from support.damage import Damaged, flipped, store_of_all_kinds, trial
from support.writers import make, parallel, row

from headwise import store
from headwise.digests import DIGEST, signed, unsigned
from headwise.errors import UsageError
from headwise.files import DamagedError
from headwise.store import MOST_NAMED, Store, read_rows


@pytest.fixture(scope="module")
def about(tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    return store_of_all_kinds(tmp_path_factory.mktemp("all"))


# ---- flipped bits


def test_flipped_bit_is_harmless_or_named_whatever_the_file(about: Damaged, tmp_path: Path) -> None:
    """Commands read the store, name the file, and make its run again with the same bits."""
    rng, counts = random.Random(0), Counter[str]()
    kinds = about.files()
    assert set(kinds) >= {
        *("headwise.json", "experiments", "run.json", "rows.jsonl", "source.json"),
        *("checkpoint.safetensors", "weights.safetensors", "tokens", "report.html"),
    }
    for _ in range(2):
        for names in kinds.values():
            name = rng.choice(names)
            bit = rng.randrange(8 * (about.path / name).stat().st_size)
            counts[trial(about, tmp_path / "copy", name, bit)] += 1
    assert counts["named"] > counts["harmless"]


def test_flipped_bit_is_seen_to_do_harm_where_digests_are_not_compared(
    about: Damaged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: a digit of a result becomes another."""
    monkeypatch.setattr(
        store, "unsigned", lambda found: {k: v for k, v in found.items() if k != DIGEST}
    )
    name = about.files()["rows.jsonl"][0]
    mark = '"train_last": '
    place = (about.path / name).read_text().index(mark) + len(mark)
    with pytest.raises(AssertionError, match="silently other"):
        trial(about, tmp_path / "copy", name, 8 * place)


@pytest.mark.parametrize("name", ["run.json", "rows.jsonl", "fig1.json"])
def test_bits_all_over_a_small_file_are_harmless_or_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, run = Store(tmp_path), make()
    with made.claim([run]):
        made.add({**row(run.id), "held_out": 0.125, "device": "é"})
    made.note("fig1", {"ids": [run.id], "command": "c", "preset": "quick", "settings": {}})
    (path,) = tmp_path.rglob(name)
    held, data = (made.rows(), made.experiments()), path.read_bytes()
    for bit in range(0, 8 * len(data), 23):  # no divisor of 8: each bit of a byte has its turn
        flipped(path, bit)
        again = Store(tmp_path)
        found = (again.rows(), again.experiments())
        assert found == held or path in again.damaged, bit
        assert found[0] in ([], held[0]), bit
        path.write_bytes(data)
    assert Store(tmp_path).damaged == {}
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 0.8 * 8 / 23 * len(data)
    assert all(line.startswith(f"headwise: {path} is damaged and left out: ") for line in lines)


# ---- what is left out


def test_row_with_a_digest_may_be_written_anew(tmp_path: Path) -> None:
    """Other tools may sort the keys of a line or leave out its spaces; a digit they may not
    change."""
    made = {"id": "a", "curve": [1e-05, 2.0, None], "text": "é\u2028", "more": {"2": 1, "10": 2}}
    line = json.dumps(signed(made), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert unsigned(json.loads(line)) == made
    with pytest.raises(DamagedError, match="does not have its digest"):
        unsigned(json.loads(line.replace("2.0", "2.5")))
    assert unsigned(signed({2: (1, 2), 10: "x"})) == {"2": [1, 2], "10": "x"}
    assert unsigned({"sha512": 1}) == {"sha512": 1}


def test_row_of_before_is_compared_with_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no digest, but most of its columns are its run's specification."""
    made, run = Store(tmp_path), make()
    made.open()
    path = made.runs_path / run.id / "rows.jsonl"
    path.parent.mkdir(parents=True)
    (path.parent / "run.json").write_text(json.dumps(run.spec()))
    measured = {"seconds": 1.0, "device": "cpu", "zero_error": 1.0, "train_best": None}
    curves = {"curve": [1.0], "held_out_curve": [[1, 0.5]]}
    old = {**row(run.id), **run.columns(), **measured, **curves}
    path.write_text(json.dumps(old) + "\n")
    assert made.rows() == [json.loads(json.dumps(old))]
    changes = {"num_heads": 5, "lr": 0.02, "out_bias": False, "task_points": 7, "curve": 5}
    for key, value in changes.items():
        path.write_text(json.dumps({**old, key: value}) + "\n")
        assert made.rows() == []
        assert f"line 1: {key} " in capsys.readouterr().err
        made = Store(tmp_path)
    path.write_text(json.dumps(old) + "\n")
    (path.parent / "run.json").write_text(json.dumps({**run.spec(), "seed": 1}))
    assert made.rows() == []
    assert "it is not what its run's id says" in capsys.readouterr().err


def test_damaged_row_leaves_the_one_before_it_and_is_forgotten_behind_a_good_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Store(tmp_path)
    path = made.runs_path / "a" / "rows.jsonl"
    for k in (1, 2):
        made.add(row("a", k=k))
    path.write_text(path.read_text().replace('"k": 2', '"k": 3'))
    assert made.row("a") == row("a", k=1)
    assert made.row("a") == row("a", k=1)  # said once
    assert capsys.readouterr().err == (
        f"headwise: {path} is damaged and left out: line 2: its content does not have its digest\n"
    )
    made.add(row("a", k=4))
    assert Store(tmp_path).row("a") == row("a", k=4)
    assert capsys.readouterr().err == ""


def test_damaged_files_are_named_up_to_a_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Store(tmp_path)
    for number in range(MOST_NAMED + 5):
        made.add(row(f"run{number}"))
        path = made.runs_path / f"run{number}" / "rows.jsonl"
        path.write_text(path.read_text().replace("0.5", "0.6"))
    assert made.rows() == []
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == MOST_NAMED + 1
    assert lines[-1] == f"headwise: more files of {tmp_path} are damaged and left out"
    assert len(made.damaged) == MOST_NAMED + 5


@pytest.mark.parametrize("name", ["../a", "..", ".", "", "a/../a", "x" * 300, "a\0b"])
def test_id_that_leads_out_of_the_store_is_no_run(name: str, tmp_path: Path) -> None:
    made = Store(tmp_path / "store")
    made.add(row("a"))
    shutil.copytree(made.runs_path / "a", tmp_path / "store" / "a")
    assert made.row(name) is None


@pytest.mark.parametrize("name", ["run.json", "rows.jsonl"])
def test_pipe_or_a_file_without_end_in_a_store_is_not_read(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, run = Store(tmp_path), make()
    with made.claim([run]):
        made.add(row(run.id))
    path = made.runs_path / run.id / name
    path.unlink()
    os.mkfifo(path)
    made.row(run.id)
    path.unlink()
    path.symlink_to("/dev/zero")
    Store(tmp_path).row(run.id)
    assert capsys.readouterr().err.count("it is not a regular file") == 2


@pytest.mark.parametrize("name", ["lock", "rows.jsonl"])
@pytest.mark.parametrize("what", ["link", "link to itself", "folder", "pipe"])
def test_run_is_not_begun_where_its_row_cannot_be_written(
    name: str, what: str, tmp_path: Path
) -> None:
    """A link in somebody's store leads a writer anywhere."""
    made, run, outside = Store(tmp_path / "store"), make(), tmp_path / "outside"
    path = made.runs_path / run.id / name
    path.parent.mkdir(parents=True)
    match what:
        case "link":
            path.symlink_to(outside)
        case "link to itself":
            path.symlink_to(name)
        case "folder":
            path.mkdir()
        case _:
            os.mkfifo(path)
    made.open()
    with pytest.raises(UsageError, match=f"{name} cannot be written, it is"), made.claim([run]):
        pass
    assert not outside.exists()


def test_store_is_no_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop", tmp_path / "loop" / "inside"):
        with pytest.raises(UsageError, match="a link that leads nowhere"):
            Store(path)


def test_rows_of_a_file_are_checked_by_their_digests_too(tmp_path: Path) -> None:
    made = {**row("a"), "status": "done"}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(signed(made)) + "\n" + json.dumps(made) + "\n")
    assert read_rows(path) == [made, made]
    path.write_text(path.read_text().replace("0.5", "0.6"))
    with pytest.raises(UsageError, match="line 1, that cannot be: its content does not have its"):
        read_rows(path)


# ---- what killed writers leave


NOTES = """
store = Store(sys.argv[1])
rng = random.Random(4)
def work():
    mine = Store(sys.argv[1])
    while True:
        mine.note(f"fig{rng.randrange(3)}", {"ids": ["a" * 16] * 50_000})
others = [start(work) for _ in range(2)]  # whose files nobody takes away
left = 0
for again in range(40):
    pid = start(work)
    time.sleep(rng.uniform(0, 0.02))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
for pid in others:
    assert os.waitpid(pid, os.WNOHANG) == (0, 0), "a writer lost its file"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
folder = Path(sys.argv[1]) / "experiments"
(folder / ".fig9.json.abcd_123").write_text("half")  # by another version
store.note("fig1", {"ids": []})
print(sorted(p.name for p in folder.iterdir()))
assert store.experiments()["fig1"] == {"ids": []}
"""


def test_half_written_note_goes_with_the_next_one(tmp_path: Path) -> None:
    (line,) = parallel(NOTES, tmp_path / "store")
    assert set(ast.literal_eval(line)) <= {"fig0.json", "fig1.json", "fig2.json"}
