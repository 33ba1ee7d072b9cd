"""A group's files, for a worker that does not see the store: what it needs, and what it sends back.

What comes back is written as a worker here would have written it: checkpoints and weights by
rename, rows once. Its runs are held by leases that name its beat, whose copy changes as long as
somebody collects. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from headwise.digests import unsigned
from headwise.execute.groups import GROUP_FILE, read_group
from headwise.execute.leases import Watch, free_lost, lease_of, make_lease, read_beat
from headwise.files import DamagedError, write_whole
from headwise.rows import CHECKPOINT_FILE, WEIGHTS_FILE
from headwise.store import MARK, ROWS_FILE, Store

SOURCE_FILE = "source.json"
# What may come back. A name that is none of these is left out.
RUN_FILE = re.compile(
    r"runs/(?P<run>[0-9A-Za-z_-]+)/"
    r"(?P<file>checkpoint\.safetensors|weights\.safetensors|source\.json|rows\.jsonl)"
)
GROUP_FILES = re.compile(r"groups/(?P<group>[0-9a-f]{16})/([0-9a-f]{12}\.beat|log\.\d{1,6})")


def files_of(folder: Path) -> dict[str, bytes]:
    """What a worker needs of the store for the group in `folder`, by path within the store."""
    group = read_group(folder)
    store = group.store
    names = [MARK, f"groups/{group.id}/{GROUP_FILE}"]
    for run_id, spec in zip(group.ids, group.specs, strict=True):
        names += [f"runs/{run_id}/{name}" for name in (CHECKPOINT_FILE, SOURCE_FILE, ROWS_FILE)]
        parent = str(spec.get("recipe", {}).get("init", ""))
        if parent.startswith("run:"):
            names.append(f"runs/{parent.removeprefix('run:')}/{WEIGHTS_FILE}")
    found = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            found[name] = (store / name).read_bytes()
    return found


def take_files(folder: Path, found: Mapping[str, bytes]) -> None:
    """Write what came back of the group in `folder`; leases hold its runs while there are
    beats."""
    group = read_group(folder)
    store = Store(group.store, create=False)
    for name, data in found.items():
        if match := RUN_FILE.fullmatch(name):
            if match["run"] in group.ids:
                _take_run_file(store, match["run"], match["file"], data)
        elif (match := GROUP_FILES.fullmatch(name)) and match["group"] == group.id:
            path = store.path / name
            write_whole(path, data)
            if path.suffix == ".beat":
                _hold(store, group.ids, path)


def _take_run_file(store: Store, run_id: str, file: str, data: bytes) -> None:
    path = store.runs_path / run_id / file
    if file == ROWS_FILE:
        for line in data.splitlines():
            with contextlib.suppress(DamagedError, ValueError):
                row = unsigned(json.loads(line))
                if row.get("id") == run_id:
                    store.add_once(row)
        (path.parent / CHECKPOINT_FILE).unlink(missing_ok=True)
    elif file != CHECKPOINT_FILE or store.row(run_id) is None:
        write_whole(path, data)


def _hold(store: Store, ids: tuple[str, ...], beat: Path) -> None:
    """Leases of a living beat on runs that nobody holds; none of one that has ended."""
    if read_beat(beat).get("state"):
        free_lost(store, ids, Watch(), ended={beat})
        return
    for run_id in ids:
        folder = store.runs_path / run_id
        folder.mkdir(parents=True, exist_ok=True)
        if lease_of(folder)[0] == 0 and store.row(run_id) is None:
            make_lease(folder, 1, beat)
