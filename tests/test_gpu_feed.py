"""The feed-forward in CUDA C++ (kernels/feed.cu) against float64: compiled on a GPU, elsewhere the same lines on a CPU (warp.h)."""

import pytest
import torch

pytest.importorskip("triton", reason="what is around these kernels is written in triton")
import test_gpu_chain
from emulate import call, library, trusting
from gpu import DEVICE, INTERPRETED, NAN, near
from nets import STEP, Net, case, check_step, check_streams, signs_of
from tolerance import same

from headwise.kernels import chain, feed


def run(name, blocks, models, warps, shared, *args):
    call(library("feed"), name, (blocks, models), warps, shared, args)


@pytest.fixture(autouse=True)
def fed(monkeypatch):
    monkeypatch.setattr(feed, "ENOUGH", 1)
    for _ in trusting(feed, run, monkeypatch):
        yield from trusting(chain, test_gpu_chain.run, monkeypatch)


CASES = [
    case("fp16", 64, (64, 8), batch=16, ffn_dim=256, depth=2),
    case("fp16", 64, (16,), batch=32, ffn_dim=512, each=2, queries=1),
    case("fp16", 64, (4,), batch=16, ffn_dim=256, width=3, depth=2, positions="additive"),
]


@pytest.mark.parametrize("settings", CASES)
def test_the_step_equals_the_module_through_autograd(settings):
    assert check_step(Net(settings)).fed


def test_the_step_again_gives_the_same_bits_and_the_forward_pass_alone_the_outputs():
    net, bound = Net(CASES[0].values[0], seed=2), STEP["fp16"]
    step, losses = net.fuse(), torch.full((2, net.models), NAN, device=DEVICE)
    first = step.gradient(net.x, net.target, losses[0]).clone()
    for _ in range(1 if INTERPRETED else 50):
        same(step.gradient(net.x, net.target, losses[1]), first, "gradients")
    same(losses[1], losses[0], "losses")
    y, *_ = net.exact(signs_of(net, step))
    near(net.fuse(training=False).forward(net.x), y, bound, "outputs")


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: streams beside each other")
@pytest.mark.parametrize("settings", CASES)
def test_what_runs_beside_changes_no_bit(settings):
    assert check_streams(Net(settings, seed=4)).fed


def test_the_kernels_are_trusted_after_a_trial():
    assert feed.proven(DEVICE)
