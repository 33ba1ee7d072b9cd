"""Encoder and Decoder against library modules, and what their sizes and positions mean."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.initial import filled
from support.tolerance import close, close_all, examples, same, seeded
from support.transformers import inputs, pass_of

from benchmarks.stock import StockEncoder, copy_into_stock
from headwise.errors import UsageError
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.model.init import initialise
from headwise.model.transformer import Decoder, Encoder, build
from headwise.shape import NORM_PLACES, NORMS, Layer, Shape
from headwise.tasks import Farthest

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


# ---- every field, and a new module


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
        "layers": (Layer(), Layer(ffn_dim=13)),
        "shared_kv": True,
        "q_lora_rank": 5,
        "o_lora_rank": 3,
        "o_groups": 2,
        "attn_gate": "head",
        "rope_at": "first",
        "rope_interleaved": True,
        "lm_head": False,
    }
    needs = {
        "positions": {"num_positions": 9},
        "num_heads": {"num_kv_heads": 8},
        "o_groups": {"o_lora_rank": 3},
    }
    elsewhere = {
        "kv_lora_rank",
        "num_positions",
        "position_dim",
        "extras",
    }  # change what they go with
    refused = {"sinks", "router_bias", "shared_gate", "expert_ffn_dim", "shared_ffn_dim"}
    refused |= {"num_experts", "num_experts_per_tok", "chunked", "split_kv_cache"}
    assert set(changes) | elsewhere | refused == {f.name for f in dataclasses.fields(Shape)}
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
