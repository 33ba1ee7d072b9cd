"""Figures that other projects corrected in public, after `head_dim = dim / heads`, a forgotten
latent or a forgotten window had made theirs wrong: a plan's costs are the corrected ones."""

import pytest

from headwise.planning.costs import COSTS, At
from headwise.shape import Shape

QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
GEMMA3_27B = {
    "model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
    "intermediate_size": 21_504, "sliding_window": 1024, "vocab_size": 262_208,
}  # fmt: skip
QWEN3_235B = {
    "model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 4096,
    "intermediate_size": 12_288, "num_hidden_layers": 94, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 1536, "num_experts": 128,
    "num_experts_per_tok": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "context", "gib"),  # unslothai/unsloth#4757: 2.19, 81.38 and 2.08 before
    [
        (QWEN3, 40_960, 4.38),
        (GEMMA3_27B, 131_072, 10.41),
        ({"model_type": "deepseek_v3"}, 163_840, 10.72),
    ],
)
def test_cache_at_full_context_is_the_corrected_one(config: dict, context: int, gib: float) -> None:
    bytes_ = COSTS["kv_bytes_at_context"].of(Shape.from_hf(config), At(context=context))
    assert bytes_ / 2**30 == pytest.approx(gib, abs=0.006)


def test_training_flops_of_gpt_oss_are_the_corrected_ones_and_its_router() -> None:
    """NVIDIA-NeMo/Automodel#3091: 4,096 tokens, 87.640983797760 before, router left out."""
    shape = Shape.from_hf(
        {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}
    )
    per_token = COSTS["train_flops_per_token"].of(shape, At(context=4096))
    router = 6 * shape.depth * shape.dim * shape.num_experts
    assert (per_token - router) * 4096 == 93_848_227_282_944


def test_training_flops_of_qwen3_235b_are_the_corrected_ones() -> None:
    """NVIDIA-NeMo/RL#2736: 204.4 PFLOP a sequence of 192k, 111.0 before."""
    context = 192 * 1024
    cost = COSTS["train_flops_per_token"].of(Shape.from_hf(QWEN3_235B), At(context=context))
    assert cost * context / 1e15 == pytest.approx(204.4, rel=0.003)
