"""Condition numbers from an earlier computation of our own: `published/leaner_kappa_*.csv`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwise.experiments.figure_parts import published_values

POLICY = {"fixed64": "widen", "fixed": "widen", "shrinking": "split", "split": "split"}


@dataclass(frozen=True)
class Known:
    """A known kappa; None: there is none."""

    kappa: float | None = None
    deviation: float | None = None  # its standard deviation over the draws, where it is known
    draws: int = 0


def known_kappas() -> dict[tuple[Any, ...], Known]:
    """By kind, policy, weights, tokens, dim, heads and head_dim of the matrix."""
    out: dict[tuple[Any, ...], Known] = {}
    for row in published_values("leaner_kappa_gaussian"):
        # Gaussian matrices: no layer, so no width, and no weights.
        sizes = ("widen", "", int(row["N"]), 0, int(row["heads"]), int(row["head_dim"]))
        out["gaussian", *sizes] = Known(float(row["mc_mean"]), float(row["mc_std"]), 20)

    # A layer of width 768 on 197 tokens, with weights of two scales.
    for row in published_values("leaner_kappa_init_attention"):
        heads = (int(row["heads"]), int(row["head_dim"]))
        sizes = (POLICY[row["policy"]], row["weight_std"], 197, 768, *heads)
        out["outputs", *sizes] = Known(float(row["kappa"]), draws=5)
        out["centred", *sizes] = Known(float(row["kappa_centred"]), draws=5)

    # A layer of width 16 on 8 tokens, whose Jacobian is written out.
    for row in published_values("leaner_kappa_jacobian_toy"):
        heads = (int(row["heads"]), int(row["head_dim"]))
        sizes = (POLICY[row["policy"]], "1/sqrt(D)", 8, 16, *heads)
        out["outputs", *sizes] = Known(float(row["kappa_A"]), draws=4)
        out["before", *sizes] = Known(float(row["kappa_J_concat"]), draws=4)
        out["after", *sizes] = Known(float(row["kappa_J_after_WO"]), draws=4)
    return out
