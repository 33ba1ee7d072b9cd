"""Sweeps on a real Ray of two nodes: its workers, a node and the driver are killed in their midst.

The cluster and every driver are processes of their own, so no Ray is loaded here. The cluster does
not see one folder, `hidden`: over what lies there is another file system, as on a machine that
shares none.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.clusters import (
    assert_complete,
    command,
    count_rows,
    driver,
    environment,
    living,
    runs_of,
    undisturbed,
    wait_for,
)

from headwise.execute.groups import attempts_of, read_group
from headwise.execute.leases import read_beat

if importlib.util.find_spec("ray") is None:
    pytest.skip("the extra ray is not installed", allow_module_level=True)

SEEDS = 5
STEPS = "steps=1080"
FAST = ["--lost-after", "8"]


@dataclass
class Nodes:
    """The cluster's process; orders go in, answers come out."""

    process: subprocess.Popen[str]
    port: int
    hidden: Path | None

    def ask(self, order: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.partition(" ")[0].strip() in ("node", "killed", "port"):
                return line.strip()
        raise AssertionError("the cluster ended")

    @property
    def on(self) -> list[str]:
        return ["--on", f"ray://127.0.0.1:{self.port}", *FAST]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    hidden = tmp_path_factory.mktemp("hidden")
    words = [sys.executable, "-W", "ignore", "-m", "support.ray_nodes"]
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs none "$1" && shift && exec "$@"', "sh"]
    can = (
        shutil.which("unshare") is not None
        and not subprocess.run(
            [*mount, str(hidden), "true"], capture_output=True, check=False
        ).returncode
    )
    with subprocess.Popen(
        [*mount, str(hidden), *words] if can else words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline().split()[1])
            cluster = Nodes(process, port, hidden if can else None)
            cluster.ask("add")
            cluster.ask("add")
            yield cluster
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), runs_of(SEEDS, STEPS))


def finish(process: subprocess.Popen[str]) -> tuple[dict[str, object], str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]), err


def at_work(store: Path, process: subprocess.Popen[str]) -> bool:
    """Whether two workers train at once, or one where idle cores have made half of the rows before
    the other has begun, or the driver has ended, as it may where few rows were left to it."""
    if process.poll() is not None:
        return True
    return len(living(store)) == 2 or (count_rows(store) >= 20 and bool(living(store)))


def test_sweep_outlives_its_workers_a_node_and_its_driver(
    nodes: Nodes, tmp_path: Path, reference: dict[str, str]
) -> None:
    store = tmp_path / "store"
    with driver(command(store, [], 1, STEPS)) as process:  # the first eight are made here
        finish(process)
    words = command(store, nodes.on, SEEDS, STEPS)
    with driver(words) as process:
        # A worker. Each node has one core, so where two train at once they are on both.
        wait_for(lambda: at_work(store, process))
        os.kill(wait_for(lambda: with_checkpoint(store)), signal.SIGKILL)
        wait_for(lambda: any(len(attempts_of(f)) > 1 for f in store.glob("groups/*")))
        # The driver, which has submitted the group again.
        process.kill()
        process.wait()
    with driver(words) as process:
        wait_for(lambda: at_work(store, process))
        # A node; as a rule both have a worker.
        nodes.ask("kill 0")
        nodes.ask("add")
        answer, err = finish(process)
    assert (answer["runs"], len(answer["points"])) == (40, 8)
    assert_complete(store, reference)
    assert "Traceback" not in err


def small(store: Path, nodes: Nodes, *words: str) -> list[str]:
    """Eight runs in a moment."""
    changes = ["depths=1", "lr=0.01", "widths=1,2", "steps=20"]
    return [*command(store, nodes.on, 2, *changes), *words]


def with_checkpoint(store: Path) -> int:
    """A process that trains, of whose group a checkpoint is here; 0: none."""
    for path in store.glob("groups/*/*.beat"):
        beat = read_beat(path)
        runs = [store / "runs" / run_id for run_id in read_group(path.parent).ids]
        if beat.get("pid") in living(store) and any(
            (run / "checkpoint.safetensors").exists() for run in runs
        ):
            return int(beat["pid"])
    return 0


def test_store_that_no_node_sees_is_filled_over_ray(nodes: Nodes, tmp_path: Path) -> None:
    if nodes.hidden is None:
        pytest.skip("this system lets nobody mount")
    changes = ["depths=1", "lr=0.01", "widths=1,2", "steps=1080"]
    runs = runs_of(1, *changes)
    expected = undisturbed(tmp_path / "here", runs)
    store = nodes.hidden / "store"
    words = command(store, nodes.on, 1, *changes)
    words.append("--keep-weights")
    with driver(words) as process:
        # Checkpoints come while it is under way. A driver that dies is followed by another, which
        # collects what was made meanwhile, and so is a worker.
        wait_for(lambda: list(store.glob("runs/*/checkpoint.safetensors")))
        process.kill()
        process.wait()
    with driver(words) as process:
        os.kill(wait_for(lambda: with_checkpoint(store)), signal.SIGKILL)
        finish(process)
    assert len(list(store.glob("runs/*/weights.safetensors"))) == len(runs)
    for path in store.glob("runs/*/weights.safetensors"):
        path.unlink()
    for path in store.glob("runs/*/source.json"):
        path.unlink()
    assert_complete(store, expected)
    resumed = [json.loads(p.read_text())["resumed"] for p in store.glob("runs/*/rows.jsonl")]
    assert sum(resumed) > 0


SCRIPT = """
import sys
from dataclasses import dataclass
import torch
import headwise
from headwise.tasks import SquaredError

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

from headwise.execute.engine import Engine, Place
from headwise.execute.sweep import sweep
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.store import Store
from headwise.training.run import Recipe, Run

shape = paper_shape(dim=8, depth=1, rank=2, width=1, ffn_dim=16, points=5)
recipe = Recipe(steps=6, epoch=2, batch=4, held_out=8, evals=1)
runs = [Run(shape, Doubled(fails=f), recipe, seed) for f in (False, True) for seed in (0, 1, 2)]
with Engine(Place(sys.argv[1], lost_after=8)) as engine:
    rows = sweep(runs, Store(sys.argv[2]), device="cpu", engine=engine)
"""


def test_group_that_fails_three_times_stops_only_itself(nodes: Nodes, tmp_path: Path) -> None:
    """Its task is defined in a script: it travels to the nodes by value."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    store = tmp_path / "store"
    words = [sys.executable, str(script), nodes.on[1], str(store)]
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment(), timeout=120, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "headwise.execute.driver.GroupsFailedError: 3 runs are missing, of "
    )
    assert "RuntimeError: planted at step 2" in done.stderr.splitlines()[-1]
    lines = [line.split() for line in done.stderr.splitlines() if "planted" in line][:-1]
    failed = {words[0]: (int(words[1]), words[4]) for words in lines if words[2] == "of"}
    assert sum(missing for missing, _ in failed.values()) == 3
    assert {attempts for _, attempts in failed.values()} == {"3"}
    assert count_rows(store) == 3


def test_worker_of_another_version_is_one_line(nodes: Nodes, tmp_path: Path) -> None:
    src = Path(__file__).parent.parent.parent / "src"
    shutil.copytree(src, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    init = tmp_path / "src" / "headwise" / "__init__.py"
    init.write_text(init.read_text().replace('__version__ = "', '__version__ = "9.'))
    words = small(tmp_path / "store", nodes)
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment(), "PYTHONPATH": str(tmp_path / "src")},
    ) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    last = err.splitlines()[-1]
    assert last.startswith("headwise: error: 8 runs are missing, of ")
    assert "this worker has headwise " in last
    assert "install the same version on every machine" in last
    with driver(small(tmp_path / "store", nodes)) as process:
        answer, _ = finish(process)
    assert answer["made"] == 8


def test_head_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    words = command(tmp_path / "store", ["--on", "ray://127.0.0.1:1"], 1)
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment(), timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "headwise: error: no Ray answers at ray://127.0.0.1:1 (Connection refused); on its head: "
        "ray start --head --ray-client-server-port 1"
    )
    assert not list(tmp_path.glob("store/runs/*"))


def test_driver_finds_what_runs_and_leaves_it_to_the_cluster_until_it_is_cancelled(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Where the workers do not see the store, the command that cancels has to name the cluster."""
    store = (nodes.hidden or tmp_path) / "cancelled"
    words = command(store, nodes.on, 2, "depths=1", "lr=0.01", "steps=36000")
    with driver(words) as process:
        wait_for(lambda: len(living(store)) == 2)
        wait_for(lambda: list(store.glob("runs/*/checkpoint.safetensors")))
        process.kill()
        process.wait()
    pids = set(living(store))
    with driver(words) as process:
        assert process.stderr is not None
        said: list[str] = []
        while (line := process.stderr.readline()) and "under way" not in line:
            said.append(line)
        assert line == "headwise: 2 groups of a former driver are under way\n", said
        time.sleep(1.0)  # it follows them now
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"stay with ray; the same command finds them, headwise cancel --store {store}" in err
    assert set(living(store)) == pids
    words = [sys.executable, "-m", "headwise", "cancel", "--store", str(store), *nodes.on[:2]]
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment(), timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" groups are asked to save and end\n")
    ends = [read_beat(path) for path in store.glob("groups/*/*.beat")]
    assert [beat.get("state") for beat in ends] == ["stopped"] * 2
    saved = " ".join(beat["cause"] for beat in ends)
    assert "saved 2 runs at step" in saved or "saved run" in saved
    assert list(store.glob("runs/*/checkpoint.safetensors"))
