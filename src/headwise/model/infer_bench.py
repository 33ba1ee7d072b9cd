"""Prefill and decode of a shape, measured: with a cache, with inputs kept where that is less, and
with everything computed anew.

Weights are random, times are medians, and every rate of a row comes from one run on one device. The
last token of `tokens` is where decoding ends, so a cache is full then and its bytes are
`Shape.kv_bytes(tokens)`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.errors import UsageError
from headwise.model.cache import Cache
from headwise.model.generate import prefill, read
from headwise.model.transformer import Decoder, Encoder, build
from headwise.shape import Shape

REPEATS = 3  # of a prefill, and of a step that computes everything anew
WARM = 2  # steps that are not counted
NAMES = {"keys": "keys, values", "latent": "latents", "input": "inputs"}


def measure(
    shape: Shape,
    batch: int,
    tokens: int,
    steps: int,
    device: torch.device,
    dtype: torch.dtype,
    rate: float,
) -> list[dict[str, Any]]:
    """Rows for one batch size, one for each thing that can be kept, then one with nothing kept;
    `rate` is the device's bandwidth."""
    if not shape.causal:
        raise UsageError("only a causal shape decodes token by token, got causal False")
    if not WARM < steps < tokens:
        raise UsageError(
            f"steps must be more than {WARM} and fewer than the {tokens} tokens, got {steps}"
        )
    # Inputs instead of keys and values are measured only where they are fewer numbers.
    model, inputs = _model(shape, device, dtype), _inputs(shape, batch, tokens, device, dtype)
    kept = [False, True] if shape.kv_bytes(1, inputs=True) < shape.kv_bytes(1) else [False]
    rows = [_cached(model, inputs, steps, inputs_kept) for inputs_kept in kept]
    rows.append(_anew(model, inputs))
    # A decode step reads every weight and the whole cache once, so its bytes over its time is the
    # bandwidth it reaches.
    weights = _weights_read(shape) * dtype.itemsize
    for row in rows:
        row["decode_tokens_per_s"] = batch / row["step_s"]
        row["faster"] = rows[-1]["step_s"] / row["step_s"]
        row["step_bytes"] = weights + row["cache_bytes"]
        row["bandwidth_share"] = row["step_bytes"] / row.get("graph_step_s", row["step_s"]) / rate
    return [{"batch": batch, **row} for row in rows]


def bandwidth(device: torch.device, size: int = 0) -> float:
    """Bytes per second of a large copy, read and written; `size`: a quarter of a gigabyte on a CPU
    and one on a GPU unless given."""
    source = torch.ones(
        size or (1 << 30 if device.type == "cuda" else 1 << 28), dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device, 5)


def _cached(
    model: Decoder | Encoder, inputs: Tensor, steps: int, inputs_kept: bool
) -> dict[str, Any]:
    # The cache holds the prompt at the start and is full after `steps` tokens.
    shape, device, (batch, tokens) = model.shape, inputs.device, inputs.shape[:2]
    dtype = next(model.parameters()).dtype
    cache = Cache(shape, batch, tokens, dtype=dtype, device=device, inputs=inputs_kept)
    prompt, newest = inputs[:, : tokens - steps], inputs[:, -1:]

    def fill() -> None:
        cache.clear()
        prefill(model, prompt, cache)

    def step() -> None:
        read(model, newest, cache)

    # Warm up first. The timed fill then clears the cache, so the timed steps begin behind the
    # prompt and end where the cache is full.
    fill()
    for _ in range(WARM):
        step()
    filling = _seconds(fill, device, REPEATS)
    row: dict[str, Any] = {
        "keeps": NAMES[cache.layers[0].kind],
        "bytes_per_token": shape.kv_bytes(1, bytes_per=dtype.itemsize, inputs=inputs_kept),
        "cache_bytes": cache.bytes,
        "prefill_tokens_per_s": batch * (tokens - steps) / filling,
        "step_s": _seconds(step, device, steps, warm=0),
    }
    # The same step as a CUDA graph: without launches what is left is the device's own time.
    if device.type == "cuda":
        fill()
        row["graph_step_s"] = _seconds(captured(step), device, steps)
    return row


def _anew(model: Decoder | Encoder, inputs: Tensor) -> dict[str, Any]:
    @torch.no_grad()
    def step() -> None:
        h = model.embed(inputs)
        for block in model.blocks:
            h, _ = block(h)
        model.unembed(h[:, -1:])

    return {
        "keeps": "nothing",
        "bytes_per_token": 0,
        "cache_bytes": 0,
        "step_s": _seconds(step, inputs.device, REPEATS),
    }


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph: each replay reads the same token to the same place."""
    # PyTorch's recipe: warm up on a side stream, so that allocations and library handles exist
    # before the capture.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _seconds(work: Callable[[], Any], device: torch.device, repeats: int, warm: int = 1) -> float:
    """The median time of a call."""
    # The device works behind the host, so both ends of an interval wait for it.
    times = []
    for i in range(warm + repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= warm:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _model(shape: Shape, device: torch.device, dtype: torch.dtype) -> Decoder | Encoder:
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.device(device),
    ):
        return build(shape).to(dtype)


def _inputs(
    shape: Shape, batch: int, tokens: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    if shape.vocab_size:
        return torch.randint(shape.vocab_size, (batch, tokens), generator=generator, device=device)
    return torch.randn(batch, tokens, shape.in_dim, generator=generator, device=device, dtype=dtype)


def _weights_read(shape: Shape) -> int:
    """Parameters that every step reads: all but the tables that tokens and positions are looked up
    in."""
    # An embedding that is also the head is read whole; one beside a head of its own is looked up
    # row by row.
    table = shape.param_table()
    looked_up = table.get("embedding", 0) if "head" in table or shape.output_dim else 0
    return shape.params - looked_up - table.get("positions", 0)
