"""One layer against its formula."""

import math

import pytest
import torch
from support.initial import filled
from support.tolerance import close, seeded
from support.transformers import ENSEMBLES, inputs

from headwise.model.layers import FeedForward
from headwise.model.transformer import build
from headwise.shape import ACTIVATIONS, NORM_PLACES, NORMS, Shape


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
        case "layer-free":
            return (x - mean) / (square - mean**2 + 1e-6).sqrt()
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
            case "parallel-2":
                h, x1 = h + attend(n(block.norm1, h)), h
                h = h + feed(n(block.norm2, x1)) if ffn_dim else h
            case "output":
                h = h + n(block.norm1, attend(h))
                h = h + n(block.norm2, feed(h)) if ffn_dim else h
            case "sandwich":
                h = h + n(block.after1, attend(n(block.norm1, h)))
                h = h + n(block.after2, feed(n(block.norm2, h))) if ffn_dim else h
    h = h if place == "post" else norm_formula(model.final_norm, h)
    close(model(x)[0], h)


def test_keep_names_every_intermediate():
    shape = ENSEMBLES["decoder"]
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
