"""Encoders of text and of images: one function each from a config to the fields of a `Shape`.
Standard library only.

They read no tokens out, so their shapes have no head (`lm_head=False`).
"""

from __future__ import annotations

from collections.abc import Mapping

from headwise.configs.stacks import BIASED, MULTI_HEAD, extras, plain, rotary, stack
from headwise.configs.values import (
    GATED,
    LAYER_TYPES,
    Config,
    Fields,
    activation,
    flag,
    kinds_of,
    optional,
    pair,
    tiled,
    whole,
)
from headwise.errors import UsageError, shown

_LAYER_NORMS = {"norm": "layer", **BIASED}


def _positions(c: Config, default: int) -> Fields:
    rows = whole(c, "max_position_embeddings", default)
    return {"positions": "additive", "num_positions": rows}


# ---- text


def bert(c: Config) -> Fields:
    kind = c.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise UsageError(
            "relative positions cannot be expressed: position_embedding_type must be absolute, "
            f"got {shown(kind)}"
        )
    fields: Fields = stack({**c, **MULTI_HEAD}) | _LAYER_NORMS | _positions(c, 512)
    fields |= {"norm_at": "post", "activation": plain(c), "lm_head": False}
    dim, types = fields["dim"], whole(c, "type_vocab_size", 2, least=0)
    return (
        fields
        | {"causal": flag(c, "is_decoder")}
        | extras(
            ("token types", types * dim), ("embedding norm", 2 * dim), ("pooler", dim * dim + dim)
        )
    )


def distilbert(c: Config) -> Fields:
    fields = bert({**c, "type_vocab_size": 0, "is_decoder": None, "position_embedding_type": None})
    return fields | extras(("embedding norm", 2 * fields["dim"]))


def electra(c: Config) -> Fields:
    """Where its embeddings are narrower than the stack, they come in as vectors through a map."""
    if whole(c, "embedding_size", 128) != whole(c, "hidden_size"):
        return _narrow(c)
    fields = bert(c)
    pooled = ("pooler",)
    return fields | extras(*(pair for pair in fields["extras"] if pair[0] not in pooled))


def _narrow(c: Config) -> Fields:
    """Embeddings of another width, and a map to that of the stack."""
    fields, width = bert(c), whole(c, "embedding_size", 128)
    types = whole(c, "type_vocab_size", 2, least=0)
    rows = fields["vocab_size"] + types + fields["num_positions"]
    fields |= {"vocab_size": 0, "lm_head": True, "input_dim": width}
    fields |= {"positions": "none", "num_positions": 0}
    return fields | extras(("narrow embeddings", rows * width), ("embedding norm", 2 * width))


def albert(c: Config) -> Fields:
    depth, groups = whole(c, "num_hidden_layers"), whole(c, "num_hidden_groups", 1)
    inner = whole(c, "inner_group_num", 1)
    if depth != groups or inner != 1:
        raise UsageError(
            f"layers that share weights cannot be expressed: an albert of {depth} layers has the "
            f"parameters of {groups * inner}; num_hidden_layers {groups} gives those, and "
            f"{depth // groups} times its FLOPs are the model's"
        )
    fields = _narrow(c)  # the map is there even where the widths are equal
    dim = fields["dim"]
    return fields | extras(*fields["extras"], ("pooler", dim * dim + dim))


def modernbert(c: Config) -> Fields:
    """The norm of the embeddings is counted as the one before attention that the first layer does
    not have."""
    every = whole(c, "global_attn_every_n_layers", 3)
    kinds = kinds_of(c, lambda i: LAYER_TYPES[i % every > 0], LAYER_TYPES)
    reach = whole(c, "local_attention", 128) // 2 + 1  # half of it to each side, and the own key
    bias = flag(c, "attention_bias")
    fields: Fields = stack({**c, **MULTI_HEAD}) | {"norm_at": "pre", "lm_head": False}
    fields |= {"norm": "layer" if flag(c, "norm_bias") else "layer-nobias"}
    fields |= {"qkv_bias": bias, "out_bias": bias, "ffn_bias": flag(c, "mlp_bias")}
    fields |= {"windows": tiled([reach if kind == LAYER_TYPES[1] else 0 for kind in kinds])}
    fields |= rotary({"rope_theta": c.get("global_rope_theta", 160_000.0), **c}, fields["head_dim"])
    return fields | {"activation": activation(c, "hidden_activation", "gelu", GATED)}


def clip_text(c: Config) -> Fields:
    fields = siglip_text(c) | {"causal": True}
    return fields | extras()


def siglip_text(c: Config) -> Fields:
    fields: Fields = stack({**c, **MULTI_HEAD}) | _LAYER_NORMS | _positions(c, 64)
    fields |= {"norm_at": "pre", "activation": plain(c), "lm_head": False}
    dim, width = fields["dim"], optional(c, "projection_size")
    return fields | extras(("projection", (dim + 1) * (dim if width is None else width)))


# ---- images


def _patches(c: Config) -> tuple[int, int, int]:
    """How many patches an image has, its numbers in one, and the size of one."""
    image, patch = pair(c, "image_size", 224), pair(c, "patch_size", 16)
    rows, columns = image[0] // patch[0], image[1] // patch[1]
    return rows * columns, whole(c, "num_channels", 3) * patch[0] * patch[1], patch[0]


def _seeing(c: Config, tokens: int, *more: tuple[str, int], patch_bias: bool = True) -> Fields:
    """A stack over patches and a few tokens of its own, layer norms first."""
    patches, pixels, _ = _patches(c)
    fields: Fields = stack({**c, **MULTI_HEAD, "vocab_size": 0}) | _LAYER_NORMS
    fields |= {"norm_at": "pre", "activation": plain(c)}
    fields |= {"positions": "additive", "num_positions": patches + tokens}
    dim = fields["dim"]
    own = (("class token", tokens * dim),) if tokens else ()
    return fields | extras(("patch embedding", (pixels + patch_bias) * dim), *own, *more)


def vit(c: Config) -> Fields:
    names, dim = c.get("id2label"), whole(c, "hidden_size")
    labels = len(names) if isinstance(names, Mapping) else whole(c, "num_labels", 2, least=0)
    fields = _seeing({**c, **_own_head_dim(c)}, 1, ("classifier", (dim + 1) * labels))
    return fields | _own_head_dim(c) | {"qkv_bias": flag(c, "qkv_bias", True)}


def _own_head_dim(c: Config) -> Fields:
    return {} if c.get("head_dim") is None else {"head_dim": whole(c, "head_dim")}


def deit(c: Config) -> Fields:
    dim = whole(c, "hidden_size")
    pooled = dim if c.get("pooler_output_size") is None else whole(c, "pooler_output_size")
    fields = _seeing(c, 2, ("pooler", (dim + 1) * pooled))
    return fields | {"qkv_bias": flag(c, "qkv_bias", True)}


def dinov2(c: Config) -> Fields:
    return _dinov2(c, 0)


def dinov2_with_registers(c: Config) -> Fields:
    return _dinov2(c, whole(c, "num_register_tokens", 4, least=0))


def _dinov2(c: Config, registers: int) -> Fields:
    dim = whole(c, "hidden_size")
    ratio = whole(c, "mlp_ratio", 4)
    masked = dim if flag(c, "use_mask_token", True) else 0
    fields = _seeing(
        {**c, "intermediate_size": ratio * dim},
        1,
        ("mask token", masked),
        ("registers", registers * dim),
        ("layer scale", 2 * dim * whole(c, "num_hidden_layers")),
    )
    fields |= {"qkv_bias": flag(c, "qkv_bias", True)}
    if flag(c, "use_swiglu_ffn"):
        fields |= {"activation": "swiglu", "ffn_dim": (ratio * dim * 2 // 3 + 7) // 8 * 8}
    return fields


def clip_vision(c: Config) -> Fields:
    dim = whole(c, "hidden_size")
    return _seeing(c, 1, ("norm before the layers", 2 * dim), patch_bias=False)


def siglip_vision(c: Config) -> Fields:
    """Its pooling is a layer of attention with one learned query."""
    dim, width = whole(c, "hidden_size"), whole(c, "intermediate_size")
    head = dim + 4 * (dim * dim + dim) + 2 * dim + (2 * dim * width + width + dim)
    pooled = head if flag(c, "vision_use_head", True) else 0
    return _seeing(c, 0, ("pooling layer", pooled))
