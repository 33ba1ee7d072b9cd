"""The attention part in CUDA C++ (kernels/encoder_attention_cuda*.cu) against float64: compiled on
a GPU, elsewhere the same lines on a CPU (warp.h)."""

import ctypes
import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="what is around these kernels is written in triton")
from support.emulate import check_races, run_attention, trusting
from support.gpu import DEVICE, INTERPRETED, NAN, near
from support.nets import Net, case, check_again, check_step, check_streams

from headwise.kernels import encoder_attention_cuda, nvrtc
from headwise.kernels.encoder import AttentionWeights, End


@pytest.fixture(autouse=True)
def whole(monkeypatch):
    yield from trusting(encoder_attention_cuda, run_attention, monkeypatch)


@pytest.fixture
def trusted(monkeypatch):
    """Without a trial, which has tests of its own."""
    monkeypatch.setattr(encoder_attention_cuda, "proven", lambda *given: True)


CASES = [
    case("fp16", 64, (64, 1), batch=8),
    case("fp16", 64, (2, 8), batch=8, depth=2, queries=1, each=2),
    case("fp16", 64, (32, 4, 16), batch=8, width=2),
    case("fp16", 64, (1, 32), batch=24, depth=2, width=3, queries=5),
    case("fp16", 64, (16, 4), batch=8, depth=2, positions="additive"),
]
FEW = 1  # programs: each goes through several tiles of tokens


@pytest.mark.parametrize(
    ("settings", "programs"),
    [(c.values[0], FEW if i == 3 else encoder_attention_cuda.FILLED) for i, c in enumerate(CASES)],
)
def test_step_equals_the_module_through_autograd(settings, programs, trusted, monkeypatch):
    monkeypatch.setattr(encoder_attention_cuda, "FILLED", programs)
    assert check_step(Net(settings)).cuda_attention


@pytest.mark.parametrize("settings", [CASES[1], CASES[3]])
def test_step_again_gives_the_same_bits_and_the_forward_pass_alone_the_outputs(
    settings, trusted, monkeypatch
):
    monkeypatch.setattr(encoder_attention_cuda, "FILLED", FEW)
    check_again(Net(settings, seed=2))


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: streams beside each other")
@pytest.mark.parametrize("settings", CASES[1:])
def test_step_bits_do_not_depend_on_what_runs_beside(settings):
    assert check_streams(Net(settings, seed=4)).cuda_attention


@pytest.mark.parametrize("rank", encoder_attention_cuda.RANKS)
def test_kernels_of_a_rank_are_trusted_after_a_trial(rank):
    assert encoder_attention_cuda.proven(rank, DEVICE)


LARGE = {
    1: 2001,
    2: 2001,
    4: 1001,
    8: 501,
    16: 301,
    32: 201,
    64: 101,
}  # odd, and with a key of at most 3 a whole number in half


@pytest.mark.parametrize("rank", encoder_attention_cuda.RANKS)
def test_scores_of_thousands_are_a_softmax_all_the_same(rank):
    """Whole numbers, and powers of two instead of e, so that scores are exact. A bias of the keys
    makes them large, no two rows alike, and changes no weight: what is taken off before the
    exponential may be a rounded maximum, but one for the whole row."""
    M, T, D = 1, encoder_attention_cuda.TOKEN_TILE, encoder_attention_cuda.WIDTH
    C = 2 * encoder_attention_cuda.COLUMN_TILE
    draw = torch.Generator().manual_seed(rank)
    x = torch.randint(-3, 4, (M, T, D), generator=draw).half()
    w = torch.nn.functional.one_hot(torch.randint(D, (3 * C,), generator=draw), D).half()
    out = torch.randn(D, C, generator=draw).half()
    half = torch.cat([w.flatten(), torch.zeros(3 * C).half(), out.flatten()]).to(DEVICE)
    zero, rows = torch.zeros(3 * C, device=DEVICE), torch.zeros(M, T, D, device=DEVICE)
    bias = zero.clone()
    bias[C : 2 * C] = LARGE[rank]
    partial = torch.full((M, 2, T, D), NAN, device=DEVICE)
    layer = encoder_attention_cuda.Layer(M, T, C, rank, half.numel(), scale=math.log(2), average=1)
    weights = AttentionWeights(half, bias, half[3 * C * (D + 1) :])
    u, y = rows.clone(), x.clone().to(DEVICE)
    end = End(zero, zero, rows, zero, u, y, torch.empty(M, T, device=DEVICE))
    x = x.to(DEVICE)
    encoder_attention_cuda.forward(layer, x, weights, end, partial, 2, first=True)
    x = x.cpu()
    qkv = x.double() @ w.double().mT + bias.double().cpu()
    q, k, v = (
        t.view(-1, encoder_attention_cuda.TOKENS, C // rank, rank).transpose(1, 2)
        for t in qkv.split(C, -1)
    )
    scores = q @ k.mT
    assert scores.max() > 2000
    assert (scores != scores.half()).any() or rank == 1
    heads = (torch.softmax(scores * math.log(2), -1) @ v).transpose(1, 2).reshape(M, T, C)
    near(partial.sum(1).cpu(), heads @ out.double().mT, 2e-3, "outputs")


WRITTEN = [
    ("forward", 8),
    ("forward", 9),
    ("forward", 10),
    ("forward", 18),
    ("backward", 5),
    ("backward", 6),
    ("backward", 7),
    ("backward", 8),
]


@pytest.mark.parametrize(
    ("name", "argument", "amount"),
    [*((*place, 10.0) for place in WRITTEN), ("forward", 18, NAN), ("backward", 5, NAN)],
)
def test_kernel_that_computes_something_else_is_not_trusted(name, argument, amount, monkeypatch):
    real = encoder_attention_cuda._run

    def wrong(which, rank, programs, models, warps, shared, cluster, *args):
        real(which, rank, programs, models, warps, shared, cluster, *args)
        if which == name:
            args[argument].view(-1)[3:5] += amount

    monkeypatch.setattr(encoder_attention_cuda, "_run", wrong)
    with pytest.warns(UserWarning, match=r"rank 8 in CUDA C\+\+ is off by"):
        assert not encoder_attention_cuda.proven(8, DEVICE)
    assert not encoder_attention_cuda.proven(8, DEVICE), "and is not tried again"


def test_kernel_that_does_not_compile_is_not_trusted(monkeypatch):
    def fails(*args):
        raise RuntimeError("NVRTC: no such architecture")

    monkeypatch.setattr(encoder_attention_cuda, "_run", fails)
    with pytest.warns(UserWarning, match="was not compiled, Triton takes over: NVRTC"):
        assert not encoder_attention_cuda.proven(2, DEVICE)


def test_full_card_says_nothing_of_the_kernels(monkeypatch):
    real, full = encoder_attention_cuda._run, [True]

    def first_full(*args):
        if full.pop() if full else False:
            raise torch.OutOfMemoryError("CUDA out of memory")
        real(*args)

    monkeypatch.setattr(encoder_attention_cuda, "_run", first_full)
    with pytest.raises(torch.OutOfMemoryError):
        encoder_attention_cuda.proven(4, DEVICE)
    assert encoder_attention_cuda.proven(4, DEVICE), "tried again"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_trial_does_not_care_how_it_is_called(mode):
    with mode():
        assert encoder_attention_cuda.proven(16, DEVICE)


def test_step_whose_kernels_are_not_trusted_goes_the_other_way(monkeypatch):
    monkeypatch.setattr(encoder_attention_cuda, "proven", lambda rank, device: rank != 1)
    assert not Net(CASES[0].values[0]).fuse().cuda_attention
    assert Net(CASES[1].values[0]).fuse().cuda_attention


@pytest.mark.parametrize("models", [1, 2, 5, 14, 70])
@pytest.mark.parametrize("columns", [64, 128, 192, 512, 4096])
@pytest.mark.parametrize("tiles", [1, 3, 16, 32])
def test_work_is_cut_into_equal_parts(models, columns, tiles):
    tokens = tiles * encoder_attention_cuda.TOKEN_TILE
    column_splits = encoder_attention_cuda.column_splits(models, tokens, columns)
    token_splits = encoder_attention_cuda.token_splits(models, tokens, columns)
    column_tiles = columns // encoder_attention_cuda.COLUMN_TILE
    assert column_tiles % column_splits == 0
    assert tiles % token_splits == 0
    filled = encoder_attention_cuda.FILLED
    if column_splits > 1:
        assert models * tiles * column_splits < 2 * filled, "no more than fill a GPU"
    fewer = [n for n in range(1, token_splits) if tiles % n == 0]
    assert all(models * column_tiles * n < filled for n in fewer), "no more than fill a GPU"


def test_arguments_of_a_kernel_are_tensors_ints_and_floats():
    kinds = {type(nvrtc._argument(arg)) for arg in (True, 3, np.int64(3))}
    assert kinds == {ctypes.c_int}
    assert isinstance(nvrtc._argument(0.5), ctypes.c_float)
    assert isinstance(nvrtc._argument(np.float64(0.5)), ctypes.c_float)
    with pytest.raises(TypeError, match="got str"):
        nvrtc._argument("3")


BARRIERS = {  # waits that keep warps apart, by what is said of each
    "": "",
    "a block's weights": "together();  // this block is there",
    "a tile": "where the next one goes\n        together();",
    "gradients of heads": "together();  // every sequence's",
    "a letter": "wait_for_post(box + (turn & 1) * 16, turn >> 1);",
}


@pytest.mark.parametrize(
    ("rank", "dropped"), [(1, ""), (64, ""), *((8, dropped) for dropped in BARRIERS)]
)
def test_warps_wait_for_each_other(rank, dropped, tmp_path):
    check_races(
        encoder_attention_cuda,
        BARRIERS[dropped],
        tmp_path,
        R=rank,
        WARPS=encoder_attention_cuda.WARPS[rank],
    )
