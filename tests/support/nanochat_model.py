"""nanochat's own GPT in small. It is importable, or its checkout is in HEADWISE_NANOCHAT:

HEADWISE_NANOCHAT=~/nanochat python -m pytest tests/integrations/nanochat
"""

import importlib.util
import os
import sys

import pytest
import torch
from support.tolerance import seeded

CHECKOUT = os.environ.get("HEADWISE_NANOCHAT", "")
if CHECKOUT:
    sys.path.append(CHECKOUT)
needs_nanochat = pytest.mark.skipif(
    importlib.util.find_spec("nanochat") is None,
    reason="nanochat: set HEADWISE_NANOCHAT to its checkout",
)

# short windows are 128 tokens and the query's own at least, so sequences are longer than that
STOCK = {
    "sequence_len": 160,
    "vocab_size": 101,
    "n_layer": 3,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 40,
    "window_pattern": "SL",
}
FREE = {"num_heads": 6, "head_dim": 14, "v_head_dim": 9, "num_kv_heads": 3}
LENGTH = 140


def draw(model, seed=0):
    """Weights that are all in use: nanochat's projections start at zero."""
    model.init_weights()
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator)
                * (0.8 if parameter.ndim < 2 else 3 * parameter.shape[1] ** -0.5)
            )
    return model


def build(nano, **changes):
    return draw(nano.gpt.GPT(nano.gpt.GPTConfig(**{**STOCK, **changes})))


def tokens(batch=2, length=LENGTH, seed=1):
    return torch.randint(0, STOCK["vocab_size"], (batch, length), generator=seeded(seed))


def count(model):
    return sum(p.numel() for p in model.parameters())
