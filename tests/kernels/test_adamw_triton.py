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
from headwise.training.optim import Moved, Overflow, fused_adamw, plain_adamw, rate_table
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
    length = 1500  # a tile of 1024 and a part of one
    beta1, beta2 = recipes[0].beta1, recipes[0].beta2
    eps = recipes[0].eps
    tables = torch.from_numpy(np.stack([rate_table(r) for r in recipes], -1)).to(DEVICE)
    weights = guarded(normal(0, 3, length))
    mean, square = guarded(torch.zeros(3, length)), guarded(torch.zeros(3, length))
    half = weights if kind == FP32 else guarded(torch.zeros(3, length, dtype=kind))
    moved = Moved(weights, mean, square, half).of(slice(0, 3))
    twin = moved.copy()
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
        fused_adamw(moved, grads, tables[i], recipes[0])
        plain_adamw(twin, grads, tables[i].unsqueeze(-1), recipes[0])
        g, (size, correct, decay) = grads.double(), tables[i].double().unsqueeze(-1)
        a = beta1 * a + (1 - beta1) * g
        b = beta2 * b + (1 - beta2) * g * g
        exact = exact * decay - size * a / (b.sqrt() * correct + eps)
        for optimiser, p, recipe, grad in zip(optimisers, theirs, recipes, g, strict=True):
            optimiser.param_groups[0]["lr"] = float(recipe.rates()[i])
            p.grad = grad
            optimiser.step()
        near(weights[:3], exact, 1e-6, "weights")
        near(twin.weights, exact, 1e-6, "the plain twin's weights")
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


RECIPE = Recipe(steps=1, epoch=1)
STEPS = [fused_adamw, plain_adamw]


@pytest.mark.parametrize("step", STEPS)
def test_adamw_of_a_zero_gradient_only_decays(step):
    zeros = torch.zeros(3, 2, 40, device=DEVICE)
    moved = Moved(normal(0, 2, 40), zeros[0], zeros[1], normal(0, 2, 40).to(FP16))
    rates = torch.tensor([[0.1, 0.1], [1.0, 1.0], [0.5, 1.0]], device=DEVICE).unsqueeze(-1)
    step(moved, zeros[2], rates, RECIPE)
    same(moved.weights, normal(0, 2, 40) * torch.tensor([[0.5], [1.0]], device=DEVICE))


def drawn():
    weights = normal(0, 3, 40)
    return Moved(weights, normal(1, 3, 40), normal(2, 3, 40).abs(), weights.to(FP16))


RATES = torch.tensor([[0.1] * 3, [1.0] * 3, [0.5] * 3], device=DEVICE).unsqueeze(-1)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, NAN])
@pytest.mark.parametrize("step", STEPS)
def test_adamw_leaves_a_model_whose_gradient_is_no_number_as_it_is(bad, step):
    start, moved, expected = drawn(), drawn(), drawn()
    grads = normal(3, 3, 40)
    step(expected, grads, RATES, RECIPE)
    grads[1, 7] = bad
    overflow = Overflow(grads.sum(1), torch.ones_like(grads[:, 0]))
    step(moved, grads, RATES, RECIPE, overflow)
    for before, after, usual in zip(start[:3], moved[:3], expected[:3], strict=True):
        same(after[1], before[1], "the model that overflowed")
        same(after[[0, 2]], usual[[0, 2]], "those beside it")
    if step is fused_adamw:
        same(moved.operands, moved.weights.to(FP16), "the operands' copy")


@pytest.mark.parametrize("step", STEPS)
def test_adamw_undoes_the_loss_scale_of_each_model(step):
    expected, moved, grads = drawn(), drawn(), normal(3, 3, 40)
    scale = torch.tensor([1.0, 0.125, 2.0**-10], device=DEVICE)
    step(expected, grads, RATES, RECIPE)
    scaled = grads * scale[:, None]
    for models in (slice(0, 1), slice(1, 3)):  # of some models at a time
        overflow = Overflow(grads.sum(1)[models], 1 / scale[models])
        step(moved.of(models), scaled[models], RATES[:, models], RECIPE, overflow)
    for usual, after in zip(expected[:3], moved[:3], strict=True):
        same(after, usual, "moved")
