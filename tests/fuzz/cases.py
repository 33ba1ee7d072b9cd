"""What a case is, how its files are laid out, and how it is kept in the corpus."""

from __future__ import annotations

import base64
import json
import os
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests.fuzz.values import spoiled_bytes

Expected = Literal["any", "bad", "good"]  # bad: refused with exit 2; good: exit 0
Command = Literal["headwise", "nanochat", "python"]


class Special(NamedTuple):
    """What is no file: a link, a named pipe, a folder, or nothing where the store has a file."""

    kind: Literal["link", "fifo", "folder", "removed", "unreadable"]
    target: str = ""


File = bytes | Special


@dataclass(frozen=True)
class Case:
    """Words of a command, the files that it finds in its folder, and what must come out."""

    words: tuple[str, ...]
    files: Mapping[str, File] = field(default_factory=dict)
    command: Command = "headwise"
    expected: Expected = "any"
    store: bool = False  # a good store lies beside, as `store`; files go over it
    code: bool = False  # a file that is named on the command line is code
    environment: Mapping[str, str] = field(default_factory=dict)


def lay_out(case: Case, folder: Path) -> None:
    """Write a case's files."""
    for name, content in case.files.items():
        path = folder / name
        if any(f"{above}" in case.files for above in Path(name).parents):
            continue  # another file of the case lies in the place of its folder
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path) and not path.is_dir():
            path.unlink()
        match content:
            case bytes():
                path.write_bytes(content)
            case Special("link"):
                path.symlink_to(content.target)
            case Special("fifo"):
                os.mkfifo(path)
            case Special("folder"):
                path.mkdir(exist_ok=True)
            case Special("removed"):
                pass
            case Special("unreadable"):
                path.write_bytes(b"{}")
                path.chmod(0)


def special(rng: random.Random, name: str) -> File:
    """Something under a file's name that is none."""
    return rng.choice(
        (
            Special("fifo"),
            Special("folder"),
            Special("link", "/dev/zero"),
            Special("link", "/dev/full"),
            Special("link", "nowhere"),
            Special("link", Path(name).name),  # to itself
            Special("unreadable"),
        )
    )


def spoiled_file(rng: random.Random, name: str, data: bytes) -> File:
    """A file's bytes spoiled, now and then no file at all."""
    return special(rng, name) if rng.random() < 0.1 else spoiled_bytes(rng, data)


# ---- as JSON, for the corpus


def to_json(case: Case) -> dict[str, Any]:
    """A case as plain values; only what differs from the defaults."""
    plain: dict[str, Any] = {"words": list(case.words)}
    if case.files:
        plain["files"] = {name: _file_to_json(content) for name, content in case.files.items()}
    for name in ("command", "expected", "store", "code", "environment"):
        value = getattr(case, name)
        if value != Case.__dataclass_fields__[name].default and value:
            plain[name] = value
    return plain


def from_json(plain: Mapping[str, Any]) -> Case:
    names = ("command", "expected", "store", "code", "environment")
    rest = {name: plain[name] for name in names if name in plain}
    files = {name: _file_from_json(content) for name, content in plain.get("files", {}).items()}
    return Case(tuple(plain["words"]), files, **rest)


def _file_to_json(content: File) -> Any:
    if isinstance(content, Special):
        return {content.kind: content.target}
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = ""
    if len(text) == len(content) <= 2000 and text.isprintable():
        return text
    return {"zlib": base64.b64encode(zlib.compress(content, 9)).decode()}


def _file_from_json(plain: Any) -> File:
    if isinstance(plain, str):
        return plain.encode()
    ((kind, value),) = plain.items()
    return zlib.decompress(base64.b64decode(value)) if kind == "zlib" else Special(kind, value)


def same(one: Case, other: Case) -> bool:
    """Whether two cases are the same words and files."""
    return json.dumps(to_json(one), sort_keys=True) == json.dumps(to_json(other), sort_keys=True)
