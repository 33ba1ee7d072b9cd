"""Models in flat rows: all numbers of one model lie in one row, its parameters one after another.

One row per model, so (M, P) numbers in all. An optimiser then moves every parameter of every model
in one pass, and a kernel finds a model's parameter at `m * P + start`. Each parameter starts on a
64-byte line; the gaps between them hold zeros and stay zero.

Letters: M models, P numbers of a row, T tokens of a batch, D width, C heads x rank, F hidden units.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.shape import Shape

ALIGN = 16  # floats: products take the same path, and give the same bits, at any place in a row
OPERANDS = {  # the type of a product's operands, by precision
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "fp32": torch.float32,
}
DOTS = {"fp16": "tf32", "bf16": "tf32", "tf32": "tf32", "fp32": "tf32x3"}  # Triton's word for it


@dataclass(frozen=True)
class Layout:
    """Where each parameter of one model lies in its row: name -> (start, numbers)."""

    spans: dict[str, tuple[int, int]]
    length: int  # of a row

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, Tensor]], model_axis: bool = True) -> Layout:
        """The layout of named parameters; with `model_axis` their first axis is the model's."""
        spans, start = {}, 0
        for name, parameter in parameters:
            size = parameter[0].numel() if model_axis else parameter.numel()
            spans[name] = (start, size)
            start += -(-size // ALIGN) * ALIGN
        return cls(spans, start)

    def start(self, name: str) -> int:
        return self.spans[name][0]

    def flatten(self, tensors: Sequence[Tensor], like: Tensor) -> Tensor:
        """One tensor per parameter -> rows (M, P) with zeros in the gaps; `like` are such rows."""
        models = like.shape[0]
        columns: list[Tensor] = []
        starts = [start for start, _ in self.spans.values()]
        ends = [*starts[1:], self.length]
        for tensor, (start, size), end in zip(tensors, self.spans.values(), ends, strict=True):
            columns.append(tensor.reshape(models, -1))
            if end > start + size:
                columns.append(like.new_zeros(models, end - start - size))
        return torch.cat(columns, 1)


class HeadGroup(NamedTuple):
    """Models side by side that cut their width into heads in the same way."""

    models: slice
    shape: Shape

    @property
    def first(self) -> int:
        return self.models.start

    @property
    def size(self) -> int:
        return self.models.stop - self.models.start


def head_groups(shapes: Iterable[Shape]) -> list[HeadGroup]:
    """The shapes of an ensemble's models, in order, as groups of equal neighbours."""
    groups, first = [], 0
    for shape, equal in itertools.groupby(shapes):
        count = len(list(equal))
        groups.append(HeadGroup(slice(first, first + count), shape))
        first += count
    return groups


@dataclass(frozen=True)
class FlatRows:
    """The weights of an ensemble in flat rows, and what is needed to read them."""

    head_groups: list[HeadGroup]
    layout: Layout
    weights: Tensor  # (M, P) float32
    operands: Tensor  # (M, P) in the operands' type; the weights themselves where that is float32
    precision: str


class FlatKernels:
    """What all fused steps share: sizes, parameters by name, and head groups on streams of their
    own."""

    def __init__(self, rows: FlatRows, batch: int, tokens: int, gain: float) -> None:
        self.rows = rows
        self.head_groups = rows.head_groups
        shape = self.shape = self.head_groups[0].shape
        self.batch, self.tokens = batch, tokens
        self.T = batch * tokens
        self.M, self.P = rows.weights.shape
        self.D, self.F = shape.dim, shape.ffn_dim
        self.C = shape.num_heads * shape.head_dim
        self.dot = DOTS[rows.precision]
        self.gain = (
            gain  # gradients are this times what they are, until weights' gradients are made
        )
        self.device = rows.weights.device
        self.streams: list[torch.cuda.Stream] = []  # of every head group but the first
        if rows.weights.is_cuda:
            self.streams = [torch.cuda.Stream(self.device) for _ in self.head_groups[1:]]

    # -- parameters

    def matrix(self, name: str, model: int = 0) -> Tensor:
        """A matrix in the operands' type: the numbers from where it starts in a model's row."""
        return self.rows.operands.view(-1)[model * self.P + self.rows.layout.start(name) :]

    def vector(self, name: str, model: int = 0, of: Tensor | None = None) -> Tensor:
        """A parameter in float32, or the same place in other rows, such as those of gradients."""
        rows = self.rows.weights if of is None else of
        return rows.view(-1)[model * self.P + self.rows.layout.start(name) :]

    # -- head groups beside each other

    def each_head_group(self, work: Callable[[HeadGroup], None]) -> None:
        """Do `work` for every head group.

        On a GPU all but the first go to streams of their own and are joined at the end: few models
        of one group do not fill the card, and while one group waits for memory another multiplies.
        On a CPU they go one after another.
        """
        first, *others = self.head_groups
        streams = self.streams or [None] * len(others)
        for group, stream in zip(others, streams, strict=True):
            with self.on(stream):
                work(group)
        work(first)
        self.join(*streams)

    def on(self, stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
        """Launch on a stream, behind what was launched on this one so far; None: on this one."""
        if stream is None:
            return contextlib.nullcontext()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(stream)

    def join(self, *streams: torch.cuda.Stream | None) -> None:
        """Let this stream wait for what was launched on those."""
        for stream in filter(None, streams):
            torch.cuda.current_stream(self.device).wait_stream(stream)
