"""`Shape`: the fields, what follows from them, and the costs by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import LARGEST, UsageError, nearest
from headwise.shape import activations, costs, names, parameters
from headwise.shape.built import beyond_plain
from headwise.shape.layers import SIZES, Layer, derived_head_dim, settled
from headwise.shape.rules import GATED, check, is_int

_DERIVED: Any = None  # a size that follows from the others unless given


@dataclass(frozen=True, kw_only=True, repr=False)
class Shape:
    """The whole stack: attention, feed-forward, norms, embeddings.

    >>> shape = Shape(dim=64, depth=1, num_heads=8, head_dim=8, ffn_dim=2048, qkv_bias=True,
    ...               out_bias=True, ffn_bias=True, norm="scalar", norm_at="post")
    >>> shape.params
    280898
    >>> shape.kv_bytes(tokens=16, bytes_per=2)
    4096

    Sizes of heads, feed-forward and experts may differ by layer: a list tiles the depth.

    >>> Shape(dim=64, depth=4, num_heads=(8, 8, 4, 4), ffn_dim=96).layer(2).head_dim
    16
    """

    dim: int
    depth: int
    num_heads: int
    head_dim: int = _DERIVED  # query/key rank of a head; dim // num_heads unless given
    v_head_dim: int = _DERIVED  # value width of a head; head_dim unless given
    num_kv_heads: int = _DERIVED  # num_heads unless given; fewer is grouped-query attention
    kv_lora_rank: int = 0  # > 0: keys and values pass through one latent of this width (MLA)
    q_lora_rank: int = 0  # > 0: queries pass through a latent of their own
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
    # learned absolute positions; room: concatenated ones that are the same at every place; alibi:
    # scores that fall with distance
    positions: str = "none"
    num_positions: int = 0
    position_dim: int = 0  # width of concatenated positions or room, part of dim
    extras: tuple[tuple[str, int], ...] = ()  # parameters outside the stack: (name, count)

    # Fields that came later. Where they have their defaults `spec` leaves them out, so that older
    # ids stay; their names stand in LATER.
    layers: tuple[Layer, ...] = ()  # what layers have that differs, tiled over the depth
    shared_kv: bool = False  # keys are the values: one projection, one tensor in the cache
    # > 0: outputs of heads, in groups, pass through latents of this width (DeepSeek-V4)
    o_lora_rank: int = 0
    o_groups: int = 1
    attn_gate: str = "none"  # sigmoid of a linear map of x: on each head's output, or each value's
    sinks: bool = False  # one learned score per head, beside those of the keys
    rope_at: str = "last"  # which coordinates a partial rotary turns; first: NeoX, Phi, GLM
    # how they pair: i with i + half, or neighbours with each other (GPT-J, Cohere, GLM, DeepSeek)
    rope_interleaved: bool = False
    # > 0: experts in the place of the feed-forward; ffn_dim is that of dense layers
    num_experts: int = 0
    num_experts_per_tok: int = 0
    expert_ffn_dim: int = 0
    shared_ffn_dim: int = 0  # of all shared experts together
    shared_gate: bool = False  # one sigmoid gate on the shared experts (Qwen2-MoE)
    router_bias: bool = False
    split_kv_cache: bool = False  # shared_kv keeps keys and values apart all the same (Gemma 4)
    chunked: bool = False  # windows are chunks: a query sees the keys of its own (Llama 4)
    lm_head: bool = True  # False: tokens come in and are not read out, as in an encoder

    def __post_init__(self) -> None:
        self._derive()
        check(self)

    def _derive(self) -> None:
        """Fill in what follows from other sizes, and make values that are equal look equal."""
        put = object.__setattr__
        if self.layers == []:
            put(self, "layers", ())
        by_layer = self.layers != () or any(
            isinstance(getattr(self, name), list | tuple) for name in SIZES
        )
        if by_layer and is_int(self.dim) and is_int(self.depth):
            sizes, layers = settled(self.own_sizes(), self.layers, self.depth, self.dim)
            for name, value in (sizes | {"layers": layers}).items():
                put(self, name, value)
        if self.head_dim is None and is_int(self.dim) and is_int(self.num_heads):
            put(self, "head_dim", derived_head_dim(self.dim, self.num_heads))
        follows = {"v_head_dim": self.head_dim, "num_kv_heads": self.num_heads}
        if is_int(self.dim):
            follows["ffn_dim"] = 4 * self.dim
        for name, value in follows.items():
            if getattr(self, name) is None:
                put(self, name, value)
        if isinstance(self.windows, list):
            put(self, "windows", tuple(self.windows))
        if isinstance(self.extras, list):
            pairs = tuple(tuple(e) if isinstance(e, list) else e for e in self.extras)
            put(self, "extras", pairs)
        for name in ("rope_theta", "logit_scale", "max_logit"):
            value = getattr(self, name)
            real = isinstance(value, int | float) and not isinstance(value, bool)
            if real and abs(value) <= LARGEST:
                put(self, name, float(value))  # 1 and 1.0 are one shape

    def __repr__(self) -> str:
        """Without the fields that came later, where they have their defaults."""
        shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        shown = {name: v for name, v in shown.items() if name not in LATER or v != LATER[name]}
        return f"Shape({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

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
        return {"none": 0, "room": 1, "alibi": 0}.get(self.positions, self.num_positions)

    @property
    def in_dim(self) -> int:
        """Width of the vectors that come in."""
        return self.input_dim or self.dim - self.position_dim

    @property
    def out_dim(self) -> int:
        """Width of the vectors that come out."""
        return self.output_dim or self.vocab_size * self.lm_head or self.dim

    # ---- its layers

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same sizes; their windows may differ."""
        return not self.layers or self.depth == 1

    def window(self, layer: int) -> int:
        """How many keys a query of this layer sees, itself included; 0 is all."""
        return self.windows[layer % len(self.windows)]

    def layer(self, i: int) -> Shape:
        """The shape of one layer: depth 1, sizes of its own, its window.

        Of a layer that reuses keys and values, `reuses_kv` is true.
        """
        own = self.layers[i % len(self.layers)] if self.layers else Layer()
        changes = own.given() | {"depth": 1, "windows": (self.window(i),)}
        if self.num_experts and own.num_experts == 0:
            changes |= {"num_experts_per_tok": 0, "expert_ffn_dim": 0, "shared_ffn_dim": 0}
            changes |= {"shared_gate": False, "router_bias": False}
        changes["layers"] = (Layer(reuses_kv=True),) if own.reuses_kv else ()
        # Its sizes have been checked with the shape's, so the copy is not checked again.
        view = object.__new__(Shape)
        view.__dict__.update(self.__dict__, **changes)
        return view

    @property
    def reuses_kv(self) -> bool:
        """Whether this one layer reads the keys and values of another; see `layer`."""
        return self.depth == 1 and len(self.layers) == 1 and self.layers[0].reuses_kv

    def own_sizes(self) -> dict[str, Any]:
        """The sizes that layers have unless theirs are given."""
        return {name: getattr(self, name) for name in SIZES}

    def distinct_layers(self) -> list[tuple[Shape, int]]:
        """Layers that differ in sizes or window, in the order in which they first appear, and how
        many there are of each.

        >>> shape = Shape(dim=8, depth=5, num_heads=2, windows=(3, 0))
        >>> [(layer.windows, count) for layer, count in shape.distinct_layers()]
        [((3,), 3), ((0,), 2)]
        """
        seen: dict[tuple[Layer | None, int], tuple[int, int]] = {}
        for i, count in self._pattern():
            key = (self.layers[i % len(self.layers)] if self.layers else None, self.window(i))
            first, so_far = seen.get(key, (i, 0))
            seen[key] = first, so_far + count
        return [(self.layer(first), count) for first, count in seen.values()]

    def kinds(self) -> Iterator[tuple[Shape, int, int]]:
        """The same for sums over layers: (one layer, window, how many). Where all sizes are the
        same the layer is this shape itself, of which only those are to be read."""
        if self.layers:
            for layer, count in self.distinct_layers():
                yield layer, layer.windows[0], count
        else:
            for i, count in self._pattern():
                yield self, self.windows[i], count

    def _pattern(self) -> Iterator[tuple[int, int]]:
        """The first layers, until sizes and windows repeat, and how often each comes."""
        run = min(self.depth, math.lcm(len(self.windows), len(self.layers) or 1))
        for i in range(run):
            yield i, -(-(self.depth - i) // run)

    # ---- a value

    def replace(self, **changes: Any) -> Shape:
        """A copy with some fields changed; sizes that were derived stay as they are.

        A size that may differ by layer is that of all layers when it is given as one number.
        """
        values, typed = names.fields_of(changes)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        dropped: dict[str, Any] = dict.fromkeys(set(SIZES) & set(values))
        if "layers" not in values and dropped:
            fields["layers"] = tuple(dataclasses.replace(own, **dropped) for own in self.layers)
        return Shape._of(fields | values, typed)

    def widths_key(self) -> Any:
        """Shapes with equal keys differ only in how the same widths are cut into heads, so that
        their models train in one ensemble."""
        if self.latent or self.qk_norm != "none" or self.qk_rope_head_dim or beyond_plain(self):
            return self
        fields = dataclasses.asdict(self)
        H, KV = fields.pop("num_heads"), fields.pop("num_kv_heads")
        R, V = fields.pop("head_dim"), fields.pop("v_head_dim")
        return H * R, KV * R, KV * V, H * V, *fields.items()

    def later(self) -> dict[str, Any]:
        """The fields that came later and are used."""
        return {
            name: value
            for name, default in LATER.items()
            if (value := getattr(self, name)) != default
        }

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Shape:
        """A shape from a mapping (the inverse of `dataclasses.asdict`), its names as people type
        them (`names.ALIASES`); unknown keys are refused.

        >>> Shape.of({"hidden_size": 64, "num_hidden_layers": 2, "n_head": 4}).head_dim
        16
        """
        return cls._of(*names.fields_of(fields))

    @classmethod
    def _of(cls, fields: Mapping[str, Any], typed: Mapping[str, str]) -> Shape:
        known = [f.name for f in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise UsageError(f"unknown shape key {name!r}; {nearest(name, known)}")
        for f in dataclasses.fields(cls):
            if f.name not in fields and f.default is dataclasses.MISSING:
                raise UsageError(f"a shape needs dim, depth and num_heads, got no {f.name}")
        try:
            return cls(**fields)
        except UsageError as e:
            raise UsageError(names.as_typed(str(e), typed)) from None

    @classmethod
    def from_hf(cls, config: str | Path | Mapping[str, Any], *, part: str | None = None) -> Shape:
        """The shape of a Hugging Face (or nanochat) config: a config.json, its folder, or its dict.

        The parameter count equals the public model's, or this refuses and says what it cannot
        express. `part` takes one model of several, "text" or "vision", or the "attention" layers
        alone, with exact cache bytes, where a model has other kinds of layers too.
        """
        from headwise.configs import read_config, to_shape_fields

        return cls.of(to_shape_fields(read_config(config), part))

    def spec(self, unless_used: Collection[str] = ()) -> dict[str, Any]:
        """All fields as plain values, the inverse of `of`. Left out where they have their defaults:
        fields that came later, so that older ids stay, and those of `unless_used`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["layers"] = tuple(layer.plain() for layer in self.layers)
        later = {*LATER, *unless_used}
        for f in dataclasses.fields(self):
            if f.name in later and getattr(self, f.name) == f.default:
                del fields[f.name]
        return fields

    # ---- parameters

    def param_table(self, *, active: bool = False) -> dict[str, int]:
        """Exact parameters by part; the values sum to `params`, or with `active` to
        `active_params`."""
        return parameters.table(self, active)

    @property
    def params(self) -> int:
        """Exact number of trainable parameters."""
        return sum(self.param_table().values())

    @property
    def active_params(self) -> int:
        """Parameters that one token uses: all but those of the experts it is not sent to.

        >>> mixtral = Shape(dim=4096, depth=32, num_heads=32, num_kv_heads=8, num_experts=8,
        ...                 num_experts_per_tok=2, expert_ffn_dim=14336, activation="swiglu",
        ...                 vocab_size=32000, tied=False, causal=True)
        >>> mixtral.params, mixtral.active_params
        (46702792704, 12879925248)
        """
        return sum(self.param_table(active=True).values())

    def weight_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of all parameters at a dtype: fp32, bf16, fp16, fp8, int8 or int4."""
        return costs.weight_bytes(self.params, dtype)

    # ---- arithmetic and memory

    def pairs(self, tokens: int, layer: int = 0) -> int:
        """How many (query, key) pairs one head of a layer scores in a sequence, masks counted
        exactly."""
        return costs.pairs(self, tokens, self.window(layer))

    def flops(self, tokens: int, *, batch: int = 1, training: bool = False) -> int:
        """Floating-point operations of the matrix products, two for a multiply-add; training is
        three times forward.

        F = 2 T (weights that a token meets: attention, feed-forward or its experts, read-in,
        read-out or head) + 2 H (r + v) pairs(T), summed over layers; look-ups, norms, softmax and
        activations are left out.
        """
        costs.check_count("tokens", tokens)
        costs.check_count("batch", batch)
        return batch * costs.flops(self, tokens) * (3 if training else 1)

    def train_flops_per_token(self, context: int) -> float:
        """FLOPs of training on sequences of this length, per token."""
        return self.flops(context, training=True) / context

    def prefill_flops(self, context: int) -> int:
        """FLOPs of reading a sequence of this length, with outputs for its last token only."""
        costs.check_count("context", context)
        return costs.prefill_flops(self, context)

    def decode_flops(self, context: int, *, absorbed: bool = True) -> int:
        """FLOPs of one more token of a causal model, the last of `context`: each matrix once, and
        2 H (r + v) for each key it sees.

        With a latent the keys are absorbed: query and weighted mean have the width of the latent, 2
        H (2 C + rotary part) for each key, and the growing map is met once, on the query's side.
        Without `absorbed` keys and values of all tokens are grown from their latents again.

        >>> shape = Shape(dim=12, depth=2, num_heads=3, causal=True, vocab_size=31)
        >>> sum(shape.decode_flops(n) for n in range(1, 6)) == shape.flops(5)
        True
        """
        costs.check_count("context", context)
        return costs.decode_flops(self, context, absorbed)

    def kv_width(self, inputs: bool = False, layer: int = 0) -> int:
        """Numbers that one token leaves in one layer's cache: n_kv (r + v), n_kv r where keys are
        the values, latent + rotary part, or none where another layer's are read.

        With `inputs` a layer may keep its input, d numbers, from which keys and values are made
        anew: the fewer of the two.
        """
        return costs.kv_width(self.layer(layer) if self.layers else self, inputs)

    def kv_bytes(
        self, tokens: int = 1, *, batch: int = 1, bytes_per: int = 2, inputs: bool = False
    ) -> int:
        """Bytes of the key/value cache after `tokens` tokens; a windowed layer keeps its window
        only. `inputs` as in `kv_width`."""
        costs.check_count("tokens", tokens)
        costs.check_count("batch", batch)
        return batch * costs.kv_numbers(self, tokens, inputs) * bytes_per

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
        costs.check_count("tokens", tokens)
        costs.check_count("batch", batch)
        return activations.step_bytes(self, tokens, batch, bytes_per)


LATER = {
    f.name: f.default
    for f in dataclasses.fields(Shape)
    if f.name
    in (
        *("layers", "shared_kv", "o_lora_rank", "o_groups", "attn_gate", "sinks", "rope_at"),
        *("num_experts", "num_experts_per_tok", "expert_ffn_dim", "shared_ffn_dim"),
        *("shared_gate", "router_bias", "split_kv_cache"),
        *("chunked", "lm_head", "rope_interleaved"),
    )
}
