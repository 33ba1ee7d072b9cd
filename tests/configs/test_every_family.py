"""Every family against its public class: parameters on the meta device, FLOPs and cache of small
models that run."""

import pytest
import torch
from support.public_classes import build, count, without_head
from support.small_configs import SMALL, SPECIAL, variants
from torch.utils.flop_counter import FlopCounterMode

from headwise.configs import FAMILIES, HYBRIDS
from headwise.shape import Shape

TOKENS = 11


def plain(model_type, values):
    """What a config.json says of these values."""
    return {"model_type": model_type} | {k: v for k, v in values.items() if k not in SPECIAL}


def test_every_family_is_checked():
    assert set(SMALL) == {*FAMILIES, "gemma4_text"} - {"kimi_k2", "step3p5"}
    assert not set(FAMILIES) & set(HYBRIDS)


@pytest.mark.parametrize("model_type", SMALL)
def test_parameters_are_those_of_the_public_class(model_type):
    for values in variants(model_type):
        config, model = build(model_type, **values)
        expected = count(model, model_type)
        assert Shape.from_hf(plain(model_type, values)).params == expected, values
        saved = {**config.to_dict(), "model_type": model_type}
        assert Shape.from_hf(saved).params == expected, values


# ---- models that run


def run(model_type, values):
    """The shape, the FLOPs of a forward pass, the numbers in its cache, how many tokens it had."""
    _, model = build(model_type, "cpu", **values)
    model = model.float().eval()
    model.set_experts_implementation("eager")
    shape = Shape.from_hf(plain(model_type, values))
    ids, tokens = torch.arange(1, TOKENS + 1)[None], TOKENS
    inputs = {"input_ids": ids, "use_cache": True} if shape.causal else {"input_ids": ids}
    if not shape.causal and shape.positions == "additive" and not shape.vocab_size:
        own = {"dinov2_with_registers": values.get("num_register_tokens", 4)}
        if model_type not in ("albert", "electra"):
            inputs = {"pixel_values": torch.zeros(1, 3, 21, 21)}
            tokens = shape.num_positions + own.get(model_type, 0)
    with FlopCounterMode(display=False) as counter:
        out = model(**inputs)
    layers = getattr(getattr(out, "past_key_values", None), "layers", ())
    cached = sum(x.numel() for layer in layers for x in (layer.keys, layer.values) if x is not None)
    return shape, counter.get_total_flops(), cached, tokens


# Matrices outside the stack, which `Shape.flops` leaves out: a pooler on one token, the maps of
# patches, a classifier, a projection.
POOLER, PATCHES = 2 * 48 * 48, 2 * 9 * 48 * 147
BESIDE = {
    **dict.fromkeys(("albert", "bert", "camembert", "roberta", "xlm-roberta"), POOLER),
    **dict.fromkeys(("clip_vision_model", "dinov2", "dinov2_with_registers"), PATCHES),
    "deit": PATCHES + 2 * 48 * 19,
    "siglip_text_model": 2 * 48 * 19,
    "siglip_vision_model": PATCHES,
    "vit": PATCHES + 2 * 48 * 2,
}
# Its experts all take all tokens, and the weights of those that are not chosen are zero.
ALL_EXPERTS = ("llama4_text",)
# A cache that is larger than what the attention reads, in tokens per layer or in heads.
KEEPS_ALL = {
    "gpt_neo": "tokens that its local layers never see again",
    "falcon": "keys and values of each group once for each of its heads",
}
NO_CACHE = ("clip_text_model", "openai-gpt")


@pytest.mark.parametrize("model_type", SMALL)
def test_flops_and_cache_are_those_of_the_running_class(model_type):
    values = list(variants(model_type))[-1]
    shape, flops, cached, tokens = run(model_type, values)
    # Written out, scores are of all pairs, whatever the mask.
    dense = shape.replace(causal=False, windows=(0,), chunked=False)
    if model_type in ALL_EXPERTS:
        dense = dense.replace(num_experts_per_tok=shape.num_experts)
    expected = dense.flops(tokens) + BESIDE.get(model_type, 0)
    if without_head(model_type):
        expected -= 2 * tokens * shape.vocab_size * shape.dim
    assert flops == expected
    if not shape.causal or model_type in NO_CACHE:
        return
    if model_type in KEEPS_ALL:
        assert cached > shape.kv_bytes(tokens, bytes_per=1)
        return
    # The class keeps one row less of a window, since the next token brings its own.
    assert any(shape.windows) or cached == shape.kv_bytes(tokens, bytes_per=1)
    rows = [min(tokens, w - 1 if (w := shape.window(i)) else tokens) for i in range(shape.depth)]
    assert cached == sum(n * shape.kv_width(layer=i) for i, n in enumerate(rows))


def test_gated_experts_take_only_those_that_are_chosen():
    """Of FLOPs per token, two experts of seven: by hand, from the real class's matrices."""
    values = SMALL["mixtral"][0] | {"num_experts_per_tok": 2}
    _, model = build("mixtral", **values)
    shape = Shape.from_hf(plain("mixtral", values))
    expert = 3 * 48 * 35
    idle = shape.depth * (7 - 2) * expert
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1) - 211 * 48
    scores = shape.depth * 6 * (14 + 14)
    assert shape.flops(1) == 2 * (matrices - idle + scores)
    assert shape.active_params == count(model) - idle
