"""Runs of headwise as Hugging Face folders, layer by layer; which tensor is which says
`diagnose.model_weights`, on the names and sizes of the model that transformers makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.converting.formats import Layers, NewHeads, Output
from headwise.converting.writing import NAMES, made, write_model
from headwise.converting.writing import Piece as Written
from headwise.diagnose.attention_weights import from_attention
from headwise.diagnose.checkpoints import Checkpoint
from headwise.diagnose.model_weights import Piece, plan_of
from headwise.errors import UsageError, one_line
from headwise.planning.exports import hf_config
from headwise.shape import Shape

EPS = 1e-6  # of our norms
LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "deepseek_v3")


def public_of_run(checkpoint: Checkpoint, target: Shape) -> Output:
    """How a run is written for transformers; refused where no family has its shape."""
    run = json.loads(checkpoint.source.about["run"])
    if target.latent:  # the family has both biases or none; those of outputs are zero
        target = target.replace(out_bias=True)
    config = _config(target, run.get("length"))
    like = _like(config)

    def write(folder: Path, new: Callable[[int], NewHeads]) -> None:
        pieces = list(_pieces(checkpoint, target, new, config, like))
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


def _like(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The names and sizes of the tensors of transformers' model, without numbers."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UsageError(f"--as hf takes names from transformers: {one_line(error)}") from None
    known = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known, dtype=torch.float32)
    state = dict(model.state_dict())
    if known.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


def _pieces(
    checkpoint: Checkpoint,
    target: Shape,
    new: Callable[[int], NewHeads],
    config: Mapping[str, Any],
    like: Mapping[str, Tensor],
) -> Iterator[Written]:
    """Every tensor of theirs, from those of ours."""
    assert checkpoint.shape is not None
    plan = plan_of(config, like)
    if plan.rest:
        raise UsageError(f"{', '.join(plan.rest[:3])} have no place in a run of headwise")
    source = checkpoint.source
    stored = {name.removeprefix("weights."): name for name in source.entries}
    layers = Layers(checkpoint, new, checkpoint.shape.scale / target.scale)
    last: tuple[int, dict[str, Tensor]] = -1, {}

    def part_of(i: int, part: str) -> Callable[[], Tensor]:
        def get() -> Tensor:
            nonlocal last
            if last[0] != i:
                prefix, named, layout = plan.layers[i]
                own = dict(layers.parts(i))
                if target.out_bias:
                    name = stored.get(f"{prefix}out_bias")
                    own["out_bias"] = (
                        torch.zeros(1, target.dim) if name is None else source.read(name)
                    )
                wanted = {part: like[name] for part, name in named.parts.items()}
                last = i, from_attention(own, layout, target.layer(i), wanted)
            return last[1][part]

        return get

    def whole(piece: Piece, name: str) -> Callable[[], Tensor]:
        return lambda: piece.to_theirs(source.read(stored[piece.ours]), like)[name]

    getters = {
        name: part_of(i, part)
        for i, (_, named, _) in enumerate(plan.layers)
        for part, name in named.parts.items()
    }
    getters |= {name: whole(piece, name) for piece in plan.pieces for name in piece.theirs}
    for name, t in like.items():
        yield made(name, NAMES[t.dtype], tuple(t.shape), getters[name])
