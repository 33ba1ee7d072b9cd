"""Cards by name: what is known of them, and what runs where without one."""

import json

import pytest
import torch

from headwise import Shape, UsageError, explain
from headwise.cli import main
from headwise.kernels.cards import CARDS, NAMES, shared_bytes
from headwise.model.cards import card_of

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


BIASED = ["qkv_bias=true", "out_bias=true", "ffn_bias=true"]
POST = ["dim=64", "depth=1", "num_heads=8", "norm=scalar", "norm_at=post", "ffn_dim=2048"]
PRE = ["dim=96", "depth=2", "num_heads=3", "norm=layer", "causal=true", "activation=gelu"]


def explained(capsys, shape, device, dtype):
    words = ["--tokens", "16", "--batch", "64", "--dtype", dtype, "--json", "--device", device]
    assert main(["explain", "--set", *shape, *BIASED, *words]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_explain_says_which_step_trains_on_a_card(capsys):
    hopper, answer = explained(capsys, POST, "h100", "float16")
    assert "its attention part one kernel forward and one backward" in hopper
    assert (answer["card"]["capability"], answer["card"]["shared_bytes"]) == ([9, 0], 232_448)
    ampere, _ = explained(capsys, POST, "a100", "float16")
    assert "needs compute capability 9.0 (H100, H200), this card has 8.0" in " ".join(
        ampere.split()
    )


@pytest.mark.parametrize(("device", "dtype", "fused"), [
    ("rtx4090", "float32", False), ("a100", "float32", True), ("rtx4090", "float16", True),
])  # fmt: skip
def test_explain_minds_the_shared_memory_of_a_card(capsys, device, dtype, fused):
    _, answer = explained(capsys, PRE, device, dtype)
    why = "needs dim 64 or less with operands of 32 bits on a card with 99 KiB of shared memory"
    assert answer["blocks"].startswith("" if fused else why)
    assert bool(answer["blocks"]) == (not fused)
