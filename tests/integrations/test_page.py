"""Each model of docs/integrations.md, as the page writes it. nanochat and litgpt run where they can
be imported; tests/support/nanochat_model.py says how."""

import re
from pathlib import Path

import pytest
import torch
from support.nanochat_model import needs_nanochat
from support.tolerance import close, seeded

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()


def run(section):
    """What the code of a section defines; it has at most 15 lines of code."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    space = {}
    exec(compile(code, section, "exec"), space)
    return space


def test_hugging_face_model_runs():
    pytest.importorskip("transformers")
    model = run("Hugging Face transformers")["model"]
    assert model.config._attn_implementation == "headwise"
    assert model(torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 256)


@needs_nanochat
def test_nanochat_model_runs():
    model = run("nanochat")["model"]
    assert model.transformer.h[0].attn.c_v.weight.shape == (3 * 9, 40)
    assert model(torch.zeros(1, 160, dtype=torch.long)).shape == (1, 160, 128)


def test_litgpt_model_runs(monkeypatch):
    litgpt = pytest.importorskip("litgpt", exc_type=ImportError)
    layer = pytest.importorskip("litgpt.model").CausalSelfAttention
    monkeypatch.setattr(
        layer, "scaled_dot_product_attention", stock := layer.scaled_dot_product_attention
    )
    sizes = {"n_layer": 2, "n_embd": 42, "n_head": 6, "n_query_groups": 3, "head_size": 14}
    more = {"attention_logit_softcapping": 2.0, "vocab_size": 97, "block_size": 32}
    model = litgpt.GPT(litgpt.Config(**sizes, **more))
    ids = torch.randint(97, (2, 11), generator=seeded(1))
    wanted = model(ids)
    run("litgpt")
    assert layer.scaled_dot_product_attention is not stock
    close(model(ids), wanted)


def test_plain_layers_run():
    made = run("Plain PyTorch")
    assert made["out"].shape == (2, 6, 32, 40)
    assert made["y"].shape == (2, 32, 64)
    undropped = made["attend"](
        *(made[n] for n in "qkv"), causal=True, mask=made["tokens"][:, None, None]
    )
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(made[n] for n in "qkv"),
        attn_mask=made["tokens"][:, None, None] & torch.ones(32, 32).tril().bool(),
    )
    close(undropped, theirs)
