"""Whose folder it is: stores of other formats and folders of something else are left alone."""

import json
from pathlib import Path

import pytest
from support.writers import make, parallel, row

from headwise.errors import UsageError
from headwise.store import FORMAT, Store


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b""
        for p in folder.rglob("*")
    }


@pytest.mark.parametrize(
    "mark", ['{"format": 2}', '{"format": 99, "more": 1}', '{"format": "1"}', '{"format": null}']
)
def test_store_of_another_format_is_refused_and_left_alone(tmp_path: Path, mark: str) -> None:
    (tmp_path / "headwise.json").write_text(mark)
    before = snapshot(tmp_path)
    with pytest.raises(
        UsageError, match=rf"^store {tmp_path} has format .*, this headwise reads {FORMAT}: "
    ):
        Store(tmp_path)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("mark", ["", "{", "[]", "{}", "7", "\x00"])
def test_store_whose_mark_cannot_be_read_is_refused(tmp_path: Path, mark: str) -> None:
    (tmp_path / "headwise.json").write_text(mark)
    with pytest.raises(
        UsageError, match=r"is not a headwise store: its headwise.json cannot be read$"
    ):
        Store(tmp_path)


@pytest.mark.parametrize("name", ["thesis.tex", ".bashrc", "runs", ".headwise"])
def test_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(
        UsageError,
        match=(
            r"is not a headwise store: it has files but no headwise.json; name an empty or new "
            r"folder$"
        ),
    ):
        Store(tmp_path)
    assert snapshot(tmp_path) == {name: b"precious"}


def test_file_is_refused_also_as_a_parent(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for path in (
        tmp_path / "file",
        tmp_path / "file" / "store",
        tmp_path / "file" / "deep" / "store",
    ):
        with pytest.raises(UsageError, match=r"^a store is a folder, got .* is a file$"):
            Store(path)


def test_reading_makes_no_folder_and_writing_marks_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "store")
    assert store.rows() == []
    assert store.experiments() == {}
    assert store.missing([make()]) == [make()]
    assert store.frame().empty
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        UsageError, match=r"^there is no store at .*; make one with: headwise run fig1 --store "
    ):
        Store(tmp_path / "deep" / "store", create=False)
    assert list(tmp_path.iterdir()) == []
    store.open()
    assert json.loads((store.path / "headwise.json").read_text()) == {"format": FORMAT}
    assert Store(store.path, create=False).rows() == []


def test_empty_folder_is_a_store_to_be(tmp_path: Path) -> None:
    assert Store(tmp_path).rows() == []
    with pytest.raises(UsageError, match="there is no store"):
        Store(tmp_path, create=False)


@pytest.mark.parametrize("write", ["add", "claim", "note"])
def test_first_write_marks_the_store(tmp_path: Path, write: str) -> None:
    store = Store(tmp_path / "new")
    if write == "add":
        store.add(row("a"))
    elif write == "note":
        store.note("fig1", {})
    else:
        with store.claim([make()]):
            pass
    Store(tmp_path / "new", create=False)


MARKING = """
store = Path(sys.argv[1])
rng = random.Random(2)
def work():
    Store(store).open()
def rush():
    s = Store(store)
    s.add({"id": "a"})
for again in range(60):
    pid = start(work)
    time.sleep(rng.uniform(0, 0.004))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    Store(store).open()  # what the killed one left is a store to be
    if again % 4 == 3:
        assert [r["id"] for r in Store(store).rows()] in ([], ["a"])
        os.system(f"rm -rf '{store}'")
        pids = [start(rush) for _ in range(6)]  # all of them find no store and make it
        assert [os.waitpid(p, 0)[1] for p in pids] == [0] * 6
        os.system(f"rm -rf '{store}'")
    else:
        (store / "headwise.json").unlink()
"""


def test_store_creation_survives_kills_and_company(tmp_path: Path) -> None:
    parallel(MARKING, tmp_path / "store")
