"""AdamW's kernels against torch's in float64: of many models, and of one large parameter. Without a
GPU in Triton's interpreter."""

import math

import numpy as np
import pytest
import torch
from support.tolerance import same
from torch import nn

pytest.importorskip("triton", reason="the kernels are written in triton")
from support.gpu import BF16, DEVICE, FP16, FP32, FP64, NAN, near, normal

from headwise.kernels import adamw_triton
from headwise.lm import optim
from headwise.model.transformer import build
from headwise.shape import Shape
from headwise.training import ensemble, fused_encoder
from headwise.training.run import Recipe

pytestmark = pytest.mark.usefixtures("products_as_on_a_gpu")


def guarded(x):
    """The same numbers, with a row of NaN behind them."""
    whole = torch.full((x.shape[0] + 1, *x.shape[1:]), NAN, dtype=x.dtype, device=DEVICE)
    whole[:-1] = x
    return whole


@pytest.mark.parametrize("kind", [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])
def test_adamw_is_torch_adamw_for_each_model(kind):
    recipes = [
        Recipe(steps=7, epoch=1, lr=0.01, weight_decay=0.3),
        Recipe(steps=7, epoch=1, lr=0.0, weight_decay=0.3),
        Recipe(steps=7, epoch=1, lr=0.2, schedule="constant"),
    ]
    beta1, beta2, eps, length = 0.9, 0.95, 1e-8, 1500  # a block of 1024 and a part of one
    tables = torch.from_numpy(np.stack([ensemble._rate_table(r) for r in recipes], -1)).to(DEVICE)
    weights = guarded(normal(0, 3, length))
    mean, square, half = (
        guarded(torch.zeros(3, length)),
        guarded(torch.zeros(3, length)),
        guarded(torch.zeros(3, length, dtype=kind)),
    )
    half = weights if kind == FP32 else half
    theirs = [nn.Parameter(w.double()) for w in weights[:3]]
    optimisers = [
        torch.optim.AdamW([p], betas=(beta1, beta2), eps=eps, weight_decay=r.weight_decay)
        for p, r in zip(theirs, recipes, strict=True)
    ]
    exact, a, b = (
        weights[:3].double(),
        torch.zeros(3, length, dtype=FP64, device=DEVICE),
        torch.zeros(3, length, dtype=FP64, device=DEVICE),
    )
    for i in range(7):
        grads = normal(i + 1, 3, length) * 10.0 ** (i - 4)
        fused_encoder.adamw(
            weights[:3], mean[:3], square[:3], grads, half[:3], tables[i], beta1, beta2, eps
        )
        g, (size, correct, decay) = grads.double(), tables[i].double().unsqueeze(-1)
        a = beta1 * a + (1 - beta1) * g
        b = beta2 * b + (1 - beta2) * g * g
        exact = exact * decay - size * a / (b.sqrt() * correct + eps)
        for optimiser, p, recipe, grad in zip(optimisers, theirs, recipes, g, strict=True):
            optimiser.param_groups[0]["lr"] = float(recipe.rates()[i])
            p.grad = grad
            optimiser.step()
        near(weights[:3], exact, 1e-6, "weights")
        near(mean[:3], a, 1e-6, "mean")
        near(square[:3], b, 1e-6, "square")
        near(weights[:3], torch.stack([p.detach() for p in theirs]), 1e-6, "torch's weights")
        same(half[:3], weights[:3].to(kind), "the operands' copy")
    same(weights[1], normal(0, 3, length)[1], "a rate of 0 moves nothing")
    for name, tensor in (
        ("weights", weights),
        ("mean", mean),
        ("square", square),
        ("operands", half),
    ):
        assert tensor[3].isnan().all(), f"{name} are written beyond their end"


@pytest.mark.parametrize("over", [None, 3.7])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adamw_of_one_parameter_is_torchs_and_leaves_gradients_alone(decay, over):
    length, lr = 2 * adamw_triton.BLOCK + 77, 0.02
    w, mean, square = (
        guarded(x.view(1, -1))[:1].view(-1)
        for x in (normal(0, length), torch.zeros(length), torch.zeros(length))
    )
    p, clipped = (
        nn.Parameter(w.double()),
        None if over is None else torch.tensor(over, device=DEVICE),
    )
    optimiser = torch.optim.AdamW([p], lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
    for i in range(5):
        grad = normal(i + 1, length) * 10.0 ** (i - 3)
        given = grad.clone()
        adamw_triton.adamw(w, mean, square, given, clipped, lr, 0.9, 0.95, 1e-8, decay, i + 1)
        same(given, grad, "the gradient")
        p.grad = grad.double() / (over or 1.0)
        optimiser.step()
        near(w, p.detach(), 1e-6, "weights")
        near(mean, optimiser.state[p]["exp_avg"], 1e-6, "mean")
        near(square, optimiser.state[p]["exp_avg_sq"], 1e-6, "square")
    for tensor in (w, mean, square):
        beyond = tensor.as_strided((length,), (1,), length)
        assert beyond.isnan().all(), "written beyond its end"


def test_large_parameters_are_moved_as_the_others_are(monkeypatch):
    shape = Shape(dim=12, depth=1, num_heads=2, causal=True, vocab_size=31)
    found = []
    for large in (False, True):
        monkeypatch.setattr(optim, "_is_large", lambda p, large=large: large and p.ndim > 1)
        model = build(shape).to(DEVICE)
        for i, p in enumerate(model.parameters()):
            p.data = normal(i, *p.shape)
        moving = optim.Optimiser(dict(model.named_parameters()), shape, "adamw", 0.1)
        assert bool(moving.large) == large
        moving.set_steps(4)
        for lr in (0.1, 0.02):
            for i, p in enumerate(model.parameters()):
                p.grad = normal(100 + i, *p.shape)
            moving.step(lr, torch.tensor(2.5, device=DEVICE))
        found.append([*model.parameters(), *moving.moments.values()])
    for kernels, torchs in zip(*found, strict=True):
        near(torchs.detach(), kernels.detach(), 1e-6, "moved")


def test_adamw_of_a_zero_gradient_only_decays():
    weights, zeros = normal(0, 2, 40), torch.zeros(3, 2, 40, device=DEVICE)
    rates = torch.tensor([[0.1, 0.1], [1.0, 1.0], [0.5, 1.0]], device=DEVICE)
    fused_encoder.adamw(weights, zeros[0], zeros[1], zeros[2], weights, rates, 0.9, 0.95, 1e-8)
    same(weights, normal(0, 2, 40) * torch.tensor([[0.5], [1.0]], device=DEVICE))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, NAN])
def test_a_model_whose_gradient_is_no_number_stays_as_it_is(bad):
    weights, mean, square = normal(0, 3, 40), normal(1, 3, 40), normal(2, 3, 40).abs()
    grads, rates = normal(3, 3, 40), torch.tensor([[0.1] * 3, [1.0] * 3, [0.5] * 3], device=DEVICE)
    half, expected = weights.to(FP16), [t.clone() for t in (weights, mean, square)]
    fused_encoder.adamw(*expected, grads, weights.to(FP16), rates, 0.9, 0.95, 1e-8)
    grads[1, 7] = bad
    moved = [t.clone() for t in (weights, mean, square)]
    fused_encoder.adamw(
        *moved, grads, half, rates, 0.9, 0.95, 1e-8, (grads.sum(1), torch.ones_like(grads[:, 0]))
    )
    for before, after, usual in zip((weights, mean, square), moved, expected, strict=True):
        same(after[1], before[1], "the model that overflowed")
        same(after[[0, 2]], usual[[0, 2]], "those beside it")
    same(half, moved[0].to(FP16), "the operands' copy")


def test_adamw_undoes_what_gradients_are_carried_times():
    start, grads = [normal(0, 3, 40), normal(1, 3, 40), normal(2, 3, 40).abs()], normal(3, 3, 40)
    rates, shrink = (
        torch.tensor([[0.1] * 3, [1.0] * 3, [0.5] * 3], device=DEVICE),
        torch.tensor([1.0, 0.125, 2.0**-10], device=DEVICE),
    )
    expected, moved = ([t.clone() for t in start] for _ in range(2))
    fused_encoder.adamw(*expected, grads, start[0].to(FP16), rates, 0.9, 0.95, 1e-8)
    for now in (slice(0, 1), slice(1, 3)):
        fused_encoder.adamw(
            *moved,
            grads * shrink[:, None],
            start[0].to(FP16),
            rates,
            0.9,
            0.95,
            1e-8,
            (grads.sum(1)[now], 1 / shrink[now]),
            now,
        )
    for usual, after in zip(expected, moved, strict=True):
        same(after, usual, "moved")
