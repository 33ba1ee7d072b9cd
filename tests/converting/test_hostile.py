"""Damaged and hostile checkpoints, converted: one clear line or a correct result, nothing left
behind, nothing run."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_mutated_checkpoints_are_refused_or_converted_rightly() -> None:
    code = "import sys; sys.path[:0] = ['src', 'tests']\n"
    code += "from support.mutated_conversions import main; main(500, 11)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["other"] == []
    assert found["wrong"] == found["long"] == found["left"] == []
    assert not found["ran"]
    assert found["refused"] > 250
    assert found["written"] > 50
    assert found["grown"] < 400  # MiB
