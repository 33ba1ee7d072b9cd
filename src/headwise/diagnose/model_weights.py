"""Whole models of Hugging Face families as ours, and back, by their state dicts.

    found = to_headwise(theirs.state_dict(), theirs.config.to_dict())
    model = found.model()                  # an Encoder or Decoder with the same outputs
    state = to_public(model.state_dict(), config, like=theirs.state_dict())
    for shape, weights in attention_layers(theirs.state_dict(), config): ...

Attention is found by name and layout (names.py, config_layouts.py); norms, feed-forward and ends by
the tables below. What a `Shape` does not say but numbers depend on (epsilons, tanh GELU) is set on
the modules; factors of embeddings and logits are folded into weights; all else is refused.
Models with more at their ends than tokens and positions, such as BERT's norm of embeddings, give
their stack: vectors in, vectors out. Tensors without a place are named in `rest`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.configs import read_config, to_shape_fields
from headwise.configs.families import with_defaults
from headwise.diagnose.attention_weights import State, Weights, from_attention, to_attention
from headwise.diagnose.config_layouts import layouts_of
from headwise.diagnose.layouts import Layout
from headwise.diagnose.names import Named, named_layers
from headwise.errors import UsageError, shown
from headwise.model.layers import FeedForward, Norm
from headwise.model.transformer import Decoder, Encoder, build
from headwise.shape import Shape, not_built

# Where norms stand -> ours by the names of theirs; the first row whose names are all there.
_NORMS = {
    "pre": (
        {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"},
        {"norm1": "ln_1", "norm2": "ln_2"},
        {"norm1": "self_attn_layer_norm", "norm2": "final_layer_norm"},
        {"norm1": "layernorm_before", "norm2": "layernorm_after"},
        {"norm1": "layer_norm1", "norm2": "layer_norm2"},
        {"norm1": "norm1", "norm2": "norm2"},
    ),
    "sandwich": (
        {
            "norm1": "input_layernorm",
            "after1": "post_attention_layernorm",
            "norm2": "pre_feedforward_layernorm",
            "after2": "post_feedforward_layernorm",
        },
        {
            "norm1": "input_layernorm",
            "after1": "post_self_attn_layernorm",
            "norm2": "post_attention_layernorm",
            "after2": "post_mlp_layernorm",
        },
    ),
    "output": ({"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"},),
    "parallel": ({"norm1": "input_layernorm"}, {"norm1": "ln_1"}),
    "parallel-2": (
        {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"},
        {"norm1": "ln_attn", "norm2": "ln_mlp"},
    ),
    "post": (
        {"norm1": "attention.output.LayerNorm", "norm2": "output.LayerNorm"},
        {"norm1": "sa_layer_norm", "norm2": "output_layer_norm"},
    ),
}
_UP = (
    "mlp.gate_proj mlp.up_proj", "mlp.gate_up_proj", "mlp.up_proj", "mlp.fc1", "mlp.c_fc",
    "mlp.fc_in", "mlp.dense_h_to_4h", "fc1", "intermediate.dense", "ffn.lin1",
)  # fmt: skip
_DOWN = (
    "mlp.down_proj", "mlp.fc2", "mlp.c_proj", "mlp.fc_out", "mlp.dense_4h_to_h", "fc2",
    "output.dense", "ffn.lin2",
)  # fmt: skip
# Names of ends, by what they end in.
_ENDS = {
    "embedding": ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight"),
    "positions": ("wpe.weight", "embed_positions.weight"),
    "final_norm": ("norm", "ln_f", "final_layer_norm", "final_layernorm", "layernorm"),
    "head": ("lm_head.weight", "embed_out.weight"),
}
# Families whose gains are 1 + weight; whose embeddings are times sqrt(dim); whose positions begin
# at row 2.
_ONE_PLUS = ("gemma", "vaultgemma", "nemotron")
_ROOT = ("gemma", "vaultgemma")
_FROM_ROW_2 = ("opt", "biogpt")
_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python_tanh")
_HEAD_BIAS = "head bias"
_OF_ENDS = (
    *("token types", "embedding norm", "pooler", "class token", "patch embedding", "classifier"),
    "projection",
)


@dataclass(frozen=True)
class Converted:
    """A model of ours in the place of another."""

    shape: Shape
    weights: Weights
    rest: tuple[str, ...]  # names of tensors that have no place in it
    eps: float  # of its norms
    tanh_gelu: bool

    def model(self) -> Encoder | Decoder:
        """The module, in evaluation mode, with these weights in their precision."""
        model = build(self.shape).to(next(iter(self.weights.values())).dtype)
        model.load_state_dict(self.weights)
        for name, module in model.named_modules():
            # Norms of latents have one of their own in DeepSeek's families.
            if isinstance(module, Norm) and not (self.shape.latent and ".attention." in name):
                module.eps = self.eps
            if isinstance(module, FeedForward) and module.activation == "gelu":
                module.activation = "gelu-tanh" if self.tanh_gelu else "gelu"
        return model.eval()


@dataclass(frozen=True)
class Piece:
    """One parameter of ours: (theirs side by side + plus) * factor."""

    ours: str
    theirs: tuple[str, ...]
    factor: float = 1.0
    plus: float = 0.0
    turned: bool = False
    first_row: int = 0

    def to_ours(self, state: State) -> Tensor:
        parts = [state[name].mT if self.turned else state[name] for name in self.theirs]
        t = torch.cat(parts) if len(parts) > 1 else parts[0]
        t = t + self.plus if self.plus else t
        return (t * self.factor if self.factor != 1 else t).roll(-self.first_row, 0)

    def to_theirs(self, t: Tensor, like: State) -> Weights:
        t = t.roll(self.first_row, 0)
        t = t / self.factor if self.factor != 1 else t
        t = t - self.plus if self.plus else t
        sizes = [like[name].shape[-1 if self.turned else 0] for name in self.theirs]
        parts = [part.mT if self.turned else part for part in t.split(sizes)]
        return dict(zip(self.theirs, parts, strict=True))


@dataclass(frozen=True)
class Plan:
    """Which tensors of theirs are which of ours."""

    shape: Shape
    layers: tuple[tuple[str, Named, Layout], ...]  # ours' prefix, names, layout
    pieces: tuple[Piece, ...]
    rest: tuple[str, ...]


def to_headwise(state: State, config: Mapping[str, Any]) -> Converted:
    """The state dict of a model that `config` describes, as a model of ours."""
    config = read_config(config)
    plan = plan_of(config, state)
    out: Weights = {}
    for i, (prefix, named, layout) in enumerate(plan.layers):
        parts = {part: state[name] for part, name in named.parts.items()}
        found = to_attention(parts, layout, plan.shape.layer(i))
        out |= {prefix + name: t for name, t in found.items()}
    out |= {piece.ours: piece.to_ours(state).contiguous() for piece in plan.pieces}
    full = with_defaults(config, config["model_type"])
    return Converted(plan.shape, out, plan.rest, norm_eps(full), is_tanh_gelu(full))


def to_public(weights: State, config: Mapping[str, Any], like: State) -> Weights:
    """The state dict of their model, with the names, shapes and precision of `like` (its own, on
    any device but that of meta tensors' numbers); tensors that ours do not have are those of
    `like`."""
    config = read_config(config)
    plan = plan_of(config, like)
    out: Weights = {}
    for i, (prefix, named, layout) in enumerate(plan.layers):
        own = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
        parts = {part: like[name] for part, name in named.parts.items()}
        found = from_attention(own, layout, plan.shape.layer(i), parts)
        out |= {named.parts[part]: t for part, t in found.items()}
    for piece in plan.pieces:
        out |= piece.to_theirs(weights[piece.ours], like)
    if "lm_head.weight" in like and "lm_head.weight" not in out and plan.shape.tied:
        embedding = next(piece for piece in plan.pieces if piece.ours == "embedding")
        out["lm_head.weight"] = out[embedding.theirs[0]]
    return {name: out.get(name, t).to(t.dtype).contiguous() for name, t in like.items()}


def attention_layers(state: State, config: Mapping[str, Any]) -> Iterator[tuple[Shape, Weights]]:
    """Each attention layer alone, its shape and the state of its `Attention`: also of models with
    experts or other layers, which ours are not."""
    config = read_config(config)
    shape = Shape.of(to_shape_fields(config, "attention"))
    layers, _ = named_layers(state, None, shape.depth)
    family = str(config.get("model_type"))
    layers, layouts, _ = layouts_of(layers, family, config, shape, None, None, "state dict")
    for i, (layer, layout) in enumerate(zip(layers, layouts, strict=True)):
        parts = {part: state[name] for part, name in layer.parts.items()}
        yield shape.layer(i), to_attention(parts, layout, shape.layer(i))


def plan_of(config: Mapping[str, Any], state: State) -> Plan:
    """Where everything is in a state dict of this config's family."""
    family = str(config.get("model_type"))
    full = with_defaults(config, family)
    shape = _buildable(Shape.of(to_shape_fields(config)))
    _refuse_numbers(full, family, shape)
    layers, _ = named_layers(state, None, shape.depth)
    if len(layers) != shape.depth:
        raise UsageError(f"the config has {shape.depth} layers, the tensors {len(layers)}")
    layers, layouts, _ = layouts_of(layers, family, config, shape, None, None, "state dict")
    plus = 1.0 if family.startswith(_ONE_PLUS) else 0.0
    pieces: list[Piece] = []
    for i, layer in enumerate(layers):
        pieces += _block(i, layer, shape, state, plus, bool(layouts[i].transposed))
    pieces += _ends(shape, state, layers, full, family, plus)
    used = {name for layer in layers for name in layer.parts.values()}
    used |= {name for piece in pieces for name in piece.theirs}
    tied = {"lm_head.weight", "embed_out.weight"} if shape.vocab_size and shape.tied else set()
    places = [f"blocks.{i}.attention." for i in range(shape.depth)]
    rest = tuple(sorted(state.keys() - used - tied))
    return Plan(shape, tuple(zip(places, layers, layouts, strict=True)), tuple(pieces), rest)


def _buildable(shape: Shape) -> Shape:
    """The shape of the module: with its ends, or its stack alone."""
    names = {name for name, _ in shape.extras}
    if odd := names - {_HEAD_BIAS, *_OF_ENDS}:
        raise UsageError(f"a model with {', '.join(sorted(odd))} is not carried over")
    shape = shape.replace(extras=())
    if names & {*_OF_ENDS}:
        ends = {"positions": "none", "num_positions": 0, "position_dim": 0, "lm_head": True}
        shape = shape.replace(vocab_size=0, input_dim=0, output_dim=0, **ends)
    if missing := not_built(shape):
        raise UsageError(missing)
    return shape


def _refuse_numbers(full: Mapping[str, Any], family: str, shape: Shape) -> None:
    """What shapes leave out because no cost depends on it, and numbers do."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if full.get(key):
            raise UsageError(f"softcaps are not carried over: {key} must be null, got {full[key]}")
    for key in ("rope_scaling", "rope_parameters"):
        table = full.get(key) or {}
        kinds = [table, *(value for value in table.values() if isinstance(value, Mapping))]
        if len(kinds) > 1 or table.get("rope_type", table.get("type", "default")) != "default":
            raise UsageError(
                f"one unscaled rotary base is carried over: {key} must be of type default, got "
                f"{shown(table)}"
            )
    for key in ("residual_multiplier", "embedding_multiplier"):
        if full.get(key, 1.0) != 1.0:
            raise UsageError(f"{key} must be 1 to be carried over, got {full[key]}")
    act = _activation(full)
    if act == "quick_gelu" or (shape.activation == "geglu" and act not in _TANH):
        raise UsageError(f"weights of a {family} with {act} are not carried over")


def _activation(full: Mapping[str, Any]) -> Any:
    return full.get("hidden_activation") or full.get("hidden_act")


def is_tanh_gelu(full: Mapping[str, Any]) -> bool:
    """Whether a gelu is the approximation by tanh."""
    return _activation(full) in _TANH


def norm_eps(full: Mapping[str, Any]) -> float:
    """The epsilon of the norms; where the config leaves it out, that of transformers."""
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    found = [float(full[name]) for name in names if isinstance(full.get(name), float | int)]
    family = str(full.get("model_type"))
    least = family in (
        "bert",
        "roberta",
        "vit",
        "distilbert",
        "camembert",
        "xlm-roberta",
        "electra",
    )
    middle = family.startswith(("llama", "mistral", "qwen", "gemma"))
    return found[0] if found else 1e-12 if least else 1e-6 if middle else 1e-5


# ---- blocks


def _block(
    i: int, layer: Named, shape: Shape, state: State, plus: float, turned: bool
) -> Iterable[Piece]:
    """Norms and feed-forward of one layer."""
    some = next(iter(layer.parts.values()))
    match = re.match(r"(?:.*?[./])?\d+[./]", some)
    before = match[0] if match else ""
    has = {name[len(before) :] for name in state if name.startswith(before)}
    ours = f"blocks.{i}."
    if shape.norm not in ("layer-free", "rms-free"):
        rows = _NORMS[shape.norm_at]
        row = next((r for r in rows if all(f"{n}.weight" in has for n in r.values())), None)
        if row is None:
            raise UsageError(f"the norms of layer {layer.index} are not known among {shown(has)}")
        for name, theirs in row.items():
            yield Piece(f"{ours}{name}.weight", (f"{before}{theirs}.weight",), plus=plus)
            if shape.norm == "layer":
                yield Piece(f"{ours}{name}.bias", (f"{before}{theirs}.bias",))
    for name, ways in (("up", _UP), ("down", _DOWN)):
        way = next((w for w in ways if all(f"{n}.weight" in has for n in w.split())), None)
        if way is None:
            raise UsageError(f"the feed-forward of layer {layer.index} is not known")
        theirs = way.split()
        yield Piece(
            f"{ours}feed.{name}.weight", tuple(f"{before}{n}.weight" for n in theirs), turned=turned
        )
        if shape.ffn_bias:
            yield Piece(f"{ours}feed.{name}.bias", tuple(f"{before}{n}.bias" for n in theirs))


# ---- ends


def _ends(
    shape: Shape,
    state: State,
    layers: list[Named],
    full: Mapping[str, Any],
    family: str,
    plus: float,
) -> Iterable[Piece]:
    """Tables of tokens and positions, the last norm, the head."""
    outside = [name for name in state if not re.search(r"(?:^|[./])\d+[./]", name)]
    # The embedding's factor goes into its table, that of the logits into the last norm; where one
    # table serves both, the last norm undoes the first.
    into = shape.dim**0.5 if family.startswith(_ROOT) else 1.0
    out = float(full.get("logit_scale") or 1.0) / float(full.get("logits_scaling") or 1.0)
    if shape.vocab_size:
        yield Piece("embedding", (_end(outside, "embedding"),), factor=into)
        if not shape.tied:
            yield Piece("head", (_end(outside, "head"),))
        out = out / into if shape.tied else out
    if shape.num_positions:
        first = 2 if family in _FROM_ROW_2 else 0
        yield Piece("positions", (_end(outside, "positions"),), first_row=first)
    if shape.norm_at == "post":
        return
    if shape.norm in ("layer-free", "rms-free"):
        if out != 1:
            raise UsageError(f"logits of a {family} are scaled, and its last norm has no gains")
        return
    norms = [name for name in outside if name.endswith(".weight") and state[name].ndim == 1]
    ended = [f"{name}.weight" for name in _ENDS["final_norm"]]
    found = [name for name in norms if any(f".{name}".endswith(f".{end}") for end in ended)]
    if len(found) != 1:
        raise UsageError(f"the last norm is not known among {shown(norms)}")
    yield Piece("final_norm.weight", (found[0],), factor=out, plus=plus)
    if shape.norm == "layer":
        yield Piece("final_norm.bias", (found[0].removesuffix("weight") + "bias",), factor=out)


def _end(outside: list[str], part: str) -> str:
    found = [n for n in outside if any(f".{n}".endswith(f".{end}") for end in _ENDS[part])]
    if len(found) != 1:
        raise UsageError(f"the {part} is not known among {shown(outside)}")
    return found[0]
