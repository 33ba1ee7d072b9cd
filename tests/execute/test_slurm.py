"""Sweeps on a real Slurm of two virtual nodes. Every process, kill and requeue is real."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.clusters import assert_complete, command, runs_of, undisturbed, wait_for
from support.engines import SMALL, attempts, beats, begin, checkpoints, finished, kill
from support.lm_runs import alike
from support.pretrain_command import answer
from support.slurm import NODES, Bed

from headwise.cli import main
from headwise.errors import UsageError
from headwise.execute.base import Handle, Job
from headwise.execute.groups import read_group
from headwise.execute.leases import lease_of, started
from headwise.execute.slurm import Slurm, options_of, script_of
from headwise.execute.slurm_nodes import words_of_job
from headwise.store import Store

ON = ["--on", "slurm", "--slurm", "submitit=no", "mem=300", "gpus=1"]
SEEDS = 5


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), runs_of(SEEDS))


def running(bed: Bed) -> dict[str, str]:
    """The jobs that run, and where."""
    words = [line.split() for line in bed.jobs()]
    return {word[0]: word[2] for word in words if word[1] == "RUNNING"}


def next_begun(store: Path, bed: Bed) -> tuple[str, str, int]:
    """The next group that begins to be trained: its id, its job, its worker."""
    before = {group for group in attempts(store) if checkpoints(store, group)}

    def found() -> tuple[str, str, int] | None:
        at = running(bed)
        for group, noted in attempts(store).items():
            if group not in before and noted[-1]["job"] in at and checkpoints(store, group):
                for beat in beats(store, group).values():
                    return group, noted[-1]["job"], beat["pid"]
        return None

    return wait_for(found)


def test_slurm_sweep_survives_every_kill(
    bed: Bed, tmp_path: Path, reference: dict[str, str]
) -> None:
    """In one sweep of 40 runs: a worker killed, one that is out of time, the driver killed, a node
    killed while no driver is there. All that is found again is not begun again."""
    store, log = tmp_path / "store", tmp_path / "log"
    words = command(store, ON, SEEDS)
    driver = begin(words, log)
    try:
        wait_for(lambda: set(running(bed).values()) == set(NODES))
        assert len(attempts(store)) >= 8, "groups in flight"
        killed, _, pid = next_begun(store, bed)
        os.kill(pid, signal.SIGKILL)
        stopped, job, _ = next_begun(store, bed)
        with contextlib.suppress(RuntimeError):  # what Slurm sends at a time limit
            bed.command("scancel", "--batch", "--signal=TERM", job)
        for group in (killed, stopped):
            wait_for(lambda group=group: len(attempts(store)[group]) == 2)
        wait_for(lambda: running(bed))
        kill(driver)
        before = attempts(store)
        waiting = {line.split()[0] for line in bed.jobs()}
        node = wait_for(lambda: next(iter(running(bed).values()), ""))
        bed.kill_node(node)
        driver = begin(words, log)
        wait_for(lambda: log.read_text().count("already in") == 2)
        bed.revive_node(node)
        finished(driver, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            kill(driver)
    assert_complete(store, reference)
    for group in (killed, stopped):
        ids = read_group(store / "groups" / group).ids
        assert any(row["resumed"] for row in Store(store).rows(ids))
    kept = {group: noted for group, noted in before.items() if noted[-1]["job"] in waiting}
    assert kept
    for group, noted in kept.items():
        assert attempts(store)[group] == noted, "a job that is found is not submitted again"


def test_slurm_requeue_with_two_writers_ends_with_one_row(
    bed: Bed, tmp_path: Path, reference: dict[str, str]
) -> None:
    """A node that cannot be reached still works for a while. Here the step's daemon is killed, so
    that the requeue does not end the worker, which sleeps until another has its runs, and wakes
    up."""
    store, log = tmp_path / "store", tmp_path / "log"
    driver = begin(command(store, [*ON, "--lost-after", "6"], SEEDS, *SMALL), log)
    old = None
    try:
        group, job, old = next_begun(store, bed)
        # In this order: the kernel wakes up whom a parent leaves behind stopped.
        os.kill(daemon := bed.daemon_of(old), signal.SIGKILL)
        wait_for(lambda: not started(daemon))
        os.kill(old, signal.SIGSTOP)
        for checkpoint in checkpoints(store, group):  # one node's locks do not reach another
            checkpoint.with_name("lock").unlink()
        bed.command("scontrol", "requeue", job)
        (beat,) = beats(store, group)
        run = checkpoints(store, group)[0].parent
        wait_for(lambda: lease_of(run)[1] not in (None, beat))
        os.kill(old, signal.SIGCONT)
        finished(driver, log)
        wait_for(lambda: not Path(f"/proc/{old}").exists())
    finally:
        with contextlib.suppress(ProcessLookupError):
            kill(driver)
        if old is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(old, signal.SIGKILL)
    assert [one["job"] for one in attempts(store)[group]] == [job]
    assert_complete(store, {run.id: reference[run.id] for run in runs_of(SEEDS, *SMALL)})


DYING = """
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from headwise.tasks import Farthest

@dataclass(frozen=True)
class Dying(Farthest):
    dim: int = 8
    points: int = 4
    name = "dying"

    def sample(self, generator, batch, step=None):
        group = Path(sys.argv[2]) if sys.argv[1] == "worker" else None
        if group and group.name == min(path.name for path in group.parent.iterdir()):
            print("the last words of a worker", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample(generator, batch, step)
"""


def test_slurm_group_that_fails_three_times_stops_only_itself(bed: Bed, tmp_path: Path) -> None:
    file, store, log = tmp_path / "task.py", tmp_path / "store", tmp_path / "log"
    file.write_text(DYING)
    words = command(store, ON, 3, *SMALL)
    words[5:5] = [str(file)]
    at = words.index("points=4")  # an option of another task
    del words[at - 1 : at + 1]
    assert begin(words, log).wait(120) == 1
    first, *others = sorted(attempts(store).items())
    assert [len(noted) for _, noted in (first, *others)] == [3, 1, 1]
    assert len(Store(store).rows()) == 2
    said = log.read_text()
    assert "1 runs are missing, of 1 groups that failed" in said
    assert f"{first[0]}  1 of 1  3  the last words of a worker" in said


def test_slurm_jobs_that_wait_leave_the_queue_when_cancelled(
    bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C leaves them there."""
    store, log = tmp_path / "store", tmp_path / "log"
    driver = begin(command(store, [*ON, "begin=now+1hour"], SEEDS, *SMALL), log)
    wait_for(lambda: len(attempts(store)))
    os.kill(driver.pid, signal.SIGINT)
    assert driver.wait(30) == 130
    assert f"headwise cancel --store {store} ends them" in log.read_text()
    assert {line.split()[1] for line in bed.jobs()} == {"PENDING"}
    assert main(["cancel", "--store", str(store), "--on", "slurm"]) == 0
    assert bed.jobs() == []


def test_sweep_partly_here_on_ray_and_on_slurm_is_one_store_and_one_report(
    bed: Bed, tmp_path: Path
) -> None:
    """Each takes what is there and makes two runs. Slurm's jobs go through submitit where it is
    installed."""
    store, log = tmp_path / "store", tmp_path / "log"
    there = importlib.util.find_spec("submitit") is not None
    ray = [["--on", "ray"]] if importlib.util.find_spec("ray") is not None else []
    places = [[], *ray, ["--on", "slurm", "--slurm", f"submitit={'yes' if there else 'no'}"]]
    for number, place in enumerate(places, 1):
        words = command(store, place, 2 * number, *SMALL)
        words.remove("--no-report")
        finished(begin(words, log), log)
        assert json.loads(log.read_text().splitlines()[-1])["made"] == 2
    runs = runs_of(2 * len(places), *SMALL)
    assert_complete(store, undisturbed(tmp_path / "here", runs))
    engines = {noted[-1]["engine"] for noted in attempts(store).values()}
    assert engines == {"ray", "slurm"} if ray else {"slurm"}
    page = (store / "report.html").read_text()
    assert all(run.id in page for run in runs)


# ---- one training over several nodes


def test_pretrain_on_two_nodes_survives_one_of_them(bed: Bed, tmp_path: Path) -> None:
    """Two processes of two nodes train what one trains; a node is killed, Slurm starts the job
    again, and it resumes."""
    store, log = tmp_path / "store", tmp_path / "log"
    shape = ["dim=22", "depth=1", "num_heads=3", "head_dim=10", "qk_rope_head_dim=10"]
    sizes = ["--steps", "60", "--batch-tokens", "88", "--length", "11", "--evals", "2"]
    words = [sys.executable, "-m", "headwise", "pretrain", "--device", "cpu", "--set", *shape]
    words += [*sizes, "--checkpoint-every", "0", "--json"]
    driver = begin(
        [*words, "--store", str(store), "--on", "slurm", "--nodes", "2", "--slurm", "mem=500"], log
    )
    try:
        wait_for(lambda: list(store.glob("runs/*/checkpoint.safetensors")))
        assert set(bed.jobs()[0].split()) >= {"RUNNING", "n[1-2]"}
        bed.kill_node("n2")
        bed.revive_node("n2")
        finished(driver, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            kill(driver)
    row = answer(log.read_text())
    assert (row["processes"], row["resumed"]) == (2, 1)
    assert Store(store).rows() == [row]
    alone = tmp_path / "alone"
    finished(begin([*words, "--store", str(tmp_path / "one")], alone), alone)
    alike(row, answer(alone.read_text()))


# ---- one line


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("partition=nix", "Invalid partition name specified"),
        ("frobnicate=3", "unrecognized option '--frobnicate=3'"),
        ("gpus=77", "Requested node configuration is not available"),
    ],
)
@pytest.mark.parametrize("way", ["no", "yes"])
def test_slurm_refusal_is_one_line(
    word: str, why: str, way: str, bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if way == "yes":
        pytest.importorskip("submitit")
    words = command(tmp_path / "s", ["--on", "slurm", "--slurm", f"submitit={way}", word], 1)[3:]
    assert main(words) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("headwise: error: Slurm took no job (")
    assert f"--{word}" in line
    assert why in line
    assert bed.jobs() == []


def test_slurm_that_does_not_answer_is_one_line(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Path(bed.environment["SLURM_CONF"]).read_text()
    away = tmp_path / "slurm.conf"
    away.write_text(text.replace("SlurmctldPort=", "MessageTimeout=2\nSlurmctldPort=1"))
    monkeypatch.setenv("SLURM_CONF", str(away))
    with pytest.raises(UsageError, match=r"the cluster does not answer: .*contact"):
        Slurm()


def test_slurm_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="has no sbatch, squeue, scontrol, scancel"):
        Slurm()


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("Partition=x", "key=value"),
        ("a b=3", "key=value"),
        ("array=0-3", "headwise sets this option"),
        ("job_name=x", "headwise sets this option"),
        ("comment=a\nb", "key=value"),
    ],
)
def test_slurm_option_that_cannot_be_is_refused(word: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        options_of([word])


@pytest.mark.parametrize("jobs", ["0", "many", "501"])
def test_slurm_jobs_at_once_are_a_number(jobs: str) -> None:
    with pytest.raises(UsageError, match="jobs=N has N from 1 to 500"):
        Slurm([f"jobs={jobs}"])


@pytest.mark.parametrize("more", ["--nodes=2", "--gpus-per-node=1 --on=local"])
def test_pretrain_over_nodes_is_for_slurm(
    more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pretrain", "--store", str(tmp_path / "s"), *more.split()]) == 2
    assert "--nodes and --gpus-per-node are for --on slurm" in capsys.readouterr().err


# ---- jobs


def test_slurm_slots_are_devices_or_what_is_asked(bed: Bed) -> None:
    assert Slurm(["gpus=1"]).slots() == 4
    assert Slurm(["gpus=2"]).slots() == Slurm(["gres=gpu:2"]).slots() == 2
    assert Slurm([]).slots() == 8
    assert Slurm(["cpus-per-task=3"]).slots() == 2
    assert Slurm(["jobs=7"]).slots() == 7


def test_slurm_job_whose_node_does_not_see_the_store_says_so(bed: Bed, tmp_path: Path) -> None:
    slurm = Slurm(["submitit=no"])
    (handle,) = slurm.submit([Job("0a", tmp_path / "not there", 1, "cpu")])
    assert slurm.poll([handle])[0].state in ("waiting", "running")
    status = wait_for(lambda: [s for s in slurm.poll([handle]) if s.state == "ended"], 30)[0]
    assert status.line == (
        f"its node does not see {tmp_path}/not there: the store must be where all nodes see it"
    )
    unknown = [Handle("slurm", job, "0a", 1) for job in ("99999_7", "--user=root", "")]
    assert {status.state for status in slurm.poll(unknown)} == {"unknown"}
    slurm.cancel([handle, *unknown])


def test_slurm_cancels_jobs_of_headwise_alone(bed: Bed, tmp_path: Path) -> None:
    """A store may be somebody else's, and name any job."""
    script = tmp_path / "other.sh"
    script.write_text("#!/bin/sh\nsleep 60\n")
    other = bed.command("sbatch", "--parsable", "--output=/dev/null", str(script)).strip()
    slurm = Slurm(["submitit=no"])
    slurm.cancel([Handle("slurm", job, "0a", 1) for job in (other, "--user=root")])
    assert [line.split()[0] for line in bed.jobs()] == [other]


def test_slurm_script_runs_the_worker_in_its_place(tmp_path: Path) -> None:
    """Names that a shell would take apart; the shell is gone, so that signals reach the worker."""
    folder = tmp_path / 'it\'s $HOME; "a" `b`'
    folder.mkdir()

    class Shown(Job):
        def command(self, python: str = "") -> list[str]:
            return ["printf", "%s\n", "$SLURM_ARRAY_TASK_ID", "it's"]

    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "log.3").symlink_to(tmp_path / "elsewhere")
    jobs = [Job("0a", tmp_path / "not there", 1, "cpu"), Shown("0b", folder, 2, "cpu")]
    jobs.append(Shown("0c", linked, 3, "cpu"))
    script = script_of(jobs)

    def code(index: int) -> int:
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(index)}
        return subprocess.run(["sh"], input=script, text=True, env=environment).returncode

    assert (code(0), code(1), code(2)) == (113, 0, 113)
    assert not (tmp_path / "elsewhere").exists()
    assert (folder / "log.2").read_text() == "$SLURM_ARRAY_TASK_ID\nit's\n"
    assert "exec printf" in script


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("pretrain --on slurm --nodes 2 --steps 5", "pretrain --steps 5"),
        ("pretrain --slurm a=1 b=2 --steps 5 --json", "pretrain --steps 5"),
        ("pretrain --nodes=2 --slurm=a=1 b=2 --set dim=3 depth=2", "pretrain --set dim=3 depth=2"),
        ("pretrain --group g --attempt 2 --lost-after 9 c.json", "pretrain c.json"),
    ],
)
def test_words_of_job_leave_out_where_it_runs(words: str, kept: str) -> None:
    assert words_of_job(words.split()) == kept.split()
