"""headwise attention inside the real model classes of transformers, against their own attention."""

import sys
from inspect import signature

import pytest
import torch
from support.hf_models import MODELS, VOCAB, generate, make, padded, step, tokens, transformers
from support.tolerance import close, close_all, seeded

from headwise.errors import UsageError
from headwise.integrations import transformers as bridge
from headwise.model import reference

sdpa_mask = pytest.importorskip("transformers.masking_utils").sdpa_mask


@pytest.fixture
def paths(monkeypatch):
    """The calls of `attend`, those with a mask as "masked"."""
    calls, real = [], bridge.attend

    def spied(*args, **kwargs):
        calls.append(("attend" if kwargs["mask"] is None else "masked", kwargs))
        return real(*args, **kwargs)

    monkeypatch.setattr(bridge, "attend", spied)
    return calls


# ---- whole sequences


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_the_formula(name, paths):
    ids = tokens()
    ours, gradients = step(make(name, "headwise", torch.float64), ids)
    assert {what for what, _ in paths} == {"attend"}
    theirs, wanted = step(make(name, "written", torch.float64), ids)
    close(ours, theirs, name)
    close_all(gradients, wanted, f"{name}, gradients")


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_the_library(name):
    ids = tokens(seed=1)
    ours, gradients = step(make(name, "headwise"), ids)
    theirs, wanted = step(make(name, "eager"), ids)
    close(ours, theirs, name)
    close_all(gradients, wanted, f"{name}, gradients")


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_attention_takes_every_number_of_kv_heads(kv_heads):
    ids = tokens(seed=2)
    ours, theirs = (
        make("llama 6", how, torch.float64, num_key_value_heads=kv_heads)(ids).logits
        for how in ("headwise", "written")
    )
    close(ours, theirs)


def test_attention_passes_windows_instead_of_masks(paths):
    make("gemma3", "headwise")(tokens())
    assert [what for what, _ in paths] == ["attend", "attend"]
    for (_, kwargs), window in zip(paths, (5, 0), strict=True):
        assert (kwargs["causal"], kwargs["window"], kwargs["scale"]) == (True, window, 11**-0.5)
    paths.clear()
    make("gemma3", "headwise")(tokens(length=4))
    assert [what for what, _ in paths] == ["attend", "attend"]


def test_half_precision():
    ids = tokens(seed=3)
    ours, theirs = (
        make("llama 48", how, torch.bfloat16)(ids).logits for how in ("headwise", "eager")
    )
    close(ours, theirs)


# ---- masks


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama 6", "mistral window", "gemma3"])
def test_padding_is_honoured(name, side, paths):
    ids, seen = tokens(), padded(side)
    ours, theirs = (
        make(name, how)(ids, attention_mask=seen).logits for how in ("headwise", "eager")
    )
    assert {what for what, _ in paths} == {"masked"}
    assert ours.isfinite().all()
    close(ours[seen == 1], theirs[seen == 1])
    other = ids.where(seen == 1, 5)
    close(make(name, "headwise")(other, attention_mask=seen).logits[seen == 1], ours[seen == 1])


def test_padding_has_the_right_gradients():
    ids, seen, grads = tokens(), padded("left"), []
    for how in ("headwise", "eager"):
        model = make("llama 6", how)
        logits = model(ids, attention_mask=seen).logits
        both = (seen[:, :-1] == 1) & (seen[:, 1:] == 1)
        torch.nn.functional.cross_entropy(logits[:, :-1][both], ids[:, 1:][both]).backward()
        grads.append([p.grad for p in model.parameters()])
    close_all(*grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_padding_in_half_precision_is_as_exact_as_in_the_library(dtype):
    ids, seen = tokens(), padded("left")
    exact = make("llama 48", "sdpa", torch.float64)
    error = {}
    for how in ("headwise", "sdpa"):
        model = make("llama 48", how, dtype)
        exact.load_state_dict(model.state_dict())
        wanted = exact(ids, attention_mask=seen).logits[seen == 1]
        error[how] = (model(ids, attention_mask=seen).logits[seen == 1] - wanted).square().mean()
    assert error["headwise"] <= 1.5**2 * error["sdpa"]


def test_mask_of_ones_is_no_mask(paths):
    ids = tokens()
    close(
        make("llama 6", "headwise")(ids, attention_mask=torch.ones_like(ids)).logits,
        make("llama 6", "headwise")(ids).logits,
    )
    assert {what for what, _ in paths} == {"attend"}


def test_packed_sequences_do_not_see_each_other(paths):
    ids, positions = tokens(1), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]])
    ours, theirs = (
        make("llama 6", how)(ids, position_ids=positions, use_cache=False).logits
        for how in ("headwise", "eager")
    )
    assert {what for what, _ in paths} == {"masked"}
    close(ours, theirs)
    close(ours[:, 5:], make("llama 6", "headwise")(ids[:, 5:]).logits)


@pytest.mark.parametrize("kind", ["bool", "added", "for each head"])
def test_masks_of_ones_own(kind):
    ids, generator = tokens(), seeded(4)
    seen = torch.rand(2, 6 if kind == "for each head" else 1, 11, 11, generator=generator) < 0.6
    seen |= torch.eye(11, dtype=torch.bool)
    added = torch.where(
        seen,
        torch.randn(seen.shape, generator=generator) * (kind == "added"),
        torch.finfo(torch.float32).min,
    )
    ours = make("llama 6", "headwise")(
        ids, attention_mask=added if kind == "added" else seen
    ).logits
    close(ours, make("llama 6", "eager")(ids, attention_mask=added).logits)


def test_blocks_of_queries_change_nothing(monkeypatch):
    ids, seen = tokens(), padded("left")
    whole = step(make("mistral window", "headwise"), ids, attention_mask=seen)
    monkeypatch.setattr(reference, "BLOCK_BYTES", 2 * 6 * 11 * 4 * 3)
    parts = step(make("mistral window", "headwise"), ids, attention_mask=seen)
    close(parts[0], whole[0])
    close_all(parts[1], whole[1])


@pytest.mark.parametrize("length", [5, 11])
def test_attention_that_sees_both_ways_equals_the_library(length, paths):
    ids, changes = tokens(length=length), {"use_bidirectional_attention": True, "sliding_window": 6}
    ours, theirs = (make("gemma3", how, **changes)(ids).logits for how in ("headwise", "eager"))
    close(ours, theirs)
    assert {what for what, _ in paths} == {"attend"}
    assert not any(kwargs["causal"] for _, kwargs in paths)


@pytest.mark.parametrize("pad", [False, True])
def test_encoder_equals_the_library(pad, paths):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 15,
        "num_attention_heads": 3,
        "num_hidden_layers": 2,
        "intermediate_size": 13,
    }
    configs = [transformers.BertConfig(**sizes, pad_token_id=None) for _ in range(2)]
    models = [
        transformers.AutoModel.from_config(c, attn_implementation=how).eval()
        for c, how in zip(configs, ("headwise", "eager"), strict=True)
    ]
    models[1].load_state_dict(models[0].state_dict())
    seen = padded("right") if pad else torch.ones(2, 11, dtype=torch.long)
    ours, theirs = (model(tokens(), attention_mask=seen).last_hidden_state for model in models)
    close(ours[seen == 1], theirs[seen == 1])
    assert {what for what, _ in paths} == {"masked" if pad else "attend"}


# ---- generation


@pytest.mark.parametrize("name", ["llama 6", "mistral window", "qwen2 mixed", "gemma3", "deepseek"])
def test_generation_with_its_cache_gives_the_same_tokens(name):
    ids = tokens(length=7, seed=5)
    ours = generate(name, "headwise", ids)
    assert ours.shape == (2, 19)
    assert len(ours[:, 7:].unique()) > 3
    assert torch.equal(ours, generate(name, "eager", ids))
    assert torch.equal(ours, generate(name, "headwise", ids, use_cache=False))


@pytest.mark.parametrize("name", ["llama 6", "mistral window"])
def test_generation_from_prompts_of_two_lengths(name):
    ids, seen = tokens(seed=6), padded("left")
    ids = ids.where(seen == 1, 0)
    ours = generate(name, "headwise", ids, attention_mask=seen)
    assert torch.equal(ours, generate(name, "eager", ids, attention_mask=seen))
    alone = generate(name, "headwise", ids[1:, 4:])
    assert torch.equal(ours[1, 4:], alone[0])


def test_generation_with_a_static_cache():
    ids = tokens(length=7, seed=8)
    ours = generate(
        "mistral window", "headwise", ids, cache_implementation="static", disable_compile=True
    )
    assert torch.equal(ours, generate("mistral window", "eager", ids))


@pytest.mark.parametrize("name", ["llama 48", "mistral window"])
def test_generation_from_a_prompt_in_two_parts(name, paths):
    ids, model = tokens(), make(name, "headwise", torch.float64)
    cache = transformers.DynamicCache(config=model.config)
    first = model(ids[:, :4], past_key_values=cache).logits
    paths.clear()
    rest = model(ids[:, 4:], past_key_values=cache).logits
    assert {what for what, _ in paths} == {"attend"}
    close(torch.cat((first, rest), 1), model(ids).logits)


# ---- what it says


def test_cut_mask_is_taken_as_it_is():
    place = (
        {"q_length": 6}
        if "q_length" in signature(sdpa_mask).parameters
        else {"cache_position": torch.arange(6)}
    )  # later versions, 5.0
    seen = bridge.mask(
        batch_size=1,
        kv_length=6,
        local_size=3,
        mask_function=lambda b, h, q, k: (k <= q) & (k > q - 3),
        **place,
    )
    assert seen.headwise == (True, 3)
    q, k, v = torch.randn(3, 1, 2, 6, 4, generator=seeded(9))
    layer = torch.nn.Module()
    uncut, _ = bridge.attention(layer, q, k, v, seen)
    cut, _ = bridge.attention(layer, q, k, v, seen[:, :, :, :6])
    close(cut, uncut)
    part, _ = bridge.attention(layer, q[:, :, 4:], k, v, seen[:, :, 4:])
    close(part, uncut[:, 4:])


def test_queries_without_a_mask_begin_at_the_first_key():
    q, k, v = torch.randn(3, 1, 2, 6, 4, generator=seeded(9))
    layer = torch.nn.Module()
    whole, _ = bridge.attention(layer, q, k, v, None, is_causal=True)
    close(bridge.attention(layer, q[:, :, :4], k, v, None)[0], whole[:, :4])
    close(bridge.attention(layer, q[:, :, 5:], k, v, None)[0], whole[:, 5:])
    assert not torch.allclose(bridge.attention(layer, q, k, v, None, is_causal=False)[0], whole)


def test_scale_is_derived_where_none_is_given():
    q, k, v = torch.randn(3, 1, 2, 6, 4, generator=seeded(9))
    layer = torch.nn.Module()
    close(
        bridge.attention(layer, q, k, v, None)[0],
        bridge.attention(layer, q, k, v, None, scaling=0.5)[0],
    )


REFUSED = [
    ({"head_mask": torch.ones(2)}, "a mask of heads: head_mask must be left out"),
    ({"cache": object()}, "cache must be left out"),
    ({"dropout": 1.5}, "dropout"),
    ({"attention_mask": torch.ones(1, 1, 6, 5, dtype=torch.bool)}, r"6"),
    ({"attention_mask": torch.ones(1, 1, 6, 6, dtype=torch.long)}, "int64"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_attention_refuses_what_it_cannot_do_in_one_line(given, message):
    q, k, v = torch.randn(3, 1, 2, 6, 4, generator=seeded(9))
    with pytest.raises(UsageError, match=message) as caught:
        bridge.attention(torch.nn.Module(), q, k, v, **{"attention_mask": None, **given})
    assert "\n" not in str(caught.value)


def test_name_of_the_attention_is_free():
    assert bridge.register("wide heads") == "wide heads"
    ids = tokens()
    close(make("llama 6", "wide heads")(ids).logits, make("llama 6", "headwise")(ids).logits)


def test_missing_transformers_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        UsageError, match=r"transformers with its attention interface is needed \(5\.0 or newer\)"
    ):
        bridge.register()
