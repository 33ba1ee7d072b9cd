"""Where commands run: any encoding, closed streams, a pod's environment, no home."""

import io
import os
import subprocess
from pathlib import Path

import pytest
from support.commands import HEADWISE, one_line, refused

from headwise.cli import main
from headwise.cli.output import prepare_streams
from headwise.lm.launch import World, from_env

SHAPE = ["cost", "--set", "dim=12", "depth=1", "num_heads=4"]
LAUNCH = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


# ---- streams


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", "+- x -> \\xe4 \\u6f22 \\udcff"), ("utf-8", "± × → ä 漢 \\udcff")],
)
def test_stream_takes_every_character(
    encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(data, encoding=encoding))
    prepare_streams()
    print("± × → ä 漢 \udcff", flush=True)
    assert data.getvalue().decode(encoding) == shown + "\n"


@pytest.mark.parametrize("home", ["/proc/none", None])
def test_table_is_printed_in_ascii_without_a_home(home: str | None, tmp_path: Path) -> None:
    rows = Path(__file__).parents[2] / "results" / "positions" / "rows.jsonl"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    environment.pop("HOME", None)
    if home is not None:
        environment["HOME"] = home  # nothing can be written there, by nobody
    done = subprocess.run(
        [*HEADWISE, "draw", "positions", str(rows), "--output", str(tmp_path / "f.png")],
        capture_output=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    assert b" +- " in done.stdout


def test_closed_streams_are_nowhere(tmp_path: Path) -> None:
    words = " ".join([*HEADWISE, *SHAPE])
    done = subprocess.run(
        ["bash", "-c", f"{words} >&-; echo $?; {words} 2>&-; {HEADWISE[0]} -m headwise no 2>&-"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr == ""
    assert done.stdout.startswith("0\nnot causal, 1 layers")


# ---- the environment


@pytest.mark.parametrize("changes", [{"RANK": "1"}, {"RANK": "x"}, LAUNCH, {"COLUMNS": "x" * 400}])
def test_command_speaks_in_a_pod(
    changes: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    assert main(SHAPE) == 0
    assert capsys.readouterr().out.startswith("not causal, 1 layers, dim 12")
    assert main(["nonsense"]) == 2
    assert one_line(capsys.readouterr().err).startswith("unknown command 'nonsense'")


@pytest.mark.parametrize(
    ("changes", "world"),
    [
        ({}, World(0, 1, 0)),
        ({"RANK": "3"}, World(0, 1, 0)),
        ({"RANK": "x", "WORLD_SIZE": "2"}, World(0, 1, 0)),
        (LAUNCH, World(1, 2, 0)),
        ({**LAUNCH, "LOCAL_RANK": "1"}, World(1, 2, 1)),
    ],
)
def test_world_is_what_a_launch_says(
    changes: dict[str, str], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*LAUNCH, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    assert from_env() == world


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "x"), ("RANK", "2"), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "9" * 5000)],
)
def test_launch_that_cannot_be_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, text in {**LAUNCH, name: value}.items():
        monkeypatch.setenv(key, text)
    message = refused(["pretrain"], capsys)
    assert message.startswith(f"{name} in the environment must be a whole number of at least ")
    assert len(message) < 300
