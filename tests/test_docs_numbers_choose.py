"""The worked example of docs/choose.md is what the command says of the rows in results/choose, and
its tables are those of the account there."""

import re
from pathlib import Path

import pytest

from headwise.cli import main
from headwise.store import Store, read_rows

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "choose.md").read_text()
ACCOUNT = (ROOT / "results" / "choose" / "README.md").read_text()
TASK = "from headwise.tasks import Farthest\n\nTASK = Farthest(dim=8, points=8)\n"


def test_worked_example_is_what_the_command_says_of_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = next(b for b in re.findall(r"```\n(.*?)```", PAGE, re.S) if b.startswith("$ "))
    command, _, said = block.replace("\\\n", "").partition("\n")
    monkeypatch.chdir(tmp_path)
    Path("farthest8.py").write_text(TASK)
    store = Store("headwise-store")
    rows = read_rows(ROOT / "results" / "choose" / "farthest.jsonl")
    for row in rows:
        store.add(row)
    assert main([*command.split()[2:], "--device", "cpu", "--no-report"]) == 0
    assert len(store.rows()) == len(rows), "a row was missing, and was made"
    printed = capsys.readouterr().out
    assert " ".join(printed.split()).startswith(" ".join(said.split()))
    for cell in re.findall(r"\| ([+0-9.]{6}[^|]*) \|", ACCOUNT.partition("Stopping")[0]):
        assert cell in printed


def test_ranges_of_stopping_rules_are_those_of_the_account() -> None:
    """Every cell of the page's table is the smallest and largest of its cases."""
    cases = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in ACCOUNT.splitlines()
        if re.match(r"\| (t-test|Wilcoxon|race)", line)
    ]
    assert len(cases) == 48
    table = [
        line for line in PAGE.splitlines() if re.match(r"\| (paired t|Wilcoxon|this race)", line)
    ]
    for line, name in zip(table, ("t-test", "Wilcoxon", "race"), strict=True):
        of_rule = [case for case in cases if case[0].startswith(name)]
        tied = [float(case[4].rstrip("%")) for case in of_rule]
        paired = [float(case[5].rstrip("%")) for case in of_rule if case[2] == "0.8"]
        unpaired = [float(case[5].rstrip("%")) for case in of_rule if case[2] == "0.0"]
        cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
        for cell, values in zip(cells, (tied, paired, unpaired), strict=False):
            ends = [float(x) for x in re.findall(r"[\d.]+", cell)]
            assert ends[0] == pytest.approx(min(values), abs=0.51)
            assert ends[-1] == pytest.approx(max(values), abs=0.51)
        shares = {
            pairing: [float(x) for case in of_rule if case[2] in pairing for x in
                      re.findall(r"[\d.]+", case[6])]
            for pairing in (("0.8",), ("0.0",), ("0.8", "0.0"))
        }  # fmt: skip
        found = [float(x) for x in re.findall(r"[\d.]+", cells[3])]
        wanted = (("0.8",), ("0.0",)) if len(found) == 4 else (("0.8", "0.0"),)
        assert found == [end for key in wanted for end in (min(shares[key]), max(shares[key]))]
