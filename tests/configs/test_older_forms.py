"""Configs in the forms that files had before, and nanochat's meta files."""

import json

from support.random_configs import NANOCHAT

from headwise.shape import Shape


def test_older_forms_of_configs():
    """Keys of config.json files from before transformers 5, and names that people use."""
    neo = {"model_type": "gpt_neo", "num_layers": 4, "window_size": 5}
    runs = {**neo, "attention_types": [[["global", "local", "local"], 1], [["global"], 1]]}
    assert Shape.from_hf(runs).windows == (0, 5, 5)
    assert Shape.from_hf(neo).windows == (0, 5)
    hunyuan = {"model_type": "hunyuan_v1_moe", "num_experts": 64, "head_dim": 128}
    listed = Shape.from_hf({**hunyuan, "moe_topk": [8] * 32})
    assert listed == Shape.from_hf({**hunyuan, "moe_topk": 8})
    step = {"model_type": "step3p5", "num_hidden_layers": 4, "sliding_window": 512}
    kinds = ["full_attention", *["sliding_attention"] * 3, "full_attention"]
    shape = Shape.from_hf(
        {**step, "moe_layers_enum": "1,3", "layer_types": kinds, "rope_theta": [5e6, 1e4]}
    )
    assert [shape.layer(i).num_experts for i in range(4)] == [0, 288, 0, 288]
    assert shape.windows == (0, 512, 512, 512)
    pythia = {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 50_000}
    assert Shape.from_hf(pythia).qk_rope_head_dim == 48
    assert Shape.from_hf(pythia).rope_theta == 50_000.0
    same = {"model_type": "llama", "d_model": 64, "n_layers": 3, "n_heads": 4, "n_kv_head": 2}
    assert (Shape.from_hf(same).dim, Shape.from_hf(same).num_kv_heads) == (64, 2)


def test_meta_file_of_a_nanochat_checkpoint(tmp_path):
    path = tmp_path / "meta_000060.json"
    path.write_text(json.dumps({"step": 60, "model_config": NANOCHAT}), encoding="utf-8")
    assert Shape.from_hf(path) == Shape.from_hf(NANOCHAT)
    old = {key: value for key, value in NANOCHAT.items() if key != "window_pattern"}
    assert set(Shape.from_hf({"model_config": old}).windows) == {0}
