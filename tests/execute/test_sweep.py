"""Sweeps as people run them: killed at random moments, side by side, repeated. Every process and
every kill is real."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import started

from headwise.digests import unsigned
from headwise.execute.cut import MOST_RUNS, chunks_of, cost
from headwise.execute.sweep import sweep
from headwise.experiments.rank_paper import fig1
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.experiments.settings import settings_of
from headwise.rows import MEASURED
from headwise.store import Store
from headwise.tasks import Farthest
from headwise.training.run import Recipe, Run, ensemble_key

# 16 runs in four ensembles, several seconds of work
CHANGES = [
    "dim=8",
    "points=4",
    "ffn_dim=16",
    "ranks=8,2",
    "steps=360",
    "epoch=2",
    "batch=16",
    "held_out=128",
    "evals=3",
]
RUNS = fig1.runs(settings_of(fig1.EXPERIMENT, "quick", CHANGES, seeds=2))
HALF = ["depths=1", "lr=0.05"]  # the eight of them with one layer
SMALL = ["depths=1", "widths=1,2", "lr=0.01", "steps=20"]  # eight runs in two ensembles, a moment


def command(
    store: Path, *words: str, workers: int = 1, changes: list[str] | None = None
) -> list[str]:
    sets = [word for change in [*CHANGES, *(changes or [])] for word in ("--set", change)]
    head = [
        sys.executable,
        "-m",
        "headwise",
        "run",
        "fig1",
        "--device",
        "cpu",
        "--no-report",
        "--json",
        "--seeds",
        "2",
    ]
    return [
        *head,
        "--store",
        str(store),
        "--workers",
        str(workers),
        "--checkpoint-every",
        "0",
        *sets,
        *words,
    ]


def half() -> list[Run]:
    runs = fig1.runs(settings_of(fig1.EXPERIMENT, "quick", [*CHANGES, *HALF], seeds=2))
    assert {run.id for run in runs} < {run.id for run in RUNS}
    return runs


def finish(words: list[str]) -> dict[str, Any]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Poll until something is so; how long it takes does not count."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)
    return found


def alive(group: int) -> set[int]:
    """The processes of a group that still run (a zombie does not)."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                found.add(int(path.parent.name))
    return found


def workers_of(parent: int) -> set[int]:
    """The pool's processes; multiprocessing's own helper does not count."""
    found = set()
    for pid in alive(parent) - {parent}:
        with contextlib.suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def deaf(pid: int) -> bool:
    """Whether a process has blocked or ignores Ctrl-C."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return any(int(status[name], 16) >> (signal.SIGINT - 1) & 1 for name in ("SigBlk", "SigIgn"))


def touched(store: Path, since: int) -> bool:
    """Whether a checkpoint or a row was written after a moment."""
    with contextlib.suppress(OSError):
        return any(
            p.stat().st_mtime_ns > since
            for p in store.glob("runs/*/*")
            if p.name in ("checkpoint.safetensors", "rows.jsonl")
        )
    return True  # it vanished while we looked


def bits(row: dict[str, Any]) -> str:
    return json.dumps({k: v for k, v in row.items() if k not in MEASURED}, sort_keys=True)


def assert_whole(store: Path, runs: list[Run], reference: dict[str, str]) -> None:
    """Every row there, once, bit for bit the undisturbed one; nothing half-made is left."""
    assert {p.name for p in (store / "runs").iterdir()} == {run.id for run in runs}
    for run in runs:
        folder = store / "runs" / run.id
        (line,) = (folder / "rows.jsonl").read_text().splitlines()
        assert bits(unsigned(json.loads(line))) == reference[run.id]
        assert sorted(p.name for p in folder.iterdir()) == ["lock", "rows.jsonl", "run.json"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The rows of a sweep that nobody touched, made in this process without checkpoints."""
    rows = sweep(RUNS, Store(tmp_path_factory.mktemp("undisturbed")), device="cpu", workers=1)
    return {row["id"]: bits(row) for row in rows}


# ---- kills


KILLS = 8  # the fifth while it starts, the seventh with two processes


def test_kills_change_nothing(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """kill -9 of the whole group at random moments: while it starts, and within its work, with one
    process and with two.

    A sweep that finishes before its turn comes is checked and followed by a new one.
    """
    rng, kills, stores = random.Random(20), 0, [tmp_path / "store 0"]
    while kills < KILLS:
        early, workers = kills % 5 == 4, 2 if kills % 7 == 6 else 1
        delay = rng.uniform(0.0, 1.5) if early else rng.uniform(0.0, 0.4)
        with started(command(stores[-1], workers=workers)) as process:
            begun = time.time_ns()
            if not early:
                wait_for(
                    lambda process=process, begun=begun: (
                        process.poll() is not None or touched(stores[-1], begun)
                    )
                )
            time.sleep(delay)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                assert process.wait() == -signal.SIGKILL
                kills += 1
                wait_for(lambda process=process: not alive(process.pid))
                Store(stores[-1]).rows()  # can always be read
            else:
                assert process.returncode == 0, process.communicate()
                stores.append(tmp_path / f"store {len(stores)}")
    for store in stores:
        assert finish(command(store))["runs"] == len(RUNS)
        assert_whole(store, RUNS, undisturbed)
    resumed = sum(row["resumed"] for store in stores for row in Store(store).rows())
    assert resumed > 0, "no kill fell between a checkpoint and the end"


@pytest.mark.parametrize("moment", ["while its workers start", "while its workers work"])
def test_workers_die_with_a_killed_parent(
    moment: str, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    store = tmp_path / "store"
    with started(command(store, workers=2, changes=HALF)) as process:
        begun = time.time_ns()
        wait_for(lambda: len(workers_of(process.pid)) == 2)
        if moment == "while its workers work":
            wait_for(lambda: touched(store, begun))
        assert all(deaf(pid) for pid in workers_of(process.pid)), (
            "a worker would print a traceback at Ctrl-C"
        )
        wait_for(lambda: not deaf(process.pid))
        os.kill(process.pid, signal.SIGKILL)  # the parent alone
        process.wait()
        wait_for(lambda: not alive(process.pid))
    assert set(Store(store).experiments()["fig1"]["ids"]) == {run.id for run in half()}, (
        "its page knows what was asked for"
    )
    sweep(half(), Store(store), device="cpu", workers=1)
    assert_whole(store, half(), undisturbed)


def test_worker_that_dies_gives_one_line_and_the_same_command_resumes(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    store = tmp_path / "store"
    with started(command(store, workers=2, changes=HALF)) as process:
        begun = time.time_ns()
        wait_for(lambda: len(workers_of(process.pid)) == 2 and touched(store, begun))
        os.kill(min(workers_of(process.pid)), signal.SIGKILL)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1
        said = [line for line in err.splitlines() if not line.startswith("fig1")]
        assert said == [
            "headwise: error: a worker process died, perhaps out of memory; run the same command "
            "to resume (HEADWISE_TRACEBACK=1 shows where)"
        ]
        assert out == ""
        wait_for(lambda: not alive(process.pid))
    sweep(half(), Store(store), device="cpu", workers=1)
    assert_whole(store, half(), undisturbed)


# ---- again, and side by side


def test_finished_sweep_repeated_trains_nothing(tmp_path: Path) -> None:
    runs = fig1.runs(settings_of(fig1.EXPERIMENT, "quick", [*CHANGES, *SMALL], seeds=2))
    first = sweep(runs, Store(tmp_path), device="cpu", workers=1)
    stamps = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file()}
    assert sweep(runs, Store(tmp_path), device="cpu", workers=1) == first
    assert sweep(runs[::-1] + runs, Store(tmp_path), device="cpu", workers=2) == first[::-1] + first
    assert {
        p: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file()
    } == stamps


def test_checkpoint_that_outlived_its_run_is_removed(tmp_path: Path) -> None:
    """As after a kill between the row and the end of its checkpoint; one of an unfinished run is
    not touched."""
    runs = fig1.runs(settings_of(fig1.EXPERIMENT, "quick", [*CHANGES, *SMALL], seeds=1))
    sweep(runs[:2], Store(tmp_path), device="cpu", workers=1)
    for run in runs[1:3]:
        folder = tmp_path / "runs" / run.id
        folder.mkdir(exist_ok=True)
        (folder / "checkpoint.safetensors").write_bytes(b"left")
    sweep(runs[:2], Store(tmp_path), device="cpu", workers=1)
    assert [
        (tmp_path / "runs" / run.id / "checkpoint.safetensors").exists() for run in runs[1:3]
    ] == [False, True]


def test_wider_sweep_makes_only_what_is_missing(tmp_path: Path) -> None:
    some, more = (
        fig1.runs(settings_of(fig1.EXPERIMENT, "quick", [*CHANGES, *SMALL], seeds=n))
        for n in (1, 2)
    )
    before = {row["id"]: row for row in sweep(some, Store(tmp_path), device="cpu", workers=1)}
    after = {row["id"]: row for row in sweep(more, Store(tmp_path), device="cpu", workers=1)}
    assert len(before) == 4
    assert len(after) == 8
    assert {name: after[name] for name in before} == before


def test_sweeps_on_one_store_make_each_run_once(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    store = tmp_path / "store"
    with started(command(store, changes=HALF)) as one, started(command(store, changes=HALF)) as two:
        outputs = [process.communicate(timeout=120) for process in (one, two)]
        assert [one.returncode, two.returncode] == [0, 0], outputs
    answers = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert answers[0]["points"] == answers[1]["points"]
    assert_whole(store, half(), undisturbed)


def test_run_held_by_a_process_that_died_is_made(tmp_path: Path) -> None:
    store = tmp_path / "store"
    runs = fig1.runs(settings_of(fig1.EXPERIMENT, "quick", [*CHANGES, *SMALL], seeds=2))
    code = """
import json, sys, time
from headwise.training.run import Run
from headwise.store import Store
with Store(sys.argv[1]).claim([Run.of(json.loads(sys.argv[2]))]):
    print("held", flush=True)
    time.sleep(600)
"""
    with started([sys.executable, "-c", code, str(store), json.dumps(runs[3].spec())]) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with started(command(store, changes=SMALL)) as process:
            wait_for(lambda: len(Store(store).rows()) == 7)
            assert process.poll() is None
            holder.kill()
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["runs"] == 8
    assert Store(store).missing(runs) == []


def test_pool_gives_the_rows_of_one_process(tmp_path: Path) -> None:
    runs = fig1.runs(settings_of(fig1.EXPERIMENT, "quick", [*CHANGES, *SMALL], seeds=2))
    alone = sweep(runs, Store(tmp_path / "one"), device="cpu", workers=1)
    answer = finish(command(tmp_path / "two", "--keep-weights", workers=2, changes=SMALL))
    assert answer["made"] == 8
    assert list(map(bits, Store(tmp_path / "two").rows([run.id for run in runs]))) == list(
        map(bits, alone)
    )
    assert all(
        (tmp_path / "two" / "runs" / run.id / "weights.safetensors").exists() for run in runs
    )


def test_sweep_takes_more_runs_than_open_files_are_allowed(tmp_path: Path) -> None:
    """One ensemble of 400 runs where a process may open 200 files."""
    changes = [
        "dim=4",
        "ranks=4,2",
        "depths=1",
        "widths=1",
        "lr=0.01",
        "steps=1",
        "epoch=1",
        "evals=1",
    ]
    words = command(tmp_path / "store", "--seeds", "200", changes=changes)
    answer = finish(["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *words])
    assert answer["made"] == 400
    assert len(Store(tmp_path / "store").rows()) == 400


# ---- dealing work out


KINDS = [(depth, rank, steps) for depth in (1, 3) for rank in (1, 4) for steps in (100, 700)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(0, 150)), min_size=1, max_size=60, unique=True
    ),
    st.sampled_from((0, 300)),  # sometimes one ensemble that is larger than a chunk may be
    st.integers(1, 9),
)
def test_chunks_partition_the_ensembles(
    picked: list[tuple[tuple[int, int, int], int]], wide: int, workers: int
) -> None:
    picked = picked + [((1, 4, 100), 1000 + seed) for seed in range(wide)]
    runs = [
        Run(paper_shape(dim=4, depth=d, rank=r, ffn_dim=5), Farthest(4, 3), Recipe(steps=s), seed)
        for (d, r, s), seed in picked
    ]
    chunks = chunks_of(runs, workers)
    assert sorted(run.id for chunk in chunks for run in chunk) == sorted(run.id for run in runs)
    assert all(0 < len(chunk) <= MOST_RUNS for chunk in chunks)
    assert all(len({ensemble_key(run) for run in chunk}) == 1 for chunk in chunks)
    costs = [sum(map(cost, chunk)) for chunk in chunks]
    assert costs == sorted(costs, reverse=True)
    if workers > 1:  # without its last run no chunk is more than half of a worker's share
        share = sum(map(cost, runs)) / workers / 2
        assert all(sum(map(cost, chunk[:-1])) <= share * 1.02 for chunk in chunks)


def test_chunks_of_no_runs_are_none() -> None:
    assert chunks_of([], 2) == []
    assert MOST_RUNS < 200


def test_empty_sweep_writes_nothing(tmp_path: Path) -> None:
    assert sweep([], Store(tmp_path / "store"), device="cpu") == []
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("where", ["in headwise", "in the script"])
def test_sweep_from_a_script_without_a_main_guard(tmp_path: Path, where: str) -> None:
    # A worker that imported the script would start a sweep of its own, and fail.
    own = """
from dataclasses import dataclass
@dataclass(frozen=True)
class Farthest(headwise.Farthest):
    name = "own"
"""
    script = f"""
import headwise
from headwise import Farthest
{own if where == "in the script" else ""}
from headwise.execute.sweep import sweep
print("once")
recipe = headwise.Recipe(steps=2, batch=4, epoch=1, held_out=16, evals=1)
shapes = [headwise.Shape(dim=5, depth=1, num_heads=h, head_dim=3, ffn_dim=7) for h in (1, 2)]
runs = [headwise.Run(shape, Farthest(dim=5, points=3), recipe) for shape in shapes]
rows = sweep(runs, headwise.Store("store"), device="cpu", workers=2)
print([row["status"] for row in rows])
"""
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.splitlines() == ["once", "['done', 'done']"], done.stderr[-2000:]
