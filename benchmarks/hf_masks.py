"""headwise inside a Llama of transformers against its "sdpa", under padding; prints ratios.

    PYTHONPATH=src OMP_NUM_THREADS=1 python -m benchmarks.hf_masks

Three uses, each with a batch whose sequences differ in length: a training step (right-padded), a
prefill (left-padded), and the generation of tokens after it (left-padded). Both attentions take
turns, and the figure is the median of the turns' ratios, headwise over sdpa: below 1 headwise is
faster. sdpa against itself, measured in the same turns, says how much of that is noise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headwise.integrations.transformers import register

WAYS = "sdpa", "headwise", "sdpa again"


def model(way: str, layers: int, device: str, dtype: torch.dtype) -> Any:
    """The same small Llama with grouped heads, whatever computes its attention."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    made: Any = LlamaForCausalLM._from_config(
        config, attn_implementation=way.split()[0], dtype=dtype
    )
    return made.to(device)


def uses(tokens: int, batch: int, device: str) -> dict[str, Callable[[Any], None]]:
    """What is timed, by name."""
    ids = torch.randint(1, 256, (batch, tokens), device=device)
    lengths = torch.linspace(tokens / 2, tokens, batch).long().tolist()
    right = torch.zeros_like(ids)
    for row, length in zip(right, lengths, strict=True):
        row[:length] = 1
    left = right.flip(1)
    labels = ids.where(right == 1, -100)

    def train(m: Any) -> None:
        m.train()
        m(ids, attention_mask=right, labels=labels).loss.backward()
        m.zero_grad()

    @torch.inference_mode()
    def prefill(m: Any) -> None:
        m.eval()(ids, attention_mask=left, logits_to_keep=1)

    def generate(m: Any) -> None:
        m.eval().generate(
            ids, attention_mask=left, max_new_tokens=24, min_new_tokens=24, do_sample=False
        )

    @torch.inference_mode()
    def unpadded(m: Any) -> None:
        m.eval()(ids, logits_to_keep=1)

    return {
        "training, right-padded": train,
        "prefill, left-padded": prefill,
        "generation, left-padded": generate,
        "prefill, no padding": unpadded,
    }


def seconds(call: Callable[[], None], device: str) -> float:
    start = time.process_time() if device == "cpu" else time.perf_counter()
    call()
    if device == "cpu":
        return time.process_time() - start
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    given = parser.parse_args()
    register()
    models = {
        way: model(way, given.layers, given.device, getattr(torch, given.dtype)) for way in WAYS
    }
    print(
        f"{given.layers} layers, {given.batch} x {given.tokens} tokens, {given.dtype} on "
        f"{given.device}, {given.turns} turns"
    )
    for name, use in uses(given.tokens, given.batch, given.device).items():
        turns: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(given.turns + 2):
            # Every other turn goes the other way round.
            for way in WAYS if turn % 2 else reversed(WAYS):
                taken = seconds(lambda m=models[way], use=use: use(m), given.device)
                if turn > 1:
                    turns[way].append(taken)
        ratios = {
            way: statistics.median(a / b for a, b in zip(turns[way], turns["sdpa"], strict=True))
            for way in WAYS[1:]
        }
        print(
            f"{name:24} headwise / sdpa {ratios['headwise']:.3f}   sdpa / sdpa "
            f"{ratios['sdpa again']:.3f}   {statistics.median(turns['sdpa']) * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    main()
