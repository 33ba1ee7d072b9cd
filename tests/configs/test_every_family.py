"""Every family against its public class: parameters on the meta device, cache and FLOPs on small
models that run."""

import pytest
from support.public_classes import build, count
from support.small_configs import SMALL, SPECIAL, variants

from headwise.configs import FAMILIES, HYBRIDS
from headwise.shape import Shape


def plain(values):
    return {key: value for key, value in values.items() if key not in SPECIAL}


def test_every_family_is_checked():
    assert set(SMALL) == {*FAMILIES, "gemma4_text"} - {"kimi_k2"}
    assert not set(FAMILIES) & set(HYBRIDS)


@pytest.mark.parametrize("model_type", SMALL)
def test_parameters_are_those_of_the_public_class(model_type):
    for values in variants(model_type):
        config, model = build(model_type, **values)
        expected = count(model, model_type)
        given = Shape.from_hf({"model_type": model_type, **plain(values)})
        assert given.params == expected, values
        saved = {**config.to_dict(), "model_type": model_type}
        assert Shape.from_hf(saved).params == expected, values
