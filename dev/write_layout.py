"""Write docs/layout.md, the tree of files, from the first sentence of each file's docstring.

    python dev/write_layout.py

tests/test_docs.py holds that every file is in the page and that nothing else is.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "layout.md"
FOLDERS = ("src/headwise", "benchmarks", "dev")
LONG = 120  # a longer sentence is cut at its colon
KINDS = (".py", ".cu", ".cuh")
OPENING = """\
# Every file, in a clause

Made by `python dev/write_layout.py` from the first sentence of each file. What the folders are for
stands in the [README](../README.md#folders), and how they depend on each other in
[CONTRIBUTING](../CONTRIBUTING.md).

`tests/` mirrors these folders: `src/headwise/training/engine.py` is tested in
`tests/training/test_engine.py`. What several tests share is in `tests/support/`.
"""


def files(folder: str) -> list[Path]:
    """The files of one folder and of those in it that say something of themselves."""
    found = [p for p in (ROOT / folder).rglob("*") if p.suffix in KINDS]
    return sorted(
        (p.relative_to(ROOT) for p in found if p.name not in ("__init__.py", "__main__.py")),
        key=lambda p: (str(p.parent), p.name),
    )


def clause(text: str) -> str:
    """The first sentence of a docstring or of a first comment, without its full stop."""
    first = re.split(r"(?<![ .]al\.)(?<=[.?])\s", " ".join(text.split()))[0]
    if len(first) > LONG:
        first = first.partition(": ")[0]
    return first.rstrip(".:").replace("|", "\\|")


def _sentence(text: str) -> str:
    first = clause(text)
    return first if first.endswith("?") else f"{first}."


def _opening(path: Path) -> str:
    text = (ROOT / path).read_text()
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    lines = re.match(r"(?:\s*//.*\n)+", text)
    return re.sub(r"^\s*//+", "", lines.group(), flags=re.M) if lines else ""


def layout() -> str:
    """The whole page."""
    out = [OPENING]
    folder = ""
    for path in (p for f in FOLDERS for p in files(f)):
        if str(path.parent) != folder:
            folder = str(path.parent)
            out.append(f"\n## {folder}/\n\n| file | what it is |\n|---|---|")
            package = ROOT / path.parent / "__init__.py"
            about = _opening(package.relative_to(ROOT)) if package.exists() else ""
            if about:
                out[-1] = (
                    f"\n## {folder}/\n\n{_sentence(about)}\n\n| file | what it is |\n|---|---|"
                )
        out.append(f"| `{path.name}` | {clause(_opening(path))} |")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    FILE.write_text(layout())
    print(FILE)
