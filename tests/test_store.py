"""Rows on disk: many writers, real kills, torn lines, claims, questions."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.writers import make, parallel, row

from headwise.digests import unsigned
from headwise.store import Store, append_line, read_lines
from headwise.training.run import Run

# ---- many writers


EIGHT = """
store = Store(sys.argv[1])
def work(me):
    mine = Store(sys.argv[1])
    for i in range(25):
        mine.add({"id": f"own{me}x{i % 5}", "who": me, "at": i, "curve": [me + i / 7] * 300})
        mine.add({"id": f"all{i % 3}", "who": me, "at": i, "curve": [me + i / 7] * 3000})
pids = [start(work, k) for k in range(8)]
seen = 0
while pids:
    rows = store.rows()  # a reader meanwhile
    assert all(len(set(r["curve"])) == 1 for r in rows)
    assert len(rows) >= seen
    seen = len(rows)
    pids = [p for p in pids if os.waitpid(p, os.WNOHANG) == (0, 0)]
print(seen)
"""


def test_rows_of_eight_processes_at_once_are_neither_lost_nor_torn(tmp_path: Path) -> None:
    parallel(EIGHT, tmp_path / "store")
    store = Store(tmp_path / "store")
    lines = {
        p.parent.name: [unsigned(json.loads(line)) for line in p.read_text().splitlines()]
        for p in store.runs_path.glob("*/rows.jsonl")
    }
    assert {name: len(rows) for name, rows in lines.items() if name.startswith("own")} == {
        f"own{k}x{i}": 5 for k in range(8) for i in range(5)
    }
    shared = [
        (r["who"], r["at"]) for name, rows in lines.items() if name.startswith("all") for r in rows
    ]
    assert sorted(shared) == [(k, i) for k in range(8) for i in range(25)]
    for name, rows in lines.items():
        assert all(
            r["id"] == name and r["curve"] == [r["who"] + r["at"] / 7] * len(r["curve"])
            for r in rows
        )
        assert store.row(name) == rows[-1]
    assert len(store.rows()) == 43


KILLS = """
rng = random.Random(5)
log = Path(sys.argv[2])
def where(kill):
    return f"{sys.argv[1]}{kill // 5}"
def work(kill):
    mine, at = Store(where(kill)), 0
    while at < 4:  # rows of megabytes: a kill can end a write in its middle
        for name, size in (("big", 4_000_000), ("small", 3), (f"kill{kill % 4}", 300_000)):
            text = chr(97 + kill % 26) * size
            mine.add({"id": name, "kill": kill, "at": at, "text": text, "end": True})
            with log.open("a") as f:
                f.write(json.dumps([name, kill, at]) + "\\n")
        at += 1
    time.sleep(60)
torn, kill, said = 0, -1, []
# A busy machine gets more kills, and later ones.
while kill < 39 or (len(said) <= 20 and kill < 400):
    kill += 1
    pid = start(work, kill)
    time.sleep(rng.uniform(0.0, 0.06 * (1 + kill // 40)))
    os.kill(pid, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    store = Store(where(kill))
    rows = {r["id"]: r for r in store.rows()}
    assert all(r["end"] for r in rows.values())
    said = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    for name, k, at in said:  # what was said to be there is there, or newer
        if where(k) == where(kill):
            assert (rows[name]["kill"], rows[name]["at"]) >= (k, at), (name, k, at)
    files = [p for p in store.runs_path.glob("*/rows.jsonl") if p.stat().st_size]
    torn += sum(not p.read_bytes().endswith(b"\\n") for p in files)
print(torn)
"""


def test_writer_killed_at_random_moments_loses_no_complete_row(tmp_path: Path) -> None:
    """Every row that a writer finished is found by the reader, whatever later writers left
    half-written."""
    log = tmp_path / "log"
    parallel(KILLS, tmp_path / "store", log)
    found: set[tuple[str, int, int]] = set()
    for path in tmp_path.glob("store*/runs/*/rows.jsonl"):
        for line in read_lines(path):
            try:
                r = json.loads(line)
            except ValueError:
                continue
            assert r["text"] in [
                chr(97 + r["kill"] % 26) * size for size in (4_000_000, 3, 300_000)
            ]
            found.add((r["id"], r["kill"], r["at"]))
    said = {tuple(json.loads(line)) for line in log.read_text().splitlines()}
    assert len(said) > 20
    assert said <= found


# ---- torn lines


def test_torn_last_line_is_ignored_and_closed_off_by_the_next_row(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(row("a", 1, k=1))
    path = store.runs_path / "a" / "rows.jsonl"
    whole = json.dumps(row("a", 2, k=2))
    for cut in range(1, len(whole)):
        before = path.read_bytes()
        path.write_bytes(before + whole[:cut].encode())
        assert store.row("a") == row("a", 1, k=1), cut
        path.write_bytes(before)
    path.write_bytes(before + whole[: len(whole) // 2].encode())
    store.add(row("a", 3, k=3))
    assert store.row("a") == row("a", 3, k=3)
    assert [
        json.loads(line)["k"] for line in path.read_text().splitlines() if line.endswith("}")
    ] == [1, 3]


def test_row_whose_line_end_is_missing_counts_and_is_not_joined(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(row("a", k=1))
    path = store.runs_path / "a" / "rows.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    assert store.row("a") == row("a", k=1)
    store.add(row("a", k=2))
    assert [json.loads(line)["k"] for line in path.read_text().splitlines()] == [1, 2]


def test_noise_in_a_file_spoils_itself_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(row("a", k=1))
    path = store.runs_path / "a" / "rows.jsonl"
    for noise in (
        b"\x00" * 512,
        b"\xff\xfe\xfa",
        b"[1, 2]\n",
        b"null\n",
        b'"a"\n',
        json.dumps(row("b")).encode() + b"\n",
        b"\n\n",
    ):
        with path.open("ab") as f:
            f.write(noise)
        assert store.row("a") == row("a", k=1), noise
    store.add(row("a", k=2))
    assert store.row("a") == row("a", k=2)


def test_files_that_are_not_ours_do_no_harm(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(row("a"))
    (store.runs_path / ".DS_Store").write_bytes(b"\x00")
    (store.runs_path / "notes.txt").write_text("hello")
    (store.runs_path / "empty").mkdir()
    (store.runs_path / "begun").mkdir()
    (store.runs_path / "begun" / "rows.jsonl").touch()
    assert store.rows() == [row("a")]
    assert store.query("select id from rows").fetchall() == [("a",)]


def test_value_that_is_not_a_number_is_refused_before_it_is_written(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        store.add(row("a", worst=float("nan")))
    assert store.row("a") is None


def test_lines_are_split_at_line_ends_only(tmp_path: Path) -> None:
    text = "\u2028\u2029\x0b\x0c\x1c\x85"
    append_line(tmp_path / "x" / "lines", json.dumps({"text": text}, ensure_ascii=False))
    assert [json.loads(line)["text"] for line in read_lines(tmp_path / "x" / "lines")] == [text]
    assert read_lines(tmp_path / "none") == []


# ---- claims


CLAIM = """
from headwise.training.run import Run
store = Store(sys.argv[1])
runs = [Run.of(spec) for spec in json.loads(sys.argv[2])]
def work(me):
    for again in range(12):
        with store.claim(runs) as mine:
            for run in mine:
                flag = Path(sys.argv[1]) / f"busy {run.id}"
                # fails if somebody else holds the run
                os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
                time.sleep(0.001)
                flag.unlink()
                os.write(1, f"{run.id}\\n".encode())
codes = [os.waitpid(pid, 0)[1] for pid in [start(work, k) for k in range(8)]]
assert codes == [0] * 8, codes
"""


def specs(count: int) -> str:
    return json.dumps([make(seed).spec() for seed in range(count)])


def test_run_is_claimed_by_one_process_at_a_time(tmp_path: Path) -> None:
    held = parallel(CLAIM, tmp_path / "store", specs(3))
    assert {make(seed).id for seed in range(3)} == set(held)


HOLD = """
from headwise.training.run import Run
store = Store(sys.argv[1])
with store.claim([Run.of(spec) for spec in json.loads(sys.argv[2])]) as mine:
    print(len(mine), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds runs 0 and 1 of a store."""
    code = (
        "import json, sys, time\nfrom headwise.store import append_line, read_lines, Store\n" + HOLD
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "store", specs(2)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "2\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_claim_is_freed_by_kill_9(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    store, runs = Store(tmp_path / "store"), [make(seed) for seed in range(3)]
    with store.claim(runs) as mine:
        assert mine == runs[2:]
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with store.claim(runs) as mine:
        assert mine == runs


def test_finished_run_is_not_claimed_and_an_unfinished_one_says_what_it_is(
    tmp_path: Path,
) -> None:
    store, runs = Store(tmp_path), [make(seed) for seed in range(3)]
    store.add(row(runs[1].id))
    with store.claim(runs) as mine:
        assert mine == [runs[0], runs[2]]
        with store.claim(runs) as twice:
            assert twice == []
    spec = json.loads((store.runs_path / runs[2].id / "run.json").read_text())
    assert Run.of(spec) == runs[2]


def test_claim_sweeps_up_what_a_killed_writer_left(tmp_path: Path) -> None:
    store, run = Store(tmp_path), make()
    folder = store.runs_path / run.id
    with store.claim([run]):
        (folder / ".checkpoint.safetensors.x8d_k2").write_bytes(b"half")
        (folder / "checkpoint.safetensors").write_bytes(b"whole")
    with store.claim([run]):
        assert sorted(p.name for p in folder.iterdir()) == [
            "checkpoint.safetensors",
            "lock",
            "run.json",
        ]


# ---- asking


def test_missing_names_each_unfinished_run_once(tmp_path: Path) -> None:
    store, runs = Store(tmp_path), [make(seed) for seed in (0, 1, 2, 1, 0)]
    store.add(row(runs[0].id))
    assert store.missing(runs) == [runs[1], runs[2]]


def test_rows_by_id_by_commit_and_all(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name, commit in (("c", "new"), ("a", "old"), ("b", "new")):
        store.add({**row(name), "commit": commit})
    assert [r["id"] for r in store.rows()] == ["a", "b", "c"]
    assert [r["id"] for r in store.rows(["c", "x", "a"])] == ["c", "a"]
    assert [r["id"] for r in store.rows(not_commit="new")] == ["a"]
    assert [r["id"] for r in store.rows(["b", "c"], not_commit="old")] == ["b", "c"]


def test_experiments_come_back_and_the_last_word_counts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.note("fig2", {"ids": ["x"]})
    store.note("fig1", {"ids": []})
    store.note("fig1", {"ids": ["a", "b"], "command": "headwise run fig1 --set 'x=<é>'"})
    assert store.experiments() == {
        "fig1": {"ids": ["a", "b"], "command": "headwise run fig1 --set 'x=<é>'"},
        "fig2": {"ids": ["x"]},
    }


@pytest.fixture
def asked(tmp_path: Path) -> Store:
    """Rows with a torn line, an empty file, and a run that was made twice within a second."""
    store = Store(tmp_path / "it's [a] *store?")
    for name, error in (("a", 0.25), ("b", None), ("7", 0.5)):
        store.add(
            row(
                name,
                5,
                held_out=error,
                status="done" if error else "diverged",
                curve=[1.0, None, 2],
                held_out_curve=[[1, 0.5]],
            )
        )
    store.add(row("a", 5, held_out=0.75, status="done", curve=[], held_out_curve=[], new=True))
    with (store.runs_path / "7" / "rows.jsonl").open("a") as f:
        f.write('{"id": "7", "finished": "2026-01-01T00:00:59Z", "held_out": 9')
    (store.runs_path / "torn").mkdir()
    (store.runs_path / "torn" / "rows.jsonl").write_text('{"id": "torn", "hel')
    (store.runs_path / "empty").mkdir()
    (store.runs_path / "empty" / "rows.jsonl").touch()
    return store


def test_sql_sees_the_same_rows_the_latest_of_each_run(asked: Store) -> None:
    answer = asked.query("select id, held_out, status from rows order by id").fetchall()
    assert answer == [("7", 0.5, "done"), ("a", 0.75, "done"), ("b", None, "diverged")]
    assert answer == [(r["id"], r["held_out"], r["status"]) for r in asked.rows()]
    assert asked.query(
        "select count(*), avg(held_out) from rows where status = 'done'"
    ).fetchall() == [(2, 0.625)]
    assert asked.query("select id, finished, new from rows where new").fetchall()[0][0] == "a"


def test_data_frame_of_every_row(asked: Store) -> None:
    frame = asked.frame().sort_values("id")
    assert list(frame["id"]) == ["7", "a", "b"]
    assert list(frame["held_out"].fillna(-1)) == [0.5, 0.75, -1]
    assert list(frame.columns[:2]) == ["id", "commit"]
    assert frame["finished"].dt.year.eq(2026).all()
    assert len(asked.frame("select * from rows where held_out > 0.6")) == 1


def test_sql_on_an_empty_store(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.query().fetchall() == []
    store.open()
    assert store.query("select count(*) from rows").fetchall() == [(0,)]
    assert list(store.frame().columns) == ["id"]


def test_stores_can_be_merged_by_copying(tmp_path: Path) -> None:
    a, b = Store(tmp_path / "a"), Store(tmp_path / "b")
    a.add(row("x"))
    b.add(row("y"))
    shutil.copytree(a.path, b.path, dirs_exist_ok=True)
    assert [r["id"] for r in Store(b.path).rows()] == ["x", "y"]
