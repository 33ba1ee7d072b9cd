"""The costs of random shapes against real modules."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.random_shapes import FAMILIES, shapes
from support.tolerance import KEPT_BYTES, examples, seeded
from torch.utils.flop_counter import FlopCounterMode

from headwise.errors import UsageError
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.model.backends import explain
from headwise.model.reference import mask_of
from headwise.model.transformer import build
from headwise.shape import ACTIVATIONS, NORM_PLACES, NORMS, QK_NORMS, Shape


def on_meta(shape):
    with torch.device("meta"):
        return build(shape)


def numbers(*modules):
    return sum(p.numel() for module in modules if module is not None for p in module.parameters())


def real_table(model):
    """Parameters of the module by part, named as in `Shape.param_table`."""
    norms = [m for b in model.blocks for m in (b.norm1, b.norm2, b.after1, b.after2)] + [
        model.final_norm
    ]
    gates = sum(p.numel() for name, p in model.named_parameters() if ".attention.gate." in name)
    table = {
        "embedding": 0 if model.embedding is None else model.embedding.numel(),
        "positions": 0 if model.positions is None else model.positions.numel(),
        "attention": numbers(*(b.attention for b in model.blocks)) - gates,
        "gates": gates,
        "feed-forward": numbers(*(b.feed for b in model.blocks)),
        "norms": numbers(*norms),
        "head": 0 if model.head is None else model.head.numel(),
        "read-in": numbers(model.read_in),
        "read-out": numbers(model.read_out),
    }
    return {name: count for name, count in table.items() if count}


# ---- parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_params_equal_the_real_module(family):
    for shape in shapes(family):
        model = on_meta(shape)
        assert shape.params == numbers(model), shape
        assert shape.param_table() == real_table(model), shape
        assert sum(shape.param_table().values()) == shape.params


def test_random_shapes_cover_every_choice():
    for family in ("encoder", "decoder", "latent"):
        seen = shapes(family)
        assert {s.activation for s in seen} == set(ACTIVATIONS)
        assert {s.norm for s in seen} == set(NORMS)
        assert {s.norm_at for s in seen} == set(NORM_PLACES)
        for name in ("qkv_bias", "out_bias", "ffn_bias"):
            assert {getattr(s, name) for s in seen} == {True, False}
    assert {s.qk_norm for s in shapes("decoder")} == set(QK_NORMS)
    assert {s.tied for s in shapes("decoder")} == {True, False}
    assert {s.average for s in shapes("encoder")} == {1, 2, 3, 5}


@pytest.mark.parametrize(
    ("depth", "width", "params"),
    [
        (1, 1, 280_898),
        (1, 8, 397_378),
        (1, 64, 1_329_218),
        (3, 1, 842_694),
        (3, 8, 1_192_134),
        (3, 64, 3_987_654),
        (5, 1, 1_404_490),
        (5, 8, 1_986_890),
        (5, 64, 6_646_090),
    ],
)
def test_params_of_the_rank_paper(depth, width, params):
    """The published code's own counts at d = 64, whatever the rank."""
    for rank in (1, 2, 4, 8, 16, 32, 64):
        shape = paper_shape(64, depth, rank, width)
        assert shape.params == params
        assert shape.num_heads == width * 64 // rank


def gpt2(depth, num_heads, head_dim):
    return Shape(
        dim=768,
        depth=depth,
        num_heads=num_heads,
        head_dim=head_dim,
        ffn_dim=3072,
        activation="gelu",
        norm="layer",
        norm_at="pre",
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        causal=True,
        vocab_size=4096,
        positions="additive",
        num_positions=1024,
    )


@pytest.mark.parametrize(
    ("sizes", "millions"), [((12, 12, 64), 88.99), ((4, 16, 48), 32.29), ((4, 16, 64), 35.43)]
)
def test_params_of_gpt2_for_tinystories(sizes, millions):
    assert round(gpt2(*sizes).params / 1e6, 2) == millions


def test_params_in_closed_form():
    """One decoder layer written out by hand."""
    shape = Shape(
        dim=11,
        depth=1,
        num_heads=6,
        num_kv_heads=3,
        head_dim=4,
        v_head_dim=5,
        ffn_dim=13,
        activation="swiglu",
        norm="rms",
        qk_norm="head",
        qkv_bias=True,
        out_bias=True,
        causal=True,
        vocab_size=17,
        tied=False,
    )
    attention = 11 * (6 * 4 + 3 * 4 + 3 * 5) + (6 * 4 + 3 * 4 + 3 * 5) + 6 * 5 * 11 + 11 + 2 * 4
    assert shape.param_table() == {
        "embedding": 17 * 11,
        "attention": attention,
        "feed-forward": 3 * 11 * 13,
        "norms": 3 * 11,
        "head": 17 * 11,
    }


@pytest.mark.parametrize("tied", [True, False])
def test_classifier_of_tokens_has_a_read_out_and_no_head(tied):
    shape = Shape(
        dim=11, depth=1, num_heads=2, head_dim=3, ffn_dim=13, vocab_size=17, tied=tied, output_dim=5
    )
    assert (shape.in_dim, shape.out_dim) == (11, 5)
    assert shape.param_table() == {
        "embedding": 17 * 11,
        "attention": 4 * 11 * 6,
        "feed-forward": 2 * 11 * 13,
        "norms": 3 * 11,
        "read-out": 12 * 5,
    }
    tokens = shape.replace(output_dim=0)
    assert tokens.out_dim == 17
    assert tokens.flops(7) - shape.flops(7) == 2 * 7 * 11 * (17 - 5)
    assert tokens.activation_bytes(7) - shape.activation_bytes(7) == 4 * 7 * (17 - 5)


def test_extras_are_counted_and_not_built():
    shape = Shape(
        dim=6, depth=1, num_heads=2, vocab_size=5, extras=(("pooler", 42), ("embedding", 12))
    )
    plain = shape.replace(extras=())
    assert shape.params == plain.params + 54
    assert shape.param_table()["pooler"] == 42
    assert shape.param_table()["embedding"] == 5 * 6 + 12
    with pytest.raises(UsageError, match="pooler, embedding"):
        build(shape)


# ---- floating-point operations


def small_input(shape, batch, tokens, seed=0):
    if shape.vocab_size:
        return torch.randint(shape.vocab_size, (batch, tokens), generator=seeded(seed))
    return torch.randn(batch, tokens, shape.in_dim, generator=seeded(seed))


def filled(shape, models=None):
    """A module with small random weights."""
    model, generator = build(shape, models=models), seeded(1)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, 0.2, generator=generator)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_equal_the_flop_counter(family):
    """Every product is counted when each token sees all: keep=True writes the scores out as matrix
    products."""
    for shape in shapes(family, 20):
        shape = shape.replace(causal=False, windows=(0,))
        tokens = min(7, shape.num_positions or 7)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            filled(shape)(small_input(shape, 3, tokens), keep=True)
        assert shape.flops(tokens, batch=3) == counter.get_total_flops(), shape
        assert shape.flops(tokens, batch=3, training=True) == 3 * shape.flops(tokens, batch=3)


@examples(300)
@given(st.integers(1, 40), st.integers(0, 45), st.booleans())
def test_pairs_equal_the_mask(tokens, window, causal):
    mask = mask_of(tokens, tokens, causal, window)
    expected = tokens**2 if mask is None else int(mask.sum())
    assert (
        Shape(dim=4, depth=1, num_heads=2, causal=causal, windows=(window,)).pairs(tokens)
        == expected
    )


@examples(100)
@given(st.integers(1, 23), st.lists(st.integers(0, 25), min_size=1, max_size=5), st.booleans())
def test_masks_save_exactly_the_pairs_they_hide(tokens, windows, causal):
    full = Shape(dim=13, depth=5, num_heads=6, num_kv_heads=2, head_dim=3, v_head_dim=7)
    masked = full.replace(causal=causal, windows=tuple(windows))
    hidden = 0
    for layer in range(5):
        mask = mask_of(tokens, tokens, causal, windows[layer % len(windows)])
        hidden += 0 if mask is None else int((~mask).sum())
    assert (
        full.flops(tokens, batch=2) - masked.flops(tokens, batch=2) == 2 * 2 * 6 * (3 + 7) * hidden
    )


# ---- the key/value cache


def test_costs_are_computed_and_not_counted():
    """Layers beyond number: nothing walks over them."""
    one, many = (
        Shape(dim=10**4, depth=depth, num_heads=1, windows=(0, 3, 5), causal=True)
        for depth in (3, 30_000)
    )
    assert many.kv_bytes(7) == 10_000 * one.kv_bytes(7)
    assert many.flops(7) == 10_000 * one.flops(7)
    odd = one.replace(depth=5)
    assert odd.kv_bytes(7) == sum(
        one.replace(depth=1, windows=(w,)).kv_bytes(7) for w in (0, 3, 5, 0, 3)
    )


def test_kv_bytes_equal_the_keys_and_values_made():
    for shape in shapes("decoder", 30):
        _, out = filled(shape)(small_input(shape, 3, 5), keep=True)
        made = sum(
            out[f"layer {i}"][name].nbytes for i in range(shape.depth) for name in ("k", "v")
        )
        assert shape.kv_bytes(5, batch=3, bytes_per=4) == made, shape
        assert shape.kv_bytes(5, batch=3) == made // 2


def test_kv_bytes_of_a_latent_are_what_both_keys_and_values_grow_from():
    for shape in shapes("latent", 30):
        model, made = filled(shape), []
        for block in model.blocks:
            block.attention.kv_down.register_forward_hook(
                lambda module, given, y, made=made: made.append(y.nbytes)
            )
        model(small_input(shape, 3, 5))
        assert shape.kv_bytes(5, batch=3, bytes_per=4) == sum(made), shape
        assert sum(made) == 4 * 3 * 5 * shape.depth * (shape.kv_lora_rank + shape.qk_rope_head_dim)


def test_windows_cap_the_cache():
    shape = Shape(dim=12, depth=5, num_heads=3, num_kv_heads=1, causal=True, windows=(7, 0, 3))
    width = 4 + 4
    for tokens in (1, 2, 3, 5, 7, 11, 101):
        kept = 2 * min(tokens, 7) + 2 * tokens + min(tokens, 3)  # layers 0 and 3, 1 and 4, 2
        assert shape.kv_bytes(tokens, bytes_per=2) == kept * width * 2


# ---- memory of the backward pass


def kept_bytes(shape, batch, tokens, models=None):
    """What autograd really keeps in a training step: storages once each, parameters not counted."""
    model = filled(shape, models)
    x = small_input(shape, batch * (models or 1), tokens)
    x = x if models is None else x.unflatten(0, (models, batch))
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return t  # held alive by the graph, so that no address is used twice

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y, _ = model(x)
        if shape.vocab_size:
            loss = F.cross_entropy(y.flatten(0, -2), x.flatten() % y.shape[-1])
        else:
            seen = (
                y
                if shape.input_dim or shape.output_dim
                else y[..., : shape.dim - shape.position_dim]
            )
            loss = (seen - torch.zeros_like(seen)).square().mean()
    total = sum(kept.values())
    loss.backward()
    return total


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "paper"])
def test_activation_bytes_equal_what_autograd_keeps(family):
    """On the fused backend; averaged modules apart, where a single model keeps its scaled weights
    too."""
    for shape in shapes(family, 40):
        shape = shape.replace(
            num_positions=67 if shape.num_positions else 0, average=1, windows=(0,)
        )
        for batch, tokens in ((2, 41), (1, 67)):
            assert explain(shape, tokens, batch=batch, device="cpu").backend == "flash"
            ratio = kept_bytes(shape, batch, tokens) / shape.activation_bytes(tokens, batch=batch)
            assert abs(ratio - 1) < KEPT_BYTES, (
                f"{ratio:.3f} of the formula at batch {batch}, tokens {tokens}: {shape}"
            )


@pytest.mark.parametrize(("rank", "width", "depth"), [(64, 1, 1), (16, 8, 3), (4, 64, 1)])
def test_activation_bytes_of_ensembles_of_paper_models(rank, width, depth):
    shape = paper_shape(64, depth, rank, width, ffn_dim=211)
    ratio = kept_bytes(shape, 2, 37, models=3) / (3 * shape.activation_bytes(37, batch=2))
    assert abs(ratio - 1) < KEPT_BYTES, ratio


def test_activation_bytes_in_closed_form():
    """One layer of the rank paper's encoder: input, q k v, output, log-sum-exp, norm, input,
    hidden, norm; the error."""
    shape = paper_shape(64, 1, 16, 2, ffn_dim=101)
    per_token = 64 + 3 * 128 + 128 + 8 + 65 + 64 + 101 + 65 + 64
    assert shape.activation_bytes(37, batch=3) == 4 * 37 * 3 * per_token
