"""`headwise check`: one line per rule, exit codes 0, 1 and 2."""

import json
from pathlib import Path

import pytest

from headwise.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
TASK, MODEL = str(EXAMPLES / "my_task.py"), str(EXAMPLES / "my_model.py")
UNSEEDED = """
from dataclasses import dataclass
import torch
import headwise


@dataclass(frozen=True)
class Largest(headwise.SquaredError):
    tokens: int = 5
    in_dim = 1
    answer_dim = 1

    def sample(self, generator, batch, step=None):
        numbers = torch.randn(batch, self.tokens, 1)
        return numbers, numbers.amax(1, keepdim=True)
"""


def test_check_of_a_task_without_a_fault(capsys):
    assert main(["check", TASK, "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Sorting:"
    assert all(line.startswith("  ok     ") for line in lines[1:-1])
    answer = json.loads(lines[-1])
    assert answer["failed"] == 0
    assert [finding["rule"] for finding in answer["task"]] == [
        line.split()[1] if "held out" not in line else "held out" for line in lines[1:-1]
    ]


def test_check_of_a_model_on_a_task(capsys):
    assert main(["check", MODEL, "--task", TASK]) == 0
    assert capsys.readouterr().out.startswith("Mixer on Sorting:\n  ok     value ")


def test_check_of_a_file_with_both_checks_the_model_on_the_task(capsys, tmp_path):
    path = tmp_path / "both.py"
    path.write_text(Path(TASK).read_text() + Path(MODEL).read_text())
    assert main(["check", str(path)]) == 0
    out = capsys.readouterr().out
    assert "Sorting:\n" in out
    assert "Mixer on Sorting:\n" in out


def test_check_of_a_fault_exits_with_1(capsys, tmp_path):
    path = tmp_path / "unseeded.py"
    path.write_text(UNSEEDED)
    assert main(["check", str(path)]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert (
        "  WRONG  generator  sample uses the global generator of torch: draw with "
        "generator=generator" in wrong
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["none.py"], "there is no file none.py"),
        ([f"{TASK}:Sortin"], f"{TASK} has no 'Sortin'; did you mean Sorting? choices: Sorting"),
        ([f"{TASK}:Sorting(tokens='a')"], "tokens must be of type int, got 'a'"),
        (["farthest"], "a task or model of your own is FILE.py, FILE.py:NAME or"),
        ([], "the following arguments are required: file"),
    ],
)
def test_check_of_what_is_no_task_exits_with_2(capsys, words, line):
    assert main(["check", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("headwise: error: ")
    assert line in printed.err
    assert printed.err.count("\n") == 1
