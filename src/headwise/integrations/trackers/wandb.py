"""Weights & Biases, online or offline as its own settings say (WANDB_MODE, WANDB_DIR).

A run's id there is its id here. Offline, a run that is complete has a mark beside its file, and
`wandb sync` sends it; half a run, left by a kill, is written again. Online the server is asked
which runs have finished, and half a run is continued at the step it has reached.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.errors import UsageError

if TYPE_CHECKING:
    from headwise.tracking import TrackedRun

COMPLETE = "headwise.complete"  # in the folder of an offline run
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
        folder = Path(made.dir).parent
        made.finish()
        if self.offline:
            (folder / COMPLETE).touch()
        return True

    def _complete_offline(self, run_id: str) -> bool:
        """Whether a run is complete; half ones are removed."""
        found = list((self.folder / "wandb").glob(f"offline-run-*-{run_id}"))
        for folder in found:
            if (folder / COMPLETE).exists():
                return True
        for folder in found:
            shutil.rmtree(folder)
        return False

    def _complete_online(self, run_id: str) -> bool:
        import wandb

        path = "/".join(filter(None, (self.entity, self.project, run_id)))
        try:
            return wandb.Api().run(path).state == "finished"
        except (ValueError, wandb.errors.CommError):  # there is no such run, or no such project
            return False
