"""Models around models: where a config keeps those of its parts. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

from headwise.configs.values import Config
from headwise.errors import UsageError, shown

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
_VISION = ("vision_config",)
# What the text model is where its config does not say so.
NAMED_TEXT = {
    "aya_vision": "cohere2",
    "clip": "clip_text_model",
    "gemma3": "gemma3_text",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "kimi_k25": "deepseek_v3",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "paligemma": "gemma",
    "qwen2_5_omni": "qwen2_5_vl_text",
    "siglip": "siglip_text_model",
    "smolvlm": "llama",
    "video_llava": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}
# Wrappers whose older configs keep the text model's sizes at the top.
_FLAT = ("qwen2_vl", "qwen2_5_vl")
_ALONE = "gemma3"  # without a vision_config it is its text model


def is_wrapper(config: Config) -> bool:
    name = config.get("model_type")
    flat = name in _FLAT and "hidden_size" in config
    return flat or name == _ALONE or any(isinstance(config.get(key), Mapping) for key in _TEXT)


def parts_of(config: Config) -> tuple[str, ...]:
    """The parts that can be asked for."""
    seeing = any(isinstance(config.get(key), Mapping) for key in _VISION)
    return ("text", "vision") if seeing else ("text",)


def is_text_alone(config: Config) -> bool:
    """Whether there is nothing around the text model."""
    return config.get("model_type") == _ALONE and parts_of(config) == ("text",)


def inner_config(config: Config, part: str) -> Config:
    """The config of a part. A tie of the wrapper's own goes before that of its text model."""
    if part == "vision":
        return _mapping(config, "vision_config")
    key = next((key for key in _TEXT if isinstance(config.get(key), Mapping)), None)
    if key == "thinker_config":
        return inner_config(_mapping(config, key), part)
    if key is None and config.get("model_type") in _FLAT and "hidden_size" in config:
        sizes = {k: v for k, v in config.items() if not k.endswith("_config")}
        return {**sizes, "model_type": f"{config['model_type']}_text"}
    inner = _mapping(config, key or "text_config")
    if config.get("tie_word_embeddings") is not None:
        inner = {**inner, "tie_word_embeddings": config["tie_word_embeddings"]}
    return inner


def _mapping(config: Config, name: str) -> Config:
    value = config.get(name)
    if not isinstance(value, Mapping):
        raise UsageError(
            f"{name} of a {config.get('model_type')} must be a mapping, got {shown(value)}"
        )
    return value
