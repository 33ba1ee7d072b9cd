"""The fenced blocks of documentation pages, and what is said of running them.

A block of commands (no word behind the fence) or of Python is run by a test, or a line above it
says why not: `<!-- not run: minutes -->`, or `<!-- not run (word word): minutes -->` where only
the lines with one of these words are left out. Other words behind the fence (text, toml, json) are
shown and never run.
"""

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(
    r"(?:<!-- not run(?: \((?P<words>[^)]*)\))?: (?P<why>[^>]*?) -->\n+)?"
    r"^(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """One block: where it stands, its kind, its text, and why it is not run ("": it is)."""

    page: str
    line: int
    kind: str
    text: str
    why: str
    words: tuple[str, ...]  # lines with one of these are left out; none: the whole block

    @property
    def commands(self) -> list[str]:
        """The commands of a block without comments; where a line starts with $, only such lines."""
        joined = self.text.replace("\\\n", " ")
        lines = [line.strip() for line in joined.splitlines()]
        if any(line.startswith("$ ") for line in lines):
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [shlex.join(shlex.split(line, comments=True)) for line in lines if line]

    def is_run(self, command: str = "") -> bool:
        """Whether a test runs this block, or a command of it."""
        if not self.why:
            return True
        return bool(self.words) and not any(word in shlex.split(command) for word in self.words)


def blocks_of(path: Path, root: Path) -> list[Block]:
    """Every block of a page, in order."""
    page = path.read_text()
    return [
        Block(
            page=str(path.relative_to(root)),
            line=page.count("\n", 0, match.start()) + 1,
            kind=match["kind"],
            text=textwrap.dedent(match["text"]),
            why=match["why"] or "",
            words=tuple((match["words"] or "").split()),
        )
        for match in FENCE.finditer(page)
    ]
