"""What transformers can ask of attention beyond masks: dropout, softcapped scores, sinks, learned
biases, attention weights, every way to generate, compiled and saved models."""

import pytest
import torch
from support.hf_models import MODELS, generate, make, padded, step, tokens, transformers
from support.tolerance import close, close_all, same, seeded

from headwise.integrations import transformers as bridge

sdpa = pytest.importorskip("transformers.integrations.sdpa_attention").sdpa_attention_forward

T5 = {"vocab_size": 97, "d_model": 42, "d_kv": 5, "d_ff": 39, "num_layers": 2, "num_heads": 3}
T5 |= {"relative_attention_num_buckets": 7, "decoder_start_token_id": 0, "dropout_rate": 0.0}
GPT_OSS = {"vocab_size": 97, "hidden_size": 44, "intermediate_size": 36, "num_hidden_layers": 2}
GPT_OSS |= {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}
GPT_OSS |= {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}


def twins(config, kind=transformers.AutoModel, hows=("headwise", "eager")):
    """The same model with each attention, its weights far from their start."""
    models = []
    for how in hows:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model = kind.from_config(config, attn_implementation=how, dtype=torch.float32)
            with torch.no_grad():
                for p in model.parameters():
                    p.normal_(std=0.3)
        models.append(model.eval())
    return models


def operands(*shape, seed=9):
    return torch.randn(3, *shape, generator=seeded(seed))


# ---- masks, directly


@pytest.mark.parametrize("size", [(2, 1, 7, 7), (1, 6, 7, 7), (2, 6, 7, 7), (2, 1, 1, 7)])
@pytest.mark.parametrize("added", [False, True])
def test_masks_of_every_form_equal_the_library(size, added):
    generator = seeded(sum(size) + added)
    mask = torch.rand(size, generator=generator) < 0.7
    mask[..., 3] = True  # a query that sees nothing has a test of its own
    if added:
        mask = torch.randn(size, generator=generator).masked_fill(~mask, -torch.inf)
    q = torch.randn(2, 6, 7, 5, generator=generator, requires_grad=True)
    k = torch.randn(2, 3, 7, 5, generator=generator, requires_grad=True)
    v = torch.randn(2, 3, 7, 11, generator=generator, requires_grad=True)
    layer = torch.nn.Module()
    layer.num_key_value_groups = 2
    outs = [attention(layer, q, k, v, mask)[0] for attention in (bridge.attention, sdpa)]
    close(*outs)
    close_all(*(torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outs))


def test_query_that_sees_nothing_gives_zeros():
    q, k, v = operands(1, 2, 4, 5).requires_grad_()
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask[..., 2, :] = False
    out, _ = bridge.attention(torch.nn.Module(), q, k, v, mask)
    assert torch.equal(out[:, 2], torch.zeros_like(out[:, 2]))
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


@pytest.mark.parametrize("queries", [3, 6, 9])
def test_causal_without_a_mask_begins_at_the_first_key(queries):
    q, (k, v) = operands(1, 2, queries, 5)[0], operands(1, 2, 6, 5)[:2]
    layer = torch.nn.Module()
    ours, _ = bridge.attention(layer, q, k, v, None, is_causal=True)
    close(ours, sdpa(layer, q, k, v, None, is_causal=True)[0])


# ---- options


def test_dropout_zeroes_weights_and_scales_the_others():
    q, k, _ = operands(1, 2, 50, 3)
    v = torch.eye(50).expand(1, 2, 50, 50)
    layer = torch.nn.Module()
    plain, _ = bridge.attention(layer, q, k, v, None, is_causal=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        dropped, _ = bridge.attention(layer, q, k, v, None, dropout=0.25, is_causal=False)
    stays = dropped != 0
    close(dropped[stays], plain[stays] / 0.75)
    deviation = (0.25 * 0.75 / stays.numel()) ** 0.5
    assert abs(stays.double().mean().item() - 0.75) < 4 * deviation


@pytest.mark.parametrize("family", ["GPT2", "Bert"])
def test_default_configs_train(family):
    sizes = {"n_embd": 15, "n_head": 3, "n_layer": 1, "vocab_size": 97}
    if family == "Bert":
        sizes = {"hidden_size": 15, "num_attention_heads": 3, "num_hidden_layers": 1}
        sizes |= {"intermediate_size": 13, "vocab_size": 97}
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = transformers.AutoModel.from_config(config, attn_implementation="headwise").train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        first, second = (model(tokens()).last_hidden_state for _ in range(2))
    assert not torch.allclose(first, second)
    first.sum().backward()


@pytest.mark.parametrize("pad", [False, True])
def test_softcapped_scores_equal_the_library(pad):
    more = {"attention_mask": padded("left")} if pad else {}
    name, cap = "gemma2 scaled", {"attn_logit_softcapping": 2.0}
    runs = [step(make(name, how, **cap), tokens(), **more) for how in ("headwise", "eager")]
    seen = padded("left") == 1 if pad else slice(None)
    close(runs[0][0][seen], runs[1][0][seen])
    if not pad:  # eager's gradients also flow through queries that see nothing
        close_all(runs[0][1], runs[1][1])
    uncapped = make(name, "headwise")(tokens(), **more).logits
    assert not torch.allclose(uncapped[seen], runs[0][0][seen], atol=1e-3)


def test_sinks_equal_the_library():
    config = transformers.GptOssConfig(**GPT_OSS, layer_types=MODELS["gemma3"][1]["layer_types"])
    runs = [step(model, tokens()) for model in twins(config, transformers.AutoModelForCausalLM)]
    close(runs[0][0], runs[1][0])
    used = [i for i, gradient in enumerate(runs[0][1]) if gradient is not None]
    close_all(*([gradients[i] for i in used] for _, gradients in runs))


@pytest.mark.parametrize("side", ["left", "right"])
def test_learned_bias_equals_the_library(side):
    config = transformers.T5Config(**T5)
    seen, grads, outs = padded(side), [], []
    for model in twins(config, transformers.AutoModelForSeq2SeqLM):
        out = model(tokens(), attention_mask=seen, decoder_input_ids=tokens(length=5)).logits
        out.square().sum().backward()
        outs.append(out)
        grads.append([p.grad for name, p in model.named_parameters() if "relative" in name])
    assert len(grads[0]) == 2
    close(*outs)
    close_all(*grads)


@pytest.mark.parametrize("name", ["llama 6", "gemma3", "gpt2 5"])
def test_attention_weights_are_those_of_the_library(name):
    seen = padded("right")
    ours, theirs = (
        make(name, how)(tokens(), attention_mask=seen, output_attentions=True)
        for how in ("headwise", "eager")
    )
    assert len(ours.attentions) == 2
    for a, b in zip(ours.attentions, theirs.attentions, strict=True):
        close(a[seen == 1] if a.ndim == 2 else a[0], b[0])
    close(ours.logits[seen == 1], theirs.logits[seen == 1])
    assert make(name, "headwise")(tokens()).attentions is None


def test_attention_weights_of_a_generation_are_those_of_the_library():
    more = {"output_attentions": True, "return_dict_in_generate": True}
    ours, theirs = (
        generate("mistral window", how, tokens(), 5, **more).attentions
        for how in ("headwise", "eager")
    )
    assert len(ours) == 5
    for layers in zip(ours, theirs, strict=True):
        for a, b in zip(*layers, strict=True):
            close(a, b)


# ---- generation


MODES = {
    "beams": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama 6", "mistral window"])
def test_generation_of_every_kind_gives_the_same_tokens(mode, name):
    ids = tokens(1 if mode == "prompt lookup" else 2, 7, seed=5)
    ours, theirs = (generate(name, how, ids, **MODES[mode]) for how in ("headwise", "eager"))
    assert torch.equal(ours, theirs)


def test_assisted_generation_gives_the_same_tokens():
    ids = tokens(1, 7, seed=5)
    helper = make("llama 48", "headwise")
    ours = generate("llama 6", "headwise", ids, assistant_model=helper)
    assert torch.equal(ours, generate("llama 6", "eager", ids))


def test_note_on_a_mask_is_no_guard():
    """A compiled generation would be compiled again where prefill and decode differ in it."""
    q, k, v = operands(1, 2, 7, 5)
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def attention(mask):
        return bridge.attention(torch.nn.Module(), q, k, v, mask)[0]

    masks = [torch.ones(1, 1, 7, 7, dtype=torch.bool).tril() for _ in range(3)]
    masks[1].headwise, masks[2].headwise = (True, 0), None
    compiled = torch.compile(attention, backend=counted, fullgraph=True)
    for mask in masks:
        close(compiled(mask), attention(mask))
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["llama 6", "mistral window"])
def test_compiled_model_takes_padding(name):
    model = make(name, "headwise")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for length in (11, 13):
        seen = padded("left", length)
        close(
            compiled(tokens(2, length), attention_mask=seen).logits[seen == 1],
            model(tokens(2, length), attention_mask=seen).logits[seen == 1],
        )


# ---- saved and recomputed models


def test_saved_model_gives_the_same_logits(tmp_path):
    model = make("qwen3", "headwise")
    model.save_pretrained(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="headwise"
    )
    assert read.config._attn_implementation == "headwise"
    same(read(tokens()).logits, model(tokens()).logits)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert stock.config._attn_implementation == "sdpa"
    close(stock(tokens()).logits, model(tokens()).logits)


def test_gradient_checkpointing_gives_the_same_gradients():
    runs = []
    for recompute in (False, True):
        model = make("mistral window", "headwise", attention_dropout=0.25).train()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            runs.append(step(model, tokens(), attention_mask=padded("right"), use_cache=False))
    same(runs[0][0], runs[1][0])
    close_all(runs[0][1], runs[1][1])
