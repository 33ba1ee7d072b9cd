"""Random models of transformers' own classes: forms read from their files equal what their
attention modules compute of unit vectors, with every position the same."""

import pytest
import torch
from support.planted_heads import dense
from support.public_classes import build
from support.small_configs import SMALL

from headwise.diagnose.checkpoints import open_checkpoint
from headwise.diagnose.inspection import inspect
from headwise.diagnose.measures import measure

# where a family keeps the attention module of a layer
PLACES = {
    "bert": "encoder.layer.{}.attention.self",
    "clip_vision_model": "encoder.layers.{}.self_attn",
    "cohere": "model.layers.{}.self_attn",
    "distilbert": "transformer.layer.{}.attention",
    "gemma2": "model.layers.{}.self_attn",
    "glm": "model.layers.{}.self_attn",
    "gpt2": "transformer.h.{}.attn",
    "gpt_neox": "gpt_neox.layers.{}.attention",
    "gpt_oss": "model.layers.{}.self_attn",
    "granite": "model.layers.{}.self_attn",
    "llama": "model.layers.{}.self_attn",
    "mixtral": "model.layers.{}.self_attn",
    "olmo": "model.layers.{}.self_attn",
    "phi": "model.layers.{}.self_attn",
    "phi3": "model.layers.{}.self_attn",
    "qwen2": "model.layers.{}.self_attn",
    "starcoder2": "model.layers.{}.self_attn",
    "vit": "layers.{}.attention",
}
POSITIONED = {"cohere", "gemma2", "glm", "gpt_neox", "gpt_oss", "granite", "llama", "mixtral"}
POSITIONED |= {"olmo", "phi", "phi3", "qwen2", "starcoder2"}


class Capture:
    """An attention function that keeps its queries, keys and values, and answers unit vectors."""

    def __init__(self):
        self.kept = None

    def __call__(self, module, query, key, value, mask, **kwargs):
        self.kept = [t[0].double() for t in (query, key, value)]
        H, N, V = query.shape[1], query.shape[2], value.shape[3]
        out = torch.zeros(1, N, H * V, dtype=query.dtype)
        out[0, : H * V] = torch.eye(H * V)
        return out.view(1, N, H, V), None


def of_module(model, config, place, model_type):
    """A layer's forms from its attention module: of unit vectors, less those of zero."""
    from transformers import AttentionInterface

    capture = Capture()
    AttentionInterface.register("capture", capture)
    model.set_attn_implementation("capture")
    module = model.get_submodule(place)
    D = config.hidden_size
    x = torch.cat((torch.eye(D), torch.zeros(3 * D, D)))[None].double()
    extra = {}
    if model_type in POSITIONED:
        width = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
        rotary = {"phi": module.__dict__.get("rotary_ndims"), "glm": width // 2}.get(model_type)
        rotary = rotary or {"gpt_neox": width // 4, "gpt_oss": width // 2}.get(model_type, width)
        ones = torch.ones(1, 4 * D, rotary, dtype=torch.float64)
        extra["position_embeddings"] = (ones, 0 * ones)
        extra["attention_mask"] = None
    out = module(x, **extra)[0][0].double()
    q, k, v = (t[:, :D] - t[:, D : D + 1] for t in capture.kept)
    H, V = len(q), v.shape[2]
    if model_type == "bert":  # its module ends before the outputs are mapped
        mapped = model.get_submodule(place.replace(".self", ".output.dense"))
        out = torch.cat((mapped.weight.T, mapped.weight.new_zeros(1, D)))
    o = (out[: H * V] - out[-1]).view(H, V, D)
    return q.mT, k.mT, v.mT, o


@pytest.mark.parametrize("model_type", PLACES)
def test_forms_are_those_that_the_public_module_computes(model_type, tmp_path):
    torch.manual_seed(5)
    config, model = build(model_type, "cpu", **SMALL[model_type][0])
    model = model.float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_()
        model.save_pretrained(tmp_path)
        opened = open_checkpoint(tmp_path)
        layer = opened.depth - 1
        place = PLACES[model_type].format(layer)
        found = [name for name, _ in model.named_modules() if name.endswith(place)]
        q, k, v, o = of_module(model.double(), config, found[0], model_type)
    heads = opened.heads(layer)
    ours, theirs = dense(heads.q, heads.k), dense(q, k)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6 * float(theirs.abs().max()))
    ours, theirs = dense(heads.o, heads.v), dense(o, v)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6 * float(theirs.abs().max()))
    s = torch.linalg.svdvals(dense(q, k))[:, : q.shape[1]]
    found = measure(heads, layer).qk
    assert found.stable == pytest.approx((s.square().sum(1) / s[:, 0] ** 2).tolist(), rel=1e-4)


def test_random_model_looks_untrained_and_a_changed_one_does_not(tmp_path):
    torch.manual_seed(5)
    _, model = build("llama", "cpu", **SMALL["llama"][0])
    model.save_pretrained(tmp_path)
    found = inspect(tmp_path)
    assert found.looks_untrained
    assert found.sentences[0].startswith("It looks untrained")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight[:, 3:].mul_(0.1)
    model.save_pretrained(tmp_path / "changed")
    changed = inspect(tmp_path, tmp_path / "changed")
    assert changed.untrained == (True,) * 5
    assert not any(changed.changes[0].other.untrained)
    moved = changed.changes[0].moved[2]
    a, b = (open_checkpoint(p).heads(2) for p in (tmp_path, tmp_path / "changed"))
    A, B = dense(a.q, a.k), dense(b.q, b.k)
    assert moved.qk == pytest.approx(
        ((B - A).flatten(1).norm(dim=1) / A.flatten(1).norm(dim=1)).tolist()
    )
    assert moved.vo == [0.0] * 6


@pytest.mark.parametrize("model_type", [name for name in SMALL if name not in PLACES])
def test_family_is_recognised(model_type, tmp_path):
    """Every other family whose config is known: its layers, heads and widths are found."""
    config, model = build(model_type, "cpu", **SMALL[model_type][0])
    model.save_pretrained(tmp_path)
    opened = open_checkpoint(tmp_path)
    heads = opened.heads(opened.depth - 1)
    assert heads.o.shape == (len(heads.q), heads.v.shape[1], config.hidden_size)
    assert heads.dim == config.hidden_size
    assert opened.depth == (opened.shape.depth if opened.shape else 1)


def cut_by_bloom(module, x):
    q, k, v = module._reshape(module.query_key_value(x) - module.query_key_value.bias)
    return q, k, v


def cut_by_falcon(module, x):
    # Keys and values are repeated for the query heads that share them.
    group = module.num_heads // module.num_kv_heads if module.new_decoder_architecture else 1
    q, k, v = (t.transpose(1, 2) for t in module._split_heads(module.query_key_value(x)))
    return q, k[:, ::group], v[:, ::group]


def cut_by_codegen(module, x):
    rows = module.qkv_proj(x).unflatten(-1, (4, -1))
    q, v, k = rows.split(module.head_dim * module.num_attention_heads // 4, -1)
    sizes = (module.num_attention_heads, module.head_dim)
    return [module._split_heads(t, *sizes, mp_num=4).transpose(1, 2) for t in (q, k, v)]


@pytest.mark.parametrize(
    ("model_type", "place", "cut", "changes"),
    [
        ("bloom", "self_attention", cut_by_bloom, {}),
        ("falcon", "self_attention", cut_by_falcon, {}),
        ("falcon", "self_attention", cut_by_falcon, {"new_decoder_architecture": True}),
        ("falcon", "self_attention", cut_by_falcon, {"multi_query": False}),
        ("codegen", "attn", cut_by_codegen, {}),
    ],
)
def test_fused_rows_are_cut_as_the_public_module_cuts_them(
    model_type, place, cut, changes, tmp_path
):
    torch.manual_seed(5)
    config, model = build(model_type, "cpu", **SMALL[model_type][0] | changes)
    model = model.float()
    model.save_pretrained(tmp_path)
    heads = open_checkpoint(tmp_path).heads(0)
    module = next(m for name, m in model.named_modules() if name.endswith(place)).double()
    with torch.no_grad():
        q, k, v = (t[0] for t in cut(module, torch.eye(config.hidden_size).double()[None]))
    assert torch.allclose(dense(heads.q, heads.k), dense(q.mT, k.mT), rtol=0, atol=1e-9)
    assert torch.allclose(heads.v, v.mT, rtol=0, atol=1e-9)
