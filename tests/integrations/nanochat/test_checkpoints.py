"""nanochat's checkpoints: read again, old ones too, bad ones refused in one line."""

import dataclasses
import json
import types

import pytest
import torch
from support.nanochat_model import FREE, STOCK, build, count, needs_nanochat, tokens
from support.tolerance import same

from headwise.errors import UsageError
from headwise.integrations import nanochat as bridge


def saved(nano, folder, step=3, config=None, state=None, **heads):
    """A checkpoint that nanochat wrote; `config` is what the script lists."""
    with bridge.use(**heads):
        model = build(nano)
        listed = (
            dataclasses.asdict(model.config)
            if config is None
            else {**config, "n_head": model.config.n_head}
        )
        listed["n_kv_head"] = model.config.n_kv_head
        nano.checkpoint_manager.save_checkpoint(
            str(folder),
            step,
            state or model.state_dict(),
            None,
            {"step": step, "model_config": listed},
        )
    return model


@needs_nanochat
@pytest.mark.parametrize(
    "heads", [{}, FREE, {**FREE, "logit_scale": 0.3}], ids=["stock", "free", "scaled"]
)
def test_read_checkpoint_loads_again(nano, tmp_path, heads, monkeypatch):
    model, ids = saved(nano, tmp_path, **heads), tokens()
    found = bridge.read(tmp_path)
    assert found.step == found.meta["step"] == 3
    assert found.shape == bridge.shape_of(model.config)
    assert found.shape.params == count(model)
    for name, tensor in model.state_dict().items():
        same(found.state[name], tensor, name)
    stock = types.SimpleNamespace(get_vocab_size=lambda: 101)
    monkeypatch.setattr(nano.checkpoint_manager, "get_tokenizer", lambda: stock)
    with bridge.use() if heads else torch.no_grad():  # what is nanochat's own it loads by itself
        again, _, _ = nano.checkpoint_manager.build_model(
            str(tmp_path), 3, torch.device("cpu"), "eval"
        )
    same(again(ids), model(ids))


@needs_nanochat
def test_checkpoint_of_a_script_that_lists_fields_has_the_heads(nano, tmp_path):
    model = saved(nano, tmp_path, config=STOCK, logit_scale=0.3, **FREE)
    config = json.loads((tmp_path / "meta_000003.json").read_text())["model_config"]
    assert config == dataclasses.asdict(model.config)
    assert config["logit_scale"] == 0.3


def state_of(shape, extra=()):
    """Weights of nanochat's names and a shape's sizes."""
    H, KV, R, V, D = (
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.v_head_dim,
        shape.dim,
    )
    sizes = {
        "transformer.wte.weight": (shape.vocab_size, D),
        "lm_head.weight": (shape.vocab_size, D),
    }
    for i in range(shape.depth):
        at = f"transformer.h.{i}."
        sizes |= {
            f"{at}attn.c_q.weight": (H * R, D),
            f"{at}attn.c_k.weight": (KV * R, D),
            f"{at}attn.c_v.weight": (KV * V, D),
        }
        sizes |= {
            f"{at}attn.c_proj.weight": (D, H * V),
            f"{at}mlp.c_fc.weight": (4 * D, D),
            f"{at}mlp.c_proj.weight": (D, 4 * D),
        }
    return {
        f"_orig_mod.{name}": torch.zeros(size) for name, size in {**sizes, **dict(extra)}.items()
    }


def write(folder, step, config, state):
    torch.save(state, folder / f"model_{step:06d}.pt")
    (folder / f"meta_{step:06d}.json").write_text(
        json.dumps({"model_config": config}), encoding="utf-8"
    )


def test_read_of_an_old_checkpoint(tmp_path):
    old = {k: v for k, v in STOCK.items() if k != "window_pattern"}
    shape = bridge.shape_of(old).replace(extras=())
    write(tmp_path, 5, old, state_of(shape))
    write(
        tmp_path,
        12,
        old,
        state_of(shape, {"resid_lambdas": (3,), "value_embeds.0.weight": (128, 20)}.items()),
    )
    assert bridge.read(tmp_path, step=5).shape == shape
    last = bridge.read(str(tmp_path))
    assert last.step == 12
    assert last.shape.extras == (("value embeddings", 128 * 20), ("residual scalars", 3))
    assert last.shape.windows == (0, 0, 0)
    assert "lm_head.weight" in last.state
    assert last.config == {**old, "window_pattern": "L"}


def test_read_takes_unnamed_heads_from_the_weights(tmp_path):
    shape = bridge.shape_of({**STOCK, "head_dim": 6, "v_head_dim": 11}).replace(extras=())
    write(tmp_path, 0, STOCK, state_of(shape))
    found = bridge.read(tmp_path)
    assert found.shape == shape
    assert (found.config["head_dim"], found.config["v_head_dim"]) == (6, 11)


def test_read_refuses_bad_checkpoints_in_one_line(tmp_path):
    def refused(message, **more):
        with pytest.raises(UsageError, match=message) as caught:
            bridge.read(tmp_path, **more)
        assert "\n" not in str(caught.value)

    refused("no checkpoint in .*; there: none")
    state = state_of(bridge.shape_of(STOCK).replace(extras=()))
    write(tmp_path, 4, STOCK, state)
    refused("no checkpoint of step 7 in .*; there: steps 4", step=7)
    write(tmp_path, 5, {**STOCK, "head_dim": 12}, state)
    refused("c_k must have n_kv_head x head_dim rows, got 20 rows, n_kv_head 2, head_dim 12")
    write(tmp_path, 6, {**STOCK, "n_layer": 2}, state)
    refused("has .* parameters, the checkpoint has ")
    (tmp_path / "meta_000006.json").write_text("{}")
    refused("must be JSON with a model_config, got KeyError")
