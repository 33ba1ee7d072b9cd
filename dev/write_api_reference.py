"""Write docs/api.md, the reference of the public Python names, from signatures and docstrings.

    PYTHONPATH=src python dev/write_api_reference.py

tests/test_public_names.py compares the file with what is generated. The examples in it are doctests
of the package.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import headwise

FILE = Path(__file__).parent.parent / "docs" / "api.md"
OPENING = """\
# The public Python names

Generated from the docstrings by `dev/write_api_reference.py`; do not edit.

These names, and no others, are `headwise`'s interface in Python: what they take and return changes
only with a line in the changelog. Each is imported when it is first used, so `import headwise`
costs nothing. Bad input raises `headwise.UsageError`, a `ValueError` whose message is one line with
the rule, the value and the choices.
"""


def reference() -> str:
    """The whole page."""
    names = sorted(headwise.__all__, key=str.lower)
    things = {name: getattr(headwise, name) for name in names}
    table = [f"| [`{n}`](#{_anchor(n, t)}) | {_first(t)} |" for n, t in things.items()]
    sections = [_section(name, thing) for name, thing in things.items()]
    return "\n".join([OPENING, "| name | what it is |", "|---|---|", *table, *sections]) + "\n"


def _heading(name: str, thing: Any) -> str:
    """With what it is, since a class and a function may differ in their case alone."""
    return f"headwise.{name}, a {'class' if inspect.isclass(thing) else 'function'}"


def _anchor(name: str, thing: Any) -> str:
    return _heading(name, thing).lower().replace(".", "").replace(",", "").replace(" ", "-")


def _section(name: str, thing: Any) -> str:
    lines = [
        f"\n## {_heading(name, thing)}\n",
        f"```text\n{_called(name, thing)}\n```\n",
        _prose(thing),
    ]
    if inspect.isclass(thing):
        lines += _fields(thing)
        methods = list(_methods(thing))
        if methods:
            lines += ["", "| method or property | what it is |", "|---|---|"]
            lines += [f"| `{_cell(call)}` | {_first(method)} |" for call, method in methods]
    return "\n".join(lines)


# ---- signatures


def _called(name: str, thing: Any) -> str:
    """How it is called, one argument per line where one line is too short."""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return f"{name}(message)"
    arguments = _arguments(thing)
    line = f"{name}({', '.join(arguments)})"
    if len(line) <= 96:
        return line
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), ")"])


def _arguments(thing: Any) -> list[str]:
    try:
        parameters = list(inspect.signature(thing).parameters.values())
    except ValueError:
        return []
    found: list[str] = []
    keyword = False
    for parameter in parameters:
        if parameter.name == "self":
            continue
        starred = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.kind == parameter.KEYWORD_ONLY and not keyword:
            found.append("*")
        keyword |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        text = "**" * (parameter.kind == parameter.VAR_KEYWORD) + parameter.name
        text = "*" + text if parameter.kind == parameter.VAR_POSITIONAL else text
        text += f": {_annotation(parameter)}" * (parameter.annotation is not parameter.empty)
        if not starred and parameter.default is not parameter.empty:
            text += f" = {_default(parameter.default)}"
        found.append(text)
    return found


def _annotation(parameter: inspect.Parameter) -> str:
    given = parameter.annotation
    return given if isinstance(given, str) else getattr(given, "__name__", str(given))


def _default(value: Any) -> str:
    shown = repr(value)
    return re.sub(r" object at 0x\w+|<class '([\w.]+)'>|<factory>", r"\1", shown) or "..."


# ---- docstrings


def _first(thing: Any) -> str:
    """The first sentence of a docstring, in one line."""
    text = " ".join(inspect.getdoc(thing).split("\n\n")[0].split()) if inspect.getdoc(thing) else ""
    return _cell(text.partition(". ")[0].rstrip(".")) + "."


def _prose(thing: Any) -> str:
    """A docstring as Markdown: its examples are fenced."""
    text = inspect.getdoc(thing) or ""
    return re.sub(
        r"((?:^(?:>>>|\.\.\.).*\n?(?:(?!>>>|\.\.\.|\n).+\n?)*)+)",
        lambda example: f"```python\n{example[0].rstrip()}\n```\n",
        text,
        flags=re.M,
    ).rstrip()


def _fields(thing: Any) -> list[str]:
    """The fields of a dataclass with what the comment behind each says."""
    if not dataclasses.is_dataclass(thing):
        return []
    comments: dict[str, str] = {}
    for base in reversed(thing.__mro__):
        if dataclasses.is_dataclass(base):
            comments |= _comments(inspect.getsource(base))
    rows = [
        f"| `{f.name}` | {_cell(str(f.type))} | {_cell(comments.get(f.name, ''))} |"
        for f in dataclasses.fields(thing)
    ]
    return ["", "| field | type | |", "|---|---|---|", *rows] if rows else []


def _comments(source: str) -> dict[str, str]:
    """Field -> its comment: behind it, or in the lines straight above it."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in source.splitlines():
        field = re.match(r"    (\w+): [^#]+(?:#\s*(.+))?$", line)
        comment = re.match(r"    # (?!----)(.+)", line)
        if field:
            found[field[1]] = field[2] or " ".join(above)
        above = [*above, comment[1]] if comment else []
        if line.startswith("    def "):
            break
    return found


def _methods(thing: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that the package itself wrote for a class."""
    for base in thing.__mro__:
        if not base.__module__.startswith("headwise."):
            continue
        for name, value in vars(base).items():
            known = isinstance(value, property | classmethod | staticmethod)
            if name.startswith("_") or not (known or inspect.isfunction(value)):
                continue
            plain = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if not inspect.getdoc(plain):
                continue
            arguments = [a for a in _arguments(plain) if a not in ("cls", "self")]
            short = [re.sub(r": .*?(?= = |$)", "", argument) for argument in arguments]
            call = name if isinstance(value, property) else f"{name}({', '.join(short)})"
            yield call, plain


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    FILE.write_text(reference())
    print(FILE)
