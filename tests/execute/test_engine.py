"""Where runs are trained: mistakes are one line, groups are cut, devices are named."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.clusters import environment, runs_of
from support.commands import refused, run_words
from support.small_runs import make

from headwise.errors import UsageError
from headwise.execute.base import Job, last_lines, open_log
from headwise.execute.cut import cost, groups_of, speed_of
from headwise.execute.groups import Options, group_of, groups_in, read_group
from headwise.execute.local import devices_of
from headwise.execute.memory import least_bytes
from headwise.execute.own_code import runs_of as runs_from
from headwise.execute.own_code import words_of
from headwise.lm.spec import Pretraining
from headwise.shape import Shape
from headwise.store import Store
from headwise.training.run import Recipe, Run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--on rya", "unknown engine 'rya'; did you mean ray"),
        ("--on ray://head", "unknown engine 'ray://head'; "),
        ("--on ray --devices 0", "--devices names this machine's, so it is for --on local, got"),
        ("--devices 7", "--devices takes GPUs by number (0,1), all, or cpu:N, got '7'; there are "),
        ("--devices cpu:0", "--devices cpu:N has N from 1 to 1024, got 'cpu:0'"),
        ("--devices cpu:1 --lost-after 0", "lost_after is from 1 to 86400 seconds, got 0"),
        ("--on ray://127.0.0.1:99999", "a port is from 1 to 65535, got ray://127.0.0.1:99999"),
    ],
)
def test_place_that_is_none_is_one_line(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*run_words(tmp_path / "store"), *words.split()]
    assert refused(given, capsys).startswith(message)
    assert not list(tmp_path.glob("store/runs/*"))


def test_engine_without_its_package_says_what_to_install(tmp_path: Path) -> None:
    words = [*run_words(tmp_path / "store"), "--on", "ray"]
    code = f"import sys; sys.modules['ray'] = None; from headwise.cli import main; main({words!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    assert done.stderr.splitlines()[-1] == (
        "headwise: error: --on ray needs Ray: pip install 'headwise[ray]'"
    )


def test_devices_are_those_that_are_there() -> None:
    assert devices_of("1,0", lambda: 3, 5) == ["1", "0"]
    assert devices_of("all", lambda: 0, 5) == [""] * 5
    for wrong in ("0,0", "3", "-1", "a", ""):
        with pytest.raises(UsageError, match=r"^--devices "):
            devices_of(wrong, lambda: 3, 5)


# ---- groups


def test_groups_hold_every_run_once_within_share_and_memory(tmp_path: Path) -> None:
    runs, store = runs_of(5), Store(tmp_path)
    for slots in (1, 2, 7):
        groups = groups_of(runs, slots, store)
        assert sorted(run.id for group, _ in groups for run in group) == sorted(r.id for r in runs)
        total = sum(map(cost, runs))
        assert all(c == sum(map(cost, group)) for group, c in groups)
        if slots > 1:
            single = max(map(cost, runs))
            assert max(c for _, c in groups) <= total / slots / 2 + single
    most = 3 * max(map(least_bytes, runs))
    groups = groups_of(runs, 1, store, memory=most)
    assert max(sum(map(least_bytes, group)) for group, _ in groups) <= most
    assert len(groups) > len(groups_of(runs, 1, store))


def test_groups_of_a_slow_machine_are_short(tmp_path: Path) -> None:
    """As many FLOPs as half an hour has, by the speed of the rows that are there."""
    runs, store = runs_of(5), Store(tmp_path)
    assert speed_of(store) == 0.0
    hours = 10 * 1800.0 / sum(map(cost, runs)) * cost(runs[0])
    flops = cost(runs[0]) / runs[0].recipe.steps
    row = {"id": "0a", "flops": flops, "steps": runs[0].recipe.steps, "seconds": hours}
    store.add({**row, "status": "done", "commit": ""})
    assert len(groups_of(runs, 1, store)) >= 10


def test_group_in_a_folder_is_the_group_that_was_written(tmp_path: Path) -> None:
    runs = runs_of(2)
    group = group_of(tmp_path.absolute(), runs, 7, 2.5, Options("cpu", True, 1), {"A": "0b"})
    group.write()
    assert read_group(group.folder) == group
    assert runs_from(group.work, group.ids, read_group(group.folder).specs) == runs
    reversed_ = group_of(tmp_path, runs[::-1], 7, 2.5, Options(), {})
    assert reversed_.id == group.id, "a hash of the ids, in whatever order"


def test_group_of_a_decoder_finds_its_text_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("the quick brown fox " * 400)
    shape = Shape(dim=8, depth=1, num_heads=2, causal=True, vocab_size=257)
    run = Pretraining(shape=shape, steps=2, batch_tokens=64, length=16, source="book.txt")
    group = group_of(tmp_path / "store", [run], 2, 1.0, Options(), {})
    monkeypatch.chdir("/")
    (found,) = runs_from(group.work, group.ids, group.specs)
    assert found.id == run.id


@pytest.mark.parametrize("damage", ["half", "missing", "other ids"])
def test_group_that_is_damaged_is_one_line(damage: str, tmp_path: Path) -> None:
    group = group_of(tmp_path.absolute(), runs_of(1), 7, 2.5, Options(), {})
    group.write()
    path = group.folder / "group.json"
    if damage == "half":
        path.write_text(path.read_text()[:-50])
    elif damage == "missing":
        path.unlink()
    else:
        path.write_text(path.read_text().replace(group.ids[0], "0" * 16))
    with pytest.raises(UsageError, match=re.escape(str(group.folder))):
        read_group(group.folder)


@pytest.mark.parametrize("name", ["../../x", "/etc", "", "a/b", "\0", "\x1b[2J", "x" * 300])
def test_group_of_somebody_leads_nowhere_but_into_its_store(name: str, tmp_path: Path) -> None:
    """Not by a run's id, not by a parent's, and not by its own folder."""
    good = group_of(tmp_path.absolute(), runs_of(1), 7, 2.5, Options(), {})
    spec = {**good.specs[0], "recipe": {**good.specs[0]["recipe"], "init": f"run:{name}"}}
    for group in (
        replace(good, ids=(name, *good.ids[1:])),
        replace(good, specs=(spec, *good.specs[1:])),
    ):
        group.write()
        with pytest.raises(UsageError, match="which no store has"):
            read_group(group.folder)
    good.write()
    assert read_group(good.folder).ids == good.ids
    other = good.folder.with_name("0" * 16)
    good.folder.rename(other)
    with pytest.raises(UsageError, match=f"the folder of its runs is {good.id}"):
        read_group(other)
    good.folder.symlink_to(other)
    with pytest.raises(UsageError, match="the folder of its runs"):
        read_group(good.folder)
    assert not list(groups_in(tmp_path))


@pytest.mark.parametrize("part", ["seed", "shape", "task", "recipe"])
def test_specification_that_makes_no_run_is_one_line(part: str) -> None:
    (run,) = runs_of(1)[:1]
    spec = {key: value for key, value in run.spec().items() if key != part}
    with pytest.raises(UsageError, match=f"run {run.id} cannot be made from its specification: "):
        runs_from("train", [run.id], [spec])


# ---- the user's code


def test_words_of_built_in_runs_are_none() -> None:
    assert words_of([make()]) == ()


def test_class_that_no_file_has_is_refused_with_what_to_do() -> None:
    from headwise.tasks import Farthest

    class Mine(Farthest):
        name = "mine"

    run = make()
    own = Run(run.shape, Mine(12, 5), Recipe(steps=2, epoch=2), 0)
    with pytest.raises(UsageError, match=r"Mine cannot reach a worker.* or use --on ray"):
        words_of([own])


# ---- logs


def test_log_that_is_a_link_or_a_pipe_is_not_written(tmp_path: Path) -> None:
    import os

    (tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):  # noqa: PT011
            open_log(tmp_path / name)
        assert last_lines(tmp_path / name) == ""
    with open_log(tmp_path / "log") as log:
        log.write(b"one\n\n  two \n")
    assert last_lines(tmp_path / "log", 2) == "one | two"


def test_command_of_a_job_names_folder_attempt_and_code() -> None:
    job = Job("0a", Path("/s/groups/0a"), 3, "cpu", ("--code", "my_task.py"))
    assert job.command()[1:] == [
        "-m", "headwise", "worker", "/s/groups/0a", "--attempt", "3", "--code", "my_task.py",
    ]  # fmt: skip
    assert job.log == Path("/s/groups/0a/log.3")
