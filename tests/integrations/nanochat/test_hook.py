"""`use`: which of nanochat's models get the heads, and what is refused."""

import importlib.util

import pytest
import torch
from support.nanochat_model import FREE, LENGTH, STOCK, build, needs_nanochat, tokens

from headwise.errors import UsageError
from headwise.integrations import nanochat as bridge
from headwise.shape import Shape


@needs_nanochat
def test_use_changes_the_first_model_and_those_of_its_size(nano):
    with bridge.use(**FREE), torch.device("meta"):
        first, other, again = (
            nano.gpt.GPT(nano.gpt.GPTConfig(**{**STOCK, **c})) for c in ({}, {"n_layer": 12}, {})
        )
    assert (
        (first.config.n_head, first.config.head_dim)
        == (again.config.n_head, again.config.head_dim)
        == (6, 14)
    )
    assert (other.config.n_head, other.config.head_dim, other.config.v_head_dim) == (4, 10, 10)


@needs_nanochat
@pytest.mark.parametrize(
    ("stock", "heads", "wanted"),
    [
        (4, {"num_heads": 2}, (2, 2, 20)),
        (4, {"head_dim": 6}, (4, 4, 6)),
        (2, {"num_heads": 10}, (10, 2, 4)),
        (1, {"num_kv_heads": 2}, (4, 2, 10)),
    ],
)
def test_use_keeps_or_derives_what_is_not_given(nano, stock, heads, wanted):
    with bridge.use(**heads):
        c = nano.gpt.GPTConfig(**{**STOCK, "n_kv_head": stock})
    assert (c.n_head, c.n_kv_head, c.head_dim) == wanted


@needs_nanochat
def test_use_of_a_shape_changes_models_of_its_size(nano):
    shape = Shape(
        dim=40,
        depth=3,
        num_heads=5,
        head_dim=4,
        v_head_dim=3,
        num_kv_heads=1,
        qk_norm="free",
        max_logit=2.0,
    )
    with bridge.use(shape), torch.device("meta"):
        other = nano.gpt.GPT(nano.gpt.GPTConfig(**{**STOCK, "n_layer": 2, "n_embd": 48}))
        model = nano.gpt.GPT(nano.gpt.GPTConfig(**STOCK))
        with pytest.raises(
            UsageError, match="nanochat builds depth 3 with dim 80, the shape has dim 40"
        ):
            nano.gpt.GPTConfig(**{**STOCK, "n_embd": 80})
    assert (other.config.n_head, other.config.head_dim) == (4, 12)
    c = model.config
    assert (c.n_head, c.n_kv_head, c.head_dim, c.v_head_dim, c.logit_scale) == (5, 1, 4, 3, 0.5)


@needs_nanochat
def test_use_keeps_heads_that_a_config_names(nano):
    named = {**STOCK, "n_head": 7, "n_kv_head": 7, "head_dim": 6, "v_head_dim": 5}
    with bridge.use():
        model = nano.gpt.GPT(nano.gpt.GPTConfig(**named))
    assert vars(model.config) == {**named, "logit_scale": None}
    with bridge.use(num_heads=7, head_dim=6):
        assert vars(nano.gpt.GPTConfig(**named)) == vars(model.config)
    with (
        pytest.raises(UsageError, match="head_dim of the config is 6, asked for was 8"),
        bridge.use(head_dim=8),
    ):
        nano.gpt.GPTConfig(**named)


@needs_nanochat
def test_use_leaves_nanochat_as_it_was(nano):
    def held():
        modules = (nano.gpt, nano.engine, nano.checkpoint_manager)
        return [
            (name, id(value))
            for module in modules
            for name, value in vars(module).items()
            if not name.startswith("__")
        ]

    before = held()
    with bridge.use(**FREE):
        during = held()
        model = build(nano)
    assert held() == before
    assert {name for (name, a), (_, b) in zip(before, during, strict=True) if a != b} == {
        "GPT", "GPTConfig", "CausalSelfAttention", "KVCache", "save_checkpoint"
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="inside"), bridge.use(**FREE):
        raise RuntimeError("inside")
    assert held() == before
    assert model(tokens()).shape == (2, LENGTH, 101)


@needs_nanochat
def test_use_takes_a_config_made_before(nano):
    config = nano.gpt.GPTConfig(**STOCK)
    with bridge.use(**FREE):
        assert nano.gpt.GPT(config).config.head_dim == 14
    assert config.n_head == 4


@needs_nanochat
@pytest.mark.parametrize("planted", ["a factor", "other arguments", "another weight"])
def test_use_refuses_another_attention_than_the_known_one(nano, monkeypatch, planted):
    known = nano.gpt.CausalSelfAttention
    changes = {
        "a factor": lambda self, *args: 1.01 * known.forward(self, *args),
        "other arguments": lambda self, x, ve: x,
        "another weight": lambda self: self.register_parameter(
            "sink", torch.nn.Parameter(torch.zeros(1))
        ),
    }

    class Other(known):
        def __init__(self, *args):
            super().__init__(*args)
            if planted == "another weight":
                changes[planted](self)

        forward = known.forward if planted == "another weight" else changes[planted]

    monkeypatch.setattr(nano.gpt, "CausalSelfAttention", Other)
    with (
        pytest.raises(
            UsageError, match="this nanochat's attention is not the one this hook knows"
        ) as caught,
        bridge.use(),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert nano.gpt.flash_attn is importlib.import_module("nanochat.flash_attention").flash_attn


REFUSED = [
    ({"heads": 3}, "unknown size 'heads' of heads; did you mean num_heads or head_dim"),
    ({"head_dim": 7}, "head_dim must be even for rotary positions, got 7"),
    (
        {"num_heads": 3},
        "head_dim must be given when num_heads does not divide dim, got dim 40, num_heads 3",
    ),
    ({"num_heads": 4, "num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
    ({"logit_scale": 1.0, "max_logit": 1.0}, "max_logit needs qk_norm and replaces logit_scale"),
    (
        {"shape": Shape(dim=40, depth=3, num_heads=4, kv_lora_rank=8)},
        "kv_lora_rank of a nanochat model must be 0, got 8",
    ),
    (
        {"shape": Shape(dim=40, depth=3, num_heads=4, ffn_dim=80)},
        "ffn_dim of a nanochat model must be 160, got 80",
    ),
    (
        {"shape": Shape(dim=40, depth=3, num_heads=4), "head_dim": 4},
        "give a shape or sizes of heads, not both",
    ),
    (
        {"shape": Shape(dim=40, depth=9, num_heads=4)},
        "no GPT of depth 9 and dim 40 was built, so none got num_heads 4, head_dim 10",
    ),
]


@needs_nanochat
@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_use_refuses_bad_sizes_in_one_line(nano, given, message):
    with pytest.raises(UsageError) as caught, bridge.use(**given):
        nano.gpt.GPTConfig(**STOCK)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@needs_nanochat
def test_use_inside_use_is_refused(nano):
    with (
        bridge.use(),
        pytest.raises(UsageError, match="nanochat already has other heads"),
        bridge.use(),
    ):
        pass
