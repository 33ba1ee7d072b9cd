"""Cards by name: what is known of them, and what runs where without one."""

import pytest
import torch

from headwise import Shape, UsageError, explain
from headwise.kernels.cards import CARDS, NAMES, card_of, shared_bytes

BF16 = torch.bfloat16
WIDE = Shape(dim=1024, depth=1, num_heads=4, causal=True)  # heads of 256


def test_cards_limits_are_those_of_their_capability():
    limits = {name: CARDS[name].shared >> 10 for name in NAMES}
    assert limits == {
        "a100": 163,
        "l4": 99,
        "l40s": 99,
        "rtx4090": 99,
        "h100": 227,
        "h200": 227,
        "b200": 227,
        "rtx5090": 99,
    }
    assert shared_bytes((13, 7)) == 99 << 10, "a card to come has no less"


def test_explain_answers_for_the_card_and_not_for_this_machine(monkeypatch):
    answers = {}
    for seen in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda seen=seen: seen)
        answers[seen] = [explain(WIDE, 2048, device=name, dtype=BF16) for name in NAMES]
    assert answers[True] == answers[False]
    backends = dict(zip(NAMES, (choice.backend for choice in answers[False]), strict=True))
    assert {name for name, backend in backends.items() if backend == "cudnn"} == {"h100", "h200"}
    assert {backend for name, backend in backends.items() if name[0] != "h"} == {"flash"}
    assert "this card, A100" in str(answers[False][NAMES.index("a100")])
    wider = Shape(dim=1024, depth=1, num_heads=1, causal=True)
    assert {explain(wider, 2048, device=n, dtype=BF16).backend for n in NAMES} == {"wide"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("t4", "compute capability 7.5: fused attention needs 8.0"),
        ("rtx4080", "unknown device 'rtx4080'; did you mean rtx4090"),
        ("tpu", "unknown device 'tpu'; "),
    ],
)
def test_explain_refuses_cards_it_knows_nothing_of(name, said):
    with pytest.raises(UsageError, match=said):
        explain(WIDE, device=name)


def test_cards_kinds_of_device_are_none():
    assert [card_of(name) for name in ("auto", "cpu", "cuda", "cuda:1", "meta")] == [None] * 5
    assert card_of("H200") is CARDS["h200"]
