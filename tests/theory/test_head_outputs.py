"""The outputs of heads side by side: of known draws, of layers, of models; and their spectra."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.attention_layers import geometric_mean_of, known_draw, normal, printed, with_weights
from support.tolerance import STANDARD_ERRORS, close, same, seeded
from torch import Tensor

from headwise.errors import UsageError
from headwise.experiments.figure_parts import published_values
from headwise.experiments.leaner_paper.conditioning import INVERSE
from headwise.model.attention import Attention
from headwise.model.init import initialise
from headwise.model.transformer import Decoder, Encoder, build
from headwise.shape import Shape
from headwise.theory.conditioning import (
    attention_spectra,
    head_outputs,
    layer_outputs,
    random_attention,
    random_tokens,
    side_by_side,
)
from headwise.theory.spectrum import MEASURES, spectrum

INIT = published_values("leaner_kappa_init_attention")


@pytest.mark.parametrize("at", [2, 8, 9, 18])
def test_layer_outputs_of_the_known_draws(at: int) -> None:
    row = INIT[at]
    std = 768**-0.5 if row["weight_std"] == INVERSE else float(row["weight_std"])
    plain, centred = [], []
    for seed in range(100, 105):
        A = layer_outputs(*known_draw(seed, 197, 768, int(row["heads"]), int(row["head_dim"]), std))
        assert A.shape == (197, int(row["inner"]))
        plain.append(spectrum(A).kappa)
        centred.append(spectrum(A, centred=True).kappa)
    assert geometric_mean_of(plain) == printed(row["kappa"])
    assert geometric_mean_of(centred) == printed(row["kappa_centred"])


@pytest.mark.parametrize("at", [0, 3, 12])
def test_layer_outputs_of_our_own_draws_are_within_a_fifth(at: int) -> None:
    row, plain, centred = INIT[at], [], []
    for seed in range(5):
        g = seeded(seed)
        x = random_tokens(197, 768, g)
        A = layer_outputs(
            random_attention(768, int(row["heads"]), int(row["head_dim"]), 0.02, g), x
        )
        plain.append(spectrum(A).kappa)
        centred.append(spectrum(A, centred=True).kappa)
    assert geometric_mean_of(plain) == pytest.approx(float(row["kappa"]), rel=0.2)
    assert geometric_mean_of(centred) == pytest.approx(float(row["kappa_centred"]), rel=0.2)


def test_random_tokens_and_weights_have_their_laws() -> None:
    x = random_tokens(31, 257, seeded(0))
    close(x.mean(1), torch.zeros(31, dtype=torch.float64))
    close(x.square().mean(1), torch.ones(31, dtype=torch.float64))
    raw = random_tokens(31, 257, seeded(0), normalised=False)
    assert abs(raw.mean()) < STANDARD_ERRORS / math.sqrt(raw.numel())
    assert abs(raw.square().mean() - 1) < STANDARD_ERRORS * math.sqrt(2 / raw.numel())
    before = torch.random.get_rng_state()
    layer = random_attention(29, 3, 5, 0.7, seeded(1))
    same(torch.random.get_rng_state(), before)
    assert [tuple(w.shape) for w in layer.parameters()] == [(45, 29), (29, 15)]
    for weight in layer.parameters():
        assert weight.dtype == torch.float64
        assert abs(weight.square().mean() / 0.49 - 1) < STANDARD_ERRORS * math.sqrt(
            2 / weight.numel()
        )
    same(layer.qkv.weight, random_attention(29, 3, 5, 0.7, seeded(1)).qkv.weight)


def test_layer_outputs_are_softmax_averages_written_out() -> None:
    layer, x = (
        with_weights(Shape(dim=11, depth=1, num_heads=3, head_dim=2, v_head_dim=5)),
        normal(7, 11),
    )
    q, k, v = layer.qkv.weight.detach().split((6, 6, 15))
    heads = []
    for h in range(3):
        scores = (x @ q[2 * h : 2 * h + 2].T) @ (x @ k[2 * h : 2 * h + 2].T).T / math.sqrt(2)
        heads.append(torch.softmax(scores, -1) @ (x @ v[5 * h : 5 * h + 5].T))
    close(layer_outputs(layer, x), torch.cat(heads, 1))


SHAPES = {
    "encoder": Shape(dim=11, depth=3, num_heads=3, head_dim=2, v_head_dim=5, ffn_dim=13),
    "post-norm, positions": Shape(
        dim=11,
        depth=2,
        num_heads=2,
        head_dim=3,
        norm_at="post",
        norm="layer",
        positions="additive",
        num_positions=7,
        qkv_bias=True,
    ),
    "concatenated positions": Shape(
        dim=11,
        depth=1,
        num_heads=2,
        head_dim=3,
        positions="concatenated",
        num_positions=7,
        position_dim=4,
    ),
    "decoder": Shape(
        dim=12,
        depth=2,
        num_heads=4,
        head_dim=4,
        num_kv_heads=2,
        causal=True,
        vocab_size=17,
        qk_rope_head_dim=2,
    ),
    "latent": Shape(
        dim=12,
        depth=2,
        num_heads=3,
        head_dim=4,
        kv_lora_rank=5,
        qk_rope_head_dim=2,
        causal=True,
        vocab_size=17,
    ),
    "read in and out": Shape(
        dim=11, depth=2, num_heads=2, head_dim=3, input_dim=5, output_dim=1, causal=True
    ),
}


def model_and_inputs(name: str) -> tuple[Encoder | Decoder, Tensor]:
    shape = SHAPES[name]
    model = build(shape)
    initialise(model, "library", seeded(3))
    if shape.vocab_size:
        return model, torch.randint(17, (2, 7), generator=seeded(4))
    return model, normal(2, 7, shape.input_dim or shape.dim - shape.position_dim, seed=4).float()


@pytest.mark.parametrize("name", SHAPES)
def test_head_outputs_of_a_model_are_those_of_its_layers(name: str) -> None:
    model, inputs = model_and_inputs(name)
    got = head_outputs(model, inputs)
    assert all(p.dtype == torch.float32 for p in model.parameters()), "the model is left as it was"
    seen: list[Tensor] = []
    exact = build(model.shape).double()
    exact.load_state_dict(model.state_dict())
    hooks = [
        block.attention.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
        for block in exact.blocks
    ]
    exact(inputs if model.shape.vocab_size else inputs.double())
    for hook in hooks:
        hook.remove()
    assert len(got) == len(seen) == model.shape.depth
    for A, x, block in zip(got, seen, exact.blocks, strict=True):
        assert A.shape == (2, 7, model.shape.num_heads * model.shape.v_head_dim)
        assert A.dtype == torch.float64
        for i in range(2):
            close(A[i], layer_outputs(block.attention, x[i]))
        y = A @ block.attention.out.weight.mT
        close(y, block.attention(x))
    rough = model(inputs, keep=True)[1]
    for i, A in enumerate(got):
        assert (A - side_by_side(rough[f"layer {i}"]["heads"])).abs().max() < 1e-5, (
            "what the model itself computes in float32"
        )


def test_attention_spectra_are_geometric_means_over_inputs_then_means_over_layers() -> None:
    model, inputs = model_and_inputs("encoder")
    *layers, overall = attention_spectra(model, inputs)
    assert [row["layer"] for row in layers] == [0, 1, 2]
    assert overall["layer"] == "mean"
    for row, A in zip(layers, head_outputs(model, inputs), strict=True):
        assert (row["inputs"], row["tokens"], row["k"], row["k_centred"]) == (2, 7, 7, 6)
        s = np.linalg.svd(A.numpy(), compute_uv=False)
        c = np.linalg.svd(A.numpy() - A.numpy().mean(1, keepdims=True), compute_uv=False)
        assert row["largest"] == pytest.approx(math.sqrt(s[0, 0] * s[1, 0]), rel=1e-9)
        assert row["smallest"] == pytest.approx(math.sqrt(s[0, 6] * s[1, 6]), rel=1e-6)
        assert row["kappa"] == pytest.approx(
            math.sqrt(s[0, 0] / s[0, 6] * s[1, 0] / s[1, 6]), rel=1e-6
        )
        assert row["kappa_centred"] == pytest.approx(
            math.sqrt(c[0, 0] / c[0, 5] * c[1, 0] / c[1, 5]), rel=1e-6
        )
        assert row["stable_rank"] == pytest.approx(
            math.sqrt(math.prod((s**2).sum(1) / s[:, 0] ** 2)), rel=1e-9
        )
    for name in (*MEASURES, "kappa_centred"):
        assert overall[name] == pytest.approx(
            sum(float(row[name]) for row in layers) / 3, rel=1e-12
        )
    json.dumps([*layers, overall], allow_nan=False)


ENSEMBLE = Attention(Shape(dim=5, depth=1, num_heads=2, head_dim=3), models=4)
MODEL, READER = (
    Encoder(Shape(dim=5, depth=1, num_heads=1)),
    Decoder(Shape(dim=4, depth=1, num_heads=1, vocab_size=7, causal=True)),
)


BAD: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: random_tokens(1, 5, seeded(0)),
        "tokens must be a whole number of at least 2, got 1",
    ),
    (lambda: random_attention(5, 0, 3, 1.0, seeded(0)), "num_heads must be at least 1, got 0"),
    (lambda: random_attention(5, 2, 3, 0.0, seeded(0)), "std must be positive, got 0.0"),
    (lambda: random_attention(5, 2, 3, math.nan, seeded(0)), "std must be positive, got nan"),
    (
        lambda: layer_outputs(ENSEMBLE, torch.ones(3, 5)),
        "one model at a time can be measured, got an ensemble of 4",
    ),
    (
        lambda: head_outputs(MODEL, torch.ones(3, 5)),
        "the model takes (inputs, tokens, 5) of real numbers, got (3, 5) of float32",
    ),
    (
        lambda: head_outputs(MODEL, torch.ones(3, 4, 6)),
        "the model takes (inputs, tokens, 5) of real numbers, got (3, 4, 6) of float32",
    ),
    (
        lambda: head_outputs(MODEL, torch.ones(0, 4, 5)),
        "the model takes (inputs, tokens, 5) of real numbers, got (0, 4, 5) of float32",
    ),
    (
        lambda: head_outputs(READER, torch.ones(3, 4)),
        "the model takes (inputs, tokens) of whole numbers, got (3, 4) of float32",
    ),
    (
        lambda: head_outputs(Encoder(MODEL.shape, models=3), torch.ones(3, 4, 5)),
        "one model at a time can be measured, got an ensemble of 3",
    ),
    (
        lambda: attention_spectra(MODEL, torch.full((2, 4, 5), math.nan)),
        "a matrix of finite real numbers is needed, got NaN",
    ),
    (lambda: attention_spectra(MODEL, torch.ones(2, 1, 5)), "tokens must be at least 2, got 1"),
]


@pytest.mark.parametrize(
    ("act", "text"), BAD, ids=[f"{i}: {text}" for i, (_, text) in enumerate(BAD)]
)
def test_mistake_is_one_line_with_rule_and_value(act: Callable[[], Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        act()
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
