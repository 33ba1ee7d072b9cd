"""What queries see beyond a shape's own causal mask and windows: masks, padding, documents, and
where the queries stand among the keys.

Axes: M models, B batch, H heads, Q queries, N keys.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.model.extras import Documents


@dataclass(frozen=True)
class Seen:
    """What the queries of one call see."""

    mask: Tensor | None = None  # true where seen, or added to the scores; as (B, H, Q, N)
    documents: Documents | None = None
    offset: int | None = None  # query i stands at key i + offset; None: the last at the last
    own: bool = True  # whether the shape's causal mask and windows count

    def arguments(self) -> dict[str, Any]:
        """The keywords of `attend`."""
        return {"mask": self.mask, "documents": self.documents, "offset": self.offset}

    def last(self, queries: int, keys: int) -> Seen:
        """The same for the last few queries and keys of a sequence."""
        mask, documents = self.mask, self.documents
        if mask is not None:
            mask = mask[..., -keys:] if mask.shape[-1] > 1 else mask
            mask = mask[..., -queries:, :] if mask.ndim > 1 and mask.shape[-2] > 1 else mask
        if documents is not None:
            q, k = documents if isinstance(documents, tuple) else (documents, documents)
            documents = q[..., -queries:], k[..., -keys:]
        return dataclasses.replace(self, mask=mask, documents=documents)

    def of_all(self, models: int) -> Seen:
        """The same for the models of an ensemble, whose sequences stand one model after another."""
        mask, documents = self.mask, self.documents
        if mask is not None and mask.ndim == 5:
            mask = mask.expand(models, *mask.shape[1:]).flatten(0, 1)
        elif mask is not None and mask.ndim == 4 and len(mask) > 1:
            mask = mask.repeat(models, 1, 1, 1)
        if isinstance(documents, tuple):
            documents = _of_all(documents[0], models), _of_all(documents[1], models)
        elif documents is not None:
            documents = _of_all(documents, models)
        return dataclasses.replace(self, mask=mask, documents=documents)


def _of_all(ids: Tensor, models: int) -> Tensor:
    return ids.flatten(0, 1) if ids.ndim == 3 else ids.repeat(models, 1)


def seen_of(
    mask: Tensor | None,
    padding: Tensor | None,
    documents: Documents | None,
    offset: int | None,
    crossed: bool,
) -> Seen | None:
    """The arguments of a call in one value; None: all that the shape lets a query see. In
    cross-attention the shape's own mask counts only where `offset` says where queries stand."""
    own = not crossed or offset is not None
    if mask is None and padding is None and documents is None and offset is None and own:
        return None
    return Seen(with_padding(mask, padding), documents, offset, own)


def with_padding(mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """A mask that hides padding too: `padding` (B, N) is true, or 1, where there is a token."""
    if padding is None:
        return mask
    there_B11N = padding.bool().unsqueeze(-2).unsqueeze(-2)
    if mask is None:
        return there_B11N
    if mask.dtype == torch.bool:
        return mask & there_B11N
    return mask.masked_fill(~there_B11N, -math.inf)


def document_positions(documents: Tensor) -> Tensor:
    """Where each token stands in its document, from 0 on, for ids (B, N) of packed sequences whose
    documents lie each in one piece.

    >>> document_positions(torch.tensor([[7, 7, 7, 2, 2]])).tolist()
    [[0, 1, 2, 0, 1]]
    """
    at_N = torch.arange(documents.shape[-1], device=documents.device)
    new_BN = torch.ones_like(documents, dtype=torch.bool)
    new_BN[..., 1:] = documents[..., 1:] != documents[..., :-1]
    return at_N - torch.where(new_BN, at_N, 0).cummax(-1).values


def padded_positions(padding: Tensor) -> Tensor:
    """Where each token stands among those that are there, for `padding` (B, N), true where there is
    a token.

    >>> padded_positions(torch.tensor([[0, 0, 1, 1, 1]])).tolist()
    [[0, 0, 0, 1, 2]]
    """
    return (padding.long().cumsum(-1) - 1).clamp_min(0)
