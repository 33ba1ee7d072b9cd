"""Weights & Biases, online or offline as its own settings say (WANDB_MODE, WANDB_DIR).

A run's id there is its id here, and the last entry of its summary says that it is complete. Offline
its file is looked at, and half a run, left by a kill, is written again; `wandb sync` sends them.
Online the server is asked, and half a run is continued at the step it has reached.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.errors import UsageError

if TYPE_CHECKING:
    from headwise.tracking import TrackedRun

EXPORTED = "headwise_exported"  # the last key of the summary of a run that is complete
BLOCK, HEADER = 32768, 7  # bytes of a block of an offline file, and of the header it begins with
PATIENCE = 60.0  # seconds until a file that was finished is there
OFFLINE = ("offline", "dryrun")


class WeightsAndBiases:
    """Runs of a project, `PROJECT` or `ENTITY/PROJECT`."""

    def __init__(self, project: str = "") -> None:
        import wandb

        if wandb.__file__ is None:  # a folder of its runs, which Python takes for a package
            raise ModuleNotFoundError("No module named 'wandb'", name="wandb")
        entity, _, self.project = (project or "headwise").rpartition("/")
        self.entity = entity or None
        self.folder = Path(os.environ.get("WANDB_DIR") or ".")
        settings = wandb.setup().settings
        self.offline = settings.mode in OFFLINE
        if settings.mode == "disabled":
            raise UsageError("Weights & Biases is switched off (wandb online switches it on)")
        if not os.access(self.folder, os.W_OK):
            raise UsageError(f"Weights & Biases cannot write into {self.folder} (WANDB_DIR)")
        # Asked here, since its own question would wait for an answer in the middle of training.
        if not self.offline and not wandb.login(prompt=False):
            raise UsageError(
                "Weights & Biases knows no key here: wandb login, or WANDB_MODE=offline and later "
                "wandb sync"
            )

    def __call__(self, run: TrackedRun) -> bool:
        import wandb

        complete = self._complete_offline if self.offline else self._complete_online
        if complete(run.id):
            return False
        made = wandb.init(
            entity=self.entity,
            project=self.project,
            id=run.id,
            name=run.name,
            group=run.group or None,
            config=dict(run.config),
            dir=str(self.folder),
            resume="allow",
            reinit="finish_previous",
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, disable_git=True
            ),
        )
        reached = made.step
        for step, values in run.history:
            if step >= reached:
                made.log(dict(values), step=step)
        made.summary.update(dict(run.summary))
        made.summary.update({EXPORTED: True})
        folder = Path(made.dir).parent
        made.finish()
        # The file is written by another process, now and then after `finish` has returned.
        end = time.monotonic() + PATIENCE
        while self.offline and not _is_complete(folder):
            if time.monotonic() > end:
                raise RuntimeError(f"wandb has not written {folder} in {PATIENCE:.0f} seconds")
            time.sleep(0.01)
        return True

    def _complete_offline(self, run_id: str) -> bool:
        """Whether a run is complete; half ones are removed."""
        found = list((self.folder / "wandb").glob(f"offline-run-*-{run_id}"))
        if any(map(_is_complete, found)):
            return True
        for folder in found:
            shutil.rmtree(folder)
        return False

    def _complete_online(self, run_id: str) -> bool:
        import wandb

        path = "/".join(filter(None, (self.entity, self.project, run_id)))
        try:
            return EXPORTED in dict(wandb.Api().run(path).summary)
        except (ValueError, wandb.errors.CommError):  # there is no such run, or no such project
            return False


def _is_complete(folder: Path) -> bool:
    """Whether an offline run's file has the last entry, which may lie across two blocks."""
    for file in folder.glob("run-*.wandb"):
        data = file.read_bytes()
        text = b"".join(
            data[start + HEADER * (start > 0) : start + BLOCK]
            for start in range(0, len(data), BLOCK)
        )
        if EXPORTED.encode() in text:
            return True
    return False
