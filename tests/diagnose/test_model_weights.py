"""Models of transformers with random weights as ours: the same outputs, and back to the bit."""

import dataclasses

import pytest
import torch
import transformers
from support.cached import filled
from support.tolerance import close, seeded

from headwise.diagnose.model_weights import attention_layers, plan_of, to_headwise, to_public
from headwise.errors import UsageError
from headwise.model.attention import Attention
from headwise.model.layers import Norm

SIZES = {
    "vocab_size": 37, "hidden_size": 24, "intermediate_size": 13, "num_hidden_layers": 2,
    "num_attention_heads": 6, "max_position_embeddings": 32, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
KV = {"num_key_value_heads": 2}
SMALL = {
    "vocab_size": 37, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 6, "first_k_dense_replace": 2, "kv_lora_rank": 9, "q_lora_rank": 7,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}  # fmt: skip
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
TANH = {"hidden_act": "gelu_pytorch_tanh"}

# class -> its config, beyond the sizes
FAMILIES = {
    "LlamaForCausalLM": SIZES | KV | {"rms_norm_eps": 1e-3, "attention_bias": True},
    "MistralForCausalLM": SIZES | KV | {"sliding_window": 4},
    "Qwen2ForCausalLM": SIZES | KV,
    "Qwen3ForCausalLM": SIZES | KV | {"head_dim": 8},
    "GemmaForCausalLM": SIZES | KV | TANH | {"head_dim": 8},
    "Gemma2ForCausalLM": SIZES | KV | NO_CAPS | {"sliding_window": 4, "query_pre_attn_scalar": 13},
    "PhiForCausalLM": SIZES | {"partial_rotary_factor": 0.5},
    "Phi3ForCausalLM": SIZES | KV,
    "GPT2LMHeadModel": SMALL,
    "GPTBigCodeForCausalLM": SMALL,
    "GPTJForCausalLM": SMALL | {"rotary_dim": 4},
    "CodeGenForCausalLM": SMALL | {"rotary_dim": 4},
    "GPTNeoXForCausalLM": SIZES | {"rotary_pct": 0.5, "layer_norm_eps": 1e-3},
    "FalconForCausalLM": {k: v for k, v in SIZES.items() if k != "intermediate_size"},
    "CohereForCausalLM": SIZES | KV | {"logit_scale": 0.3},
    "Glm4ForCausalLM": SIZES | KV | {"head_dim": 8},
    "Olmo2ForCausalLM": SIZES | KV,
    "OPTForCausalLM": SIZES | {"word_embed_proj_dim": 24, "ffn_dim": 13},
    "SmolLM3ForCausalLM": SIZES | KV,
    "DeepseekV3ForCausalLM": SIZES | LATENT,
    "BertModel": SIZES | {"pad_token_id": 0},
    "ViTModel": SIZES | {"image_size": 8, "patch_size": 4},
}


def theirs(name):
    cls = getattr(transformers, name)
    return filled(cls(cls.config_class(**FAMILIES[name])).double().eval(), spread=0.2)


def first_input(model, given):
    """What the first block gets, and the last state."""
    got = []
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    hook = layers[0].register_forward_pre_hook(
        lambda _, args, more: got.append(args[0] if args else more["hidden_states"]),
        with_kwargs=True,
    )
    out = model(given).last_hidden_state
    hook.remove()
    return got[0], out


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("name", FAMILIES)
def test_converted_model_has_their_outputs_and_goes_back(name):
    model = theirs(name)
    state, config = model.state_dict(), model.config.to_dict()
    found = to_headwise(state, config)
    ours = found.model()
    with torch.no_grad():
        if found.shape.vocab_size:
            x = torch.randint(37, (2, 11), generator=seeded(1))
            y, wanted = ours(x)[0], model(x).logits
            if "lm_head.bias" in found.rest:
                wanted = wanted - state["lm_head.bias"]
        else:
            given = torch.randn(2, 3, 8, 8, generator=seeded(1)).double()
            if name == "BertModel":
                given = torch.randint(37, (2, 11), generator=seeded(1))
            h, wanted = first_input(model, given)
            y = ours(h)[0]
    close(y, wanted.float())  # their RMS norms and angles have 32 bits
    # Everything but what has no place comes back from our weights alone.
    empty = {n: t if n in found.rest else torch.full_like(t, 9.0) for n, t in state.items()}
    back = to_public(ours.state_dict(), config, empty)
    assert back.keys() == state.keys()
    for at, t in state.items():
        assert back[at].shape == t.shape, at
        assert (back[at] - t).abs().max() <= 1e-15, at


def converted(name):
    model = theirs(name)
    return to_headwise(model.state_dict(), model.config.to_dict())


@pytest.mark.filterwarnings("ignore")
def test_converted_models_leave_out_what_has_no_place():
    assert converted("PhiForCausalLM").rest == ("lm_head.bias",)
    assert converted("LlamaForCausalLM").rest == ()
    assert {name.split(".")[0] for name in converted("BertModel").rest} == {"embeddings", "pooler"}


@pytest.mark.filterwarnings("ignore")
def test_neighbours_that_turn_together_are_said_by_the_config():
    names = ("GPTJForCausalLM", "GPTNeoXForCausalLM", "DeepseekV3ForCausalLM")
    kinds = {name: converted(name).shape for name in names}
    layouts = {name: (shape.rope_at, shape.rope_interleaved) for name, shape in kinds.items()}
    assert layouts == {
        "GPTJForCausalLM": ("first", True),
        "GPTNeoXForCausalLM": ("first", False),
        "DeepseekV3ForCausalLM": ("last", True),
    }
    # The other way round it is another model.
    found = converted("GPTJForCausalLM")
    x = torch.randint(37, (2, 11), generator=seeded(1))
    other = dataclasses.replace(found, shape=found.shape.replace(rope_interleaved=False))
    with torch.no_grad():
        assert (other.model()(x)[0] - found.model()(x)[0]).abs().max() > 1e-4


EXPERTS = SIZES | KV | {"num_experts_per_tok": 1, "moe_intermediate_size": 13}
WITH_EXPERTS = {
    "MixtralForCausalLM": EXPERTS | {"num_local_experts": 2, "sliding_window": 4},
    "Qwen3MoeForCausalLM": EXPERTS | {"num_experts": 2, "head_dim": 8},
    "OlmoeForCausalLM": EXPERTS | {"num_experts": 2},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_attention_layers_of_a_model_with_experts_have_their_outputs(name):
    cls = getattr(transformers, name)
    config = cls.config_class(**WITH_EXPERTS[name])
    model = filled(cls(config).double().eval(), spread=0.2)
    model.set_experts_implementation("eager")
    got = []
    for block in model.model.layers:
        block.self_attn.register_forward_hook(
            lambda _, args, more, out: got.append((more["hidden_states"], out[0])), with_kwargs=True
        )
    with torch.no_grad():
        model(torch.randint(37, (2, 11), generator=seeded(1)))
    found = list(attention_layers(model.state_dict(), config.to_dict()))
    assert len(found) == len(got) == 2
    for (shape, weights), (x, wanted) in zip(found, got, strict=True):
        ours = Attention(shape).double()
        ours.load_state_dict(weights)
        for norm in (m for m in ours.modules() if isinstance(m, Norm)):
            norm.eps = config.rms_norm_eps
        close(ours(x), wanted.float())


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "one unscaled rotary"),
        ("gemma2", {"final_logit_softcapping": 30.0}, "softcaps are not carried over"),
        ("granite", {"residual_multiplier": 0.5}, "residual_multiplier must be 1"),
        ("phi", {"qk_layernorm": True}, "a model with query and key norms"),
        ("mixtral", {"num_local_experts": 4}, "needs num_experts=0"),
        ("llama", {"num_hidden_layers": 3}, "the config has 3 layers, the tensors 2"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_converted_models_refuse_what_they_would_get_wrong(family, changes, message):
    state = theirs("LlamaForCausalLM").state_dict()
    with pytest.raises(UsageError, match=message):
        plan_of({"model_type": family, **SIZES, **KV, **changes}, state)
