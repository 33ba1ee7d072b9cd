"""The arguments of `attend` beyond the usual call: masks, documents, offset, dropout, softcap,
sinks, ALiBi.

`Extras` is what decides about them, without tensors; `with_tensors` gathers their tensors once they
are known to be right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.errors import UsageError
from headwise.model.calls import Call, dtype_name
from headwise.model.masks import Terms

Documents = Tensor | tuple[Tensor, Tensor]


class Sized(NamedTuple):
    """A tensor without its numbers."""

    size: torch.Size
    dtype: torch.dtype
    device: torch.device
    trained: bool

    @classmethod
    def of(cls, name: str, t: Tensor | None) -> Sized | None:
        """Of a tensor, or of none; anything else is refused."""
        if t is None:
            return None
        if not isinstance(t, Tensor):
            raise UsageError(f"{name} must be a tensor, got {type(t).__name__}")
        return cls(t.shape, t.dtype, t.device, t.requires_grad)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {tuple(self.size)} on {self.device}"


class Extras(NamedTuple):
    """All that decides how they are answered; a hashable value."""

    mask: Sized | None
    documents: tuple[Sized, ...]
    offset: int | None
    dropout: float
    softcap: float
    sinks: Sized | None
    alibi: Sized | None

    @classmethod
    def of(
        cls,
        mask: Tensor | None,
        documents: Documents | None,
        offset: int | None,
        dropout: float,
        softcap: float,
        sinks: Tensor | None,
        alibi: Tensor | None,
    ) -> Extras:
        """The arguments without their numbers."""
        ids: Sequence[Any] = () if documents is None else (documents,)
        if isinstance(documents, (tuple, list)):
            ids = documents
            if len(ids) != 2:
                raise UsageError(
                    f"documents must be ids, or a pair (of queries, of keys), got {len(ids)} parts"
                )
        sized = (Sized.of("documents", t) for t in ids)
        return cls(
            Sized.of("mask", mask), tuple(s for s in sized if s is not None),
            offset, dropout, softcap, Sized.of("sinks", sinks), Sized.of("alibi", alibi),
        )  # fmt: skip

    def check(self, q: torch.Size, k: torch.Size, device: torch.device, hard: bool) -> None:
        """Refuse what breaks a rule; q and k have four axes."""
        batch, heads, queries, _ = q
        keys = k[2]
        if not 0 <= self.dropout <= 1:
            raise UsageError(f"dropout must be a probability from 0 to 1, got {self.dropout}")
        if not 0 <= self.softcap < math.inf:
            raise UsageError(f"softcap must be positive, or 0 for none, got {self.softcap}")
        if self.offset is not None and not isinstance(self.offset, (int, torch.SymInt)):
            raise UsageError(f"offset must be an int or None, got {type(self.offset).__name__}")
        if self.mask is not None:
            self._check_mask(self.mask, (batch, heads, queries, keys))
        for name, slopes in (("sinks", self.sinks), ("alibi", self.alibi)):
            if slopes is not None and (
                slopes.size != (heads,) or not slopes.dtype.is_floating_point
            ):
                raise UsageError(f"{name} must be one number per head, ({heads},), got {slopes}")
        self._check_documents(batch, queries, keys)
        for t in (self.mask, *self.documents, self.sinks, self.alibi):
            if t is not None and t.device != device:
                raise UsageError(f"masks, documents, sinks and slopes must be on {device}, got {t}")

    def _check_mask(self, mask: Sized, scores: tuple[int, ...]) -> None:
        if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
            raise UsageError(
                "a mask must be bool (true where seen) or floating (added to the scores), got "
                f"{dtype_name(mask.dtype)}"
            )
        axes = len(mask.size)
        fits = 2 <= axes <= 4
        if fits:
            sizes = zip(mask.size, scores[4 - axes :], strict=True)
            fits = all(n == 1 or n == of for n, of in sizes)
        if not fits:
            raise UsageError(
                f"a mask must broadcast to (batch, heads, queries, keys), {scores}, with two to "
                f"four axes, got {tuple(mask.size)}"
            )

    def _check_documents(self, batch: int, queries: int, keys: int) -> None:
        ids = self.documents
        wanted = (queries, keys)[2 - len(ids) :]
        for t, tokens in zip(ids, wanted, strict=True):
            if t.dtype.is_floating_point or t.dtype.is_complex or t.dtype == torch.bool:
                raise UsageError(f"documents must be integers, got {dtype_name(t.dtype)}")
            if t.size not in ((tokens,), (1, tokens), (batch, tokens)):
                raise UsageError(
                    f"documents must be (batch, keys) ids, ({batch}, {keys}), or a pair of "
                    f"({batch}, {queries}) and ({batch}, {keys}), got {tuple(t.size)}"
                )
        if len(ids) == 1:
            start = keys - queries if self.offset is None else self.offset
            if start < 0 or start + queries > keys:
                raise UsageError(
                    "documents must be a pair (of queries, of keys) where queries stand beside the "
                    f"keys, got {queries} queries from key {start} on and {keys} keys"
                )

    def of_call(self) -> dict[str, Any]:
        """Their part of a `Call`."""
        added = self.mask if self.mask is not None and self.mask.dtype != torch.bool else None
        return {
            "offset": self.offset,
            "mask": bool(self.documents) or (self.mask is not None and added is None),
            "bias": added is not None or self.alibi is not None,
            "bias_trained": any(t is not None and t.trained for t in (added, self.alibi)),
            "dropout": self.dropout,
            "softcap": self.softcap,
            "sinks": self.sinks is not None,
        }


def terms_of(call: Call) -> Terms:
    """What a call says without tensors."""
    offset = call.keys - call.queries if call.offset is None else call.offset
    window = call.window if call.windowed or call.tabled else 0
    return Terms(
        call.queries, call.keys, call.causal, window, offset,
        softcap=call.softcap, dropout=call.dropout, hides=call.hides,
    )  # fmt: skip


def with_tensors(
    terms: Terms,
    mask: Tensor | None = None,
    documents: Documents | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
) -> Terms:
    """The tensors of a call that was checked beside its numbers."""
    queries, keys = terms.queries, terms.keys
    of_queries = of_keys = None
    if isinstance(documents, Tensor):
        of_keys = documents.view(-1, keys)
        of_queries = of_keys[:, terms.offset : terms.offset + queries]
    elif documents is not None:
        of_queries, of_keys = documents[0].view(-1, queries), documents[1].view(-1, keys)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
    return terms._replace(
        mask=mask, query_documents=of_queries, key_documents=of_keys, alibi=alibi, sinks=sinks
    )


def check_tensors(*operands: object) -> None:
    """Refuse queries, keys and values that are no plain tensors."""
    for name, t in zip("qkv", operands, strict=True):
        if not isinstance(t, Tensor):
            raise UsageError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.is_nested or t.layout != torch.strided:
            what = "a nested tensor" if t.is_nested else f"layout {t.layout}"
            raise UsageError(
                f"attend takes dense tensors, got {what} as {name}; pad it and pass a mask, or "
                "join its sequences and pass documents"
            )
