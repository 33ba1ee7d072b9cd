"""A store that tests of several files read and leave as it is."""

from pathlib import Path

import pytest
from support.commands import finished


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny experiment with figure and report."""
    return finished(tmp_path_factory.mktemp("cli"))
