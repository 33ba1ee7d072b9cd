"""A Hugging Face model as a run of headwise, layer by layer; which tensor is which says
`diagnose.model_weights`.

Norms of ours add 1e-6 to the mean square, and a model may say another number. What every norm reads
is then written smaller or larger by one factor, which the norm takes off again: the same function.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from headwise.configs.families import with_defaults
from headwise.converting.formats import Layers, NewHeads, Output
from headwise.converting.writing import Piece as Written
from headwise.converting.writing import made, write_pieces
from headwise.diagnose.attention_weights import to_attention
from headwise.diagnose.checkpoints import Checkpoint
from headwise.diagnose.model_weights import Piece, Plan, is_tanh_gelu, norm_eps, plan_of
from headwise.errors import UsageError
from headwise.rows import WEIGHTS_FILE
from headwise.shape import Shape

EPS = 1e-6  # of our norms
NORMS_AT = ("pre", "sandwich", "parallel", "parallel-2")  # those that read what is summed up
# Parts of a block whose output is added to the sum, or is what its norm reads.
WRITERS = ("attention.out.weight", "attention.out_bias", "feed.down.weight", "feed.down.bias")
WRITERS += ("after1.weight", "after2.weight", "after1.bias", "after2.bias")
BUFFERS = ("inv_freq", "attn.bias", "masked_bias", "position_ids")


def run_of_public(checkpoint: Checkpoint, target: Shape) -> Output:
    """How a Hugging Face model is written as a run; refused where ours is not the same function."""
    config = checkpoint.config
    if config is None:
        raise UsageError("a run of headwise is made of a model whose config is there")
    state = {
        name: torch.empty(entry.shape, device="meta")
        for name, entry in checkpoint.source.entries.items()
    }
    plan = plan_of(config, state)
    left = [name for name in plan.rest if not name.endswith(BUFFERS)]
    if left:
        raise UsageError(f"a run of headwise has no place for {', '.join(left[:3])}")
    if plan.shape.vocab_size == 0 or not plan.shape.causal:
        raise UsageError(f"a run of headwise is a decoder of tokens, {checkpoint.family} is none")
    full = with_defaults(config, checkpoint.family)
    if plan.shape.activation == "gelu" and is_tanh_gelu(full):
        raise UsageError(f"the gelu of this {checkpoint.family} is an approximation by tanh, that "
                         "of a run is exact")  # fmt: skip
    eps = norm_eps(full)
    if eps != EPS and plan.shape.norm_at not in NORMS_AT:
        raise UsageError(f"norms of a run have an epsilon of {EPS:g}, this model's have {eps:g}")
    factor = math.sqrt(EPS / eps)
    places = {f.name: getattr(plan.shape, f.name) for f in dataclasses.fields(Shape)
              if f.name in ("extras", "lm_head")}  # fmt: skip
    target = dataclasses.replace(target, **places)
    length = full.get("max_position_embeddings")
    run = {"shape": target.spec(), "made_from": checkpoint.family}
    run |= {"length": length} if type(length) is int else {}

    def write(folder: Path, new: Callable[[int], NewHeads]) -> None:
        pieces = list(_pieces(checkpoint, target, plan, new, factor))
        write_pieces(folder / WEIGHTS_FILE, pieces, {"run": json.dumps(run)})

    return Output(name="headwise", shape=target, write=write)


def _pieces(
    checkpoint: Checkpoint,
    target: Shape,
    plan: Plan,
    new: Callable[[int], NewHeads],
    factor: float,
) -> Iterator[Written]:
    from headwise.model.transformer import build

    assert checkpoint.shape is not None
    with torch.device("meta"):
        wanted = {name: tuple(p.shape) for name, p in build(target).named_parameters()}
    layers = Layers(checkpoint, new, checkpoint.shape.scale / target.scale)
    by_name = {piece.ours: piece for piece in plan.pieces}
    last: tuple[int, dict[str, Tensor]] = -1, {}

    def attention(i: int, part: str) -> Callable[[], Tensor]:
        def get() -> Tensor:
            nonlocal last
            if last[0] != i:
                last = i, _attention(checkpoint, target, plan, layers, i)
            return last[1][part]

        return get

    def whole(piece: Piece) -> Callable[[], Tensor]:
        return lambda: piece.to_ours({n: checkpoint.source.read(n) for n in piece.theirs})

    for name, shape in wanted.items():
        words = name.split(".")
        if words[2:3] == ["attention"]:
            get = attention(int(words[1]), ".".join(words[3:]))
        else:
            get = whole(by_name[name])
        if factor != 1:
            get = _times(get, _factor(name, words, target, factor))
        yield made(name, "F32", shape, get)


def _attention(
    checkpoint: Checkpoint, target: Shape, plan: Plan, layers: Layers, i: int
) -> dict[str, Tensor]:
    """One layer's new attention by the names of ours."""
    parts, shape = layers.parts(i), target.layer(i)
    if not target.latent:
        layout = dataclasses.replace(
            plan.layers[i][2], num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim, v_head_dim=shape.v_head_dim,
        )  # fmt: skip
        return to_attention(parts, layout, shape)
    out = dict(parts)
    if target.out_bias:
        named = plan.layers[i][1].parts
        out["out_bias"] = checkpoint.source.read(named["o_bias"]).unsqueeze(0)
    return out


def _factor(name: str, words: list[str], target: Shape, factor: float) -> Tensor:
    """What a parameter's rows are multiplied by, so that an epsilon of ours is that of theirs."""
    times = 1.0
    if ".".join(words[2:]) in WRITERS or name in ("embedding", "positions"):
        times = factor
    elif name.startswith("final_norm") and target.tied:
        times = 1 / factor  # the table of the logits is that of the tokens
    elif words[2:4] == ["attention", "qkv"] and target.qk_norm != "none":
        rows = [target.num_heads, *2 * [target.num_kv_heads]]
        sizes = torch.tensor(rows) * torch.tensor([*2 * [target.head_dim], target.v_head_dim])
        values = torch.tensor([factor, factor, 1.0], dtype=torch.float64)
        return values.repeat_interleave(sizes)
    return torch.tensor([times], dtype=torch.float64)


def _times(get: Callable[[], Tensor], factor: Tensor) -> Callable[[], Tensor]:
    """A tensor whose rows are multiplied."""

    def multiplied() -> Tensor:
        t = get()
        if factor.numel() == 1:
            return t if factor.item() == 1 else t.double() * factor
        return t.double() * factor.view(-1, *[1] * (t.ndim - 1))

    return multiplied
