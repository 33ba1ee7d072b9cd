"""Values, documents and bytes as they should not be. Standard library only; every function takes
its random numbers."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

LONG = 50_000  # characters or nested lists: more than a line, and than Python's recursion takes
NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 64, 1.5, -0.5, 1e-320, 1e308, 2**31, 2**63, 10**18, -(10**18), 10**400,
    float("nan"), float("inf"), -float("inf"),
)  # fmt: skip
OTHER_KINDS: tuple[Any, ...] = (
    None, True, False, "", " ", "8", "x", [], [[]], [1, 2], [None], {}, {"": {}}, {"a": 1},
)  # fmt: skip
# No path that leads out of a case's folder: some options write where they are pointed to.
STRANGE_TEXTS = (
    "é", "±µ", "\u202egnp.exe", "\x1b[31mred\x1b[0m", "a\nb", "a\r\nb", "\t", "\x00", "\x7f",
    "\ufeff", "🙂" * 30, "x" * LONG, "a/../b", "%s%n{0}", "<script>x</script>", "'\"`$()",
    "--json", "-1", "=", ",", "a,b", "1,2,3", "\ud800", "None", "nan", "1e999", "1_0", "٣", "0x10",
)  # fmt: skip


def any_value(rng: random.Random) -> Any:
    """A number, a text or a value of another kind, mostly one that does not belong."""
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(NUMBERS)
    if kind < 0.7:
        return rng.choice(OTHER_KINDS)
    if kind < 0.97:
        return rng.choice(STRANGE_TEXTS)
    return {"a": [rng.choice(NUMBERS)] * rng.randint(0, 2000)}


def word(rng: random.Random) -> str:
    """A value as it is typed on a command line, where neither zero bytes nor half characters can
    be."""
    value = any_value(rng)
    if isinstance(value, float) and rng.random() < 0.5:
        value = f"{value:.3f}"
    digits = sized_number(rng) if rng.random() < 0.1 else value
    return typed(digits)


def typed(value: Any) -> str:
    text = value if isinstance(value, str) else json_of(value)
    return text.replace("\0", "\x01").encode("utf-8", "replace").decode()[:100_000]


def sized_number(rng: random.Random) -> str:
    """A number by its digits, up to more than Python reads."""
    digits = "9" * rng.choice((10, 19, 20, 39, 309, 400, 4300, 4301, 10_000))
    return rng.choice(("", "-", "0.", "1e", "+", "0")) + digits


# ---- documents


def json_of(value: Any) -> str:
    """JSON, of numbers that Python does not write as text too."""
    if isinstance(value, int) and abs(value) > 10**300:
        return ("-" if value < 0 else "") + "1" + "0" * 400
    return json.dumps(value)


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value of a document but the document itself."""
    found: list[tuple[Any, ...]] = []
    inside = (
        list(document.items())
        if isinstance(document, dict)
        else list(enumerate(document))[:20]
        if isinstance(document, list)
        else []
    )
    for key, value in inside:
        found += [(*path, key), *places(value, (*path, key))]
    return found


def spoiled(rng: random.Random, document: Any, most: int = 3) -> Any:
    """A document with some values replaced, removed, renamed, doubled or exchanged."""
    document = copy.deepcopy(document)
    for _ in range(rng.randint(1, most)):
        there = places(document)
        if not there:
            return any_value(rng)
        *way, last = rng.choice(there)
        holder = document
        for key in way:
            holder = holder[key]
        _spoil(rng, holder, last, document, there)
    return document


def _spoil(rng: random.Random, holder: Any, key: Any, document: Any, there: list[Any]) -> None:
    how = rng.choice(("value",) * 6 + ("remove", "rename", "exchange", "wrap", "add"))
    if how == "value":
        holder[key] = any_value(rng)
    elif how == "remove":
        del holder[key]
    elif how == "wrap":
        holder[key] = [copy.deepcopy(holder[key])]
    elif how == "rename" and isinstance(holder, dict):
        holder[rng.choice((f"{key}s", str(key).upper(), "", "\n", "x" * 500))] = holder.pop(key)
    elif how == "add" and isinstance(holder, dict):
        holder[rng.choice(("extra", "auto_map", "source", "__class__", ""))] = any_value(rng)
    else:
        *way, last = rng.choice(there)
        other = document
        for step in way:
            other = other[step]
        holder[key] = copy.deepcopy(other[last])


def document_text(rng: random.Random, document: Any) -> bytes:
    """A spoiled document as text, or its text spoiled."""
    how = rng.random()
    if how < 0.7:
        return text_of(spoiled(rng, document))
    if how < 0.78:
        return nested(rng)
    if how < 0.84:
        repeated = text_of(document).strip()
        return rng.choice((repeated + repeated, b"[" + repeated + b"]", repeated + b","))
    return spoiled_bytes(rng, text_of(document))


def text_of(document: Any) -> bytes:
    """JSON in which a number of 400 digits may stand."""
    marked = json.dumps(_marked(document))
    return marked.replace('"<400 digits>"', "1" + "0" * 400).encode("utf-8", "replace")


def _marked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _marked(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(inner) for inner in value]
    if isinstance(value, int) and abs(value) > 10**300:
        return "<400 digits>"
    return value


def nested(rng: random.Random) -> bytes:
    """JSON nested deeper than Python's stack."""
    depth = rng.choice((900, LONG))
    left, right = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return left * depth + b"1" + right * rng.choice((depth, 0))


# ---- bytes


def spoiled_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes that are cut, flipped, repeated, of another format, or none."""
    how = rng.choice(
        ("cut", "cut", "flip", "flip", "flip", "zero", "twice", "insert", "other", "none", "utf-16")
    )
    at = rng.randrange(len(data)) if data else 0
    if how == "cut":
        return data[:at]
    if how == "flip" and data:
        spoiled = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 8))):
            spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
        return bytes(spoiled)
    if how == "zero":
        return data[:at] + bytes(rng.choice((1, 16, len(data) - at)))
    if how == "twice":
        return data + data
    if how == "insert":
        return data[:at] + rng.randbytes(rng.randint(1, 20)) + data[at:]
    if how == "utf-16":
        return data.decode("utf-8", "replace").encode("utf-16")
    return b"" if how == "none" else other_format(rng)


def other_format(rng: random.Random) -> bytes:
    """The beginning of a file of another kind."""
    return rng.choice(
        (
            b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
            b"PK\x03\x04" + bytes(30),
            b"\x1f\x8b\x08\0" + bytes(10),
            b"\x80\x04\x95\x0e\0\0\0\0\0\0\0",
            b"%PDF-1.7\n",
            b"import os\nos.system('echo RAN')\n",
            b"<html></html>",
            b"\xff\xfe\0\0",
            b"\n" * 100,
            b"null",
            b"{}",
            b"[]",
            b"3",
            b'"text"',
            rng.randbytes(200),
        )
    )
