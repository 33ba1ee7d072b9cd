"""Fields of encoders, of chunks of keys and of caches kept apart: costs against models and by
enumeration."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headwise.errors import UsageError
from headwise.model.generate import generate
from headwise.model.layers import Norm
from headwise.model.transformer import Decoder, Encoder
from headwise.shape import Layer, Shape

ENCODER = {"dim": 42, "depth": 3, "num_heads": 3, "ffn_dim": 31, "vocab_size": 101}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("norm_at", ["pre", "post"])
def test_tokens_that_are_not_read_out(tied, norm_at):
    shape = Shape(**ENCODER, lm_head=False, tied=tied, norm_at=norm_at)
    with_head = Shape(**ENCODER, tied=tied, norm_at=norm_at)
    counted = []
    for s in (shape, with_head):
        model = Encoder(s)
        assert sum(p.numel() for p in model.parameters()) == s.params
        with FlopCounterMode(display=False) as counter:
            out, _ = model(torch.arange(13)[None])
        assert out.shape == (1, 13, s.out_dim) == (1, 13, 42 if s is shape else 101)
        counted.append(counter.get_total_flops())
    head = 2 * 13 * 101 * 42
    assert with_head.flops(13) - shape.flops(13) == counted[1] - counted[0] == head
    assert with_head.params - shape.params == (0 if tied else 101 * 42)
    assert shape.prefill_flops(13) == shape.flops(13)


def test_head_needs_tokens():
    with pytest.raises(UsageError, match="lm_head must be true where no tokens come in"):
        Shape(dim=42, depth=3, num_heads=3, lm_head=False)


def test_stack_without_head_generates_nothing():
    model = Decoder(Shape(**ENCODER, causal=True, lm_head=False))
    with pytest.raises(UsageError, match="reads tokens out"):
        generate(model, torch.zeros(1, 2, dtype=torch.int64), 3)


@pytest.mark.parametrize("tokens", [1, 6, 7, 8, 20, 21, 22])
def test_chunks_see_their_own_keys(tokens):
    shape = Shape(dim=42, depth=2, num_heads=3, causal=True, windows=(7, 0), chunked=True)
    seen = sum(k // 7 == q // 7 for q in range(tokens) for k in range(q + 1))
    assert shape.pairs(tokens) == seen
    assert shape.pairs(tokens, layer=1) == tokens * (tokens + 1) // 2
    assert sum(shape.decode_flops(n) for n in range(1, tokens + 1)) == shape.flops(tokens)
    with pytest.raises(UsageError, match="chunked"):
        Decoder(shape)


def test_chunks_are_causal():
    with pytest.raises(UsageError, match="chunked needs a causal shape"):
        Shape(dim=42, depth=2, num_heads=3, windows=(7,), chunked=True)


def test_split_cache_of_one_projection():
    full = Layer(shared_kv=True, head_dim=22)
    sizes = {"dim": 42, "depth": 6, "num_heads": 6, "num_kv_heads": 2, "head_dim": 10}
    sizes |= {"causal": True, "layers": (Layer(), Layer(), full)}
    one, two = Shape(**sizes), Shape(**sizes, split_kv_cache=True)
    assert one.params == two.params
    assert two.kv_bytes(5) - one.kv_bytes(5) == 2 * 5 * 2 * 2 * 22
    with pytest.raises(UsageError, match="split_kv_cache needs shared_kv"):
        Shape(dim=42, depth=1, num_heads=3, split_kv_cache=True)


def test_layer_norm_without_gains():
    norm, x = Norm("layer-free", 42), torch.randn(5, 42, dtype=torch.float64)
    assert not list(norm.parameters())
    expected = (x - x.mean(-1, keepdim=True)) / (
        x.var(-1, keepdim=True, correction=0) + 1e-6
    ).sqrt()
    assert torch.allclose(norm(x), expected, rtol=1e-12, atol=1e-12)
    shape = Shape(**ENCODER, norm="layer-free")
    assert sum(p.numel() for p in Encoder(shape).parameters()) == shape.params
    assert "norms" not in shape.param_table()
