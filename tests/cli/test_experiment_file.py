"""An experiment of one's own, run by the file that holds it."""

import json
import sys
from pathlib import Path

import pytest
from support.commands import refused, run_words

from headwise.cli import main
from headwise.store import Store

OWN = """
import dataclasses

from headwise.experiments import find

EXPERIMENT = dataclasses.replace(
    find("fig1"), name="mine", question="Is <b>mine</b> better?"
)
"""
PROBED = """
import dataclasses

from headwise.experiments import find


def probe(run, weights):
    return {"mine": run.seed + 7}


EXPERIMENT = dataclasses.replace(find("fig1"), name="mine", probe=probe)
"""


def test_experiment_file_is_run_and_hides_no_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, path = tmp_path / "json.py", tmp_path / "store"
    mine.write_text(OWN)
    words = run_words(path, "--seeds", "1")
    assert main(["run", str(mine), *words[2:], "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["experiment"], answer["made"]) == ("mine", 4)
    assert sys.modules["json"] is json
    assert "Is &lt;b&gt;mine&lt;/b&gt; better?" in (path / "report.html").read_text()
    assert main(words) == 0  # a second experiment on the same rows
    mine.unlink()
    assert main(["report", "--store", str(path)]) == 0
    page = (path / "report.html").read_text()
    assert "Is &lt;b&gt;mine&lt;/b&gt; better?" in page, "shown from what the store keeps"
    assert "Not shown" not in page
    assert page.count("<section") == 3


def test_experiment_file_with_a_probe_of_its_own_runs_in_several_processes(
    tmp_path: Path,
) -> None:
    mine, path = tmp_path / "mine.py", tmp_path / "store"
    mine.write_text(PROBED)
    words = run_words(path, "--seeds", "2", "--no-report", workers=2)
    assert main(["run", str(mine), *words[2:]]) == 0
    assert {(row["seed"], row["mine"]) for row in Store(path).rows()} == {(0, 7), (1, 8)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def", "MINE cannot be loaded: SyntaxError: "),
        ("1 / 0", "MINE cannot be loaded: ZeroDivisionError: division by zero"),
        ("import nowhere", "MINE cannot be loaded: ModuleNotFoundError: No module named 'nowhere'"),
        (
            "QUESTION = 1",
            "MINE needs one value EXPERIMENT = Experiment(...); it has 0 experiments",
        ),
    ],
)
def test_experiment_file_that_is_none_is_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(text)
    answer = refused(["run", str(mine), "--store", str(tmp_path / "store")], capsys)
    assert answer.startswith(message.replace("MINE", str(mine)))
    assert not (tmp_path / "store").exists()
