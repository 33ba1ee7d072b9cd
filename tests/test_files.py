"""Files that are replaced: complete or what they were, whoever is killed."""

import os
from pathlib import Path

import pytest
from support.writers import parallel

from headwise.files import write_whole
from headwise.store import append_line

WHOLE = """
from headwise.files import write_whole
path, rng = Path(sys.argv[1]), random.Random(3)
def work(kill):
    at = 0
    while True:
        write_whole(path, bytes([65 + (kill + at) % 26]) * 3_000_000)
        at += 1
for kill in range(25):
    pid = start(work, kill)
    time.sleep(rng.uniform(0.0, 0.05))
    data = path.read_bytes() if path.exists() else b""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for seen in (data, path.read_bytes() if path.exists() else b""):
        assert len(seen) in (0, 3_000_000) and len(set(seen)) <= 1
assert path.exists()
"""


def test_replaced_file_is_complete_or_what_it_was(tmp_path: Path) -> None:
    parallel(WHOLE, tmp_path / "folder" / "file")


def test_replaced_file_that_cannot_be_put_in_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="taken"):
        write_whole(tmp_path / "taken", "text")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_files_have_the_permissions_that_the_user_asked_for(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", "text")
        append_line(tmp_path / "b", "line")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in "ab"] == [0o640, 0o640]
