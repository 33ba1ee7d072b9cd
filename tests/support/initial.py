"""Models drawn and filled, and what is normal, uniform or constant, for tests of initial values."""

import math

import torch
from support.tolerance import STANDARD_ERRORS, seeded

from headwise.model.init import initialise
from headwise.model.transformer import build


def filled(model, seed=0, spread=0.3):
    """Every parameter drawn, gains and biases too."""
    generator = seeded(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, spread, generator=generator)
    return model


def drawn(shape, scheme, seed=0):
    model = build(shape)
    initialise(model, scheme, seeded(seed))
    return model


def is_uniform(t, bound, what):
    """Within the bound and nearly up to it, mean and spread within four standard errors."""
    n = t.numel()
    assert t.abs().max() <= bound, what
    assert t.abs().max() >= bound * (1 - 20 / n), (
        f"{what}: largest {t.abs().max():.5f}, bound {bound:.5f}, n {n}"
    )
    spread = bound / math.sqrt(3)
    assert abs(t.mean()) < STANDARD_ERRORS * spread / math.sqrt(n), what
    assert abs(t.var() / spread**2 - 1) < STANDARD_ERRORS * math.sqrt(0.8 / n), what  # kurtosis 1.8


def is_normal(t, mean, spread, what):
    n = t.numel()
    assert abs(t.mean() - mean) < STANDARD_ERRORS * spread / math.sqrt(n), (
        f"{what}: mean {t.mean():.5f}, n {n}"
    )
    assert abs(t.var() / spread**2 - 1) < STANDARD_ERRORS * math.sqrt(2 / n), (
        f"{what}: spread {t.std():.5f}, n {n}"
    )
    assert t.abs().max() > 3 * spread, f"{what}: no tail"


def is_constant(t, value, what):
    assert (t == value).all(), what


def check_plain_values(model):
    """Gains are 1 and attention biases 0 under every scheme; token tables are N(0, 0.02)."""
    for name, p in model.named_parameters():
        if "norm" in name or "after" in name:
            is_constant(p, 0.0 if name.endswith("bias") else 1.0, name)
        elif "attention" in name and name.endswith("bias"):
            is_constant(p, 0.0, name)
        elif name in ("embedding", "head"):
            is_normal(p, 0.0, 0.02, name)
