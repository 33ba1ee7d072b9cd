"""What a config.json leaves out: the defaults of transformers 5.22, by family. Standard library
only."""

from __future__ import annotations

from typing import Any

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)

# The names that some families use, and the one that this package reads.
ALIASES = {
    **dict.fromkeys(("n_embd", "d_model", "dim", "n_embed"), "hidden_size"),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), "num_hidden_layers"),
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), "num_attention_heads"),
    **dict.fromkeys(("n_inner", "ffn_dim", "hidden_dim", "ffn_hidden_size"), "intermediate_size"),
    **dict.fromkeys(("n_positions", "max_seq_len"), "max_position_embeddings"),
    **dict.fromkeys(("activation_function", "activation", "afn"), "hidden_act"),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts"), "num_experts"),
    **dict.fromkeys(("moe_k", "moe_topk", "num_experts_per_token"), "num_experts_per_tok"),
    **dict.fromkeys(("num_shared_experts", "moe_num_shared_experts"), "n_shared_experts"),
    "n_kv_head": "num_key_value_heads",
    "layers_block_type": "layer_types",
}


def _row(*sizes: int | None, **more: Any) -> dict[str, Any]:
    return dict(zip(_SIZES, sizes, strict=False)) | more


def _experts(each: int | None, number: int | None, chosen: int | None, shared: int = 0) -> Any:
    """The width of an expert, how many there are, are chosen for a token, and are always used."""
    return {
        "moe_intermediate_size": each,
        "num_experts": number,
        "num_experts_per_tok": chosen,
        "n_shared_experts": shared,
    }


def _latent(kv: int, q: int | None, rope: int, nope: int, value: int) -> Any:
    return {
        "kv_lora_rank": kv,
        "q_lora_rank": q,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
    }


def _image(size: int = 224, patch: int = 16) -> Any:
    return {"image_size": size, "patch_size": patch}


_TIED = {"tie_word_embeddings": True}
_GELU = {"hidden_act": "gelu"}
_NEW = {"hidden_act": "gelu_new"}
_TANH = {"hidden_act": "gelu_pytorch_tanh"}
_GPT2 = _row(50257, 768, None, 12, 12, max_position_embeddings=1024) | _TIED
_ROTARY_GPT = _row(50400, 4096, None, 28, 16, rotary_dim=64) | _NEW
_COHERE = _row(256000, 8192, 22528, 40, 64) | _TIED
_LLAMA = _row(32000, 4096, 11008, 32, 32)
_QWEN_VL = _row(152064, 8192, 29568, 80, 64, 8, max_window_layers=80, rope_theta=1e6)
_QWEN2 = _row(151936, 4096, 22016, 32, 32, 32)
_V3 = _row(129280, 7168, 18432, 61, 128, 128, first_k_dense_replace=3)
_V3 |= _experts(2048, 256, 8, 1) | _latent(512, 1536, 64, 128, 128)
_GLM = _row(151552, 4096, 13696, 40, 32, 2, head_dim=128, attention_bias=True)
_GLM_AIR = _row(151552, 4096, 10944, 46, 96, 8, first_k_dense_replace=1)
_GLM_AIR |= _experts(1408, 128, 8, 1) | {"partial_rotary_factor": 0.5}
_BERT = _row(30522, 768, 3072, 12, 12, max_position_embeddings=512, type_vocab_size=2) | _GELU
_VIT = _row(0, 768, 3072, 12, 12) | _GELU | _image()
_TOWER = _row(0, 768, 3072, 12, 12)
_STEP = _row(128815, 4096, 11264, 45, 64, 8, head_dim=128, share_expert_dim=1280)
_STEP |= _experts(1280, 288, 8)

DEFAULTS: dict[str, dict[str, Any]] = {
    # ---- dense decoders
    "gpt2": _GPT2 | _NEW,
    "gpt_bigcode": _GPT2 | _TANH | {"multi_query": True},
    "gpt_neo": _row(50257, 2048, None, 24, 16, max_position_embeddings=2048, window_size=256)
    | _TIED | _NEW,
    "openai-gpt": _row(40478, 768, None, 12, 12, max_position_embeddings=512) | _TIED | _GELU,
    "biogpt": _row(42384, 1024, 4096, 24, 16, max_position_embeddings=1024) | _TIED | _GELU,
    "opt": _row(50272, 768, 3072, 12, 12, max_position_embeddings=2048, hidden_act="relu") | _TIED,
    "bloom": _row(250880, 64, None, 2, 8) | _TIED,
    "mpt": _row(50368, 2048, None, 24, 16) | _TIED,
    "falcon": _row(65024, 4544, None, 32, 71, multi_query=True, parallel_attn=True)
    | _TIED | _GELU,
    "gptj": _ROTARY_GPT,
    "codegen": _ROTARY_GPT,
    "gpt_neox": _row(50432, 6144, 24576, 44, 64, partial_rotary_factor=0.25) | _GELU,
    "phi": _row(51200, 2048, 8192, 24, 32) | _NEW,
    "persimmon": _row(262144, 4096, 16384, 36, 64, hidden_act="relu2", qk_layernorm=True),
    "stablelm": _row(50304, 2560, 6912, 32, 32, 32, partial_rotary_factor=0.25),
    "starcoder2": _row(49152, 3072, 12288, 30, 24, 2, use_bias=True) | _TIED | _TANH,
    "nemotron": _row(256000, 6144, 24576, 32, 48, hidden_act="relu2", partial_rotary_factor=0.5),
    "jais2": _row(150272, 3328, 26624, 32, 26, hidden_act="relu2", attention_bias=True)
    | {"mlp_bias": True},
    "arcee": _row(32000, 2560, 18432, 32, 32, hidden_act="relu2"),
    "apertus": _row(131072, 4096, 14336, 32, 32, hidden_act="xielu", rope_theta=12e6),
    "llama": _LLAMA,
    "granite": _LLAMA,
    "hyperclovax": _LLAMA | {"use_post_norm": True},
    "olmo": _row(50304, 4096, 11008, 32, 32),
    "olmo2": _row(50304, 4096, 11008, 32, 32),
    "olmo3": _row(50304, 4096, 11008, 32, 32, sliding_window=4096, rope_theta=5e5),
    "mistral": _row(32000, 4096, 14336, 32, 32, 8, sliding_window=4096),
    "ministral": _row(32000, 4096, 14336, 32, 32, 8, sliding_window=4096),
    "ministral3": _row(131072, 4096, 14336, 34, 32, 8, head_dim=128, rope_theta=1e6),
    "qwen2": _QWEN2,
    "qwen2_vl_text": _QWEN_VL,
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen3": _QWEN2 | {"head_dim": 128},
    "qwen3_vl_text": _QWEN2 | {"head_dim": 128, "rope_theta": 5e5},
    "gemma": _row(256000, 3072, 24576, 28, 16, 16, head_dim=256) | _TIED | _TANH,
    "gemma2": _row(256000, 2304, 9216, 26, 8, 4, head_dim=256) | _TIED,
    "vaultgemma": _row(256000, 2304, 9216, 26, 8, 4, head_dim=256) | _TIED,
    "gemma3_text": _row(262208, 2304, 9216, 26, 8, 4, head_dim=256) | _TIED,
    "phi3": _row(32064, 3072, 8192, 32, 32),
    "granite_swa": _row(100352, 2560, 8192, 24, 20, 4, sliding_window=128) | _TIED,
    "smollm3": _row(128256, 2048, 11008, 36, 16, 4, rope_theta=2e6) | _TIED,
    "seed_oss": _row(155136, 4096, 27648, 64, 80, 8, head_dim=128, attention_bias=True),
    "cohere": _COHERE | {"rope_theta": 5e5},
    "cohere2": _COHERE | {"sliding_window": 4096},
    "glm": _GLM | {"partial_rotary_factor": 0.5},
    "glm4": _GLM | {"partial_rotary_factor": 0.5},
    "glm4v_text": _GLM | {"head_dim": None},
    "exaone4": _row(102400, 4096, 16384, 32, 32, 32, sliding_window=4096),
    "cwm": _row(128256, 6144, 21504, 64, 48, 8, head_dim=128, sliding_window=8192, rope_theta=1e6),
    "helium": _row(48000, 2560, 7040, 24, 20, 20, head_dim=128, rope_theta=1e5),
    "ernie4_5": _row(103424, 1024, 3072, 18, 16, 2, head_dim=128, rope_theta=5e5) | _TIED,
    "hunyuan_v1_dense": _row(290943, 4096, 11008, 32, 32),
    "nanochat": _row(50304, 768, 8192, 12, 6),
    # ---- experts
    "mixtral": _row(32000, 4096, 14336, 32, 32, 8, rope_theta=1e6) | _experts(None, 8, 2),
    "minimax_m2": _row(200064, 3072, 1536, 62, 48, 8, head_dim=128, rope_theta=5e6)
    | _experts(None, 256, 8),
    "phimoe": _row(32064, 4096, 6400, 32, 32, 8, rope_theta=1e6) | _experts(None, 16, 2),
    "olmoe": _row(50304, 2048, 2048, 16, 16) | _experts(None, 64, 8),
    "flex_olmo": _row(100352, 4096, 11008, 32, 32, rope_theta=5e5) | _experts(None, 7, 5),
    "granitemoe": _LLAMA | _experts(None, 8, 2),
    "granitemoeshared": _LLAMA | _experts(None, 8, 2),
    "hunyuan_v1_moe": _row(290943, 4096, 11008, 32, 32) | _experts(None, 1, 1),
    "dbrx": _row(32000, 2048, None, 24, 16),
    "gpt_oss": _row(201088, 2880, 2880, 36, 64, 8, head_dim=64, sliding_window=128)
    | _experts(None, 128, 4) | {"attention_bias": True, "rope_theta": 150_000.0},
    "qwen2_moe": _row(151936, 2048, 5632, 24, 16, 16, qkv_bias=True)
    | _experts(1408, 60, 4) | {"shared_expert_intermediate_size": 5632},
    "qwen3_moe": _row(151936, 2048, 6144, 24, 32, 4) | _experts(768, 128, 8),
    "qwen3_vl_moe_text": _row(151936, 2048, 5632, 24, 16, 16, rope_theta=5e5)
    | _experts(1408, 60, 4) | _TIED,
    "deepseek_v2": _row(102400, 4096, 11008, 32, 32, first_k_dense_replace=0)
    | _experts(1407, 64, None, 2) | _latent(512, 1536, 64, 128, 128),
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "glm4_moe_lite": _row(154880, 2048, 10240, 47, 20, 20, first_k_dense_replace=1)
    | _experts(1536, 64, 4, 1) | _latent(512, 768, 64, 192, 256),
    "mistral4": _row(131072, 4096, 12288, 36, 32, 32, first_k_dense_replace=0)
    | _experts(2048, 128, 4, 1) | _latent(256, 1024, 64, 64, 128),
    "glm4_moe": _GLM_AIR,
    "glm4v_moe_text": _GLM_AIR | {"vocab_size": 151424, "attention_bias": True},
    "dots1": _row(152064, 4608, 10944, 62, 32, 32, sliding_window=4096, max_window_layers=62)
    | _experts(1408, None, None),
    "ernie4_5_moe": _row(103424, 2560, 12288, 28, 20, 4, rope_theta=5e5)
    | _experts(1536, 64, 6, 2) | _TIED,
    "exaone_moe": _row(102400, 4096, 16384, 32, 32, 32, sliding_window=4096)
    | _experts(1024, 64, 8, 1) | {"first_k_dense_replace": 1},
    "solar_open": _row(196608, 4096, None, 48, 64, 8, head_dim=128, rope_theta=1e6)
    | _experts(1280, 128, 8, 1),
    "mimo_v2_flash": _row(152576, 4096, 16384, 48, 64, 4, head_dim=192, v_head_dim=128)
    | _experts(2048, 256, 8) | {"sliding_window": 129, "rope_theta": 5e6}
    | {"partial_rotary_factor": 0.334},
    "llama4_text": _row(202048, 5120, 8192, 48, 40, 8, head_dim=128, rope_theta=5e5)
    | _experts(None, 16, 1) | {"intermediate_size_mlp": 16384, "attention_chunk_size": 8192},
    "gemma4_text": _row(262144, 2304, 9216, 30, 8, 4, head_dim=256, sliding_window=512) | _TIED
    | {"hidden_size_per_layer_input": 256, "global_head_dim": 512, "rope_theta": 1e6},
    "step3p5": _STEP,
    "step3p7_text": _STEP,
    # ---- attention layers alone
    "gemma3n_text": _row(262400, 2048, 16384, 35, 8, 2, head_dim=256, sliding_window=512)
    | _TIED | {"rope_theta": 1e6},
    "deepseek_v32": _V3,
    "glm_moe_dsa": _row(154880, 6144, 12288, 78, 64, 64) | _latent(512, 2048, 64, 192, 256),
    "qwen3_next": _row(151936, 2048, 5632, 48, 16, 2, head_dim=256),
    "qwen3_5_text": _row(248320, 4096, 12288, 32, 16, 4, head_dim=256),
    "qwen3_5_moe_text": _row(248320, 2048, None, 40, 16, 2, head_dim=256),
    "lfm2": _row(65536, 2560, 12288, 32, 32, 8, rope_theta=1e6),
    "lfm2_moe": _row(65536, 2048, 7168, 32, 32, 8, rope_theta=1e6),
    "jamba": _row(65536, 4096, 14336, 32, 32, 8, attn_layer_period=8, attn_layer_offset=4),
    "bamba": _row(128000, 4096, 14336, 32, 32, 8, partial_rotary_factor=0.5),
    "nemotron_h": _row(131072, 4096, 21504, None, 32, 8, head_dim=128)
    | {"layer_types": ["linear_attention", "moe", "full_attention", "mlp"]},
    "falcon_h1": _row(128000, 4096, 14336, 32, 32, 8),
    "kimi_linear": _row(163840, 2304, 9216, 27, 32, 32) | _latent(512, None, 64, 128, 128),
    "olmo_hybrid": _row(100352, 3840, 11008, 32, 30),
    "granitemoehybrid": _LLAMA | _experts(None, 8, 2) | {"shared_intermediate_size": 1024},
    "minimax": _row(32000, 4096, 14336, 32, 32, 8, rope_theta=1e6),
    "muse_spark_text": _row(202048, 8192, 16384, 62, 128, 16, head_dim=64, sliding_window=2048),
    "glm5_next_text": _row(154880, 4096, 12288, 45, 64, 64) | _latent(512, 1536, 0, 256, 256),
    # ---- encoders
    "bert": _BERT,
    "roberta": _BERT | {"vocab_size": 50265},
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "electra": _BERT | {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    | {"embedding_size": 128},
    "albert": _BERT | _NEW | {"vocab_size": 30000, "hidden_size": 4096}
    | {"intermediate_size": 16384, "num_attention_heads": 64},
    "distilbert": _row(30522, 768, 3072, 6, 12, max_position_embeddings=512) | _GELU,
    "modernbert": _row(50368, 768, 1152, 22, 12, hidden_activation="gelu", local_attention=128),
    "vit": _VIT,
    "deit": _VIT,
    "dinov2": _VIT | {"patch_size": 14},
    "dinov2_with_registers": _VIT | {"num_register_tokens": 4},
    "siglip_vision_model": _TOWER | _TANH | _image(),
    "siglip_text_model": _row(32000, 768, 3072, 12, 12, max_position_embeddings=64) | _TANH,
    "clip_vision_model": _TOWER | _image(patch=32) | {"hidden_act": "quick_gelu"},
    "clip_text_model": _row(49408, 512, 2048, 12, 8, max_position_embeddings=77)
    | {"hidden_act": "quick_gelu"},
}  # fmt: skip
