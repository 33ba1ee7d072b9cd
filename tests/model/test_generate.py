"""Text with and without a cache, the choice of a token, and prompts that are refused."""

import pytest
import torch
from support.cached import BASE, FAMILY, VECTORS, VOCAB, filled, ids, refused
from support.tolerance import STANDARD_ERRORS, same, seeded

from headwise.model.cache import Cache
from headwise.model.generate import decode, generate, pick, prefill
from headwise.model.transformer import Decoder, Encoder, build

# ---- one answer, with and without a cache


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FAMILY)
def test_cache_same_text_with_and_without_a_cache(name, dtype):
    model = filled(Decoder(FAMILY[name]), seed=2).to(dtype)
    for batch, length in ((1, 1), (5, 6)):
        prompt = ids(batch, length, seed=batch)
        anew = generate(model, prompt, 11, cached=False)
        same(anew[:, :length], prompt)
        assert anew.shape == (batch, length + 11)
        same(generate(model, prompt, 11), anew)
        same(generate(model, prompt, 11, inputs=True, chunk=4), anew)
        for i in range(length, length + 11):  # the likeliest token is what the whole says it is
            assert torch.equal(model(anew[:, :i])[0][:, -1].argmax(-1), anew[:, i])


def test_cache_drawn_text_is_the_same_too():
    model = filled(Decoder(FAMILY["windows"]), spread=0.1).double()
    prompt = ids(4, 3)
    texts = [
        generate(model, prompt, 20, temperature=1.3, top_k=k, generator=seeded(7), cached=c)
        for k in (0, 9)
        for c in (True, False)
    ]
    same(texts[0], texts[1])
    same(texts[2], texts[3])
    assert not torch.equal(texts[0], texts[2])
    assert not torch.equal(
        texts[0], generate(model, prompt, 20, temperature=1.3, generator=seeded(8))
    )


# ---- picking a token


def test_pick():
    logits = torch.tensor([[0.1, 2.0, -1.0, 1.0], [3.0, 0.0, 2.9, 1.0]])
    assert pick(logits).tolist() == [1, 0]
    assert pick(logits, 0.7, 1, seeded(0)).tolist() == [1, 0]
    count, temperature = 20_000, 0.7
    for top_k in (0, 3):
        drawn = pick(logits[:1].expand(count, 4), temperature, top_k, seeded(3))
        weights = (logits[0].double() / temperature).exp()
        if top_k:
            weights[logits[0].argmin()] = 0
        p = weights / weights.sum()
        share = torch.bincount(drawn, minlength=4) / count
        bound = STANDARD_ERRORS * (p * (1 - p) / count).sqrt()
        assert ((share - p).abs() <= bound).all(), f"{share} for {p}, n {count}, seed 3"


# ---- what is refused


def test_cache_bad_prompts_are_refused():
    model = Decoder(BASE)
    kind = "a prompt must be (batch, tokens) whole numbers, one token or more, got"
    refused(f"{kind} (2, 0) of int64", generate, model, ids(2, 0), 3)
    refused(f"{kind} (4,) of int64", generate, model, ids(2, 4)[0], 3)
    refused(f"{kind} (2, 4) of float32", generate, model, torch.zeros(2, 4), 3)
    for wrong in (VOCAB, -1):
        prompt = ids(2, 4)
        prompt[1, 2] = wrong
        refused(f"token ids must be 0 to {VOCAB - 1}, got {wrong}", generate, model, prompt, 3)
        refused(
            f"token ids must be 0 to {VOCAB - 1}, got {wrong}",
            decode,
            model,
            prompt[:, 2],
            Cache(BASE, 2, 3),
        )
    vectors = "inputs must be (batch, tokens, 5) vectors, one token or more, got"
    refused(f"{vectors} (2, 3)", prefill, build(VECTORS), torch.zeros(2, 3), Cache(VECTORS, 2, 3))
    refused(
        "only tokens can be generated, got vocab_size 0, output_dim 3",
        generate,
        build(VECTORS),
        torch.zeros(2, 3, 5),
        3,
    )
    refused(
        "only tokens can be generated, got vocab_size 53, output_dim 3",
        generate,
        Decoder(BASE.replace(output_dim=3)),
        ids(1, 2),
        3,
    )
    for bad in (0, -3, 2.5, True, "2"):
        refused(
            f"tokens to generate must be a whole number of at least 1, got {bad!r}",
            generate,
            model,
            ids(1, 2),
            bad,
        )
    refused(
        "temperature must be 0 (the likeliest token) or a positive number, got -1",
        generate,
        model,
        ids(1, 2),
        3,
        temperature=-1,
    )
    refused(
        "top_k must be 0 (all) to vocab_size 53, got 54",
        generate,
        model,
        ids(1, 2),
        3,
        temperature=1,
        top_k=54,
    )
    refused(
        "chunk must be 0 (all at once) or more tokens, got -1",
        prefill,
        model,
        ids(1, 2),
        Cache(BASE, 1, 3),
        chunk=-1,
    )
    refused((
        "a cache needs a causal shape: earlier tokens must not depend on later ones, got causal "
        "False"
    ),
            generate, Encoder(BASE.replace(causal=False)), ids(1, 2), 3)  # fmt: skip
