"""Shapes for tasks, shapes back from rows, and shapes in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwise.rows import Row
from headwise.shape import Shape

if TYPE_CHECKING:
    from headwise.tasks.task import Task


def shape_for(task: Task, dim: int, depth: int, heads: int, rank: int, ffn_dim: int) -> Shape:
    """A pre-norm model for any task: a decoder where the task is causal or looks tokens up, else an
    encoder. Inputs and answers of another width are projected."""
    # A causal task must not see its answers. Recall is trained as a decoder too.
    decodes = task.causal or task.spec()["name"] == "recall"
    # Ids are looked up in a table, of a size that is a multiple of 16; vectors of another width are
    # projected.
    ends: dict[str, Any] = {}
    if task.vocab:
        ends["vocab_size"] = -(-task.vocab // 16) * 16
    elif task.in_dim != dim:
        ends["input_dim"] = task.in_dim
    # A decoder over ids answers with ids by its table; any other model projects its answers.
    if not (task.vocab and decodes):
        ends["output_dim"] = task.answer_dim
    positions: dict[str, Any] = {}
    if task.ordered:
        positions = {"positions": "additive", "num_positions": task.tokens}
    return Shape(
        dim=dim,
        depth=depth,
        num_heads=heads,
        head_dim=rank,
        ffn_dim=ffn_dim,
        activation="gelu",
        norm="layer",
        norm_at="pre",
        causal=decodes,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        **ends,
        **positions,
    )


def shape_of_row(row: Row) -> Shape:
    """The shape that a row is about."""
    return Shape.of({name: row[name] for name in Shape.__dataclass_fields__ if name in row})


def heads_in_words(shape: Shape) -> str:
    """A decoder's heads: how many, of what rank; of every kind of layer where they differ."""
    if not shape.uniform:
        kinds = (heads_in_words(layer) for layer, _ in shape.distinct_layers())
        return " and ".join(dict.fromkeys(kinds))
    if shape.latent:
        return f"latent {shape.kv_lora_rank}"
    if shape.num_kv_heads != shape.num_heads:
        return f"{shape.num_heads} x {shape.head_dim}, {shape.num_kv_heads} KV"
    values = f" / {shape.v_head_dim}" if shape.v_head_dim != shape.head_dim else ""
    return f"{shape.num_heads} x {shape.head_dim}{values}"
