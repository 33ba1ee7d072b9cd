"""trackio, in its folder on this machine (TRACKIO_DIR); `trackio sync` shares it.

A run is written under a name that says it is unfinished, and takes its own when it is complete.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from headwise.errors import UsageError

if TYPE_CHECKING:
    from headwise.tracking import TrackedRun

UNFINISHED = " (unfinished)"


class _Hushed(io.TextIOBase):
    """Standard output without what this thread prints: several lines per run."""

    def __init__(self) -> None:
        self.thread, self.stdout = threading.get_ident(), sys.stdout

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self.thread else self.stdout.write(text)


class Trackio:
    """Runs of a project."""

    def __init__(self, project: str = "") -> None:
        import trackio

        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            if os.environ.get(name):
                raise UsageError(
                    f"runs are written into a project of this machine, and {name} is set: unset it "
                    "and share the project by trackio sync"
                )
        self.project = project or "headwise"
        self.api: Any = trackio.Api()

    def __call__(self, run: TrackedRun) -> bool:
        import trackio

        known = self._known()
        if run.name in known:
            return False
        unfinished = run.name + UNFINISHED
        if unfinished in known:
            known[unfinished].delete()
        with contextlib.redirect_stdout(_Hushed()):
            made = trackio.init(
                self.project,
                name=unfinished,
                group=run.group or None,
                config={key: value for key, value in run.config.items() if key[:1] != "_"},
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
            for step, values in run.history:
                made.log(dict(values), step=step)
            results = {f"summary/{key}": value for key, value in run.results.items()}
            made.log(results, step=run.last_step)
            trackio.finish()
        self._known()[unfinished].rename(run.name)
        return True

    def _known(self) -> dict[str, Any]:
        """The project's runs by name."""
        try:
            return {run.name: run for run in self.api.runs(self.project)}
        except ValueError:  # there is no such project yet
            return {}
