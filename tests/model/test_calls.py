"""What a call of `attend` with masks, dropout, softcap and sinks decides: its backend, and what it
knows of itself."""

import pytest
import torch

from headwise.model.backends import Call, choose_backend, explain
from headwise.shape import Shape

BF16 = torch.bfloat16


def call(**changes):
    sizes = {"batch": 1, "heads": 8, "kv_heads": 8, "queries": 1024, "keys": 1024}
    return Call(device="cpu", dtype=torch.float32, rank=64, width=64, **sizes | changes)


@pytest.mark.parametrize(
    ("options", "device", "backend", "refusals"),
    [
        ({"mask": True}, "cpu", "flash", {"short": "without a mask"}),
        ({"bias": True}, "cpu", "flash", {}),
        ({"sinks": True}, "cpu", "flash", {}),
        ({"dropout": 0.1}, "cpu", "plain", {"flash": "softcap, this call has dropout 0.1"}),
        ({"softcap": 50.0}, "cpu", "plain", {"flash": "this call has a softcap of 50"}),
        ({"mask": True}, "cuda", "efficient", {"cudnn": "explicit mask", "flash": "another mask"}),
        ({"dropout": 0.1}, "cuda", "flash", {"cudnn": "this call has dropout 0.1"}),
        ({"sinks": True}, "cuda", "flash", {"cudnn": "this call has sinks"}),
        (
            {"softcap": 50.0},
            "cuda",
            "plain",
            {"flash": "a softcap of 50", "efficient": "without softcap, this call"},
        ),
    ],
)
def test_explain_knows_masks_dropout_softcap_and_sinks(options, device, backend, refusals):
    shape = Shape(dim=256, depth=1, num_heads=4, causal=False)
    choice = explain(shape, 512, device=device, dtype=BF16, **options)
    assert choice.backend == backend
    for name, part in refusals.items():
        assert part in dict(choice.refused).get(name, "needs attention without a mask"), name


@pytest.mark.parametrize(
    ("changes", "masked", "hides"),
    [
        ({}, False, False),
        ({"causal": True}, False, False),
        ({"causal": True, "queries": 7}, True, False),
        ({"causal": True, "queries": 1}, False, False),  # it sees every key
        ({"causal": True, "queries": 1, "offset": 3}, True, True),
        ({"causal": True, "queries": 2000}, True, True),
        ({"window": 1024}, False, False),
        ({"window": 1023}, True, False),
        ({"window": 1500, "queries": 2000}, True, True),
        ({"offset": 5}, False, False),
        ({"mask": True}, True, True),
        ({"bias": True}, True, True),
    ],
)
def test_call_knows_what_takes_a_mask_and_who_may_see_nothing(changes, masked, hides):
    c = call(**changes)
    assert (c.masked, c.hides) == (masked, hides)


def test_call_choice_and_plan_stay_values():
    one, other = (call(dropout=0.1, sinks=True, offset=3) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert choose_backend(one) == choose_backend(other)
    assert hash(choose_backend(one)) == hash(choose_backend(other))
