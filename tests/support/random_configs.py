"""Random configs of public families, and the real model classes that they are checked against."""

import math

import torch
import transformers

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
    head = shape.lm_head * shape.vocab_size * shape.dim
    assert shape.flops(1) == 2 * (matrices + head + scores)


NANOCHAT = {
    "sequence_len": 2048,
    "vocab_size": 32768,
    "n_layer": 12,
    "n_head": 6,
    "n_kv_head": 6,
    "n_embd": 768,
    "window_pattern": "SSSL",
}
