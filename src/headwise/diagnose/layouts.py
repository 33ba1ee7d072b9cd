"""How the tensors of one layer's attention are laid out, and the heads that they hold.

`heads_of` brings every layout to one form: queries, keys, values and outputs per head, with gains
of norms folded in. Latents are replaced by maps with the same inner products, so that nothing of
the width of the model is multiplied out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.errors import UsageError

Parts = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the shapes of tensors do not say. Sizes that are None follow from them."""

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    fused: str = "concat"  # queries, keys and values in one: concat, grouped by KV head, codegen
    transposed: bool | None = None  # (inputs, outputs), as in GPT-2; None: as the shape says
    qk_norm: str = "none"  # rms or layer: folded gains, and for layer the mean taken off
    gain_offset: float = 0.0  # 1 where the gain is 1 + weight (Gemma, Qwen3-Next)
    rope_dim: int = 0  # coordinates that rotate
    rope_theta: float = 10_000.0
    rope_at: str = "first"
    rope_interleaved: bool = False  # neighbours rotate together; else i with i + rope_dim / 2
    rope_back: bool = False  # turns the other way (nanochat)
    permuted: bool = False  # rows were permuted when they were written (GGUF), undone here
    gated: bool = False  # every head's queries are followed by as many rows of a gate
    shared_kv: bool = False
    o_groups: int = 1


@dataclass(frozen=True, kw_only=True)
class Heads:
    """One layer's attention by head, in float64.

    Scores are x^T Q_h^T K_g y, and a head writes O_h^T V_g x. Where all that reads x passes through
    latents, `in_dim` is below `dim`: coordinates in which all inner products are the same.
    """

    q: Tensor  # (H, R, in_dim)
    k: Tensor  # (K, R, in_dim); K = H for latents
    v: Tensor  # (K, V, in_dim)
    o: Tensor  # (H, V, dim); empty (H, 0, dim) where the checkpoint has none
    dim: int
    ov: Tensor  # (H, V, V): V_g O_h^T
    latent: Tensor | None  # rows of the joint latent (C, in_dim), for MLA
    biases: Mapping[str, Tensor]  # q (H, R), k (K, R), v (K, V)
    pairs: Tensor  # (P, 2): coordinates that rotate together
    frequencies: Tensor  # (P,), in radians per token

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[0] // self.k.shape[0]

    @property
    def still(self) -> Tensor:
        """Coordinates that do not rotate."""
        moved = set(self.pairs.flatten().tolist())
        return torch.tensor([i for i in range(self.q.shape[1]) if i not in moved], dtype=torch.long)

    def paired(self, kv: Tensor) -> Tensor:
        """Of every KV head, as its query heads read it."""
        return kv.repeat_interleave(self.group, 0)


def heads_of(parts: Parts, layout: Layout, where: str = "") -> Heads:
    """The heads of one layer."""
    try:
        return _heads_of(parts, layout)
    except UsageError as error:
        raise UsageError(f"{where}{error}") from None
    except (RuntimeError, ValueError, KeyError, IndexError, ZeroDivisionError) as error:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in parts.items())
        raise UsageError(
            f"{where}the tensors do not fit {layout.num_heads} heads: {shapes} ({error})"
        ) from None


def _heads_of(parts: Parts, layout: Layout) -> Heads:
    H = layout.num_heads
    found = {name: _plain(name, tensor) for name, tensor in parts.items()}
    if "kv_b" in found or "kv_a" in found:
        return _from_latent(found, layout)
    q, k, v, biases = _projections(found, layout)
    if layout.gated:
        q = _of_gate(q, H)
        biases = {n: _of_gate(b, H) if n == "q" else b for n, b in biases.items()}
    R, KV = _rows(q, H, "q"), layout.num_kv_heads
    KV = KV or (k.shape[0] // R if k.shape[0] % R == 0 else H)
    if H % KV:
        raise UsageError(f"{KV} KV heads do not divide {H} heads")
    q, k = q.view(H, R, -1), k.reshape(KV, _rows(k, KV, "k"), -1)
    v = v.reshape(KV, _rows(v, KV, "v"), -1)
    if q.shape[1] != k.shape[1] or len({q.shape[2], k.shape[2], v.shape[2]}) > 1:
        raise UsageError(f"queries {tuple(q.shape)} do not meet keys {tuple(k.shape)} by head")
    sizes = {"q": q.shape[:2], "k": k.shape[:2], "v": v.shape[:2]}
    bias = {name: b.view(sizes[name]) for name, b in biases.items()}
    q, k, bias = _normed(q, k, bias, found, layout)
    if layout.permuted:
        q, k = _unpermuted(q, layout), _unpermuted(k, layout)
        bias = {n: b if n == "v" else _unpermuted(b, layout) for n, b in bias.items()}
    o = _outputs(found, layout, H, v.shape[1], q.shape[2])
    pairs, frequencies = rotation(layout, R)
    ov = v.repeat_interleave(H // KV, 0) @ o.mT if o.shape[1] else o.new_zeros(H, 0, 0)
    return Heads(
        q=q, k=k, v=v, o=o, dim=q.shape[2], ov=ov, latent=None, biases=bias, pairs=pairs,
        frequencies=frequencies,
    )  # fmt: skip


def _plain(name: str, tensor: Tensor) -> Tensor:
    """A matrix or a vector in float64; kernels of width one (TensorFlow) lose their extra axes."""
    wanted = 2 if not (name.endswith("_bias") or name.endswith("_norm")) else 1
    while tensor.ndim > wanted and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != wanted or not tensor.numel():
        raise UsageError(f"{name} must have {wanted} axes, got {tuple(tensor.shape)}")
    return tensor.double()


def _rows(matrix: Tensor, heads: int, name: str) -> int:
    if heads < 1 or matrix.shape[0] % heads:
        raise UsageError(f"{heads} heads do not divide the {matrix.shape[0]} rows of {name}")
    return matrix.shape[0] // heads


# ---- separate and fused projections


def _projections(parts: Parts, layout: Layout) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Queries, keys and values as rows, and their biases."""
    if "qkv" in parts:
        fused = parts["qkv"]
        turn = is_turned(fused.shape, layout)
        rows = _cut(fused.T if turn else fused, layout)
        bias = _cut(parts["qkv_bias"][:, None], layout) if "qkv_bias" in parts else None
        found = {} if bias is None else {n: b[:, 0] for n, b in zip("qkv", bias, strict=True)}
        return *rows, found
    turn = bool(layout.transposed)
    biases = {n: parts[f"{n}_bias"] for n in "qkv" if f"{n}_bias" in parts}
    if "q_b" in parts:  # queries alone pass through a latent
        down = parts["q_a"] * _gain(parts.get("q_a_norm"), layout, parts["q_a"].shape[0])[:, None]
        q = parts["q_b"] @ down
        biases.pop("q", None)
    else:
        q = parts["q"].T if turn else parts["q"]
    if "kv" in parts:
        width = parts["kv"].shape[0]
        KV = layout.num_kv_heads or layout.num_heads
        R = q.shape[0] // layout.num_heads
        k, v = parts["kv"].split((KV * R, width - KV * R)) if width > KV * R else (parts["kv"],) * 2
    else:
        k = parts["k"].T if turn else parts["k"]
        v = (parts["v"].T if turn else parts["v"]) if "v" in parts else k
        if "v" not in parts and "k_bias" in parts:
            biases["v"] = parts["k_bias"]
    return q, k, v, biases


def _cut(fused: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of one matrix as those of queries, keys and values."""
    H, KV = layout.num_heads, layout.num_kv_heads or layout.num_heads
    rows = fused.shape[0]
    R = layout.head_dim
    if layout.shared_kv:
        R = R or rows // (H + KV)
        q, k = fused.split((H * R, KV * R))
        return q, k, k
    if R is None:
        if rows % (H + 2 * KV):
            raise UsageError(f"{H} heads and {KV} KV heads do not divide the {rows} rows of qkv")
        R = rows // (H + 2 * KV)
    V = layout.v_head_dim or R
    if layout.fused == "grouped":  # per KV head: its queries, then its key, then its value
        blocks = fused.view(KV, -1, fused.shape[1])
        q, k, v = blocks.split((H // KV * R, R, V), 1)
        return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    if layout.fused == "codegen":  # four parts, each queries, values, keys
        q, v, k = fused.view(4, 3, -1, fused.shape[1]).unbind(1)
        return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    if rows != H * R + KV * (R + V):
        raise UsageError(f"qkv must have {H * R + KV * (R + V)} rows, got {rows}")
    q, k, v = fused.split((H * R, KV * R, KV * V))
    return q, k, v


def is_turned(shape: tuple[int, ...], layout: Layout) -> bool:
    """Whether a fused matrix is (inputs, outputs): as the layout says, or as its sizes have it, or
    where they are not known by its longer side."""
    if layout.transposed is not None:
        return layout.transposed
    if layout.head_dim is not None:
        H, KV = layout.num_heads, layout.num_kv_heads or layout.num_heads
        V = 0 if layout.shared_kv else layout.v_head_dim or layout.head_dim
        wanted = H * layout.head_dim * (2 if layout.gated else 1) + KV * (layout.head_dim + V)
        if wanted in shape:
            return shape[0] != wanted
    return shape[1] > shape[0]


def _of_gate(rows: Tensor, heads: int) -> Tensor:
    """The queries of rows that hold queries and a gate by head."""
    halves = rows.view(heads, 2, -1, *rows.shape[1:])
    return halves[:, 0].flatten(0, 1)


def _outputs(parts: Parts, layout: Layout, H: int, V: int, D: int) -> Tensor:
    """Each head's output map, transposed: (H, V, D)."""
    if "o" not in parts:
        return torch.zeros(H, 0, D, dtype=torch.float64)
    o = parts["o"]
    if "o_a" in parts:  # (D, G L) after G maps (L, H V / G)
        G = layout.o_groups
        down = parts["o_a"].view(G, -1, parts["o_a"].shape[1])
        o = torch.cat([o_g @ d for o_g, d in zip(o.chunk(G, 1), down, strict=True)], 1)
    turn = layout.transposed
    if turn is None and "qkv" in parts:
        turn = is_turned(parts["qkv"].shape, layout)
    if o.shape[0 if turn else 1] != H * V:
        raise UsageError(f"o must read {H} x {V} values, got shape {tuple(o.shape)}")
    return (o if turn else o.T).reshape(H, V, -1)


# ---- norms of queries and keys


def _gain(gain: Tensor | None, layout: Layout, width: int) -> Tensor:
    if gain is None:
        return torch.ones(width, dtype=torch.float64)
    return gain + layout.gain_offset


def _normed(
    q: Tensor, k: Tensor, biases: dict[str, Tensor], parts: Parts, layout: Layout
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """With the gains of norms folded in; what they divide by differs by token and is a positive
    factor of a row of scores, or of a column."""
    out = dict(biases)
    done = {}
    for name, tensor in (("q", q), ("k", k)):
        gain = parts.get(f"{name}_norm")
        if gain is None:
            done[name] = tensor
            continue
        if layout.qk_norm == "layer":  # takes the mean of a head's coordinates off
            tensor = tensor - tensor.mean(1, keepdim=True)
            if name in out:
                out[name] = out[name] - out[name].mean(1, keepdim=True)
        gain = gain + layout.gain_offset
        shape = (tensor.shape[0], -1) if gain.numel() == tensor.shape[:2].numel() else (1, -1)
        if gain.numel() not in (tensor.shape[1], tensor.shape[:2].numel()):
            raise UsageError(f"{name}_norm has {gain.numel()} gains for heads of {tensor.shape[1]}")
        gain = gain.view(shape)
        done[name] = tensor * gain[..., None]
        if name in out:
            out[name] = out[name] * gain
    return done["q"], done["k"], out


# ---- rotation


def rotation(layout: Layout, R: int) -> tuple[Tensor, Tensor]:
    """Which coordinates rotate together, and how fast."""
    width = min(layout.rope_dim, R) // 2 * 2
    first = 0 if layout.rope_at == "first" else R - width
    i = torch.arange(width // 2)
    pairs = torch.stack((2 * i, 2 * i + 1) if layout.rope_interleaved else (i, i + width // 2), 1)
    frequencies = layout.rope_theta ** (-2.0 * i.double() / max(width, 1))
    frequencies = -frequencies if layout.rope_back else frequencies
    return pairs + first, frequencies


def _unpermuted(heads: Tensor, layout: Layout) -> Tensor:
    """Rows (heads, R, ...) as Hugging Face has them, from rows in which neighbours rotate."""
    R = heads.shape[1]
    halves = heads.view(heads.shape[0], R // 2, 2, *heads.shape[2:])
    return halves.transpose(1, 2).reshape(heads.shape)


# ---- latents (MLA)


def _from_latent(parts: Parts, layout: Layout) -> Heads:
    """Heads whose keys and values grow from one latent, and whose queries may from another.

    All that reads x is W = [W_qa; W_kva] (or W_q; W_kva). T with T T^T = W W^T takes its place: in
    its coordinates every inner product is as in those of x.
    """
    H, rope = layout.num_heads, layout.rope_dim
    kv_b = parts["kv_b"] if "kv_b" in parts else parts["kv"]
    C = kv_b.shape[1]
    kv_a = parts["kv_a"]
    rope = kv_a.shape[0] - C
    scale = torch.cat((_gain(parts.get("kv_a_norm"), layout, C), torch.ones(rope).double()))
    # The norm of the latent divides by its size, which at inputs of unit variance is this. It only
    # matters against the part that rotates, which no norm divides.
    size = kv_a[:C].square().sum(1).mean().sqrt().clamp_min(1e-300)
    scale[:C] /= size
    kv_a = kv_a * scale[:, None]
    q_b = parts["q_b"] if "q_b" in parts else parts["q"]
    if "q_a" in parts:
        q_a = parts["q_a"] * _gain(parts.get("q_a_norm"), layout, parts["q_a"].shape[0])[:, None]
        W = torch.cat((q_a, kv_a))
        T = reduced(W)
        q = q_b @ T[: q_a.shape[0]]
    else:
        W = torch.cat((q_b, kv_a))
        T = reduced(W)
        q = T[: q_b.shape[0]]
    down, turning = T[-kv_a.shape[0] :].split((C, rope))
    R = q.shape[0] // H
    if q.shape[0] % H or kv_b.shape[0] % H or rope >= R:
        raise UsageError(f"{H} heads do not divide the rows of q or kv_b")
    up_k, up_v = kv_b.view(H, -1, C).split((R - rope, kv_b.shape[0] // H - (R - rope)), 1)
    # The part that rotates stands last, as in transformers and here.
    k = torch.cat((up_k @ down, turning.expand(H, rope, -1)), 1)
    v = up_v @ down
    o = _outputs(parts, layout, H, v.shape[1], W.shape[1])
    true_down = W[-kv_a.shape[0] :][:C]
    ov = up_v @ (true_down @ o.mT) if o.shape[1] else o.new_zeros(H, 0, 0)
    pairs, frequencies = rotation(dataclasses.replace(layout, rope_dim=rope, rope_at="last"), R)
    return Heads(
        q=q.reshape(H, R, -1), k=k, v=v, o=o, dim=W.shape[1], ov=ov, latent=down, biases={},
        pairs=pairs, frequencies=frequencies,
    )  # fmt: skip


def reduced(W: Tensor) -> Tensor:
    """T of at most as many columns as W has rows, with T T^T = W W^T."""
    if W.shape[0] >= W.shape[1]:
        return W
    if W.numel() > 1 << 21:
        gram = W @ W.T
        T, failed = torch.linalg.cholesky_ex(gram)
        if not failed and T.diagonal().min() > 1e-4 * T.diagonal().max():
            return T
    return torch.linalg.qr(W.T, mode="r").R.T


def sizes_of(parts: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The shapes of the parts, in order: layers that agree in them have one control."""
    return tuple((name, tuple(parts[name].shape)) for name in sorted(parts))


def cut_rows(fused: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of one matrix as those of queries, keys and values, as they are stored."""
    return _cut(fused, layout)
