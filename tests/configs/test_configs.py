"""Configs: public models and their known counts, where a config comes from, and refusals."""

import json
import math
import random

import pytest
import torch
import transformers
from support.random_configs import (
    NANOCHAT,
    check_attention,
    count,
    gemma3_text,
    real,
)

from headwise.configs import read_config, to_shape_fields
from headwise.errors import UsageError
from headwise.shape import Shape

# ---- public models: their config.json, their known counts


PUBLIC = {
    "gpt2": (
        {
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
        },
        124_439_808,
    ),
    "gpt2-medium": (
        {"model_type": "gpt2", "n_embd": 1024, "n_head": 16, "n_layer": 24, "vocab_size": 50257},
        354_823_168,
    ),
    "gpt2-large": (
        {"model_type": "gpt2", "n_embd": 1280, "n_head": 20, "n_layer": 36, "vocab_size": 50257},
        774_030_080,
    ),
    "gpt2-xl": (
        {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "vocab_size": 50257},
        1_557_611_200,
    ),
    "bert-base-uncased": (
        {"model_type": "bert", "vocab_size": 30522, "position_embedding_type": "absolute"},
        109_482_240,
    ),
    "vit-base-patch16-224": (
        {"model_type": "vit", "id2label": {str(i): f"c{i}" for i in range(1000)}},
        86_567_656,
    ),
    "gemma-3-270m": (
        {
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
        },
        268_098_176,
    ),
}
ROWS = """
Llama-2-7B         llama       32000  4096 11008 32 32 32 -   6738415616
Llama-2-13B        llama       32000  5120 13824 40 40 40 -   13015864320
Llama-2-70B        llama       32000  8192 28672 80 64 8  -   68976648192
Llama-3-8B         llama       128256 4096 14336 32 32 8  -   8030261248  theta=5e5
Llama-3-70B        llama       128256 8192 28672 80 64 8  -   70553706496 theta=5e5
Llama-3.2-1B       llama       128256 2048 8192  16 32 8  64  1235814400  tied=true theta=5e5
Mistral-7B-v0.1    mistral     32000  4096 14336 32 32 8  -   7241732096  window=4096
Mistral-Nemo-12B   mistral     131072 5120 14336 40 32 8  128 12247782400 window=null theta=1e6
Qwen2-7B           qwen2       152064 3584 18944 28 28 4  -   7615616512  windowed=false theta=1e6
Qwen2.5-0.5B       qwen2       151936 896  4864  24 14 2  -   494032768   tied=true theta=1e6
Qwen2.5-1.5B       qwen2       151936 1536 8960  28 12 2  -   1543714304  tied=true theta=1e6
Qwen3-0.6B         qwen3       151936 1024 3072  28 16 8  128 596049920   tied=true theta=1000000
Qwen3-8B           qwen3       151936 4096 12288 36 32 8  128 8190735360  tied=false theta=1000000
gemma-2b           gemma       256000 2048 16384 18 8  1  256 2506172416
gemma-7b           gemma       256000 3072 24576 28 16 16 256 8537680896
gemma-2-2b         gemma2      256000 2304 9216  26 8  4  256 2614341888  scalar=256
gemma-2-9b         gemma2      256000 3584 14336 42 16 8  256 9241705984  scalar=256
gemma-2-27b        gemma2      256000 4608 36864 46 32 16 128 27227128320 scalar=144
gemma-3-1b         gemma3_text 262144 1152 6912  26 4  1  256 999885952   window=512 pattern=6
phi-1.5            phi         51200  2048 8192  24 32 32 -   1418270720  partial=0.5
phi-2              phi         51200  2560 10240 32 32 32 -   2779683840  partial=0.4
phi-3-mini-4k      phi3        32064  3072 8192  32 32 32 -   3821079552  window=2047
phi-4              phi3        100352 5120 17920 40 40 10 -   14659507200 window=null theta=250000
phi-4-mini         phi3        200064 3072 8192  32 24 8  -   3836021760  tied=true partial=0.75
bert-large-uncased bert        30522  1024 4096  24 16 -  -   335141888
vit-large-patch16  vit         -      1024 4096  24 16 -  -   304326632   num_labels=1000
nanochat-d20       nanochat    65536  1280 5120  20 10 10 -   560988160
"""
COLUMNS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)

SHORT = {
    "tied": "tie_word_embeddings",
    "theta": "rope_theta",
    "scalar": "query_pre_attn_scalar",
    "partial": "partial_rotary_factor",
    "window": "sliding_window",
    "pattern": "sliding_window_pattern",
    "windowed": "use_sliding_window",
}


def table(rows):
    for line in rows.strip().splitlines():
        name, model_type, *numbers = line.split()
        numbers, rest = numbers[: len(COLUMNS)], numbers[len(COLUMNS) :]
        config = {"model_type": model_type} | {
            key: int(n) for key, n in zip(COLUMNS, numbers, strict=True) if n != "-"
        }
        for key, value in (item.split("=") for item in rest[1:]):
            config[SHORT.get(key, key)] = json.loads(value)
        yield name, (config, int(rest[0]))


PUBLIC |= dict(table(ROWS))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models(name):
    config, known = PUBLIC[name]
    shape = Shape.from_hf(config)
    assert shape.params == known
    values = {key: value for key, value in config.items() if key != "model_type"}
    built, model = real(config["model_type"], **values)
    assert count(model) == known
    check_attention(shape, built, model)


def test_windows_and_scales_of_public_models():
    shapes = {name: Shape.from_hf(config) for name, (config, _) in PUBLIC.items()}
    assert (
        shapes["Llama-2-7B"].windows
        == shapes["Qwen2-7B"].windows
        == shapes["Mistral-Nemo-12B"].windows
        == (0,)
    )
    assert shapes["Mistral-7B-v0.1"].windows == (4096,)
    assert shapes["gemma-2-9b"].windows == (4096, 0)
    assert shapes["gemma-3-1b"].windows == (512, 512, 512, 512, 512, 0)
    assert shapes["gemma-2-27b"].logit_scale == 144**-0.5
    assert shapes["gemma-2-9b"].logit_scale is None
    assert shapes["phi-2"].qk_rope_head_dim == 32
    assert shapes["phi-4-mini"].qk_rope_head_dim == 96
    assert shapes["gemma-3-1b"].rope_theta == 1_000_000.0
    assert shapes["bert-large-uncased"].causal is shapes["vit-large-patch16"].causal is False
    assert shapes["vit-base-patch16-224"].num_positions == 197
    assert {shapes[name].activation for name in ("gpt2", "phi-2", "bert-base-uncased")} == {"gelu"}
    assert shapes["gemma-2b"].activation == "geglu"
    assert shapes["nanochat-d20"].activation == "relu2"


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "rope_theta": 10000,
}


def test_attention_of_deepseek_v3():
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    config = transformers.DeepseekV3Config(
        **{key: value for key, value in DEEPSEEK_V3.items() if key != "model_type"}
    )
    with torch.device("meta"):
        module = DeepseekV3Attention(config, layer_idx=0)
    dense = Shape.from_hf({**DEEPSEEK_V3, "n_routed_experts": None})
    assert dense.param_table()["attention"] == 61 * count(module) == 61 * 187_107_328
    assert dense.kv_width() == 512 + 64
    assert dense.scale == module.scaling == 192**-0.5
    assert Shape.from_hf(DEEPSEEK_V3).param_table()["attention"] == 61 * 187_107_328


# ---- nanochat's own config; the counts were read off its GPT class on the meta device


@pytest.mark.parametrize(
    ("changes", "params", "windows"),
    [
        ({}, 286_261_730, (513, 513, 513, 0) * 3),
        (
            {"n_layer": 20, "n_embd": 1280, "n_head": 10, "n_kv_head": 10},
            896_533_746,
            (513, 513, 513, 0) * 5,
        ),
        (
            {"n_layer": 26, "n_embd": 1664, "n_head": 13, "n_kv_head": 13},
            1_681_786_938,
            (513, 513, 513, 0) * 6 + (513, 0),
        ),
        (
            {"vocab_size": 65536, "n_layer": 32, "n_embd": 2048, "n_head": 16, "n_kv_head": 16},
            4_026_535_002,
            (513, 513, 513, 0) * 8,
        ),
        (
            {
                "vocab_size": 50257,
                "n_layer": 7,
                "n_kv_head": 2,
                "sequence_len": 1000,
                "window_pattern": "SSL",
            },
            172_818_568,
            (257, 257, 0, 257, 257, 0, 0),
        ),
        (
            {
                "vocab_size": 65,
                "n_layer": 1,
                "n_head": 3,
                "n_kv_head": 1,
                "n_embd": 42,
                "sequence_len": 64,
                "window_pattern": "s",
            },
            31_400,
            (0,),
        ),
    ],
)
def test_own_config_of_nanochat(changes, params, windows):
    shape = Shape.from_hf({**NANOCHAT, **changes})
    assert shape.params == params
    assert shape.windows == windows
    assert shape.vocab_size % 64 == 0
    assert shape.causal
    assert not shape.tied
    assert (shape.qk_norm, shape.activation, shape.rope_theta) == ("free", "relu2", 100_000.0)
    assert math.isclose(shape.scale * math.sqrt(shape.head_dim), 1.44)


# ---- where a config comes from


def test_file_folder_and_mapping_are_the_same_config(tmp_path):
    config = {"model_type": "gpt2", "n_layer": 3}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert (
        read_config(config)
        == read_config(tmp_path)
        == read_config(tmp_path / "config.json")
        == read_config(str(tmp_path))
        == config
    )
    assert Shape.from_hf(tmp_path).depth == 3


def test_saved_config_is_read(tmp_path):
    config, model = real("gemma3_text", **gemma3_text(random.Random(1)))
    config.save_pretrained(tmp_path)
    assert Shape.from_hf(tmp_path).params == count(model)


def test_config_is_not_changed():
    config = {"model_type": "gpt2", "n_layer": 3}
    to_shape_fields(config)
    assert config == {"model_type": "gpt2", "n_layer": 3}


def test_rope_base_in_every_place():
    nested = {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 7.0}}
    for model_type, config, theta in (
        ("llama", {}, 10_000.0),
        ("llama", {"rope_theta": 5.0}, 5.0),
        ("llama", {"rope_parameters": {"rope_theta": 5.0}}, 5.0),
        ("llama", {"rope_theta": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 5.0),
        ("gemma3_text", {}, 1_000_000.0),
        ("gemma3_text", {"rope_theta": 5.0, "rope_local_base_freq": 7.0}, 5.0),
        ("gemma3_text", {"rope_parameters": nested}, 5.0),
    ):
        assert to_shape_fields({"model_type": model_type, **config})["rope_theta"] == theta


def test_gemma3_is_its_text_config_unless_it_sees():
    text = {"hidden_size": 640, "num_hidden_layers": 2}
    assert Shape.from_hf({"model_type": "gemma3", "text_config": text}) == Shape.from_hf(
        {"model_type": "gemma3_text", **text}
    )
    with pytest.raises(UsageError, match=r"several models.*--part text"):
        Shape.from_hf(
            {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}}
        )


# ---- refusals


def refusal(config):
    with pytest.raises(UsageError) as caught:
        Shape.from_hf(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"model_type": "mixtrall"}, ("model_type 'mixtrall'", "did you mean mixtral", "choices")),
        ({"model_type": "a\nb"}, ("'a\\nb'", "choices")),
        ({"model_type": ["llama"]}, ("['llama']", "choices")),
        ({}, ("no model_type", "window_pattern", "choices", "llama")),
        ({"n_layer": 3, "n_embd": 8}, ("no model_type", "n_kv_head")),
        (
            {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
            ("cross-attention", "True"),
        ),
        (
            {"model_type": "gpt2", "add_cross_attention": True},
            ("cross-attention", "add_cross_attention"),
        ),
        (
            {"model_type": "bert", "is_encoder_decoder": True},
            ("encoder-decoder", "is_encoder_decoder", "True"),
        ),
        (
            {"model_type": "llama", "per_layer_config": {"0": {"head_dim": 8}}},
            ("between layers", "per_layer_config"),
        ),
        ({"model_type": "llama", "is_causal": False}, ("causal", "False")),
        (
            {"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3},
            ("hidden_size 100", "num_attention_heads 3", "multiple"),
        ),
        ({"model_type": "gpt2", "n_embd": 100, "n_head": 3}, ("100", "3", "multiple")),
        ({"model_type": "llama", "hidden_act": "tanh"}, ("hidden_act 'tanh'", "gated", "silu")),
        ({"model_type": "llama", "hidden_act": "relu"}, ("hidden_act 'relu'", "gated", "silu")),
        (
            {"model_type": "gpt2", "activation_function": "silu"},
            ("activation_function 'silu'", "plain", "gelu_new"),
        ),
        ({"model_type": "gemma2", "hidden_activation": "mish"}, ("'mish'", "gelu_pytorch_tanh")),
        (
            {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 5},
            ("32", "5", "multiple"),
        ),
        ({"model_type": "llama", "head_dim": 7}, ("head_dim", "even", "7")),
        ({"model_type": "llama", "hidden_size": "4096"}, ("hidden_size", "whole number", "'4096'")),
        (
            {"model_type": "llama", "attention_bias": "no"},
            ("attention_bias", "true or false", "'no'"),
        ),
        (
            {"model_type": "llama", "rope_parameters": {"rope_theta": -1}},
            ("rope_theta", "positive", "-1"),
        ),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, ("layer_types", "32")),
        (
            {"model_type": "gemma2", "num_hidden_layers": 1, "layer_types": ["mamba"]},
            ("'mamba'", "sliding_attention"),
        ),
        ({"model_type": "gemma2", "sliding_window": None}, ("sliding_window", "None")),
        (
            {"model_type": "gemma2", "use_bidirectional_attention": True},
            ("use_bidirectional_attention", "True"),
        ),
        ({"model_type": "gemma3"}, ("text_config", "None")),
        (
            {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
            ("scale_attn_by_inverse_layer_idx", "True"),
        ),
        (
            {"model_type": "bert", "position_embedding_type": "relative_key"},
            ("'relative_key'", "absolute"),
        ),
        (
            {"model_type": "deepseek_v3", "n_routed_experts": -1},
            ("n_routed_experts", "at least 0", "-1"),
        ),
        ({"model_type": "vit", "patch_size": [4, 4, 4]}, ("patch_size", "[4, 4, 4]")),
        (
            {**NANOCHAT, "window_pattern": "SXL"},
            ("window_pattern", "'SXL'", "S (short) and L (long)"),
        ),
        ({**NANOCHAT, "n_head": 5}, ("n_embd 768", "n_head 5", "multiple")),
        ({**NANOCHAT, "n_kv_head": 4}, ("6", "4", "multiple")),
        (17, ("config.json", "mapping", "int")),
    ],
)
def test_refusals_are_one_line_with_the_value_and_the_choices(config, parts):
    message = refusal(config)
    for part in parts:
        assert part in message, message


def test_files_that_hold_no_config_are_refused(tmp_path):
    assert "config.json" in refusal(tmp_path)
    assert "nowhere" in refusal(str(tmp_path / "nowhere"))
    for text, part in (
        ("{", "not JSON"),
        ("[1]", "list"),
        ("null", "NoneType"),
        ("{}", "no model_type"),
    ):
        path = tmp_path / "config.json"
        path.write_text(text, encoding="utf-8")
        assert part in refusal(path)
    path.write_bytes(b"\xff\xfe")
    assert "not JSON" in refusal(path)
