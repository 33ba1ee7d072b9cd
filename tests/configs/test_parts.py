"""Parts of models: attention layers of hybrids, text and images of models around models; and what
is said of the rest."""

import random
import re

import pytest
import torch
from support.public_classes import build, count
from support.small_configs import BASE, HEAD_DIM, LATENT, LOCAL, ROUTED, SMALL, SPECIAL, WINDOW
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from headwise.configs import FAMILIES, HYBRIDS, text_of
from headwise.errors import UsageError
from headwise.shape import Shape

TOKENS = 11
LINEAR, FULL = "linear_attention", "full_attention"
KINDS = [LINEAR, FULL, LINEAR, LINEAR, FULL]
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 17}
MAMBA = {"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_d_state": 8}
INDEXED = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
DELTA = {"linear_key_head_dim": 6, "linear_value_head_dim": 6}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
GATED = BASE | DELTA | {"layer_types": KINDS, "head_dim": 16}
CONVOLVED = {"layer_types": ["conv", FULL, "conv", "conv", FULL]}
WITHOUT_DEPTH = {k: v for k, v in BASE.items() if k != "num_hidden_layers"}
# Small models, and how many of their layers have attention.
MIXED = {
    "bamba": (BASE | MAMBA | {"attn_layer_indices": [1, 4]}, 2),
    "deepseek_v32": (BASE | LATENT | ROUTED | INDEXED, 5),
    "falcon_h1": (BASE | MAMBA | {"mamba_d_ssm": 96}, 5),
    "gemma3n_text": (
        BASE | HEAD_DIM | WINDOW
        | {"num_hidden_layers": 10, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 7}
        | {"vocab_size_per_layer_input": 211, "laurel_rank": 3}
        | {"activation_sparsity_pattern": [0.0] * 10}
        | {"layer_types": ["sliding_attention", FULL] * 5},
        10,
    ),
    "gemma4_text": (
        BASE | HEAD_DIM | WINDOW
        | {"num_hidden_layers": 8, "hidden_size_per_layer_input": 7, "global_head_dim": 24}
        | {"vocab_size_per_layer_input": 211, "num_kv_shared_layers": 3}
        | {"layer_types": ["sliding_attention", FULL] * 4},
        8,
    ),
    "glm5_next_text": (
        BASE | LATENT | ROUTED | INDEXED
        | {"qk_rope_head_dim": 0, "linear_head_dim": 8, "linear_num_heads": 6, "index_kpool": 2}
        | {"layer_types": [kind.replace("full", "indexed") for kind in KINDS]},
        2,
    ),
    "glm_moe_dsa": (BASE | LATENT | ROUTED | INDEXED, 5),
    "granitemoehybrid": (
        BASE | LOCAL | MAMBA | {"layer_types": KINDS, "shared_intermediate_size": 23},
        2,
    ),
    "jamba": (
        BASE | {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8}
        | {"use_mamba_kernels": False, "num_experts": 3},
        2,
    ),
    "kimi_linear": (
        BASE | LATENT | {"q_lora_rank": None, "num_experts": 7, "num_experts_per_token": 3}
        | {"moe_intermediate_size": 17, "linear_head_dim": 8, "linear_num_heads": 6}
        | {"layer_types": KINDS},
        2,
    ),
    "lfm2": (BASE | CONVOLVED, 2),
    "lfm2_moe": (BASE | CONVOLVED | EXPERTS, 2),
    "minimax": (BASE | HEAD_DIM | LOCAL | {"layer_types": KINDS}, 2),
    "muse_spark_text": (
        BASE | HEAD_DIM | LOCAL | WINDOW | {"moe_intermediate_size": 17, "moe_hidden_size": 24},
        5,
    ),
    "nemotron_h": (
        WITHOUT_DEPTH | HEAD_DIM | {"layers_block_type": [LINEAR, FULL, "mlp", FULL, "moe"]}
        | {"mamba_num_heads": 12, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2}
        | {"n_routed_experts": 7, "moe_intermediate_size": 17}
        | {"moe_shared_expert_intermediate_size": 19},
        2,
    ),
    "olmo_hybrid": (BASE | DELTA | {"layer_types": KINDS}, 2),
    "qwen3_5_moe_text": (GATED | EXPERTS, 2),
    "qwen3_5_text": (GATED, 2),
    "qwen3_next": (GATED | EXPERTS, 2),
}  # fmt: skip


def plain(model_type, values):
    return {"model_type": model_type} | {k: v for k, v in values.items() if k not in SPECIAL}


def attention_params(model):
    """Parameters of all layers that project keys or queries of softmax attention, without an
    indexer."""
    found = {}
    for name, parameter in model.named_parameters():
        match = re.search(r"layers\.(\d+)\.(?:self_attn|mixer)\.(.*)", name)
        if match and "indexer" not in name:
            found.setdefault(match[1], {})[match[2]] = parameter.numel()
    queries = ("q_proj.weight", "q_b_proj.weight")
    other = ("conv1d", "qkv_proj", "forget_gate")
    return sum(
        sum(own.values())
        for own in found.values()
        if any(name in queries for name in own) and not any(name.startswith(other) for name in own)
    )


def test_every_hybrid_is_checked():
    assert set(MIXED) == set(HYBRIDS)


@pytest.mark.parametrize("model_type", MIXED)
def test_attention_layers_of_hybrids(model_type):
    values, depth = MIXED[model_type]
    config, model = build(model_type, "cpu", **values)
    saved = {**config.to_dict(), "model_type": model_type}
    for form in (plain(model_type, values), saved):
        shape = Shape.from_hf(form, part="attention")
        table = shape.param_table()
        own = sum(table.get(name, 0) for name in ("attention", "gates", "sinks"))
        assert own == attention_params(model)
        assert set(table) <= {"attention", "gates", "sinks", "norms"}
        assert shape.depth == depth
        with pytest.raises(UsageError, match=r"not one shape.*--part attention"):
            Shape.from_hf(form)
    # The cache of a model that runs.
    model = model.float().eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        out = model(input_ids=torch.arange(1, TOKENS + 1)[None], use_cache=True)
    kept = [
        getattr(la, name, None) for la in out.past_key_values.layers for name in ("keys", "values")
    ]
    cached = sum(x.numel() for x in kept if x is not None)
    rows = [min(TOKENS, w - 1 if (w := shape.window(i)) else TOKENS) for i in range(shape.depth)]
    assert cached == sum(n * shape.kv_width(layer=i) for i, n in enumerate(rows))


def test_hybrid_says_how_many_layers_are_what():
    with pytest.raises(UsageError) as caught:
        Shape.from_hf({"model_type": "qwen3_next"})
    assert "36 of 48 layers are linear attention" in str(caught.value)
    assert "gives the 12 with attention" in str(caught.value)
    with pytest.raises(UsageError, match="without attention layers"):
        Shape.from_hf({"model_type": "bamba"}, part="attention")


def test_granite_4_without_mamba_is_whole():
    values = BASE | MAMBA | {"layer_types": ["full_attention"] * 5, "shared_intermediate_size": 23}
    for experts in ({"num_local_experts": 0}, LOCAL):
        _, model = build("granitemoehybrid", **values, **experts)
        shape = Shape.from_hf(plain("granitemoehybrid", values | experts))
        assert shape.params == count(model)


def test_attention_of_a_plain_decoder_keeps_windows_and_cache():
    values = SMALL["gemma2"][0]
    whole = Shape.from_hf(plain("gemma2", values))
    part = Shape.from_hf(plain("gemma2", values), part="attention")
    assert part.kv_bytes(TOKENS) == whole.kv_bytes(TOKENS)
    assert part.param_table()["attention"] == whole.param_table()["attention"]
    assert (part.windows, part.ffn_dim, part.vocab_size) == (whole.windows, 0, 0)


# ---- models around models

WRAPPERS = (
    *("gemma3", "glm4v", "idefics3", "internvl", "kimi_k25", "llama4", "llava", "llava_onevision"),
    *("mistral3", "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
)


@pytest.mark.parametrize("model_type", WRAPPERS)
def test_text_part_of_wrappers(model_type):
    config = CONFIG_MAPPING[model_type]()
    with torch.device("meta"):
        model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config)
    parts = ("language_model.", "text_model.", "lm_head.")
    text = {id(p): p.numel() for n, p in model.named_parameters() if any(x in n for x in parts)}
    saved = config.to_dict()
    shape = Shape.from_hf(saved, part="text")
    assert shape.params == sum(text.values())
    assert "--part text" in text_of(saved)
    with pytest.raises(UsageError, match="several models in one: part='text'"):
        Shape.from_hf(saved)
    attention = Shape.from_hf(saved, part="attention")
    assert attention.kv_bytes(TOKENS) == shape.kv_bytes(TOKENS)


def test_both_parts_of_clip():
    config = CONFIG_MAPPING["clip"]()
    with torch.device("meta"):
        from transformers import CLIPModel

        model = CLIPModel(config)
    for part, module in (("text", model.text_model), ("vision", model.vision_model)):
        expected = sum(p.numel() for p in module.parameters())
        assert Shape.from_hf(config.to_dict(), part=part).params == expected


def test_flat_config_of_an_older_qwen2_vl():
    flat = {"model_type": "qwen2_vl", "hidden_size": 1536, "num_hidden_layers": 28}
    flat |= {"num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960}
    flat |= {"vocab_size": 151936, "tie_word_embeddings": True, "vision_config": {"depth": 32}}
    shape = Shape.from_hf(flat, part="text")
    assert shape.params == 1_543_714_304  # as Qwen2.5-1.5B's


# ---- what is refused

REFUSED = [
    (
        {"model_type": "t5", "d_model": 512, "num_layers": 6, "num_heads": 8, "d_kv": 64}
        | {"d_ff": 2048, "is_encoder_decoder": True},
        ("encoder-decoder", "Shape(dim=512, depth=6, num_heads=8, head_dim=64, ffn_dim=2048)"),
    ),
    (
        {"model_type": "whisper", "d_model": 384, "encoder_layers": 4},
        ("encoder-decoder", "dim=384"),
    ),
    ({"model_type": "deepseek_v4"}, ("cannot be expressed", "compressed")),
    ({"model_type": "mllama", "text_config": {}}, ("cross-attention",)),
    ({"model_type": "zamba2"}, ("shared weights",)),
    ({"model_type": "albert"}, ("share weights", "num_hidden_layers 1", "12")),
    ({"model_type": "opt", "word_embed_proj_dim": 512}, ("word_embed_proj_dim", "512")),
    ({"model_type": "llava", "text_config": {"model_type": "mamba"}}, ("several models",)),
    ({"model_type": "newvl", "text_config": {"hidden_size": 8}}, ("several models",)),
    ({"model_type": "gemma4_text"}, ("table of its own", "--part attention")),
]


@pytest.mark.parametrize(("config", "parts"), REFUSED)
def test_refusals_name_the_nearest_way(config, parts):
    with pytest.raises(UsageError) as caught:
        Shape.from_hf(config)
    for part in parts:
        assert part in str(caught.value), caught.value


def test_part_is_checked():
    for config, part, words in (
        ({"model_type": "llama"}, "tail", "choices: text, vision, attention"),
        ({"model_type": "llama"}, "text", "one stack"),
        ({"model_type": "llava", "text_config": {}}, "vision", "no part 'vision'"),
        ({"model_type": "newvl", "text_config": {}}, "text", "no model_type"),
    ):
        with pytest.raises(UsageError, match=words):
            Shape.from_hf(config, part=part)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gpt_oss2", "gpt_oss"),
        ("mixtrall", "mixtral"),
        ("olmo4", "olmo"),
        ("minimaxx", "minimax"),
        ("retnet", ""),
        ("t5gemma", ""),
        ("nvidia_orion", ""),
    ],
)
def test_only_near_spellings_are_suggested(name, hint):
    with pytest.raises(UsageError) as caught:
        Shape.from_hf({"model_type": name})
    said = re.search(r"did you mean ([^?]*)\?", str(caught.value))
    assert hint in (said[1] if said else "")
    assert bool(said) == bool(hint)


def test_unknown_family_with_the_keys_of_llama_is_pointed_to_it():
    sizes = {key: BASE[key] for key in list(BASE)[:6]}
    with pytest.raises(UsageError, match="model_type llama counts it"):
        Shape.from_hf({"model_type": "internlm3", **sizes})


def test_readers_break_at_no_value():
    """Values replaced by nonsense, one at a time, give a shape or a line, in every family."""
    nonsense = (None, True, 0, -1, 1.5, float("nan"), "", "a\nb", [], [1, 2], [None] * 5, {"x": 1})
    rng, said = random.Random(28), []
    keys = ("layer_types", "rope_parameters", "mlp_layer_types", "per_layer_config", "text_config")
    for name in (*FAMILIES, *HYBRIDS):
        values = SMALL[name][0] if name in SMALL else MIXED.get(name, (BASE,))[0]
        for key in rng.sample([*values, *keys], 6):
            for value in nonsense:
                part = rng.choice((None, None, "attention", "text"))
                try:
                    Shape.from_hf({"model_type": name, **values, key: value}, part=part)
                except UsageError as error:
                    said.append(str(error))
    assert len(said) > 1000
    assert not [line for line in said if "\n" in line]
