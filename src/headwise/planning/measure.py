"""Milliseconds of rows on this device: a training step, and a decoded token. Loads torch.

Weights are random. A training step is forward, loss, backward and AdamW on one batch at the
context; a decode step reads one token behind a full cache. Each is the median of several.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headwise.errors import UsageError
from headwise.planning.backends import TORCH
from headwise.planning.limits import Limit
from headwise.shape import not_built

if TYPE_CHECKING:
    import torch

    from headwise.planning.result import Plan
    from headwise.shape import Shape

REPEATS = 5  # of a training step, fewer where a row's share of the time is over, but at least 2
DECODED = 16  # tokens, the last of the context
BYTES = 16  # per parameter: weights, gradients and two moments in 32 bits


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Median milliseconds, the range that they lie in, and how often each was measured."""

    train_ms: float
    decode_ms: float | None  # None: the shape does not generate
    train_range: tuple[float, float]
    train_repeats: int
    decode_repeats: int
    device: str


def with_times(
    plan: Plan,
    *,
    rows: int = 20,
    seconds: float = 60.0,
    device: str = "auto",
    limits: Sequence[Limit] = (),
) -> Plan:
    """The plan with the times of its first rows, and of these only what is within limits on
    milliseconds; stops when the seconds are over, and says so."""
    import torch

    from headwise.device import pick_device

    place = pick_device(device)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else _processor()
    until = time.monotonic() + seconds
    chosen = min(rows, len(plan))
    times, left_out = dict(plan.times), []
    for row in plan.rows[:chosen]:
        if time.monotonic() >= until:
            break
        why = not_built(row.shape) or _too_large(row.shape, place)
        if why:
            left_out.append(f"row {row.number} is not measured: {why}")
            continue
        share = (until - time.monotonic()) / (chosen - row.number + 1)
        index = int(plan.order[row.number - 1])
        times[index] = measured(row.shape, plan, place, name, share)
    order = np.array([i for i in plan.order[:chosen].tolist() if i in times], np.int64)
    count = len(order)
    said = f"{count} of {len(plan):,} rows measured on {name}"
    if count < chosen:
        said += f", {seconds:g} s were over or a row could not be; --measure-seconds gives more"
    for limit in limits:
        order = np.array([i for i in order if limit.holds(getattr(times[i], limit.cost) or 0)], int)
        said += f"; {len(order)} of them with {limit}"
    if not limits:
        order = plan.order
    return dataclasses.replace(
        plan, times=times, order=order, notes=(*plan.notes, *left_out[:1], said)
    )


def measured(shape: Shape, plan: Plan, device: torch.device, name: str, seconds: float) -> Measured:
    """The times of one shape."""
    import torch

    dtype = getattr(torch, TORCH.get(plan.at.dtype, "bfloat16"))
    until = time.monotonic() + seconds * 0.7
    steps = _training(shape, plan.at.context, plan.at.batch, device, dtype, until)
    decoded: list[float] = []
    if shape.causal and plan.at.context > DECODED:
        decoded = _decoding(shape, plan.at.context, plan.at.batch, device, dtype)
    return Measured(
        train_ms=1000 * statistics.median(steps),
        decode_ms=1000 * statistics.median(decoded) if decoded else None,
        train_range=(1000 * min(steps), 1000 * max(steps)),
        train_repeats=len(steps),
        decode_repeats=len(decoded),
        device=name,
    )


def _training(
    shape: Shape, tokens: int, batch: int, device: torch.device, dtype: torch.dtype, until: float
) -> list[float]:
    """Seconds of training steps; the first is not counted."""
    import torch
    import torch.nn.functional as F

    from headwise.model.infer_bench import model_and_inputs

    model, inputs = model_and_inputs(shape, batch, tokens, device, dtype)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        outputs, _ = model(inputs)
        if shape.vocab_size and shape.causal:
            loss = F.cross_entropy(outputs.flatten(0, 1).float(), inputs.flatten())
        else:
            loss = outputs.float().square().mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    times: list[float] = []
    while len(times) <= REPEATS and (len(times) < 3 or time.monotonic() < until):
        _wait(device)
        start = time.perf_counter()
        step()
        _wait(device)
        times.append(time.perf_counter() - start)
    return times[1:]


def _decoding(
    shape: Shape, tokens: int, batch: int, device: torch.device, dtype: torch.dtype
) -> list[float]:
    """Seconds of decode steps, the last before the context is full."""
    from headwise.model.cache import Cache
    from headwise.model.generate import prefill, read
    from headwise.model.infer_bench import model_and_inputs

    model, inputs = model_and_inputs(shape, batch, tokens, device, dtype)
    cache = Cache(shape, batch, tokens, dtype=dtype, device=device)
    prefill(model, inputs[:, : tokens - DECODED], cache)
    times = []
    for _ in range(DECODED):
        _wait(device)
        start = time.perf_counter()
        read(model, inputs[:, -1:], cache)
        _wait(device)
        times.append(time.perf_counter() - start)
    return times[2:]


def _wait(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _too_large(shape: Shape, device: torch.device) -> str:
    from headwise.execute.memory import check_fits

    try:
        what = f"a training step of {shape.params:,} parameters"
        check_fits(BYTES * shape.params, device, what, "--params")
    except UsageError as error:
        return str(error)
    return ""


def _processor() -> str:
    """The CPU by its name, with the threads that torch takes."""
    import platform

    import torch

    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next((line.split(":")[1].strip() for line in file if "model name" in line), name)
    except OSError:
        pass
    return f"{name}, {torch.get_num_threads()} threads"
