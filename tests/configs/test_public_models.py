"""Public models of today at full size: parameters are those of the public class."""

import pytest
from support.public_classes import build, count
from support.public_configs import PUBLIC, PUBLISHED

from headwise.shape import Shape

BEFORE = 34  # public models of tests/configs/test_configs.py


def test_sixty_public_models_and_more():
    assert len(PUBLIC) + BEFORE > 100


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_of_public_models(name):
    config = PUBLIC[name]
    model_type = config["model_type"]
    _, model = build(model_type, **{k: v for k, v in config.items() if k != "model_type"})
    shape = Shape.from_hf(config)
    assert shape.params == count(model, model_type)
    assert shape.params == PUBLISHED.get(name, shape.params)
    assert shape.active_params <= shape.params
