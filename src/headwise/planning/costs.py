"""What a shape costs, by name: the columns of a plan and what its limits are about.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headwise.errors import UsageError, check_whole_numbers, nearest, shown
from headwise.planning.limits import Limit
from headwise.shape import Shape
from headwise.shape.costs import DTYPE_BITS

LONG = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8": "fp8"}
WEIGHTS_ONLY = ("int8", "int4")  # their caches and activations have 16 bits


@dataclass(frozen=True, kw_only=True)
class At:
    """Where costs are counted: the context in tokens, the sequences in a batch, the dtype."""

    context: int = 2048
    batch: int = 1
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        check_whole_numbers(self, 1, "context", "batch")
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", LONG.get(self.dtype, self.dtype))
        if self.dtype not in DTYPE_BITS:
            raise UsageError(
                f"unknown dtype {shown(self.dtype)}; {nearest(str(self.dtype), DTYPE_BITS)}"
            )

    @property
    def kept_bytes(self) -> int:
        """Bytes of a number in the cache and of one kept for the backward pass."""
        return 2 if self.dtype in WEIGHTS_ONLY else DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One cost: the name that Python, JSON and CSV have, the option's, the heading, and what it is.

    `total` counts it in whole numbers that are straight lines in every size; the cost is the total
    over `over`, rounded up where `up`.
    """

    name: str
    flag: str
    heading: str
    kind: str
    about: str
    total: Callable[[Shape, At], int]
    over: Callable[[At], int] = lambda at: 1
    up: bool = False
    causal: bool = False  # asks for a shape that generates

    def of(self, shape: Shape, at: At) -> float:
        """What a shape costs.

        >>> shape = Shape(dim=64, depth=2, num_heads=4, vocab_size=100, causal=True)
        >>> COSTS["kv_bytes_per_token"].of(shape, At())
        512
        """
        missing = self.missing(shape, at)
        if missing:
            raise UsageError(missing)
        return self.value(self.total(shape, at), at)

    def missing(self, shape: Shape, at: At) -> str:
        """Why this cost of a shape is not known; empty: it is."""
        if self.causal and not shape.causal:
            return f"{self.name} needs a causal shape, this shape has causal False"
        try:
            self.total(shape, at)
        except UsageError as error:
            return str(error)
        return ""

    def value(self, total: Any, at: At) -> float:
        """The cost of a total."""
        over, total = self.over(at), int(total)
        if self.up:
            return -(-total // over)
        return total // over if total % over == 0 else total / over

    def span(self, limit: Limit, at: At) -> tuple[int | None, int | None]:
        """The totals that a limit allows, both ends included."""
        over = self.over(at)
        low = None if limit.low is None else limit.low * over - (over - 1 if self.up else 0)
        return low, None if limit.high is None else limit.high * over


COSTS = {
    cost.name: cost
    for cost in (
        Cost(
            name="params",
            flag="--params",
            heading="params",
            kind="count",
            about="all parameters",
            total=lambda shape, at: shape.params,
        ),
        Cost(
            name="active_params",
            flag="--active-params",
            heading="active",
            kind="count",
            about="parameters that one token uses",
            total=lambda shape, at: shape.active_params,
        ),
        Cost(
            name="train_flops_per_token",
            flag="--train-flops",
            heading="train FLOPs/token",
            kind="flops",
            about="training FLOPs per token at the context, forward and backward",
            total=lambda shape, at: shape.flops(at.context, training=True),
            over=lambda at: at.context,
        ),
        Cost(
            name="prefill_flops",
            flag="--prefill-flops",
            heading="prefill FLOPs",
            kind="flops",
            about="FLOPs to read a context, with outputs for its last token",
            total=lambda shape, at: shape.prefill_flops(at.context),
        ),
        Cost(
            name="decode_flops",
            flag="--decode-flops",
            heading="decode FLOPs",
            kind="flops",
            about="FLOPs of one more token at the context",
            total=lambda shape, at: shape.decode_flops(at.context),
            causal=True,
        ),
        Cost(
            name="kv_bytes_per_token",
            flag="--kv-bytes",
            heading="KV/token",
            kind="bytes",
            about="bytes of the KV cache per token, windows left aside",
            total=lambda shape, at: shape.kv_bytes(1, bytes_per=at.kept_bytes),
            causal=True,
        ),
        Cost(
            name="kv_bytes_at_context",
            flag="--kv-bytes-at-context",
            heading="KV at context",
            kind="bytes",
            about="bytes of the KV cache of a batch at the context, windows counted",
            total=lambda shape, at: shape.kv_bytes(
                at.context, batch=at.batch, bytes_per=at.kept_bytes
            ),
            causal=True,
        ),
        Cost(
            name="activation_bytes",
            flag="--activation-bytes",
            heading="activations",
            kind="bytes",
            about="bytes that a training step of a batch keeps for the backward pass",
            total=lambda shape, at: shape.activation_bytes(
                at.context, batch=at.batch, bytes_per=at.kept_bytes
            ),
        ),
        Cost(
            name="weight_bytes",
            flag="--weight-bytes",
            heading="weights",
            kind="bytes",
            about="bytes of the weights in the dtype",
            total=lambda shape, at: shape.params * DTYPE_BITS[at.dtype],
            over=lambda at: 8,
            up=True,
        ),
    )
}
MEASURED = {
    "train_ms": "milliseconds of a training step of a batch at the context, measured here",
    "decode_ms": "milliseconds per token of a batch that is decoded at the context, measured here",
}
