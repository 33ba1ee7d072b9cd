"""The cases that once broke something: a file each, and those of the fixed share that do still."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.campaign import CORPUS, Workers
from tests.fuzz.cases import Case, from_json, to_json
from tests.fuzz.generator import case_of

SEED, SHARE = 27, 60  # the cases of every run of the tests
OPEN = CORPUS / "open" / "share.json"  # numbers of the share that break something -> what


def kept() -> dict[str, dict[str, Any]]:
    """The corpus by name: what a case broke, the case, and `open` where it breaks it still."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(CORPUS.glob("*.json"))}


def keep(name: str, case: Case, found: Sequence[str]) -> None:
    """Put a case that broke something into the corpus, to be mended."""
    _write(CORPUS / f"{name}.json", {"found": list(found), "open": True, "case": to_json(case)})


def open_numbers() -> dict[str, list[str]]:
    return json.loads(OPEN.read_text())


def share(workers: Workers) -> dict[str, list[str]]:
    """What the cases of the share break, by number."""
    broken = {}
    for number in range(SHARE):
        _, case = case_of(SEED, number, workers.template / "store")
        if found := workers.run(case).found:
            broken[str(number)] = found
    return broken


def close(workers: Workers) -> list[str]:
    """Cases that are open and hold now are not open any more; returns those that are open still."""
    still = []
    for name, entry in kept().items():
        if entry.get("open"):
            if workers.run(from_json(entry["case"])).found:
                still.append(name)
            else:
                _write(CORPUS / f"{name}.json", {k: v for k, v in entry.items() if k != "open"})
    broken = share(workers)
    _write(OPEN, broken)
    return [*still, *(f"{number} of the share" for number in broken)]


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")
