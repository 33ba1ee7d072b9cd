"""The model tests of transformers, with headwise in place of its "sdpa" attention.

    git clone https://github.com/huggingface/transformers
    python dev/transformers_tests.py path/to/transformers --out out
    python dev/transformers_tests.py path/to/transformers --out out --families llama bert

Needs an environment in which that checkout's own tests run (torch, pytest, parameterized, datasets,
accelerate). The tests of 25 families run with headwise's function and mask under the name "sdpa";
those that fail run again with transformers' own. Left out are tests of FSDP, tensor parallelism and
offloading; tests of public weights are left out by transformers itself. The table counts tests;
below it stand all failures, first those that transformers' own attention passes. The exit status is
1 if there is one of these. An interrupted call resumes.

`--backend aot_eager` leaves out the C++ compiler, which takes most of the time; graphs, guards and
recompilations stay.

The file is also the pytest plugin that puts headwise in and counts calls.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAMILIES = [
    "llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "phi3", "smollm3", "olmo2", "mixtral",
    "qwen3_moe", "deepseek_v3", "qwen3_next", "gemma3", "modernbert", "vit", "dinov2", "bert",
    "gpt2", "siglip", "clip", "whisper", "gemma2", "t5", "gpt_oss",
]  # fmt: skip
LEFT_OUT = ("fsdp", "tensor_parallel", "tp_", "offload", "model_parallel")
ATTENTION = "HEADWISE_TRANSFORMERS_TESTS"  # which attention the plugin puts in: stock or headwise
ONLY = "HEADWISE_TRANSFORMERS_ONLY"  # a file of the test ids to run
OUT = "HEADWISE_TRANSFORMERS_OUT"  # the file of rows
BACKEND = "HEADWISE_TRANSFORMERS_BACKEND"  # of torch.compile, in place of inductor


# ---- the plugin

calls = [0]  # of the attention and of the mask, in the current test


def counted(function: Callable) -> Callable:
    """`function`, and a count of its calls. In a compiled graph it counts while tracing, so that
    no guard depends on the count."""
    import torch

    def count() -> int:
        calls[0] += 1
        return 0

    traced = torch.compiler.assume_constant_result(count)

    def counting(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            traced()
        else:
            count()
        return function(*args, **kwargs)

    return counting


def pytest_configure(config: Any) -> None:
    """Put the attention in before any test module is imported."""
    if ATTENTION not in os.environ:
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    attention = AttentionInterface._global_mapping["sdpa"]
    mask = AttentionMaskInterface._global_mapping["sdpa"]
    if os.environ[ATTENTION] == "headwise":
        from headwise.integrations import transformers as headwise

        attention, mask = headwise.attention, headwise.mask
    if backend := os.environ.get(BACKEND):
        import torch

        compile = torch.compile
        torch.compile = lambda *given, **named: compile(*given, **named | {"backend": backend})
    AttentionInterface._global_mapping["sdpa"] = counted(attention)
    AttentionMaskInterface._global_mapping["sdpa"] = counted(mask)


def pytest_collection_modifyitems(config: Any, items: list) -> None:
    """Leave out what needs several processes or devices, and what was not asked for."""
    only = os.environ.get(ONLY)
    wanted = set(Path(only).read_text().splitlines()) if only else None
    done = rows_of(Path(os.environ.get(OUT, os.devnull)))
    items[:] = [
        item
        for item in items
        if not any(word in item.name.lower() for word in LEFT_OUT)
        and not any(item.get_closest_marker(f"is_{what}_test") for what in LEFT_OUT[:2])
        and (wanted is None or item.nodeid in wanted)
        and item.nodeid not in done
    ]


def pytest_runtest_setup(item: Any) -> None:
    calls[0] = 0


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    item.user_properties[:] = [("calls", calls[0])]
    yield


def pytest_runtest_logreport(report: Any) -> None:
    """One line per test, in the main process."""
    if "PYTEST_XDIST_WORKER" in os.environ or ATTENTION not in os.environ:
        return
    if report.when == "call" or report.outcome != "passed":
        why = str(getattr(report.longrepr, "reprcrash", None) or report.longrepr or "")
        row = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "calls": dict(report.user_properties).get("calls", 0),
            "why": why.strip()[-600:] if report.outcome == "failed" else "",
        }
        with open(os.environ[OUT], "a") as file:
            file.write(json.dumps(row) + "\n")


# ---- the command


def rows_of(file: Path) -> dict[str, dict]:
    """The rows of a file by test. The last one of a test stands: a failure at its end follows its
    call."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return {row["test"]: row for row in map(json.loads, lines)}


def run(
    checkout: Path, families: list[str], attention: str, only: list[str] | None, given: Any
) -> dict[str, dict]:
    """Run the tests of these families, or only some of them; their rows, by test."""
    out = given.out.resolve()
    file = out / f"{attention}.jsonl"
    here = Path(__file__).resolve().parent
    paths = [checkout / "src", here, here.parent / "src", checkout]
    environment = os.environ | {
        ATTENTION: attention,
        OUT: str(file),
        BACKEND: given.backend,
        "PYTHONPATH": os.pathsep.join(str(path.resolve()) for path in paths),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    if only is not None:
        (out / "only").write_text("\n".join(only))
        environment[ONLY] = str(out / "only")
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "transformers_tests", "--tb=short",
        "-p", "no:cacheprovider", "--timeout=900", f"-n{given.workers}",
        *(f"tests/models/{family}/test_modeling_{family}.py" for family in families),
    ]  # fmt: skip
    with open(out / f"{attention}.log", "a") as log:
        subprocess.run(command, cwd=checkout, env=environment, stdout=log, stderr=log, check=False)
    return rows_of(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="a folder for rows and logs")
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--backend", default="", help="of torch.compile, in place of inductor")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)

    ours = run(given.checkout, given.families, "headwise", None, given)
    failed = [test for test, row in ours.items() if row["outcome"] == "failed"]
    stock = run(given.checkout, given.families, "stock", failed, given) if failed else {}
    worse = [test for test in failed if stock.get(test, {}).get("outcome") != "failed"]

    print(f"{'family':12} {'tests':>6} {'skipped':>8} {'passed':>7} {'call it':>8} | failed alone")
    totals: Counter = Counter()
    for family in given.families:
        rows = [row for test, row in ours.items() if f"/{family}/" in test]
        counts = Counter(row["outcome"] for row in rows)
        counts["tests"] = len(rows)
        counts["calling"] = sum(row["calls"] > 0 for row in rows if row["outcome"] == "passed")
        counts["alone"] = sum(f"/{family}/" in test for test in worse)
        totals += counts
        print(_line(family, counts))
    print(_line("together", totals))
    for test in sorted(failed, key=lambda test: test not in worse):
        who = "with headwise alone" if test in worse else "stock fails too"
        print(f"\n{who}: {test}\n    {ours[test]['why']}")
    return bool(worse)


def _line(name: str, counts: Counter) -> str:
    return (
        f"{name:12} {counts['tests']:6,} {counts['skipped']:8,} {counts['passed']:7,} "
        f"{counts['calling']:8,} | {counts['failed']:6,} {counts['alone']:5,}"
    )


if __name__ == "__main__":
    sys.exit(main())
