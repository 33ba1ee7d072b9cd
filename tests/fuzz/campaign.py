"""Cases given to a worker process, which is started again where one hangs or dies."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from tests.fuzz.cases import Case, to_json

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
PATIENCE = 40  # seconds for a case; the worker itself stops it after half of that


class Result(NamedTuple):
    """What a case broke, its exit code, and what stood on standard error."""

    found: list[str]
    code: int
    err: str


class Workers:
    """A worker process and the folder it works in."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="headwise-fuzz-")
        self.template = Path(self.folder.name) / "template"
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        words = ["-c", "import sys; from pathlib import Path; from tests.fuzz import template;"
                 "template.make_template(Path(sys.argv[1]))", str(self.template)]  # fmt: skip
        made = subprocess.run(
            [sys.executable, *words], env=environment(), cwd=ROOT, capture_output=True, text=True
        )
        assert made.returncode == 0, made.stderr
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.stop()
        self.folder.cleanup()

    def start(self) -> subprocess.Popen[str]:
        words = ["-m", "tests.fuzz.worker", self.folder.name, str(self.template / "store")]
        return subprocess.Popen(
            [sys.executable, *words], env=environment(), cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def stop(self) -> int:
        """End the worker; returns its exit code."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        process.kill()
        process.communicate()
        return process.returncode

    def run(self, case: Case) -> Result:
        self.process = process = self.process or self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(to_json(case)) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
        if not ready:
            self.stop()
            return Result([f"hang: more than {PATIENCE} s, and no signal is heard"], -1, "")
        line = process.stdout.readline()
        if not line:
            process.wait()
            return Result([f"crash: the process ended with {self.stop()}"], -1, "")
        return Result(**json.loads(line))


def environment() -> dict[str, str]:
    """One thread, no GPU, and the tree's own modules."""
    path = os.pathsep.join(str(ROOT / name) for name in ("src", ".", "tests"))
    given = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **given, "PYTHONUNBUFFERED": "1"}
