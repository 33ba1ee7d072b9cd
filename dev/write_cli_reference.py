"""Write docs/cli.md, the command-line reference, from the parser itself.

    PYTHONPATH=src python dev/write_cli_reference.py

tests/cli/test_reference.py compares the file with what is generated. The tables are made here and
not by argparse, whose help texts differ between versions of Python.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from headwise.cli.arguments import parser

FILE = Path(__file__).parent.parent / "docs" / "cli.md"
OPENING = """\
# The command line

Generated from the program by `dev/write_cli_reference.py`; do not edit.

`headwise COMMAND --help` prints the same. Every command takes `--json`: one JSON object as the last
line of its output. Exit codes: 0 done, 1 failed, 2 bad usage. A line that starts with
`headwise: error:` states the rule, the value and the choices.

Ctrl-C, SIGTERM and SIGHUP save what is being trained, after the block of at most 25 steps that is
under way (`pretrain`: after the step), and the same command resumes. A second one ends the command
at once. The exit code is then 130, 143 or 129. A signal that is ignored (`nohup`) stays so.
"""


def reference() -> str:
    """The whole page."""
    commands = _commands(parser())
    contents = [f"| [`{name}`](#headwise-{name}) | {c.description} |" for name, c in commands]
    table = ["| command | what it does |", "|---|---|", *contents]
    return "\n".join([OPENING, *table, *(_section(name, c) for name, c in commands)]) + "\n"


def _commands(top: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser]]:
    subparsers = [a for a in top._actions if isinstance(a, argparse._SubParsersAction)]
    return [item for action in subparsers for item in action.choices.items()]


def _section(name: str, command: argparse.ArgumentParser) -> str:
    shown = [a for a in command._actions if a.dest not in ("help", "json")]
    places = [_place(a) for a in shown if not a.option_strings]
    usage = " ".join(["headwise", name, *places, "[options]"])
    lines = [f"\n## headwise {name}\n", f"{command.description}\n", f"```\n{usage}\n```\n"]
    lines += ["| argument | meaning |", "|---|---|"]
    lines += [f"| `{_spelled(a)}` | {_cell(a.help or '')} |" for a in shown]
    if command.epilog:
        lines += ["", "```", *_examples(command.epilog), "```"]
    return "\n".join(lines)


def _examples(epilog: str) -> list[str]:
    """The commands of `example:  COMMAND`, one per line; another label becomes a comment."""
    lines = []
    for line in epilog.splitlines():
        label, _, command = line.partition(": ")
        lines.append(command.strip() if label == "example" else f"{command.strip()}  # {label}")
    return lines


def _place(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest).upper()
    name += " ..." if action.nargs in ("+", "*") else ""
    return f"[{name}]" if action.nargs in ("?", "*") else name


def _spelled(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest).upper()
    name = action.option_strings[-1]
    if action.nargs == 0:
        return name
    value = str(action.metavar or action.dest.upper())
    return f"{name} {value}" + (" ..." if action.nargs in ("+", "*") else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("%%", "%").replace("\n", " ")


if __name__ == "__main__":
    FILE.write_text(reference())
    print(FILE)
