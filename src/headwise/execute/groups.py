"""A group of runs that one device trains at once, as a folder that any worker can take up.

    STORE/groups/ID/group.json     its runs' specifications and how they are trained
    STORE/groups/ID/attempts.json  which engine had it, as what job; the driver's
    STORE/groups/ID/TOKEN.beat     one worker's sign of life (leases.py)
    STORE/groups/ID/log.1          what the workers of an attempt printed
    STORE/groups/ID/cancel         somebody wants its workers to save and end

The id is a hash of the runs' ids. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import headwise
from headwise.digests import read_signed, signed
from headwise.errors import UsageError, shown
from headwise.execute.base import Handle
from headwise.execute.leases import BEAT, LOST_AFTER, read_beat
from headwise.files import MOST_TEXT, DamagedError, write_whole
from headwise.rows import PATHS, Specified
from headwise.store import Store

GROUP_FILE = "group.json"
ATTEMPTS_FILE = "attempts.json"
CANCEL_FILE = "cancel"
FORMAT = 1
PLAIN = re.compile(r"[0-9A-Za-z_-]{1,64}")  # a run's id, which leads nowhere but into the store


@dataclass(frozen=True)
class Options:
    """How the runs of a group are trained; plain values."""

    device: str = "auto"
    keep_weights: bool = False
    checkpoint_every: float = 30.0
    beat: float = BEAT  # seconds between two signs of life
    lost_after: float = LOST_AFTER  # seconds without one

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "beat", "lost_after"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if not 0.01 <= self.beat <= self.lost_after <= 86_400 or not self.checkpoint_every >= 0:
            raise UsageError(
                "beat is from 0.01 seconds to lost_after, which is at most a day, and "
                f"checkpoint_every is at least 0, got {self.beat}, {self.lost_after}, "
                f"{self.checkpoint_every}"
            )


@dataclass(frozen=True)
class Group:
    """Runs that one device trains at once."""

    store: Path
    ids: tuple[str, ...]
    specs: tuple[dict[str, Any], ...]
    work: str  # "train" or "pretrain"
    steps: int  # of all its runs together
    cost: float  # FLOPs of all its runs together
    options: Options = Options()
    digests: tuple[tuple[str, str], ...] = ()  # of the code of the user's own classes, by name
    version: str = headwise.__version__

    @property
    def id(self) -> str:
        """A hash of the runs' ids.

        >>> Group(Path("s"), ("0a", "0b"), (), "train", 8, 1.0).id
        '9ea40d6d7ea98ecb'
        """
        return hashlib.sha256("\n".join(sorted(self.ids)).encode()).hexdigest()[:16]

    @property
    def folder(self) -> Path:
        """Where it lies, from anywhere."""
        return self.store.absolute() / "groups" / self.id

    def write(self) -> None:
        """Make the folder, or bring what it says up to date."""
        about = {
            "format": FORMAT,
            "headwise": self.version,
            "work": self.work,
            "ids": self.ids,
            "runs": self.specs,
            "steps": self.steps,
            "cost": self.cost,
            "options": dataclasses.asdict(self.options),
            "digests": dict(self.digests),
        }
        text = json.dumps(signed(about), allow_nan=False) + "\n"
        path = self.folder / GROUP_FILE
        if not path.exists() or path.read_text(errors="replace") != text:
            write_whole(path, text)

    def missing(self, store: Store) -> list[str]:
        """The ids of its runs that have no row yet."""
        return [run_id for run_id in self.ids if store.row(run_id) is None]

    def beats(self) -> list[Path]:
        """Of its workers, those of earlier attempts among them."""
        return sorted(self.folder.glob("*.beat"))


def group_of(
    store: Path,
    runs: Sequence[Specified],
    steps: int,
    cost: float,
    options: Options,
    digests: Mapping[str, str],
) -> Group:
    """A group of these runs."""
    specs = [json.loads(json.dumps(run.spec())) for run in runs]
    for spec in specs:
        for name in PATHS:  # a worker may run in another folder
            if spec.get(name):
                spec[name] = os.path.abspath(spec[name])
    ids, known = tuple(run.id for run in runs), tuple(sorted(digests.items()))
    return Group(store, ids, tuple(specs), runs[0].work, steps, cost, options, known)


def read_group(folder: Path) -> Group:
    """The group in a folder, or an error that says why it is none."""
    try:
        about = read_signed(folder / GROUP_FILE, 8 * MOST_TEXT)
        if about["format"] != FORMAT:
            raise DamagedError(f"its format is {about['format']!r:.20}, this headwise reads 1")
        options = Options(**about["options"])
        if any(type(v) is not type(getattr(Options, k)) for k, v in vars(options).items()):
            raise DamagedError("its options are none")
        group = Group(
            folder.absolute().parent.parent,
            tuple(map(str, about["ids"])),
            tuple(about["runs"]),
            str(about["work"]),
            int(about["steps"]),
            float(about["cost"]),
            options,
            tuple((str(k), str(v)) for k, v in about["digests"].items()),
            str(about["headwise"]),
        )
        if len(group.ids) != len(group.specs):
            raise DamagedError("it has more runs than ids, or fewer")
        _check_names(group, folder)
    except FileNotFoundError:
        raise UsageError(
            f"a group is a folder STORE/groups/ID with a {GROUP_FILE}, got {folder}"
        ) from None
    except (DamagedError, KeyError, TypeError, ValueError, AttributeError) as e:
        raise UsageError(f"{folder / GROUP_FILE} is damaged: {e}") from None
    return group


def _check_names(group: Group, folder: Path) -> None:
    """A store is data: what a group names is a run of its store, and its folder its own."""
    for run_id, spec in zip(group.ids, group.specs, strict=True):
        parent = str(spec.get("recipe", {}).get("init", ""))
        names = [run_id, *([parent.removeprefix("run:")] if parent.startswith("run:") else [])]
        if wrong := [name for name in names if not PLAIN.fullmatch(name)]:
            raise DamagedError(f"it names the run {shown(wrong[0])}, which no store has")
    if folder.absolute().name != group.id or folder.is_symlink():
        raise DamagedError(f"the folder of its runs is {group.id}")


def groups_in(store: Path) -> Iterator[Group]:
    """The groups of a store; what is damaged is left out, its runs are put into other groups."""
    for path in sorted((store / "groups").glob(f"*/{GROUP_FILE}")):
        with contextlib.suppress(UsageError):
            yield read_group(path.parent)


# ---- attempts


def note_attempt(group: Group, handle: Handle, address: str) -> None:
    """Write down which engine has an attempt, so that a later driver finds it."""
    known = [a for a in attempts_of(group.folder) if a["attempt"] != handle.attempt]
    about = {**dataclasses.asdict(handle), "address": address, "submitted": round(time.time(), 1)}
    text = json.dumps(signed({"attempts": [*known, about]}), indent=1)
    write_whole(group.folder / ATTEMPTS_FILE, text + "\n")


def attempts_of(folder: Path) -> list[dict[str, Any]]:
    """What was noted of a group's attempts, the latest last."""
    try:
        found = read_signed(folder / ATTEMPTS_FILE)["attempts"]
        return [a for a in found if isinstance(a["attempt"], int)]
    except (FileNotFoundError, DamagedError, KeyError, TypeError):
        return []


def handle_of(attempt: dict[str, Any]) -> Handle:
    """An attempt's handle."""
    fields = {f.name: attempt.get(f.name, "") for f in dataclasses.fields(Handle)}
    return Handle(**fields)


def beats_of(group: Group, attempt: int) -> dict[Path, dict[str, Any]]:
    """The beats of one attempt's workers; there are two where an engine has started it twice."""
    found = {path: read_beat(path) for path in group.beats()}
    return {path: beat for path, beat in found.items() if beat.get("attempt") == attempt}


def cancel_group(folder: Path) -> None:
    """Ask a group's workers, wherever they are, to save and end."""
    write_whole(folder / CANCEL_FILE, "")


def cancelled(folder: Path) -> bool:
    """Whether a group's workers are to save and end."""
    return os.path.lexists(folder / CANCEL_FILE)
