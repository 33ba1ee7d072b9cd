"""The model tests of transformers, with headwise in place of its "sdpa" attention.

    git clone https://github.com/huggingface/transformers
    python dev/transformers_tests.py path/to/transformers --out out
    python dev/transformers_tests.py path/to/transformers --out out --families llama bert

Needs an environment in which that checkout's own tests run (torch, pytest, parameterized, datasets,
accelerate). The tests of 25 families run twice: stock, and with headwise's function and mask under
the name "sdpa". A test that never calls either in the stock run is not repeated, for nothing can
differ. Left out are tests of FSDP, tensor parallelism and offloading; tests of public weights are
left out by transformers itself. The table counts tests; below it stand all tests that pass in the
stock run and fail with headwise. The exit status is 1 if there is one.

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
    items[:] = [
        item
        for item in items
        if not any(word in item.name.lower() for word in LEFT_OUT)
        and not any(item.get_closest_marker(f"is_{what}_test") for what in LEFT_OUT[:2])
        and (wanted is None or item.nodeid in wanted)
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
        with open(os.environ[ATTENTION + "_OUT"], "a") as file:
            file.write(json.dumps(row) + "\n")


# ---- the command


def run(
    checkout: Path, family: str, attention: str, out: Path, only: list[str] | None, workers: int
) -> dict[str, dict]:
    """The rows of one family's tests, by test; those of an earlier call are used again."""
    file = out / f"{family}.{attention}.jsonl"
    if not file.exists():
        unfinished = file.with_suffix(".part")
        unfinished.unlink(missing_ok=True)
        here = Path(__file__).resolve().parent
        paths = [checkout / "src", here, here.parent / "src", checkout]
        environment = os.environ | {
            ATTENTION: attention,
            ATTENTION + "_OUT": str(unfinished),
            "PYTHONPATH": os.pathsep.join(str(path.resolve()) for path in paths),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        if only is not None:
            (out / "only").write_text("\n".join(only))
            environment[ONLY] = str((out / "only").resolve())
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "transformers_tests", "--tb=short",
            "-p", "no:cacheprovider", "--timeout=600", f"-n{workers}",
            f"tests/models/{family}/test_modeling_{family}.py",
        ]  # fmt: skip
        with open(out / f"{family}.{attention}.log", "w") as log:
            subprocess.run(
                command,
                cwd=checkout,
                env=environment,
                stdout=log,
                stderr=log,
                check=False,
            )
        if not unfinished.exists():
            sys.exit(f"no test of {family} ran: see {log.name}")
        unfinished.rename(file)
    # The last line of a test stands: a failure at its end follows its call.
    return {row["test"]: row for row in map(json.loads, file.read_text().splitlines())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="a folder for rows and logs")
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--stock", action="store_true", help="the stock run alone")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--backend", default="", help="of torch.compile, in place of inductor")
    given = parser.parse_args()
    os.environ[BACKEND] = given.backend
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)

    worse: list[tuple[str, str]] = []
    total = [0] * 6
    print(f"{'family':12} {'tests':>6} {'call it':>8} | stock pass fail | headwise pass fail")
    for family in given.families:
        stock = run(given.checkout, family, "stock", out, None, given.workers)
        calling = [test for test, row in stock.items() if row["calls"]]
        if given.stock:
            ours = {}
        else:
            ours = run(given.checkout, family, "headwise", out, calling, given.workers)
        if ours and not any(row["calls"] for row in ours.values()):
            sys.exit(f"{family}: headwise was never called")
        outcomes = [[row["outcome"] for row in (stock | rows).values()] for rows in ({}, ours)]
        counts = [len(stock), len(calling)]
        counts += [found.count(what) for found in outcomes for what in ("passed", "failed")]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        print(_line(family, counts), flush=True)
        worse += [
            (test, ours.get(test, {"why": "did not run"})["why"])
            for test in (calling if ours else [])
            if stock[test]["outcome"] == "passed"
            and ours.get(test, {"outcome": "missing"})["outcome"] != "passed"
        ]
    print(_line("together", total))
    for test, why in worse:
        print(f"\nwith headwise alone: {test}\n    {why}")
    return bool(worse)


def _line(name: str, counts: list[int]) -> str:
    tests, calling, passed, failed, ours_passed, ours_failed = counts
    return (
        f"{name:12} {tests:6,} {calling:8,} | {passed:10,} {failed:4,} | "
        f"{ours_passed:13,} {ours_failed:4,}"
    )


if __name__ == "__main__":
    sys.exit(main())
