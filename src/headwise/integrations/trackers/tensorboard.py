"""TensorBoard: one event file per run, written without TensorBoard.

    FOLDER/<group>/<name>/events.out.tfevents.0.headwise

A file is records (length, checksum, data, checksum), each an `Event` in protobuf's wire format. It
holds the curves as scalars, the results as scalars `summary/...` at the last step, and the
configuration for the hyperparameter page. It is made of the row alone, so that a run exported again
is the same file; it takes its place when it is complete.
"""

from __future__ import annotations

import functools
import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import UsageError
from headwise.files import write_whole

if TYPE_CHECKING:
    from headwise.tracking import TrackedRun

FILE = "events.out.tfevents.0.headwise"
VERSION = "brain.Event:2"
CASTAGNOLI = 0x82F63B78  # the polynomial of CRC-32C, reflected
SUCCESS, FAILURE = 1, 2


class TensorBoard:
    """Event files in a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UsageError(f"the folder {folder} cannot be made: {e.strerror}") from None
        if not os.access(self.folder, os.W_OK):
            raise UsageError(f"the folder {folder} cannot be written")

    def __call__(self, run: TrackedRun) -> bool:
        path = self.folder / run.group / run.name / FILE
        data = b"".join(map(record, events(run)))
        if path.is_file() and path.read_bytes() == data:
            return False
        write_whole(path, data)
        return True


# ---- events


def events(run: TrackedRun) -> list[bytes]:
    """The events of a run, in order. Their time is when the run finished, as no other is known."""

    def event(step: int, *values: bytes) -> bytes:
        summary = b"".join(_bytes(1, value) for value in values)
        return _double(1, run.finished) + _varint(2, step) + _bytes(5, summary)

    found = [_double(1, run.finished) + _text(3, VERSION)]
    found.append(event(0, _hparams("session_start_info", 3, _start(run))))
    for step, values in run.history:
        found.append(event(step, *(_scalar(tag, value) for tag, value in values.items())))
    results = [_scalar(f"summary/{tag}", value) for tag, value in run.results.items()]
    found.append(event(run.last_step, *results))
    status = FAILURE if run.summary.get("status") == "diverged" else SUCCESS
    end = _varint(1, status) + _double(2, run.finished)
    found.append(event(run.last_step, _hparams("session_end_info", 4, end)))
    return found


def _scalar(tag: str, value: float) -> bytes:
    return _text(1, tag) + _float(2, value)


def _start(run: TrackedRun) -> bytes:
    """The configuration: numbers, truth values and text as they are, the rest as JSON."""
    values = b""
    for key, value in run.config.items():
        values += _bytes(1, _text(1, key) + _bytes(2, _value(value)))
    started = run.finished - float(run.results.get("seconds", 0.0))
    # Runs of one group would be shown as their mean.
    return values + _text(4, run.name) + _double(5, started)


def _value(value: Any) -> bytes:
    """A `google.protobuf.Value`."""
    if isinstance(value, bool):
        return _varint(4, int(value))
    if isinstance(value, int | float):
        return _double(2, value)
    return _text(3, value if isinstance(value, str) else json.dumps(value))


def _hparams(name: str, field: int, content: bytes) -> bytes:
    """A value for the plugin `hparams`: its content is in the metadata, its tensor is a zero."""
    plugin = _text(1, "hparams") + _bytes(2, _bytes(field, content))
    shape = _bytes(2, _varint(1, 1))  # one dimension of size 1
    zero = _varint(1, 1) + _bytes(2, shape) + _bytes(4, bytes(4))
    return _text(1, f"_hparams_/{name}") + _bytes(8, zero) + _bytes(9, _bytes(1, plugin))


# ---- protobuf's wire format: a key of field number and kind, then the value


def _varint(field: int, value: int) -> bytes:
    return _number(field << 3) + _number(value)


def _double(field: int, value: float) -> bytes:
    return _number(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    largest = 3.4028234663852886e38  # as much as 32 bits hold
    return _number(field << 3 | 5) + struct.pack("<f", min(max(value, -largest), largest))


def _bytes(field: int, value: bytes) -> bytes:
    return _number(field << 3 | 2) + _number(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode(errors="replace"))


def _number(value: int) -> bytes:
    """A whole number of at least 0, seven bits per byte, the lowest first."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


# ---- records


def record(data: bytes) -> bytes:
    """One record: the length and the data, each with its masked checksum behind it."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """The CRC-32C of some bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@functools.cache
def _crc_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ CASTAGNOLI * (crc & 1) for crc in table]
    return table
