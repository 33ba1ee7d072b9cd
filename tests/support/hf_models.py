"""Small models of transformers with headwise, their inputs, and a third attention: the formula in
the dtype of its inputs."""

import pytest
import torch
from support.tolerance import seeded

from headwise.integrations import transformers as bridge

transformers = pytest.importorskip("transformers")
eager_mask = pytest.importorskip("transformers.masking_utils").eager_mask
bridge.register()


def written(module, query, key, value, attention_mask, scaling, **kwargs):
    """The formula in the dtype of its inputs; transformers' own takes every softmax in float32."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT * scaling
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2), None


transformers.AttentionInterface.register("written", written)
transformers.AttentionMaskInterface.register("written", eager_mask)

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 42,
    "intermediate_size": 39,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}
SIZES |= {"num_key_value_heads": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
MIXED = ["sliding_attention", "full_attention"]
GPT2 = {"vocab_size": VOCAB, "n_embd": 15, "n_head": 3, "n_layer": 2, "n_positions": 64}
GPT2 |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
MODELS = {
    "llama 6": ("Llama", {**SIZES, "head_dim": 6}),
    "llama 48": ("Llama", {**SIZES, "head_dim": 48, "num_key_value_heads": 6}),
    "llama 320": (
        "Llama",
        {**SIZES, "head_dim": 320, "num_key_value_heads": 1, "num_hidden_layers": 1},
    ),
    "mistral window": (
        "Mistral",
        {**SIZES, "head_dim": 14, "sliding_window": 4, "num_key_value_heads": 2},
    ),
    "qwen2 mixed": (
        "Qwen2",
        {
            **SIZES,
            "head_dim": 10,
            "use_sliding_window": True,
            "sliding_window": 3,
            "max_window_layers": 1,
            "layer_types": MIXED,
        },
    ),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 22, "num_key_value_heads": 1}),
    "gemma": ("Gemma", {**SIZES, "head_dim": 26}),
    "gemma2 scaled": (
        "Gemma2",
        {
            **SIZES,
            "head_dim": 18,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": None,
            "sliding_window": 5,
            "layer_types": MIXED,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **SIZES,
            "head_dim": 34,
            "query_pre_attn_scalar": 11,
            "sliding_window": 5,
            "layer_types": MIXED,
        },
    ),
    "gpt2 5": ("GPT2", GPT2),
    "deepseek": (
        "DeepseekV3",
        {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
        | {
            "num_key_value_heads": 6,
            "kv_lora_rank": 9,
            "q_lora_rank": None,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 7,
            "v_head_dim": 5,
        }
        | {"first_k_dense_replace": 2},
    ),
}


def make(name, how, dtype=torch.float32, **changes):
    """A model with the weights that its seed draws, whatever computes its attention."""
    family, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=how, dtype=dtype
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # attention that is far from uniform
    return model.eval()


def tokens(batch=2, length=11, seed=0):
    return torch.randint(2, VOCAB, (batch, length), generator=seeded(seed))


def step(model, ids, **more):
    """Logits, and the gradients of every parameter."""
    logits = model(ids, **more).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return logits, [p.grad for p in model.parameters()]


def padded(side, length=11):
    """Two sequences, the second of them shorter."""
    seen = torch.ones(2, length, dtype=torch.long)
    seen[1, slice(0, 4) if side == "left" else slice(length - 4, length)] = 0
    return seen


def generate(name, how, ids, length=12, **more):
    return make(name, how).generate(ids, max_new_tokens=length, do_sample=False, **more)
