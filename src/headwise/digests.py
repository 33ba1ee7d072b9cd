"""JSON objects that carry a digest of themselves, so that a reader knows them to be as they were
written. Standard library only.

    {"id": "86929b19fe1cf306", ..., "sha256": "5f0c0d1e2a3b4c5d"}

The digest covers the object without it, as canonical JSON, so the order of keys and the spaces of a
line may change. Objects of before have no digest and are read without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.files import MOST_TEXT, DamagedError, read_file

DIGEST = "sha256"  # its key
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def digest_of(value: Mapping[str, Any]) -> str:
    """The first 16 digits of the SHA-256 of an object as canonical JSON."""
    return hashlib.sha256(_canonical(value).encode()).hexdigest()[:16]


def signed(value: Mapping[str, Any]) -> dict[str, Any]:
    """An object as JSON has it, with its digest as the last key; `unsigned` is the inverse.

    >>> unsigned(signed({"sizes": (2, 3)}))
    {'sizes': [2, 3]}
    """
    # By way of JSON, where a tuple is a list and every key is text.
    plain = json.loads(json.dumps(value))
    return {**plain, DIGEST: digest_of(plain)}


def unsigned(value: Any) -> dict[str, Any]:
    """An object without its digest, or an error where it is not as it was written."""
    if not isinstance(value, dict):
        raise DamagedError("it is no JSON object")
    if DIGEST not in value:
        # A flipped bit in the digest's own name would make a new object one of before.
        if any(_one_letter_off(key) for key in value):
            raise DamagedError("the name of its digest is damaged")
        return value
    rest = dict(value)
    if rest.pop(DIGEST) != digest_of(rest):
        raise DamagedError("its content does not have its digest")
    return rest


def _one_letter_off(key: str) -> bool:
    return len(key) == len(DIGEST) and sum(a != b for a, b in zip(key, DIGEST, strict=True)) == 1


def parse(data: bytes) -> Any:
    """JSON from bytes; what is none is a DamagedError."""
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        raise DamagedError("it is no JSON") from None


def read_signed(path: Path, most: int = MOST_TEXT) -> dict[str, Any]:
    """The object in a file without its digest. A file that is not there is a FileNotFoundError,
    whatever else is wrong with it a DamagedError."""
    return unsigned(parse(read_bytes(path, most)))


def read_bytes(path: Path, most: int) -> bytes:
    """The bytes of a regular file, with the errors of `read_signed`."""
    try:
        return read_file(path, most, links=True)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(str(path)) from None
    except (OSError, ValueError) as e:  # a name may hold what no path can
        why = e.strerror if isinstance(e, OSError) and e.strerror else e
        raise DamagedError(" ".join(str(why).split())) from None
