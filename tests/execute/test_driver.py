"""The driver's loop with workers that are processes of this machine, each of them real: killed,
failing, of another version, twice at once, on a full disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support.clusters import (
    assert_complete,
    command,
    driver,
    environment,
    living,
    runs_of,
    undisturbed,
    wait_for,
)

import headwise
from headwise.cli import main
from headwise.execute.base import Handle, Job, Status
from headwise.execute.driver import Driver, GroupsFailedError
from headwise.execute.engine import Engine, Place
from headwise.execute.groups import Group, Options, group_of
from headwise.execute.leases import read_beat
from headwise.execute.local import Local
from headwise.execute.own_code import digests_of
from headwise.execute.sweep import sweep
from headwise.execute.worker import work_on
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.store import Store
from headwise.tasks.own import load_task
from headwise.training.run import Recipe, Run

HALF = ["depths=1", "lr=0.05", "steps=90"]  # eight runs in two ensembles
RUNS = runs_of(2, *HALF)
ON = ["--devices", "cpu:2", "--lost-after", "8"]
LONG = "steps=800"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), RUNS)


def groups(store: Store, *, count: int = 2) -> list[Group]:
    """The runs in this many groups."""
    store.open()
    size = len(RUNS) // count
    parts = [RUNS[i : i + size] for i in range(0, len(RUNS), size)]
    options = Options("cpu", checkpoint_every=0.0, beat=0.1, lost_after=5.0)
    made = [group_of(store.path, part, 90 * len(part), 1.0, options, {}) for part in parts]
    for group in made:
        group.write()
    return made


def worker(group: Group, *words: str) -> list[str]:
    return [sys.executable, "-m", "headwise", "worker", str(group.folder), *words]


def test_worker_and_driver_are_killed_and_nothing_is_lost(
    tmp_path: Path, reference: dict[str, str]
) -> None:
    store = tmp_path / "store"
    words = command(store, ON, 2, *HALF)
    with driver(words) as process:
        first = wait_for(lambda: living(store))
        wait_for(lambda: list(store.glob("runs/*/checkpoint.safetensors")))
        os.kill(first[0], signal.SIGKILL)
        wait_for(lambda: set(living(store)) - set(first))
        process.kill()
        process.wait()
    wait_for(lambda: not living(store))  # workers end with their driver
    with driver(words) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["runs"] == 8
    assert_complete(store, reference)


def test_two_workers_of_one_group_end_with_one_row_each(
    tmp_path: Path, reference: dict[str, str]
) -> None:
    """As when a queue starts a job again whose process still runs."""
    store = Store(tmp_path / "store")
    (group,) = groups(store, count=1)
    environ = environment()
    with (
        subprocess.Popen(worker(group), env=environ, stderr=subprocess.PIPE) as one,
        subprocess.Popen(worker(group), env=environ, stderr=subprocess.PIPE) as two,
    ):
        assert (one.wait(120), two.wait(120)) == (0, 0)
    beats = group.beats()
    assert len(beats) == 2
    for path in beats:
        path.unlink()
    assert_complete(store.path, reference)


OWN = """
from dataclasses import dataclass
import torch
from headwise import SquaredError

@dataclass(frozen=True)
class Doubled(SquaredError):
    points: int = 5
    dim: int = 8
    fails: bool = False

    @property
    def tokens(self): return self.points
    @property
    def in_dim(self): return self.dim
    @property
    def answer_dim(self): return self.dim

    def sample(self, generator, count, step=None):
        x = torch.randn(count, self.points, self.dim, generator=generator, device=generator.device)
        if self.fails and step == 2:
            raise RuntimeError("planted at step 2")
        return x, 2 * x

    def baselines(self): return {"zero": 4.0}
"""


def own_runs(file: Path) -> list[Run]:
    """Three runs of a task in a user's file, and three whose task fails while they are trained."""
    file.write_text(OWN)
    shape = paper_shape(dim=8, depth=1, rank=2, width=1, ffn_dim=16, points=5)
    recipe = Recipe(steps=6, epoch=2, batch=4, held_out=8, evals=1)
    tasks = [load_task(f"{file}:Doubled(fails={fails})") for fails in (False, True)]
    return [Run(shape, task, recipe, seed) for task in tasks for seed in (0, 1, 2)]


def test_group_that_fails_three_times_stops_only_itself(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    store = Store(tmp_path / "store")
    runs = own_runs(tmp_path / "own.py")
    with (
        Engine(Place(devices="cpu:1", lost_after=8)) as engine,
        pytest.raises(
            GroupsFailedError, match=r"^3 runs are missing, of 1 groups .* planted at step 2 "
        ) as failed,
    ):
        sweep(runs, store, device="cpu", engine=engine)
    heads, line = failed.value.table
    assert heads == ["group", "runs missing", "attempts", "cause"]
    assert line[1:3] == ["3 of 3", "3"]
    assert [store.row(run.id) is not None for run in runs] == [True] * 3 + [False] * 3
    err = capfd.readouterr().err
    assert "planted at step 2" in err
    logs = sorted((store.path / "groups" / line[0]).glob("log.*"))
    assert [p.name for p in logs] == ["log.1", "log.2", "log.3"]
    assert "own.py" in logs[0].read_text(), "its log says where"


def test_worker_whose_copy_of_own_code_differs_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.open()
    run = own_runs(tmp_path / "own.py")[0]
    group = group_of(store.path, [run], 6, 1.0, Options("cpu"), digests_of([run]))
    group.write()
    (tmp_path / "own.py").write_text(OWN.replace("2 * x", "3 * x"))
    words = worker(group, "--code", str(tmp_path / "own.py"))
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment(), check=False, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "headwise: refused: the code of Doubled on this machine is not that of the driver: copy "
        f"{tmp_path / 'own.py'} again"
    )
    assert store.rows() == []


def test_store_names_no_code_that_a_worker_would_load(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.open()
    run = own_runs(tmp_path / "own.py")[0]
    group = group_of(store.path, [run], 6, 1.0, Options("cpu"), {})
    group.write()
    done = subprocess.run(
        worker(group), capture_output=True, text=True, env=environment(), check=False, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "headwise: refused: there is no Doubled in the worker's command line, which names no --code"
    )


def test_worker_of_another_version_is_refused(tmp_path: Path) -> None:
    (group, _) = groups(Store(tmp_path / "store"))
    replace(group, version="9.9").write()
    outcome = work_on(group.folder)
    assert outcome.state == "refused"
    assert outcome.cause == (
        f"this worker has headwise {headwise.__version__}, the driver 9.9: install the same "
        "version on every machine"
    )


def test_cancelled_groups_save_and_are_resumed_by_the_same_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    words = command(store, ON, 1, *HALF, LONG)
    with driver(words) as process:
        wait_for(lambda: list(store.glob("runs/*/checkpoint.safetensors")))
        assert main(["list", "--store", str(store), "--live"]) == 0
        shown = capsys.readouterr().out
        assert "running" in shown
        assert main(["cancel", "--store", str(store)]) == 0
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("headwise: error: 4 runs are missing, of ")
    assert "cancelled" in err.splitlines()[-1]
    assert not living(store)
    assert list(store.glob("runs/*/checkpoint.safetensors"))
    with driver(words) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["runs"] == 4
    resumed = [row["resumed"] for row in Store(store).rows()]
    assert sum(resumed) > 0


def test_ctrl_c_has_workers_save(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with driver(command(store, ON, 2, *HALF, LONG)) as process:
        wait_for(lambda: list(store.glob("runs/*/checkpoint.safetensors")))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=90)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "headwise: interrupted; run the same command to resume"
    assert not living(store)
    ends = [read_beat(path) for path in store.glob("groups/*/*.beat")]
    assert "stopped" in {beat.get("state") for beat in ends}


# ---- a worker that is lost and says nothing


class Silent:
    """An engine that starts workers and believes for ever that they run."""

    name = address = "silent"
    outlives = by_value = False

    def __init__(self) -> None:
        self.local, self.cancelled = Local([""]), 0

    def slots(self) -> int:
        return 1

    def submit(self, jobs: list[Job]) -> list[Handle]:
        return self.local.submit(jobs)

    def poll(self, handles: list[Handle]) -> list[Status]:
        self.local.poll(handles)
        return [Status("running") for _ in handles]

    def cancel(self, handles: list[Handle]) -> None:
        self.cancelled += 1
        for slot in self.local._slots:
            if slot.process is not None:  # it is stopped, and hears nothing else
                slot.process.kill()

    def close(self) -> None:
        self.local.close()


def test_worker_that_stops_to_give_signs_of_life_is_followed_by_another(
    tmp_path: Path, reference: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    store = Store(tmp_path / "store")
    silent = Silent()
    subject = Driver(store, silent, lost_after=2.0)
    subject.plan(RUNS, lambda runs: groups(store, count=1))
    thread = threading.Thread(target=subject.run)
    thread.start()
    try:
        (pid,) = wait_for(lambda: living(store.path))
        wait_for(lambda: list(store.path.glob("runs/*/checkpoint.safetensors")))
        os.kill(pid, signal.SIGSTOP)  # as if its host hung
        thread.join(120)
    finally:
        silent.close()
    assert not thread.is_alive()
    assert silent.cancelled == 1
    assert_complete(store.path, reference)


# ---- disks


FILL = """
import json, pathlib, subprocess, sys, time
store, command, again = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
while process.poll() is None and not list(store.glob("runs/*/checkpoint.safetensors")):
    time.sleep(0.01)
filler = store.parent / "filler"
with filler.open("wb", 0) as f:
    for size in (1 << 16, 1):
        try:
            while True:
                f.write(bytes(size))
        except OSError:
            pass
out, err = process.communicate(timeout=90)
filler.unlink()
after = subprocess.run(again, capture_output=True, text=True)
rows = [line for p in store.glob("runs/*/rows.jsonl") for line in p.read_text().splitlines()]
print(json.dumps({"rc": process.returncode, "err": err, "again": after.returncode,
                  "err2": after.stderr, "rows": len(rows)}))
"""


def test_disk_that_fills_up_is_one_line_and_nothing_is_lost(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = 'mount -t tmpfs -o size=80m none "$1" && shift && exec "$@"'
    inside = ["unshare", "-rm", "sh", "-c", mount, "sh", str(disk)]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this system lets nobody mount")
    words = command(disk / "store", ["--devices", "cpu:1"], 1, *HALF, "widths=1", "steps=400")
    script = [sys.executable, "-c", FILL, str(disk / "store"), json.dumps(words), json.dumps(words)]
    done = subprocess.run(
        [*inside, *script], capture_output=True, text=True, check=False, timeout=200,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["rc"] == 1
    last = answer["err"].splitlines()[-1]
    assert last.startswith("headwise: error: ")
    assert "No space left on device" in last
    assert "Traceback" not in answer["err"]
    assert answer["again"] == 0, answer["err2"]
    assert answer["rows"] == 2
