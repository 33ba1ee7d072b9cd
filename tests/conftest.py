"""Fixtures for tests of several folders, and the choice of Triton's interpreter.

Kernels for GPUs run in Triton's interpreter where there is no GPU. It is chosen once, when triton
is first imported, which may be by any test, or by the collection of doctests; so it is chosen here,
before them all."""

import os
import socket
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def no_network(monkeypatch):
    """Whatever a task lacks, it never fetches."""

    def refuse(*given, **named):
        raise AssertionError("a task opened a connection")

    # Sockets themselves stay: worker processes speak through a pair of them.
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


@pytest.fixture
def products_as_on_a_gpu(monkeypatch):
    """Triton's interpreter multiplies with a GPU's arithmetic."""
    from support.gpu import multiply_as_a_gpu

    multiply_as_a_gpu(monkeypatch)


# `make quick`: contracts, kernel twins and the command line. A file -> the tests of it, by how
# their names begin; "" is all of them.
QUICK = {
    "test_conventions.py": "",
    "test_docs.py": "",
    "test_imports.py": "",
    "test_public_names.py": "",
    "test_readme.py": "",
    "test_stats.py": "",
    "cli/": "",
    "experiments/test_experiments.py": "",
    "experiments/test_own_experiment.py": "",
    "experiments/test_settings.py": "",
    "kernels/test_adamw_triton.py": "",
    "kernels/test_attention_cpu.py": "",
    "kernels/test_attention_short_triton.py": "test_short_triton_heads_equal",
    "kernels/test_attention_wide.py": "test_wide_tiles_compute_the_formula",
    "kernels/test_decoder_triton.py": "test_blocks_equal",
    "kernels/test_encoder_triton.py": "test_step_equals",
    "model/test_backends.py": "",
    "tasks/test_check.py": "",
    "tasks/test_check_faults.py": "",
    "tasks/test_contract.py": "",
    "tasks/test_own.py": "",
    "training/test_run_ids.py": "",
}
# Files of long tests begin first, so that no worker is left alone with one at the end; under
# `--dist loadfile` the tests of a file share its fixtures on one worker.
FIRST = (
    "execute/",
    "theory/checks/",
    "kernels/",
    "cli/",
    "lm/",
    "model/test_attention_compiled.py",
    "experiments/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent

    def path_of(item: pytest.Item) -> str:
        return item.path.relative_to(here).as_posix() if here in item.path.parents else ""

    def turn(item: pytest.Item) -> int:
        path = path_of(item)
        return next((i for i, name in enumerate(FIRST) if path.startswith(name)), len(FIRST))

    items.sort(key=turn)
    for item in items:
        for name, begins in QUICK.items():
            if path_of(item).startswith(name) and item.name.startswith(begins):
                item.add_marker(pytest.mark.quick)
