"""Runs of headwise as Hugging Face folders: Llama's names (also Mistral's, Qwen's), and GPT-2's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.converting.formats import Layers, NewHeads, Output
from headwise.converting.writing import Piece, copied, made, write_model
from headwise.diagnose.checkpoints import Checkpoint
from headwise.errors import UsageError
from headwise.planning.exports import hf_config
from headwise.shape import Shape

EPS = 1e-6  # of our norms
LLAMAS = ("llama", "mistral", "qwen2", "qwen3")

# part of a block of ours -> that of the other names; what a matrix is cut into stands in order
_LLAMA = {
    "norm1.weight": ["input_layernorm.weight"],
    "norm2.weight": ["post_attention_layernorm.weight"],
    "attention.qkv.weight": ["self_attn.q_proj.weight", "self_attn.k_proj.weight",
                             "self_attn.v_proj.weight"],
    "attention.qkv.bias": ["self_attn.q_proj.bias", "self_attn.k_proj.bias",
                           "self_attn.v_proj.bias"],
    "attention.out.weight": ["self_attn.o_proj.weight"],
    "attention.q_norm.weight": ["self_attn.q_norm.weight"],
    "attention.k_norm.weight": ["self_attn.k_norm.weight"],
    "feed.up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "feed.down.weight": ["mlp.down_proj.weight"],
}  # fmt: skip
_LLAMA_ENDS = {
    "embedding": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head": "lm_head.weight",
}
_GPT2 = {
    "norm1.weight": ["ln_1.weight"],
    "norm1.bias": ["ln_1.bias"],
    "norm2.weight": ["ln_2.weight"],
    "norm2.bias": ["ln_2.bias"],
    "attention.qkv.weight": ["attn.c_attn.weight"],
    "attention.qkv.bias": ["attn.c_attn.bias"],
    "attention.out.weight": ["attn.c_proj.weight"],
    "attention.out_bias": ["attn.c_proj.bias"],
    "feed.up.weight": ["mlp.c_fc.weight"],
    "feed.up.bias": ["mlp.c_fc.bias"],
    "feed.down.weight": ["mlp.c_proj.weight"],
    "feed.down.bias": ["mlp.c_proj.bias"],
}
_GPT2_ENDS = {
    "embedding": "transformer.wte.weight",
    "positions": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
    "head": "lm_head.weight",
}


def public_of_run(checkpoint: Checkpoint, target: Shape) -> Output:
    """How a run is written for transformers; refused where no family has its shape."""
    run = json.loads(checkpoint.source.about["run"])
    config = _config(target, run.get("length"))
    family = config["model_type"]
    assert checkpoint.shape is not None
    scale = checkpoint.shape.scale / target.scale

    def write(folder: Path, new: Callable[[int], NewHeads]) -> None:
        pieces = list(_pieces(checkpoint, target, new, scale, family == "gpt2"))
        write_model(folder, pieces, {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    return Output(name="hf", shape=target, write=write)


def _config(target: Shape, length: Any) -> dict[str, Any]:
    """The config of the family that is the same function, its eps ours."""
    config = hf_config(target, length if type(length) is int else 2048)
    family = config["model_type"]
    if family not in (*LLAMAS, "gpt2"):
        raise UsageError(f"a run of headwise becomes {', '.join(LLAMAS)} or gpt2; this shape "
                         f"would be {family}")  # fmt: skip
    config["torch_dtype"] = "float32"
    if family == "gpt2":
        # Ours is the exact function, where GPT-2 took an approximation.
        exact = {"gelu_new": "gelu"}.get(config["activation_function"])
        config |= {"activation_function": exact or config["activation_function"]}
        return config | {"layer_norm_epsilon": EPS}
    return config | {"rms_norm_eps": EPS}


def _pieces(
    checkpoint: Checkpoint,
    target: Shape,
    new: Callable[[int], NewHeads],
    scale: float,
    gpt2: bool,
) -> Iterator[Piece]:
    from headwise.model.transformer import build

    with torch.device("meta"):
        wanted = {name: tuple(p.shape) for name, p in build(target).named_parameters()}
    source = checkpoint.source
    stored = {name.removeprefix("weights."): name for name in source.entries}
    layers = Layers(checkpoint, new, scale)
    inner, ends = (_GPT2, _GPT2_ENDS) if gpt2 else (_LLAMA, _LLAMA_ENDS)
    before = "transformer.h" if gpt2 else "model.layers"
    H, K = target.num_heads, target.num_kv_heads
    rows = [H * target.head_dim, K * target.head_dim, K * target.v_head_dim]
    for name, shape in wanted.items():
        words = name.split(".")
        if words[0] != "blocks":
            yield copied(source, stored[name], ends[name])
            continue
        i, rest = int(words[1]), ".".join(words[2:])
        if rest not in inner:
            raise UsageError(f"{rest} has no name in transformers")
        if words[2] == "attention" and rest != "attention.out_bias":
            get = layers.getter(i, rest.removeprefix("attention."))
        else:
            get = _reader(checkpoint, stored[name])
        new_names = inner[rest]
        sizes = rows if len(new_names) == 3 else [shape[0] // len(new_names)] * len(new_names)
        start = 0
        for new_name, size in zip(new_names, sizes, strict=True):
            own = (size, *shape[1:])
            if rest == "attention.out_bias":
                own = shape[1:]
            turned = gpt2 and len(shape) == 2 and rest != "attention.out_bias"
            own = own[::-1] if turned else own
            yield made(f"{before}.{i}.{new_name}", "F32", own, _cut(get, start, size, turned, own))
            start += size


def _reader(checkpoint: Checkpoint, name: str) -> Callable[[], Tensor]:
    return lambda: checkpoint.source.read(name)


def _cut(
    get: Callable[[], Tensor], start: int, size: int, turned: bool, shape: tuple[int, ...]
) -> Callable[[], Tensor]:
    """Some rows of a tensor, turned where the other side has inputs first."""

    def part() -> Tensor:
        rows = get()[start : start + size]
        return rows.T if turned else rows.reshape(shape)

    return part
