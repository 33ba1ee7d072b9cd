"""A Slurm for the tests that submit jobs: started once, for all of them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import slurm


@pytest.fixture(scope="session")
def running_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Bed]:
    """Two virtual nodes; where they cannot be started, why the tests are left out. In CI their
    absence is a failure."""
    if why := slurm.absent():
        if "CI" in os.environ:
            pytest.fail(f"CI has no Slurm: {why}")
        pytest.skip(f"there is no Slurm: {why}")
    with slurm.started(tmp_path_factory.mktemp("slurm")) as bed:
        yield bed


@pytest.fixture
def bed(
    running_slurm: slurm.Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[slurm.Bed]:
    """The same, found by what this test starts, with an empty queue before and after it."""
    monkeypatch.setenv("HOME", str(tmp_path))  # where submitit's files go
    monkeypatch.setenv("SLURM_CONF", running_slurm.environment["SLURM_CONF"])
    yield running_slurm
    running_slurm.clear()
