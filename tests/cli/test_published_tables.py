"""The commands that docs/figure1.md names print the numbers of the README's table: a point of the
table is a line of what headwise shows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headwise.cli import main

ROOT = Path(__file__).parent.parent.parent
ROWS = ROOT / "results" / "fig1"
FIVE = ["depths=5", "rates=0.3", "ranks=64,32,8"]  # one rate for all, chosen before on seed 0
ONE = ["depths=1", "rates=1,3,10,30", "ranks=64,32,8"]  # the best of four rates on seed 0


def shown(
    changes: list[str], seeds: str, files: list[str], store: Path, capsys: Any
) -> dict[int, str]:
    """Rank -> its held-out error in the table that the command prints."""
    words = ["run", "fig1", "--preset", "paper", "--seeds", seeds, "--no-train", "--no-report"]
    sets = [*changes, "widths=8", "protocols=stream"]
    rows = [str(ROWS / name) for name in files]
    place = ["--store", str(store), "--json"]
    assert main([*words, "--set", *sets, "--rows", *rows, *place]) == 0
    out = capsys.readouterr().out.splitlines()
    points = json.loads(out[-1])["points"]
    table = {int(line.split()[3]): line for line in out if line.startswith("stream")}
    for point in points:
        assert f"{point['held_out']:.4f} ± " in table[point["rank"]]
    return {point["rank"]: f"{point['held_out']:.4f}" for point in points}


def test_commands_of_the_page_print_the_table_of_the_readme(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = shown(ONE, "4", ["rows.jsonl", "tuned.jsonl"], tmp_path / "one", capsys)
    five = shown(FIVE, "3", ["rates.jsonl"], tmp_path / "five", capsys)
    readme = (ROOT / "README.md").read_text()
    line = r"^\| (?:full rank|rank (\d+)),.*\| ([\d.]+)(?: → ([\d.]+))? \|$"
    table = re.findall(line, readme, re.M)
    assert [rank for rank, *_ in table] == ["", "32", "8"]
    for rank, first, last in table:
        assert float(first) == pytest.approx(float(one[int(rank or 64)]), abs=0.00051)
        if last:
            assert float(last) == pytest.approx(float(five[int(rank)]), abs=0.00051)
