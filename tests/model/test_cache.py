"""Reading with a cache against reading everything anew, what is kept, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cached import (
    BASE,
    FAMILY,
    LATENT,
    MODERN,
    VECTORS,
    VOCAB,
    check_reading,
    filled,
    ids,
    refused,
)
from support.tolerance import close, examples, same, seeded

from headwise.model import decode as decoding
from headwise.model.attention import Attention
from headwise.model.backends import Call, forced
from headwise.model.cache import Cache, LayerCache
from headwise.model.decode import decode_backend, follow
from headwise.model.generate import decode, generate, prefill
from headwise.model.transformer import Decoder, build
from headwise.shape import Shape


def cut(total, sizes):
    """Pieces of these sizes, again and again, that sum to total."""
    out = []
    while sum(out) < total:
        out.append(min(sizes[len(out) % len(sizes)], total - sum(out)))
    return out


# ---- one answer, with and without a cache


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("name", [*FAMILY, *MODERN])
def test_cache_reading_in_pieces_equals_reading_at_once(name, inputs):
    model = filled(Decoder({**FAMILY, **MODERN}[name])).double()
    x = ids(3, 19)
    for pieces in ([7] + [1] * 12, [4, 5, 1, 1, 6, 2], [1] * 3 + [16], [19]):
        check_reading(model, x, pieces, inputs=inputs)
    check_reading(model, x, [7] + [1] * 12, inputs=inputs, absorb=False)


@pytest.mark.parametrize(
    "name", ["2 KV heads", "rotary", "latent of queries too", "latent above dim", "windows"]
)
def test_cache_half_precision_is_near(name):
    model, x = filled(Decoder(FAMILY[name])).bfloat16(), ids(2, 13)
    with torch.no_grad():
        whole = filled(Decoder(FAMILY[name])).bfloat16().double()(x)[0]
    cache = Cache(model.shape, 2, 13, dtype=torch.bfloat16)
    y = prefill(model, x[:, :6], cache)
    for i in range(6, 13):
        y = decode(model, x[:, i], cache)
    assert (y.double() - whole[:, -1]).norm() < 0.05 * whole[:, -1].norm()


def test_cache_vectors_are_read_as_tokens_are():
    model = filled(build(VECTORS)).double()
    x = torch.randn(3, 11, 5, generator=seeded(1), dtype=torch.float64)
    check_reading(model, x, [4, 1, 1, 3, 2])
    check_reading(model, x, [1] * 11, inputs=True)


def test_cache_hardmax_reads_with_a_cache():
    model = filled(Decoder(FAMILY["rotary"], hard=True)).double()
    check_reading(model, ids(3, 11), [4, 1, 1, 3, 1, 1])


@pytest.mark.parametrize("inputs", [False, True])
def test_cache_of_each_layer_has_the_bytes_of_that_layer(inputs):
    shape = MODERN["by layer"]
    cache = Cache(shape, 2, 7, inputs=inputs, device="meta")
    for i, layer in enumerate(cache.layers):
        own = shape.layer(i)
        held = sum(part.nbytes for part in layer.parts)
        assert held == own.kv_bytes(7, batch=2, bytes_per=4, inputs=inputs), i
        assert len(layer.parts) == (1 if own.shared_kv or layer.kind == "input" else 2)
    # 3 keys of 4 for both; 1 key of 4 with a value; two KV heads of 10 and 5, in a window of 3.
    assert [shape.kv_width(layer=i) for i in range(3)] == [3 * 4, 2 * (10 + 5), 1 * (4 + 4)]


@st.composite
def shapes(draw):
    kv, rank = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    latent = draw(st.integers(0, 9))
    heads = kv * draw(st.integers(1, 3))
    rope = 2 * draw(st.integers(0, rank // 2))
    return Shape(
        dim=draw(st.sampled_from((5, 7, 11, 24))),
        depth=draw(st.integers(2, 3)),
        num_heads=heads,
        num_kv_heads=heads if latent else kv,
        head_dim=rank,
        v_head_dim=draw(st.integers(1, 6)),
        kv_lora_rank=latent,
        q_lora_rank=draw(st.integers(0, 4)) if latent else 0,
        qk_rope_head_dim=rope,
        rope_theta=20.0,
        windows=tuple(draw(st.lists(st.sampled_from((0, 1, 2, 3, 7)), min_size=1, max_size=2))),
        qk_norm=draw(st.sampled_from(("none", "free") if latent else ("none", "head", "free"))),
        qkv_bias=draw(st.booleans()),
        ffn_dim=0,
        causal=True,
        vocab_size=VOCAB,
        positions=(p := draw(st.sampled_from(("none", "additive")))),
        num_positions=17 if p != "none" else 0,
    )


@examples(100)
@given(
    shapes(),
    st.integers(1, 3),
    st.lists(st.integers(1, 7), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_cache_any_shape_in_any_pieces(shape, batch, sizes, inputs, absorb, seed):
    model = filled(Decoder(shape), seed).double()
    check_reading(model, ids(batch, 13, seed), cut(13, sizes), inputs=inputs, absorb=absorb)


# ---- what is kept


@examples(200)
@given(
    shapes(),
    st.integers(1, 5),
    st.integers(1, 23),
    st.sampled_from((torch.float64, torch.float32, torch.bfloat16)),
    st.booleans(),
)
def test_cache_bytes_are_those_of_the_shape(shape, batch, tokens, dtype, inputs):
    cache = Cache(shape, batch, tokens, dtype=dtype, inputs=inputs, device="meta")
    held = sum(part.numel() * part.element_size() for layer in cache.layers for part in layer.parts)
    assert (
        cache.bytes
        == held
        == shape.kv_bytes(tokens, batch=batch, bytes_per=dtype.itemsize, inputs=inputs)
    )
    a_token = sum(
        part.shape[-1] * (part.shape[1] if part.ndim == 4 else 1) for part in cache.layers[0].parts
    )
    made = (
        shape.kv_lora_rank + shape.qk_rope_head_dim
        if shape.latent
        else shape.num_kv_heads * (shape.head_dim + shape.v_head_dim)
    )
    assert a_token == (min(made, shape.dim) if inputs else made)
    for i, layer in enumerate(cache.layers):
        assert all(part.shape[-2] == min(tokens, shape.window(i) or tokens) for part in layer.parts)


def test_cache_what_each_shape_keeps():
    for name, shape in FAMILY.items():
        for inputs in (False, True):
            kinds = {layer.kind for layer in Cache(shape, 1, 5, inputs=inputs).layers}
            fewer = inputs and shape.dim < (11 if name == "latent" else shape.kv_width())
            assert kinds == {"input" if fewer else "latent" if shape.latent else "keys"}, name
    assert (
        BASE.kv_bytes(5, inputs=True)
        == 5 * 2 * 22 * 2
        < BASE.kv_bytes(5)
        == 5 * 2 * 6 * (4 + 7) * 2
    )
    assert LATENT.kv_bytes(5, inputs=True) == LATENT.kv_bytes(5) == 5 * 2 * 11 * 2


@pytest.mark.parametrize("name", ["3 KV heads", "windows", "latent"])
def test_cache_every_token_is_projected_once(name):
    model = filled(Decoder(FAMILY[name]))
    rows = []
    for block in model.blocks:
        part = block.attention.kv_down if model.shape.latent else block.attention.qkv
        part.register_forward_hook(lambda module, given, y: rows.append(y.shape[0] * y.shape[1]))
    generate(model, ids(2, 5), 8)
    assert sum(rows) == model.shape.depth * 2 * (5 + 8 - 1)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [("latent in windows", False), ("latent of queries too", False), ("plain heads", True)],
)
def test_cache_single_query_goes_to_what_is_kept_and_no_key_is_made(name, inputs, monkeypatch):
    seen = []
    attend = decoding._attend
    monkeypatch.setattr(
        decoding,
        "_attend",
        lambda x, q, *others: seen.append(q.shape[-2]) or attend(x, q, *others),
    )
    model = filled(Decoder(FAMILY[name])).double()
    check_reading(model, ids(2, 9), [3, 1, 1, 1, 2, 1], inputs=inputs)
    assert set(seen) == {3, 2}
    check_reading(model, ids(2, 9), [3, 1, 1, 1, 2, 1], inputs=inputs, absorb=False)
    assert set(seen) == {3, 2, 1}


@pytest.mark.parametrize("name", FAMILY)
def test_cache_one_token_copies_nothing_that_is_kept(name, monkeypatch):
    """No backend pads or repeats keys and values, which would move all of them at every token."""
    model = filled(Decoder(FAMILY[name]))
    cache = Cache(model.shape, 2, 9)
    prefill(model, ids(2, 5), cache)

    def never(*args, **options):
        raise AssertionError("copied")

    monkeypatch.setattr("torch.nn.functional.pad", never)
    monkeypatch.setattr(torch.Tensor, "repeat_interleave", never)
    decode(model, ids(2, 1)[:, 0], cache)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rank", "width"), [(1, 1), (64, 64), (128, 96), (256, 256), (264, 264), (576, 576)]
)
def test_cache_of_one_token_takes_keys_as_they_are(device, dtype, rank, width):
    for hard in (False, True):
        call = Call(device, dtype, 3, 2, 2, 5, 1000, rank, width, hard=hard)
        choice = forced(decode_backend(device, dtype, rank, width, hard), call)
        assert choice.pad == (0, 0)
        assert not choice.repeat_kv
        fused = (
            not hard
            and rank == width
            and (device == "cpu" or (dtype == torch.bfloat16 and rank in (64, 256)))
        )
        assert choice.backend == ("flash" if fused else "plain")


@examples(80)
@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=8), st.booleans())
def test_cache_window_is_a_ring(window, sizes, ordered):
    """Against a list of all tokens: queries get at least their windows, oldest first; a single one
    exactly its own."""
    shape = BASE.replace(windows=(window,), num_kv_heads=1, v_head_dim=1, head_dim=1)
    layer = LayerCache(shape, 0, 1, sum(sizes), torch.float64, "cpu", False, True)
    at = 0
    for size in sizes:
        new = torch.arange(at, at + size, dtype=torch.float64).view(1, 1, size, 1)
        at += size
        k, v = layer.append(new, new + 0.5, ordered=ordered)
        same(v, k + 0.5)
        got, needed = k.flatten().tolist(), list(range(max(0, at - size - window + 1), at))
        if size == 1:
            got, needed = (got if ordered else sorted(got)), needed[-window:]
        assert got[-len(needed) :] == needed
        assert size > 1 or got == needed
        assert got == list(range(at - len(got), at))
    assert layer.length == at
    kept = sorted(layer.parts[0].flatten().tolist())[-min(at, window) :]
    assert kept == list(range(max(0, at - window), at))


def test_cache_cleared_cache_starts_again():
    model = filled(Decoder(FAMILY["windows"])).double()
    cache = Cache(model.shape, 2, 9, dtype=torch.float64)
    before = [part.data_ptr() for layer in cache.layers for part in layer.parts]
    first = prefill(model, ids(2, 9, seed=3), cache, chunk=2)
    cache.clear()
    assert cache.length == 0
    prefill(model, ids(2, 9, seed=4), cache)
    cache.clear()
    same(prefill(model, ids(2, 9, seed=3), cache, chunk=2), first)
    assert before == [part.data_ptr() for layer in cache.layers for part in layer.parts]


def test_cache_layer_alone_reads_with_its_own_cache():
    shape = FAMILY["rotary"]
    layer = filled(Attention(shape, layer=1)).double()
    x = torch.randn(2, 7, 22, generator=seeded(1), dtype=torch.float64)
    cache = Cache(shape, 2, 7, dtype=torch.float64).layers[1]
    with torch.no_grad():
        parts = [follow(layer, piece, cache) for piece in x.split([3, 1, 1, 2], 1)]
        close(torch.cat(parts, 1), layer(x))


# ---- what is refused


def test_cache_what_a_cache_refuses():
    refused(
        "num_heads must be a multiple of num_kv_heads, got num_heads 6, num_kv_heads 12",
        lambda: Cache(BASE.replace(num_kv_heads=12), 1, 5),
    )
    refused(
        "a cache needs a causal shape: earlier tokens must not depend on later ones, got causal "
        "False",
        Cache, BASE.replace(causal=False), 1, 5,
    )  # fmt: skip
    refused("batch of a cache must be at least 1, got 0", Cache, BASE, 0, 5)
    refused("tokens of a cache must be at least 1, got 0", Cache, BASE, 1, 0)


def test_cache_of_another_model_is_refused():
    model = filled(Decoder(BASE))
    x = ids(2, 4)
    refused(
        "cache and model must have one shape, got num_kv_heads 3 and 6",
        prefill,
        model,
        x,
        Cache(FAMILY["3 KV heads"], 2, 5),
    )
    refused("the cache is for a batch of 3, got 2", prefill, model, x, Cache(BASE, 3, 5))
    refused(
        "cache and model must share dtype and device, got torch.float64 on cpu, torch.float32 on "
        "cpu",
        prefill, model, x, Cache(BASE, 2, 5, dtype=torch.float64),
    )  # fmt: skip
    refused(
        "a cache needs a single model, this module holds 2",
        prefill,
        Decoder(BASE, models=2),
        x,
        Cache(BASE, 2, 5),
    )
    layer, one = Attention(BASE), torch.zeros(2, 3, 22)
    with torch.no_grad():
        refused(
            "the cache was made for another batch or shape: keys of (2, 3, 4) per token, got (2, "
            "6, 4)",
            follow, layer, one, Cache(FAMILY["3 KV heads"], 2, 5).layers[0],
        )  # fmt: skip
    refused(
        "a cache is for inference: read into it under torch.no_grad()",
        follow,
        layer,
        one,
        Cache(BASE, 2, 5).layers[0],
    )


def test_cache_an_interrupted_step_is_noticed(monkeypatch):
    model = filled(Decoder(BASE)).double()
    cache = Cache(BASE, 2, 9, dtype=torch.float64)
    first = prefill(model, ids(2, 5), cache)
    with monkeypatch.context() as broken:
        broken.setattr(model.blocks[1].attention.qkv, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            decode(model, ids(2, 1)[:, 0], cache)
    refused(
        "a step was interrupted and the layers of the cache hold 6, 5 tokens: clear() it and read "
        "again",
        decode, model, ids(2, 1)[:, 0], cache,
    )  # fmt: skip
    cache.clear()
    same(prefill(model, ids(2, 5), cache), first)


@pytest.mark.parametrize("name", ["plain heads", "narrow windows", "latent"])
def test_cache_full_cache_says_so_and_stays_as_it_was(name):
    model = filled(Decoder(FAMILY[name])).double()
    x, cache = ids(1, 7), Cache(FAMILY[name], 1, 5, dtype=torch.float64)
    prefill(model, x[:, :4], cache)
    refused("a cache of 5 tokens is full: it holds 4, got 2 more", prefill, model, x[:, 4:6], cache)
    close(decode(model, x[:, 4], cache), model(x[:, :5])[0][:, -1])
    refused("a cache of 5 tokens is full: it holds 5, got 1 more", decode, model, x[:, 5], cache)


def test_cache_positions_end():
    model = filled(Decoder(BASE.replace(positions="additive", num_positions=6)))
    refused(
        "at most num_positions 6 tokens fit the position table, got 7",
        generate,
        model,
        ids(1, 4),
        4,
    )
    assert generate(model, ids(1, 4), 3).shape == (1, 7)
