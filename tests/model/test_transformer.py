"""Encoder and Decoder: stacked models against single ones, ours against library modules, formulas,
initial values."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.initial import check_plain_values, drawn, filled, is_constant, is_normal, is_uniform
from support.tolerance import close, close_all, examples, same, seeded

from benchmarks.stock import StockEncoder, copy_into_stock
from headwise.errors import UsageError
from headwise.experiments.rank_paper import regression
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.model import INITS
from headwise.model.init import STARTS, fresh, initialise
from headwise.model.layers import FeedForward
from headwise.model.transformer import Decoder, Encoder, build
from headwise.shape import ACTIVATIONS, NORM_PLACES, NORMS, Shape
from headwise.tasks import Farthest, Regression


def inputs(shape, *lead, seed=1, dtype=torch.float32):
    """Tokens or vectors of (*lead) sequences; the last entry of `lead` is their length."""
    if shape.vocab_size:
        return torch.randint(shape.vocab_size, lead, generator=seeded(seed))
    return torch.randn(*lead, shape.in_dim, generator=seeded(seed), dtype=dtype)


def pass_of(model, x, weighting):
    """Output, and the gradients of every parameter."""
    y, _ = model(x)
    return y.detach(), torch.autograd.grad((y * weighting).sum(), list(model.parameters()))


# ---- many models at once


DECODER = Shape(
    dim=16,
    depth=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=4,
    qk_rope_head_dim=2,
    qk_norm="head",
    norm="rms",
    norm_at="sandwich",
    activation="swiglu",
    ffn_dim=13,
    causal=True,
    vocab_size=17,
    tied=False,
    windows=(0, 3),
)
LATENT = Shape(
    dim=16,
    depth=1,
    num_heads=3,
    head_dim=6,
    v_head_dim=5,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=2,
    norm_at="parallel",
    causal=True,
    vocab_size=17,
    qkv_bias=True,
    out_bias=True,
    ffn_bias=True,
)
POSITIONED = Shape(
    dim=16,
    depth=2,
    num_heads=3,
    head_dim=5,
    norm="layer",
    activation="gelu",
    ffn_dim=29,
    positions="additive",
    num_positions=8,
)
READ = regression.decoder(16, 2, 2, Regression(3, 4))
STACKS = {
    "paper, rank 1": paper_shape(16, 2, 1, 2, ffn_dim=29),
    "paper, rank 4": paper_shape(16, 2, 4, 1, ffn_dim=29),
    "paper, full rank": paper_shape(48, 1, 48, 3, ffn_dim=29),
    "paper, concatenated": paper_shape(
        16, 1, 20, 1, ffn_dim=29, positions="concatenated", points=8
    ),
    "paper, room": paper_shape(16, 2, 20, 1, ffn_dim=29, positions="room"),
    "encoder": POSITIONED,
    "decoder": DECODER,
    "latent": LATENT,
    "read in and out": READ,
    "read in wide, out of many": POSITIONED.replace(input_dim=32, output_dim=19),
    "read out alone": paper_shape(16, 1, 4, 1, ffn_dim=29).replace(output_dim=2),
    "classifier of tokens": DECODER.replace(output_dim=10),
    "odd classifier": DECODER.replace(dim=11, tied=True, output_dim=10),
    "odd read": READ.replace(dim=11, output_dim=2),
    "odd paper": paper_shape(11, 2, 1, 3, ffn_dim=29),
    "odd encoder": POSITIONED.replace(dim=11, v_head_dim=2),
    "odd decoder": DECODER.replace(dim=11),
    "odd latent": LATENT.replace(dim=11, kv_lora_rank=7, q_lora_rank=5),
}


def check_stack(stacked, singles, batch, tokens, equal):
    """`stacked` holds the models of `singles`, each with a model axis of 1, in order."""
    shape, count = stacked.shape, len(singles)
    x = inputs(shape, count, batch, tokens)
    y, _ = stacked(x)
    weighting = torch.randn(y.shape, generator=seeded(2))
    y, grads = pass_of(stacked, x, weighting)
    for m, single in enumerate(singles):
        one, one_grads = pass_of(single, x[m : m + 1], weighting[m : m + 1])
        equal(y[m : m + 1], one, f"value of model {m}")
        for (name, _), g, e in zip(stacked.named_parameters(), grads, one_grads, strict=True):
            equal(g[m : m + 1], e, f"gradient of {name} of model {m}")


def load(model, source, m):
    model.load_state_dict({name: t[m : m + 1] for name, t in source.state_dict().items()})
    return model


def fills_lines(shape, batch, tokens):
    """Whether every model's activations and matrices are whole cache lines of 16 floats: where they
    are not, its neighbours lie across lines and the matrix library may take another path."""
    sizes = [
        p.numel()
        for name, p in build(shape).named_parameters()
        if p.ndim == 2 and not name.endswith("bias")
    ]
    return not any(size % 16 for size in (batch * tokens, *sizes))


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize(("batch", "tokens"), [(4, 8), (16, 5), (3, 7), (1, 5)])
def test_ensemble_equals_its_models_one_by_one(name, batch, tokens):
    """Bit by bit where sizes are even, within rounding everywhere."""
    shape = STACKS[name]
    bitwise = fills_lines(shape, batch, tokens)
    assert bitwise == (not name.startswith("odd") and batch * tokens % 16 == 0)
    stacked = filled(build(shape, models=5))
    check_stack(
        stacked,
        [load(build(shape, models=1), stacked, m) for m in range(5)],
        batch,
        tokens,
        same if bitwise else close,
    )


@pytest.mark.parametrize("name", STACKS)
def test_model_axis_changes_nothing(name):
    shape = STACKS[name]
    stacked = filled(build(shape, models=3)).double()
    x = inputs(shape, 3, 2, 7, dtype=torch.float64)
    y, _ = stacked(x)
    weighting = torch.randn(y.shape, generator=seeded(2), dtype=torch.float64)
    y, grads = pass_of(stacked, x, weighting)
    for m in range(3):
        alone = build(shape).double()
        alone.load_state_dict({key: t[m] for key, t in stacked.state_dict().items()})
        one, one_grads = pass_of(alone, x[m], weighting[m])
        close(y[m], one, f"value of model {m}")
        close_all([g[m] for g in grads], one_grads, f"gradients of model {m}")


SPLITS = {
    "paper": [paper_shape(16, 2, rank, 2, ffn_dim=29) for rank in (1, 4, 16)],
    "grouped": [
        Shape(
            dim=16,
            depth=2,
            num_heads=h,
            num_kv_heads=h // 2,
            head_dim=24 // h,
            causal=True,
            vocab_size=17,
            windows=(0, 3),
        )
        for h in (2, 4, 12)
    ],
    "read in and out": [regression.decoder(16, 2, heads, Regression(3, 4)) for heads in (1, 4, 16)],
    "values apart": [
        Shape(dim=16, depth=1, num_heads=h, head_dim=12 // h, v_head_dim=36 // h, norm="scalar")
        for h in (1, 3, 6)
    ],
}


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize(("batch", "tokens", "equal"), [(4, 8, same), (3, 7, close)])
def test_models_that_split_the_same_width_form_an_ensemble(name, batch, tokens, equal):
    shapes = SPLITS[name]
    assert len({s.widths_key() for s in shapes}) == 1
    counts = (2, 1, 3)
    stacked = filled(build(shapes[0], models=6, head_groups=list(zip(counts, shapes, strict=True))))
    each = [s for count, s in zip(counts, shapes, strict=True) for _ in range(count)]
    check_stack(
        stacked,
        [load(build(s, models=1), stacked, m) for m, s in enumerate(each)],
        batch,
        tokens,
        equal,
    )


def test_models_that_split_the_same_width_have_rotary_positions_of_their_own():
    """The engine does not stack these, but a stack may be asked for them."""
    shapes = [
        Shape(
            dim=12,
            depth=2,
            num_heads=12 // r,
            head_dim=r,
            qk_rope_head_dim=r - 2,
            rope_theta=theta,
            vocab_size=7,
            causal=True,
        )
        for r, theta in ((4, 10_000.0), (6, 10_000.0), (4, 100.0))
    ]
    stacked = filled(build(shapes[0], models=3, head_groups=[(1, s) for s in shapes]))
    check_stack(
        stacked, [load(build(s, models=1), stacked, m) for m, s in enumerate(shapes)], 3, 5, close
    )


def test_shapes_of_equal_split_key_have_equal_parameters():
    for shapes in SPLITS.values():
        sizes = [[tuple(p.shape) for p in build(s).parameters()] for s in shapes]
        assert sizes[0] == sizes[1] == sizes[2]
    shape = SPLITS["paper"][0]
    for changes in (
        {"depth": 3},
        {"ffn_dim": 31},
        {"causal": True},
        {"average": 1},
        {"head_dim": 2},
        {"windows": (3,)},
        {"logit_scale": 0.5},
    ):
        assert shape.replace(**changes).widths_key() != shape.widths_key(), changes
    rotary = [Shape(dim=12, depth=1, num_heads=h, qk_rope_head_dim=2) for h in (2, 3)]
    assert rotary[0].widths_key() != rotary[1].widths_key()  # angles belong to a rank


# ---- the rank paper's encoder


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("dim", "depth", "rank", "width", "tokens"),
    [
        (12, 1, 1, 1, 7),
        (12, 2, 1, 3, 5),
        (12, 3, 4, 2, 7),
        (20, 1, 20, 5, 11),
        (14, 2, 7, 1, 16),
        (64, 2, 8, 2, 16),
        (64, 1, 64, 1, 16),
    ],
)
def test_paper_encoder_equals_library_modules(dim, depth, rank, width, tokens, dtype):
    shape = paper_shape(dim, depth, rank, width, ffn_dim=37)
    ours = Encoder(shape)
    initialise(ours, "library", seeded(rank))
    with torch.no_grad():  # biases and gains away from 0 and 1
        for p in ours.parameters():
            p += 0.1 * torch.randn(p.shape, generator=seeded(3))
    ours, theirs = ours.to(dtype), StockEncoder(shape).to(dtype)
    copy_into_stock(theirs, ours.state_dict(), shape)
    x = inputs(shape, 3, tokens, dtype=dtype)
    weighting = torch.randn(x.shape, generator=seeded(2), dtype=dtype)
    y, grads = pass_of(ours, x, weighting)
    expected = theirs(x)
    theirs_grads = torch.autograd.grad((expected * weighting).sum(), list(theirs.parameters()))
    close(y, expected)
    # gradients compared in our layout: the copy of a gradient is the gradient of a copy, because
    # the copy is a permutation
    carrier = StockEncoder(shape).to(dtype)
    copy_into_stock(
        carrier,
        {name: g for (name, _), g in zip(ours.named_parameters(), grads, strict=True)},
        shape,
    )
    close_all(list(carrier.parameters()), theirs_grads)


@pytest.mark.parametrize("depth", [1, 3])
def test_perfect_encoder_solves_the_task(depth):
    """Fact sheet c.1: one full-rank head, W_Q = -1e6 I, W_K = W_V = I, W_O = 1e6 I, all else 0 and
    later layers idle."""
    model = Encoder(paper_shape(64, depth, 64, 1, ffn_dim=128))
    eye = torch.eye(64)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        for block in model.blocks:
            block.norm1.weight.fill_(1.0)
            block.norm2.weight.fill_(1.0)
        first = model.blocks[0].attention
        first.qkv.weight.copy_(torch.cat((-1e6 * eye, eye, eye)))
        first.out.weight.copy_(1e6 * eye)
        task = Farthest(64, 16)
        x, target = task.sample(seeded(0), 2048)
        error = task.loss(model(x)[0], target).item()
    assert error < 5e-4, f"error {error:.2e} on 2048 sequences, seed 0"


def test_paper_shape():
    shape = paper_shape(64, 3, 8, 8, positions="concatenated", points=16)
    assert (shape.dim, shape.position_dim, shape.num_positions, shape.num_heads, shape.average) == (
        128,
        64,
        16,
        8 * 16,
        8,
    )
    assert paper_shape(64, 1, 64, 8).num_heads == 8
    for rank in (0, -1, 3, 128):
        with pytest.raises(UsageError, match=f"^rank must divide the width 64, got rank {rank}$"):
            paper_shape(64, 1, rank)


# ---- one layer: formulas


def erf_gelu(x):
    return x / 2 * (1 + torch.erf(x / math.sqrt(2)))


def tanh_gelu(x):
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward_formula(activation, bias):
    feed = filled(
        FeedForward(
            Shape(dim=5, depth=1, num_heads=1, ffn_dim=7, activation=activation, ffn_bias=bias)
        )
    ).double()
    x = torch.randn(2, 3, 5, generator=seeded(1), dtype=torch.float64)
    hidden = torch.einsum("bni,oi->bno", x, feed.up.weight) + (feed.up.bias if bias else 0)
    gate, up = hidden[..., :7], hidden[..., 7:]
    middle = {
        "relu": lambda: hidden.clamp(min=0),
        "relu2": lambda: hidden.clamp(min=0) ** 2,
        "gelu": lambda: erf_gelu(hidden),
        "swiglu": lambda: gate / (1 + torch.exp(-gate)) * up,
        "geglu": lambda: tanh_gelu(gate) * up,
    }[activation]()
    close(
        feed(x),
        torch.einsum("bni,oi->bno", middle, feed.down.weight) + (feed.down.bias if bias else 0),
    )


def norm_formula(norm, x):
    mean, square = x.mean(-1, keepdim=True), x.pow(2).mean(-1, keepdim=True)
    match norm.kind:
        case "layer":
            return (x - mean) / (square - mean**2 + 1e-6).sqrt() * norm.weight + norm.bias
        case "layer-nobias":
            return (x - mean) / (square - mean**2 + 1e-6).sqrt() * norm.weight
        case "rms":
            return x / (square + 1e-6).sqrt() * norm.weight
        case "rms-free":
            return x / (square + 1e-6).sqrt()
        case "scalar":
            return norm.weight * x / x.pow(2).sum(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("ffn_dim", [0, 13])
@pytest.mark.parametrize("place", NORM_PLACES)
@pytest.mark.parametrize("kind", NORMS)
def test_layer_formula(kind, place, ffn_dim):
    """Skips and norms around attention A and feed-forward F (each checked elsewhere), two layers,
    and the norm at the end."""
    shape = Shape(
        dim=11, depth=2, num_heads=3, head_dim=5, ffn_dim=ffn_dim, norm=kind, norm_at=place
    )
    model = filled(build(shape)).double()
    x = h = torch.randn(2, 7, 11, generator=seeded(1), dtype=torch.float64)
    for block in model.blocks:
        attend, feed, n = block.attention, block.feed, norm_formula
        match place:
            case "post":
                h = n(block.norm1, h + attend(h))
                h = n(block.norm2, h + feed(h)) if ffn_dim else h
            case "pre":
                h = h + attend(n(block.norm1, h))
                h = h + feed(n(block.norm2, h)) if ffn_dim else h
            case "parallel":
                z = n(block.norm1, h)
                h = h + attend(z) + (feed(z) if ffn_dim else 0)
            case "sandwich":
                h = h + n(block.after1, attend(n(block.norm1, h)))
                h = h + n(block.after2, feed(n(block.norm2, h))) if ffn_dim else h
    h = h if place == "post" else norm_formula(model.final_norm, h)
    close(model(x)[0], h)


def test_keep_names_every_intermediate():
    shape = STACKS["decoder"]
    model = filled(build(shape)).double()
    x = inputs(shape, 2, 7)
    y, out = model(x, keep=True)
    plain, nothing = model(x)
    close(y, plain)
    assert nothing == {}
    assert list(out) == ["layer 0", "layer 1"]
    assert set(out["layer 1"]) == {
        "q",
        "k",
        "v",
        "scores",
        "weights",
        "heads",
        "attention",
        "residual",
    }
    close(torch.nn.functional.linear(model.final_norm(out["layer 1"]["residual"]), model.head), y)


# ---- what an encoder and a decoder are


@examples(30)
@given(
    st.sampled_from(NORM_PLACES),
    st.sampled_from(NORMS),
    st.sampled_from((1, 5, 16)),
    st.permutations(range(7)),
)
def test_encoder_without_positions_does_not_know_the_order(place, kind, rank, order):
    shape = Shape(dim=11, depth=2, num_heads=3, head_dim=rank, norm=kind, norm_at=place)
    model = filled(Encoder(shape)).double()
    x = inputs(shape, 2, 7, dtype=torch.float64)
    close(model(x[:, order])[0], model(x)[0][:, order])


@pytest.mark.parametrize(
    "changes", [{"positions": "additive"}, {"positions": "concatenated", "position_dim": 3}]
)
def test_learned_positions_break_the_symmetry(changes):
    shape = Shape(dim=11, depth=1, num_heads=3, head_dim=5, num_positions=7, **changes)
    model = filled(Encoder(shape)).double()
    x = inputs(shape, 2, 7, dtype=torch.float64)
    assert (model(x.flip(1))[0] - model(x)[0].flip(1)).abs().max() > 1e-3


def test_additive_positions_are_added():
    shape = Shape(dim=11, depth=1, num_heads=3, head_dim=5, positions="additive", num_positions=13)
    model = filled(Encoder(shape)).double()
    bare = Encoder(shape.replace(positions="none", num_positions=0)).double()
    bare.load_state_dict({name: t for name, t in model.state_dict().items() if name != "positions"})
    for tokens in (1, 7, 13):
        x = inputs(shape, 2, tokens, dtype=torch.float64)
        close(model(x)[0], bare(x + model.positions[:tokens])[0])


def test_concatenated_positions_stand_beside_the_point():
    shape = Shape(
        dim=11,
        depth=1,
        num_heads=3,
        head_dim=5,
        positions="concatenated",
        num_positions=13,
        position_dim=4,
    )
    model = filled(Encoder(shape)).double()
    assert model.positions.shape == (13, 4)
    bare = Encoder(shape.replace(positions="none", num_positions=0, position_dim=0)).double()
    bare.load_state_dict({name: t for name, t in model.state_dict().items() if name != "positions"})
    x = inputs(shape, 2, 5, dtype=torch.float64)
    assert x.shape == (2, 5, 7)
    wide = torch.stack([torch.cat((sequence, model.positions[:5]), 1) for sequence in x])
    close(model(x)[0], bare(wide)[0])


def test_room_is_a_table_whose_rows_are_one_and_keeps_the_symmetry():
    shape = Shape(dim=11, depth=2, num_heads=3, head_dim=5, positions="room", position_dim=4)
    model = filled(Encoder(shape)).double()
    assert model.positions.shape == (1, 4)
    placed = Encoder(shape.replace(positions="concatenated", num_positions=13)).double()
    placed.load_state_dict({**model.state_dict(), "positions": model.positions.expand(13, 4)})
    for tokens in (1, 7, 13):
        x = inputs(shape, 2, tokens, dtype=torch.float64)
        close(model(x)[0], placed(x)[0])
        close(model(x.flip(1))[0], model(x)[0].flip(1))
    assert model(inputs(shape, 2, 29, dtype=torch.float64))[0].shape == (2, 29, 11), (
        "as many tokens as one likes"
    )


@pytest.mark.parametrize("models", [None, 2])
@pytest.mark.parametrize(
    "changes", [{"positions": "additive"}, {"positions": "concatenated", "position_dim": 3}]
)
def test_tokens_beyond_the_position_table_are_refused(changes, models):
    shape = Shape(dim=11, depth=1, num_heads=1, num_positions=5, **changes)
    model = filled(build(shape, models=models))
    lead = (2, 7) if models is None else (2, 2, 7)
    with pytest.raises(
        UsageError, match=r"^at most num_positions 5 tokens fit the position table, got 7$"
    ):
        model(inputs(shape, *lead))


CAUSAL = {
    "rotary": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 4, "qk_rope_head_dim": 4},
    "positions": {"num_heads": 3, "head_dim": 10, "positions": "additive", "num_positions": 11},
    "latent": {"num_heads": 3, "head_dim": 6, "kv_lora_rank": 5, "qk_rope_head_dim": 2},
    "windows": {"num_heads": 3, "head_dim": 2, "windows": (2, 0)},
    "values apart": {
        "num_heads": 3,
        "head_dim": 2,
        "v_head_dim": 7,
        "norm_at": "post",
        "norm": "scalar",
    },
}


@pytest.mark.parametrize("name", CAUSAL)
def test_logits_never_depend_on_later_tokens(name):
    shape = Shape(dim=13, depth=2, causal=True, vocab_size=17, ffn_dim=19, **CAUSAL[name])
    model = filled(Decoder(shape))
    x = inputs(shape, 3, 11)
    y, _ = model(x)
    for at in range(11):
        changed = x.clone()
        changed[:, at] = (x[:, at] + 1) % 17
        z, _ = model(changed)
        same(z[:, :at], y[:, :at], f"tokens before {at}")
        assert (z[:, at] != y[:, at]).any(), f"token {at} itself"


def test_rotary_decoders_see_distances_and_windows_alone():
    """Two layers of window 3 reach four tokens back: what stands before, and where, does not
    matter."""
    shape = Shape(
        dim=13,
        depth=2,
        num_heads=3,
        head_dim=6,
        qk_rope_head_dim=4,
        qk_norm="head",
        causal=True,
        vocab_size=17,
        windows=(3,),
    )
    model = filled(Decoder(shape)).double()
    x = inputs(shape, 2, 5)
    y = model(x)[0][:, -1]
    for before in (1, 2, 7):
        close(
            model(torch.cat((inputs(shape, 2, before, seed=before), x), 1))[0][:, -1],
            y,
            f"{before} tokens before",
        )
    longer = model(torch.cat((x[:, :1] * 0, x[:, 1:]), 1))[0][:, -1]
    assert (longer - y).abs().max() > 1e-6, "the first of the five does matter"
    fixed = filled(Decoder(shape.replace(positions="additive", num_positions=12))).double()
    moved = fixed(torch.cat((inputs(shape, 2, 7, seed=7), x), 1))[0][:, -1]
    assert (moved - fixed(x)[0][:, -1]).abs().max() > 1e-6, "absolute positions do"


@pytest.mark.parametrize("models", [None, 2])
def test_tied_and_untied_tables(models):
    tied = Shape(dim=11, depth=1, num_heads=3, head_dim=5, causal=True, vocab_size=17)
    a = filled(Decoder(tied, models=models)).double()
    b = Decoder(tied.replace(tied=False), models=models).double()
    assert a.head is None
    b.load_state_dict({**a.state_dict(), "head": a.embedding.detach().clone()})
    x = inputs(tied, *([models] if models else []), 3, 5)
    close(b(x)[0], a(x)[0])
    assert b(x)[0].shape == (*x.shape, 17)
    with torch.no_grad():
        b.head.mul_(2.0)
    close(b(x)[0], 2 * a(x)[0])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("models", [None, 2])
def test_classifier_of_tokens_reads_out_what_the_last_norm_gives(models, tied):
    shape = Shape(dim=11, depth=1, num_heads=3, head_dim=5, vocab_size=17, tied=tied, output_dim=3)
    model = filled(build(shape, models=models)).double()
    assert type(model) is Encoder
    assert model.head is None
    lead = [models] if models else []
    x = inputs(shape, *lead, 2, 5)
    h = model.final_norm(model.blocks[0](model.embed(x))[0])
    y = model(x)[0]
    assert y.shape == (*x.shape, 3)
    weight, bias = model.read_out.weight, model.read_out.bias
    close(y, torch.einsum("...bti,...oi->...bto", h, weight) + bias.view(*lead, 1, 1, 3))
    with torch.no_grad():
        model.embedding[..., 16, :] += 1
    close(
        model(x.clamp_max(15))[0],
        build_like(model, shape, models)(x.clamp_max(15))[0],
        "a token that is not there matters",
    )


def build_like(model, shape, models):
    """The same weights, but for the last token's."""
    other = build(shape, models=models).double()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.embedding[..., 16, :] = 0
    return other


def test_build_follows_the_shape():
    encoder = Shape(dim=6, depth=1, num_heads=2)
    assert type(build(encoder)) is Encoder
    assert type(build(encoder.replace(causal=True))) is Decoder
    with pytest.raises(
        UsageError, match=r"^a Decoder needs a causal shape, this shape has causal=False$"
    ):
        Decoder(encoder)


# ---- initial values


BIG = {
    "paper": paper_shape(64, 2, 16, 3, ffn_dim=512, positions="additive", points=512),
    "concatenated": paper_shape(64, 1, 32, 1, ffn_dim=512, positions="concatenated", points=128),
    "room": paper_shape(64, 1, 32, 1, ffn_dim=512, positions="room", position_dim=512),
    "decoder": Shape(
        dim=96,
        depth=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=20,
        v_head_dim=12,
        ffn_dim=300,
        activation="swiglu",
        causal=True,
        vocab_size=500,
        tied=False,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        norm="layer",
        qk_norm="head",
    ),
    "latent": Shape(
        dim=96,
        depth=2,
        num_heads=6,
        head_dim=20,
        kv_lora_rank=70,
        q_lora_rank=50,
        qk_rope_head_dim=8,
        qkv_bias=True,
        causal=True,
    ),
}


def matrices(block):
    """The attention's matrices but the output's, by name."""
    return {
        name: m
        for name, m in block.attention.named_children()
        if hasattr(m, "weight") and m.weight.ndim == 2 and name != "out"
    }


@pytest.mark.parametrize("name", BIG)
def test_library_values(name):
    shape = BIG[name]
    model = drawn(shape, "library")
    check_plain_values(model)
    for i, block in enumerate(model.blocks):
        for part, linear in matrices(block).items():
            rows, columns = linear.weight.shape
            is_uniform(
                linear.weight, math.sqrt(6 / (columns + rows / shape.average)), f"layer {i} {part}"
            )
        fan_in = shape.num_heads * shape.v_head_dim / shape.average
        is_uniform(block.attention.out.weight, 1 / math.sqrt(fan_in), f"layer {i} out")
        for part, linear in (("up", block.feed.up), ("down", block.feed.down)):
            bound = 1 / math.sqrt(linear.weight.shape[1])
            is_uniform(linear.weight, bound, f"layer {i} {part}")
            if linear.bias is not None:
                is_uniform(linear.bias, bound, f"layer {i} {part} bias")
    if shape.positions == "additive":
        is_normal(model.positions, 0.0, 1.0, "positions")
    if shape.positions == "concatenated":
        is_uniform(model.positions, 1.0, "positions")
    if shape.depth > 1:
        assert not torch.equal(
            model.blocks[0].attention.out.weight, model.blocks[1].attention.out.weight
        )


def test_library_values_are_the_library_s():
    """The same bounds as PyTorch's own modules: the largest of many draws lies within a
    thousandth."""
    shape = paper_shape(64, 1, 16, 4, ffn_dim=512)
    ours = drawn(shape, "library")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = StockEncoder(shape)
    found = StockEncoder(shape)
    copy_into_stock(found, ours.state_dict(), shape)
    for (name, a), (_, b) in zip(found.named_parameters(), theirs.named_parameters(), strict=True):
        if a.numel() > 10_000:
            assert a.abs().max().item() == pytest.approx(b.abs().max().item(), rel=1e-3), name
        elif "in_proj_bias" in name or "out_proj.bias" in name:
            assert not a.any(), name
            assert not b.any(), name


def test_published_values_copy_the_first_layer():
    model = drawn(BIG["paper"].replace(depth=3), "published")
    first, *others = model.blocks
    for block in others:
        for (name, p), q in zip(first.named_parameters(), block.parameters(), strict=True):
            same(p, q, name)
            assert p.data_ptr() != q.data_ptr(), f"{name} is shared, not copied"
    is_normal(model.positions, -1.0, 1.0, "positions")
    one = drawn(BIG["paper"].replace(depth=3), "library")
    same(
        first.attention.qkv.weight,
        one.blocks[0].attention.qkv.weight,
        "its first layer is the library's",
    )


@pytest.mark.parametrize("name", BIG)
def test_normal_values(name):
    shape = BIG[name]
    model = drawn(shape, "normal")
    check_plain_values(model)
    back = 0.02 / math.sqrt(2 * shape.depth)
    for i, block in enumerate(model.blocks):
        for part, linear in {**matrices(block), "up": block.feed.up}.items():
            is_normal(linear.weight, 0.0, 0.02, f"layer {i} {part}")
        is_normal(block.attention.out.weight, 0.0, back, f"layer {i} out")
        is_normal(block.feed.down.weight, 0.0, back, f"layer {i} down")
        for linear in (block.feed.up, block.feed.down):
            if linear.bias is not None:
                is_constant(linear.bias, 0.0, f"layer {i} bias")
    if model.positions is not None:
        is_normal(model.positions, 0.0, 0.02, "positions")


def test_init_has_a_start_for_every_name_that_a_recipe_may_give():
    assert tuple(STARTS) == INITS


@pytest.mark.parametrize("name", BIG)
@pytest.mark.parametrize("scheme", INITS)
def test_initial_values_follow_the_generator_alone(scheme, name):
    shape = BIG[name]
    if scheme in ("spectral", "orthogonal") and (
        shape.latent or shape.num_kv_heads != shape.num_heads
    ):
        with pytest.raises(UsageError, match="needs plain heads"):
            drawn(shape, scheme, seed=5)
        return
    if scheme == "original":
        return  # has a seed of its own: test_original_data.py
    torch.manual_seed(1)
    model = drawn(shape, scheme, seed=5)
    torch.manual_seed(2)
    again = filled(build(shape), seed=9)  # as if trained before: nothing of it may stay
    initialise(again, scheme, seeded(5))
    other = drawn(shape, scheme, seed=6)
    for (key, p), q, r in zip(
        model.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        same(p, q, key)
        if p.ndim >= 2 and not key.endswith("out_bias"):
            assert not torch.equal(p, r), key


def test_fresh_models_are_drawn_alone():
    shape = paper_shape(12, 2, 4, 2, ffn_dim=29)
    stacked = fresh(shape, "library", [seeded(seed) for seed in (3, 1, 4)])
    for m, seed in enumerate((3, 1, 4)):
        one = drawn(shape, "library", seed)
        for (name, p), q in zip(stacked.named_parameters(), one.parameters(), strict=True):
            same(p[m], q, name)


def test_unknown_schemes_are_refused():
    with pytest.raises(
        UsageError,
        match=(
            r"^unknown init 'libary'; did you mean library\? choices: library, normal, original, "
            r"orthogonal, published, spectral$"
        ),
    ):
        drawn(paper_shape(64), "libary")


def test_shape_fields_all_reach_the_model():
    """A field that changed nothing would be a promise not kept."""
    shape = Shape(
        dim=12,
        depth=2,
        num_heads=4,
        head_dim=8,
        qk_rope_head_dim=4,
        causal=True,
        vocab_size=17,
        qk_norm="head",
    )
    changes = {
        "dim": 14,
        "depth": 3,
        "num_heads": 8,
        "head_dim": 10,
        "v_head_dim": 5,
        "num_kv_heads": 2,
        "qk_rope_head_dim": 8,
        "rope_theta": 7.0,
        "average": 2,
        "ffn_dim": 5,
        "activation": "gelu",
        "causal": False,
        "windows": (2,),
        "norm": "layer",
        "norm_at": "post",
        "qk_norm": "free",
        "logit_scale": 0.9,
        "max_logit": 20.0,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
        "vocab_size": 19,
        "tied": False,
        "positions": "additive",
        "input_dim": 12,
        "output_dim": 12,
    }
    needs = {"positions": {"num_positions": 9}, "num_heads": {"num_kv_heads": 8}}
    elsewhere = {
        "kv_lora_rank",
        "q_lora_rank",
        "num_positions",
        "position_dim",
        "extras",
    }  # change what they go with
    assert set(changes) | elsewhere == {f.name for f in dataclasses.fields(Shape)}
    x = inputs(shape, 2, 5)
    y = filled(build(shape)).double()(x)[0]
    vectors = shape.replace(vocab_size=0)
    given = inputs(vectors, 2, 5, dtype=torch.float64)
    plain = filled(build(vectors)).double()(given)[0]
    for name, value in changes.items():
        if name in ("input_dim", "output_dim"):  # maps of vectors, as wide as what they come from
            z = filled(build(vectors.replace(**{name: value}))).double()(given)[0]
            assert z.shape == plain.shape
            assert (z - plain).abs().max() > 1e-6, name
            if name == "input_dim":
                continue
        z = filled(build(shape.replace(**{name: value}, **needs.get(name, {})))).double()(x)[0]
        assert z.shape != y.shape or (z - y).abs().max() > 1e-6, name


def test_new_module_is_ready_to_use() -> None:
    torch.manual_seed(3)
    vectors = Shape(
        dim=11, depth=2, num_heads=3, head_dim=5, ffn_dim=13, positions="additive", num_positions=7
    )
    tokens = Shape(
        dim=14,
        depth=1,
        num_heads=2,
        causal=True,
        vocab_size=17,
        tied=False,
        kv_lora_rank=5,
        qk_rope_head_dim=2,
    )
    for module in (Encoder(vectors), Decoder(tokens), Encoder(vectors, models=2)):
        for name, p in module.named_parameters():
            assert p.isfinite().all(), name
            assert p.abs().max() <= 1, name
            matrix = (
                name.endswith(("weight", "embedding", "head", "positions")) and "norm" not in name
            )
            assert not matrix or p.std() > 0, name


def test_positions_made_beforehand_change_nothing():
    shape = Shape(
        dim=12, depth=2, num_heads=2, head_dim=8, qk_rope_head_dim=6, causal=True, vocab_size=31
    )
    model, ids = Decoder(shape), torch.arange(14).view(2, 7)
    expected, shorter = model(ids)[0], model(ids[:, :4])[0]
    model.prepare(7)
    torch.testing.assert_close(model(ids)[0], expected, rtol=0, atol=0)
    torch.testing.assert_close(
        model(ids[:, :4])[0], shorter, rtol=0, atol=0
    )  # others are made as they are needed
    assert not any("turns" in name for name in model.state_dict())
    twice, exact = model.double(), Decoder(shape).double()
    exact.load_state_dict(twice.state_dict())
    torch.testing.assert_close(
        twice(ids)[0], exact(ids)[0], rtol=0, atol=0
    )  # not from tables in float32
