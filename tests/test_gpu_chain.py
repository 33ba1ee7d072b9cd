"""The attention part in CUDA C++ (kernels/chain.cu) against float64: compiled on a GPU, elsewhere the same lines on a CPU (warp.h)."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="what is around these kernels is written in triton")
from gpu import DEVICE, INTERPRETED, NAN, near
from nets import STEP, Net, case, check_gradients, signs_of
from tolerance import same

from headwise.kernels import chain

HERE = Path(__file__).parent


@functools.cache
def on_a_cpu(rank):
    """The kernels of one rank as a library."""
    folder = Path(tempfile.mkdtemp())
    words = [
        "g++",
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        "-pthread",
        f"-DR={rank}",
        f"-DWARPS={chain.WARPS[rank]}",
        f"-I{HERE}",
        f"-I{Path(chain.__file__).parent}",
    ]
    subprocess.run([*words, "-o", str(folder / "chain.so"), str(HERE / "chain.cpp")], check=True)
    return ctypes.CDLL(str(folder / "chain.so"))


def run(name, rank, blocks, models, warps, shared, *args):
    values = [
        ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_float(a) if isinstance(a, float) else ctypes.c_int(a)
        for a in args
    ]
    getattr(on_a_cpu(rank), f"run_{name}")(blocks, models, *values)


@pytest.fixture(autouse=True)
def chained(monkeypatch):
    if INTERPRETED:
        if not shutil.which("g++"):
            pytest.skip("needs a GPU, or g++")
        monkeypatch.setattr(chain, "_run", run)
        monkeypatch.setattr(chain, "missing", lambda device: "")
        chain._proven.cache_clear()


CASES = [
    case("fp16", 64, (64, 1), batch=8),
    case("fp16", 64, (2, 8), batch=8, depth=2, queries=1, each=2),
    case("fp16", 64, (32, 4, 16), batch=8, width=2),
    case("fp16", 64, (1, 32), batch=24, depth=2, width=3, queries=5),
    case("fp16", 64, (16, 4), batch=8, depth=2, positions="additive"),
]


@pytest.mark.parametrize("settings", CASES)
def test_the_step_equals_the_module_through_autograd(settings):
    net, bound = Net(settings), STEP[settings.precision]
    step, losses = net.fuse(), torch.full((net.models,), NAN, device=DEVICE)
    assert step.chained
    rows = step.gradient(net.x, net.target, losses)
    _, expected, grads, terms, flipped = net.exact(signs_of(net, step))
    assert flipped <= bound
    near(losses, expected, bound, "losses")
    assert rows.isfinite().all(), "a gradient is not written"
    check_gradients(net, rows, grads, terms, bound)


@pytest.mark.parametrize("settings", [CASES[1], CASES[3]])
def test_the_step_again_gives_the_same_bits_and_the_forward_pass_alone_the_outputs(settings):
    net, bound = Net(settings, seed=2), STEP[settings.precision]
    step, losses = net.fuse(), torch.full((2, net.models), NAN, device=DEVICE)
    first = step.gradient(net.x, net.target, losses[0]).clone()
    for _ in range(1 if INTERPRETED else 50):
        same(step.gradient(net.x, net.target, losses[1]), first, "gradients")
    same(losses[1], losses[0], "losses")
    y, *_ = net.exact(signs_of(net, step))
    near(net.fuse(training=False).forward(net.x), y, bound, "outputs")


@pytest.mark.parametrize("rank", chain.RANKS)
def test_kernels_of_a_rank_are_trusted_after_a_trial(rank):
    assert chain.proven(rank, DEVICE)


@pytest.mark.parametrize(("name", "argument"), [("forward", 8), ("backward", 5), ("backward", 6), ("backward", 7), ("backward", 8)])
def test_a_kernel_that_computes_something_else_is_not_trusted(name, argument, monkeypatch):
    real = chain._run

    def wrong(which, rank, blocks, models, warps, shared, *args):
        real(which, rank, blocks, models, warps, shared, *args)
        if which == name:
            args[argument].view(-1)[3:5] += 10.0

    monkeypatch.setattr(chain, "_run", wrong)
    assert not chain.proven(8, DEVICE)
    monkeypatch.undo()
    chain._proven.cache_clear()


def test_a_step_whose_kernels_are_not_trusted_goes_the_other_way(monkeypatch):
    monkeypatch.setattr(chain, "proven", lambda rank, device: rank != 1)
    assert not Net(CASES[0].values[0]).fuse().chained
    assert Net(CASES[1].values[0]).fuse().chained
