"""What `Attention` is given beside its input: masks, padding, documents, context, positions, a
cache, dropout. Each against the same layer without it, or against torch's own."""

import pytest
import torch
from support.cached import BASE, FAMILY, MODERN, VOCAB, filled, ids, refused
from support.tolerance import close, same, seeded
from torch import nn

from headwise.model.attention import Attention
from headwise.model.cache import Cache, LayerCache
from headwise.model.seen import document_positions, padded_positions
from headwise.model.transformer import Decoder, Encoder, build
from headwise.shape import Shape

ROTARY = {"qk_rope_head_dim": 4, "rope_theta": 50.0, "num_kv_heads": 3}
SHAPES = {
    "plain heads": BASE,
    "rotary in windows": BASE.replace(**ROTARY, windows=(3,)),
    "interleaved": BASE.replace(**ROTARY, rope_interleaved=True, rope_at="first", head_dim=6),
    "learned positions": BASE.replace(positions="additive", num_positions=31),
    "both ways": BASE.replace(causal=False, norm_at="post", norm="layer"),
    "both ways in windows": BASE.replace(causal=False, windows=(2, 0), **ROTARY),
    "latent": FAMILY["latent of queries too"],
    "keys are values": MODERN["keys are values, rotary"],
    "low-rank queries": MODERN["low-rank queries"],
    "by layer": MODERN["by layer"],
}


def vectors(*size, seed=1):
    return torch.randn(*size, generator=seeded(seed), dtype=torch.float64)


def layer_of(shape, **options):
    return filled(Attention(shape, **options)).double()


def counted(lengths, most, left):
    """True where there is a token, for sequences of these lengths side by side."""
    at = torch.arange(most).expand(len(lengths), most)
    count = torch.tensor(lengths).unsqueeze(1)
    return at >= most - count if left else at < count


# ---- padding and documents


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_padded_sequences_are_the_sequences_alone(name, left):
    model, lengths = filled(build(SHAPES[name])).double().eval(), (5, 11, 2)
    padding = counted(lengths, 11, left)
    x = ids(3, 11)
    x[~padding] = 7
    y, kept = model(x, padding=padding)
    assert kept == {}
    for row, count in enumerate(lengths):
        there = padding[row]
        close(y[row, there], model(x[row : row + 1, there])[0][0], f"{count} tokens")


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_packed_documents_are_the_documents_alone(name, restarted):
    shape = SHAPES[name]
    if shape.num_positions and not restarted:
        return  # learned positions know where a document stands
    model, documents = (
        filled(build(shape)).double().eval(),
        torch.tensor([[4] * 5 + [1] * 2 + [9] * 4]),
    )
    x = ids(1, 11)
    positions = document_positions(documents) if restarted else None
    y, kept = model(x, True, documents=documents, positions=positions)
    for mark in (4, 1, 9):
        inside = documents[0] == mark
        close(y[:, inside], model(x[:, inside])[0], f"document {mark}")
        weights = kept["layer 0"]["weights"][0]
        assert not weights[:, inside][:, :, ~inside].any()
    if restarted:
        close(y, model(x, documents=documents, positions=positions)[0])


def test_positions_of_documents_and_of_padding_start_at_0():
    documents = torch.tensor([[3, 3, 1, 1, 1, 3], [0, 0, 0, 0, 0, 0]])
    assert document_positions(documents).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    padding = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    assert padded_positions(padding).tolist() == [[0, 0, 1, 2], [0, 1, 2, 2]]


def test_mask_of_an_ensemble_serves_each_of_its_models():
    shape = BASE.replace(causal=False, **ROTARY)
    layer = filled(Attention(shape, models=2)).double()
    x, padding = vectors(2, 3, 7, 22), counted((7, 4, 2), 7, False)
    added = vectors(3, 6, 7, 7)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]]).expand(3, 7)
    y = layer(x, mask=added, padding=padding, documents=documents)
    for m in range(2):
        alone = Attention(shape).double()
        alone.load_state_dict({name: p[m] for name, p in layer.state_dict().items()})
        close(y[m], alone(x[m], mask=added, padding=padding, documents=documents), f"model {m}")


# ---- weights


@pytest.mark.parametrize("name", ["plain heads", "rotary in windows", "latent", "keys are values"])
def test_weights_are_the_softmax_of_the_scores(name):
    layer, x = layer_of(SHAPES[name]), vectors(2, 9, 22)
    padding, added = counted((9, 6), 9, False), vectors(9, 9, seed=2)
    y, kept = layer(x, keep=True, mask=added, padding=padding)
    at = torch.arange(9)
    seen = (at <= at[:, None]) & padding[:, None, None]
    seen &= (at[:, None] - at < layer.window) if layer.window else True
    scores = (kept["scores"] + added).masked_fill(~seen, -torch.inf)
    blind = ~seen.any(-1, keepdim=True)
    close(kept["weights"], scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0))
    close(y, layer(x, mask=added, padding=padding))


# ---- cross-attention


def cross(theirs, shape):
    """Our layer with the weights of torch's."""
    ours = Attention(shape).double()
    weights = {
        "qkv.weight": theirs.in_proj_weight,
        "qkv.bias": theirs.in_proj_bias,
        "out.weight": theirs.out_proj.weight,
        "out_bias": theirs.out_proj.bias.unsqueeze(0),
    }
    ours.load_state_dict(weights)
    return ours


@pytest.mark.parametrize("causal", [False, True])
def test_cross_attention_is_torchs(causal):
    theirs = filled(nn.MultiheadAttention(12, 3, batch_first=True)).double()
    shape = Shape(dim=12, depth=1, num_heads=3, qkv_bias=True, out_bias=True, causal=causal)
    ours = cross(theirs, shape)
    x, context = vectors(2, 5, 12).requires_grad_(), vectors(2, 7, 12, seed=2).requires_grad_()
    padding = counted((7, 4), 7, False)
    mask = torch.rand(5, 7, generator=seeded(3)) < 0.7
    mask[:, 0] = True
    expected, weights = theirs(
        x, context, context, key_padding_mask=~padding, attn_mask=~mask, average_attn_weights=False
    )
    y, kept = ours(x, keep=True, context=context, padding=padding, mask=mask)
    close(y, expected)
    close(kept["weights"], weights)
    plain = ours(x, context=context, padding=padding, mask=mask)
    close(plain, expected)
    grads = [torch.autograd.grad(z.square().sum(), (x, context)) for z in (plain, expected)]
    for mine, wanted in zip(*grads, strict=True):
        close(mine, wanted)


@pytest.mark.parametrize("name", ["rotary in windows", "latent", "keys are values", "by layer"])
def test_cross_attention_with_an_offset_is_a_part_of_self_attention(name):
    """Queries 4 and on, which stand at keys 4 and on of all the tokens."""
    layer, x = layer_of(SHAPES[name]), vectors(2, 9, 22)
    close(layer(x[:, 4:7], context=x, offset=4), layer(x)[:, 4:7])
    refused(
        "offset goes with context: without one, queries stand at the keys",
        layer, x, offset=4,
    )  # fmt: skip


# ---- caches and positions


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.causal])
def test_cached_tokens_under_padding_are_the_sequences_alone(name, inputs):
    model, lengths = filled(Decoder(SHAPES[name])).double().eval(), (5, 11)
    padding, x = counted(lengths, 11, True), ids(2, 11)
    cache = Cache(model.shape, 2, 11, dtype=torch.float64, inputs=inputs)
    found, at = [], 0
    with torch.no_grad():
        for size in (6, 2, 1, 1, 1):
            at += size
            h = model.follow(x[:, at - size : at], cache, padding=padding[:, :at])
            found.append(model.unembed(h))
        y = torch.cat(found, 1)
        for row, count in enumerate(lengths):
            there = padding[row]
            close(y[row, there], model(x[row : row + 1, there])[0][0], f"{count} tokens")


@pytest.mark.parametrize("name", ["rotary in windows", "interleaved", "latent", "keys are values"])
def test_cached_layer_with_positions_is_the_whole_layer(name):
    shape, x = SHAPES[name], vectors(2, 9, 22)
    layer, at = layer_of(shape), torch.tensor([[0, 1, 2, 5, 6, 7, 30, 31, 32], list(range(3, 12))])
    whole = layer(x, positions=at)
    assert (whole - layer(x)).abs().max() > 1e-3
    close(layer(x, positions=at[1:, :1].item()), layer(x))  # distances alone count
    with torch.no_grad():
        cache = LayerCache(shape, 0, 2, 9, torch.float64, "cpu", False, True)
        pieces = [
            layer(x[:, a:b], cache=cache, positions=at[:, a:b]) for a, b in ((0, 4), (4, 5), (5, 9))
        ]
        close(torch.cat(pieces, 1), whole)


def test_cache_refuses_what_it_cannot_know():
    shape = Shape(dim=4, depth=1, num_heads=4, head_dim=3, qk_rope_head_dim=2, causal=True)
    layer, x = layer_of(shape), vectors(1, 1, 4)
    cache = LayerCache(layer.shape, 0, 1, 5, torch.float64, "cpu", True, True)
    assert cache.kind == "input"
    refused("a cache goes with neither keep nor context", layer, x, True, cache=cache)
    message = (
        "with a cache x stands behind what is in it, or where positions (batch, tokens) say, got "
        "positions 3"
    )
    refused(message, layer, x, cache=cache, positions=3)
    model = Encoder(BASE.replace(causal=False, positions="additive", num_positions=5))
    far = torch.tensor([[0, 5, 1]])
    message = "positions must be from 0 to below num_positions 5, got 0 to 5"
    refused(message, model, ids(1, 3), positions=far)
    message = (
        "a cache of inputs makes keys anew, at the places where they lie: it needs positions that "
        "follow each other, got positions by token"
    )
    refused(message, layer, x, cache=cache, positions=torch.zeros(1, 1))


# ---- dropout


@pytest.mark.parametrize("keep", [False, True])
def test_dropout_acts_while_training_alone(keep):
    shape = Shape(dim=12, depth=1, num_heads=3, causal=True)
    layer, plain = filled(Attention(shape, dropout=0.5)), filled(Attention(shape))
    x = torch.randn(4, 7, 12, generator=seeded(1))

    def answer(module, seed):
        torch.manual_seed(seed)
        y = module(x, keep=keep)
        return y[0] if keep else y

    first = answer(layer, 0)
    same(first, answer(layer, 0))
    assert (first - answer(layer, 1)).abs().max() > 0.01
    layer.eval()
    same(answer(layer, 0), answer(plain, 1))
    mean = torch.stack([answer(layer.train(), seed) for seed in range(600)]).double()
    spread = mean.std(0) / 600**0.5
    assert ((mean.mean(0) - answer(plain, 0)).abs() < 5 * spread + 1e-6).all()


def test_dropout_of_a_model_reaches_its_layers():
    shape = BASE.replace(vocab_size=VOCAB)
    model = Decoder(shape, dropout=0.25)
    assert [block.attention.dropout for block in model.blocks] == [0.25, 0.25]
    refused("dropout must be from 0 to below 1, got 1.0", Attention, shape, dropout=1.0)
    assert Encoder(shape.replace(causal=False)).blocks[0].attention.dropout == 0.0
