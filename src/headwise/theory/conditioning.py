"""Condition numbers of attention: of the heads' outputs side by side, in float64.

A = [A_1, ..., A_h] is (N tokens, h d), the heads' outputs before the output projection W_O. "Leaner
Transformers" (arXiv 2505.20802) has a theorem on kappa(A) for independent Gaussian heads. The
Jacobian of a layer is in `headwise.theory.jacobian`.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from headwise.errors import UsageError
from headwise.model.attention import Attention
from headwise.model.transformer import Decoder, Encoder
from headwise.shape import Shape
from headwise.theory.gaussian import check_matrix_sizes
from headwise.theory.spectrum import (
    MEASURES,
    check_matrix,
    geometric_mean,
    spectrum,
)

# ---- the outputs of a model's heads


def side_by_side(heads_BHNV: Tensor) -> Tensor:
    """[A_1, ..., A_h]: (..., heads, tokens, width) -> (..., tokens, heads * width)."""
    return heads_BHNV.transpose(-3, -2).flatten(-2)


def head_outputs(model: Encoder | Decoder, inputs: Tensor) -> list[Tensor]:
    """A of every layer for every input, before W_O, (inputs, tokens, heads * value width) each;
    computed in float64 whatever the model's precision, one input at a time. `inputs` is (inputs,
    tokens, width), or (inputs, tokens) of whole numbers."""
    if model.models is not None:
        raise UsageError(f"one model at a time can be measured, got an ensemble of {model.models}")
    _check_inputs(model, inputs)
    # A condition number is only as good as its smallest singular value, so the copy runs in
    # float64.
    exact = copy.deepcopy(model).double()
    found: list[list[Tensor]] = [[] for _ in exact.blocks]
    with torch.no_grad():
        # The model's layers run one after the other, and each hands out its heads before W_O.
        for one in inputs.double() if inputs.is_floating_point() else inputs:
            h = exact.embed(one.unsqueeze(0))
            for layer, block in zip(found, exact.blocks, strict=True):
                h, kept = block(h, keep=True)
                layer.append(side_by_side(kept["heads"]))
    return [torch.cat(layer) for layer in found]


def _check_inputs(model: Encoder | Decoder, inputs: Tensor) -> None:
    shape = model.shape
    # A model of ids takes (inputs, tokens), a model of vectors (inputs, tokens, width).
    tail, numbers = (shape.input_dim or shape.dim - shape.position_dim,), "real"
    if shape.vocab_size:
        tail, numbers = (), "whole"
    fits = inputs.ndim == 2 + len(tail) and inputs.shape[2:] == tail and 0 not in inputs.shape
    if not fits or inputs.is_floating_point() == bool(shape.vocab_size):
        sizes = ", ".join(("inputs", "tokens", *map(str, tail)))
        raise UsageError(
            f"the model takes ({sizes}) of {numbers} numbers, got {tuple(inputs.shape)} of "
            f"{str(inputs.dtype).removeprefix('torch.')}"
        )


def attention_spectra(
    model: Encoder | Decoder, inputs: Tensor
) -> list[dict[str, float | int | str]]:
    """One row per layer, then a row of their (arithmetic) means, "layer": "mean".

    Each has geometric means over the inputs: of s_1, s_k, kappa, stable and effective rank of A,
    and of kappa once the mean token is removed (k_centred = min(N - 1, h d)).
    """
    rows: list[dict[str, float | int | str]] = []
    for i, A in enumerate(head_outputs(model, inputs)):
        # The mean token often carries s_1 alone, so kappa is also given without it.
        plain, centred = spectrum(A), spectrum(A, centred=True)
        values = {name: geometric_mean(getattr(plain, name)) for name in MEASURES}
        sizes = {"inputs": A.shape[0], "tokens": A.shape[1], "k": plain.k, "k_centred": centred.k}
        rows.append({"layer": i, **sizes, **values, "kappa_centred": geometric_mean(centred.kappa)})
    # The last row is the mean over layers of the numbers; sizes are those of the first layer.
    means = {
        name: sum(float(row[name]) for row in rows) / len(rows)
        for name in (*MEASURES, "kappa_centred")
    }
    return [*rows, {**rows[0], "layer": "mean", **means}]


# ---- a layer with random weights


def random_tokens(
    tokens: int, dim: int, generator: torch.Generator, normalised: bool = True
) -> Tensor:
    """Independent Gaussian tokens, (tokens, dim); `normalised` to mean 0 and variance 1 each, as a
    layer norm leaves them."""
    check_matrix_sizes(tokens, dim)
    device = generator.device
    x = torch.randn(tokens, dim, dtype=torch.float64, generator=generator, device=device)
    if not normalised:
        return x
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, correction=0, keepdim=True)


def random_attention(
    dim: int, heads: int, head_dim: int, std: float, generator: torch.Generator
) -> Attention:
    """A layer whose weights, W_O's too, are N(0, std^2)."""
    shape = Shape(dim=dim, depth=1, num_heads=heads, head_dim=head_dim)
    if not 0 < std < math.inf:
        raise UsageError(f"std must be positive, got {std!r}")
    with torch.random.fork_rng(devices=[]):  # what a module starts with is drawn over
        layer = Attention(shape).double().to(generator.device)
    with torch.no_grad():
        # W_Q, W_K, W_V and W_O are drawn alike.
        for weight in layer.parameters():
            weight.normal_(0.0, std, generator=generator)
    return layer


def layer_outputs(layer: Attention, tokens: Tensor) -> Tensor:
    """A of one layer for one input (tokens, dim), in float64."""
    check_layer_input(layer, tokens)
    with torch.no_grad():
        _, kept = copy.deepcopy(layer).double()(tokens.double().unsqueeze(0), keep=True)
    return side_by_side(kept["heads"]).squeeze(0)


def check_layer_input(layer: Attention, tokens: Tensor) -> None:
    """Refuse what is not one input (tokens, dim) of one layer."""
    if tokens.ndim != 2 or tokens.shape[-1] != layer.shape.dim:
        raise UsageError(
            f"one input of (tokens, dim {layer.shape.dim}) is needed, got shape "
            f"{tuple(tokens.shape)}"
        )
    check_matrix(tokens)
    if layer.out.weight.ndim != 2:
        raise UsageError(
            f"one model at a time can be measured, got an ensemble of {len(layer.out.weight)}"
        )
