"""Configs of public families against the real model classes, built on the meta device."""

import json
import math
import random

import pytest
import torch
import transformers

from headwise.configs import FAMILIES, read_config, to_shape_fields
from headwise.errors import UsageError
from headwise.shape import Shape

CLASSES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma": ("GemmaConfig", "GemmaForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "phi": ("PhiConfig", "PhiForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "bert": ("BertConfig", "BertModel"),
    "vit": ("ViTConfig", "ViTForImageClassification"),
    "nanochat": ("NanoChatConfig", "NanoChatForCausalLM"),
}
BOTH = ("full_attention", "sliding_attention")
GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu")


def real(model_type, **values):
    """The config and the model of the public class; on the meta device only shapes exist."""
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[model_type])
    config = config_class(**values)
    with torch.device("meta"):
        return config, model_class(config)


def count(model):
    return sum({id(p): p.numel() for p in model.parameters()}.values())


# ---- random configs


def common(rng, *, head_dim=True, groups=True):
    """Sizes that are hard to confuse: odd where they may be, and no two alike by design."""
    kv_heads, group = rng.choice((1, 2, 3, 5)), rng.choice((1, 2, 3)) if groups else 1
    heads, width = kv_heads * group, 2 * rng.randint(1, 12)
    values = {
        "vocab_size": rng.randrange(101, 999, 2),
        "hidden_size": heads * width,
        "intermediate_size": rng.randrange(11, 199, 2),
        "num_hidden_layers": rng.randint(1, 3),
        "num_attention_heads": heads,
        "tie_word_embeddings": rng.random() < 0.5,
        "pad_token_id": None,
    }
    if groups:
        values["num_key_value_heads"] = kv_heads
    if head_dim and rng.random() < 0.7:
        values["head_dim"] = 2 * rng.randint(1, 20)
    return values


def rope(rng):
    return (
        {}
        if rng.random() < 0.3
        else {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": float(rng.randint(1000, 10**6)),
            }
        }
    )


def bias(rng, *names):
    return {name: rng.random() < 0.5 for name in names}


def layer_types(rng, depth):
    return {"layer_types": [rng.choice(BOTH) for _ in range(depth)]} if rng.random() < 0.5 else {}


def gpt2(rng):
    values = common(rng, head_dim=False, groups=False)
    del values["intermediate_size"]
    values |= {
        "n_positions": rng.randrange(3, 99),
        "activation_function": rng.choice((*GELUS, "relu", "relu2")),
    }
    return values | {
        "n_inner": rng.choice((None, rng.randrange(5, 99))),
        "scale_attn_weights": rng.random() < 0.7,
    }


def llama(rng):
    return (
        common(rng)
        | rope(rng)
        | bias(rng, "attention_bias", "mlp_bias")
        | {"hidden_act": rng.choice(("silu", "gelu"))}
    )


def mistral(rng):
    return common(rng) | rope(rng) | {"sliding_window": rng.choice((None, rng.randrange(1, 99)))}


def qwen2(rng):
    values = (
        common(rng)
        | rope(rng)
        | {"use_sliding_window": rng.random() < 0.6, "sliding_window": rng.randrange(1, 99)}
    )
    values |= {"max_window_layers": rng.randint(0, 3)}
    return values | (
        layer_types(rng, values["num_hidden_layers"]) if values["use_sliding_window"] else {}
    )


def qwen3(rng):
    return {"head_dim": 16} | qwen2(rng) | bias(rng, "attention_bias")


def gemma(rng):
    return (
        {"head_dim": 32}
        | common(rng)
        | rope(rng)
        | bias(rng, "attention_bias", "use_bidirectional_attention")
    )


def gemma2(rng):
    values = (
        {"head_dim": 32}
        | common(rng)
        | rope(rng)
        | bias(rng, "attention_bias")
        | {"sliding_window": rng.randrange(1, 99)}
    )
    values |= {"query_pre_attn_scalar": rng.choice((values["head_dim"], rng.randrange(1, 300)))}
    return values | layer_types(rng, values["num_hidden_layers"])


def gemma3_text(rng):
    values = (
        gemma2(rng)
        | bias(rng, "use_bidirectional_attention")
        | {"sliding_window": 2 * rng.randrange(1, 99)}
    )
    values.pop("rope_parameters", None)
    if rng.random() < 0.5:
        values["rope_theta"], values["rope_local_base_freq"] = (
            float(rng.randint(1000, 10**7)),
            777.0,
        )
    return values | {"sliding_window_pattern": rng.randint(1, 4)}


def phi(rng):
    values = common(rng, head_dim=False) | {"hidden_act": rng.choice((*GELUS, "relu"))}
    half = values["hidden_size"] // values["num_attention_heads"] // 2
    values["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 12345.0,
        "partial_rotary_factor": rng.randint(1, half) / half,
    }
    return values


def phi3(rng):
    return phi(rng) | {
        "hidden_act": "silu",
        "sliding_window": rng.choice((None, rng.randrange(1, 99))),
    }


def deepseek(rng):
    values = common(rng, head_dim=False, groups=False) | rope(rng) | bias(rng, "attention_bias")
    values |= {
        "num_key_value_heads": values["num_attention_heads"],
        "first_k_dense_replace": values["num_hidden_layers"] + rng.randint(0, 1),
    }
    values |= {
        "kv_lora_rank": rng.randrange(3, 41, 2),
        "q_lora_rank": rng.choice((None, rng.randrange(3, 51, 2))),
    }
    return values | {
        "qk_rope_head_dim": 2 * rng.randint(1, 9),
        "qk_nope_head_dim": rng.randrange(1, 19),
        "v_head_dim": rng.randrange(1, 23),
    }


def deepseek_v2(rng):
    return deepseek(rng) | bias(rng, "mlp_bias")


def bert(rng):
    values = common(rng, head_dim=False, groups=False) | {
        "max_position_embeddings": rng.randrange(3, 99),
        "type_vocab_size": rng.randint(1, 5),
    }
    return values | {"hidden_act": rng.choice((*GELUS, "relu"))} | bias(rng, "is_decoder")


def vit(rng):
    values = common(rng, groups=False) | {
        "num_channels": rng.randint(1, 4),
        "num_labels": rng.choice((1, 2, 7, 1000)),
    }
    patch = rng.choice((rng.randint(1, 6), [rng.randint(1, 6), rng.randint(1, 6)]))
    image = rng.choice((rng.randrange(7, 40), [rng.randrange(7, 40), rng.randrange(7, 40)]))
    values |= {"patch_size": patch, "image_size": image, "hidden_act": rng.choice(GELUS)} | bias(
        rng, "qkv_bias"
    )
    return {
        k: v
        for k, v in values.items()
        if k not in ("vocab_size", "tie_word_embeddings", "pad_token_id")
    }


def nanochat(rng):
    return (
        common(rng)
        | rope(rng)
        | bias(rng, "attention_bias")
        | {"hidden_act": rng.choice(("relu2", "relu", "gelu"))}
    )


MAKE = {
    "gpt2": gpt2,
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "phi": phi,
    "phi3": phi3,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek,
    "bert": bert,
    "vit": vit,
    "nanochat": nanochat,
}


def blocks(model):
    """The layers, wherever a class keeps them."""
    for path in ("model.layers", "transformer.h", "encoder.layer", "vit.layers"):
        try:
            return list(model.get_submodule(path))
        except AttributeError:
            continue
    raise AssertionError(f"no layers in {type(model).__name__}")


def attention(block):
    for path in ("self_attn", "attn", "attention.self", "attention"):
        try:
            return block.get_submodule(path)
        except AttributeError:
            continue
    raise AssertionError(f"no attention in {type(block).__name__}")


def check_attention(shape, config, model):
    """Scale, mask, windows, cache and rotary width of the real layers."""
    layers = blocks(model)
    assert len(layers) == shape.depth
    for i, layer in enumerate(layers):
        module = attention(layer)
        assert math.isclose(module.scaling, shape.scale, rel_tol=1e-12)
        assert module.is_causal == shape.causal
        assert shape.window(i) == (
            getattr(module, "sliding_window", getattr(config, "sliding_window", None)) or 0
        )
        if hasattr(module, "k_proj"):
            assert module.k_proj.out_features + module.v_proj.out_features == shape.kv_width()
        if hasattr(module, "kv_a_proj_with_mqa"):
            assert module.kv_a_proj_with_mqa.out_features == shape.kv_width()
    if hasattr(config, "rope_parameters"):
        table = config.rope_parameters
        frequencies = [
            buffer
            for name, buffer in model.model.rotary_emb.named_buffers()
            if name.endswith("inv_freq")
        ]
        assert {2 * f.numel() for f in frequencies} == {shape.qk_rope_head_dim}
        assert table.get("full_attention", table)["rope_theta"] == shape.rope_theta
    matrices = sum(p.numel() for layer in layers for p in layer.parameters() if p.ndim == 2)
    scores = shape.depth * shape.num_heads * (shape.head_dim + shape.v_head_dim)
    assert shape.flops(1) == 2 * (matrices + shape.vocab_size * shape.dim + scores)


@pytest.mark.parametrize("model_type", CLASSES)
def test_random_configs_count_as_the_real_class(model_type):
    rng, seen = random.Random(f"families {model_type}"), set()
    for _ in range(80):
        values = MAKE[model_type](rng)
        config, model = real(model_type, **values)
        expected = count(model)
        for form in (
            config.to_dict(),
            json.loads(config.to_json_string()),
            json.loads(config.to_json_string(use_diff=False)),
        ):
            shape = Shape.from_hf(form)
            assert shape.params == expected, values
        check_attention(shape, config, model)
        seen.add(expected)
    assert len(seen) > 55


@pytest.mark.parametrize("model_type", CLASSES)
def test_left_out_keys_take_the_defaults_of_the_library(model_type):
    depth = {"n_layer": 2} if model_type == "gpt2" else {"num_hidden_layers": 2}
    if model_type.startswith("deepseek"):
        depth["first_k_dense_replace"] = 2
    config, model = real(model_type, **depth)
    shape = Shape.from_hf({"model_type": model_type, **depth})
    assert shape.params == count(model)
    assert shape == Shape.from_hf(config.to_dict())
    check_attention(shape, config, model)


def test_families_are_all_checked():
    assert set(FAMILIES) == {*CLASSES, "gemma3"}
    assert set(MAKE) == set(CLASSES)


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
    with pytest.raises(UsageError, match=r"experts.*256"):
        Shape.from_hf(DEEPSEEK_V3)
    with pytest.raises(UsageError, match="experts"):
        Shape.from_hf({"model_type": "deepseek_v2"})


# ---- nanochat's own config; the counts were read off its GPT class on the meta device

NANOCHAT = {
    "sequence_len": 2048,
    "vocab_size": 32768,
    "n_layer": 12,
    "n_head": 6,
    "n_kv_head": 6,
    "n_embd": 768,
    "window_pattern": "SSSL",
}


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
    with pytest.raises(UsageError, match=r"vision tower.*text_config"):
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
        ({"model_type": "mixtral"}, ("model_type 'mixtral'", "choices", "mistral")),
        ({"model_type": "qwen2_moe"}, ("model_type 'qwen2_moe'", "did you mean", "qwen2")),
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
        ({"model_type": "phi", "qk_layernorm": True}, ("qk_layernorm", "True")),
        (
            {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
            ("scale_attn_by_inverse_layer_idx", "True"),
        ),
        (
            {"model_type": "bert", "position_embedding_type": "relative_key"},
            ("'relative_key'", "absolute"),
        ),
        (
            {"model_type": "deepseek_v3", "n_routed_experts": 0},
            ("experts", "first_k_dense_replace", "61"),
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


@pytest.mark.parametrize("model_type", [*CLASSES, None])
def test_reader_breaks_at_no_value(model_type):
    """Any one value replaced by nonsense gives a shape or a one-line refusal, never another
    error."""
    config = (
        dict(NANOCHAT)
        if model_type is None
        else real(model_type, **MAKE[model_type](random.Random(3)))[0].to_dict()
    )
    messages = []
    for key in config:
        for nonsense in (
            None,
            True,
            0,
            -1,
            3,
            1.5,
            float("nan"),
            float("inf"),
            "",
            "a\nb",
            [],
            [1, 2],
            ["x"],
            {},
            {"x": 1},
        ):
            try:
                Shape.from_hf({**config, key: nonsense})
            except UsageError as error:
                messages.append(str(error))
    assert len(messages) > 50
    assert not [message for message in messages if "\n" in message]
