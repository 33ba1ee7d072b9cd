"""Padded batches in a Hugging Face Llama: training, prefill and generation on `attend` with the
mask that transformers makes, as ratios to its own sdpa and eager in the same run.

    python -m benchmarks.padded --rounds 7

Right-padded training, left-padded prefill and generation; 4 layers, 512 tokens. Rounds go in turn
over the implementations, so that a busy machine hits all of them; the ratio is of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.model.dispatch import attend

NAMES = ("attend", "sdpa", "eager")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function on `attend`."""
    causal = attention_mask is None and query.shape[2] > 1
    out = attend(
        query, key, value, causal=causal, mask=attention_mask, scale=scaling, dropout=dropout
    )
    return out.transpose(1, 2).contiguous(), None


def model(tokens: int) -> Any:
    """A Llama of four layers."""
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        LlamaConfig,
        LlamaForCausalLM,
    )
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("attend", attention)
    AttentionMaskInterface.register("attend", sdpa_mask)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=1000, max_position_embeddings=2 * tokens, use_cache=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def cases(llama: Any, batch: int, tokens: int, made: int) -> dict[str, Callable[[], None]]:
    """What is timed, by name."""
    ids = torch.randint(3, 1000, (batch, tokens), generator=torch.Generator().manual_seed(1))
    lengths = torch.linspace(tokens // 2, tokens, batch).long().unsqueeze(1)
    right = (torch.arange(tokens) < lengths).long()
    left = right.flip(1)
    labels = ids.masked_fill(right == 0, -100)

    def training() -> None:
        llama.zero_grad()
        llama(ids, attention_mask=right, labels=labels, use_cache=False).loss.backward()

    @torch.no_grad()
    def prefill() -> None:
        llama(ids, attention_mask=left)

    @torch.no_grad()
    def generation() -> None:
        llama.generate(
            ids, attention_mask=left, max_new_tokens=made, min_new_tokens=made, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip

    return {"training": training, "prefill": prefill, "generation": generation}


def main() -> None:
    """Time every case on every implementation in turn, print ratios to sdpa."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=16)
    args = parser.parse_args()
    llama = model(args.tokens)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.rounds} rounds")
    for name, case in cases(llama, args.batch, args.tokens, args.new_tokens).items():
        seconds: dict[str, list[float]] = {n: [] for n in NAMES}
        for turn in range(args.rounds + 1):
            for implementation in NAMES:
                llama.set_attn_implementation(implementation)
                start = time.process_time()
                case()
                if turn:  # the first warms up
                    seconds[implementation].append(time.process_time() - start)
        base = statistics.median(seconds["sdpa"])
        low = min(seconds["sdpa"])
        ratios = ", ".join(
            f"{n} {statistics.median(s) / base:.3f} (of the fastest rounds {min(s) / low:.3f})"
            for n, s in seconds.items()
        )
        print(f"{name:10} sdpa {base:.2f} s of CPU; ratios {ratios}", flush=True)


if __name__ == "__main__":
    main()
