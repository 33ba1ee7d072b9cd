"""What tests of the theory's checks share: a command in this process, and a row made by hand."""

import contextlib
import io
from typing import Any

from headwise.cli import main
from headwise.theory.checks.check import Check


def command(*words: str) -> tuple[int, str, str]:
    """A command in this process: exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return code, out.getvalue(), err.getvalue()


def row_of(kind: Any, bound: float, measured: float, **more: Any) -> dict[str, Any]:
    """The row of one check of a statement that nobody made."""
    named = {"statement": "Fact 9", "what": "this", "at": {"d": 3}, "source": "paper", **more}
    return Check(kind=kind, bound=bound, measured=measured, **named).row()
