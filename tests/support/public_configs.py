"""Public models by what their config.json says: the keys that sizes depend on. Parameter counts are
not here: the tests ask the public class for them."""

import json

COLUMNS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
SHORT = {
    "tied": "tie_word_embeddings",
    "bias": "attention_bias",
    "window": "sliding_window",
    "narrow": "moe_intermediate_size",
    "local": "num_local_experts",
    "routed": "n_routed_experts",
    "shared": "n_shared_experts",
    "chosen": "num_experts_per_tok",
    "first": "first_k_dense_replace",
    "scale": "attention_multiplier",
    "positions": "max_position_embeddings",
    "types": "type_vocab_size",
}
# name, model_type, the columns, other keys
ROWS = """
Mixtral-8x7B         mixtral          32000  4096 14336 32 32 8  - local=8 chosen=2
Mixtral-8x22B        mixtral          32768  6144 16384 56 48 8  - local=8 chosen=2
Qwen1.5-MoE-A2.7B    qwen2_moe        151936 2048 5632  24 16 16 -
Qwen2-57B-A14B       qwen2_moe        151936 3584 18944 28 28 4  - narrow=2560 shared_expert_intermediate_size=20480 num_experts=64 chosen=8
Qwen3-30B-A3B        qwen3_moe        151936 2048 6144  48 32 4  128 narrow=768 num_experts=128 chosen=8
Qwen3-235B-A22B      qwen3_moe        151936 4096 12288 94 64 4  128 narrow=1536 num_experts=128 chosen=8
Qwen3-Coder-480B     qwen3_moe        151936 6144 8192  62 96 8  128 narrow=2560 num_experts=160 chosen=8
DeepSeek-V2-Lite     deepseek_v2      102400 2048 10944 27 16 16 - narrow=1408 routed=64 shared=2 chosen=6 first=1 q_lora_rank=null
DeepSeek-V2          deepseek_v2      102400 5120 12288 60 128 128 - narrow=1536 routed=160 shared=2 chosen=6 first=1
DeepSeek-V3          deepseek_v3      129280 7168 18432 61 128 128 - narrow=2048 routed=256 shared=1 chosen=8 first=3
Kimi-K2              kimi_k2          163840 7168 18432 61 64 64 - narrow=2048 routed=384 shared=1 chosen=8 first=1
gpt-oss-20b          gpt_oss          201088 2880 2880  24 64 8  64 local=32 chosen=4 window=128
gpt-oss-120b         gpt_oss          201088 2880 2880  36 64 8  64 local=128 chosen=4 window=128
GLM-4.5-Air          glm4_moe         151552 4096 10944 46 96 8  128 narrow=1408 routed=128 shared=1 chosen=8 first=1 bias=true
GLM-4.5              glm4_moe         151552 5120 12288 92 96 8  128 narrow=1536 routed=160 shared=1 chosen=8 first=3 bias=true use_qk_norm=true
GLM-4.7-Flash        glm4_moe_lite    154880 2048 10240 47 20 20 - narrow=1536 routed=64 shared=1 chosen=4 first=1
Llama-4-Scout        llama4_text      202048 5120 8192  48 40 8  128 local=16 chosen=1 interleave_moe_layer_step=1 intermediate_size_mlp=16384
Llama-4-Maverick     llama4_text      202048 5120 8192  48 40 8  128 local=128 chosen=1 interleave_moe_layer_step=2 intermediate_size_mlp=16384
MiniMax-M2           minimax_m2       200064 3072 1536  62 48 8  128 local=256 chosen=8
granite-3.0-1b-a400m granitemoe       49155  1024 512   24 16 8  - local=32 chosen=8 tied=true scale=0.015625
granite-3.0-3b-a800m granitemoe       49155  1536 512   32 24 8  - local=40 chosen=8 tied=true scale=0.015625
OLMoE-1B-7B          olmoe            50304  2048 1024  16 16 16 - num_experts=64 chosen=8
FlexOlmo-7x7B        flex_olmo        100352 4096 11008 32 32 32 - num_experts=7 chosen=5
Phi-3.5-MoE          phimoe           32064  4096 6400  32 32 8  - local=16 chosen=2 bias=true lm_head_bias=true
Hunyuan-A13B         hunyuan_v1_moe   128167 4096 3072  32 32 8  128 num_experts=64 moe_topk=8
ERNIE-4.5-21B-A3B    ernie4_5_moe     103424 2560 12288 28 20 4  - moe_num_experts=64 moe_k=6 narrow=1536 moe_num_shared_experts=2
dots.llm1            dots1            152064 4096 10944 62 32 32 - narrow=1408 routed=128 shared=2 chosen=6 first=1
MiMo-V2-Flash        mimo_v2_flash    152576 4096 16384 48 64 4  192 v_head_dim=128 routed=256 chosen=8 narrow=2048
Mistral-4            mistral4         131072 4096 12288 36 32 32 - routed=128 shared=1 chosen=4 narrow=2048
Solar-Open           solar_open       196608 4096 10240 48 64 8  128 narrow=1280 routed=128 shared=1 chosen=8
Qwen3-VL-30B-text    qwen3_vl_moe_text 151936 2048 6144 48 32 4  128 narrow=768 num_experts=128 chosen=8 tied=false
granite-3.3-8b       granite          49159  4096 12800 40 32 8  - tied=true scale=0.0078125
SmolLM3-3B           smollm3          128256 2048 11008 36 16 4  -
Seed-OSS-36B         seed_oss         155136 5120 27648 64 80 8  128 bias=true
pythia-160m          gpt_neox         50304  768  3072  12 12 -  - rotary_pct=0.25
pythia-6.9b          gpt_neox         50432  4096 16384 32 32 -  - rotary_pct=0.25
gpt-neox-20b         gpt_neox         50432  6144 24576 44 64 -  - rotary_pct=0.25
gpt-neo-1.3b         gpt_neo          50257  2048 -     24 16 -  -
starcoder            gpt_bigcode      49152  6144 24576 40 48 -  - n_positions=8192
starcoder2-3b        starcoder2       49152  3072 12288 30 24 2  - window=4096
starcoder2-15b       starcoder2       49152  6144 24576 40 48 4  - window=4096
stablelm-3b-4e1t     stablelm         50304  2560 6912  32 32 32 -
stablelm-2-12b       stablelm         100352 5120 13824 40 32 8  - qk_layernorm=true use_parallel_residual=true
aya-23-8b            cohere           256000 4096 14336 32 32 8  -
command-r-plus       cohere           256000 12288 33792 64 96 8 - use_qk_norm=true
command-r7b          cohere2          256000 4096 14336 32 32 8  - window=4096
glm-4-9b             glm              151552 4096 13696 40 32 2  128 bias=true
GLM-4-32B-0414       glm4             151552 6144 23040 61 48 2  128 bias=false
OLMo-7B              olmo             50304  4096 11008 32 32 32 -
OLMo-2-7B            olmo2            100352 4096 11008 32 32 32 -
OLMo-3-7B            olmo3            100278 4096 11008 32 32 32 - window=4096
OLMo-3-32B           olmo3            100278 5120 27648 64 40 8  - window=4096
EXAONE-4.0-32B       exaone4          102400 5120 27392 64 40 8  128 window=4096
AFM-4.5B             arcee            128004 2560 18432 36 20 4  128
Apertus-8B           apertus          131072 4096 21504 32 32 8  -
Helium-1-2b          helium           64000  2048 8192  24 16 8  128
Minitron-4B          nemotron         256000 3072 9216  32 24 8  128
falcon-7b            falcon           65024  4544 -     32 71 -  - multi_query=true parallel_attn=true bias=false
falcon-40b           falcon           65024  8192 -     60 128 - - num_kv_heads=8 new_decoder_architecture=true
falcon-rw-1b         falcon           50304  2048 -     24 32 -  - alibi=true bias=true multi_query=false parallel_attn=false
bloom-560m           bloom            250880 1024 -     24 16 -  -
bloom                bloom            250880 14336 -    70 112 - -
mpt-7b               mpt              50432  4096 -     32 32 -  -
opt-125m             opt              50272  768  -     12 12 -  - ffn_dim=3072 word_embed_proj_dim=768
opt-6.7b             opt              50272  4096 -     32 32 -  - ffn_dim=16384 word_embed_proj_dim=4096
persimmon-8b         persimmon        262144 4096 16384 36 64 -  -
ERNIE-4.5-0.3B       ernie4_5         103424 1024 3072  18 16 2  128
Hunyuan-7B           hunyuan_v1_dense 128167 4096 14336 32 32 8  128
CWM                  cwm              128256 6144 21504 64 48 8  128
Ministral-3-14B      ministral3       131072 5120 16384 40 32 8  128
VaultGemma-1B        vaultgemma       256000 1152 6912  26 4  1  256
gemma-4-31b          gemma4_text      262144 5376 21504 60 32 16 256 hidden_size_per_layer_input=0 attention_k_eq_v=true num_global_key_value_heads=4 window=1024
gpt-j-6b             gptj             50400  4096 -     28 16 -  - rotary_dim=64
codegen-2B           codegen          51200  2560 -     32 32 -  - rotary_dim=64
openai-gpt           openai-gpt       40478  768  -     12 12 -  -
roberta-base         roberta          50265  768  3072  12 12 -  - positions=514 types=1
xlm-roberta-base     xlm-roberta      250002 768  3072  12 12 -  - positions=514 types=1
distilbert-base      distilbert       30522  768  -     6  12 -  -
albert-one-layer     albert           30000  768  3072  1  12 -  -
electra-small        electra          30522  256  1024  12 4  -  - embedding_size=128
modernbert-large     modernbert       50368  1024 2624  28 16 -  -
deit-base            deit             -      768  3072  12 12 -  -
dinov2-base          dinov2           -      768  -     12 12 -  - image_size=518
dinov2-giant         dinov2           -      1536 -     40 24 -  - image_size=518 use_swiglu_ffn=true
siglip-so400m        siglip_vision_model - 1152 4304 27 16 - - image_size=384 patch_size=14
siglip-base-text     siglip_text_model 32000 768 3072   12 12 -  - positions=64
clip-vit-l-vision    clip_vision_model - 1024 4096 24 16 - - patch_size=14
clip-vit-l-text      clip_text_model  49408  768  3072  12 12 -  -
"""  # noqa: E501
# What config.json nests.
NESTED = {
    "dbrx": {
        "model_type": "dbrx",
        **{"vocab_size": 100352, "d_model": 6144, "n_heads": 48, "n_layers": 40},
        "attn_config": {"kv_n_heads": 8, "rope_theta": 500000, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    },
}


def rows(text):
    for line in text.strip().splitlines():
        name, model_type, *cells = line.split()
        sizes, more = cells[: len(COLUMNS)], cells[len(COLUMNS) :]
        config = {"model_type": model_type}
        config |= {key: int(n) for key, n in zip(COLUMNS, sizes, strict=True) if n != "-"}
        for key, value in (item.split("=") for item in more):
            config[SHORT.get(key, key)] = json.loads(value)
        yield name, config


PUBLIC = {**dict(rows(ROWS)), **NESTED}
# Published in the model cards or weights, a check of the configs above.
PUBLISHED = {
    "Mixtral-8x7B": 46_702_792_704,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-V3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "OLMoE-1B-7B": 6_919_161_856,
    "SmolLM3-3B": 3_075_098_624,
    "pythia-160m": 162_322_944,
    "pythia-6.9b": 6_857_302_016,
    "falcon-7b": 6_921_720_704,
    "bloom-560m": 559_214_592,
    "opt-125m": 125_239_296,
    "gpt-j-6b": 6_050_882_784,
    "roberta-base": 124_645_632,
    "xlm-roberta-base": 278_043_648,
    "distilbert-base": 66_362_880,
    "dinov2-base": 86_580_480,
}
