"""The README says what is there: its tree, its commands, its Python."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from headwise.cli import COMMANDS, parser
from headwise.integrations.nanochat import _parser as _nanochat_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)


def tree() -> dict[str, str]:
    """Path -> clause, from the indented file tree."""
    block = next(text for kind, text in BLOCKS if text.startswith("headwise/\n"))
    out: dict[str, str] = {}
    folders: list[tuple[int, str]] = []
    for line in block.splitlines():
        name, _, clause = line.strip().partition(" ")
        depth = len(line) - len(line.lstrip())
        while folders and folders[-1][0] >= depth:
            folders.pop()
        path = "".join(folder for _, folder in folders) + name
        if name.endswith("/"):
            folders.append((depth, name))
        out[path] = clause.strip()
    return out


def test_every_path_of_the_tree_exists_and_has_a_clause() -> None:
    for path, clause in tree().items():
        assert (ROOT / path).exists(), path
        assert clause or path == "headwise/", path


def test_every_module_is_in_the_tree() -> None:
    there = {
        str(p.relative_to(ROOT))
        for folder in ("headwise", "benchmarks")
        for p in (ROOT / folder).rglob("*.py")
    }
    quiet = {p for p in there if p.endswith(("__init__.py", "__main__.py"))}
    assert there - quiet <= set(tree()), there - quiet - set(tree())


def test_every_command_of_the_readme_parses() -> None:
    lines = [
        line.partition("#")[0].strip()
        for kind, text in BLOCKS
        if not kind
        for line in text.splitlines()
    ]
    commands = [line for line in lines if line.startswith("headwise ")]
    assert {shlex.split(c)[1] for c in commands} == set(COMMANDS)
    for command in commands:
        parser().parse_args(shlex.split(command)[1:])


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = next(text for kind, text in BLOCKS if kind == "python")
    code = code.replace("steps=1000", "steps=100")  # the same code, a tenth of the time
    space: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), space)
    rows = space["rows"]
    assert isinstance(rows, list)
    assert len(rows) == 5
    assert all(row["status"] == "done" for row in rows)


def test_the_model_of_the_readme_runs() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    code = [text for kind, text in BLOCKS if kind == "python"][1]
    space: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), space)
    assert space["model"](torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 256)


def test_nanochats_command_of_the_readme_parses() -> None:
    lines = [
        line
        for kind, text in BLOCKS
        if not kind
        for line in text.splitlines()
        if line.startswith("python -m headwise.integrations")
    ]
    words = shlex.split(lines[0])
    assert words[2] == "headwise.integrations.nanochat"
    assert _nanochat_parser().parse_args(words[3 : words.index("--")]).head_dim == 448
    assert words[words.index("--") + 1 :] == ["-m", "scripts.base_train", "--depth=28"]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(((?!http)[^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_no_placeholder_is_left() -> None:
    assert not re.search(r"\b(RATIO|RUNTIME|TODO|XXX)\b", README)
