"""A text for the tests of this folder."""

import pytest
from support.data import written

from headwise.tasks.generated_text import generated_text


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three documents, the last of them and the end of the second held out, an odd number of
    batches."""
    folder = tmp_path_factory.mktemp("book")
    written(folder / "a.txt", generated_text(9_000))
    written(folder / "b.txt", generated_text(5_000, seed=1) + "fin, enfin: é, 走.")
    written(folder / "c.txt", generated_text(700, seed=2))
    return str(folder)
