"""Disks that are full or cannot be written: real file systems of our own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import HEADWISE, LONG, one_line, run_words

MOUNT = 'mount -t tmpfs -o "$1" none "$2" && shift 2 && exec "$@"'


def on_disk(options: str, folder: Path, words: list[str]) -> list[str]:
    """A command in a mount namespace of its own, with a small file system at `folder`."""
    return ["unshare", "-rm", "sh", "-c", MOUNT, "sh", options, str(folder), *words]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            on_disk("size=1m", folder, ["true"]), capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("this system lets nobody mount")
    return folder


def test_full_disk_is_refused_before_anything_is_written(disk: Path) -> None:
    words = [*HEADWISE, *run_words(disk / "store")]
    listing = ["sh", "-c", '"$@"; echo "rc $?"; ls -A "$0"', str(disk), *words]
    done = subprocess.run(
        on_disk("size=8m", disk, listing), capture_output=True, text=True, check=False
    )
    assert done.stdout == "rc 2\n"
    message = one_line(done.stderr)
    assert message.startswith("no disk space: 12 runs need about 64 MiB in ")
    assert message.endswith(", 8 MiB are free")


def test_disk_that_cannot_be_written_is_refused(disk: Path) -> None:
    done = subprocess.run(
        on_disk("size=200m,ro", disk, [*HEADWISE, *run_words(disk / "store")]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert (
        one_line(done.stderr)
        == f"the store {disk / 'store'} cannot be written: no permission in {disk}"
    )


FILL = """
import json, os, pathlib, subprocess, sys, time
store, command, again = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
while process.poll() is None and not list(store.glob("runs/*/checkpoint.safetensors")):
    time.sleep(0.01)
filler = store.parent / "filler"
with filler.open("wb", 0) as f:  # somebody else takes the rest
    try:
        while True:
            f.write(bytes(1 << 16))
    except OSError:
        pass
    try:
        while True:
            f.write(bytes(1))
    except OSError:
        pass
out, err = process.communicate(timeout=60)
half = [str(p) for p in store.rglob(".*")]
filler.unlink()
after = subprocess.run(again, capture_output=True, text=True)
rows = [line for p in store.glob("runs/*/rows.jsonl") for line in p.read_text().splitlines()]
first = {"rc": process.returncode, "out": out, "err": err, "half": half}
print(json.dumps({**first, "again": after.returncode, "rows": len(rows)}))
"""


def test_disk_that_fills_up_is_one_line_and_the_run_resumes_with_space(disk: Path) -> None:
    first = [
        *HEADWISE,
        *run_words(
            disk / "store", "--checkpoint-every", "0", "--no-report", "--seeds", "1", changes=LONG
        ),
    ]
    again = [*HEADWISE, *run_words(disk / "store", "--no-report", "--seeds", "1", changes=LONG)]
    words = [sys.executable, "-c", FILL, str(disk / "store"), json.dumps(first), json.dumps(again)]
    done = subprocess.run(
        on_disk("size=80m", disk, words), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["rc"] == 1
    assert answer["out"] == ""
    last = answer["err"].splitlines()[-1]
    assert last.startswith("headwise: error: [Errno 28] No space left on device")
    assert "Traceback" not in answer["err"]
    assert answer["half"] == []
    assert (answer["again"], answer["rows"]) == (0, 2)
