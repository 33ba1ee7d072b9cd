"""Pipes, terminals and Ctrl-C."""

import contextlib
import os
import pty
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import HEADWISE, LONG, run_words
from support.processes import started

from headwise.cli import main
from headwise.store import Store


def environment(**changes: str) -> dict[str, str]:
    """Ours, with Python's output buffered as it is for everybody."""
    return {**{k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}, **changes}


SHAPE = ["dim=12", "depth=1", "num_heads=4"]


# ---- pipes and terminals


@pytest.mark.parametrize(
    "words",
    [["list"], ["--help"], ["list", "--store", "STORE"], ["cost", "--set", *SHAPE, "--json"]],
)
def test_reader_that_is_gone_is_no_drama(words: list[str], store: Path) -> None:
    line = shlex.join([*HEADWISE, *(str(store) if w == "STORE" else w for w in words)])
    done = subprocess.run(
        ["bash", "-c", f"{line} | head -0; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
    )
    assert done.stderr == ""
    assert done.stdout == "1\n"


def test_progress_is_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    done = subprocess.run(
        [*HEADWISE, *run_words(tmp_path / "store", "--no-report")],
        capture_output=True,
        text=True,
        check=True,
    )
    first, *_, last = done.stderr.splitlines()
    assert first == f"fig1 (quick): 12 runs, 0 already in {tmp_path / 'store'}"
    assert last.startswith("fig1: 12 runs 100%, ")
    assert last.endswith(" in all")
    assert "\r" not in done.stderr
    assert "\x1b" not in done.stderr


def test_progress_is_a_bar_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    changes = [*LONG, "steps=400"]
    words = [
        *HEADWISE,
        *run_words(tmp_path / "store", "--no-report", "--seeds", "1", changes=changes),
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal ends with its last writer
            while part := os.read(ours, 4096):
                shown += part
        os.close(ours)
        assert process.wait() == 0
    text = shown.decode()
    assert text.count("\r[") >= 2
    assert "\r[########################] fig1: 2 runs 100%, " in text
    assert text.endswith(" in all\r\n")


# ---- Ctrl-C


def wait_for(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (found := what()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)
    return found


STOPPED = re.compile(
    r"headwise: interrupted; saved (run \w+|\d runs?) at step \d+(, 1 run at step \d+)?"
    r"; run the same command to resume"
)


def test_ctrl_c_is_one_line_and_the_same_command_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store"
    words = run_words(path, "--checkpoint-every", "0", "--no-report", "--seeds", "1", changes=LONG)
    with started([*HEADWISE, *words]) as process:
        wait_for(lambda: list(path.glob("runs/*/checkpoint.safetensors")))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[0] == f"fig1 (quick): 2 runs, 0 already in {path}"
    assert STOPPED.fullmatch(err.splitlines()[-1]), err
    assert len(err.splitlines()) == 2
    assert main(run_words(path, "--no-report", "--seeds", "1", changes=LONG)) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("fig1: 2 runs 100%, ")
    assert last.endswith(" for the rest")
    rows = Store(path).rows()
    assert len(rows) == 2
    assert max(row["resumed"] for row in rows) == 1


@pytest.mark.parametrize("moment", ["while its workers start", "while its workers work"])
def test_ctrl_c_in_a_terminal_reaches_all_processes_and_is_still_one_line(
    moment: str, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    words = run_words(
        path, "--checkpoint-every", "0", "--no-report", "--seeds", "1", changes=LONG, workers=2
    )
    with started([*HEADWISE, *words]) as process:
        wait_for(lambda: (path / "headwise.json").exists())
        if moment == "while its workers work":
            wait_for(lambda: list(path.glob("runs/*/checkpoint.safetensors")))
        else:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            wait_for(
                lambda: len(children.read_text().split()) >= 3
            )  # two workers and multiprocessing's helper
            time.sleep(0.4)  # in the middle of their imports
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    first, last = err.splitlines()
    assert first == f"fig1 (quick): 2 runs, 0 already in {path}"
    if moment == "while its workers work":
        assert STOPPED.fullmatch(last), err
    else:
        assert last == "headwise: interrupted; run the same command to resume"


# ---- other signals


def test_sigterm_while_pytorch_is_imported_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with started([*HEADWISE, *run_words(path, "--no-report")]) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_for(lambda: "libtorch_cpu" in maps.read_text())
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "")
    *said, last = err.splitlines()
    assert last == "headwise: interrupted by SIGTERM; run the same command to resume"
    assert said in ([], [f"fig1 (quick): 12 runs, 0 already in {path}"])


def test_closed_terminal_saves(tmp_path: Path) -> None:
    path = tmp_path / "store"
    words = run_words(path, "--no-report", "--seeds", "1", changes=LONG)
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(HEADWISE[0], [*HEADWISE, *words])
    shown = b""
    while b" left" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 129
    assert main(words) == 0
    rows = Store(path).rows()
    assert len(rows) == 2
    assert max(row["resumed"] for row in rows) == 1, "no checkpoint was due yet but for the signal"
