"""Kernels for GPUs against float64: training steps, ensembles, points. Without a GPU they run in
Triton's interpreter."""

import dataclasses
import math
import types

import pytest
import torch
from support.small_runs import after_overflows, tiny_before_the_last_norm
from support.tolerance import same

pytest.importorskip("triton", reason="the kernels are written in triton")
from support.gpu import (
    DEVICE,
    FP32,
    INTERPRETED,
    NAN,
    near,
    normal,
)
from support.nets import (
    STEP,
    Net,
    buffers_of,
    case,
    check_gradients,
    check_step,
    check_streams,
    gradient_of,
    odd,
    rows_of,
    signs_of,
)

from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.kernels import encoder_attention_triton, encoder_mlp_cuda
from headwise.kernels.farthest_data_triton import farthest
from headwise.model.transformer import build
from headwise.tasks import Farthest
from headwise.training import checkpoint, engine, ensemble
from headwise.training.flat import OPERANDS, Layout
from headwise.training.fused_encoder import (
    FusedEncoder,
    cuda_attention_refusal,
    cuda_mlp_refusal,
    model_bytes,
    refusal,
)
from headwise.training.run import Recipe, Run

pytestmark = pytest.mark.usefixtures("products_as_on_a_gpu")

# ---- the fused step


CASES = [
    # projection, heads and output apart
    case("fp32", 16, (4, 1), tokens=2, batch=32, depth=2, width=2),
    case("fp32", 16, (8, 2), tokens=4, batch=16, queries=1, each=2),
    case("fp32", 32, (32, 16), batch=8, width=2, ffn_dim=128, queries=3),
    case("fp32", 16, (16, 8), tokens=12, batch=16, depth=2, queries=1),
    case("fp32", shapes=[odd(2, 24), odd(16, 3)]),
    case("tf32", 32, (32, 8), depth=2, width=2),
    case("fp16", 16, (1, 4), tokens=2, batch=32, width=3, queries=1),
    case("fp16", 32, (8, 16), tokens=8, batch=24, width=2),
    case("bf16", 16, (8, 16), tokens=8, batch=8, depth=2),
    # the whole attention part in one kernel
    case("fp16", 32, (32, 16), batch=8, depth=2, width=3),
    case("fp16", 16, (16,), tokens=32, batch=2, depth=2, queries=1, each=2),
    case("fp16", 64, (64, 32), tokens=64, batch=1),
    case("bf16", 32, (16, 32), batch=12, width=2),
    # both in one ensemble
    case("fp16", 32, (32, 8, 16), depth=2, queries=1),
    case("bf16", 32, (4, 16), depth=2, width=2),
    # positions
    case("fp32", 16, (4, 16), tokens=8, batch=8, depth=2, width=2, positions="additive"),
    case("fp32", 16, (8, 32), tokens=4, batch=16, positions="concatenated"),
    case("fp16", 16, (2, 8), tokens=16, batch=4, depth=2, queries=1, positions="concatenated"),
    case("fp16", 16, (16, 32), batch=8, positions="concatenated"),
    case("fp16", 32, (32, 16), batch=4, depth=2, positions="additive"),
    case("fp32", 16, (8, 32), tokens=4, batch=16, depth=2, positions="room"),
    case("fp16", 16, (16, 32), batch=8, positions="room"),
    # short sequences side by side
    case("fp16", 32, (32, 16), tokens=4, batch=16, depth=2, width=2),
    case("bf16", 32, (16,), tokens=8, batch=16, queries=1),
    case("fp16", 32, (32, 8, 2), tokens=2, batch=32, depth=2),
]  # fmt: skip


@pytest.mark.parametrize("settings", CASES)
def test_step_equals_the_module_through_autograd(settings):
    check_step(Net(settings))


@pytest.mark.parametrize("settings", [CASES[i] for i in (2, 10, 13)])
def test_step_again_gives_the_same_bits_and_the_forward_pass_alone_the_outputs(settings):
    net, bound = Net(settings, seed=2), STEP[settings.precision]
    net.x[1:] = net.x[0]  # the same sequences for every model, as a view
    shared = net.x[0].expand(net.models, -1, -1, -1)
    step, losses = net.fuse(), torch.full((2, net.models), NAN, device=DEVICE)
    first = gradient_of(step, net.x, net.target, losses[0]).clone()
    same(gradient_of(step, shared, net.target, losses[1]), first, "gradients")
    same(losses[1], losses[0], "losses")
    y, *_ = net.exact(signs_of(net, step))
    near(net.fuse(training=False).forward(shared), y, bound, "outputs")
    near(step.forward(net.x), y, bound, "outputs")


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: streams beside each other")
@pytest.mark.parametrize("settings", [CASES[i] for i in (3, 9, 13, 14, 16)])
def test_step_bits_do_not_depend_on_what_runs_beside(settings):
    assert not check_streams(Net(settings, seed=4)).cuda_attention


class Wider:
    """A kernel that takes several heads at a time."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *given, **sizes: self.kernel[grid](*given, **{**sizes, "BC": 2 * sizes["R"]})


def test_attention_part_takes_several_heads_at_a_time(monkeypatch):
    net = Net(CASES[12].values[0])
    monkeypatch.setattr(encoder_attention_triton, "mix", Wider(encoder_attention_triton.mix))
    monkeypatch.setattr(
        encoder_attention_triton, "mix_back", Wider(encoder_attention_triton.mix_back)
    )
    step, losses = net.fuse(), torch.zeros(net.models, device=DEVICE)
    rows = gradient_of(step, net.x, net.target, losses)
    exact = net.exact(signs_of(net, step))
    near(losses, exact.losses, STEP["bf16"], "losses")
    check_gradients(net, rows, exact, STEP["bf16"])


def test_models_do_not_mix():
    """Another model's weights, data and targets change nothing."""
    net = Net(CASES[13].values[0])
    step, losses = net.fuse(), torch.zeros(2, net.models, device=DEVICE)
    first = gradient_of(step, net.x, net.target, losses[0]).clone()
    for tensor in {id(t): t for t in (net.weights, net.half, net.x, net.target)}.values():
        tensor[1] = tensor[1].flip(-1)
    second = gradient_of(step, net.x, net.target, losses[1])
    for m in (0, 2):
        same(second[m], first[m], f"gradients of model {m}")
        same(losses[1, m], losses[0, m], f"loss of model {m}")
    assert not torch.equal(second[1], first[1])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_model_that_is_not_finite_stays_alone_in_a_step_of_short_sequences():
    net = Net(CASES[-1].values[0])
    assert (net.settings.tokens, net.models) == (2, 3)
    step, losses = net.fuse(), torch.zeros(2, net.models, device=DEVICE)
    first = gradient_of(step, net.x, net.target, losses[0]).clone()
    net.weights[1], net.half[1] = NAN, NAN
    second = gradient_of(step, net.x, net.target, losses[1])
    assert losses[1, 1].isnan()
    for m in (0, 2):
        same(second[m], first[m], f"gradients of model {m}")
        same(losses[1, m], losses[0, m], f"loss of model {m}")


def test_gradients_of_half_operands_survive_a_small_loss():
    """Most of them are below float16's smallest normal number, so they are carried times a power of
    two."""
    net = Net(CASES[9].values[0])
    step, losses = net.fuse(), torch.zeros(net.models, device=DEVICE)
    outputs = step.forward(net.x)
    net.target = (outputs + 1e-2 * (net.target - outputs)).detach()
    rows = gradient_of(step, net.x, net.target, losses)
    # rounding moves the outputs by as much as they are off the target; so the loss is that of the
    # outputs that were found
    kept = net.task
    shift = (outputs.double() - net.exact(signs_of(net, step))[0]).detach()
    net.task = types.SimpleNamespace(loss=lambda y, target: kept.loss(y + shift, target))
    exact = net.exact(signs_of(net, step))
    near(losses, exact.losses, STEP["fp16"])
    check_gradients(net, rows, exact, 2 * STEP["fp16"])


# ---- what the step takes, and how much memory


PAPER = paper_shape(dim=64, rank=8, ffn_dim=2048)
REFUSED = [
    (
        {"norm": "rms"},
        {},
        "norm='scalar' and norm_at='post', this shape has norm='rms' and norm_at='post'",
    ),
    (
        {"norm_at": "pre"},
        {},
        "norm='scalar' and norm_at='post', this shape has norm='scalar' and norm_at='pre'",
    ),
    ({"kv_lora_rank": 16}, {}, "plain heads"),
    ({"num_kv_heads": 4}, {}, "plain heads"),
    ({"v_head_dim": 16}, {}, "plain heads"),
    ({"causal": True}, {}, "this shape has a mask"),
    ({"windows": (4,)}, {}, "this shape has a mask"),
    ({"qk_norm": "head"}, {}, "this shape has query/key norm"),
    ({"qk_rope_head_dim": 4}, {}, "this shape has rotary positions"),
    ({"vocab_size": 100}, {}, "this shape has tokens"),
    ({"activation": "gelu"}, {}, "a ReLU feed-forward"),
    ({"ffn_dim": 0}, {}, "a ReLU feed-forward"),
    ({"qkv_bias": False}, {}, "biases everywhere"),
    ({"out_bias": False}, {}, "biases everywhere"),
    ({"ffn_bias": False}, {}, "biases everywhere"),
    ({"dim": 48}, {}, "dim 16, 32, 64 or 128, this shape has dim 48"),
    ({"ffn_dim": 96}, {}, "ffn_dim in 64s and heads x rank in 16s, this shape has 96 and 64"),
    (
        {"num_heads": 3, "num_kv_heads": 3},
        {},
        "ffn_dim in 64s and heads x rank in 16s, this shape has 2048 and 24",
    ),
    (
        {"head_dim": 80, "v_head_dim": 80},
        {},
        "at most 256 tokens and rank 64, this shape has 16 tokens and rank 80",
    ),
    (
        {},
        {"tokens": 257, "batch": 64},
        "at most 256 tokens and rank 64, this shape has 257 tokens and rank 8",
    ),
    (
        {"num_heads": 2, "num_kv_heads": 2, "head_dim": 32, "v_head_dim": 32},
        {"tokens": 192, "precision": "tf32"},
        "rank 16 or less beyond 128 tokens",
    ),
    ({}, {"batch": 2}, "batch x tokens in 64s, this shape has 32"),
]


@pytest.mark.parametrize(("changes", "call", "why"), REFUSED)
def test_step_refusal_says_why(changes, call, why):
    assert refusal(PAPER, **{"tokens": 16, "batch": 256}) == ""
    assert why in refusal(PAPER.replace(**changes), **{"tokens": 16, "batch": 256, **call})


def test_window_of_a_later_layer_is_refused_too():
    assert "this shape has a mask" in refusal(PAPER.replace(depth=2, windows=(0, 4)), 16, 256)


def test_shapes_computed_before_and_the_largest_sizes_are_taken():
    for settings in (c.values[0] for c in CASES):
        assert {
            refusal(shape, settings.tokens, settings.batch) for _, shape in settings.groups
        } == {""}
    for dim in (16, 32, 64, 128):
        assert refusal(paper_shape(dim=dim, rank=16, ffn_dim=64), 256, 1) == ""
    assert refusal(paper_shape(dim=128, rank=64, ffn_dim=64), 1, 64) == ""


def bytes_held(groups, tokens, batch, precision):
    """By the tensors of an ensemble in training, without the data."""
    models, dtype = sum(count for count, _ in groups), OPERANDS[precision]
    with torch.device("meta"):
        model = build(groups[0][1], models=models, head_groups=groups)
        layout = Layout.of(model.named_parameters())
        weights = torch.empty(models, layout.length)
        half = weights if dtype == FP32 else weights.to(dtype)
        moments = [torch.empty_like(weights) for _ in range(2)]
        step = FusedEncoder(rows_of(groups, layout, weights, half, precision), batch, tokens)
        operands = torch.empty(models, batch * tokens, groups[0][1].dim, dtype=dtype)  # the input
    held = [*buffers_of(step), *moments, operands]
    return sum(t.numel() * t.element_size() for t in held)


@pytest.mark.parametrize("precision", OPERANDS)
@pytest.mark.parametrize("tokens", [16, 24])
@pytest.mark.parametrize(
    "shape",
    [
        PAPER,
        paper_shape(rank=64),
        paper_shape(rank=16, width=8, depth=2),
        paper_shape(rank=1, width=64, depth=4),
        paper_shape(dim=16, rank=16, ffn_dim=64),
        paper_shape(dim=128, rank=32, depth=12, ffn_dim=512),
    ],
    ids=lambda s: f"{s.num_heads}x{s.head_dim}, dim {s.dim}, depth {s.depth}",
)
def test_needs_is_the_memory_of_a_model(shape, tokens, precision):
    """Of one in a mixed ensemble; where every attention part is one kernel a little less is held,
    where the feed-forward is one, too, its parts of a gradient more."""
    wide = shape.num_heads * shape.head_dim
    narrow = shape.replace(num_heads=wide // 8, num_kv_heads=wide // 8, head_dim=8, v_head_dim=8)
    stated = 3 * model_bytes(shape, tokens, 256, precision)
    assert stated == 3 * model_bytes(narrow, tokens, 256, precision)
    mixed = bytes_held([(2, shape), (1, narrow)], tokens, 256, precision)
    assert bytes_held([(3, shape)], tokens, 256, precision) <= mixed
    fed = not cuda_mlp_refusal(shape, tokens, 256, precision) and not cuda_attention_refusal(
        shape, tokens, 256, precision
    )
    most = 1.5 * mixed + (
        3 * encoder_mlp_cuda.dx_partials(shape.ffn_dim) * 256 * tokens * shape.dim * 2 if fed else 0
    )
    assert mixed <= stated <= most, f"{stated / mixed:.2f} of what is held"


# ---- training


def trained(runs, monkeypatch, fuses):
    made, gradient = [], FusedEncoder.gradient
    with monkeypatch.context() as patch:
        family = FusedEncoder if fuses else None
        patch.setattr(ensemble, "family_of", lambda run, device: family)
        patch.setattr(FusedEncoder, "gradient", lambda *given: made.append(1) or gradient(*given))
        rows = engine.train(runs, device=DEVICE.type, advance=lambda n: None)
    assert bool(made) == fuses
    return rows


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("fp16", 2e-3)])
def test_training_with_the_step_is_training_without(precision, bound, monkeypatch):
    recipe = Recipe(steps=6, epoch=3, batch=4, held_out=128, evals=1, lr=0.02, precision=precision)
    cases = [(16, 0.02, 0.0), (8, 0.05, 0.1)]
    runs = [
        Run(
            paper_shape(dim=16, rank=rank, ffn_dim=64),
            Farthest(16, 16),
            dataclasses.replace(recipe, lr=lr, weight_decay=decay),
            3,
        )
        for rank, lr, decay in cases
    ]
    monkeypatch.setattr(checkpoint, "load", lambda folder, run: after_overflows(run))
    ours = trained(runs, monkeypatch, True)
    theirs = trained(
        [
            dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, precision="fp32"))
            for run in runs
        ],
        monkeypatch,
        False,
    )
    for a, b in zip(ours, theirs, strict=True):
        assert a["models"] == len(runs)
        assert a["curve"] == pytest.approx(b["curve"], rel=bound)
        assert a["held_out"] == pytest.approx(b["held_out"], rel=bound)
        assert abs(b["curve"][1] - b["curve"][0]) > 20 * bound * b["curve"][0], (
            "it learns too little to be compared"
        )


def test_overflow_costs_one_step_of_one_model_and_lasting_overflow_the_run(monkeypatch):
    recipe = Recipe(steps=6, epoch=3, batch=4, held_out=128, evals=1, lr=0.02, precision="fp16")
    runs = [
        Run(paper_shape(dim=32, rank=rank, ffn_dim=64), Farthest(32, 16), recipe, 0)
        for rank in (16, 32)
    ]  # the first is the second split
    usual, gradient, steps = trained(runs, monkeypatch, True), FusedEncoder.gradient, []

    def overflowing(when):
        def spoiled(step, group, *given):
            grads = gradient(step, group, *given)
            if group.first == 1:
                if when(len(steps)):
                    grads[0, 3].fill_(math.inf)
                steps.append(1)
            return grads

        return spoiled

    def rows(when):
        with monkeypatch.context() as patch:
            patch.setattr(FusedEncoder, "gradient", overflowing(when))
            return trained(runs, monkeypatch, True)

    warm = 2 if not INTERPRETED else 0  # gradients made before the graph
    once = rows(lambda step: step == 1 + warm)
    assert [row["skipped"] for row in once] == [
        1 if INTERPRETED else 2,
        0,
    ]  # a graph makes the same steps in both epochs
    assert [row["skipped"] for row in usual] == [0, 0]
    assert once[0]["status"] == "done"
    assert once[0]["held_out"] != usual[0]["held_out"]
    if INTERPRETED:
        assert once[1]["curve"] == usual[1]["curve"], "the other model"
        steps.clear()
        lasting = rows(lambda step: step >= 0)
        assert [row["status"] for row in lasting] == ["diverged", "done"]
        assert lasting[0]["skipped"] == 6
        assert lasting[1]["held_out"] == usual[1]["held_out"]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_loss_scale_falls_where_gradients_overflow(monkeypatch):
    recipe = Recipe(steps=12, epoch=3, batch=4, held_out=128, evals=1, lr=1e-7, precision="fp16")
    run = Run(paper_shape(dim=16, rank=16, ffn_dim=64), Farthest(16, 16), recipe, 0)
    monkeypatch.setattr(checkpoint, "load", lambda folder, run: tiny_before_the_last_norm(run))
    (row,) = trained([run], monkeypatch, True)
    assert row["status"] == "done"
    assert 3 <= row["skipped"] <= 6, "the first epoch or two, not all four"


@pytest.mark.parametrize("settings", [CASES[i] for i in (1, 15, 16)])
def test_gradients_of_a_model_are_times_its_loss_scale(settings):
    net = Net(settings)
    losses = [torch.empty(net.models, device=DEVICE) for _ in range(2)]
    scale = torch.tensor([0.25, 1.0, 0.125, 0.5], device=DEVICE)[: net.models]
    plain = gradient_of(net.fuse(), net.x, net.target, losses[0])
    scaled = gradient_of(net.fuse(), net.x, net.target, losses[1], scale)
    same(losses[1], losses[0], "losses")
    same(scaled, plain * scale.unsqueeze(1), "powers of two change no digit")


# ---- the points of the farthest-neighbour task


@pytest.mark.parametrize(
    ("batch", "tokens", "dim"),
    [(3, 16, 16), (5, 2, 3), (4, 17, 33), (2, 33, 64), (1, 3, 2), (7, 12, 5)],
)
def test_farthest_points_equal_the_plain_computation(batch, tokens, dim):
    raw = normal(tokens, batch, tokens, dim)
    kept = raw.clone()
    x, target = farthest(raw)
    same(raw, kept, "the draws")
    points = raw.double() / raw.double().norm(dim=-1, keepdim=True)
    near(x, points, 1e-6, "points")
    products = points @ points.mT
    near(
        (x.double() * target.double()).sum(-1),
        products.amin(-1),
        1e-6,
        "the least inner product",
        largest=1.0,
    )
    two = products.topk(2, dim=-1, largest=False).values
    clear = two[..., 1] - two[..., 0] > 1e-5
    assert clear.double().mean() > 0.9 or tokens == 2
    expected = torch.gather(points, 1, products.argmin(-1, keepdim=True).expand_as(points))
    near(target[clear], expected[clear], 1e-6, "targets")


def test_farthest_points_do_not_overflow_and_survive_small_draws():
    raw = normal(0, 2, 5, 7)
    for factor in (1e-15, 1e15):
        x, target = farthest(raw * factor)
        near(x, farthest(raw)[0].double(), 1e-6)
        near(target, farthest(raw)[1].double(), 1e-6)
