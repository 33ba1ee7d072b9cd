"""nanochat's configs and shapes, one from the other."""

import pytest
from support.nanochat_model import STOCK

from headwise.errors import UsageError
from headwise.integrations import nanochat as bridge
from headwise.integrations.nanochat.configs import ADDED
from headwise.shape import Shape


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window_pattern": "SSL", "n_layer": 7},
        {"head_dim": 6, "v_head_dim": 11},
        {"logit_scale": 0.25},
        {"head_dim": 448, "n_head": 6},
    ],
)
def test_config_of_and_shape_of_are_inverse(changes):
    config = {**STOCK, "vocab_size": 128, **changes}
    shape = bridge.shape_of(config)
    back = bridge.config_of(shape, sequence_len=160)
    assert bridge.shape_of(back) == shape
    assert set(back) == {*STOCK, *(ADDED if set(changes) & set(ADDED) else ())}
    assert {k: back[k] for k in STOCK if k != "window_pattern"} == {
        k: config[k] for k in STOCK if k != "window_pattern"
    }


def test_shape_of_added_fields():
    stock, free = (
        Shape.from_hf(STOCK),
        Shape.from_hf({**STOCK, "head_dim": 6, "v_head_dim": 11, "logit_scale": 0.25}),
    )
    assert (free.head_dim, free.v_head_dim, free.qk_rope_head_dim, free.scale) == (6, 11, 6, 0.25)
    assert (stock.head_dim, stock.v_head_dim, stock.scale) == (
        10,
        10,
        pytest.approx(1.44 * 10**-0.5),
    )
    matrices = 40 * (4 * 6 + 2 * 6 + 2 * 11 + 4 * 11) - 40 * (4 * 10 + 2 * 10 + 2 * 10 + 4 * 10)
    assert free.params - stock.params == 3 * matrices + 2 * 128 * 2 * (11 - 10)


def test_config_of_refuses_a_shape_that_is_not_nanochats():
    shape = bridge.shape_of({**STOCK, "vocab_size": 128})
    for changes, message in (
        (
            {"activation": "gelu"},
            "activation of a nanochat model of these sizes is 'relu2', got 'gelu'",
        ),
        ({"tied": True}, "tied of a nanochat model of these sizes is False, got True"),
        (
            {"windows": (0, 129, 129)},
            "nanochat's windows are 0 or 129 at sequence_len 160, 0 in the last layer",
        ),
        ({"windows": (0, 7, 0)}, "nanochat's windows are 0 or 129"),
        (
            {"qk_rope_head_dim": 4},
            "qk_rope_head_dim of a nanochat model of these sizes is 10, got 4",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            bridge.config_of(shape.replace(**changes), 160)
    held = shape.replace(logit_scale=None, max_logit=3.0)
    assert bridge.config_of(held, 160)["logit_scale"] == 0.3
