"""One attention layer's weights from other code bases into ours, and back: plain functions on state
dicts.

    ours = to_attention(parts, layout, shape)         # by part and layout, as a checkpoint has them
    parts = from_attention(ours, layout, shape, parts)
    Attention(shape).load_state_dict(from_multihead(nn.MultiheadAttention(..).state_dict()))
    Attention(shape).load_state_dict(from_litgpt(CausalSelfAttention(..).state_dict(), shape))

Parts are those of `names.PARTS`, a layout says what shapes of tensors do not. Rows of queries, keys
and values lie by head in all of them; how coordinates of a head rotate is the shape's to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headwise.diagnose.layouts import Layout, cut_rows
from headwise.errors import UsageError
from headwise.shape import Shape

Weights = dict[str, Tensor]
State = Mapping[str, Tensor]

# part -> ours, where both have the same rows
_LATENT = {
    "q_a": "q_down.weight",
    "q_a_bias": "q_down.bias",
    "q_a_norm": "q_norm.weight",
    "q_b": "q.weight",
    "kv_a": "kv_down.weight",
    "kv_a_bias": "kv_down.bias",
    "kv_a_norm": "kv_norm.weight",
    "kv_b": "kv.weight",
}


def to_attention(parts: State, layout: Layout, shape: Shape) -> Weights:
    """The state of an `Attention` of one layer's `shape`, from the tensors of its parts."""
    _refuse(layout, shape, parts)
    turn = _turned if layout.transposed else _same
    out: Weights = {}
    if shape.latent:
        names = _LATENT if shape.q_lora_rank else {**_LATENT, "q": "q.weight"}
        out |= {ours: parts[part] for part, ours in names.items() if part in parts}
    else:
        for ending, ours in (("", "qkv.weight"), ("_bias", "qkv.bias")):
            rows = _rows(parts, ending, layout, turn if not ending else _same)
            if rows:
                out[ours] = torch.cat(rows[:2] if shape.shared_kv else rows)
        for name in ("q_norm", "k_norm"):
            if name in parts:
                out[f"{name}.weight"] = parts[name].flatten() + layout.gain_offset
    out["out.weight"] = turn(parts["o"])
    if shape.out_bias:
        out["out_bias"] = parts["o_bias"].unsqueeze(0)
    return {name: t.contiguous() for name, t in out.items()}


def from_attention(state: State, layout: Layout, shape: Shape, like: State) -> Weights:
    """The parts that `like` has, with its shapes and precision, from the state of an `Attention`;
    the inverse of `to_attention`."""
    _refuse(layout, shape, like)
    turn = _turned if layout.transposed else _same
    out: Weights = {"o": turn(state["out.weight"])}
    if shape.out_bias:
        out["o_bias"] = state["out_bias"].mean(-2)
    if shape.latent:
        names = _LATENT if shape.q_lora_rank else {**_LATENT, "q": "q.weight"}
        out |= {part: state[ours] for part, ours in names.items() if part in like}
    else:
        H, KV, R, V = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.v_head_dim
        sizes = (H * R, KV * R) if shape.shared_kv else (H * R, KV * R, KV * V)
        for ending, ours in (("", "qkv.weight"), ("_bias", "qkv.bias")):
            if ours not in state:
                continue
            rows = state[ours].split(sizes)
            turned = turn if not ending else _same
            if f"qkv{ending}" in like:
                out[f"qkv{ending}"] = turned(_joined(rows, layout))
            else:
                out |= {f"{name}{ending}": turned(t) for name, t in zip("qkv", rows, strict=False)}
        for name in ("q_norm", "k_norm"):
            if name in like:
                out[name] = state[f"{name}.weight"] - layout.gain_offset
    if missing := like.keys() - out.keys():
        raise UsageError(f"the layer has no {', '.join(sorted(missing))}")
    return {name: out[name].reshape(t.shape).to(t.dtype).contiguous() for name, t in like.items()}


def _rows(
    parts: State, ending: str, layout: Layout, turn: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Rows of queries, keys and values, or their biases; none where there are none."""
    fused = f"qkv{ending}"
    if fused in parts:
        rows = turn(parts[fused])
        cut = cut_rows(rows if rows.ndim == 2 else rows[:, None], layout)
        return [t if rows.ndim == 2 else t[:, 0] for t in cut]
    names = [f"{name}{ending}" for name in "qkv"]
    return [turn(parts[name]) for name in names if name in parts]


def _turned(matrix: Tensor) -> Tensor:
    return matrix.mT


def _same(matrix: Tensor) -> Tensor:
    return matrix


def _joined(rows: tuple[Tensor, ...], layout: Layout) -> Tensor:
    """Queries, keys and values as rows of one matrix; the inverse of `layouts.cut_rows`."""
    if layout.fused == "grouped":
        KV = layout.num_kv_heads or layout.num_heads
        return torch.cat([t.unflatten(0, (KV, -1)) for t in rows], 1).flatten(0, 1)
    if layout.fused == "codegen":
        q, k, v = (t.unflatten(0, (4, -1)) for t in rows)
        return torch.stack((q, v, k), 1).flatten(0, 2)
    return torch.cat(rows)


def _refuse(layout: Layout, shape: Shape, parts: State) -> None:
    for name, what in (
        ("permuted", "rows that were permuted for GGUF"),
        ("rope_back", "rotary positions that turn the other way"),
        ("gated", "gates among the rows of queries"),
    ):
        if getattr(layout, name):
            raise UsageError(f"weights with {what} are not carried over")
    if shape.average != 1 or shape.o_lora_rank:
        raise UsageError(
            "weights are carried over for one module whose output is one product, this shape has "
            f"average {shape.average}, o_lora_rank {shape.o_lora_rank}"
        )
    if layout.qk_norm == "layer":
        raise UsageError("weights with layer norms of queries and keys are not carried over")
    odd = [name for name in parts if name.endswith("_norm_bias")]
    if "o" not in parts or odd:
        raise UsageError(f"weights must have o and no biases of norms, got {sorted(parts)}")


# ---- torch.nn.MultiheadAttention


def from_multihead(state: State) -> Weights:
    """An `Attention`'s state from that of `nn.MultiheadAttention`; its shape is
    Shape(dim=embed_dim, depth=1, num_heads=num_heads, qkv_bias=bias, out_bias=bias)."""
    known = {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    if other := sorted(state.keys() - known):
        raise UsageError(
            "nn.MultiheadAttention must have keys and values of its own width, without bias_k and "
            f"bias_v, got {', '.join(other)}"
        )
    out = {"qkv.weight": state["in_proj_weight"], "out.weight": state["out_proj.weight"]}
    if "in_proj_bias" in state:
        out |= {"qkv.bias": state["in_proj_bias"], "out_bias": state["out_proj.bias"].unsqueeze(0)}
    return out


def to_multihead(state: State) -> Weights:
    """An `nn.MultiheadAttention`'s state from that of an `Attention` whose heads cut its width and
    have no norms, gates or rotary positions."""
    known = {"qkv.weight", "qkv.bias", "out.weight", "out_bias"}
    D = state["out.weight"].shape[0]
    if state.keys() - known or state["qkv.weight"].shape != (3 * D, D):
        sizes = {name: tuple(t.shape) for name, t in state.items()}
        raise UsageError(f"nn.MultiheadAttention needs heads that cut its width, got {sizes}")
    out = {"in_proj_weight": state["qkv.weight"], "out_proj.weight": state["out.weight"]}
    if "qkv.bias" in state or "out_bias" in state:
        zero = state["out.weight"].new_zeros(3 * D)
        bias = state["out_bias"].mean(-2) if "out_bias" in state else zero[:D]
        out |= {"in_proj_bias": state.get("qkv.bias", zero), "out_proj.bias": bias}
    return out


# ---- litgpt's CausalSelfAttention

_LITGPT = {
    "qkv.weight": "qkv",
    "qkv.bias": "qkv_bias",
    "attn.weight": "qkv",  # before 2025, by KV head
    "attn.bias": "qkv_bias",
    "proj.weight": "o",
    "proj.bias": "o_bias",
    "norm_q.weight": "q_norm",
    "norm_k.weight": "k_norm",
}


def from_litgpt(state: State, shape: Shape) -> Weights:
    """An `Attention`'s state from that of litgpt's `CausalSelfAttention`. litgpt rotates the first
    coordinates (`rope_at="first"` where a part of them), by halves."""
    if other := sorted(state.keys() - _LITGPT.keys()):
        raise UsageError(f"litgpt's attention is not known with {', '.join(other)}")
    parts = {_LITGPT[name]: t for name, t in state.items()}
    return to_attention(parts, _litgpt_layout(state, shape), shape)


def to_litgpt(state: State, shape: Shape, like: State) -> Weights:
    """A litgpt `CausalSelfAttention`'s state, with the names that `like` has, from an
    `Attention`'s."""
    parts = {_LITGPT[name]: t for name, t in like.items() if name in _LITGPT}
    found = from_attention(state, _litgpt_layout(like, shape), shape, parts)
    return {name: found[_LITGPT[name]] for name in like}


def _litgpt_layout(state: State, shape: Shape) -> Layout:
    layout = layout_of(shape)
    return dataclasses.replace(layout, fused="grouped") if "attn.weight" in state else layout


def layout_of(shape: Shape) -> Layout:
    """The layout of one layer's shape, queries, keys and values one after another."""
    return Layout(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.v_head_dim,
        shared_kv=shape.shared_kv,
        transposed=False,
    )
