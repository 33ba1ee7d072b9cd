"""Rows as settings of other projects, read back to the same sizes."""

import argparse
import json
import random
from pathlib import Path

import pytest
import torch

from headwise.errors import UsageError
from headwise.planning.exports import (
    FAMILIES,
    hf_config,
    megatron_arguments,
    nanochat_arguments,
    torchtitan_fields,
    write_settings,
)
from headwise.planning.plan import plan
from headwise.shape import Shape

BASE = {"dim": 96, "depth": 3, "ffn_dim": 160, "causal": True, "vocab_size": 211}
GROUPED = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "qk_rope_head_dim": 32}
LLAMA = {**BASE, **GROUPED, "activation": "swiglu"}
LATENT = {"num_heads": 6, "head_dim": 40, "v_head_dim": 24, "qk_rope_head_dim": 16}
LATENT |= {"kv_lora_rank": 48, "activation": "swiglu", "tied": False}
GEMMA = {"activation": "geglu", "norm_at": "sandwich"}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "expert_ffn_dim": 96, "qk_norm": "head"}

SAID = {
    "llama": LLAMA,
    "llama untied": {**LLAMA, "tied": False, "rope_theta": 5e5},
    "mistral": {**LLAMA, "windows": (64,)},
    "qwen3": {**LLAMA, "qk_norm": "head"},
    "qwen3 windows": {**LLAMA, "qk_norm": "head", "windows": (64, 64, 0)},
    "qwen2": {**LLAMA, "qkv_bias": True},
    "gemma": {**LLAMA, "activation": "geglu"},
    "gemma3_text": {**LLAMA, **GEMMA, "qk_norm": "head", "windows": (64, 64, 0)},
    "deepseek_v3": {**BASE, **LATENT},
    "deepseek_v3 queries": {**BASE, **LATENT, "q_lora_rank": 56},
    "qwen3_moe": {**LLAMA, **EXPERTS},
}


@pytest.mark.parametrize("name", SAID)
def test_config_is_read_back_to_the_same_shape(name: str) -> None:
    shape = Shape.of(SAID[name])
    config = json.loads(json.dumps(hf_config(shape, 64)))
    assert config["model_type"] in FAMILIES
    again = Shape.from_hf(config)
    assert again == shape
    assert again.params == shape.params


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3", "gemma3_text", "qwen3_moe"])
def test_config_makes_a_model_of_as_many_parameters(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = Shape.of(SAID[name])
    config = hf_config(shape, 64)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert sum(p.numel() for p in model.parameters()) == shape.params


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"v_head_dim": 24}, "v_head_dim"),
        ({"norm": "scalar"}, "norm"),
        ({"average": 2}, "average"),
        ({"attn_gate": "value"}, "attn_gate"),
    ],
)
def test_config_of_what_no_family_has_names_the_field(changes: dict, field: str) -> None:
    with pytest.raises(UsageError, match=f"no Hugging Face family .* differs in {field}"):
        hf_config(Shape.of({**LLAMA, **changes}))


# ---- readers of arguments, as small as they can be


def read_megatron(words: list[str]) -> Shape:
    """The sizes that Megatron-LM's own parser gives these arguments."""
    known = argparse.ArgumentParser()
    for name in (
        *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "kv-channels"),
        *("num-query-groups", "kv-lora-rank", "q-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim"),
        *("v-head-dim", "rotary-base", "vocab-size", "make-vocab-size-divisible-by"),
        *("seq-length", "max-position-embeddings"),
    ):
        known.add_argument(f"--{name}", type=int)
    known.add_argument("--rotary-percent", type=float, default=1.0)
    known.add_argument("--normalization")
    known.add_argument("--position-embedding-type")
    for name in (
        *("multi-latent-attention", "group-query-attention", "swiglu", "squared-relu"),
        *("disable-bias-linear", "add-qkv-bias", "qk-layernorm"),
        "untie-embeddings-and-output-weights",
    ):
        known.add_argument(f"--{name}", action="store_true")
    a = known.parse_args(words)
    fields = {
        "dim": a.hidden_size,
        "depth": a.num_layers,
        "num_heads": a.num_attention_heads,
        "ffn_dim": a.ffn_hidden_size,
        "activation": "swiglu" if a.swiglu else "relu2" if a.squared_relu else "gelu",
        "norm": {"RMSNorm": "rms", "LayerNorm": "layer"}[a.normalization],
        "qk_norm": "head" if a.qk_layernorm else "none",
        "tied": not a.untie_embeddings_and_output_weights,
        "vocab_size": a.vocab_size,
        "causal": True,
        "qkv_bias": a.add_qkv_bias or not a.disable_bias_linear,
        "out_bias": not a.disable_bias_linear,
        "ffn_bias": not a.disable_bias_linear,
        "rope_theta": a.rotary_base or 10_000,
    }
    if a.multi_latent_attention:
        rope = a.qk_pos_emb_head_dim
        heads = {"head_dim": a.qk_head_dim + rope, "qk_rope_head_dim": rope}
        heads |= {"v_head_dim": a.v_head_dim, "kv_lora_rank": a.kv_lora_rank}
        return Shape.of({**fields, **heads, "q_lora_rank": a.q_lora_rank or 0})
    rope = int(a.kv_channels * a.rotary_percent) * (a.position_embedding_type == "rope")
    groups = a.num_query_groups if a.group_query_attention else a.num_attention_heads
    heads = {"head_dim": a.kv_channels, "qk_rope_head_dim": rope, "num_kv_heads": groups}
    return Shape.of({**fields, **heads})


MEGATRON = {
    **{name: SAID[name] for name in ("llama", "llama untied", "qwen3", "qwen2")},
    **{name: SAID[name] for name in ("deepseek_v3", "deepseek_v3 queries")},
    "no positions": {**LLAMA, "qk_rope_head_dim": 0, "num_kv_heads": 6},
    "part of a head": {**LLAMA, "qk_rope_head_dim": 16, "activation": "relu2"},
    "biases": {**LLAMA, "norm": "layer", "activation": "gelu", "qkv_bias": True,
               "out_bias": True, "ffn_bias": True},
}  # fmt: skip


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_arguments_are_read_back_to_the_same_shape(name: str) -> None:
    shape = Shape.of(MEGATRON[name])
    assert read_megatron(megatron_arguments(shape)) == shape


def read_torchtitan(fields: dict) -> Shape:
    f = dict(fields)
    common = {"dim": f["dim"], "depth": f["n_layers"], "num_heads": f["n_heads"], "causal": True}
    common |= {"vocab_size": f["vocab_size"], "rope_theta": f["rope_theta"], "activation": "swiglu"}
    if f["model"] == "deepseek_v3":
        rank = f["qk_nope_head_dim"] + f["qk_rope_head_dim"]
        names = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim")
        sizes = {"head_dim": rank, "ffn_dim": f["inter_dim"], "tied": False}
        return Shape.of({**common, **sizes, **{name: f[name] for name in names}})
    sizes = {"head_dim": f["head_dim"], "qk_rope_head_dim": f["head_dim"]}
    sizes |= {"num_kv_heads": f["n_kv_heads"], "ffn_dim": f["hidden_dim"]}
    norm = {"qk_norm": "head" if f["qk_norm"] else "none", "tied": f["enable_weight_tying"]}
    return Shape.of({**common, **sizes, **norm})


@pytest.mark.parametrize("name", ["llama", "llama untied", "qwen3", "deepseek_v3"])
def test_torchtitan_fields_are_read_back_to_the_same_shape(name: str) -> None:
    shape = Shape.of(SAID[name])
    assert read_torchtitan(torchtitan_fields(shape)) == shape


@pytest.mark.parametrize(("dim", "depth"), [(96, 3), (1280, 20), (768, 12), (640, 7)])
def test_nanochat_arguments_give_the_width_and_heads(dim: int, depth: int) -> None:
    from headwise.integrations.nanochat.command import parser

    fields = {**LLAMA, "dim": dim, "depth": depth, "activation": "relu2", "ffn_dim": 4 * dim}
    words = nanochat_arguments(Shape.of(fields), 64)
    dashes = words.index("--")
    heads = parser().parse_args(words[:dashes])
    assert (heads.num_heads, heads.num_kv_heads, heads.head_dim) == (6, 2, 32)
    assert words[dashes + 1 : dashes + 3] == ["-m", "scripts.base_train"]
    script = dict(word.removeprefix("--").split("=") for word in words[dashes + 3 :])
    # As nanochat's base_train: depth x aspect ratio, rounded up to whole heads of its own.
    base, head = int(script["depth"]) * int(script["aspect-ratio"]), int(script["head-dim"])
    assert -(-base // head) * head == dim
    assert int(script["depth"]) == depth


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (megatron_arguments, {"v_head_dim": 24}, "needs v_head_dim 32, this shape has 24"),
        (megatron_arguments, {"windows": (64,)}, r"Megatron-LM needs windows \(0,\)"),
        (torchtitan_fields, {"activation": "gelu"}, "torchtitan needs activation 'swiglu'"),
        (nanochat_arguments, {}, "nanochat needs activation 'relu2', this shape has 'swiglu'"),
    ],
)
def test_arguments_that_a_project_lacks_are_refused(make, changes: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(Shape.of({**LLAMA, **changes}))


# ---- files


def test_written_folder_holds_rows_that_are_read_back(tmp_path: Path) -> None:
    found = plan(params="2M", vocab_size=512, head_dim=(16, 32))
    for number in random.Random(5).sample(range(1, len(found) + 1), 5):
        shape, folder = found.row(number).shape, tmp_path / str(number)
        refused = write_settings(shape, folder, 2048)
        assert set(refused) == {"nanochat.txt"}
        assert Shape.from_hf(folder) == shape
        assert read_megatron((folder / "megatron.txt").read_text().split()) == shape
        assert read_torchtitan(json.loads((folder / "torchtitan.json").read_text())) == shape
        assert Shape.of(json.loads((folder / "shape.json").read_text())) == shape


def test_folder_with_files_is_refused_and_nothing_is_left_half_written(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.txt").write_text("mine")
    with pytest.raises(UsageError, match="must be a new or an empty folder"):
        write_settings(Shape.of(LLAMA), tmp_path / "mine")
    with pytest.raises(UsageError, match="no project has settings for this shape"):
        write_settings(Shape.of({**LLAMA, "norm": "scalar", "average": 2}), tmp_path / "none")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "a.txt"]
