"""MLflow: a server, or a database of its own such as sqlite:///mlflow.db.

A run carries the tag `headwise.id`. One that is not finished, left by a kill, is made again. The
experiment is that of MLFLOW_EXPERIMENT_NAME, else headwise.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from headwise.errors import UsageError, one_line

if TYPE_CHECKING:
    from headwise.tracking import TrackedRun

MOST_METRICS, MOST_PARAMS = 1000, 100  # of one batch
MOST_TEXT = 6000  # characters of a parameter
TAG = "headwise.id"


class MLflow:
    """Runs of an experiment at a tracking URI."""

    def __init__(self, uri: str = "") -> None:
        from mlflow import MlflowClient

        if uri and ":" not in uri and uri != "databricks":
            raise UsageError(
                "MLflow's destination is a tracking URI, such as sqlite:///mlflow.db or "
                f"http://host:5000, got {uri}"
            )
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "headwise"
        try:
            self.client: Any = MlflowClient(uri or None)
            found = self.client.get_experiment_by_name(name)
            self.experiment = found.experiment_id if found else self.client.create_experiment(name)
        except ModuleNotFoundError:
            raise
        except Exception as e:  # its database's errors are of many classes
            where = f" at {uri}" if uri else ""
            raise UsageError(f"MLflow{where} cannot be used: {one_line(e)}") from None

    def __call__(self, run: TrackedRun) -> bool:
        from mlflow.entities import Metric, Param

        client, when = self.client, round(1000 * run.finished)
        found = client.search_runs([self.experiment], filter_string=f"tags.`{TAG}` = '{run.id}'")
        if any(one.info.status == "FINISHED" for one in found):
            return False
        for one in found:
            client.delete_run(one.info.run_id)
        started = when - round(1000 * run.results.get("seconds", 0.0))
        tags = {TAG: run.id, "headwise.experiment": run.group}
        tags |= {key: v for key, v in run.summary.items() if isinstance(v, str) and len(v) < 500}
        made = client.create_run(
            self.experiment, start_time=started, tags=tags, run_name=run.name
        ).info.run_id
        params = [Param(key, _text(value)) for key, value in run.config.items()]
        metrics = [
            Metric(key, value, when, step)
            for step, values in run.history
            for key, value in values.items()
        ]
        metrics += [Metric(f"summary/{k}", v, when, run.last_step) for k, v in run.results.items()]
        for first in range(0, len(params), MOST_PARAMS):
            client.log_batch(made, params=params[first : first + MOST_PARAMS])
        for first in range(0, len(metrics), MOST_METRICS):
            client.log_batch(made, metrics=metrics[first : first + MOST_METRICS])
        client.set_terminated(made, "FINISHED", end_time=when)
        return True


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:MOST_TEXT]
