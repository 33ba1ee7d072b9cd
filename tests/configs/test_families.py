"""Random configs of public families against the real model classes, on the meta device."""

import json
import random

import pytest
from support.random_configs import (
    CLASSES,
    NANOCHAT,
    bert,
    bias,
    check_attention,
    common,
    count,
    gemma2,
    gemma3_text,
    gpt2,
    llama,
    mistral,
    phi,
    qwen2,
    qwen3,
    real,
    rope,
    vit,
)

from headwise.configs import FAMILIES
from headwise.errors import UsageError
from headwise.shape import Shape


def gemma(rng):
    return (
        {"head_dim": 32}
        | common(rng)
        | rope(rng)
        | bias(rng, "attention_bias", "use_bidirectional_attention")
    )


def phi3(rng):
    return phi(rng) | {
        "hidden_act": "silu",
        "sliding_window": rng.choice((None, rng.randrange(1, 99))),
    }


def deepseek(rng):
    values = common(rng, head_dim=False, groups=False) | rope(rng) | bias(rng, "attention_bias")
    values |= {
        "num_key_value_heads": values["num_attention_heads"],
        "first_k_dense_replace": values["num_hidden_layers"] + rng.randint(0, 1),
    }
    values |= {
        "kv_lora_rank": rng.randrange(3, 41, 2),
        "q_lora_rank": rng.choice((None, rng.randrange(3, 51, 2))),
    }
    return values | {
        "qk_rope_head_dim": 2 * rng.randint(1, 9),
        "qk_nope_head_dim": rng.randrange(1, 19),
        "v_head_dim": rng.randrange(1, 23),
    }


def deepseek_v2(rng):
    return deepseek(rng) | bias(rng, "mlp_bias")


def nanochat(rng):
    return (
        common(rng)
        | rope(rng)
        | bias(rng, "attention_bias")
        | {"hidden_act": rng.choice(("relu2", "relu", "gelu"))}
    )


MAKE = {
    "gpt2": gpt2,
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "phi": phi,
    "phi3": phi3,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek,
    "bert": bert,
    "vit": vit,
    "nanochat": nanochat,
}


@pytest.mark.parametrize("model_type", CLASSES)
def test_random_configs_count_as_the_real_class(model_type):
    rng, seen = random.Random(f"families {model_type}"), set()
    for _ in range(80):
        values = MAKE[model_type](rng)
        config, model = real(model_type, **values)
        expected = count(model)
        for form in (
            config.to_dict(),
            json.loads(config.to_json_string()),
            json.loads(config.to_json_string(use_diff=False)),
        ):
            shape = Shape.from_hf(form)
            assert shape.params == expected, values
        check_attention(shape, config, model)
        seen.add(expected)
    assert len(seen) > 55


@pytest.mark.parametrize("model_type", CLASSES)
def test_left_out_keys_take_the_defaults_of_the_library(model_type):
    depth = {"n_layer": 2} if model_type == "gpt2" else {"num_hidden_layers": 2}
    if model_type.startswith("deepseek"):
        depth["first_k_dense_replace"] = 2
    config, model = real(model_type, **depth)
    shape = Shape.from_hf({"model_type": model_type, **depth})
    assert shape.params == count(model)
    assert shape == Shape.from_hf(config.to_dict())
    check_attention(shape, config, model)


def test_families_of_random_configs_are_known():
    assert set(MAKE) == set(CLASSES) <= set(FAMILIES)


@pytest.mark.parametrize("model_type", [*CLASSES, None])
def test_reader_breaks_at_no_value(model_type):
    """Any one value replaced by nonsense gives a shape or a one-line refusal, never another
    error."""
    config = (
        dict(NANOCHAT)
        if model_type is None
        else real(model_type, **MAKE[model_type](random.Random(3)))[0].to_dict()
    )
    messages = []
    for key in config:
        for nonsense in (
            None,
            True,
            0,
            -1,
            3,
            1.5,
            float("nan"),
            float("inf"),
            "",
            "a\nb",
            [],
            [1, 2],
            ["x"],
            {},
            {"x": 1},
        ):
            try:
                Shape.from_hf({**config, key: nonsense})
            except UsageError as error:
                messages.append(str(error))
    assert len(messages) > 50
    assert not [message for message in messages if "\n" in message]
