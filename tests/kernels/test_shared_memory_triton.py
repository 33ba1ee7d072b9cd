"""Kernels that take more shared memory than a card has: which sizes they are launched with, and
that they compile for cards that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in triton")

from headwise.kernels import shared_memory_triton
from headwise.kernels.cards import shared_bytes
from headwise.kernels.shared_memory_triton import CHOSEN, FEWER_LOADS, Fitted, smaller

ROOT = Path(__file__).parents[2]


class Kernel:
    """Takes 48 KiB per stage and 1 KiB per column; remembers what it was launched with."""

    __name__ = "kernel"

    def __init__(self):
        self.asked, self.launched = [], []

    def warmup(self, *args, grid, **sizes):
        self.asked.append(sizes)
        taken = 48 * sizes["STAGES"] + sizes["BC"] << 10
        return SimpleNamespace(metadata=SimpleNamespace(shared=taken))

    def __getitem__(self, grid):
        return lambda *args, **sizes: self.launched.append((grid, sizes))


def launched(most, stages, columns, *alternatives, times=1):
    kernel = Kernel()
    fitted = Fitted(kernel, alternatives)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory_triton, "limit", lambda: most)
        for _ in range(times):
            fitted[(7, 3)](torch.ones(5), STAGES=stages, BC=columns)
    return kernel


WAYS = smaller(FEWER_LOADS, "BC", 64, 32)


@pytest.mark.parametrize(
    ("kib", "sizes", "found"),
    [
        (227, (3, 64), (3, 64)),  # as chosen, without asking
        (163, (3, 64), (2, 64)),
        (163, (2, 64), (2, 64)),
        (120, (3, 64), (1, 64)),
        (99, (3, 64), (1, 32)),
        (99, (1, 16), (1, 16)),
    ],
)
def test_kernels_take_the_first_sizes_that_fit(kib, sizes, found):
    kernel = launched(kib << 10, *sizes, *WAYS, times=2)
    assert kernel.launched == [((7, 3), {"STAGES": found[0], "BC": found[1]})] * 2
    assert bool(kernel.asked) == (kib < 227)
    assert len(kernel.asked) <= 1 + len(WAYS), "asked once for equal sizes"


def test_kernels_never_grow_a_size_and_say_what_they_need():
    with pytest.raises(RuntimeError, match=r"needs 65,536 bytes .* has 50,000"):
        launched(50_000, 1, 16, *WAYS)


def test_kernels_keep_their_sizes_on_what_they_were_chosen_for():
    assert shared_bytes((9, 0)) == CHOSEN == 232_448
    assert shared_bytes((10, 0)) >= CHOSEN


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Rows of dev/compile_ahead.py for one kernel of each family that is quick to compile."""
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment |= {"PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-W", "ignore", "dev/compile_ahead.py", "--few", "--json"]
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_kernels_compile_for_cards_that_are_not_here(compiled):
    cards = {80: 163, 89: 99, 100: 227, 120: 99}
    assert {row["card"] for row in compiled} == set(cards)
    for row in compiled:
        assert row["shared"] <= cards[row["card"]] << 10, row
    assert len({row["kernel"] for row in compiled}) == 8
    # A kernel that takes 144 KiB with operands of 32 bits gives way where there are 99.
    units = {row["card"]: row["BF"] for row in compiled if row["kernel"] == "feed_weights"}
    assert units == {89: 32, 100: 64}
