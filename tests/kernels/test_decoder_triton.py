"""Blocks of pre-norm models as kernels against the modules in float64. Without a GPU they run in
Triton's interpreter."""

import copy

import pytest
import torch
from support.decoder_net import (
    GPT,
    Net,
    blocks_only,
    check_blocks,
    counted,
    trained_alike,
)
from support.nets import buffers_of, rows_of
from support.tolerance import same, seeded

pytest.importorskip("triton", reason="the kernels are written in triton")
from support.gpu import DEVICE, FP16, FP32, NAN, near, normal

from headwise.kernels import embed_readout
from headwise.model.layers import Norm
from headwise.model.transformer import build
from headwise.training.decoder_blocks import TritonBlocks
from headwise.training.flat import OPERANDS, Layout
from headwise.training.fused_decoder import (
    TOKEN_TILE,
    CudaBlocks,
    cuda_refusal,
    model_bytes,
    refusal,
)
from headwise.training.loss_scale import base_scale

pytestmark = pytest.mark.usefixtures("products_as_on_a_gpu")


def case(name, *args):
    return pytest.param(*args, id=name)


CASES = [
    case("GPT-2's block, odd sizes", [(1, blocks_only(3)), (2, blocks_only(4))], 12, 16, "fp32"),
    case(
        "two layers, rank 1 and full",
        [(1, blocks_only(16, dim=16, depth=2)), (1, blocks_only(1, dim=16, depth=2))],
        8,
        8,
        "fp32",
    ),
    case(
        "every token sees every other", [(2, blocks_only(5, dim=80, causal=False))], 16, 4, "fp32"
    ),
    case("ReLU", [(2, blocks_only(2, dim=32, activation="relu", ffn_dim=128))], 4, 16, "fp32"),
    case("an inner width of its own", [(1, blocks_only(5, dim=32, head_dim=8))], 4, 16, "fp32"),
    case(
        "a hidden width of its own",
        [(2, blocks_only(2, dim=16, ffn_dim=37)), (1, blocks_only(4, dim=16, ffn_dim=37))],
        4,
        16,
        "fp32",
    ),
    case(
        "a hidden width of its own, half precision",
        [(1, blocks_only(2, dim=16, ffn_dim=101))],
        4,
        16,
        "fp16",
    ),
    case("width 128", [(1, blocks_only(2, dim=128))], 2, 32, "fp32"),
    case("half precision", [(1, blocks_only(3)), (1, blocks_only(16))], 12, 16, "fp16"),
    case("brain floats", [(2, blocks_only(4, dim=64))], 8, 8, "bf16"),
    case("TF32", [(2, blocks_only(4, dim=64, depth=2))], 8, 8, "tf32"),
]


@pytest.mark.parametrize(("splits", "tokens", "batch", "precision"), CASES)
def test_blocks_equal_the_modules_through_autograd(splits, tokens, batch, precision):
    check_blocks(Net(splits, tokens, batch, precision))


def test_blocks_again_give_the_same_bits_and_alone_the_outputs():
    net = Net([(1, blocks_only(4, dim=16, depth=2, activation="relu"))], 8, 8, "fp32", seed=5)
    made = net.blocks()
    y = made.forward(net.x).clone()
    dx, rows = (t.clone() for t in made.backward(net.g))
    same(made.forward(net.x), y, "outputs")
    for a, b in zip(made.backward(net.g), (dx, rows), strict=True):
        same(a, b, "gradients")
    same(net.blocks(training=False).forward(net.x), y, "outputs without training")


def test_sums_do_not_depend_on_the_number_of_tiles():
    for batch in (8, 8 * (TritonBlocks.MOST_SPLITS + 1)):
        splits = [(1, blocks_only(2, dim=16))]
        net = Net(splits, 8, batch, "fp32")
        made = net.blocks()
        assert made.splits == min(TritonBlocks.MOST_SPLITS, batch * 8 // TOKEN_TILE)
        made.forward(net.x)
        _, rows = made.backward(net.g)
        grads = net.exact()[2]
        for name in (
            "blocks.0.feed.up.weight",
            "blocks.0.attention.qkv.weight",
            "blocks.0.attention.out.weight",
        ):
            at, size = net.places[name]
            near(rows[:, at : at + size], grads[name].flatten(1), 1e-5, name)


REFUSED = [
    (
        {"norm": "rms"},
        {},
        "norm='layer' and norm_at='pre', this shape has norm='rms' and norm_at='pre'",
    ),
    (
        {"norm_at": "post"},
        {},
        "norm='layer' and norm_at='pre', this shape has norm='layer' and norm_at='post'",
    ),
    ({"num_kv_heads": 2}, {}, "plain heads"),
    ({"kv_lora_rank": 8}, {}, "plain heads"),
    ({"v_head_dim": 8}, {}, "plain heads"),
    ({"average": 2}, {}, "average 2"),
    ({"windows": (0, 7)}, {}, "no windows"),
    ({"qk_norm": "head"}, {}, "no query/key norm"),
    ({"qk_rope_head_dim": 4}, {}, "no rotary positions"),
    ({"activation": "swiglu"}, {}, "ReLU or GELU"),
    ({"ffn_dim": 0}, {}, "ReLU or GELU feed-forward"),
    ({"qkv_bias": False}, {}, "biases everywhere"),
    ({"out_bias": False}, {}, "biases everywhere"),
    ({"ffn_bias": False}, {}, "biases everywhere"),
    ({"dim": 56}, {}, "dim in 16s up to 128, this shape has dim 56"),
    ({"dim": 144}, {}, "dim in 16s up to 128, this shape has dim 144"),
    (
        {"head_dim": 65, "v_head_dim": 65},
        {},
        "at most 128 tokens and rank 64, this shape has 82 tokens and rank 65",
    ),
    ({}, {"tokens": 129}, "at most 128 tokens and rank 64, this shape has 129 tokens and rank 12"),
    ({}, {"batch": 7}, "batch x tokens in 64s, this shape has 574"),
]


@pytest.mark.parametrize(("changes", "call", "why"), REFUSED)
def test_refusal_says_why(changes, call, why):
    usual = {"tokens": 82, "batch": 64}
    assert refusal(GPT, **usual) == ""
    assert why in refusal(GPT.replace(**changes), **{**usual, **call})


def test_shapes_computed_before_are_all_taken():
    for splits, tokens, batch, precision in (c.values for c in CASES):
        assert {refusal(shape, tokens, batch, precision) for _, shape in splits} == {""}


@pytest.mark.parametrize("precision", OPERANDS)
@pytest.mark.parametrize(
    "shape",
    [GPT, GPT.replace(dim=128, num_heads=2, num_kv_heads=2, head_dim=64, v_head_dim=64, depth=3)],
)
def test_model_bytes_is_the_memory_of_a_model(shape, precision):
    dtype, families = OPERANDS[precision], [TritonBlocks]
    if not cuda_refusal(shape, 82, precision):
        families.append(CudaBlocks)
    with torch.device("meta"):
        layout = Layout.of(build(shape, models=3).named_parameters())
        weights = torch.empty(3, layout.length)
        half = weights if dtype == FP32 else weights.to(dtype)
        rows = rows_of([(3, shape)], layout, weights, half, precision)
        made = [family(rows, 64, 82, 1.0) for family in families]
    largest = max(sum(t.numel() * t.element_size() for t in buffers_of(one)) for one in made)
    held = largest + 3 * weights.numel() * 4  # moments, sums
    found = 3 * model_bytes(shape, 82, 64, precision)
    assert held <= found <= 1.5 * held, f"{found / held:.2f} of what is held"


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("fp16", 4e-3)])
def test_training_on_the_blocks_is_training_on_the_modules(precision, bound, monkeypatch):
    trained_alike(precision, bound, monkeypatch)


@pytest.mark.parametrize(
    ("models", "size", "dim"), [(3, (5, 17), 48), (1, (64,), 16), (2, (7, 3, 2), 101)]
)
def test_layer_norm_of_an_ensemble_is_the_plain_one(models, size, dim, monkeypatch):
    exact = Norm("layer", dim, models).double().to(DEVICE)
    given = [normal(7, models, *size, dim) * 3 + 1, normal(8, models, dim), normal(9, models, dim)]
    with torch.no_grad():
        exact.weight.copy_(given[1]), exact.bias.copy_(given[2])
    x, g = given[0].double().requires_grad_(), normal(10, models, *size, dim)
    y = exact(x)
    wanted = y, *torch.autograd.grad(y, [x, exact.weight, exact.bias], g.double())
    ours = Norm("layer", dim, models).to(DEVICE)
    ours.load_state_dict(exact.state_dict())
    monkeypatch.setattr(embed_readout, "possible", lambda x: True)
    used = counted("layer_norm", monkeypatch)
    x = given[0].clone().requires_grad_()
    for turned in (
        x,
        x.transpose(1, -2).contiguous().transpose(1, -2),
    ):  # rows that do not follow each other too
        y = ours(turned)
        for got, want in zip(
            (y, *torch.autograd.grad(y, [x, ours.weight, ours.bias], g)), wanted, strict=True
        ):
            near(got, want, 2e-6, "layer norm")
    assert len(used) == 2


def flat_rows(made):
    """Parameters that lie in one row per model, as those of an ensemble do."""
    params = dict(made.named_parameters())
    layout = Layout.of(params.items())
    rows = torch.full((made.models, layout.length), NAN, device=DEVICE)
    for (name, p), (at, size) in zip(params.items(), layout.spans.values(), strict=True):
        module, _, leaf = name.rpartition(".")
        view = rows[:, at : at + size].view(p.shape)
        view.copy_(p.detach())
        setattr(made.get_submodule(module), leaf, torch.nn.Parameter(view))
    return made


@pytest.mark.parametrize(
    ("models", "batch", "tokens", "inputs", "dim", "places"),
    [
        (3, 5, 82, 20, 48, 82),
        (1, 37, 7, 3, 16, 11),
        (2, 2, 128, 64, 64, 128),
        (2, 1, 1, 1, 37, 2),
        (1, 70, 17, 5, 32, 17),
    ],
)
def test_embed_and_readout_are_the_plain_ones(
    models, batch, tokens, inputs, dim, places, monkeypatch
):
    shape = GPT.replace(
        dim=dim,
        depth=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=dim,
        v_head_dim=dim,
        ffn_dim=16,
        input_dim=inputs,
        num_positions=places,
    )
    exact = build(shape, models=models)
    for i, p in enumerate(exact.parameters()):
        torch.nn.init.normal_(p, generator=seeded(i))
    ours = flat_rows(copy.deepcopy(exact).to(DEVICE))
    exact = exact.double().to(DEVICE)
    x, h = normal(1, models, batch, tokens, inputs), normal(2, models, batch, tokens, dim) * 3 + 1
    g, r = normal(3, models, batch, tokens, dim), normal(4, models, batch, tokens, 1)

    def both(made, kind):
        before = made.embed(x.to(kind))
        inner = h.to(kind).requires_grad_()
        after = made.unembed(inner)
        params = {name: p for name, p in made.named_parameters() if not name.startswith("blocks.")}
        early, late = (
            [name for name in params if name.startswith(starts)]
            for starts in (("positions", "read_in"), ("final", "read_out"))
        )
        first = torch.autograd.grad(before, [params[name] for name in early], g.to(kind))
        last = torch.autograd.grad(after, [inner, *(params[name] for name in late)], r.to(kind))
        return dict(
            zip(
                ["enter", "leave", *early, "inner", *late],
                [before, after, *first, *last],
                strict=True,
            )
        )

    wanted = both(exact, torch.float64)
    monkeypatch.setattr(embed_readout, "possible", lambda x: True)
    used = [counted(name, monkeypatch) for name in ("enter", "leave")]
    got = both(ours, torch.float32)
    assert used == [[1], [1]]
    assert len(got) == 10
    for name, want in wanted.items():
        near(got[name], want, 3e-6, name)


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"positions": "none", "num_positions": 0}, 4),
        ({"positions": "concatenated", "position_dim": 16}, 4),
        ({"dim": 80, "num_heads": 1, "num_kv_heads": 1, "head_dim": 80, "v_head_dim": 80}, 4),
        ({"input_dim": 65}, 4),
        ({"num_positions": 200}, 130),
    ],
)
def test_embeddings_of_other_kinds_stay_with_the_modules(changes, tokens, monkeypatch):
    monkeypatch.setattr(embed_readout, "possible", lambda x: True)
    shape = GPT.replace(depth=1, **changes)
    made = build(shape, models=2).to(DEVICE)
    used = counted("enter", monkeypatch)
    x = normal(1, 2, 1, tokens, shape.input_dim)
    assert made.embed(x).shape == (2, 1, tokens, shape.dim)
    assert not used


@pytest.mark.parametrize("changes", [{"output_dim": 2}, {"norm": "rms"}, {"norm": "layer-nobias"}])
def test_readouts_of_other_kinds_stay_with_the_modules(changes, monkeypatch):
    monkeypatch.setattr(embed_readout, "possible", lambda x: True)
    shape = GPT.replace(depth=1, **changes)
    made, used = build(shape, models=2).to(DEVICE), counted("leave", monkeypatch)
    assert made.unembed(normal(1, 2, 1, 4, 48)).shape == (2, 1, 4, shape.output_dim)
    assert not used


@pytest.mark.parametrize(("models", "wide"), [(2, 19), (2, 21), (3, 20)])
def test_inputs_of_another_size_are_refused_as_by_the_modules(models, wide, monkeypatch):
    made = build(GPT.replace(depth=1), models=2).to(DEVICE)
    monkeypatch.setattr(embed_readout, "possible", lambda x: True)
    used = [counted(name, monkeypatch) for name in ("enter", "leave", "layer_norm")]
    with pytest.raises(RuntimeError):
        made.embed(normal(1, models, 1, 4, wide))
    with pytest.raises(RuntimeError):
        made.unembed(normal(1, models, 1, 4, wide + 28))
    assert used == [[], [], []]


def test_inputs_that_have_a_gradient_stay_with_the_modules(monkeypatch):
    monkeypatch.setattr(embed_readout, "possible", lambda x: True)
    made = build(GPT.replace(depth=1), models=2).to(DEVICE)
    x = normal(1, 2, 1, 4, 20).requires_grad_()
    assert torch.autograd.grad(made.embed(x).sum(), x)[0].shape == x.shape


def test_loss_scale_is_the_tokens_only_where_half_precision_needs_it():
    net = Net([(1, blocks_only(2, dim=16))], 8, 24, "fp16")
    assert net.half.dtype == FP16
    assert net.blocks().gain == 256.0
    assert all(base_scale(192, precision) == 1.0 for precision in ("fp32", "tf32", "bf16"))
