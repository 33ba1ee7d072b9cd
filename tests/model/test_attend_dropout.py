"""Dropout of `attend`: which weights, how many, how they grow, and that a seed gives the same mask
again, also when a backward pass computes the weights again."""

import math

import pytest
import torch
import torch.nn.functional as F
from support.tolerance import STANDARD_ERRORS, close, same, seeded
from torch.utils.checkpoint import checkpoint

from headwise.model import reference
from headwise.model.dispatch import attend, attend_with_weights

P = 0.3
BATCH, HEADS, QUERIES, KEYS = 3, 5, 61, 67


def weights_of(backend="auto", p=P, seed=11):
    """The weights behind an answer: equal scores, and values that are the unit vectors."""
    torch.manual_seed(seed)
    q, k = torch.zeros(BATCH, HEADS, QUERIES, 2), torch.zeros(BATCH, HEADS, KEYS, 2)
    eye = torch.eye(KEYS).expand(BATCH, HEADS, KEYS, KEYS)
    return attend(q, k, eye, dropout=p, backend=backend)


@pytest.mark.parametrize("backend", ["auto", "plain", "blocked"])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.75])
def test_dropout_keeps_mean_and_has_the_variance_of_a_coin(backend, p):
    grown = weights_of(backend, p) * KEYS  # 0, or 1 / (1 - p)
    kept = grown > 0
    close(grown[kept], torch.full_like(grown[kept], 1 / (1 - p)))
    n, coin = kept.numel(), p * (1 - p)
    bound = STANDARD_ERRORS * math.sqrt(coin / n)
    assert abs(kept.double().mean().item() - (1 - p)) <= bound
    assert abs(grown.double().mean().item() - 1) <= bound / (1 - p)
    # The variance of a weight is p / (1 - p); its own standard error, from the fourth moment.
    error = abs(1 - 2 * p) / math.sqrt(coin * n)
    found = grown.double().var().item()
    assert abs(found - p / (1 - p)) <= STANDARD_ERRORS * error * p / (1 - p) + 1e-6


@pytest.mark.parametrize("backend", ["auto", "blocked"])
def test_dropout_of_heads_queries_and_keys_is_independent(monkeypatch, backend):
    monkeypatch.setattr(reference, "BLOCK_BYTES", BATCH * HEADS * KEYS * 4 * 7)  # ragged blocks
    coins = (weights_of(backend) > 0).double()
    coins = (coins - (1 - P)) / math.sqrt(P * (1 - P))
    for axis in range(4):
        for shift in (1, 2):
            if shift < coins.shape[axis]:
                product = coins * coins.roll(shift, axis)
                bound = STANDARD_ERRORS / math.sqrt(coins.numel())
                assert abs(product.mean().item()) <= bound, (axis, shift)


@pytest.mark.parametrize("backend", ["auto", "plain", "blocked"])
def test_dropout_of_one_seed_is_one_mask(backend):
    same(weights_of(backend), weights_of(backend))
    assert not torch.equal(weights_of(backend), weights_of(backend, seed=12))


def test_dropout_mask_is_that_of_sdpa():
    q, k, v = (torch.randn(2, 3, n, 5, generator=seeded(n)) for n in (7, 11, 11))
    mask = torch.rand(2, 1, 7, 11, generator=seeded(1)) > 0.2
    for options, theirs in (({}, {}), ({"mask": mask}, {"attn_mask": mask})):
        torch.manual_seed(5)
        expected = F.scaled_dot_product_attention(q, k, v, dropout_p=P, **theirs)
        torch.manual_seed(5)
        close(attend(q, k, v, dropout=P, **options), expected)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(p):
    found = weights_of(p=p)
    close(found, torch.full_like(found, (1 - p) / KEYS))


@pytest.mark.parametrize("backend", ["auto", "plain", "blocked"])
def test_dropout_mask_is_the_same_when_weights_are_computed_again(monkeypatch, backend):
    """The gradient of the values is the transposed weights of the forward pass, whether a block or
    a checkpoint computes them twice."""
    monkeypatch.setattr(reference, "BLOCK_BYTES", 2 * 3 * 13 * 4 * 4)
    q, k = (torch.randn(2, 3, n, 5, generator=seeded(n)) for n in (11, 13))
    eye = torch.eye(13).expand(2, 3, 13, 13).clone().requires_grad_()

    def call(v):
        return attend(q, k, v, dropout=P, backend=backend)

    for function in (call, lambda v: checkpoint(call, v, use_reentrant=False)):
        weights = function(eye)
        torch.rand(3)  # another draw before the backward pass
        pattern = torch.randn(weights.shape, generator=seeded(1))
        (gradient,) = torch.autograd.grad(weights, eye, pattern)
        close(gradient, weights.detach().mT @ pattern)


def test_dropout_shows_in_the_weights_that_are_given_back():
    q, k, v = (torch.randn(2, 3, 7, 5, generator=seeded(n)) for n in range(3))
    torch.manual_seed(5)
    y, weights = attend_with_weights(q, k, v, dropout=P)
    close(y, weights @ v)
    assert (weights == 0).any()
