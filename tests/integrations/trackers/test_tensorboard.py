"""TensorBoard's files, read by the documented format of records and of protobuf's wire, and by
TensorBoard itself where it is installed."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tracked_rows import DECODER, DIVERGED, FINISHED, HISTORY, SMALL, tracked_store

from headwise.errors import UsageError
from headwise.integrations.trackers.tensorboard import FILE, TensorBoard, crc32c, record
from headwise.tracking import Exported, export, tracked

# TFRecord: length (8 bytes), its checksum (4), data, its checksum (4); checksums are rotated right
# by 15 bits and raised by a constant.
RAISED = 0xA282EAD8


def records(data: bytes) -> Iterator[bytes]:
    """The data of each record, its checksums compared."""
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        body = data[12 : 12 + length]
        assert len(body) == length
        for part, found in ((data[:8], data[8:12]), (body, data[12 + length : 16 + length])):
            rotated = (int.from_bytes(found, "little") - RAISED) % 2**32
            assert (rotated << 15 | rotated >> 17) % 2**32 == crc_of(part)
        yield body
        data = data[16 + length :]


def crc_of(data: bytes) -> int:
    """CRC-32C bit by bit: polynomial division, without a table."""
    crc = 2**32 - 1
    for byte in data:
        for bit in range(8):
            low = (crc ^ byte >> bit) & 1
            crc >>= 1
            if low:
                crc ^= 0x82F63B78
    return crc ^ (2**32 - 1)


def fields(data: bytes) -> list[tuple[int, Any]]:
    """A message's fields in order: number and value, text and messages as bytes."""

    def number() -> int:
        nonlocal data
        value = shift = 0
        while True:
            byte, data = data[0], data[1:]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    found: list[tuple[int, Any]] = []
    while data:
        key = number()
        match key & 7:
            case 0:
                value: Any = number()
            case 1:
                (value,), data = struct.unpack("<d", data[:8]), data[8:]
            case 5:
                (value,), data = struct.unpack("<f", data[:4]), data[4:]
            case 2:
                size = number()
                value, data = data[:size], data[size:]
            case kind:
                raise AssertionError(f"kind {kind}")
        found.append((key >> 3, value))
    return found


def scalars(path: Path) -> dict[int, dict[str, float]]:
    """A file's scalars by step and tag."""
    found: dict[int, dict[str, float]] = {}
    for body in records(path.read_bytes()):
        event = dict(fields(body))
        for _, value in fields(event.get(5, b"")):
            parts = dict(fields(value))
            if 2 in parts:
                found.setdefault(event[2], {})[parts[1].decode()] = parts[2]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export(tracked_store(tmp_path / "s"), TensorBoard(str(tmp_path / "tb")))
    return tmp_path / "tb"


def file_of(folder: Path, run_id: str) -> Path:
    return next(folder.rglob(f"*{run_id}/{FILE}"))


def test_checksum_is_the_known_one() -> None:
    """Vectors of RFC 3720, B.4; the other common CRC differs."""
    known = {
        bytes(32): 0x8A9136AA,
        b"\xff" * 32: 0x62A8AB43,
        bytes(range(32)): 0x46DD794E,
        b"123456789": 0xE3069283,
    }
    for data, crc in known.items():
        assert crc32c(data) == crc_of(data) == crc != zlib.crc32(data)


def test_records_are_read_back_and_a_flipped_bit_is_found() -> None:
    data = record(b"first") + record(b"")
    assert list(records(data)) == [b"first", b""]
    for place in range(len(data) - 4):  # the last four are the checksum of nothing
        flipped = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with pytest.raises((AssertionError, struct.error)):
            list(records(flipped))


@pytest.mark.parametrize("run_id", [SMALL.id, DIVERGED.id, DECODER.id])
def test_curves_stand_at_their_steps(folder: Path, run_id: str) -> None:
    found = scalars(file_of(folder, run_id))
    curves = {
        step: {tag: value for tag, value in values.items() if not tag.startswith("summary/")}
        for step, values in found.items()
    }
    assert {step: values for step, values in curves.items() if values} == {
        step: pytest.approx(values) for step, values in HISTORY[run_id].items()
    }


def test_summary_stands_at_the_last_step(folder: Path) -> None:
    last = scalars(file_of(folder, SMALL.id))[66]
    assert last["summary/held_out"] == pytest.approx(0.55)
    assert last["summary/params"] == SMALL.params
    assert "summary/task_points" not in last


def test_file_begins_with_its_version_and_has_the_configuration(folder: Path) -> None:
    first, second, *_ = records(file_of(folder, SMALL.id).read_bytes())
    assert fields(first) == [(1, FINISHED), (3, b"brain.Event:2")]
    value = dict(fields(dict(fields(dict(fields(second))[5]))[1]))
    assert value[1] == b"_hparams_/session_start_info"
    plugin = dict(fields(dict(fields(value[9]))[1]))
    assert plugin[1] == b"hparams"
    start = fields(dict(fields(plugin[2]))[3])
    config = {
        dict(fields(item))[1].decode(): fields(dict(fields(item)).get(2, b""))[0]
        for number, item in start
        if number == 1
    }
    assert config["lr"] == (2, 0.01)
    assert config["seed"] == (2, 1.0)
    assert config["causal"] == (4, 0)
    assert config["task"] == (3, b"farthest")
    assert config["windows"] == (3, b"[0]")
    assert dict(start)[5] == FINISHED - 7.5
    assert dict(start)[4].decode().endswith(SMALL.id)  # a group of its own


def test_run_exported_again_is_the_same_file(folder: Path, tmp_path: Path) -> None:
    store = tracked_store(tmp_path / "again")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert len(before) == 4
    assert export(store, TensorBoard(str(folder))) == Exported(added=0, already=4)
    torn = file_of(folder, SMALL.id)
    torn.write_bytes(before[torn][:-3])
    assert export(store, TensorBoard(str(folder))) == Exported(added=1, already=3)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("value", [1e300, -1e300, 2**70])
def test_number_beyond_32_bits_is_the_largest(tmp_path: Path, value: float) -> None:
    run = tracked({"id": "7b", "epoch": 5, "curve": [value], "held_out_curve": []})
    TensorBoard(str(tmp_path))(run)
    assert abs(scalars(file_of(tmp_path, "7b"))[5]["train_loss"]) in (
        pytest.approx(3.4028234663852886e38),
        2.0**70,
    )


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(UsageError, match=r"^the folder .* cannot be made: "):
            TensorBoard(str(place))


def test_tensorboard_reads_the_same(folder: Path) -> None:
    """Its own reader, the data of its scalar page and of its hyperparameter page."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    for run_id in (SMALL.id, DIVERGED.id, DECODER.id):
        reader = EventAccumulator(str(file_of(folder, run_id).parent))
        reader.Reload()
        found: dict[int, dict[str, float]] = {}
        for tag in reader.Tags()["tensors"]:
            if not tag.startswith(("summary/", "_hparams_")):
                for event in reader.Tensors(tag):
                    value = event.tensor_proto.float_val[0]
                    found.setdefault(event.step, {})[tag] = value
                    assert event.wall_time == FINISHED
        for tag in reader.Tags()["scalars"]:
            if not tag.startswith("summary/"):
                for event in reader.Scalars(tag):
                    found.setdefault(event.step, {})[tag] = event.value
        assert found == {step: pytest.approx(values) for step, values in HISTORY[run_id].items()}
        content = reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        start = metadata.parse_session_start_info_plugin_data(content)
        assert start.hparams["lr"].number_value == pytest.approx(
            0.01 if run_id != DECODER.id else 3e-3
        )
        assert start.hparams["causal"].bool_value is (run_id == DECODER.id)
        content = reader.SummaryMetadata("_hparams_/session_end_info").plugin_data.content
        end = metadata.parse_session_end_info_plugin_data(content)
        assert end.status == (2 if run_id == DIVERGED.id else 1)
