"""Measured generation: its rows, its command, and the captured step."""

import pytest
import torch
from support.cached import BASE, FAMILY, LATENT, filled, ids, refused
from support.tolerance import close

from headwise.cli import main
from headwise.model import infer_bench
from headwise.model.cache import Cache
from headwise.model.generate import prefill, read
from headwise.model.transformer import Decoder, build


def test_cache_measured_rows():
    shape, cpu = (
        BASE.replace(tied=False, positions="additive", num_positions=40),
        torch.device("cpu"),
    )
    rows = infer_bench.measure(shape, 3, 24, 5, cpu, torch.float64, rate=1e9)
    assert [row["keeps"] for row in rows] == ["keys, values", "inputs", "nothing"]
    assert [row["bytes_per_token"] for row in rows] == [2 * 66 * 8, 2 * 22 * 8, 0]
    assert [row["cache_bytes"] for row in rows] == [3 * 24 * row["bytes_per_token"] for row in rows]
    weights = 8 * sum(
        p.numel()
        for name, p in build(shape).named_parameters()
        if name not in ("embedding", "positions")
    )
    for row in rows:
        assert row["step_bytes"] == weights + row["cache_bytes"]
        assert row["bandwidth_share"] == pytest.approx(row["step_bytes"] / row["step_s"] / 1e9)
        assert row["decode_tokens_per_s"] == pytest.approx(3 / row["step_s"])
        assert row["faster"] == pytest.approx(rows[-1]["step_s"] / row["step_s"])
    assert (
        infer_bench.measure(LATENT, 1, 24, 5, cpu, torch.float32, rate=1e9)[0]["keeps"] == "latents"
    )
    assert infer_bench.bandwidth(cpu, 1 << 16) > 0
    for steps in (2, 24):
        refused(
            f"steps must be more than 2 and fewer than the 24 tokens, got {steps}",
            infer_bench.measure,
            BASE,
            1,
            24,
            steps,
            cpu,
            torch.float32,
            1e9,
        )
    refused(
        "only a causal shape decodes token by token, got causal False",
        infer_bench.measure, BASE.replace(causal=False), 1, 24, 5, cpu, torch.float32, 1e9,
    )  # fmt: skip


def test_cache_command_says_what_is_wrong(capsys):
    words = ["infer", "--set", "dim=22", "depth=1", "num_heads=2"]
    for extra, message in (
        ([], "only a causal shape decodes token by token, got causal False"),
        (
            ["causal=true", "num_kv_heads=4"],
            "num_heads must be a multiple of num_kv_heads, got num_heads 2, num_kv_heads 4",
        ),
        (
            ["causal=true", "--dtype", "int8"],
            "unknown dtype 'int8'; choices: bfloat16, float16, float32, float64",
        ),
        (
            ["causal=true", "--steps", "16", "--tokens", "9"],
            "steps must be more than 2 and fewer than the 9 tokens, got 16",
        ),
    ):
        assert main([*words, *extra]) == 2
        assert capsys.readouterr().err == f"headwise: error: {message}\n"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FAMILY)
def test_cache_captured_step_is_the_step(name):
    device = torch.device("cuda")
    model, x = filled(Decoder(FAMILY[name])).double().to(device), ids(3, 9).to(device)
    with torch.no_grad():
        whole = model(x)[0][:, -1]
    cache, newest, found = (
        Cache(model.shape, 3, 12, dtype=torch.float64, device=device),
        x[:, -1:].clone(),
        {},
    )
    prefill(model, x[:, :-1], cache)

    def step():
        found["y"] = read(model, newest, cache)

    step()
    close(found["y"], whole)
    cache.clear()
    prefill(model, x[:, :-3], cache)  # two steps warm it up, the third is captured
    warm = iter((x[:, -3:-2], x[:, -2:-1]))

    def next_step():
        newest.copy_(next(warm, x[:, -1:]))
        step()

    replay = infer_bench.captured(next_step)
    found["y"].zero_()
    replay()
    torch.cuda.synchronize()
    close(found["y"], whole)
