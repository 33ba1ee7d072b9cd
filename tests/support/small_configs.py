"""Small configs of every public family: sizes that are hard to confuse, and what may be chosen."""

BASE = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 35,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
HEAD_DIM = {"head_dim": 14}
EVEN = {"head_dim": 12}  # where half of a head is rotated
TEXT = {key: BASE[key] for key in BASE if key != "num_key_value_heads"}
IMAGE = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
IMAGE |= {"image_size": 21, "patch_size": 7, "num_channels": 3}
ENCODER = TEXT | {"num_hidden_layers": 3, "max_position_embeddings": 37, "type_vocab_size": 3}
LATENT = {"kv_lora_rank": 10, "q_lora_rank": 13, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6}
LATENT |= {"v_head_dim": 10, "num_key_value_heads": 6}
ROUTED = {"n_routed_experts": 7, "num_experts_per_tok": 3, "n_shared_experts": 2}
ROUTED |= {"moe_intermediate_size": 17, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1}
LOCAL = {"num_local_experts": 7, "num_experts_per_tok": 3}
GPT = {"vocab_size": 211, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 37}
KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
KINDS = [*KINDS, "sliding_attention"]
WINDOW = {"sliding_window": 5}
TYPED = WINDOW | {"layer_types": KINDS}
SPARSE = {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"]}


def yes(*names):
    return [{name: True} for name in names]


def no(*names):
    return [{name: False} for name in names]


def sections(*widths):
    """Rotary positions in three dimensions, these many pairs of coordinates each."""
    shared = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    whole = shared | {"partial_rotary_factor": 1.0} if sum(widths) == 4 else shared
    return whole | {"mrope_section": list(widths)}


LATE_WINDOWS = [{"use_sliding_window": True, "max_window_layers": 2} | WINDOW]
BIASES = yes("attention_bias", "mlp_bias")
TIED = [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}]
PART = [{"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}]

# model_type: its values, and the changes that are tried, alone and all together where they can be.
SMALL = {
    "apertus": (BASE | HEAD_DIM, [*BIASES[:1], *TIED, {"hidden_act": "relu2"}]),
    "arcee": (BASE | HEAD_DIM, [*BIASES, *TIED]),
    "biogpt": (TEXT | {"max_position_embeddings": 37}, TIED),
    "bloom": ({"vocab_size": 211, "hidden_size": 48, "n_layer": 3, "n_head": 6}, TIED),
    "codegen": (GPT | {"rotary_dim": 4, "n_head": 4}, [{"n_inner": 31}]),
    "cohere": (BASE | HEAD_DIM, [*BIASES[:1], *TIED, *yes("use_qk_norm")]),
    "cohere2": (BASE, [*BIASES[:1], TYPED, WINDOW, {"sliding_window_pattern": 2}]),
    "cwm": (BASE | HEAD_DIM, [*BIASES[1:], TYPED, WINDOW]),
    "dbrx": (
        {"vocab_size": 211, "d_model": 48, "n_heads": 6, "n_layers": 3}
        | {"attn_config": {"kv_n_heads": 2, "rope_theta": 5e4, "clip_qkv": 8.0}}
        | {"ffn_config": {"ffn_hidden_size": 35, "moe_num_experts": 7, "moe_top_k": 3}},
        TIED[1:],
    ),
    "deepseek_v2": (
        BASE | LATENT | ROUTED,
        [{"q_lora_rank": None}, *BIASES, {"n_routed_experts": 3}, {"first_k_dense_replace": 5}],
    ),
    "deepseek_v3": (
        BASE | LATENT | ROUTED,
        [{"q_lora_rank": None}, *BIASES[:1], *TIED, {"first_k_dense_replace": 9}],
    ),
    "dots1": (BASE | HEAD_DIM | ROUTED, [*BIASES[:1], WINDOW | {"max_window_layers": 2}, TYPED]),
    "ernie4_5": (BASE | HEAD_DIM, [*yes("use_bias"), *TIED]),
    "ernie4_5_moe": (
        BASE
        | {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 17}
        | {"moe_num_shared_experts": 2},
        [
            *yes("use_bias"),
            {"moe_layer_interval": 2},
            {"moe_layer_end_index": 3},
            {"moe_layer_start_index": 0},
        ],
    ),
    "exaone4": (
        BASE | HEAD_DIM,
        [{"sliding_window": None, "layer_types": ["full_attention"] * 5}, TYPED, WINDOW],
    ),
    "exaone_moe": (
        BASE | HEAD_DIM | {"num_experts": 7, "num_experts_per_tok": 3}
        | {"num_shared_experts": 2, "moe_intermediate_size": 17, "first_k_dense_replace": 2},
        [TYPED, WINDOW, SPARSE],
    ),
    "falcon": (
        {"vocab_size": 211, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
        | {"num_kv_heads": 2},
        [
            *yes("alibi", "bias", "new_decoder_architecture"),
            *no("multi_query", "tie_word_embeddings"),
            {"new_decoder_architecture": False, "parallel_attn": False},
            {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
            {"ffn_hidden_size": 35},
        ],
    ),
    "flex_olmo": (BASE | {"num_experts": 7, "num_experts_per_tok": 3}, [*BIASES[:1], *TIED]),
    "gemma": (BASE | HEAD_DIM, [*BIASES[:1], *TIED]),
    "gemma2": (BASE | HEAD_DIM | WINDOW, [*BIASES[:1], {"query_pre_attn_scalar": 31}, TYPED]),
    "gemma3_text": (BASE | HEAD_DIM | WINDOW, [*BIASES[:1], {"query_pre_attn_scalar": 31}, TYPED]),
    "gemma4_text": (
        BASE | HEAD_DIM | WINDOW
        | {"hidden_size_per_layer_input": 0, "global_head_dim": 24, "num_global_key_value_heads": 3}
        | {"num_hidden_layers": 7},
        [
            {"attention_k_eq_v": True},
            {"num_kv_shared_layers": 3, "layer_types": [*KINDS[1:], *KINDS[1:]][1:]},
            {"num_kv_shared_layers": 3, "use_double_wide_mlp": True}
            | {"layer_types": [*KINDS[1:], *KINDS[1:]][1:]},
            {"enable_moe_block": True, "num_experts": 7, "top_k_experts": 3}
            | {"moe_intermediate_size": 17, "attention_k_eq_v": True},
        ],
    ),
    "glm": (BASE | EVEN, [{"attention_bias": False}, *TIED]),
    "glm4": (BASE | EVEN, [{"attention_bias": False}, *TIED]),
    "glm4_moe": (BASE | EVEN | ROUTED, [*BIASES[:1], *TIED, *yes("use_qk_norm")]),
    "glm4_moe_lite": (BASE | LATENT | ROUTED, [*BIASES[:1], SPARSE, {"q_lora_rank": None}]),
    "glm4v_moe_text": (BASE | EVEN | ROUTED | {"rope_parameters": sections(1, 1, 1)}, BIASES[:1]),
    "glm4v_text": (BASE | {"rope_parameters": sections(2, 1, 1)}, []),
    "gpt2": (GPT, [{"n_inner": 31}, *no("tie_word_embeddings", "scale_attn_weights")]),
    "gpt_bigcode": (GPT, [*no("multi_query", "tie_word_embeddings"), {"n_inner": 31}]),
    "gpt_neo": (
        {"vocab_size": 211, "hidden_size": 48, "num_layers": 4, "num_heads": 6}
        | {"window_size": 5, "max_position_embeddings": 37}
        | {"attention_types": [[["global", "local"], 2]]},
        [
            {"intermediate_size": 31},
            {"attention_types": [[["global", "local", "local"], 1], [["global"], 1]]},
        ],
    ),
    "gpt_neox": (
        TEXT,
        [*no("use_parallel_residual", "attention_bias"), *TIED, {"rotary_pct": 0.5}],
    ),
    "gpt_oss": (BASE | HEAD_DIM | LOCAL | WINDOW, [TYPED, *TIED]),
    "gptj": (GPT | {"rotary_dim": 4}, [{"n_inner": 31}, {"rotary_dim": 8}]),
    "granite": (BASE, [*BIASES, *TIED, {"attention_multiplier": 0.25}]),
    "granite_swa": (BASE | WINDOW, [*BIASES, TYPED, {"layer_rope_theta": [0, 1e4, 0, 1e4, 1e4]}]),
    "granitemoe": (BASE | LOCAL, [*BIASES[:1], *TIED]),
    "granitemoeshared": (BASE | LOCAL, [*BIASES[:1], {"shared_intermediate_size": 23}]),
    "helium": (BASE | {"head_dim": 8}, BIASES),
    "hunyuan_v1_dense": (BASE | HEAD_DIM, BIASES[:1]),
    "hunyuan_v1_moe": (BASE | HEAD_DIM | {"num_experts": 7, "moe_topk": 3}, BIASES[:1]),
    "hyperclovax": (BASE | HEAD_DIM, [*BIASES, *no("use_post_norm")]),
    "jais2": (BASE | HEAD_DIM, no("attention_bias", "mlp_bias")),
    "llama": (BASE | HEAD_DIM, [*BIASES, *TIED, *PART]),
    "llama4_text": (
        BASE | HEAD_DIM | LOCAL | {"intermediate_size_mlp": 41},
        [
            *(*BIASES[:1], *no("use_qk_norm"), {"attention_chunk_size": 5}),
            {"interleave_moe_layer_step": 2},
            {"moe_layers": [1, 4]},
        ],
    ),
    "mimo_v2_flash": (
        BASE | {"head_dim": 12, "v_head_dim": 10, "num_attention_heads": 8}
        | {"n_routed_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 17}
        | {"sliding_window": 5, "n_group": 1, "topk_group": 1}
        | {"partial_rotary_factor": 0.334},
        [*BIASES[:1], SPARSE, TYPED],
    ),
    "minimax_m2": (BASE | HEAD_DIM | LOCAL, TIED),
    "ministral": (BASE | HEAD_DIM | WINDOW, [{"sliding_window": None}, TYPED]),
    "ministral3": (BASE | HEAD_DIM, [WINDOW, *TIED]),
    "mistral": (BASE | HEAD_DIM, [WINDOW, {"sliding_window": None}, *TIED]),
    "mistral4": (BASE | LATENT | ROUTED, BIASES[:1]),
    "mixtral": (BASE | HEAD_DIM | LOCAL, [WINDOW, *TIED]),
    "mpt": (
        {"vocab_size": 211, "d_model": 48, "n_heads": 6, "n_layers": 3},
        [{"attn_config": {"softmax_scale": 0.25}}],
    ),
    "nanochat": (BASE, [*BIASES[:1], *TIED]),
    "nemotron": (BASE | EVEN, [*BIASES, *TIED]),
    "olmo": (BASE, [*BIASES[:1], *TIED, {"clip_qkv": 8.0}]),
    "olmo2": (BASE, [*BIASES[:1], *TIED]),
    "olmo3": (BASE | WINDOW, [*BIASES[:1], TYPED]),
    "olmoe": (BASE | {"num_experts": 7, "num_experts_per_tok": 3}, [*BIASES[:1], *TIED]),
    "openai-gpt": (GPT, []),
    "opt": (
        {"vocab_size": 211, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
        | {"ffn_dim": 35, "max_position_embeddings": 37, "word_embed_proj_dim": 48},
        no("enable_bias", "do_layer_norm_before", "tie_word_embeddings"),
    ),
    "persimmon": (TEXT, [*no("qk_layernorm"), *TIED]),
    "phi": (BASE, yes("qk_layernorm")),
    "phi3": (BASE, [WINDOW, *TIED]),
    "phimoe": (
        BASE | LOCAL | {"num_experts_per_tok": 2},
        [*yes("attention_bias", "lm_head_bias"), WINDOW],
    ),
    "qwen2": (BASE | HEAD_DIM, LATE_WINDOWS),
    "qwen2_5_vl_text": (BASE | {"rope_parameters": sections(2, 1, 1)}, LATE_WINDOWS),
    "qwen2_moe": (
        BASE | {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 17}
        | {"shared_expert_intermediate_size": 23},
        [
            {"decoder_sparse_step": 2},
            {"mlp_only_layers": [0, 3]},
            {"qkv_bias": False},
            {"num_experts": 0},
            {"use_sliding_window": True, "max_window_layers": 4} | WINDOW,
        ],
    ),
    "qwen2_vl_text": (BASE | {"rope_parameters": sections(2, 1, 1)}, LATE_WINDOWS),
    "qwen3": (
        BASE | HEAD_DIM,
        [*BIASES[:1], *LATE_WINDOWS],
    ),
    "qwen3_moe": (
        BASE | HEAD_DIM | {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 17},
        [
            *BIASES[:1],
            {"decoder_sparse_step": 2},
            {"mlp_only_layers": [0, 3]},
            {"use_sliding_window": True} | WINDOW,
        ],
    ),
    "qwen3_vl_moe_text": (
        BASE | HEAD_DIM | {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 17},
        [*BIASES[:1], {"decoder_sparse_step": 2}],
    ),
    "qwen3_vl_text": (BASE | HEAD_DIM, BIASES[:1]),
    "seed_oss": (BASE | HEAD_DIM, [*BIASES[1:], *yes("attention_out_bias"), *no("attention_bias")]),
    "smollm3": (
        BASE,
        [*BIASES, {"no_rope_layer_interval": 2}, {"use_sliding_window": True} | WINDOW],
    ),
    "solar_open": (BASE | HEAD_DIM | ROUTED | {"first_k_dense_replace": 0}, BIASES[:1]),
    "stablelm": (BASE, yes("use_qkv_bias", "qk_layernorm", "use_parallel_residual")),
    "starcoder2": (BASE, [WINDOW, *no("use_bias", "tie_word_embeddings")]),
    "step3p7_text": (
        BASE | HEAD_DIM | WINDOW | {"num_sliding_attention_heads": 4, "layer_types": KINDS}
        | {"n_routed_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 17}
        | {"share_expert_dim": 23},
        [SPARSE],
    ),
    "vaultgemma": (BASE | HEAD_DIM | WINDOW, BIASES[:1]),
    # ---- encoders
    "albert": (ENCODER | {"num_hidden_layers": 1, "embedding_size": 13}, [{"embedding_size": 48}]),
    "bert": (ENCODER, yes("is_decoder")),
    "camembert": (ENCODER, []),
    "clip_text_model": (TEXT | {"num_hidden_layers": 3, "max_position_embeddings": 37}, []),
    "clip_vision_model": (IMAGE | {"intermediate_size": 35}, []),
    "deit": (IMAGE | {"intermediate_size": 35}, [*no("qkv_bias"), {"pooler_output_size": 19}]),
    "dinov2": (IMAGE, [*no("qkv_bias", "use_mask_token"), *yes("use_swiglu_ffn")]),
    "dinov2_with_registers": (IMAGE, [{"num_register_tokens": 3}, *yes("use_swiglu_ffn")]),
    "distilbert": (
        {"vocab_size": 211, "dim": 48, "hidden_dim": 35, "n_layers": 3, "n_heads": 6}
        | {"max_position_embeddings": 37},
        [],
    ),
    "electra": (ENCODER | {"embedding_size": 13}, [{"embedding_size": 48}]),
    "modernbert": (
        TEXT,
        [
            *yes("attention_bias", "mlp_bias", "norm_bias"),
            {"local_attention": 6},
            {"layer_types": KINDS},
        ],
    ),
    "roberta": (ENCODER, []),
    "siglip_text_model": (TEXT | {"max_position_embeddings": 37, "projection_size": 19}, []),
    "siglip_vision_model": (IMAGE | {"intermediate_size": 35}, no("vision_use_head")),
    "vit": (IMAGE | {"intermediate_size": 35}, no("qkv_bias")),
    "xlm-roberta": (ENCODER, []),
}  # fmt: skip
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")


def variants(model_type):
    """The values of a family alone, with each change, and with all of them that go together."""
    base, changes = SMALL[model_type]
    together = {}
    for change in changes:
        if not set(change) & set(together):
            together |= change
    seen = []
    for change in ({}, *changes, together):
        if change not in seen:
            seen.append(change)
            yield base | change
