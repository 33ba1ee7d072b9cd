"""What the README and the page on integrations show is so: their commands parse, their Python
runs, their folders exist."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import headwise
from headwise.cli import COMMANDS, parser
from headwise.integrations.nanochat.command import parser as _nanochat_parser
from headwise.tracking import find as find_tracker
from headwise.tracking import tracked

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
INTEGRATIONS = (ROOT / "docs" / "integrations.md").read_text()


def blocks(page: str, kind: str) -> list[str]:
    """The fenced blocks of a page with that word behind the fence."""
    return [t for k, t in re.findall(r"^```(\w*)\n(.*?)^```", page, re.M | re.S) if k == kind]


def commands(page: str, start: str) -> list[str]:
    lines = [line.partition(" #")[0].strip() for b in blocks(page, "") for line in b.splitlines()]
    return [line for line in lines if line.startswith(start)]


def tree() -> dict[str, str]:
    """Folder -> clause, from the indented tree."""
    block = next(text for text in blocks(README, "") if text.startswith("src/headwise/\n"))
    out: dict[str, str] = {}
    for line in block.splitlines():
        name, _, clause = line.strip().partition(" ")
        out[f"src/headwise/{name}" if line.startswith(" ") else name] = clause.strip()
    return out


def test_tree_has_every_folder_with_a_clause() -> None:
    package = ROOT / "src" / "headwise"
    there = {f"src/headwise/{p.parent.name}/" for p in package.glob("*/__init__.py")}
    assert there <= set(tree())
    for path, clause in tree().items():
        assert (ROOT / path).is_dir(), path
        assert clause or path == "src/headwise/", path


@pytest.mark.parametrize("command", [*commands(README, "headwise "), *commands(INTEGRATIONS, "he")])
def test_command_parses(command: str) -> None:
    words = shlex.split(command)[1:]
    assert words[0] in COMMANDS
    parser().parse_args(words)


def test_readme_has_ten_commands_with_what_each_does() -> None:
    section = README.partition("## Ten commands")[2].partition("\n## ")[0]
    lines = blocks(section, "")[0].splitlines()
    assert len(lines) == 10
    assert all(line.startswith("headwise ") and " # " in line for line in lines)


def test_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _ = blocks(README, "python")
    assert len(code.splitlines()) <= 12
    code = code.replace("steps=1000", "steps=100").replace("depths=1)", "depths=1, steps=100)")
    space: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), space)
    assert len(space["rows"]) == 5
    assert all(row["status"] == "done" for row in space["rows"])


def test_task_of_the_readme_trains(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(blocks(README, "python")[1])
    made = headwise.run(
        "map",
        task=str(tmp_path / "my_task.py"),
        store=tmp_path / "store",
        workers=1,
        **{"steps": 2, "epoch": 1, "evals": 1, "held_out": 16, "seeds": 1},
        **{"heads": (1, 2), "ranks": (4,), "depths": (1,), "lrs": (0.01,)},
    )
    assert len(made.rows) == 4  # two shapes, a tuning seed and a counted one
    assert {row["task"] for row in made.rows} == {"Sorting"}


def test_task_of_the_readme_trains_with_a_model_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(blocks(README, "python")[1])
    made = headwise.run(
        "map",
        task=str(tmp_path / "my_task.py"),
        model=str(ROOT / "examples" / "my_model.py"),
        store=tmp_path / "store",
        workers=1,
        **{"steps": 2, "epoch": 1, "evals": 1, "held_out": 16, "seeds": 1},
        **{"heads": (1, 2), "ranks": (4,), "depths": (1,), "lrs": (0.01,)},
    )
    assert [point.off for point in made.points] == [None, None]
    assert made.page is not None


def test_tracker_of_the_integrations_page_takes_a_run(tmp_path: Path) -> None:
    (tmp_path / "my_tracker.py").write_text(blocks(INTEGRATIONS, "python")[-1])
    out = tmp_path / "my-runs.txt"
    row = {"id": "7b", "lr": 0.25, "epoch": 3, "curve": [0.5], "held_out_curve": [[1, 0.75]]}
    find_tracker(f"{tmp_path / 'my_tracker.py'}:MyTracker", str(out))(tracked(row, group="mine"))
    assert out.read_text() == "mine run-7b 0.25 3 {'train_loss': 0.5, 'held_out': 0.75}\n"


def test_export_commands_of_the_integrations_page_parse() -> None:
    lines = commands(INTEGRATIONS, "headwise export")
    assert [parser().parse_args(shlex.split(line)[1:]).to for line in lines] == [
        *("tensorboard", "mlflow", "parquet"),
    ]


def test_nanochats_command_parses() -> None:
    (line,) = commands(INTEGRATIONS, "python -m headwise.integrations")
    words = shlex.split(line)
    assert words[2] == "headwise.integrations.nanochat"
    assert _nanochat_parser().parse_args(words[3 : words.index("--")]).head_dim == 448
    assert words[words.index("--") + 1 :] == ["-m", "scripts.base_train", "--depth=28"]


def test_readme_has_no_placeholder_left() -> None:
    assert not re.search(r"\b(RATIO|RUNTIME|TODO|XXX)\b", README + INTEGRATIONS)
