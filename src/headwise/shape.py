"""What a transformer stack is, and what it costs. Standard library only.

A `Shape` is a value. Its names follow Hugging Face; the papers' letters are
d = `dim`, H = `num_heads`, r = `head_dim` (the query/key rank of one head), L = `depth`.
`num_heads * head_dim == dim` is a special case and is never assumed.

Longer than 450 lines because every cost stands beside the sizes that it is made of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import (
    LARGEST,
    MOST_COUNT,
    MOST_LAYERS,
    MOST_SIZE,
    UsageError,
    nearest,
    shown,
)

ACTIVATIONS = ("relu", "relu2", "gelu", "swiglu", "geglu")
GATED = ("swiglu", "geglu")
NORMS = ("layer", "layer-nobias", "rms", "rms-free", "scalar")
NORM_PLACES = ("post", "pre", "sandwich", "parallel")
QK_NORMS = ("none", "head", "free")
POSITIONS = ("none", "additive", "concatenated", "room")
WIDENING = ("concatenated", "room")  # positions beside the vectors

_CHOICES = (ACTIVATIONS, NORMS, NORM_PLACES, QK_NORMS, POSITIONS)
_POSITIVE = ("dim", "depth", "num_heads", "head_dim", "v_head_dim", "num_kv_heads", "average")
SMALL = 1 << 14  # where no size is larger, parameters can be counted in 64 bits
_DERIVED: Any = None  # a size that follows from the others unless given


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The whole stack: attention, feed-forward, norms, embeddings.

    >>> shape = Shape(dim=64, depth=1, num_heads=8, head_dim=8, ffn_dim=2048, qkv_bias=True,
    ...               out_bias=True, ffn_bias=True, norm="scalar", norm_at="post")
    >>> shape.params
    280898
    >>> shape.kv_bytes(tokens=16, bytes_per=2)
    4096
    """

    dim: int
    depth: int
    num_heads: int
    head_dim: int = _DERIVED  # query/key rank of a head; dim // num_heads unless given
    v_head_dim: int = _DERIVED  # value width of a head; head_dim unless given
    num_kv_heads: int = _DERIVED  # num_heads unless given; fewer is grouped-query attention
    kv_lora_rank: int = 0  # > 0: keys and values pass through one latent of this width (MLA)
    q_lora_rank: int = 0  # > 0: queries pass through a latent too (MLA only)
    qk_rope_head_dim: int = 0  # rotated coordinates of each head; in MLA the part that all share
    rope_theta: float = 10_000.0
    average: int = 1  # attention modules side by side, outputs averaged (the rank paper's width)
    ffn_dim: int = _DERIVED  # 4 * dim unless given; 0 leaves the feed-forward out
    activation: str = "relu"
    causal: bool = False
    windows: tuple[int, ...] = (0,)  # keys a query sees, tiled over the layers; 0 is all of them
    norm: str = "rms"
    norm_at: str = "pre"
    qk_norm: str = "none"
    logit_scale: float | None = None  # factor of the scores; head_dim ** -0.5 unless given
    max_logit: float | None = None  # with qk_norm: the largest score, held when the rank changes
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    vocab_size: int = 0  # 0: inputs and outputs are vectors
    tied: bool = True  # one table for input and output tokens; no matter where outputs are read out
    input_dim: int = 0  # > 0: vectors of this width come in through a learned linear map
    output_dim: int = 0  # > 0: and leave through one
    # learned absolute positions; room: concatenated ones that are the same at every place
    positions: str = "none"
    num_positions: int = 0
    position_dim: int = 0  # width of concatenated positions or room, part of dim
    extras: tuple[tuple[str, int], ...] = ()  # parameters outside the stack: (name, count)

    def __post_init__(self) -> None:
        self._derive()
        checks = self._type_faults, self._size_faults, self._head_faults, self._position_faults
        for faults in (*checks, self._count_faults):
            for fault in faults():
                raise UsageError(fault)

    def _derive(self) -> None:
        """Fill in what follows from other sizes, and make values that are equal look equal."""

        def fill(name: str, value: Any) -> None:
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

        if self.head_dim is None and _is_int(self.dim) and _is_int(self.num_heads):
            if self.num_heads < 1:
                raise UsageError(f"num_heads must be at least 1, got {shown(self.num_heads)}")
            if self.dim % self.num_heads:
                raise UsageError(
                    "head_dim must be given when num_heads does not divide dim, got dim "
                    f"{shown(self.dim)}, num_heads {shown(self.num_heads)}"
                )
            fill("head_dim", self.dim // self.num_heads)
        fill("v_head_dim", self.head_dim)
        fill("num_kv_heads", self.num_heads)
        if _is_int(self.dim):
            fill("ffn_dim", 4 * self.dim)
        if isinstance(self.windows, list):
            object.__setattr__(self, "windows", tuple(self.windows))
        if isinstance(self.extras, list):
            pairs = tuple(tuple(e) if isinstance(e, list) else e for e in self.extras)
            object.__setattr__(self, "extras", pairs)
        for name in ("rope_theta", "logit_scale", "max_logit"):
            value = getattr(self, name)
            real = isinstance(value, int | float) and not isinstance(value, bool)
            if real and abs(value) <= LARGEST:
                object.__setattr__(self, name, float(value))  # 1 and 1.0 are one shape

    # ---- what it may be: each rule yields what is wrong

    def _type_faults(self) -> Iterator[str]:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.type == "int" and not _is_int(value):
                yield f"{f.name} must be a whole number, got {shown(value)}"
            if f.type == "bool" and not isinstance(value, bool):
                yield f"{f.name} must be true or false, got {shown(value)}"
        for name in ("rope_theta", "logit_scale", "max_logit"):
            value = getattr(self, name)
            given = value is not None or name == "rope_theta"
            if given and not (isinstance(value, float) and 0 < value <= LARGEST):
                yield f"{name} must be a positive number up to {LARGEST:g}, got {shown(value)}"
        names = "activation", "norm", "norm_at", "qk_norm", "positions"
        for name, choices in zip(names, _CHOICES, strict=True):
            value = getattr(self, name)
            if value not in choices:
                yield f"unknown {name} {shown(value)}; {nearest(str(value), choices)}"

    def _size_faults(self) -> Iterator[str]:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name in _POSITIVE and value < 1:
                yield f"{f.name} must be at least 1, got {shown(value)}"
            if f.type == "int" and value < 0:
                yield f"{f.name} must not be negative, got {shown(value)}"
            if f.type == "int" and value > MOST_SIZE:
                yield f"{f.name} must be at most {MOST_SIZE:,} (32 bits), got {shown(value)}"
        if self.depth > MOST_LAYERS:
            yield f"depth must be at most {MOST_LAYERS:,} layers, got {self.depth}"
        if self.vocab_size and self.input_dim:
            got = f"got vocab_size {self.vocab_size}, input_dim {self.input_dim}"
            yield f"a shape takes tokens or vectors: vocab_size excludes input_dim, {got}"
        ok = isinstance(self.windows, tuple) and all(
            _is_int(w) and 0 <= w <= MOST_SIZE for w in self.windows
        )
        if not ok or not 1 <= len(self.windows) <= self.depth:
            yield (
                f"windows must be 1 to depth ({self.depth}) numbers, each 0 (all keys) or more, "
                f"got {shown(self.windows)}"
            )
        if not isinstance(self.extras, tuple) or not all(map(_is_extra, self.extras)):
            rule = "extras must be pairs of a name and a number of parameters, 0 or more"
            yield f"{rule}, got {shown(self.extras)}"

    def _head_faults(self) -> Iterator[str]:
        H, KV, R = self.num_heads, self.num_kv_heads, self.head_dim
        rope, latent = self.qk_rope_head_dim, f"kv_lora_rank {self.kv_lora_rank}"
        if H % KV:
            got = f"num_heads {H}, num_kv_heads {KV}"
            yield f"num_heads must be a multiple of num_kv_heads, got {got}"
        if rope % 2:
            what = "head_dim" if rope == R else "qk_rope_head_dim"
            yield f"{what} must be even for rotary positions, got {rope}"
        if rope > R:
            got = f"qk_rope_head_dim {rope}, head_dim {R}"
            yield f"qk_rope_head_dim must not exceed head_dim, got {got}"
        if H % self.average:
            got = f"num_heads {H}, average {self.average}"
            yield f"num_heads must be a multiple of average, got {got}"
        if self.latent and KV != H:
            rule = f"num_kv_heads must equal num_heads {H} when a latent ({latent})"
            yield f"{rule} replaces grouped heads, got {KV}"
        if self.max_logit is not None and (self.qk_norm == "none" or self.logit_scale is not None):
            got = f"qk_norm {self.qk_norm}, logit_scale {self.logit_scale}"
            yield f"max_logit needs qk_norm and replaces logit_scale, got {got}"
        if self.latent and self.qk_norm == "head":
            yield f"qk_norm must be none or free with a latent ({latent}), got {self.qk_norm}"
        if self.q_lora_rank and not self.latent:
            got = f"q_lora_rank {self.q_lora_rank}, kv_lora_rank 0"
            yield f"q_lora_rank needs kv_lora_rank above 0, got {got}"

    def _position_faults(self) -> Iterator[str]:
        width = self.position_dim
        if self.positions != "none" and not self.position_rows:
            yield f"num_positions must be given for {self.positions} positions, got 0"
        if self.positions == "room" and self.num_positions:
            rule = "num_positions must be 0 with room, which is the same at every place"
            yield f"{rule}, got {self.num_positions}"
        if (self.positions in WIDENING) != (width > 0):
            got = f"position_dim {width}, positions {self.positions}"
            yield f"position_dim goes with concatenated positions and room, got {got}"
        if width and self.vocab_size:
            rule = "concatenated positions go with vectors, not with tokens"
            yield f"{rule}, got vocab_size {self.vocab_size}"
        if width >= self.dim:
            yield f"position_dim must be below dim, got position_dim {width}, dim {self.dim}"

    def _count_faults(self) -> Iterator[str]:
        sizes = [getattr(self, f.name) for f in dataclasses.fields(self) if f.type == "int"]
        counts = [count for _, count in self.extras]
        # Most shapes are small, and counting takes longer than all other rules.
        if max(*sizes, *counts) > SMALL and self.params > MOST_COUNT:
            counted = shown(self.params)
            yield f"a shape must have at most {MOST_COUNT:,} parameters (64 bits), got {counted}"

    # ---- what it is

    @property
    def latent(self) -> bool:
        """Whether keys and values pass through one latent (MLA)."""
        return self.kv_lora_rank > 0

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate, three matrices instead of two."""
        return self.activation in GATED

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        if self.max_logit is not None:
            return self.max_logit / self.head_dim  # |q| = |k| = sqrt(r) under qk_norm
        return self.head_dim**-0.5 if self.logit_scale is None else self.logit_scale

    @property
    def position_rows(self) -> int:
        """Rows of the table of positions: one a place, or one for all."""
        return {"none": 0, "room": 1}.get(self.positions, self.num_positions)

    @property
    def in_dim(self) -> int:
        """Width of the vectors that come in."""
        return self.input_dim or self.dim - self.position_dim

    @property
    def out_dim(self) -> int:
        """Width of the vectors that come out."""
        return self.output_dim or self.vocab_size or self.dim

    def window(self, layer: int) -> int:
        """How many keys a query of this layer sees, itself included; 0 is all."""
        return self.windows[layer % len(self.windows)]

    def _over_layers(self, of: Callable[[int], int]) -> int:
        """A sum over layers of what depends on their windows alone, which repeat."""
        period = len(self.windows)
        return sum(of(i) * -(-(self.depth - i) // period) for i in range(period))

    def replace(self, **changes: Any) -> Shape:
        """A copy with some fields changed; sizes that were derived stay as they are."""
        return Shape.of({**dataclasses.asdict(self), **changes})

    def widths_key(self) -> Any:
        """Shapes with equal keys differ only in how the same widths are cut into heads, so that
        their models train in one ensemble."""
        if self.latent or self.qk_norm != "none" or self.qk_rope_head_dim:
            return self
        fields = dataclasses.asdict(self)
        H, KV = fields.pop("num_heads"), fields.pop("num_kv_heads")
        R, V = fields.pop("head_dim"), fields.pop("v_head_dim")
        return H * R, KV * R, KV * V, H * V, *fields.items()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Shape:
        """A shape from a mapping (the inverse of `dataclasses.asdict`); unknown keys are
        refused."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise UsageError(f"unknown shape key {name!r}; {nearest(name, known)}")
        for f in dataclasses.fields(cls):
            if f.name not in fields and f.default is dataclasses.MISSING:
                raise UsageError(f"a shape needs dim, depth and num_heads, got no {f.name}")
        return cls(**fields)

    @classmethod
    def from_hf(cls, config: str | Path | Mapping[str, Any]) -> Shape:
        """The shape of a Hugging Face (or nanochat) config: a config.json, its folder, or its dict.

        The parameter count equals the public model's, or this refuses and says what it cannot
        express.
        """
        from headwise.configs import read_config, to_shape_fields

        return cls.of(to_shape_fields(read_config(config)))

    # ---- parameters

    def param_table(self) -> dict[str, int]:
        """Exact parameters by part; the values sum to `params`."""
        table = {
            "embedding": self.vocab_size * self.dim,
            "read-in": (self.input_dim > 0) * (self.input_dim + 1) * (self.dim - self.position_dim),
            "positions": self.position_rows * (self.position_dim or self.dim),
            "attention": self.depth * self._attention_params(),
            "feed-forward": self.depth * self._ffn_params(),
            "norms": self._norm_params(),
            "head": 0 if self.tied or self.output_dim else self.vocab_size * self.dim,
            "read-out": (self.dim + 1) * self.output_dim,
        }
        for name, count in self.extras:
            table[name] = table.get(name, 0) + count
        return {name: count for name, count in table.items() if count}

    @property
    def params(self) -> int:
        """Exact number of trainable parameters."""
        return sum(self.param_table().values())

    def _matrices(self) -> list[tuple[int, int, bool]]:
        """Every matrix of one attention layer as (inputs, outputs, whether it has a bias)."""
        H, R, V, KV, D = self.num_heads, self.head_dim, self.v_head_dim, self.num_kv_heads, self.dim
        out = (H * V, D, False)  # its bias is counted apart: one for each averaged module
        if not self.latent:
            return [*((D, outputs, self.qkv_bias) for outputs in (H * R, KV * R, KV * V)), out]
        nope, C, rope = R - self.qk_rope_head_dim, self.kv_lora_rank, self.qk_rope_head_dim
        query = [(self.q_lora_rank or D, H * R, False)]
        if self.q_lora_rank:
            query.insert(0, (D, self.q_lora_rank, self.qkv_bias))
        return [*query, (D, C + rope, self.qkv_bias), (C, H * (nope + V), False), out]

    def _attention_params(self) -> int:
        weights = sum(a * b + b * bias for a, b, bias in self._matrices())
        out_bias = self.average * self.dim if self.out_bias else 0
        latent_norms = self.kv_lora_rank + self.q_lora_rank  # one RMS gain a coordinate
        qk_norm = 2 * self.head_dim if self.qk_norm == "head" else 0
        return weights + out_bias + latent_norms + qk_norm

    def _ffn_params(self) -> int:
        if not self.ffn_dim:
            return 0
        hidden = self.ffn_dim * (2 if self.gated else 1)
        return self.dim * (hidden + self.ffn_dim) + (hidden + self.dim if self.ffn_bias else 0)

    def _norm_params(self) -> int:
        D = self.dim
        gains = {"layer": 2 * D, "layer-nobias": D, "rms": D, "rms-free": 0, "scalar": 1}
        return gains[self.norm] * (self._norms_per_layer() * self.depth + (self.norm_at != "post"))

    def _norms_per_layer(self) -> int:
        per_layer = {"post": 2, "pre": 2, "sandwich": 4, "parallel": 1}[self.norm_at]
        return per_layer if self.ffn_dim or self.norm_at == "parallel" else per_layer // 2

    # ---- arithmetic and memory

    def pairs(self, tokens: int, layer: int = 0) -> int:
        """How many (query, key) pairs one head of a layer scores in a sequence, masks counted
        exactly."""
        window = self.window(layer) or tokens
        if self.causal:
            full = min(tokens, window)
            return full * (full + 1) // 2 + (tokens - full) * full
        reach = min(window, tokens) - 1  # an encoder window is symmetric: |i - j| < window
        return tokens + 2 * (reach * tokens - reach * (reach + 1) // 2)

    def flops(self, tokens: int, *, batch: int = 1, training: bool = False) -> int:
        """Floating-point operations of the matrix products, two for a multiply-add; training is
        three times forward.

        F = 2 T (attention and feed-forward weights + read-in + read-out or head) + 2 H (r + v)
        pairs(T), summed over layers; look-ups, norms, softmax and activations are left out.
        """
        _positive("tokens", tokens)
        _positive("batch", batch)
        weights = self.depth * sum(a * b for a, b, _ in self._matrices())
        weights += self.depth * self.dim * self.ffn_dim * (3 if self.gated else 2)
        weights += self.input_dim * (self.dim - self.position_dim)
        weights += (self.output_dim or self.vocab_size) * self.dim
        pairs = self._over_layers(lambda i: self.pairs(tokens, i))
        scores = self.num_heads * (self.head_dim + self.v_head_dim) * pairs
        return 2 * batch * (tokens * weights + scores) * (3 if training else 1)

    def kv_width(self, inputs: bool = False) -> int:
        """Numbers that one token leaves in one layer's cache: n_kv (r + v), or latent + rotary
        part.

        With `inputs` a layer may keep its input, d numbers, from which keys and values are made
        anew: the fewer of the two.
        """
        latent = self.kv_lora_rank + self.qk_rope_head_dim
        width = latent if self.latent else self.num_kv_heads * (self.head_dim + self.v_head_dim)
        return min(width, self.dim) if inputs else width

    def kv_bytes(
        self, tokens: int = 1, *, batch: int = 1, bytes_per: int = 2, inputs: bool = False
    ) -> int:
        """Bytes of the key/value cache after `tokens` tokens; a windowed layer keeps its window
        only. `inputs` as in `kv_width`."""
        _positive("tokens", tokens)
        _positive("batch", batch)
        kept = self._over_layers(lambda i: min(tokens, self.window(i) or tokens))
        return batch * kept * self.kv_width(inputs) * bytes_per

    def activation_bytes(self, tokens: int, *, batch: int = 1, bytes_per: int = 4) -> int:
        """Bytes that one training step keeps for the backward pass: this package's modules and the
        loss.

        Counted for every token: the input of each matrix; of a norm its input, its statistics and
        the value before its gain; the projection that q, k and v are cut from, and q, k or v again
        where rotated, normalised or padded (the fused kernel takes rank and value width at the
        larger of the two); the heads' output with one log-sum-exp a head, never the scores; the
        hidden values that the activation needs; token ids; the loss's log-probabilities or errors.
        Weights, gradients and optimiser state are not part of it.
        """
        _positive("tokens", tokens)
        _positive("batch", batch)
        ids = 16 if self.vocab_size else 0  # inputs and labels, 64 bits each
        angles = self.qk_rope_head_dim  # cosines and sines, one set for all layers and the batch
        per_token = self.depth * self._kept_per_token() + self._kept_at_ends()
        return batch * tokens * (per_token * bytes_per + ids) + tokens * angles * bytes_per

    def _kept_per_token(self) -> int:
        inputs = self.dim * (2 if self.ffn_dim and self.norm_at != "parallel" else 1)
        values = {"relu": 1, "relu2": 2, "gelu": 2, "swiglu": 4, "geglu": 4}[self.activation]
        norms = self._norms_per_layer() * _norm_keeps(self.norm, self.dim)
        heads = self._kept_by_latent() if self.latent else self._kept_by_projection()
        return inputs + values * self.ffn_dim + norms + heads

    def _kept_by_projection(self) -> int:
        H, R, V, KV = self.num_heads, self.head_dim, self.v_head_dim, self.num_kv_heads
        # New tensors for q and k, where they are not views of the projection.
        new_qk = bool(self.qk_rope_head_dim or self.qk_norm != "none" or R < V)
        kept = (H + KV) * max(R, V) if new_qk else 0
        if self.qk_norm != "none":
            kept += (H + KV) * (1 + (R if self.qk_norm == "head" else 0))
        if not new_qk or V >= R or self.qk_norm != "none":
            kept += H * R + KV * (R + V)
        return kept + self._kept_by_kernel(new_qk)

    def _kept_by_latent(self) -> int:
        H, R, V, rope = self.num_heads, self.head_dim, self.v_head_dim, self.qk_rope_head_dim
        C, Q, normed = self.kv_lora_rank, self.q_lora_rank, self.qk_norm != "none"
        new_qk = bool(rope or R < V or normed)
        kept = rope + _norm_keeps("rms", C) + C + (_norm_keeps("rms", Q) + Q if Q else 0)
        if not (new_qk and V < R and (rope or not normed)):
            kept += H * (R - rope + V)  # keys and values as they grow from the latent
        if normed:  # what the norms divide, unless it is a part of what has grown
            kept += H * (2 + R * (2 if rope else 1))
        return kept + (2 if new_qk else 1) * H * max(R, V) + self._kept_by_kernel(new_qk)

    def _kept_by_kernel(self, new_q: bool) -> int:
        """Padded values, output, log-sum-exp; and the output again where its heads do not lie side
        by side as asked."""
        H, R, V = self.num_heads, self.head_dim, self.v_head_dim
        padded = self.num_kv_heads * R if V < R else 0
        copied = H * V if H > 1 and (new_q or V < R) else 0
        return padded + H * max(R, V) + H + copied

    def _kept_at_ends(self) -> int:
        final = _norm_keeps(self.norm, self.dim) if self.norm_at != "post" else 0
        if self.vocab_size:
            return final + self.dim + (self.output_dim or self.vocab_size)
        if self.output_dim:
            final += self.dim
        if self.input_dim:
            return final + self.input_dim + self.out_dim
        if self.norm_at != "post" and self.positions == "none" and self.norm != "scalar":
            # The first norm has nothing to send back to given vectors.
            final -= self.dim + (2 if self.norm.startswith("layer") else 1)
        return final + (self.output_dim or self.dim - self.position_dim)


def _norm_keeps(kind: str, dim: int) -> int:
    """Numbers that one norm keeps of one token: what it divides, its statistics, and the quotient
    where a gain follows."""
    quotient = dim if kind in ("layer", "layer-nobias", "rms") else 0
    return dim + (2 if kind.startswith("layer") else 1) + quotient


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_extra(pair: Any) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    return isinstance(pair[0], str) and _is_int(pair[1]) and pair[1] >= 0


def _positive(name: str, value: int) -> None:
    if not _is_int(value) or value < 1:
        raise UsageError(f"{name} must be a whole number of at least 1, got {shown(value)}")
