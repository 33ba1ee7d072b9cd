"""trackio in a folder of its own, read back by itself."""

from pathlib import Path
from typing import Any

import pytest
from support.tracked_rows import DECODER, DIVERGED, HISTORY, SMALL, tracked_store

from headwise.errors import UsageError
from headwise.tracking import Exported, export, find

pytest.importorskip("trackio")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where trackio keeps its projects: it reads TRACKIO_DIR when it is imported."""
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    return tmp_path


def logs(project: str, run: Any) -> dict[int, dict[str, float]]:
    from trackio.sqlite_storage import SQLiteStorage

    found: dict[int, dict[str, float]] = {}
    for entry in SQLiteStorage.get_logs(project, run.name, run_id=run.id):
        values = {key: v for key, v in entry.items() if key not in ("step", "timestamp")}
        found.setdefault(entry["step"], {}).update(values)
    return found


def test_run_has_history_configuration_and_summary(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import trackio

    assert export(tracked_store(folder / "s"), find("trackio", "shapes")).added == 4
    assert capsys.readouterr().out == ""
    runs = list(trackio.Api().runs("shapes"))
    assert len(runs) == 4
    for run_id in (SMALL.id, DIVERGED.id, DECODER.id):
        (run,) = (run for run in runs if run.name.endswith(run_id))
        found = {
            step: {key: v for key, v in values.items() if not key.startswith("summary/")}
            for step, values in logs("shapes", run).items()
        }
        assert found == HISTORY[run_id]
    (small,) = (run for run in runs if run.name.endswith(SMALL.id))
    assert small.config["lr"] == 0.01
    assert small.config["_Group"] == "mine"
    assert logs("shapes", small)[66]["summary/held_out"] == 0.55


def test_run_is_made_once_and_half_a_run_again(folder: Path) -> None:
    import trackio

    store = tracked_store(folder / "s")
    assert export(store, find("trackio", "half")) == Exported(added=4, already=0)
    (small,) = (run for run in trackio.Api().runs("half") if run.name.endswith(SMALL.id))
    small.rename(f"{small.name} (unfinished)")  # as a kill leaves it
    assert export(store, find("trackio", "half")) == Exported(added=1, already=3)
    names = [run.name for run in trackio.Api().runs("half")]
    assert len(names) == 4
    assert not any("unfinished" in name for name in names)


def test_project_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    with pytest.raises(UsageError, match=r"TRACKIO_SPACE_ID is set: .* share the .* trackio sync"):
        find("trackio")
