"""The command line: own options, two dashes, `-m` and a script of nanochat's with its options."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import runpy
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from headwise.errors import UsageError
from headwise.integrations.nanochat.hook import use


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UsageErrors: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:300]}; see python -m headwise.integrations.nanochat --help")


def parser() -> argparse.ArgumentParser:
    """The options before the dashes."""
    known = Parser(
        prog="python -m headwise.integrations.nanochat",
        description="Run one of nanochat's scripts with other attention heads.",
        epilog=(
            "example: python -m headwise.integrations.nanochat --num-heads 3 --head-dim 96 -- -m "
            "scripts.base_train --depth=4"
        ),
    )
    known.add_argument("--num-heads", type=int, help="query heads; nanochat's number unless given")
    known.add_argument(
        "--head-dim",
        type=int,
        help="rank of a head; with --num-heads alone dim / heads, else nanochat's",
    )
    known.add_argument(
        "--v-head-dim", type=int, help="width of a head's values; the rank unless given"
    )
    known.add_argument(
        "--num-kv-heads", type=int, help="KV heads; as many as query heads unless given"
    )
    known.add_argument(
        "--logit-scale",
        type=float,
        help="factor of the scores; nanochat's 1.44 / sqrt(rank) unless given",
    )
    known.add_argument(
        "--max-logit", type=float, help="instead: the largest score, held when the rank changes"
    )
    return known


def main(words: Sequence[str]) -> int:
    """Run one of nanochat's scripts; returns the exit code."""
    own, script = list(words), []
    if "--" in own:
        dashes = own.index("--")
        own, script = own[:dashes], own[dashes + 1 :]
    try:
        heads = vars(parser().parse_args(own))
        if len(script) < 2 or script[0] != "-m":
            raise UsageError(
                "behind -- comes -m and a module of nanochat's, such as scripts.base_train, got "
                f"{' '.join(script)[:80]!r}"
            )
        with use(**heads), _script_arguments(script[1:]):
            _check_module(script[1])
            runpy.run_module(script[1], run_name="__main__", alter_sys=True)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _check_module(name: str) -> None:
    """Refuse a module that is not there; what it raises itself when it runs is its own."""
    try:
        there = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        there = False
    if not there:
        raise UsageError(f"there is no module {name[:80]!r}; nanochat's are scripts.NAME")


@contextlib.contextmanager
def _script_arguments(words: Sequence[str]) -> Iterator[None]:
    """sys.argv while a script runs."""
    before, sys.argv = sys.argv, list(words)
    try:
        yield
    finally:
        sys.argv = before
