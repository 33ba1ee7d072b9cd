"""Rows as the page carries them: a list per column, and learning curves that grow no page beyond
what a browser draws with ease. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwise.rows import Row

HIDDEN = {  # long columns: in the store, not in the table
    "command",
    "curve",
    "held_out_curve",
    "angle",
    "size",
    "checks",
    "score_angle",
    "score_norm",
    "score_angle_transposed",
    "score_norm_transposed",
}
FIRST = (  # of the table of runs, as far as they vary
    *("id", "status", "task", "protocol", "dim", "depth", "num_heads", "head_dim", "v_head_dim"),
    *("ffn_dim", "lr", "steps", "init", "seed", "held_out", "bits_per_byte", "train_best"),
)
MOST_SHOWN = 12  # columns of it, before all are asked for
MOST_POINTS = 200  # of a learning curve
MOST_VALUES = 120_000  # of all curves of a section together


def columns_of(rows: Sequence[Row]) -> tuple[list[str], Row]:
    """The columns of the table, and those that are equal in all rows, which stand once beside
    it."""
    columns = list(dict.fromkeys(c for row in rows for c in row if c not in HIDDEN))
    # Rows of several versions may have different columns.
    same = {c: rows[0][c] for c in columns if all(c in r and r[c] == rows[0][c] for r in rows)}
    return columns, same


def runs_of(
    rows: Sequence[Row], columns: Sequence[str], same: Row, settings: Sequence[str]
) -> dict[str, Any]:
    """The rows by column, which of them are shown at first, and which say what a run is."""
    varying = [c for c in columns if c not in same]
    if rows and "id" in rows[0] and "id" not in varying:
        varying.insert(0, "id")
    named = [c for c in varying if c in settings]
    shown = [c for c in FIRST if c in varying]
    shown += [c for c in named if c not in shown][: max(0, MOST_SHOWN - len(shown))]
    return {
        "columns": varying,
        "values": [[_plain(row.get(c)) for row in rows] for c in varying],
        "shown": shown or varying[:MOST_SHOWN],
        "settings": named or [c for c in FIRST if c in varying and c != "id"],
    }


def _plain(value: Any) -> Any:
    """A value that a cell has room for."""
    if isinstance(value, list | tuple | dict):
        return str(value)[:200]
    return value


def curves_of(rows: Sequence[tuple[int, Row]]) -> dict[str, Any] | None:
    """The learning curves of these rows, each with its place in the table; None: there are none.

    At most 200 points of a curve are kept, fewer where there are very many runs; four digits.
    """
    if not rows:
        return None
    most = max(8, min(MOST_POINTS, MOST_VALUES // len(rows)))
    out: list[dict[str, Any]] = []
    for place, row in rows:
        every = -(-len(row["curve"]) // most)
        # A language model's curve is by steps and in nats per token, its error in bits per byte.
        steps = row.get("epoch", 1)
        each = row.get("curve_every", steps)
        nats = row["held_out"] / row["bits_per_byte"] if row.get("bits_per_byte") else 1.0
        evaluated = row.get("held_out_curve") or []
        evaluated = evaluated[:: -(-len(evaluated) // most)] if evaluated else []
        out.append(
            {
                "row": place,
                "first": each,
                "every": every * each,
                "train": [_short(v) for v in row["curve"][::every]],
                "at": [epoch * steps for epoch, _ in evaluated],
                "held_out": [None if v is None else _short(v * nats) for _, v in evaluated],
            }
        )
    one = rows[0][1]
    return {
        "runs": out,
        "mean": "training, mean of an epoch" if "epoch" in one else "training",
        "loss": "loss, nats per token" if "bits_per_byte" in one else "loss",
    }


def label_of(row: Row) -> str:
    """A run in words."""
    words = []
    if "depth" in row and "num_heads" in row:
        depth, heads = row["depth"], row["num_heads"]
        words.append(f"{depth} layer" + "s" * (depth != 1))
        words.append(f"{heads} head" + "s" * (heads != 1) + f" of rank {row.get('head_dim')}")
    words += [str(row[name]) for name in ("task", "protocol") if row.get(name)]
    if isinstance(row.get("lr"), float):
        words.append(f"rate {row['lr']:g}")
    return ", ".join([*words, f"seed {row.get('seed')}"])


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
