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
def on_a_cpu(rank, first):
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
        f"-DAHEAD={chain.AHEAD[rank]}",
        f"-DFIRST={int(first)}",
        f"-DBESIDE={int(rank in chain.BESIDE)}",
        f"-I{HERE}",
        f"-I{Path(chain.__file__).parent}",
    ]
    subprocess.run([*words, "-o", str(folder / "chain.so"), str(HERE / "chain.cpp")], check=True)
    return ctypes.CDLL(str(folder / "chain.so"))


def run(name, rank, first, blocks, models, warps, shared, *args):
    values = [
        ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_float(a) if isinstance(a, float) else ctypes.c_int(a)
        for a in args
    ]
    getattr(on_a_cpu(rank, first), f"run_{name}")(blocks, models, *values)


@pytest.fixture(autouse=True)
def chained(monkeypatch):
    if INTERPRETED:
        if not shutil.which("g++"):
            pytest.skip("needs a GPU, or g++")
        monkeypatch.setattr(chain, "_run", run)
        monkeypatch.setattr(chain, "missing", lambda device: "")


CASES = [
    case("fp16", 64, (64, 1), batch=16),
    case("fp16", 64, (2, 8), batch=16, depth=2, queries=1, each=2),
    case("fp16", 64, (32, 4, 16), batch=16, width=2),
    case("fp16", 64, (1, 32), batch=32, depth=2, width=3, queries=5),
    case("fp16", 64, (16, 4), batch=16, depth=2, positions="additive"),
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
