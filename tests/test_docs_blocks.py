"""Every command and every block of Python on the pages of docs/ runs, or says above it why it is
not run here. Commands that are not run parse, with settings that exist."""

import argparse
import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.blocks import Block, blocks_of

from headwise.cli import COMMANDS, main, parser
from headwise.experiments import find
from headwise.experiments.runner import model_of, tasks_of
from headwise.experiments.settings import settings_of
from headwise.store import Store, read_rows

ROOT = Path(__file__).parent.parent
GENERATED = {"docs/cli.md", "docs/layout.md", "docs/api.md"}
BLOCKS = [
    block
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if str(path.relative_to(ROOT)) not in GENERATED
    for block in blocks_of(path, ROOT)
]
REASONS = {
    "half a minute",
    "minutes",
    "a GPU",
    "a cluster",
    "a checkpoint",
    "another package",
    "an excerpt",
}
COMMAND_BLOCKS = [block for block in BLOCKS if block.kind == ""]
PAGES = sorted({block.page for block in BLOCKS if block.kind == "python"})
SHORTER = {"steps=1000": "steps=20, epoch=20, held_out=64"}  # in Python that is run here
# Programs beside headwise that pages call; test_readme.py parses nanochat's.
OTHERS = {"pip", "ray", "torchrun", "python", "make", "git", "sbatch"}


def name_of(block: Block) -> str:
    return f"{block.page}:{block.line}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what pages speak of: a config, a task, a model, results, a store."""
    config = {"model_type": "llama", "hidden_size": 96, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 6, "intermediate_size": 256, "vocab_size": 1000}
    for place in ("config.json", "path/to/config.json"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(json.dumps(config))
    llava = {"model_type": "llava", "text_config": config, "vision_config": {}}
    (tmp_path / "llava").mkdir()
    (tmp_path / "llava/config.json").write_text(json.dumps(llava))
    for name in ("my_task.py", "my_model.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path / name)
    (tmp_path / "results").symlink_to(ROOT / "results")
    store = Store(tmp_path / "headwise-store")
    for row in read_rows(ROOT / "results/map/farthest-quick.jsonl")[:3]:
        store.add(row)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_blocks_are_found() -> None:
    assert len(COMMAND_BLOCKS) >= 28
    assert len(PAGES) >= 5


@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
def test_block_says_why_it_is_not_run(block: Block) -> None:
    if block.why:
        assert block.why in REASONS
    if block.words:
        assert all(any(w in shlex.split(c) for c in block.commands) for w in block.words)
    assert block.kind in ("", "python", "text", "toml", "json")


@pytest.mark.parametrize("block", COMMAND_BLOCKS, ids=name_of)
def test_command_of_a_page_runs_or_parses(
    block: Block, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in block.commands:
        words = shlex.split(command)
        while "=" in words[0]:
            words.pop(0)  # VARIABLE=value
        if words[0] != "headwise":
            assert words[0] in OTHERS, command
            assert not block.is_run(command), f"{command}: say why it is not run"
            continue
        assert words[1] in COMMANDS
        args = parser().parse_args(words[1:])
        if block.is_run(command):
            assert main(words[1:]) == 0, capsys.readouterr().err
        elif args.command == "run":
            check_settings(args)


def check_settings(args: argparse.Namespace) -> None:
    """Settings that exist, with values of their types; files that they name may be elsewhere."""
    named = [*args.tasks, *([args.task] if args.task else [])]
    changes = [c for c in args.changes if not c.startswith(("source=", "tokenizer="))]
    model = model_of(args.model) if args.model else None
    tasks = tasks_of(named) if named and named != ["text"] else []
    settings_of(find(args.experiment), args.preset, changes, args.seeds, tasks, model)


@pytest.mark.parametrize("page", PAGES)
def test_python_of_a_page_runs(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    space: dict[str, Any] = {"__name__": "page"}
    for block in BLOCKS:
        if block.page == page and block.kind == "python" and not block.why:
            text = block.text
            for long, short in SHORTER.items():
                text = text.replace(long, short)
            code = compile(text, f"{page}:{block.line}", "exec")
            exec(code, space)
    assert os.getcwd() == str(folder)


# These tests can fail.


def test_block_without_a_reason_is_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```\nheadwise nonsense\n```\n\n<!-- not run: minutes -->\n```\nheadwise run fig1\n```\n"
        "<!-- not run (run): minutes -->\n\n```\nheadwise run fig1  # long\nheadwise list\n```\n"
        "1. a list\n\n   ```python\n   a = 1\n   ```\n```text\nno command\n```\n"
    )
    first, second, third, fourth, fifth = blocks_of(page, tmp_path)
    assert first.is_run("headwise nonsense")
    assert not second.is_run("headwise run fig1")
    assert third.commands == ["headwise run fig1", "headwise list"]
    assert [third.is_run(c) for c in third.commands] == [False, True]
    assert (fourth.kind, fourth.text, fifth.kind) == ("python", "a = 1\n", "text")
    assert (first.line, fourth.line) == (1, 17)
