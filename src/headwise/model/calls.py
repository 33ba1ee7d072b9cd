"""What decides the backend of an attention call, as one hashable value without tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwise.model.tracing import alike, sure

# A fused kernel makes so many tiles of 64 x 64 scores at rank 64 in less time than the launches of
# several kernels take.
FEW_TILES = 2048


@dataclass(frozen=True)
class Call:
    """What decides the backend of one attention call."""

    device: str
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    rank: int
    width: int
    causal: bool = False
    window: int = 0
    hard: bool = False
    graphed: bool = False  # launches cost nothing, as in a CUDA graph that is replayed
    offset: int | None = None  # query i stands at key i + offset; None: the last at the last key
    mask: bool = False  # keys are hidden beyond causal and window: padding, documents, any table
    bias: bool = False  # numbers are added to the scores: a floating mask, ALiBi
    bias_trained: bool = False  # and want a gradient
    dropout: float = 0.0
    softcap: float = 0.0
    sinks: bool = False

    @property
    def few(self) -> bool:
        """Whether the work takes less time than the launches of several kernels."""
        if self.graphed or self.device != "cuda" or self.dtype == torch.float64:
            return False
        # Tiles of 64 x 64 scores, each weighed by its width in units of 64; a causal mask leaves
        # half of them.
        tiles = self.batch * self.heads * -(-self.queries // 64) * -(-self.keys // 64)
        work = tiles * max(64, self.rank, self.width) / 64 * (0.5 if self.causal else 1)
        return sure(work <= FEW_TILES)

    @property
    def aligned(self) -> bool:
        """Whether the last query stands at the last key."""
        return self.offset is None or sure(self.offset == self.keys - self.queries)

    @property
    def windowed(self) -> bool:
        """Whether the window may hide a key."""
        if self.window <= 0:
            return False
        return not (sure(self.window >= self.keys) and sure(self.window >= self.queries))

    @property
    def tabled(self) -> bool:
        """Whether more than causal and window with the last query at the last key is asked for."""
        if self.mask or self.bias:
            return True
        return (self.causal or self.window > 0) and not self.aligned

    @property
    def masked(self) -> bool:
        """Whether it takes an explicit mask: any table, a window, or causal with another number of
        queries than keys. One query stands at the last key and sees them all."""
        if self.tabled or self.windowed:
            return True
        return self.causal and not sure(self.queries == 1) and not alike(self.queries, self.keys)

    @property
    def hides(self) -> bool:
        """Whether some query may see nothing."""
        ends = self.causal or self.window > 0
        return self.tabled or (
            ends and not (alike(self.queries, self.keys) or sure(self.queries <= self.keys))
        )

    @property
    def beyond(self) -> str:
        """What is asked for that is no mask and no bias, in words; empty if nothing is."""
        if self.softcap:
            return f"a softcap of {self.softcap:g}"
        if self.dropout:
            return f"dropout {self.dropout:g}"
        return "sinks" if self.sinks else ""

    @property
    def half(self) -> bool:
        """Whether the dtype has 16 bits."""
        return self.dtype in (torch.float16, torch.bfloat16)

    @property
    def empty(self) -> bool:
        """Whether an axis has no entries."""
        sizes = self.batch, self.heads, self.kv_heads, self.queries, self.keys
        return any(sure(n == 0) for n in (*sizes, self.rank, self.width))

    @property
    def score_bytes(self) -> int:
        """Bytes of the scores if they are written out."""
        return self.batch * self.heads * self.queries * self.keys * max(4, self.dtype.itemsize)

    @property
    def sink_ranks(self) -> int:
        """Coordinates that carry the sinks in a fused kernel (fused.py)."""
        return 0 if not self.sinks else 2 if self.half else 1


def dtype_name(dtype: torch.dtype) -> str:
    """float16 for torch.float16."""
    return str(dtype).removeprefix("torch.")
