"""The feed-forward in CUDA C++ (kernels/encoder_mlp_cuda.cu) against float64: compiled on a GPU,
elsewhere the same lines on a CPU (warp.h)."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="what is around these kernels is written in triton")
from support.emulate import check_races, run_attention, run_mlp, trusting
from support.gpu import DEVICE, FP16, FP32, INTERPRETED, NAN
from support.nets import Net, case, check_again, check_step, check_streams, gradient_of

from headwise.kernels import encoder_attention_cuda, encoder_mlp_cuda
from headwise.kernels.encoder import Gradients, MlpWeights


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(encoder_mlp_cuda, "ENOUGH", 1)
    for _ in trusting(encoder_mlp_cuda, run_mlp, monkeypatch):
        yield from trusting(encoder_attention_cuda, run_attention, monkeypatch)


@pytest.fixture
def trusted(monkeypatch):
    """Without trials, which have tests of their own."""
    for module in (encoder_attention_cuda, encoder_mlp_cuda):
        monkeypatch.setattr(module, "proven", lambda *given: True)


CASES = [
    case("fp16", 64, (64, 8), batch=16, ffn_dim=256, depth=2),
    case("fp16", 64, (16,), batch=32, ffn_dim=512, each=2, queries=1),
    case("fp16", 64, (4,), batch=16, ffn_dim=256, width=2, positions="additive"),
]


@pytest.mark.parametrize("settings", CASES)
def test_step_equals_the_module_through_autograd(settings, trusted):
    assert check_step(Net(settings)).cuda_mlp


def test_step_again_gives_the_same_bits_and_the_forward_pass_alone_the_outputs(trusted):
    check_again(Net(CASES[1].values[0], seed=2))


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: streams beside each other")
@pytest.mark.parametrize("settings", CASES)
def test_step_bits_do_not_depend_on_what_runs_beside(settings):
    assert check_streams(Net(settings, seed=4)).cuda_mlp


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # of the interpreter's numpy: that is what is tested
def test_gradient_that_overflows_is_seen_in_its_models_total_alone(trusted):
    net = Net(CASES[1].values[0], seed=3)
    step, losses = net.fuse(), torch.zeros(net.models, device=DEVICE)
    rows = gradient_of(step, net.x, net.target, losses)
    (group,) = step.groups
    assert step.total(group, rows).isfinite().all()
    net.target[1] *= 1e6
    gradient_of(step, net.x, net.target, losses)
    assert step.total(group, rows).isfinite().tolist() == [True, False]
    assert rows[0].isfinite().all()
    assert not rows[1].isfinite().all()


def test_kernels_are_trusted_after_a_trial():
    assert encoder_mlp_cuda.proven(DEVICE)


WRITTEN = [
    ("feed", 8),
    ("feed", 9),
    ("feed", 10),
    ("feed_back", 5),
    ("feed_back", 6),
    ("feed_back", 7),
    ("feed_back", 8),
]


@pytest.mark.parametrize(
    ("name", "argument", "amount"),
    [*((*where, 10.0) for where in WRITTEN), ("feed", 8, NAN), ("feed_back", 9, math.inf)],
)
def test_kernel_that_computes_something_else_is_not_trusted(name, argument, amount, monkeypatch):
    real = encoder_mlp_cuda._run

    def wrong(which, programs, models, warps, shared, cluster, *args):
        real(which, programs, models, warps, shared, cluster, *args)
        if which == name:
            args[argument].view(-1)[:2] += amount

    monkeypatch.setattr(encoder_mlp_cuda, "_run", wrong)
    with pytest.warns(UserWarning, match=r"feed-forward of width 64 in CUDA C\+\+ is off by"):
        assert not encoder_mlp_cuda.proven(DEVICE)
    assert not encoder_mlp_cuda.proven(DEVICE), "and is not tried again"


def test_step_whose_kernels_are_not_trusted_goes_the_other_way(monkeypatch):
    monkeypatch.setattr(encoder_attention_cuda, "proven", lambda rank, device: True)
    monkeypatch.setattr(encoder_mlp_cuda, "proven", lambda device: False)
    step = Net(CASES[2].values[0]).fuse()
    assert step.cuda_attention
    assert not step.cuda_mlp


def test_models_too_few_to_fill_a_gpu_take_the_other_way(trusted, monkeypatch):
    monkeypatch.setattr(encoder_mlp_cuda, "ENOUGH", 5)
    assert not Net(CASES[0].values[0]).fuse().cuda_mlp, "two models of two blocks"
    assert Net(CASES[1].values[0]).fuse().cuda_mlp, "two of four"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((32, 256, 256, FP16), "dim 32, ffn_dim 256 and 256"),
        ((64, 128, 256, FP16), "dim 64, ffn_dim 256 and 128"),
        ((64, 256, 384, FP16), "dim 64, ffn_dim 384 and 256"),
        ((64, 256, 256, FP32), "this shape has torch.float32"),
        ((64, 4096, 2048, FP16), ""),
    ],
)
def test_kernels_refuse_what_they_do_not_take(given, said):
    refused = encoder_mlp_cuda.refusal(*given)
    assert said in refused
    assert bool(said) == bool(refused)


def test_tiles_are_taken_two_at_a_time():
    layer = encoder_mlp_cuda.Layer(1, 3 * encoder_mlp_cuda.FORWARD_TOKENS, 256, row=0)
    gradients = Gradients(*[None] * 3, token_splits=2, row=0, unscale=1.0)
    weights = MlpWeights(None, None, None)
    with pytest.raises(AssertionError, match="two at a time"):
        encoder_mlp_cuda.backward(layer, None, None, weights, gradients)


BARRIERS = {  # waits that keep warps apart, by what is said of each
    "": "",
    "a part of the weights": "// the last\n                together();",
    "slopes": "meet(FULL, BACK_WARPS);",
    "slopes that are written over": "meet(FREE + (tile & 1), BACK_WARPS);",
    "a letter": "wait_for_post(now, tile >> 1);",
}


@pytest.mark.parametrize("dropped", BARRIERS)
def test_warps_wait_for_each_other(dropped, tmp_path):
    check_races(encoder_mlp_cuda, BARRIERS[dropped], tmp_path)
