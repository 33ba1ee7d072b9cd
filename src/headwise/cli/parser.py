"""The parser of every command: its errors are one line."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from headwise.errors import UsageError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UsageErrors: one line, exit code 2, nearest names."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but -50% behind an option is its value."""
        words: list[str] = []
        for word in args or ():
            if words and words[-1].startswith("--") and re.match(r"-[\d.]+%", word):
                words[-1] += f"={word}"
            else:
                words.append(word)
        return super().parse_known_args(words, namespace)
