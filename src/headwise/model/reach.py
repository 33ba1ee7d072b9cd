"""A causal call cut to what its queries can reach, so that a kernel's own causal mask serves it.

With query i at key i + offset, keys after the last query are seen by none, and queries before the
first key see none. Without those, the last query stands at the last key.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from headwise.model.calls import Call
from headwise.model.masks import Terms, cut
from headwise.model.tracing import symbolic


class Reach(NamedTuple):
    """Queries from `first` on, keys before `last`."""

    first: int
    last: int

    @classmethod
    def of(cls, call: Call) -> Reach | None:
        """Of a causal call; None if everything may be reached, or nothing, or sizes are symbols."""
        if not call.causal or symbolic(call.queries, call.keys, call.offset or 0):
            return None
        offset = call.keys - call.queries if call.offset is None else call.offset
        first, last = max(0, -offset), min(call.keys, offset + call.queries)
        if last <= 0 or (first, last) == (0, call.keys):
            return None
        return cls(first, last)

    def call(self, call: Call) -> Call:
        """What is left of a call."""
        offset = (call.keys - call.queries if call.offset is None else call.offset) + self.first
        queries = call.queries - self.first
        aligned = offset == self.last - queries
        return replace(call, queries=queries, keys=self.last, offset=None if aligned else offset)

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is left of them."""
        return q[..., self.first :, :], k[..., : self.last, :], v[..., : self.last, :]

    def terms(self, terms: Terms, hides: bool) -> Terms:
        """What is left of what joins the scores; `hides`: some query may still see nothing."""
        mask, queries, keys = terms.mask, terms.query_documents, terms.key_documents
        return terms._replace(
            queries=terms.queries - self.first,
            keys=self.last,
            hides=hides,
            offset=terms.offset + self.first,
            mask=None if mask is None else cut(mask, self.first, terms.queries, 0, self.last),
            query_documents=None if queries is None else queries[:, self.first :],
            key_documents=None if keys is None else keys[:, : self.last],
        )

    def answer(self, out: Tensor) -> Tensor:
        """The answer with zeros for the queries that were left out."""
        return F.pad(out, (0, 0, self.first, 0)) if self.first else out
