"""What each test costs in CPU seconds: its own process and the children it has waited for.

    PYTHONPATH=dev python -m pytest -p test_cost tests/kernels

Wall time says how busy the machine was; CPU time says what a test needs. At the end the dearest
phases (set-up, call, tear-down) are listed, and the sum. With TEST_COST=file.tsv every phase is
appended to that file: cost, phase, test. Under xdist each worker writes its own lines there.
"""

import os
import resource
import time

import pytest

SHOWN = 40
costs: list[tuple[float, str, str]] = []


def cpu() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measured(item: pytest.Item, phase: str):
    before = cpu()
    try:
        return (yield)
    finally:
        costs.append((cpu() - before, phase, item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    return (yield from measured(item, "setup"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from measured(item, "call"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    return (yield from measured(item, "teardown"))


def pytest_sessionfinish():
    if path := os.environ.get("TEST_COST"):
        with open(path, "a") as file:
            file.writelines(f"{cost:.3f}\t{phase}\t{name}\n" for cost, phase, name in costs)


def pytest_terminal_summary(terminalreporter):
    if not costs:
        return
    terminalreporter.section("CPU seconds")
    for cost, phase, name in sorted(costs, reverse=True)[:SHOWN]:
        terminalreporter.line(f"{cost:8.2f} {phase:8} {name}")
    total = sum(cost for cost, _, _ in costs)
    terminalreporter.line(
        f"{total:8.2f} {len({name for _, _, name in costs})} tests; "
        f"{cpu():.2f} with start and collection"
    )
