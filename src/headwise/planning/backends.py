"""Which attention backend runs a row on this device, and what is padded for it. Loads torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwise.errors import UsageError

if TYPE_CHECKING:
    from headwise.planning.result import Plan

TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The backend of a row's attention, and the share of zeros that it adds to rank and value."""

    backend: str
    why: str
    pad: tuple[int, int]  # zeros added to the query/key width and to the value width
    waste: float


def with_backends(plan: Plan, rows: int = 20, device: str = "auto") -> Plan:
    """The plan with the backend of its first rows, as `headwise.explain` finds it."""
    import torch

    from headwise.model.backends import explain

    # Weights of 8 bits are computed with in 16.
    dtype = getattr(torch, TORCH.get(plan.at.dtype, "bfloat16"))
    found, fitting = dict(plan.backends), []
    for row in plan.rows[:rows]:
        shape = row.shape
        try:
            choice = explain(
                shape, plan.at.context, batch=plan.at.batch, device=device, dtype=dtype
            )
        except UsageError as error:
            fitting.append(f"row {row.number}: {error}")
            continue
        wide = shape.head_dim + shape.v_head_dim
        waste = sum(choice.pad) / wide
        found[int(plan.order[row.number - 1])] = Backend(
            backend=choice.backend, why=choice.why, pad=choice.pad, waste=waste
        )
    notes = (*plan.notes, *fitting[:1])
    return dataclasses.replace(plan, backends=found, notes=notes)
