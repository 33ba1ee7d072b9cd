"""Hugging Face models converted, loaded by transformers: its logits against those of before."""

import contextlib
import json

import pytest
import torch
from safetensors.torch import load_file
from support.public_classes import build as build_public
from support.small_configs import SMALL

from headwise import Shape, UsageError
from headwise.converting.convert import convert
from headwise.lm.checkpoint import load_decoder
from headwise.model.transformer import build
from headwise.tensor_files import write_tensors

IDS = torch.randint(29, (17 * 12,), generator=torch.Generator().manual_seed(1)).tolist()
SIZES = {"num_hidden_layers": 2, "hidden_size": 24, "vocab_size": 29, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 34,
         "max_position_embeddings": 64}  # fmt: skip
FAMILIES = {
    "llama": {"attention_bias": True, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8}},
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 17},
    "mixtral": {"num_local_experts": 4},
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 29},
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def public(request, tmp_path_factory):
    """A family, a folder of it, and its model; no weight is zero or one."""
    family = request.param
    values = FAMILIES[family] | (SIZES if family != "gpt2" else {})
    torch.manual_seed(5)
    config, model = build_public(family, "cpu", **values)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    config.architectures = [type(model).__name__]
    folder = tmp_path_factory.mktemp("public") / family
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling.py").write_text("raise SystemExit")
    return family, folder, model.eval().float()


def logits(model):
    with contextlib.suppress(AttributeError, ValueError):  # fused experts want sizes of 16 bytes
        model.set_experts_implementation("eager")
    with torch.inference_mode():
        return model(torch.tensor(IDS[:34]).view(2, 17)).logits


def loaded(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_exact_conversion_has_the_logits_of_before(public, tmp_path):
    family, folder, model = public
    if family == "gpt2":
        cases = [{}]
    else:
        cases = [{}, {"num_heads": 8}, {"num_heads": 8, "num_kv_heads": 4}]
    if family not in ("gpt2", "qwen3"):
        cases += [{"head_dim": 20, "v_head_dim": 20}, {"head_dim": 14, "v_head_dim": 14}]
    for i, sizes in enumerate(cases):
        done = convert(folder, out=tmp_path / f"{i}", **sizes)
        assert done.exact
        assert (done.format, done.target.num_heads) == ("hf", sizes.get("num_heads", 4))
        away = (logits(loaded(tmp_path / f"{i}")) - logits(model)).abs().max()
        assert float(away / logits(model).abs().max()) < 2e-6, sizes
    # What is not asked to change is the same bytes.
    old, new = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "0"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
    files = {path.name for path in (tmp_path / "0").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "conversion.json"} <= files
    assert "modeling.py" not in files


def test_approximation_is_measured_as_transformers_runs_it(public, tmp_path):
    family, folder, _ = public
    sizes = {"head_dim": 6, "v_head_dim": 6}
    if family == "gpt2":
        sizes = {"num_heads": 8, "head_dim": 3, "v_head_dim": 3}
    if family == "qwen3":
        with pytest.raises(UsageError, match="queries and keys are normed"):
            convert(folder, out=tmp_path / "new", **sizes)
        return
    done = convert(folder, out=tmp_path / "new", data=IDS, tokens=17, sequences=6, **sizes)
    in_place = convert(folder, data=IDS, tokens=17, sequences=6, controls=False, **sizes)
    assert in_place.losses.measured == pytest.approx(done.losses.measured, abs=3e-5)
    rows = torch.tensor(IDS).view(-1, 17)[-3:]
    with torch.inference_mode():
        model = loaded(tmp_path / "new")
        logits(model)  # which sets how experts are computed
        out = model(rows).logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(out, rows[:, 1:].flatten())
    assert done.losses.measured == pytest.approx(float(loss), rel=1e-5)
    assert done.losses.measured != pytest.approx(done.losses.before, abs=1e-4)


def test_public_model_is_finetuned_by_transformers(public, tmp_path):
    family, folder, _ = public
    if family != "llama":
        return
    done = convert(folder, out=tmp_path / "new", rank=6, data=IDS, tokens=17, sequences=4,
                   controls=False, finetune=4, lr=0.003)  # fmt: skip
    assert done.curve[0][1] == pytest.approx(done.losses.measured, rel=1e-5)
    rows = torch.tensor(IDS).view(-1, 17)[-2:]
    with torch.inference_mode():
        out = loaded(tmp_path / "new")(rows).logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(out, rows[:, 1:].flatten())
    assert done.curve[-1][1] == pytest.approx(float(loss), rel=1e-5)
    assert done.curve[-1][1] != pytest.approx(done.curve[0][1], abs=1e-4)


@pytest.mark.parametrize(
    ("family", "sizes", "said"),
    [
        ("gpt2", {"rank": 3}, "gpt2 has no head_dim of its own"),
        ("gpt2", {"num_kv_heads": 2}, "gpt2's config.json cannot say num_kv_heads 2"),
        ("llama", {"head_dim": 6}, "llama's config.json cannot say v_head_dim 10"),
        ("gpt2", {"to": "headwise"}, "is an approximation by tanh"),
        ("mixtral", {"to": "headwise"}, "num_experts"),
        ("granite", {"rank": 6}, "this model is granite"),
        ("deepseek_v3", {"num_heads": 8}, "pass through a latent"),
        ("bert", {"num_heads": 12}, "this model is bert"),
    ],
)
def test_family_that_cannot_say_a_shape_refuses_it(family, sizes, said, tmp_path):
    torch.manual_seed(5)
    values = FAMILIES.get(family, SMALL[family][0] if family in SMALL else {})
    values = values | (SIZES if family in ("llama", "mixtral") else {})
    config, model = build_public(family, "cpu", **values)
    config.architectures = [type(model).__name__]
    model.save_pretrained(tmp_path / "old")
    with pytest.raises(UsageError, match=said):
        convert(tmp_path / "old", out=tmp_path / "new", **sizes)
    assert not (tmp_path / "new").exists()


def test_yarn_under_another_rank_is_refused(public, tmp_path):
    family, folder, _ = public
    if family != "llama":
        return
    config = json.loads((folder / "config.json").read_text())
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(key), dict):
            config[key] |= {"rope_type": "yarn"}
    place = tmp_path / "yarn"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    (place / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(UsageError, match="rotary positions of kind 'yarn'"):
        convert(place, out=tmp_path / "new", rank=6)


AS_RUNS = {
    "llama": {"rms_norm_eps": 0.1, "attention_bias": True, "mlp_bias": True},
    "qwen3": {"rms_norm_eps": 0.1, "tie_word_embeddings": True},
    "gemma": {"rms_norm_eps": 0.02},
    "mistral": {"sliding_window": 7},
    "gpt2": {"activation_function": "gelu", "n_embd": 24, "n_layer": 2, "n_head": 4,
             "n_positions": 64, "vocab_size": 29, "layer_norm_epsilon": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("family", AS_RUNS)
def test_public_model_as_a_run_has_the_logits_of_before(family, tmp_path):
    torch.manual_seed(5)
    values = AS_RUNS[family] | ({} if family == "gpt2" else SIZES)
    config, model = build_public(family, "cpu", **values)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    config.architectures = [type(model).__name__]
    model.save_pretrained(tmp_path / "old")
    old = logits(model.eval().float())
    cases = [{}, {"num_heads": 8, "num_kv_heads": 4}]
    if family == "gpt2":
        cases = [{}, {"kv_lora_rank": 25, "num_heads": 8}]
    for i, sizes in enumerate(cases):
        if "kv_lora_rank" in sizes:
            with pytest.raises(UsageError, match="queries have biases"):
                convert(tmp_path / "old", out=tmp_path / f"{i}", to="headwise", **sizes)
            continue
        done = convert(tmp_path / "old", out=tmp_path / f"{i}", to="headwise", **sizes)
        assert done.format == "headwise"
        new = load_decoder(tmp_path / f"{i}")
        assert new.shape == done.target
        with torch.inference_mode():
            found = new(torch.tensor(IDS[:34]).view(2, 17))[0]
        assert float((found - old).abs().max() / old.abs().max()) < 3e-6, sizes


def test_public_model_as_a_run_takes_a_latent(tmp_path):
    torch.manual_seed(5)
    config, model = build_public("llama", "cpu", **SIZES)
    config.architectures = [type(model).__name__]
    model.save_pretrained(tmp_path / "old")
    data = {"data": IDS, "tokens": 17, "sequences": 6, "controls": False}
    done = convert(tmp_path / "old", out=tmp_path / "run", to="headwise", kv_lora_rank=17, **data)
    assert done.losses.measured == pytest.approx(
        convert(tmp_path / "old", to="headwise", kv_lora_rank=17, **data).losses.measured, rel=1e-5
    )


RUNS = {
    "llama": Shape(dim=24, depth=2, num_heads=4, head_dim=10, ffn_dim=40, vocab_size=29,
                   causal=True, activation="swiglu", qk_rope_head_dim=10),
    "gpt2": Shape(dim=24, depth=2, num_heads=4, vocab_size=29, causal=True, norm="layer",
                  positions="additive", num_positions=32, activation="gelu", qkv_bias=True,
                  out_bias=True, ffn_bias=True),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {}),
        ("llama", {"num_kv_heads": 2}),
        ("llama", {"rank": 6, "num_kv_heads": 1}),
        ("llama", {"kv_lora_rank": 13, "qk_rope_head_dim": 4}),
        ("llama", {"kv_lora_rank": 25, "num_heads": 8, "v_head_dim": 5}),
        ("gpt2", {}),
        ("gpt2", {"num_heads": 8, "num_kv_heads": 8, "rank": 3}),
    ],
)
def test_run_written_for_transformers_has_the_logits_of_ours(name, sizes, tmp_path):
    torch.manual_seed(4)
    model = build(RUNS[name])
    (tmp_path / "run").mkdir()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3) if p.ndim > 1 else p.add_(torch.randn_like(p) * 0.3)
    tensors = {n: p.detach() for n, p in model.named_parameters()}
    about = {"run": json.dumps({"shape": RUNS[name].spec(), "length": 64})}
    write_tensors(tmp_path / "run/weights.safetensors", tensors, about)
    convert(tmp_path / "run", out=tmp_path / "ours", **sizes)
    done = convert(tmp_path / "run", out=tmp_path / "theirs", to="hf", **sizes)
    target = done.target
    if target.latent:  # DeepSeek's config has biases of keys with those of outputs, here zero
        assert json.loads((tmp_path / "theirs/config.json").read_text())["kv_lora_rank"]
        target = target.replace(out_bias=False)
    assert target == load_decoder(tmp_path / "ours").shape
    with torch.inference_mode():
        ours = load_decoder(tmp_path / "ours")(torch.tensor(IDS[:34]).view(2, 17))[0]
    theirs = logits(loaded(tmp_path / "theirs"))
    assert float((ours - theirs).abs().max() / ours.abs().max()) < 2e-6
