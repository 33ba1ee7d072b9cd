"""A shape as the settings of other projects: a Hugging Face config.json, and the arguments of
Megatron-LM, torchtitan and nanochat. Standard library only.

Each form is refused for what it has no setting for, with the field. A config.json is read back
before it is written: what `Shape.from_hf` makes of it must be the shape itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headwise.errors import UsageError
from headwise.shape import Shape

Config = dict[str, Any]
ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "gelu": "gelu_new"}
ACTIVATIONS |= {"relu": "relu", "relu2": "relu2"}
WORDS = {"gelu": "gelu", "relu": "relu", "relu2": "relu2"}


# ---- Hugging Face


def hf_config(shape: Shape, context: int = 2048) -> Config:
    """The config.json of the first family that can say this shape; refused, with the field that
    none has.

    >>> shape = Shape(dim=64, depth=2, num_heads=2, num_kv_heads=1, head_dim=48, ffn_dim=128,
    ...               qk_rope_head_dim=48, activation="swiglu", causal=True, vocab_size=100)
    >>> config = hf_config(shape)
    >>> config["model_type"], config["head_dim"], Shape.from_hf(config) == shape
    ('llama', 48, True)
    """
    best: tuple[int, str, list[str]] | None = None
    for name, make in FAMILIES.items():
        config = {"model_type": name, **make(shape, context)}
        try:
            differing = _differing(Shape.from_hf(config), shape)
        except UsageError:
            continue
        if not differing:
            return {"architectures": [ARCHITECTURES[name]], **config, "torch_dtype": "bfloat16"}
        if best is None or len(differing) < best[0]:
            best = len(differing), name, differing
    nearest = f"; the nearest, {best[1]}, differs in {', '.join(best[2])}" if best else ""
    raise UsageError(f"no Hugging Face family has a config for this shape{nearest}")


def _differing(made: Shape, shape: Shape) -> list[str]:
    """The fields in which two shapes differ, the wanted value beside each."""
    pairs = (
        (f.name, getattr(made, f.name), getattr(shape, f.name)) for f in dataclasses.fields(shape)
    )
    return [f"{name} (this shape has {b!r})" for name, a, b in pairs if a != b]


def _decoder(s: Shape, context: int) -> Config:
    """The names that most decoders share."""
    return {
        "vocab_size": s.vocab_size,
        "hidden_size": s.dim,
        "intermediate_size": s.ffn_dim,
        "num_hidden_layers": s.depth,
        "num_attention_heads": s.num_heads,
        "num_key_value_heads": s.num_kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": ACTIVATIONS[s.activation],
        "max_position_embeddings": max(context, s.num_positions),
        "rope_theta": s.rope_theta,
        "tie_word_embeddings": s.tied,
    }


def _llama(s: Shape, context: int) -> Config:
    return _decoder(s, context) | {"attention_bias": s.qkv_bias, "mlp_bias": s.ffn_bias}


def _mistral(s: Shape, context: int) -> Config:
    return _decoder(s, context) | {"sliding_window": s.windows[0] or None}


def _layer_types(s: Shape) -> Config:
    windows = {w for w in s.windows if w}
    kinds = ["sliding_attention" if s.window(i) else "full_attention" for i in range(s.depth)]
    return {"sliding_window": max(windows), "layer_types": kinds} if windows else {}


def _qwen(s: Shape, context: int) -> Config:
    types = _layer_types(s)
    sliding = {"use_sliding_window": bool(types)}
    return _decoder(s, context) | {"attention_bias": s.qkv_bias} | sliding | types


def _gemma(s: Shape, context: int) -> Config:
    return _decoder(s, context) | {"attention_bias": s.qkv_bias}


def _gemma3(s: Shape, context: int) -> Config:
    scale = s.head_dim if s.logit_scale is None else round(s.logit_scale**-2, 6)
    types = _layer_types(s) or {"layer_types": ["full_attention"] * s.depth}
    more = {"query_pre_attn_scalar": scale, "hidden_activation": ACTIVATIONS[s.activation]}
    return _decoder(s, context) | {"attention_bias": s.qkv_bias} | types | more


def _partial(s: Shape, context: int) -> Config:
    share = s.qk_rope_head_dim / s.head_dim
    return _decoder(s, context) | {"partial_rotary_factor": share}


def _deepseek(s: Shape, context: int) -> Config:
    config = _decoder(s, context) | {"attention_bias": s.qkv_bias}
    del config["head_dim"]
    return config | {
        "kv_lora_rank": s.kv_lora_rank,
        "q_lora_rank": s.q_lora_rank or None,
        "qk_rope_head_dim": s.qk_rope_head_dim,
        "rope_interleave": s.rope_interleaved,
        "qk_nope_head_dim": s.head_dim - s.qk_rope_head_dim,
        "v_head_dim": s.v_head_dim,
        "first_k_dense_replace": s.depth,  # no layer has experts
    }


def _gpt2(s: Shape, context: int) -> Config:
    return {
        "vocab_size": s.vocab_size,
        "n_embd": s.dim,
        "n_layer": s.depth,
        "n_head": s.num_heads,
        "n_inner": s.ffn_dim,
        "n_positions": s.num_positions or context,
        "activation_function": ACTIVATIONS[s.activation],
        "tie_word_embeddings": s.tied,
    }


def _experts(s: Shape, context: int) -> Config:
    return _decoder(s, context) | {
        "intermediate_size": s.expert_ffn_dim,
        "num_local_experts": s.num_experts,
        "num_experts_per_tok": s.num_experts_per_tok,
        "sliding_window": s.windows[0] or None,
    }


def _qwen3_moe(s: Shape, context: int) -> Config:
    return _qwen(s, context) | {
        "moe_intermediate_size": s.expert_ffn_dim,
        "num_experts": s.num_experts,
        "num_experts_per_tok": s.num_experts_per_tok,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


FAMILIES: dict[str, Callable[[Shape, int], Config]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen3": _qwen,
    "qwen2": _qwen,
    "gemma": _gemma,
    "gemma2": _gemma3,
    "gemma3_text": _gemma3,
    "phi3": _partial,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "nanochat": _llama,
    "mixtral": _experts,
    "qwen3_moe": _qwen3_moe,
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "nanochat": "NanoChatForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


# ---- arguments of trainers


def _needs(project: str, shape: Shape, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse a shape with the first field that a project has no setting for."""
    for name, values in allowed.items():
        if getattr(shape, name) not in values:
            choices = " or ".join(map(repr, values))
            raise UsageError(
                f"{project} needs {name} {choices}, this shape has {getattr(shape, name)!r}"
            )


PLAIN_DECODER: dict[str, tuple[Any, ...]] = {
    "causal": (True,),
    "layers": ((),),
    "num_experts": (0,),
    "average": (1,),
    "positions": ("none",),
    "norm_at": ("pre",),
    "logit_scale": (None,),
    "max_logit": (None,),
    "shared_kv": (False,),
    "o_lora_rank": (0,),
    "attn_gate": ("none",),
    "sinks": (False,),
    "input_dim": (0,),
    "output_dim": (0,),
}


def megatron_arguments(shape: Shape, context: int = 2048) -> list[str]:
    """Megatron-LM's arguments of the model, a word each.

    >>> shape = Shape(dim=64, depth=2, num_heads=4, num_kv_heads=2, head_dim=32, ffn_dim=96,
    ...               qk_rope_head_dim=32, activation="swiglu", causal=True, vocab_size=128)
    >>> " ".join(megatron_arguments(shape)).partition(" --normalization")[0][-44:]
    '--group-query-attention --num-query-groups 2'
    """
    s = shape
    _needs("Megatron-LM", s, PLAIN_DECODER | {"norm": ("rms", "layer"), "windows": ((0,),)})
    _needs("Megatron-LM", s, {"qk_norm": ("none", "head"), "out_bias": (s.ffn_bias,)})
    words: list[str | int] = ["--num-layers", s.depth, "--hidden-size", s.dim]
    words += ["--ffn-hidden-size", s.ffn_dim, "--num-attention-heads", s.num_heads]
    if s.latent:
        words += ["--multi-latent-attention", "--kv-lora-rank", s.kv_lora_rank]
        words += ["--q-lora-rank", s.q_lora_rank] if s.q_lora_rank else []
        words += ["--qk-head-dim", s.head_dim - s.qk_rope_head_dim]
        words += ["--qk-pos-emb-head-dim", s.qk_rope_head_dim, "--v-head-dim", s.v_head_dim]
    else:
        _needs("Megatron-LM without a latent", s, {"v_head_dim": (s.head_dim,)})
        words += ["--kv-channels", s.head_dim]
    if s.num_kv_heads != s.num_heads:
        words += ["--group-query-attention", "--num-query-groups", s.num_kv_heads]
    words += ["--normalization", "RMSNorm" if s.norm == "rms" else "LayerNorm"]
    flags = {"swiglu": ["--swiglu"], "relu2": ["--squared-relu"], "gelu": []}
    if s.activation not in flags:
        raise UsageError(f"Megatron-LM needs activation swiglu, relu2 or gelu, got {s.activation}")
    words += flags[s.activation]
    words += [] if s.ffn_bias else ["--disable-bias-linear"]
    words += ["--add-qkv-bias"] if s.qkv_bias and not s.ffn_bias else []
    words += ["--qk-layernorm"] if s.qk_norm == "head" else []
    words += [] if s.tied else ["--untie-embeddings-and-output-weights"]
    if s.qk_rope_head_dim:
        words += ["--position-embedding-type", "rope", "--rotary-base", int(s.rope_theta)]
        words += ["--rotary-interleaved"] if s.rope_interleaved else []
        if not s.latent and s.qk_rope_head_dim != s.head_dim:
            words += ["--rotary-percent", s.qk_rope_head_dim / s.head_dim]  # type: ignore[list-item]
    else:
        words += ["--position-embedding-type", "none"]
    words += ["--vocab-size", s.vocab_size, "--make-vocab-size-divisible-by", 1]
    words += ["--seq-length", context, "--max-position-embeddings", context]
    return [str(word) for word in words]


def torchtitan_fields(shape: Shape, context: int = 2048) -> dict[str, Any]:
    """The fields of torchtitan's model arguments: its Qwen3's, which has free heads and a free
    feed-forward, or with a latent its DeepSeek-V3's."""
    s = shape
    same = {"windows": ((0,),), "activation": ("swiglu",), "norm": ("rms",), "qkv_bias": (False,)}
    same |= {"out_bias": (False,), "ffn_bias": (False,)}
    _needs("torchtitan", s, PLAIN_DECODER | same)
    fields = {
        "dim": s.dim,
        "n_layers": s.depth,
        "n_heads": s.num_heads,
        "vocab_size": s.vocab_size,
        "rope_theta": s.rope_theta,
        "max_seq_len": context,
    }
    if s.latent:
        _needs("torchtitan's DeepSeek-V3", s, {"tied": (False,), "qk_norm": ("none",)})
        return {"model": "deepseek_v3"} | fields | {
            "inter_dim": s.ffn_dim,
            "n_dense_layers": s.depth,
            "q_lora_rank": s.q_lora_rank,
            "kv_lora_rank": s.kv_lora_rank,
            "qk_nope_head_dim": s.head_dim - s.qk_rope_head_dim,
            "qk_rope_head_dim": s.qk_rope_head_dim,
            "v_head_dim": s.v_head_dim,
        }  # fmt: skip
    heads = {"v_head_dim": (s.head_dim,), "qk_rope_head_dim": (s.head_dim,)}
    _needs("torchtitan's Qwen3", s, heads | {"qk_norm": ("none", "head")})
    return {"model": "qwen3"} | fields | {
        "n_kv_heads": s.num_kv_heads,
        "head_dim": s.head_dim,
        "hidden_dim": s.ffn_dim,
        "qk_norm": s.qk_norm == "head",
        "enable_weight_tying": s.tied,
    }  # fmt: skip


def nanochat_arguments(shape: Shape, context: int = 2048) -> list[str]:
    """The arguments of nanochat's base_train by way of headwise.integrations.nanochat. Its norms,
    value embeddings and untied tables are its own; the sizes are the shape's."""
    s = shape
    own = {"activation": ("relu2",), "ffn_dim": (4 * s.dim,), "kv_lora_rank": (0,)}
    own |= {"windows": ((0,),), "qkv_bias": (False,), "ffn_bias": (False,)}
    _needs("nanochat", s, {**PLAIN_DECODER, "logit_scale": (s.logit_scale,), **own})
    # nanochat takes depth x aspect ratio, rounded up to whole heads of its own, as the width.
    aspect = s.dim // s.depth
    stock = next(
        (h for h in (128, 64, s.head_dim, s.dim)
         if s.dim % h == 0 and -(-s.depth * aspect // h) * h == s.dim), 0
    )  # fmt: skip
    if not stock or not aspect:
        raise UsageError(f"nanochat needs a dim of depth x aspect ratio, got {s.dim} at {s.depth}")
    words = ["--num-heads", s.num_heads, "--head-dim", s.head_dim, "--v-head-dim", s.v_head_dim]
    words += ["--num-kv-heads", s.num_kv_heads, "--", "-m", "scripts.base_train"]
    script = {"depth": s.depth, "aspect-ratio": aspect, "head-dim": stock, "max-seq-len": context}
    words += [f"--{name}={value}" for name, value in script.items()]
    return [*map(str, words), "--window-pattern=L"]


# ---- files


def written_files(shape: Shape, context: int = 2048) -> tuple[dict[str, str], dict[str, str]]:
    """The text of each file that this shape has, by name, and why the others are not there."""
    files, refused = {}, {}
    makers: dict[str, Callable[[], str]] = {
        "config.json": lambda: json.dumps(hf_config(shape, context), indent=2) + "\n",
        "megatron.txt": lambda: _lines(megatron_arguments(shape, context)),
        "torchtitan.json": lambda: json.dumps(torchtitan_fields(shape, context), indent=2) + "\n",
        "nanochat.txt": lambda: _lines(nanochat_arguments(shape, context)),
    }
    for name, make in makers.items():
        try:
            files[name] = make()
        except UsageError as error:
            refused[name] = str(error)
    if not files:
        raise UsageError(f"no project has settings for this shape: {refused['config.json']}")
    files["shape.json"] = json.dumps(shape.spec(), indent=2) + "\n"
    return files, refused


def _lines(words: list[str]) -> str:
    """Arguments as a file: an option and its value a line, as a shell takes them."""
    lines: list[str] = []
    for word in words:
        if word.startswith("-") or not lines or lines[-1] == "--":
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines) + "\n"


def write_settings(shape: Shape, folder: str | Path, context: int = 2048) -> dict[str, str]:
    """Write every form of a shape into a new or empty folder, all or nothing; returns why forms
    were left out, by file."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{str(folder)!r} must be a new or an empty folder")
    files, refused = written_files(shape, context)
    made = folder.with_name(f".{folder.name}.{os.getpid()}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    made.mkdir()
    try:
        for name, text in files.items():
            (made / name).write_text(text)
        if folder.exists():
            folder.rmdir()
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return refused
