"""MLflow with a database of its own, read back by its client."""

from pathlib import Path
from typing import Any

import pytest
from support.tracked_rows import DECODER, DIVERGED, FINISHED, HISTORY, SMALL, tracked_store

from headwise.errors import UsageError
from headwise.tracking import Exported, export, find, tracked

pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")  # mlflow-skinny has no database
# MLflow's own tables use a way to load that its SQLAlchemy is about to give up.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for all: making its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def experiment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", request.node.name)
    return request.node.name


def runs(uri: str, experiment: str) -> dict[str, Any]:
    """The runs of an experiment that are not deleted, by their tag."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    assert len({run.data.tags["headwise.id"] for run in found}) == len(found)
    return {run.data.tags["headwise.id"]: run for run in found}


def history(uri: str, run: Any) -> dict[int, dict[str, float]]:
    from mlflow import MlflowClient

    found: dict[int, dict[str, float]] = {}
    for key in run.data.metrics:
        if not key.startswith("summary/"):
            for metric in MlflowClient(uri).get_metric_history(run.info.run_id, key):
                found.setdefault(metric.step, {})[key] = metric.value
    return found


def test_run_has_history_parameters_and_summary(tmp_path: Path, uri: str, experiment: str) -> None:
    assert export(tracked_store(tmp_path / "s"), find("mlflow", uri)).added == 4
    found = runs(uri, experiment)
    for run_id in (SMALL.id, DIVERGED.id, DECODER.id):
        assert history(uri, found[run_id]) == HISTORY[run_id]
    small = found[SMALL.id]
    assert small.data.params["lr"] == "0.01"
    assert small.data.params["windows"] == "[0]"
    assert small.data.params["task"] == "farthest"
    assert small.data.metrics["summary/held_out"] == 0.55
    assert small.data.tags["device"] == "cpu"
    assert small.data.tags["headwise.experiment"] == "mine"
    assert small.info.status == "FINISHED"
    assert (small.info.start_time, small.info.end_time) == (
        1000 * FINISHED - 7500,
        1000 * FINISHED,
    )


def test_run_is_made_once_and_half_a_run_again(tmp_path: Path, uri: str, experiment: str) -> None:
    store = tracked_store(tmp_path / "s")
    tracker: Any = find("mlflow", uri)
    half = tracker.client.create_run(tracker.experiment, tags={"headwise.id": SMALL.id})
    tracker.client.log_metric(half.info.run_id, "train_loss", 0.9, step=22)
    assert export(store, tracker) == Exported(added=4, already=0)
    assert export(store, find("mlflow", uri)) == Exported(added=0, already=4)
    found = runs(uri, experiment)
    assert len(found) == 4
    assert history(uri, found[SMALL.id]) == HISTORY[SMALL.id]


def test_curve_of_more_points_than_a_batch_is_complete(uri: str, experiment: str) -> None:
    row = {"id": "7b", "epoch": 3, "curve": [1 / i for i in range(1, 2101)], "held_out_curve": []}
    find("mlflow", uri)(tracked(row))
    found = history(uri, runs(uri, experiment)["7b"])
    assert found == {3 * i: {"train_loss": 1 / i} for i in range(1, 2101)}


@pytest.mark.parametrize("uri_of_none", ["folder", "sqlite:////dev/null/x.db", "nosuch://x"])
def test_place_that_cannot_be_used_is_refused(uri_of_none: str) -> None:
    with pytest.raises(UsageError, match="MLflow"):
        find("mlflow", uri_of_none)
