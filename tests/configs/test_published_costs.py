"""Costs that others published after they had counted them wrong, and what was released since the
middle of 2025. Each number is the fixer's own."""

import math

import pytest
from support.public_configs import PUBLIC

from headwise.shape import Shape

GiB = 2**30


def shape_of(name):
    return Shape.from_hf(PUBLIC[name])


def test_training_flops_of_gpt_oss_20b():
    """github.com/NVIDIA-NeMo/Automodel/pull/3091: 87.64 TFLOP with dim // num_heads, then
    93.848227282944, windows counted; without the router."""
    shape, tokens = shape_of("gpt-oss-20b"), 4096
    router = shape.depth * shape.dim * shape.num_experts
    counted = shape.flops(tokens, training=True) - 6 * tokens * router
    assert counted == 93_848_227_282_944
    narrow = shape.replace(head_dim=45, v_head_dim=45, qk_rope_head_dim=44)
    wrong = narrow.flops(tokens, training=True) - 6 * tokens * router
    assert wrong == 87_640_983_797_760


def test_training_flops_of_qwen3_30b_per_token():
    """github.com/pytorch/torchtitan/pull/4300: 37,578,559,488 at 8,192 tokens, all pairs of keys,
    and six for each gain of a norm."""
    shape = shape_of("Qwen3-30B-A3B").replace(causal=False)
    gains = shape.param_table()["norms"] + shape.depth * 2 * shape.head_dim
    assert shape.train_flops_per_token(8192) + 6 * gains == 37_578_559_488


def test_training_flops_of_qwen3_235b_at_192k():
    """github.com/NVIDIA-NeMo/RL/pull/2736: 111.0 PFLOP per sequence with dim // num_heads, then
    204.4, 1.842 times. Ours is 0.2 % below both."""
    shape, tokens = shape_of("Qwen3-235B-A22B"), 192 * 1024
    narrow = shape.replace(head_dim=64, v_head_dim=64, qk_rope_head_dim=64)
    right, wrong = (s.flops(tokens, training=True) / 1e15 for s in (shape, narrow))
    assert math.isclose(right, 204.4, rel_tol=3e-3)
    assert math.isclose(wrong, 111.0, rel_tol=3e-3)
    assert math.isclose(right / wrong, 1.842, abs_tol=1e-3)


# github.com/unslothai/unsloth/pull/4757: caches at full context in GiB, after the fix. Gemma 3's
# windows, DeepSeek's latent, GLM-5's (with its layer of multi-token prediction, the 79th), and a
# head_dim that is not dim // num_heads.
CACHES = [
    (
        {"model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504}
        | {"num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16}
        | {"head_dim": 128, "sliding_window": 1024},
        131_072,
        10.41,
    ),
    (PUBLIC["DeepSeek-V3"], 163_840, 10.72),
    ({"model_type": "glm_moe_dsa", "num_hidden_layers": 79}, 202_752, 17.18),
    (
        {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072}
        | {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
        40_960,
        4.38,
    ),
]


@pytest.mark.parametrize(("config", "context", "published"), CACHES)
def test_caches_at_full_context(config, context, published):
    shape = Shape.from_hf(config, part="attention")
    assert math.isclose(shape.kv_bytes(context) / GiB, published, abs_tol=0.006)


def test_heads_of_qwen3_4b_are_wider_than_dim():
    """github.com/pytorch/torchtitan/issues/1920: 32 heads of 128 on 2560."""
    shape = Shape.from_hf(
        {"model_type": "qwen3", "hidden_size": 2560, "num_attention_heads": 32}
        | {"num_hidden_layers": 36, "num_key_value_heads": 8, "intermediate_size": 9728}
    )
    assert shape.num_heads * shape.head_dim == 4096
    one = 2 * 32 * (128 + 128) * 36
    assert shape.flops(2) - 2 * shape.flops(1) == one  # the third pair of two causal tokens


# Released since the middle of 2025: dim, layers with attention, heads, rank, value width, numbers
# per token in the cache of the last layer, heads times rank over dim.
RELEASED = {
    "gpt-oss-120b": (PUBLIC["gpt-oss-120b"], 2880, 36, 64, 64, 64, 2 * 8 * 64, 1.42),
    "GLM-4.5-Air": (PUBLIC["GLM-4.5-Air"], 4096, 46, 96, 128, 128, 2 * 8 * 128, 3.0),
    "GLM-4.5": (PUBLIC["GLM-4.5"], 5120, 92, 96, 128, 128, 2 * 8 * 128, 2.4),
    "GLM-5": ({"model_type": "glm_moe_dsa"}, 6144, 78, 64, 256, 256, 512 + 64, 2.67),
    "GLM5-next": ({"model_type": "glm5_next_text"}, 4096, 11, 64, 256, 256, 512, 4.0),
    "Qwen3-Next": ({"model_type": "qwen3_next"}, 2048, 12, 16, 256, 256, 2 * 2 * 256, 2.0),
    "Gemma 4": (PUBLIC["gemma-4-31b"], 5376, 60, 32, 512, 512, 2 * 4 * 512, 3.05),
    "DeepSeek-V3.2": ({"model_type": "deepseek_v32"}, 7168, 61, 128, 192, 128, 512 + 64, 3.43),
    "Kimi-K2": (PUBLIC["Kimi-K2"], 7168, 61, 64, 192, 128, 512 + 64, 1.71),
    "Kimi-Linear": ({"model_type": "kimi_linear"}, 2304, 6, 32, 192, 128, 512 + 64, 2.67),
    "Mistral 4": (PUBLIC["Mistral-4"], 4096, 36, 32, 128, 128, 256 + 64, 1.0),
    "MiMo-V2-Flash": (PUBLIC["MiMo-V2-Flash"], 4096, 48, 64, 192, 128, 4 * (192 + 128), 3.0),
    "MiniMax-M2": (PUBLIC["MiniMax-M2"], 3072, 62, 48, 128, 128, 2 * 8 * 128, 2.0),
    "Muse Spark": ({"model_type": "muse_spark_text"}, 8192, 62, 128, 64, 64, 2 * 16 * 64, 1.0),
}


@pytest.mark.parametrize("name", RELEASED)
def test_models_since_the_middle_of_2025(name):
    config, dim, depth, heads, rank, value, cached, wide = RELEASED[name]
    shape = Shape.from_hf(config, part="attention")
    last = shape.layer(shape.depth - 1)
    assert (shape.dim, shape.depth, last.num_heads) == (dim, depth, heads)
    assert (last.head_dim, last.v_head_dim) == (rank, value)
    assert shape.kv_width(layer=depth - 1) == cached
    assert math.isclose(last.num_heads * last.head_dim / dim, wide, abs_tol=0.006)
