"""Layers of models since 2024 against transformers' own, formulas and planted faults."""

import pytest
import torch
import transformers
from support.cached import BASE, MODERN, ROTARY, VOCAB, filled, ids
from support.tolerance import close, seeded
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

from headwise.errors import UsageError
from headwise.lm.spec import Pretraining
from headwise.model import attention
from headwise.model.attention import Attention
from headwise.model.head_outputs import turned_back
from headwise.model.linear import GroupedLinear
from headwise.model.rotary import rotate
from headwise.model.transformer import Block, Decoder, build
from headwise.shape import Layer, Shape
from headwise.tasks import Recall
from headwise.training.engine import train
from headwise.training.run import Recipe, Run

# ---- against transformers


def stacked(*parts):
    return torch.cat([part.weight for part in parts])


def loaded(shape, weights):
    """Our model with these weights by name; every one is given."""
    model = Decoder(shape).double()
    model.load_state_dict(weights)
    return model


def test_norms_of_outputs_and_over_all_heads_are_olmo2s():
    config = transformers.Olmo2Config(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=13, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, rms_norm_eps=1e-6, pad_token_id=None,
    )  # fmt: skip
    config.rope_parameters["rope_theta"] = 50.0
    theirs = filled(transformers.Olmo2ForCausalLM(config)).double().eval()
    shape = Shape(
        dim=24, depth=2, num_heads=6, num_kv_heads=2, ffn_dim=13, activation="swiglu",
        norm_at="output", qk_norm="all", qk_rope_head_dim=4, rope_theta=50.0, causal=True,
        vocab_size=VOCAB, tied=False,
    )  # fmt: skip
    weights = {
        "embedding": theirs.model.embed_tokens.weight,
        "final_norm.weight": theirs.model.norm.weight,
        "head": theirs.lm_head.weight,
    }
    for i, layer in enumerate(theirs.model.layers):
        at, mlp = layer.self_attn, layer.mlp
        weights |= {
            f"blocks.{i}.attention.qkv.weight": stacked(at.q_proj, at.k_proj, at.v_proj),
            f"blocks.{i}.attention.q_norm.weight": at.q_norm.weight,
            f"blocks.{i}.attention.k_norm.weight": at.k_norm.weight,
            f"blocks.{i}.attention.out.weight": at.o_proj.weight,
            f"blocks.{i}.norm1.weight": layer.post_attention_layernorm.weight,
            f"blocks.{i}.norm2.weight": layer.post_feedforward_layernorm.weight,
            f"blocks.{i}.feed.up.weight": stacked(mlp.gate_proj, mlp.up_proj),
            f"blocks.{i}.feed.down.weight": mlp.down_proj.weight,
        }
    ours = loaded(shape, weights)
    assert shape.params == sum(p.numel() for p in theirs.parameters())
    x = ids(3, 11)
    with torch.no_grad():
        close(ours(x)[0], theirs(x).logits.float())  # their angles have 32 bits


def test_two_parallel_norms_and_rotary_first_are_neoxs():
    config = transformers.GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=13, num_hidden_layers=2,
        num_attention_heads=3, layer_norm_eps=1e-6, use_parallel_residual=True,
        max_position_embeddings=32,
    )  # fmt: skip
    config.rope_parameters["partial_rotary_factor"] = 0.5
    config.rope_parameters["rope_theta"] = 50.0
    theirs = filled(transformers.GPTNeoXForCausalLM(config)).double().eval()
    shape = Shape(
        dim=24, depth=2, num_heads=3, ffn_dim=13, activation="gelu", norm="layer",
        norm_at="parallel-2", qk_rope_head_dim=4, rope_at="first", rope_theta=50.0,
        qkv_bias=True, out_bias=True, ffn_bias=True, causal=True, vocab_size=VOCAB, tied=False,
    )  # fmt: skip
    body = theirs.gpt_neox
    weights = {"embedding": body.embed_in.weight, "head": theirs.lm_head.weight}
    weights |= {f"final_norm.{name}": p for name, p in body.final_layer_norm.named_parameters()}
    for i, layer in enumerate(body.layers):
        at, mlp = layer.attention, layer.mlp
        # Theirs lie head by head, (H, 3, R).
        qkv = {
            name: p.unflatten(0, (3, 3, 8)).transpose(0, 1).flatten(0, 2)
            for name, p in at.query_key_value.named_parameters()
        }
        parts = {
            "attention.qkv": qkv,
            "attention.out": {"weight": at.dense.weight},
            "norm1": dict(layer.input_layernorm.named_parameters()),
            "norm2": dict(layer.post_attention_layernorm.named_parameters()),
            "feed.up": dict(mlp.dense_h_to_4h.named_parameters()),
            "feed.down": dict(mlp.dense_4h_to_h.named_parameters()),
        }
        weights |= {
            f"blocks.{i}.{part}.{name}": p for part, ps in parts.items() for name, p in ps.items()
        }
        weights[f"blocks.{i}.attention.out_bias"] = at.dense.bias.unsqueeze(0)
    ours = loaded(shape, weights)
    assert shape.params == sum(p.numel() for p in theirs.parameters())
    x = ids(3, 11)
    with torch.no_grad():
        close(ours(x)[0], theirs(x).logits.float())  # their angles have 32 bits
        # The other end of a head is another model.
        last = loaded(shape.replace(rope_at="last"), weights)
        assert (last(x)[0] - theirs(x).logits).abs().max() > 1e-3


def test_grouped_outputs_are_deepseek_v4s():
    theirs = DeepseekV4GroupedLinear(6, 5 * 3, 5).double()
    ours = GroupedLinear(30, 3, groups=5).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7, 30, generator=seeded(1), dtype=torch.float64)
    close(ours(x), theirs(x.unflatten(-1, (5, 6))).flatten(-2))


# ---- formulas


@pytest.mark.parametrize("gate", ["head", "value"])
def test_gates_multiply_the_heads_outputs(gate):
    layer = filled(Attention(BASE.replace(attn_gate=gate, qkv_bias=True))).double()
    x = torch.randn(2, 5, 22, generator=seeded(1), dtype=torch.float64)
    y, found = layer(x, keep=True)
    opened = torch.sigmoid(x @ layer.gate.weight.T + layer.gate.bias)
    heads = found["heads"].transpose(1, 2)  # (B, N, H, V)
    opened = opened.unsqueeze(-1) if gate == "head" else opened.view(2, 5, 6, 7)
    close(y, (heads * opened).flatten(-2) @ layer.out.weight.T)
    close(layer(x), y)


@pytest.mark.parametrize("at", ["first", "last"])
def test_keys_that_are_values_depend_on_distances_only(at, monkeypatch):
    shape = ROTARY.replace(shared_kv=True, rope_at=at, windows=(3,), q_lora_rank=5)
    layer = filled(Attention(shape)).double()
    x = torch.randn(2, 9, 22, generator=seeded(1), dtype=torch.float64)

    def output(start):
        heads = layer.attend_heads(layer.shape, *layer.project(x, start))
        return layer.combine(heads, x, start)

    close(output(0), layer(x))
    close(output(11), layer(x))
    # Values that stay turned know where they stand.
    monkeypatch.setattr(attention, "turned_back", lambda heads, s, start, rotary: heads)
    assert (output(11) - output(0)).abs().max() > 1e-3


def test_turned_back_undoes_the_rotation():
    shape = ROTARY.replace(shared_kv=True)
    heads = torch.randn(2, 6, 5, 4, generator=seeded(1), dtype=torch.float64)  # (B, H, N, V)
    turned = rotate(heads, 2, 50.0, 7).transpose(1, 2).flatten(-2)
    close(turned_back(turned, shape, 7, None), heads.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("name", MODERN)
def test_products_apart_equal_one_product(name):
    """As `torch.compile` takes them."""
    shape = MODERN[name]
    if shape.latent:
        return
    layer = filled(Attention(shape)).double()
    x = torch.randn(2, 9, 22, generator=seeded(1), dtype=torch.float64)
    heads = layer.attend_heads(layer.shape, *layer.project(x))
    close(layer.combine(heads, x), layer(x))


def test_layers_of_a_shape_are_its_blocks():
    shape = MODERN["by layer"]
    model, x = filled(Decoder(shape)).double(), ids(3, 7)
    h = model.embed(x)
    for i, block in enumerate(model.blocks):
        alone = Block(shape.layer(i), 0).double()
        alone.load_state_dict(block.state_dict())
        h, _ = alone(h)
    close(model(x)[0], model.unembed(h))
    model.prepare(7)
    close(model(x)[0], model.unembed(h))
    sizes = [(b.attention.shape.num_heads, b.attention.out.weight.shape) for b in model.blocks]
    assert sizes == [(6, (22, 24)), (2, (22, 10)), (6, (22, 24))]


# ---- training, and what is not built


@pytest.mark.parametrize("name", MODERN)
def test_gradients_reach_every_parameter(name):
    shape = MODERN[name].replace(windows=(0,))
    model = filled(build(shape)).double()
    x = ids(3, 7)
    logits = model(x[:, :-1])[0]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).backward()
    for at, p in model.named_parameters():
        assert p.grad is not None, at
        assert p.grad.abs().max() > 0, at


@pytest.mark.parametrize("name", ["keys are values, rotary", "gates by head", "by layer"])
def test_runs_of_modern_shapes_train_together_as_alone(name):
    task = Recall(pairs=3, keys=4, values=5)
    shape = MODERN[name].replace(vocab_size=task.vocab, dim=16)
    recipe = Recipe(steps=6, epoch=3, batch=16, held_out=128, evals=1, lr=0.01)
    runs = [Run(shape, task, recipe, seed) for seed in (0, 1)]
    together = {row["seed"]: row for row in train(runs, device="cpu")}
    for run in runs:
        (alone,) = train([run], device="cpu")
        assert alone["id"] == run.id == Run.of(run.spec()).id
        assert alone["held_out"] == pytest.approx(together[run.seed]["held_out"], rel=1e-4)


NOT_BUILT = {
    "num_experts=64": {"num_experts": 64, "num_experts_per_tok": 2, "expert_ffn_dim": 7},
    "sinks=True": {"sinks": True},
    "positions='alibi'": {"positions": "alibi"},
    "reuses_kv=True": {"layers": (Layer(), Layer(reuses_kv=True))},
}


@pytest.mark.parametrize("has", NOT_BUILT)
def test_shapes_that_are_not_built_are_refused_by_all_that_would_build_them(has, tmp_path):
    shape = BASE.replace(**NOT_BUILT[has])
    makers = (
        lambda: Decoder(shape),
        lambda: Attention(shape),
        lambda: shape.activation_bytes(5),
        lambda: Run(shape, Recall(pairs=3, keys=4, values=5), Recipe(steps=100)),
        lambda: Pretraining(shape=shape, steps=3, batch_tokens=16, length=8),
    )
    for make in makers:
        with pytest.raises(UsageError, match=f"this shape has {has}: headwise counts the costs"):
            make()
    assert shape.params > 0
    assert shape.flops(7) > 0
    assert shape.kv_bytes(7) > 0
