"""Experts, gates, sinks and grouped outputs: closed forms, public counts, bounds."""

import pytest
import torch
import transformers

from headwise.errors import UsageError
from headwise.shape import Shape

GOOD = {"dim": 12, "depth": 2, "num_heads": 6}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "expert_ffn_dim": 7}
MIXTRAL = Shape(
    dim=4096, depth=32, num_heads=32, num_kv_heads=8, activation="swiglu", vocab_size=32000,
    tied=False, causal=True, num_experts=8, num_experts_per_tok=2, expert_ffn_dim=14336,
)  # fmt: skip
DEEPSEEK_V3 = Shape(
    dim=7168, depth=61, num_heads=128, head_dim=192, v_head_dim=128, kv_lora_rank=512,
    q_lora_rank=1536, qk_rope_head_dim=64, ffn_dim=18432, activation="swiglu", vocab_size=129280,
    tied=False, causal=True, num_experts=(0,) * 3 + (256,) * 58, num_experts_per_tok=8,
    expert_ffn_dim=2048, shared_ffn_dim=2048,
)  # fmt: skip
GPT_OSS = Shape(
    dim=2880, depth=36, num_heads=64, num_kv_heads=8, head_dim=64, activation="swiglu",
    vocab_size=201088, tied=False, causal=True, windows=(128, 0), qkv_bias=True, out_bias=True,
    ffn_bias=True, sinks=True, num_experts=128, num_experts_per_tok=4, expert_ffn_dim=2880,
    router_bias=True,
)  # fmt: skip
QWEN2_MOE = Shape(
    dim=2048, depth=24, num_heads=16, activation="swiglu", vocab_size=151936, tied=False,
    causal=True, qkv_bias=True, num_experts=60, num_experts_per_tok=4, expert_ffn_dim=1408,
    shared_ffn_dim=5632, shared_gate=True,
)  # fmt: skip


def count_of(config, **sizes):
    """Parameters of transformers' own model, from its sizes alone."""
    made = config(**sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    return sum(p.numel() for p in model.parameters())


# ---- public counts


def test_mixtral_has_its_public_counts():
    assert MIXTRAL.params == 46_702_792_704
    assert MIXTRAL.active_params == 12_879_925_248
    assert MIXTRAL.params == count_of(transformers.MixtralConfig)
    assert MIXTRAL.kv_bytes(1) == 32 * 8 * 2 * 128 * 2


def test_deepseek_v3_has_its_public_counts():
    assert DEEPSEEK_V3.params == 671_026_404_352
    assert round(DEEPSEEK_V3.active_params / 1e9, 2) == 37.55  # 37 without the embedding's 0.9
    assert DEEPSEEK_V3.params == count_of(transformers.DeepseekV3Config)
    assert DEEPSEEK_V3.kv_bytes(1) == 70_272  # 61 layers of 512 + 64 in 16 bits


def test_gpt_oss_has_its_public_counts():
    assert GPT_OSS.params == 116_829_156_672
    assert GPT_OSS.params == count_of(transformers.GptOssConfig)
    assert round(GPT_OSS.active_params / 1e9, 1) == 5.7  # 5.1 without the embedding's 0.6
    assert GPT_OSS.param_table()["sinks"] == 36 * 64


def test_qwen2_moe_has_its_public_counts():
    assert QWEN2_MOE.params == 14_315_784_192  # "14.3 B, 2.7 B of them active"
    assert QWEN2_MOE.params == count_of(
        transformers.Qwen2MoeConfig, num_attention_heads=16, num_key_value_heads=16
    )
    assert round(QWEN2_MOE.active_params / 1e9, 1) == 2.7
    assert QWEN2_MOE.param_table()["gates"] == 24 * 2048


# ---- closed forms


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_experts_in_closed_form(activation, bias):
    shape = Shape(
        **GOOD, **EXPERTS, activation=activation, ffn_bias=bias, router_bias=bias, ffn_dim=1000,
        shared_ffn_dim=11, shared_gate=True,
    )  # fmt: skip
    ups = 2 if activation == "swiglu" else 1

    def feed(width):
        return (ups + 1) * 12 * width + bias * (ups * width + 12)

    table = shape.param_table()
    assert table["experts"] == 2 * 5 * feed(7)
    assert table["shared experts"] == 2 * feed(11)
    assert table["router"] == 2 * (12 * 5 + bias * 5)
    assert table["gates"] == 2 * 12
    assert "feed-forward" not in table
    assert shape.params - shape.active_params == 2 * 3 * feed(7)
    attention = Shape(**GOOD, ffn_dim=0)
    used = 12 * (5 + 1) + (ups + 1) * 12 * (2 * 7 + 11)
    assert shape.flops(7) - attention.flops(7) == 2 * 2 * 7 * used
    assert shape.kv_bytes(7) == attention.kv_bytes(7)


@pytest.mark.parametrize("gate", ["head", "value"])
def test_gates_and_grouped_outputs_in_closed_form(gate):
    plain = Shape(**GOOD, head_dim=4, v_head_dim=7)
    shape = plain.replace(attn_gate=gate, o_lora_rank=5, o_groups=3, qkv_bias=True)
    gates = {"head": 6, "value": 6 * 7}[gate]
    assert shape.param_table()["gates"] == 2 * 13 * gates
    out = 6 * 7 * 5 + 3 * 5 * 12
    biases = 6 * (4 + 4 + 7)
    change = shape.param_table()["attention"] - plain.param_table()["attention"]
    assert change == 2 * (out - 6 * 7 * 12 + biases)
    assert shape.flops(7) - plain.flops(7) == 2 * 7 * 2 * (out - 6 * 7 * 12 + 12 * gates)


def test_keys_that_are_values_are_kept_once():
    plain = Shape(**GOOD, head_dim=4, num_kv_heads=3, causal=True)
    shape = plain.replace(shared_kv=True)
    assert plain.params - shape.params == 2 * 12 * 3 * 4
    assert 2 * shape.kv_bytes(7) == plain.kv_bytes(7)
    assert plain.flops(7) - shape.flops(7) == 2 * 2 * 7 * 12 * 3 * 4


def test_deepseek_v4_attention_is_expressed():
    """Flash: 64 heads of 512 that read one key as value, queries of rank 1024, 8 groups of 1024."""
    shape = Shape(
        dim=4096, depth=1, num_heads=64, num_kv_heads=1, head_dim=512, shared_kv=True, ffn_dim=0,
        q_lora_rank=1024, o_lora_rank=1024, o_groups=8, sinks=True, norm="rms-free", causal=True,
    )  # fmt: skip
    matrices = 4096 * 1024 + 1024 * 64 * 512 + 4096 * 512 + 64 * 512 * 1024 + 8 * 1024 * 4096
    assert shape.params == matrices + 1024 + 64
    assert shape.kv_bytes(1) == 512 * 2


# ---- what planning asks


@pytest.mark.parametrize(
    "shape",
    [
        Shape(**GOOD, causal=True, vocab_size=31),
        Shape(**GOOD, causal=True, input_dim=5, output_dim=3, windows=(3, 0), num_kv_heads=2),
        Shape(**GOOD, causal=True, vocab_size=31, **EXPERTS, shared_kv=(True, False)),
    ],
)
def test_decoding_token_by_token_costs_what_reading_costs(shape):
    for tokens in (1, 2, 7, 11):
        assert sum(shape.decode_flops(n) for n in range(1, tokens + 1)) == shape.flops(tokens)
        head = shape.dim * shape.out_dim
        assert shape.flops(tokens) - shape.prefill_flops(tokens) == 2 * (tokens - 1) * head
        assert shape.train_flops_per_token(tokens) * tokens == 3 * shape.flops(tokens)


def test_decoding_from_a_latent_meets_it_as_it_is():
    shape = Shape(
        dim=12, depth=2, num_heads=6, head_dim=8, v_head_dim=5, kv_lora_rank=9, qk_rope_head_dim=2,
        causal=True, ffn_dim=0, windows=(0, 4),
    )  # fmt: skip
    weights = 2 * (12 * 6 * 8 + 12 * (9 + 2) + 9 * 6 * (6 + 5) + 6 * 5 * 12)
    keys = 11 + 4
    assert shape.decode_flops(11) == 2 * (weights + 6 * (2 * 9 + 2) * keys)
    again = (keys - 2) * 9 * 6 * (6 + 5)
    assert shape.decode_flops(11, absorbed=False) == 2 * (weights + 6 * (8 + 5) * keys + again)


def test_weights_in_bytes():
    shape = Shape(**GOOD, extras=(("odd", 1),))
    assert shape.weight_bytes("fp32") == 4 * shape.params
    assert shape.weight_bytes() == 2 * shape.params
    assert shape.weight_bytes("int4") == -(-shape.params // 2)
    with pytest.raises(UsageError, match=r"^unknown dtype 'bf61'; did you mean bf16"):
        shape.weight_bytes("bf61")


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "3", None])
@pytest.mark.parametrize("cost", ["train_flops_per_token", "prefill_flops", "decode_flops"])
def test_costs_at_a_context_refuse_senseless_counts(cost, bad):
    with pytest.raises(UsageError, match="must be a whole number of at least 1, got"):
        getattr(Shape(**GOOD), cost)(bad)


# ---- bounds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: -1}, f"{name} must not be negative, got -1")
            for name in (
                *("o_lora_rank", "num_experts", "num_experts_per_tok", "expert_ffn_dim"),
                "shared_ffn_dim",
            )
        ),
        *(
            ({name: bad}, f"{name} must be a whole number, got {bad!r}")
            for name in ("o_lora_rank", "o_groups", "num_experts", "expert_ffn_dim")
            for bad in ("8", 8.0, True)
        ),
        *(
            ({name: 1}, f"{name} must be true or false, got 1")
            for name in ("shared_kv", "sinks", "shared_gate", "router_bias")
        ),
        *(
            ({name: 2**31}, f"{name} must be at most 2,147,483,647 (32 bits), got 2147483648")
            for name in ("o_lora_rank", "num_experts", "expert_ffn_dim", "shared_ffn_dim")
        ),
        ({"o_groups": 0}, "o_groups must be at least 1, got 0"),
        ({"o_groups": 2}, "o_groups needs o_lora_rank above 0, got o_groups 2, o_lora_rank 0"),
        (
            {"o_groups": 4, "o_lora_rank": 3},
            "num_heads must be a multiple of o_groups, got num_heads 6, o_groups 4",
        ),
        ({"attn_gate": "heads"}, "unknown attn_gate 'heads'; did you mean head"),
        ({"rope_at": "frist"}, "unknown rope_at 'frist'; did you mean first"),
        (
            {"kv_lora_rank": 5, "rope_at": "first"},
            "rope_at must be last with a latent (kv_lora_rank 5), got first",
        ),
        (
            {"kv_lora_rank": 5, "shared_kv": True},
            "shared_kv must be false with a latent (kv_lora_rank 5), which keys and values share",
        ),
        (
            {"kv_lora_rank": 5, "qk_norm": "all"},
            "qk_norm must be none or free with a latent (kv_lora_rank 5), got all",
        ),
        (
            {"qk_norm": "all", "max_logit": 3.0},
            "max_logit needs qk_norm head or free and replaces logit_scale, got qk_norm all",
        ),
        (
            {"v_head_dim": 5, "shared_kv": True},
            "shared_kv makes the keys the values, so v_head_dim must be head_dim, got head_dim 2",
        ),
        (
            {"positions": "alibi", "num_positions": 4},
            "num_positions must be 0 with alibi, which has no table, got 4",
        ),
        (
            {"expert_ffn_dim": 7},
            "expert_ffn_dim needs num_experts above 0, got expert_ffn_dim 7, num_experts 0",
        ),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok needs num_experts above 0, got"),
        ({"router_bias": True}, "router_bias needs num_experts above 0, got router_bias True"),
        (
            {"num_experts": 5, "num_experts_per_tok": 2},
            "expert_ffn_dim must be given with experts, got num_experts 5, expert_ffn_dim 0",
        ),
        (
            EXPERTS | {"num_experts_per_tok": 6},
            "num_experts_per_tok must be from 1 to num_experts, got num_experts_per_tok 6, num_exp",
        ),
        (
            EXPERTS | {"num_experts": (5, 1)},
            "layer 1: num_experts_per_tok must be from 1 to num_experts, got num_experts_per_tok 2",
        ),
        (EXPERTS | {"shared_gate": True}, "shared_gate needs shared_ffn_dim above 0, got"),
        (
            {"num_experts": 2**30, "num_experts_per_tok": 1, "expert_ffn_dim": 2**30, "dim": 6},
            "a shape must have at most 9,223,372,036,854,775,807 parameters (64 bits), got",
        ),
    ],
)
def test_bad_new_fields_die_with_one_line(changes, message):
    with pytest.raises(UsageError) as caught:
        Shape(**GOOD | changes)
    assert str(caught.value).startswith(message)
