"""Planted heads in every layout and file format are read back as they were planted."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.planted_heads import (
    codegen,
    dense,
    fused,
    gguf,
    grouped,
    permuted,
    planted,
    separate,
    transposed,
    write,
)

from headwise import Shape, UsageError
from headwise.diagnose.checkpoints import open_checkpoint
from headwise.diagnose.inspection import inspect
from headwise.model.transformer import build

ROOT = Path(__file__).parents[2]


def same(heads, q, k, v, o):
    """The forms are the planted ones, to 1e-6."""
    found = dense(heads.q, heads.k), dense(heads.o, heads.v)
    for ours, planted_ones in zip(found, (dense(q, k), dense(o, v)), strict=True):
        scale = planted_ones.abs().max()
        assert torch.allclose(ours, planted_ones, rtol=0, atol=1e-6 * float(scale))


LAYOUTS = {
    "separate": (separate, {}),
    "one KV head": (separate, {"K": 1}),
    "fused": (fused, {"V": 8}),
    "grouped": (grouped, {"V": 8}),
    "transposed": (transposed, {"K": 6, "V": 8}),
    "codegen": (codegen, {"H": 4, "K": 4, "D": 32, "V": 8}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_read_as_it_was_planted(name, tmp_path):
    layout, sizes = LAYOUTS[name]
    if name in ("transposed", "grouped", "fused"):
        sizes = {"D": 48, **sizes}
    heads = planted(**sizes)
    opened = open_checkpoint(write(tmp_path, *layout(*heads)))
    same(opened.heads(0), *heads)


def test_sizes_that_differ_by_layer_are_read_by_layer(tmp_path):
    first, second = planted(D=30), planted(H=4, K=2, R=6, V=3, D=30, seed=2)
    path = tmp_path / "weights.safetensors"
    shape = Shape(dim=30, depth=2, num_heads=(6, 4), num_kv_heads=(3, 2), head_dim=(8, 6),
                  v_head_dim=(5, 3))  # fmt: skip
    rows = [torch.cat([t.flatten(0, 1) for t in (q, k, v)]) for q, k, v, _ in (first, second)]
    tensors = {f"blocks.{i}.attention.qkv.weight": row for i, row in enumerate(rows)}
    tensors |= {
        f"blocks.{i}.attention.out.weight": o.flatten(0, 1).T.contiguous()
        for i, (_, _, _, o) in enumerate((first, second))
    }
    save_file(tensors, path, {"run": json.dumps({"shape": shape.spec()})})
    opened = open_checkpoint(tmp_path)
    assert opened.family == "headwise"
    same(opened.heads(0), *first)
    same(opened.heads(1), *second)


def test_norms_and_biases_of_queries_and_keys_are_folded_in(tmp_path):
    q, k, v, o = planted()
    g = torch.Generator().manual_seed(4)
    gains = [torch.rand(8, generator=g, dtype=torch.float64) + 0.5 for _ in range(2)]
    bq = torch.randn(6, 8, generator=g, dtype=torch.float64)
    config, tensors = separate(q, k, v, o, model_type="qwen3", attention_bias=True)
    before = "model.layers.0.self_attn"
    tensors |= {f"{before}.{n}_norm.weight": t for n, t in zip("qk", gains, strict=True)}
    tensors[f"{before}.q_proj.bias"] = bq.flatten()
    heads = open_checkpoint(write(tmp_path, config, tensors)).heads(0)
    same(heads, q * gains[0][:, None], k * gains[1][:, None], v, o)
    assert torch.allclose(heads.biases["q"], bq * gains[0])
    # Gemma's gain is 1 + weight.
    config = config | {"model_type": "gemma3_text", "sliding_window": 5}
    heads = open_checkpoint(write(tmp_path, config, tensors)).heads(0)
    same(heads, q * (1 + gains[0][:, None]), k * (1 + gains[1][:, None]), v, o)


def test_latent_is_read_through_its_own_width(tmp_path):
    H, rope, nope, V, C, L, D = 3, 4, 6, 5, 7, 11, 29
    g = torch.Generator().manual_seed(4)

    def random(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64)

    q_a, q_b, kv_a = random(L, D), random(H * (rope + nope), L), random(C + rope, D)
    kv_b, o, gain_q, gain = random(H * (nope + V), C), random(D, H * V), random(L), random(C)
    names = {"q_a_proj": q_a, "q_b_proj": q_b, "kv_a_proj_with_mqa": kv_a, "kv_b_proj": kv_b}
    names |= {"o_proj": o, "q_a_layernorm": gain_q, "kv_a_layernorm": gain}
    tensors = {f"model.layers.0.self_attn.{n}.weight": t for n, t in names.items()}
    config = {
        "model_type": "deepseek_v3", "hidden_size": D, "num_hidden_layers": 1,
        "num_attention_heads": H, "num_key_value_heads": H, "kv_lora_rank": C, "q_lora_rank": L,
        "qk_rope_head_dim": rope, "qk_nope_head_dim": nope, "v_head_dim": V, "vocab_size": 37,
        "intermediate_size": 31, "first_k_dense_replace": 1, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 9,
    }  # fmt: skip
    heads = open_checkpoint(write(tmp_path, config, tensors)).heads(0)
    # Written out at full width; a latent is divided by its size at inputs of unit variance.
    down = kv_a[:C] * (gain / (kv_a[:C].square().sum() / C).sqrt())[:, None]
    q = (q_b @ (q_a * gain_q[:, None])).view(H, -1, D)
    up = kv_b.view(H, nope + V, C)
    k = torch.cat((up[:, :nope] @ down, kv_a[C:].expand(H, rope, D)), 1)
    v, o = up[:, nope:] @ down, o.T.view(H, V, D)
    for ours, full in ((dense(heads.q, heads.k), dense(q, k)), (heads.ov, v @ o.mT)):
        a, b = (torch.linalg.svdvals(t)[:, : ours.shape[1]] for t in (ours, full))
        n = min(a.shape[1], b.shape[1])
        assert torch.allclose(a[:, :n], b[:, :n], rtol=1e-9, atol=1e-9 * float(b.max()))
    found = inspect(tmp_path).layers[0]
    s = torch.linalg.svdvals(dense(o, v))[:, :V]
    assert found.vo.condition == pytest.approx((s[:, 0] / s[:, -1]).tolist(), rel=1e-7)
    A = dense(q, k)
    cosine = A.diagonal(dim1=1, dim2=2).sum(1) / (A.flatten(1).norm(dim=1) * D**0.5)
    assert found.qk.angle == pytest.approx(cosine.acos().rad2deg().tolist(), rel=1e-9)
    assert found.kv_width == C
    assert (len(found.qk.sharing), found.qk.shareable) == (0, 0)


def test_run_of_ours_is_read(tmp_path):
    shape = Shape(dim=24, depth=2, num_heads=4, num_kv_heads=2, head_dim=5, v_head_dim=3,
                  vocab_size=7, causal=True, qk_norm="head", qk_rope_head_dim=4)  # fmt: skip
    torch.manual_seed(3)
    model = build(shape)
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    save_file(
        tensors, tmp_path / "weights.safetensors", {"run": json.dumps({"shape": shape.spec()})}
    )
    opened = open_checkpoint(tmp_path)
    weights, _ = model.blocks[1].attention.projections()
    q, k, v = (w.detach().double().view(n, -1, 24) for w, n in zip(weights, (4, 2, 2), strict=True))
    o = model.blocks[1].attention.out.weight.detach().double().T.view(4, 3, 24)
    same(opened.heads(1), q, k, v, o)
    assert opened.layouts[1].rope_dim == 4


# ---- file formats


def test_run_of_few_narrow_heads_is_not_taken_for_a_transposed_one(tmp_path):
    shape = Shape(dim=29, depth=1, num_heads=2, head_dim=3, v_head_dim=5, vocab_size=31)
    torch.manual_seed(0)
    tensors = {name: p.detach() for name, p in build(shape).named_parameters()}
    assert tensors["blocks.0.attention.qkv.weight"].shape == (22, 29)  # wider than high
    save_file(tensors, tmp_path / "w.safetensors", {"run": json.dumps({"shape": shape.spec()})})
    heads = open_checkpoint(tmp_path).heads(0)
    q, k, v = tensors["blocks.0.attention.qkv.weight"].double().split((6, 6, 10))
    assert torch.equal(heads.q, q.view(2, 3, 29))
    assert torch.equal(heads.k, k.view(2, 3, 29))
    assert torch.equal(heads.v, v.view(2, 5, 29))
    out = tensors["blocks.0.attention.out.weight"].double()
    assert torch.equal(heads.o, out.T.reshape(2, 5, 29))


def test_state_dict_shards_and_index_are_read(tmp_path):
    heads = planted()
    config, tensors = separate(*heads)
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    index = {}
    for n, some in enumerate((names[:2], names[2:])):
        torch.save({name: tensors[name] for name in some}, tmp_path / f"part-{n}.bin")
        index |= dict.fromkeys(some, f"part-{n}.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    same(open_checkpoint(tmp_path).heads(0), *heads)


def test_state_dict_inside_a_training_checkpoint_is_read(tmp_path):
    heads = planted(K=6, V=8, D=48)
    _, tensors = separate(*heads)
    path = tmp_path / "last.pt"
    torch.save({"step": 3, "model": {f"module.{n}": t for n, t in tensors.items()}}, path)
    same(open_checkpoint(path, num_heads=6).heads(0), *heads)
    with pytest.raises(UsageError, match="how many heads a layer has is not known"):
        open_checkpoint(path)
    torch.save(tensors, path, _use_new_zipfile_serialization=False)  # the format before 2020
    same(open_checkpoint(path, num_heads=6, num_kv_heads=6).heads(0), *heads)


def test_nanochat_folder_is_read(tmp_path):
    q, k, v, o = planted(H=4, K=2, R=12, V=12, D=48)
    before = "transformer.h.0.attn"
    rows = {"c_q": q, "c_k": k, "c_v": v}
    tensors = {f"_orig_mod.{before}.{n}.weight": t.flatten(0, 1) for n, t in rows.items()}
    tensors[f"_orig_mod.{before}.c_proj.weight"] = o.flatten(0, 1).T
    torch.save(tensors, tmp_path / "model_000007.pt")
    model = {"n_layer": 1, "n_head": 4, "n_kv_head": 2, "n_embd": 48, "sequence_len": 64,
             "vocab_size": 64, "window_pattern": "L"}  # fmt: skip
    (tmp_path / "meta_000007.json").write_text(json.dumps({"model_config": model}))
    opened = open_checkpoint(tmp_path)
    assert (opened.family, opened.layouts[0].rope_back) == ("nanochat", True)
    same(opened.heads(0), q, k, v, o)


def test_gguf_is_read_with_its_permutation_undone(tmp_path):
    q, k, v, o = planted(V=8)
    about = {
        "general.architecture": "llama", "llama.embedding_length": 29, "llama.block_count": 1,
        "llama.attention.head_count": 6, "llama.attention.head_count_kv": 3,
        "llama.attention.key_length": 8, "llama.attention.value_length": 8,
        "llama.feed_forward_length": 31, "llama.rope.freq_base": 50.0, "llama.vocab_size": 37,
        "tokenizer.ggml.tokens": ["a", "<b>"],
    }  # fmt: skip
    tensors = {
        "blk.0.attn_q.weight": permuted(q.flatten(0, 1), 6),
        "blk.0.attn_k.weight": permuted(k.flatten(0, 1), 3),
        "blk.0.attn_v.weight": v.flatten(0, 1),
        "blk.0.attn_output.weight": o.flatten(0, 1).T,
    }
    path = gguf(tmp_path / "model.gguf", about, tensors)
    opened = open_checkpoint(path)
    heads = opened.heads(0)
    assert (opened.layouts[0].rope_dim, opened.layouts[0].rope_theta) == (8, 50.0)
    assert torch.allclose(heads.q, q, atol=1e-6)
    assert torch.allclose(heads.k, k, atol=1e-6)
    same(heads, *(t.float().double() for t in (q, k, v, o)))
    gguf(path, about, tensors, {"blk.0.attn_q.weight": 8})
    with pytest.raises(UsageError, match=r"quantised \(type 8\): needs F32, F16 or BF16"):
        open_checkpoint(path).heads(0)


def test_text_of_a_wrapper_is_taken_and_its_images_on_request(tmp_path):
    text, images = planted(V=8), planted(H=4, K=4, D=28, seed=2, V=8)
    config, tensors = separate(*text, before="model.language_model.layers.0.self_attn")
    for i in range(2):
        _, more = separate(*images, before=f"model.vision_tower.encoder.layers.{i}.self_attn")
        tensors |= {n.replace("o_proj", "out_proj"): t.clone() for n, t in more.items()}
    vision = {"model_type": "clip_vision_model", "hidden_size": 28}
    config = {"model_type": "llava", "text_config": config, "vision_config": vision}
    folder = write(tmp_path, config, tensors)
    opened = open_checkpoint(folder)
    same(opened.heads(0), *text)
    assert opened.notes == ("stacks that are left out: model.vision_tower.encoder.layers",)
    opened = open_checkpoint(folder, num_heads=4, prefix="model.vision_tower.encoder.layers")
    same(opened.heads(1), *images)


def test_unknown_family_with_the_keys_of_llama_is_read_off_its_tensors(tmp_path):
    heads = planted()
    config, tensors = separate(*heads, model_type="someones_own", rope_theta=500.0)
    opened = open_checkpoint(write(tmp_path, config, tensors))
    same(opened.heads(0), *heads)
    assert (opened.layouts[0].rope_dim, opened.layouts[0].rope_theta) == (8, 500.0)
    assert opened.notes[0].startswith("sizes are read off the tensors, since unknown model_type")


def test_mapping_file_names_the_tensors_of_fairseq(tmp_path):
    heads = planted(H=8, K=8, D=40)
    names = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
    before = "encoder.sentence_encoder.layers.0.self_attn"
    tensors = {f"{before}.{n}.weight": heads[i].flatten(0, 1) for n, i in names.items()}
    tensors[f"{before}.out_proj.weight"] = heads[3].flatten(0, 1).T.contiguous()
    path = tmp_path / "model.pt"
    torch.save({"model": tensors}, path)
    same(open_checkpoint(path, mapping=ROOT / "examples/fairseq.toml").heads(0), *heads)


def test_mapping_file_names_the_tensors_of_tfjs(tmp_path):
    data, weights, all_heads = b"", [], []
    for i, D in enumerate((32, 40)):  # widths differ by layer
        heads = planted(H=8, K=8, R=4, V=4, D=D, seed=i + 1)
        all_heads.append(heads)
        fused = torch.cat([t.flatten(0, 1) for t in heads[:3]]).T[None, None]
        before = f"encoder/layer_{i}/self_attention"
        for name, t in (("qkv_transform/kernel", fused), ("output_transform/kernel",
                        heads[3].flatten(0, 1)[None, None])):  # fmt: skip
            weights.append({"name": f"{before}/{name}", "shape": list(t.shape), "dtype": "float32"})
            data += t.float().contiguous().numpy().tobytes()
    (tmp_path / "a.bin").write_bytes(data[:5001])
    (tmp_path / "b.bin").write_bytes(data[5001:])
    manifest = [{"paths": ["a.bin", "b.bin"], "weights": weights}]
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"weightsManifest": manifest}))
    opened = open_checkpoint(path, mapping=ROOT / "examples/tfjs.toml")
    for i, heads in enumerate(all_heads):
        same(opened.heads(i), *(t.float().double() for t in heads))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("q = 'a'", "must say num_heads"),
        ("num_heads = 8", "must name the tensors of queries"),
        ("num_heads = 8\nquery = 'a'", "unknown key 'query'"),
        ("num_heads = true\nq = 'a'", "num_heads in a mapping cannot be True"),
        ("num_heads = 8\nq = 'a{x}'", "q must be a name of a tensor"),
        ("num_heads = 8\nq = 'a{'", "q must be a name of a tensor"),
        ("num_heads = 8\nfused = 'x'\nq = 'a'", "fused must be concat or grouped"),
        ("num_heads = ", "is no mapping file"),
        ("num_heads = 8\nq = 'there.{layer}'\nk = 'no.{layer}'", "no layer has the names"),
    ],
)
def test_mistake_in_a_mapping_is_one_line(text, said, tmp_path):
    mapping = tmp_path / "map.toml"
    mapping.write_text(text)
    folder = write(tmp_path / "model", *separate(*planted()))
    with pytest.raises(UsageError, match=said):
        open_checkpoint(folder, mapping=mapping)


def test_index_of_80_gigabytes_opens_by_its_headers_alone(tmp_path):
    """Shards of a 70B model as sparse files: 80 layers, nothing of which is read."""
    H, K, R, D, F = 64, 8, 128, 8192, 28672
    sizes = {"self_attn.q_proj": (H * R, D), "self_attn.k_proj": (K * R, D), "mlp.up_proj": (F, D)}
    sizes |= {"mlp.gate_proj": (F, D)}
    sizes |= {"self_attn.v_proj": (K * R, D), "self_attn.o_proj": (D, H * R)}
    index = {}
    for shard in range(20):
        header, offset = {}, 0
        for layer in range(4 * shard, 4 * shard + 4):
            for name, (rows, columns) in sizes.items():
                end = offset + 2 * rows * columns
                full = f"model.layers.{layer}.{name}.weight"
                header[full] = {"dtype": "BF16", "shape": [rows, columns],
                                "data_offsets": [offset, end]}  # fmt: skip
                index[full], offset = f"model-{shard}.safetensors", end
        text = json.dumps(header).encode()
        with (tmp_path / f"model-{shard}.safetensors").open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            f.truncate(8 + len(text) + offset)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {"model_type": "llama", "hidden_size": D, "num_hidden_layers": 80,
              "num_attention_heads": H, "num_key_value_heads": K, "intermediate_size": F,
              "vocab_size": 128}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_checkpoint(tmp_path)
    assert opened.depth == 80
    assert opened.bytes() > 80e9
    blocks = sum(path.stat().st_blocks for path in tmp_path.iterdir()) * 512
    assert blocks < 2**20
