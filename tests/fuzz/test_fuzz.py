"""Bad inputs end in one line and the right exit code, and nothing is lost: the cases that once
broke something, and a fixed share of new ones. `python -m tests.fuzz` runs as many as you like."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import worker
from tests.fuzz.campaign import Workers
from tests.fuzz.cases import Case, Special, from_json, to_json
from tests.fuzz.generator import NAMES, case_of
from tests.fuzz.good import good_cases
from tests.fuzz.kept import kept, open_numbers, share
from tests.fuzz.values import any_value, document_text, spoiled


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as found:
        yield found


def kept_cases() -> list[Any]:
    """The corpus; a case that is not mended yet says so, and must fail."""
    return [
        pytest.param(
            from_json(entry["case"]),
            id=name,
            marks=pytest.mark.xfail(strict=True) if entry.get("open") else [],
        )
        for name, entry in kept().items()
    ]


@pytest.mark.parametrize("name", good_cases())
def test_good_input_is_taken(name: str, workers: Workers) -> None:
    result = workers.run(good_cases()[name])
    assert result.found == [], result.err


@pytest.mark.parametrize("case", kept_cases())
def test_case_that_once_broke_something_holds(case: Case, workers: Workers) -> None:
    result = workers.run(case)
    assert result.found == [], result.err


def test_share_of_generated_cases_holds(workers: Workers) -> None:
    """Open numbers must fail: `python -m tests.fuzz --close` takes out those that hold."""
    broken = share(workers)
    assert broken.keys() == open_numbers().keys(), broken


# ---- the generator and the checks can fail


def test_cases_of_a_seed_are_always_the_same(workers: Workers) -> None:
    store = workers.template / "store"
    first = [to_json(case_of(5, number, store)[1]) for number in range(60)]
    assert first == [to_json(case_of(5, number, store)[1]) for number in range(60)]
    assert first != [to_json(case_of(6, number, store)[1]) for number in range(60)]
    names = {case_of(5, number, store)[0] for number in range(400)}
    assert names == set(NAMES)


def test_case_comes_back_from_json() -> None:
    files = {
        "a": b"text",
        "b": bytes(range(256)) * 9,
        "c/d": Special("link", "x"),
        "e": b"[" * 9999,
    }
    case = Case(("cost", "é"), files, store=True, expected="bad", environment={"A": "b"})
    assert from_json(json.loads(json.dumps(to_json(case)))) == case


def test_spoiled_documents_are_spoiled() -> None:
    good = {"a": [1, 2, {"b": "c"}], "d": 3}
    texts = {document_text(random.Random(seed), good) for seed in range(200)}
    assert len(texts) > 150
    assert good == {"a": [1, 2, {"b": "c"}], "d": 3}, "the good one is left alone"
    assert sum(repr(spoiled(random.Random(seed), good)) != repr(good) for seed in range(100)) > 85
    assert any(isinstance(any_value(random.Random(seed)), float) for seed in range(99))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            "Path('store/runs/1/rows.jsonl').write_text('')",
            "lost: store/runs/1/rows.jsonl is changed",
        ),
        ("Path('store/runs/1/rows.jsonl').unlink()", "lost: store/runs/1/rows.jsonl is gone"),
        ("Path('book.txt').write_text('')", "lost: book.txt is changed"),
        ("Path('store/.x.json.1').touch()", "litter: store/.x.json.1"),
        ("Path('RAN').touch()", "code: RAN was written by data"),
        ("raise KeyError('x')", "traceback: KeyError"),
        ("print('x' * 1500, file=sys.stderr)", "error: a line of 1500 characters"),
        ("print('headwise: error: \\x1b[2J', file=sys.stderr)", "error: control characters"),
        ("print('x\\n' * 50, file=sys.stderr)", "error: 51 lines"),
        ("b'x' * (120 << 20)", "memory: grew by 1"),
        ("sys.exit(7)", "exit: 7"),
        ("sys.exit(2)", "exit: 2 without a word"),
        ("os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '0.2')", "processes: 1 left behind"),
    ],
)
def test_check_sees_what_a_command_breaks(
    change: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(words: list[str]) -> int:
        exec(f"import os, sys\nfrom pathlib import Path\n{change}")
        return 0

    files = {"store/runs/1/rows.jsonl": b"{}\n", "book.txt": b"words"}
    monkeypatch.setattr(worker, "headwise_main", command)
    monkeypatch.setattr(worker, "GROWTH", 64 << 20)
    (tmp_path / "case").mkdir()
    seen, _, _ = worker.outcome(Case((), files), tmp_path / "case", tmp_path)
    assert len(seen) == 1
    assert seen[0].startswith(found)
