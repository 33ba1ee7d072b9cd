"""Commands in processes of their own."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator


def _hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def started(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A command in a process group of its own, of which nothing is left at the end.

    It hears Ctrl-C as in a terminal, also where the tests themselves do not: a shell's background
    jobs ignore it and pass that on.
    """
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_hear_ctrl_c,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
