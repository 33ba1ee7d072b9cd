"""Public model families by `model_type`, and what is said of those that a `Shape` does not
describe. Standard library only.

A family is one function, from its config to the fields of a `Shape` (decoders.py, gpts.py,
experts.py, encoders.py) or to its attention layers (hybrids.py), one line here, and one in
defaults.py.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

from headwise.configs import decoders, encoders, experts, gpts, hybrids
from headwise.configs.defaults import ALIASES, DEFAULTS
from headwise.configs.hybrids import Attention
from headwise.configs.nanochat import nanochat, nanochat_own
from headwise.configs.values import Config, Fields, is_nanochat
from headwise.configs.wrappers import NAMED_TEXT, inner_config, is_text_alone, is_wrapper, parts_of
from headwise.errors import UsageError, shown

PARTS = ("text", "vision", "attention")

FAMILIES: dict[str, Callable[[Config], Fields]] = {
    "apertus": decoders.apertus,
    "arcee": decoders.arcee,
    "biogpt": gpts.biogpt,
    "bloom": gpts.bloom,
    "codegen": decoders.gptj,
    "cohere": decoders.cohere,
    "cohere2": decoders.cohere2,
    "cwm": decoders.cwm,
    "ernie4_5": decoders.ernie4_5,
    "exaone4": decoders.exaone4,
    "falcon": gpts.falcon,
    "gemma": decoders.gemma,
    "gemma2": decoders.gemma2,
    "gemma3_text": decoders.gemma3_text,
    "glm": decoders.glm,
    "glm4": decoders.glm4,
    "glm4v_text": decoders.glm4v,
    "gpt2": gpts.gpt2,
    "gpt_bigcode": gpts.gpt_bigcode,
    "gpt_neo": gpts.gpt_neo,
    "gpt_neox": decoders.gpt_neox,
    "gptj": decoders.gptj,
    "granite": decoders.granite,
    "granite_swa": decoders.granite_swa,
    "helium": decoders.helium,
    "hunyuan_v1_dense": decoders.hunyuan,
    "hyperclovax": decoders.hyperclovax,
    "jais2": decoders.jais2,
    "llama": decoders.llama,
    "ministral": decoders.ministral,
    "ministral3": decoders.mistral,
    "mistral": decoders.mistral,
    "mpt": gpts.mpt,
    "nanochat": nanochat,
    "nemotron": decoders.nemotron,
    "olmo": decoders.olmo,
    "olmo2": decoders.olmo2,
    "olmo3": decoders.olmo3,
    "openai-gpt": gpts.openai_gpt,
    "opt": gpts.opt,
    "persimmon": decoders.persimmon,
    "phi": decoders.phi,
    "phi3": decoders.phi3,
    "qwen2": decoders.qwen2,
    "qwen2_5_vl_text": decoders.qwen2,
    "qwen2_vl_text": decoders.qwen2,
    "qwen3": decoders.qwen3,
    "qwen3_vl_text": decoders.qwen3_vl,
    "seed_oss": decoders.seed_oss,
    "smollm3": decoders.smollm3,
    "stablelm": decoders.stablelm,
    "starcoder2": decoders.starcoder2,
    "vaultgemma": decoders.vaultgemma,
    # ---- experts
    "dbrx": experts.dbrx,
    "deepseek_v2": experts.deepseek_v2,
    "deepseek_v3": experts.deepseek_v3,
    "dots1": experts.dots1,
    "ernie4_5_moe": experts.ernie4_5_moe,
    "exaone_moe": experts.exaone_moe,
    "flex_olmo": experts.flex_olmo,
    "glm4_moe": experts.glm4_moe,
    "glm4_moe_lite": experts.glm4_moe_lite,
    "glm4v_moe_text": experts.glm4_moe,
    "gpt_oss": experts.gpt_oss,
    "granitemoe": experts.granitemoe,
    "granitemoeshared": experts.granitemoe,
    "hunyuan_v1_moe": experts.hunyuan_moe,
    "kimi_k2": experts.deepseek_v3,
    "llama4_text": experts.llama4,
    "mimo_v2_flash": experts.mimo_v2,
    "minimax_m2": experts.minimax_m2,
    "mistral4": experts.deepseek_v3,
    "mixtral": experts.mixtral,
    "olmoe": experts.olmoe,
    "phimoe": experts.phimoe,
    "qwen2_moe": experts.qwen2_moe,
    "qwen3_moe": experts.qwen3_moe,
    "qwen3_vl_moe_text": experts.qwen3_moe,
    "solar_open": experts.solar_open,
    "step3p5": experts.step3p7,
    "step3p7_text": experts.step3p7,
    # ---- encoders
    "albert": encoders.albert,
    "bert": encoders.bert,
    "camembert": encoders.bert,
    "clip_text_model": encoders.clip_text,
    "clip_vision_model": encoders.clip_vision,
    "deit": encoders.deit,
    "dinov2": encoders.dinov2,
    "dinov2_with_registers": encoders.dinov2_with_registers,
    "distilbert": encoders.distilbert,
    "electra": encoders.electra,
    "modernbert": encoders.modernbert,
    "roberta": encoders.bert,
    "siglip_text_model": encoders.siglip_text,
    "siglip_vision_model": encoders.siglip_vision,
    "vit": encoders.vit,
    "xlm-roberta": encoders.bert,
}

# Of these a Shape describes the attention layers alone.
HYBRIDS: dict[str, Callable[[Config], Attention]] = {
    "bamba": hybrids.bamba,
    "deepseek_v32": hybrids.indexed,
    "falcon_h1": hybrids.falcon_h1,
    "gemma3n_text": hybrids.gemma3n,
    "gemma4_text": hybrids.gemma4,
    "glm5_next_text": hybrids.glm5_next,
    "glm_moe_dsa": hybrids.indexed,
    "granitemoehybrid": hybrids.granitemoehybrid,
    "jamba": hybrids.jamba,
    "kimi_linear": hybrids.kimi_linear,
    "lfm2": hybrids.lfm2,
    "lfm2_moe": hybrids.lfm2,
    "minimax": hybrids.minimax,
    "muse_spark_text": hybrids.muse_spark,
    "nemotron_h": hybrids.nemotron_h,
    "olmo_hybrid": hybrids.olmo_hybrid,
    "qwen3_5_moe_text": hybrids.qwen3_next,
    "qwen3_5_text": hybrids.qwen3_next,
    "qwen3_next": hybrids.qwen3_next,
}

# Families in which neighbouring coordinates rotate together.
INTERLEAVED = (
    *("gptj", "codegen", "cohere", "cohere2", "glm", "glm4", "glm4v_text", "ernie4_5"),
    *("ernie4_5_moe", "helium", "llama4_text", "deepseek_v2", "deepseek_v3", "kimi_k2"),
    *("mistral4", "kimi_linear", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa", "glm5_next_text"),
)

NOT_EXPRESSED = {
    "deepseek_v4": (
        "keys and values of runs of tokens are compressed into one, and four streams are mixed "
        "around every branch"
    ),
    "mamba": "state spaces, and no attention",
    "mamba2": "state spaces, and no attention",
    "mllama": "cross-attention to the image between the layers of text",
    "mllama_text_model": "cross-attention to the image between the layers of text",
    "rwkv": "linear recurrences, and no attention",
    "zamba2": "one attention block with shared weights between state spaces",
    "xcit": (
        "attention over channels, convolutions between patches, a gain on every branch, "
        "class-attention layers"
    ),
    "tnt": "a second stack over the pixels of each patch, folded into the outer one in every layer",
    "davit": (
        "four stages of different widths, attention over channels in every other block, "
        "convolutions for positions"
    ),
}

_REFUSED = {
    "add_cross_attention": "cross-attention",
    "per_layer_config": "sizes that differ between layers",
}
_BY_LAYER = ("gemma4_text", "step3p5", "step3p7_text")  # families that read per_layer_config
_TWO_STACKS = ("encoder_layers", "num_decoder_layers")  # keys of encoder-decoders


def to_shape_fields(config: Config, part: str | None = None) -> Fields:
    """The keyword arguments of the `Shape` that a config describes, or of a part of it."""
    try:
        return _fields_of(config, part)
    except UsageError as e:
        raise UsageError(_as_typed(str(e), config)) from None


def _as_typed(message: str, config: Config) -> str:
    """A message about keys in the names under which the config has them."""
    for typed, name in ALIASES.items():
        if typed in config:
            message = re.sub(rf"\b{name}\b", typed, message)
    return message


def _fields_of(config: Config, part: str | None) -> Fields:
    if part is not None and part not in PARTS:
        raise UsageError(f"unknown part {shown(part)}; choices: {', '.join(PARTS)}")
    name = config.get("model_type")
    if name is None and is_nanochat(config):
        return _whole_or_attention(nanochat_own(config), part, "nanochat")
    if not isinstance(name, str):
        raise UsageError(f"unknown model_type {shown(name)}; {known_families('')}")
    if name in NOT_EXPRESSED:
        raise UsageError(f"{name} cannot be expressed: {NOT_EXPRESSED[name]}")
    if is_wrapper(config):
        return _of_wrapper(config, name, part)
    _refuse_two_stacks(config, name)
    for key, what in _REFUSED.items():
        if config.get(key) and not (key == "per_layer_config" and name in _BY_LAYER):
            raise UsageError(
                f"{what} cannot be expressed: {key} must be false or left out, got "
                f"{shown(config[key])}"
            )
    if part in ("text", "vision"):
        raise UsageError(
            f"part {part!r} is of a model that wraps another, a {name} is one stack: leave part out"
        )
    if name in HYBRIDS:
        found = HYBRIDS[name](with_defaults(config, name))
        found.fields.update(_pairs(config, name, found.fields))
        return _of_hybrid(found, name, part)
    if name not in FAMILIES:
        raise UsageError(f"unknown model_type {name!r}{_kin(config)}; {known_families(name)}")
    fields = FAMILIES[name](with_defaults(config, name))
    fields |= _pairs(config, name, fields)
    if fields.get("causal") and config.get("is_causal") is False:
        raise UsageError(
            f"a {name} without its causal mask cannot be expressed: is_causal must be true or "
            "left out, got False"
        )
    return _whole_or_attention(fields, part, name)


def _pairs(config: Config, name: str, fields: Fields) -> Fields:
    """How rotary coordinates pair, where neighbours do; DeepSeek's kin may say otherwise."""
    if not fields.get("qk_rope_head_dim") or config.get("rope_interleave") is False:
        return {}
    return {"rope_interleaved": True} if name in INTERLEAVED else {}


def with_defaults(config: Config, name: str) -> Config:
    """The config under the names that this package reads, with what it leaves out."""
    own = {**config, **{ALIASES[key]: config[key] for key in config if key in ALIASES}}
    return {**DEFAULTS.get(name, {}), **own}


def _whole_or_attention(fields: Fields, part: str | None, name: str) -> Fields:
    if part == "attention":
        return hybrids.alone(fields, range(fields["depth"]))
    if part is not None:
        raise UsageError(f"part {part!r} is of a wrapper, a {name} is one stack: leave part out")
    return fields


def _of_hybrid(found: Attention, name: str, part: str | None) -> Fields:
    if not found.missing and part is None:
        return found.fields
    if not found.where:
        raise UsageError(f"a {name} without attention layers is no shape: {found.missing}")
    if part is None:
        count = len(found.where)
        rest = f"the {count} with attention" if count < found.fields["depth"] else "its attention"
        raise UsageError(
            f"a {name} is not one shape: {found.missing}, which a Shape does not describe; "
            f"part='attention' (--part attention) gives {rest}"
        )
    return hybrids.alone(found.fields, found.where)


# ---- models around models


def _of_wrapper(config: Config, name: str, part: str | None) -> Fields:
    parts = parts_of(config)
    if part is None and not is_text_alone(config):
        ways = " or ".join(f"part={one!r} (--part {one})" for one in parts)
        raise UsageError(f"a {name} is several models in one: {ways} takes one of them alone")
    kind = "vision" if part == "vision" else "text"
    if kind not in parts:
        raise UsageError(f"a {name} has no part {kind!r}; choices: {', '.join(parts)}, attention")
    inner = inner_config(config, kind)
    if inner.get("model_type") is None:
        known = {**FAMILIES, **HYBRIDS, **NOT_EXPRESSED}
        guesses = (NAMED_TEXT.get(name), f"{name}_{kind}", f"{name}_{kind}_model")
        found = next((guess for guess in guesses if guess in known), None)
        if found is None:
            rule = f"the {kind}_config of a {name} must have a model_type, got none"
            raise UsageError(f"{rule}; {known_families('')}")
        inner = {**inner, "model_type": found}
    return _fields_of(inner, "attention" if part == "attention" else None)


def _refuse_two_stacks(config: Config, name: str) -> None:
    two = config.get("is_encoder_decoder")
    if not two and (name in FAMILIES or not any(key in config for key in _TWO_STACKS)):
        return
    sizes = {
        "dim": config.get("d_model", config.get("hidden_size")),
        "depth": config.get("encoder_layers", config.get("num_layers")),
        "num_heads": config.get("encoder_attention_heads", config.get("num_heads")),
        "head_dim": config.get("d_kv"),
        "ffn_dim": config.get("encoder_ffn_dim", config.get("d_ff")),
    }
    given = ", ".join(f"{k}={v}" for k, v in sizes.items() if isinstance(v, int))
    way = f"Shape({given}) has the sizes of its encoder" if given else "describe one stack by hand"
    raise UsageError(
        "an encoder-decoder cannot be expressed, its two stacks are not one shape: "
        f"is_encoder_decoder must be false or left out, got {shown(two)}; {way}"
    )


# ---- names that are not known


def known_families(name: str) -> str:
    """The families whose names are near in spelling, and where all of them are."""
    known = sorted({**FAMILIES, **HYBRIDS})
    close = difflib.get_close_matches(name[:80], known, n=3, cutoff=0.85)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}choices: the {len(known)} of headwise.configs.FAMILIES and HYBRIDS"


def _kin(config: Config) -> str:
    """The nearest way for a config with Llama's keys."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if not all(key in config for key in keys):
        return ""
    return " (where its layers are Llama's, model_type llama counts it)"


def text_of(config: Mapping[str, Any]) -> str | None:
    """What to say where a config wraps a text model and no part was asked for; None elsewhere."""
    name = config.get("model_type")
    if not isinstance(name, str) or name in NOT_EXPRESSED or not is_wrapper(config):
        return None
    if is_text_alone(config):
        return None
    return f"the text part of a {name} (--part text): its other parts are not counted"
