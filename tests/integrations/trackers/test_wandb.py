"""Weights & Biases in offline mode, its files read back."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import HEADWISE
from support.tracked_rows import DECODER, DIVERGED, HISTORY, SMALL, TAKEN, tracked_store

from headwise.integrations.trackers.wandb import _is_complete
from headwise.tracking import Exported, export, find, tracked

pytest.importorskip("wandb")
BLOCK = 32768


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    return tmp_path


def messages(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: a log of LevelDB's form behind seven bytes of its own."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        rest = BLOCK - place % BLOCK
        if rest < 7:
            place += rest
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # complete, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def read(folder: Path, run_id: str) -> dict[str, Any]:
    """What a run's file says: its name, configuration, history by step, and summary."""
    (file,) = folder.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")
    found: dict[str, Any] = {"history": {}, "summary": {}, "config": {}}
    for record in messages(file):
        match record.WhichOneof("record_type"):
            case "run":
                found["name"], found["group"] = record.run.display_name, record.run.run_group
                found["project"], found["id"] = record.run.project, record.run.run_id
                for item in record.run.config.update:
                    found["config"][item.key] = json.loads(item.value_json)
            case "history":
                items = {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }
                step = items["_step"]
                values = {key: v for key, v in items.items() if key[0] != "_"}
                if values:
                    found["history"].setdefault(step, {}).update(values)
            case "summary":
                for item in record.summary.update:
                    key = item.key or ".".join(item.nested_key)
                    found["summary"][key] = json.loads(item.value_json)
    return found


def test_offline_run_has_history_configuration_and_summary(offline: Path) -> None:
    store = tracked_store(offline / "s")
    assert export(store, find("wandb", "me/shapes")) == Exported(added=4, already=0)
    for run_id in (SMALL.id, DIVERGED.id, DECODER.id, TAKEN.id):
        found = read(offline, run_id)
        assert found["history"] == HISTORY[run_id]
        assert (found["id"], found["project"]) == (run_id, "shapes")
        assert found["group"] == ("" if run_id == DECODER.id else "mine")
    small = read(offline, SMALL.id)
    assert small["config"]["lr"] == 0.01
    assert small["config"]["windows"] == [0]
    assert small["summary"]["held_out"] == 0.55
    assert small["summary"]["seconds"] == 7.5
    assert small["summary"]["status"] == "done"
    assert read(offline, DIVERGED.id)["summary"]["status"] == "diverged"


def test_offline_run_is_written_once_and_half_a_run_again(offline: Path) -> None:
    store, tracker = tracked_store(offline / "s"), find("wandb")
    export(store, tracker)
    assert export(store, find("wandb")) == Exported(added=0, already=4)
    (file,) = offline.glob(f"wandb/offline-run-*-{SMALL.id}/run-*.wandb")
    file.write_bytes(file.read_bytes()[:-900])  # as a kill leaves it
    assert export(store, find("wandb")) == Exported(added=1, already=3)
    assert read(offline, SMALL.id)["history"] == HISTORY[SMALL.id]
    assert len(list(offline.glob("wandb/offline-run-*"))) == 4


def test_offline_run_of_several_blocks_is_complete(offline: Path) -> None:
    curve = [1 / i for i in range(1, 401)]
    run = tracked({"id": "7b", "epoch": 3, "curve": curve, "held_out_curve": []})
    assert find("wandb")(run) is True
    assert find("wandb")(run) is False
    (file,) = offline.glob("wandb/offline-run-*-7b/run-7b.wandb")
    assert file.stat().st_size > 2 * BLOCK
    found = read(offline, "7b")["history"]
    assert found == {3 * i: {"train_loss": 1 / i} for i in range(1, 401)}


@pytest.mark.parametrize("cut", range(1, 17))
def test_last_entry_across_two_blocks_is_found(tmp_path: Path, cut: int) -> None:
    entry = b"headwise_exported"
    data = bytes(BLOCK - cut) + entry
    split = data[:BLOCK] + bytes(7) + data[BLOCK:]
    (tmp_path / "run-7b.wandb").write_bytes(split)
    assert _is_complete(tmp_path)
    (tmp_path / "run-7b.wandb").write_bytes(split[:-1])
    assert not _is_complete(tmp_path)


@pytest.mark.parametrize(
    ("mode", "folder", "error"),
    [
        ("online", ".", "Weights & Biases knows no key here: wandb login, or WANDB_MODE=offline"),
        ("disabled", ".", "Weights & Biases is switched off"),
        ("offline", "none", "Weights & Biases cannot write into"),
    ],
)
def test_use_without_key_or_place_is_one_line(
    tmp_path: Path, mode: str, folder: str, error: str
) -> None:
    """In a process of its own, since wandb reads its settings once."""
    tracked_store(tmp_path / "s")
    place = str(tmp_path / folder)
    own = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_DIR": place}
    rest = {key: v for key, v in os.environ.items() if not key.startswith("WANDB_")}
    done = subprocess.run(
        [*HEADWISE, "export", "--to", "wandb", "--store", str(tmp_path / "s")],
        env={**rest, **own, "WANDB_MODE": mode, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"headwise: error: {error}")
    assert "Traceback" not in done.stderr
