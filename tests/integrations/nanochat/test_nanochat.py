"""nanochat's own GPT under the hook, and its checkpoints. Most of it needs nanochat: importable, or
its checkout in HEADWISE_NANOCHAT.

HEADWISE_NANOCHAT=~/nanochat python -m pytest tests/integrations/test_nanochat.py
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from support.tolerance import close, close_all, same, seeded

from headwise.errors import UsageError
from headwise.integrations import nanochat as bridge
from headwise.integrations.nanochat.command import main
from headwise.integrations.nanochat.configs import ADDED
from headwise.integrations.nanochat.layers import COSTS
from headwise.shape import Shape

CHECKOUT = os.environ.get("HEADWISE_NANOCHAT", "")
if CHECKOUT:
    sys.path.append(CHECKOUT)
needs_nanochat = pytest.mark.skipif(
    importlib.util.find_spec("nanochat") is None,
    reason="nanochat: set HEADWISE_NANOCHAT to its checkout",
)

# short windows are 128 tokens and the query's own at least, so sequences are longer than that
STOCK = {
    "sequence_len": 160,
    "vocab_size": 101,
    "n_layer": 3,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 40,
    "window_pattern": "SL",
}
FREE = {"num_heads": 6, "head_dim": 14, "v_head_dim": 9, "num_kv_heads": 3}
LENGTH = 140


@pytest.fixture
def nano(monkeypatch):
    """nanochat's modules; where its tokenizer's packages are missing an empty one stands in."""
    if importlib.util.find_spec("rustbpe") is None or importlib.util.find_spec("tiktoken") is None:
        stand_in = types.ModuleType("nanochat.tokenizer")
        stand_in.get_tokenizer = None
        monkeypatch.setitem(sys.modules, "nanochat.tokenizer", stand_in)
    names = ("gpt", "engine", "checkpoint_manager", "common", "optim")
    with torch.compiler.set_stance(
        "force_eager"
    ):  # its optimiser compiles itself, which takes longer than all of these tests
        yield types.SimpleNamespace(
            **{name: importlib.import_module(f"nanochat.{name}") for name in names}
        )


def draw(model, seed=0):
    """Weights that are all in use: nanochat's projections start at zero."""
    model.init_weights()
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator)
                * (0.8 if parameter.ndim < 2 else 3 * parameter.shape[1] ** -0.5)
            )
    return model


def build(nano, **changes):
    return draw(nano.gpt.GPT(nano.gpt.GPTConfig(**{**STOCK, **changes})))


def tokens(batch=2, length=LENGTH, seed=1):
    return torch.randint(0, STOCK["vocab_size"], (batch, length), generator=seeded(seed))


def loss_of(model, ids):
    return model(ids[:, :-1], targets=ids[:, 1:].contiguous())


def step(model, ids):
    """Logits, and the gradients of every parameter."""
    logits = model(ids)
    loss_of(model, ids).backward()
    return logits, [p.grad for p in model.parameters()]


def count(model):
    return sum(p.numel() for p in model.parameters())


# ---- nanochat's own sizes


@needs_nanochat
@pytest.mark.parametrize(
    "changes",
    [{}, {"n_kv_head": 4, "window_pattern": "L"}, {"n_head": 1, "n_kv_head": 1, "n_layer": 2}],
)
def test_use_of_stock_sizes_gives_stock_logits_and_gradients(nano, changes):
    ids, stock = tokens(), build(nano, **changes)
    wanted, slopes = step(stock, ids)
    with bridge.use():
        model = build(nano, **changes)
        ours, gradients = step(model, ids)
    assert type(model.transformer.h[0].attn) is not type(stock.transformer.h[0].attn)
    assert list(model.state_dict()) == list(stock.state_dict())
    close(ours, wanted)
    close_all(gradients, slopes)


@needs_nanochat
def test_use_of_stock_sizes_starts_bit_for_bit(nano):
    starts = []
    for hook in (False, True):
        with (
            torch.random.fork_rng(devices=[]),
            torch.device("meta"),
            bridge.use() if hook else torch.no_grad(),
        ):
            model = nano.gpt.GPT(nano.gpt.GPTConfig(**STOCK))
        model.to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model.init_weights()
        starts.append({**model.state_dict(), "cos": model.cos, "sin": model.sin})
    for name, tensor in starts[0].items():
        same(starts[1][name], tensor, name)


@needs_nanochat
def test_costs_of_stock_sizes_stay(nano):
    def costs(model):
        return [
            getattr(model, name)(
                *([77] if "decode" in name or "prefill" in name or "read" in name else [])
            )
            for name in COSTS
        ]

    wanted = costs(build(nano))
    with bridge.use():
        assert costs(build(nano)) == wanted


@needs_nanochat
def test_use_trains_with_nanochats_optimiser(nano):
    def losses():
        model, found = build(nano), []
        optimizer = model.setup_optimizer()
        for i in range(4):
            ids = tokens(seed=10 + i)
            loss = loss_of(model, ids)
            loss.backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)
            found.append(loss.detach())
        return torch.stack(found)

    wanted = losses()
    with bridge.use():
        ours = losses()
        assert (
            ours - wanted
        ).abs().max() < 1e-3  # Muon rounds to half precision, so that rounding errors grow
    with bridge.use(**FREE):
        other = losses()
    assert other.isfinite().all()
    assert (other - wanted).abs().max() > 0.01


# ---- free sizes


def by_hand(model, ids, scale):
    """nanochat's forward pass in float64 with every layer's attention written out; weights by
    nanochat's names."""
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    c, T = model.config, ids.shape[1]
    R, V = c.head_dim, c.v_head_dim

    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()

    def heads(x, width):
        return x.unflatten(-1, (-1, width)).transpose(1, 2)

    rate = 100_000.0 ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)
    turn = torch.polar(
        torch.ones(T, R // 2, dtype=torch.float64),
        -torch.outer(torch.arange(T, dtype=torch.float64), rate),
    )

    def rotate(x):
        y = torch.complex(x[..., : R // 2], x[..., R // 2 :]) * turn
        return torch.cat((y.real, y.imag), -1)

    x = norm(weights["transformer.wte.weight"][ids])
    gate = weights["smear_lambda"] * torch.sigmoid(x[:, 1:, :24] @ weights["smear_gate.weight"].mT)
    first = x = middle = torch.cat((x[:, :1], x[:, 1:] + gate * x[:, :-1]), 1)
    for i in range(c.n_layer):
        x = weights["resid_lambdas"][i] * x + weights["x0_lambdas"][i] * first
        h, part = norm(x), f"transformer.h.{i}."
        q, k = (
            norm(rotate(heads(h @ weights[f"{part}attn.{name}.weight"].mT, R)))
            for name in ("c_q", "c_k")
        )
        v = heads(h @ weights[f"{part}attn.c_v.weight"].mT, V)
        if f"value_embeds.{i}.weight" in weights:
            opened = 3 * torch.sigmoid(h[..., :12] @ weights[f"{part}attn.ve_gate.weight"].mT)
            v = v + opened.mT.unsqueeze(-1) * heads(weights[f"value_embeds.{i}.weight"][ids], V)
        k, v = (t.repeat_interleave(c.n_head // c.n_kv_head, 1) for t in (k, v))
        at = torch.arange(T)
        far = at[:, None] - at > model.window_sizes[i][0]
        scores = (scale * q @ k.mT).masked_fill((at > at[:, None]) | far, -torch.inf)
        x = (
            x
            + (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
            @ weights[f"{part}attn.c_proj.weight"].mT
        )
        x = (
            x
            + (norm(x) @ weights[f"{part}mlp.c_fc.weight"].mT).relu().square()
            @ weights[f"{part}mlp.c_proj.weight"].mT
        )
        middle = x if i == c.n_layer // 2 else middle
    logits = norm(x - weights["backout_lambda"] * middle) @ weights["lm_head.weight"].mT
    return 15 * torch.tanh(logits[..., : c.vocab_size] / 15)


SIZES = [
    (FREE, 1.44 * 14**-0.5),
    ({**FREE, "v_head_dim": 22}, 1.44 * 14**-0.5),
    ({"num_heads": 3, "head_dim": 320, "num_kv_heads": 1, "v_head_dim": 8}, 1.44 * 320**-0.5),
    ({"num_heads": 60, "head_dim": 2, "v_head_dim": 1}, 1.44 * 2**-0.5),
    ({"num_heads": 2}, 1.44 * 20**-0.5),
    ({"head_dim": 30}, 1.44 * 30**-0.5),
    ({**FREE, "logit_scale": 0.3}, 0.3),
    ({**FREE, "max_logit": 7.0}, 0.5),
]


@needs_nanochat
@pytest.mark.parametrize(
    ("heads", "scale"),
    SIZES,
    ids=lambda v: " ".join(f"{x}" for x in v.values()) if isinstance(v, dict) else "",
)
def test_use_of_free_heads_by_the_formula(nano, heads, scale):
    with bridge.use(**heads):
        model = build(nano)
    c, ids = model.config, tokens(1)
    assert (c.n_head, c.head_dim) == (
        heads.get("num_heads", 4),
        heads.get("head_dim", 40 // heads.get("num_heads", 4)),
    )
    close(model(ids), by_hand(model, ids, scale).float())
    assert bridge.shape_of(c).scale == pytest.approx(scale, rel=1e-12)
    assert bridge.shape_of(c).params == count(model)
    assert {p.grad is None for p in model.parameters()} == {True}
    loss_of(model, ids).backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in model.parameters())


@needs_nanochat
def test_costs_follow_both_widths(nano):
    with bridge.use(**FREE):
        model = build(nano)
    c, (H, R, V, KV) = model.config, (6, 14, 9, 3)
    seen = [min(left, 160) for left, _ in model.window_sizes]
    assert seen == [128, 160, 160]
    assert model.estimate_flops() == 6 * model.num_matmul_params() + sum(
        6 * H * (R + V) * n for n in seen
    )
    assert model.estimate_decode_flops(150) == 2 * model.num_matmul_params() + sum(
        2 * H * (R + V) * min(n, 150) for n in seen
    )
    assert model.kv_bytes_per_token() == 3 * KV * (R + V) * 4
    assert model.kv_read_bytes(150) == sum(KV * (R + V) * 4 * min(n, 150) for n in seen)
    assert model.config is c


@needs_nanochat
@pytest.mark.parametrize("heads", [{}, FREE], ids=["stock", "free"])
def test_engine_generates_as_the_model_does(nano, heads):
    specials = types.SimpleNamespace(encode_special=lambda name: -1, get_bos_token_id=lambda: -1)
    with bridge.use(**heads):
        model = build(nano)
        engine = nano.engine.Engine(model, specials)
        prompt = tokens(1, 130)[0].tolist()
        samples, _ = engine.generate_batch(prompt, num_samples=2, max_tokens=9, temperature=0.0)
        assert samples[0] == samples[1] == prompt + list(model.generate(prompt, 9, temperature=0.0))
    assert len(set(samples[0][130:])) > 2


@needs_nanochat
def test_cache_takes_a_prompt_in_two_parts(nano):
    ids = tokens(1)
    with bridge.use(**FREE), torch.no_grad():
        model, cache = build(nano), nano.engine.KVCache(1, 3, LENGTH, 1, 3, "cpu", torch.float32)
        model.smear_lambda.zero_()  # nanochat does not carry it over from part to part
        parts = [model(ids[:, :100], kv_cache=cache), model(ids[:, 100:], kv_cache=cache)]
        close(torch.cat(parts, 1), model(ids))
    assert cache.get_pos() == LENGTH
    assert (cache.k_cache.shape, cache.v_cache.shape) == (
        (3, 1, LENGTH, 3, 14),
        (3, 1, LENGTH, 3, 9),
    )


# ---- which models get the heads


@needs_nanochat
def test_use_changes_the_first_model_and_those_of_its_size(nano):
    with bridge.use(**FREE), torch.device("meta"):
        first, other, again = (
            nano.gpt.GPT(nano.gpt.GPTConfig(**{**STOCK, **c})) for c in ({}, {"n_layer": 12}, {})
        )
    assert (
        (first.config.n_head, first.config.head_dim)
        == (again.config.n_head, again.config.head_dim)
        == (6, 14)
    )
    assert (other.config.n_head, other.config.head_dim, other.config.v_head_dim) == (4, 10, 10)


@needs_nanochat
@pytest.mark.parametrize(
    ("stock", "heads", "wanted"),
    [
        (4, {"num_heads": 2}, (2, 2, 20)),
        (4, {"head_dim": 6}, (4, 4, 6)),
        (2, {"num_heads": 10}, (10, 2, 4)),
        (1, {"num_kv_heads": 2}, (4, 2, 10)),
    ],
)
def test_use_keeps_or_derives_what_is_not_given(nano, stock, heads, wanted):
    with bridge.use(**heads):
        c = nano.gpt.GPTConfig(**{**STOCK, "n_kv_head": stock})
    assert (c.n_head, c.n_kv_head, c.head_dim) == wanted


@needs_nanochat
def test_use_of_a_shape_changes_models_of_its_size(nano):
    shape = Shape(
        dim=40,
        depth=3,
        num_heads=5,
        head_dim=4,
        v_head_dim=3,
        num_kv_heads=1,
        qk_norm="free",
        max_logit=2.0,
    )
    with bridge.use(shape), torch.device("meta"):
        other = nano.gpt.GPT(nano.gpt.GPTConfig(**{**STOCK, "n_layer": 2, "n_embd": 48}))
        model = nano.gpt.GPT(nano.gpt.GPTConfig(**STOCK))
        with pytest.raises(
            UsageError, match="nanochat builds depth 3 with dim 80, the shape has dim 40"
        ):
            nano.gpt.GPTConfig(**{**STOCK, "n_embd": 80})
    assert (other.config.n_head, other.config.head_dim) == (4, 12)
    c = model.config
    assert (c.n_head, c.n_kv_head, c.head_dim, c.v_head_dim, c.logit_scale) == (5, 1, 4, 3, 0.5)


@needs_nanochat
def test_use_keeps_heads_that_a_config_names(nano):
    named = {**STOCK, "n_head": 7, "n_kv_head": 7, "head_dim": 6, "v_head_dim": 5}
    with bridge.use():
        model = nano.gpt.GPT(nano.gpt.GPTConfig(**named))
    assert vars(model.config) == {**named, "logit_scale": None}
    with bridge.use(num_heads=7, head_dim=6):
        assert vars(nano.gpt.GPTConfig(**named)) == vars(model.config)
    with (
        pytest.raises(UsageError, match="head_dim of the config is 6, asked for was 8"),
        bridge.use(head_dim=8),
    ):
        nano.gpt.GPTConfig(**named)


@needs_nanochat
def test_use_leaves_nanochat_as_it_was(nano):
    def held():
        modules = (nano.gpt, nano.engine, nano.checkpoint_manager)
        return [
            (name, id(value))
            for module in modules
            for name, value in vars(module).items()
            if not name.startswith("__")
        ]

    before = held()
    with bridge.use(**FREE):
        during = held()
        model = build(nano)
    assert held() == before
    assert {name for (name, a), (_, b) in zip(before, during, strict=True) if a != b} == {
        "GPT", "GPTConfig", "CausalSelfAttention", "KVCache", "save_checkpoint"
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="inside"), bridge.use(**FREE):
        raise RuntimeError("inside")
    assert held() == before
    assert model(tokens()).shape == (2, LENGTH, 101)


@needs_nanochat
def test_use_takes_a_config_made_before(nano):
    config = nano.gpt.GPTConfig(**STOCK)
    with bridge.use(**FREE):
        assert nano.gpt.GPT(config).config.head_dim == 14
    assert config.n_head == 4


@needs_nanochat
@pytest.mark.parametrize("planted", ["a factor", "other arguments", "another weight"])
def test_use_refuses_another_attention_than_the_known_one(nano, monkeypatch, planted):
    known = nano.gpt.CausalSelfAttention
    changes = {
        "a factor": lambda self, *args: 1.01 * known.forward(self, *args),
        "other arguments": lambda self, x, ve: x,
        "another weight": lambda self: self.register_parameter(
            "sink", torch.nn.Parameter(torch.zeros(1))
        ),
    }

    class Other(known):
        def __init__(self, *args):
            super().__init__(*args)
            if planted == "another weight":
                changes[planted](self)

        forward = known.forward if planted == "another weight" else changes[planted]

    monkeypatch.setattr(nano.gpt, "CausalSelfAttention", Other)
    with (
        pytest.raises(
            UsageError, match="this nanochat's attention is not the one this hook knows"
        ) as caught,
        bridge.use(),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert nano.gpt.flash_attn is importlib.import_module("nanochat.flash_attention").flash_attn


REFUSED = [
    ({"heads": 3}, "unknown size 'heads' of heads; did you mean num_heads or head_dim"),
    ({"head_dim": 7}, "head_dim must be even for rotary positions, got 7"),
    (
        {"num_heads": 3},
        "head_dim must be given when num_heads does not divide dim, got dim 40, num_heads 3",
    ),
    ({"num_heads": 4, "num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
    ({"logit_scale": 1.0, "max_logit": 1.0}, "max_logit needs qk_norm and replaces logit_scale"),
    (
        {"shape": Shape(dim=40, depth=3, num_heads=4, kv_lora_rank=8)},
        "kv_lora_rank of a nanochat model must be 0, got 8",
    ),
    (
        {"shape": Shape(dim=40, depth=3, num_heads=4, ffn_dim=80)},
        "ffn_dim of a nanochat model must be 160, got 80",
    ),
    (
        {"shape": Shape(dim=40, depth=3, num_heads=4), "head_dim": 4},
        "give a shape or sizes of heads, not both",
    ),
    (
        {"shape": Shape(dim=40, depth=9, num_heads=4)},
        "no GPT of depth 9 and dim 40 was built, so none got num_heads 4, head_dim 10",
    ),
]


@needs_nanochat
@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_use_refuses_bad_sizes_in_one_line(nano, given, message):
    with pytest.raises(UsageError) as caught, bridge.use(**given):
        nano.gpt.GPTConfig(**STOCK)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@needs_nanochat
def test_use_inside_use_is_refused(nano):
    with (
        bridge.use(),
        pytest.raises(UsageError, match="nanochat already has other heads"),
        bridge.use(),
    ):
        pass


# ---- checkpoints


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


# ---- configs and shapes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window_pattern": "SSL", "n_layer": 7},
        {"head_dim": 6, "v_head_dim": 11},
        {"logit_scale": 0.25},
        {"head_dim": 448, "n_head": 6},
    ],
)
def test_config_of_and_shape_of_are_inverse(changes):
    config = {**STOCK, "vocab_size": 128, **changes}
    shape = bridge.shape_of(config)
    back = bridge.config_of(shape, sequence_len=160)
    assert bridge.shape_of(back) == shape
    assert set(back) == {*STOCK, *(ADDED if set(changes) & set(ADDED) else ())}
    assert {k: back[k] for k in STOCK if k != "window_pattern"} == {
        k: config[k] for k in STOCK if k != "window_pattern"
    }


def test_shape_of_added_fields():
    stock, free = (
        Shape.from_hf(STOCK),
        Shape.from_hf({**STOCK, "head_dim": 6, "v_head_dim": 11, "logit_scale": 0.25}),
    )
    assert (free.head_dim, free.v_head_dim, free.qk_rope_head_dim, free.scale) == (6, 11, 6, 0.25)
    assert (stock.head_dim, stock.v_head_dim, stock.scale) == (
        10,
        10,
        pytest.approx(1.44 * 10**-0.5),
    )
    matrices = 40 * (4 * 6 + 2 * 6 + 2 * 11 + 4 * 11) - 40 * (4 * 10 + 2 * 10 + 2 * 10 + 4 * 10)
    assert free.params - stock.params == 3 * matrices + 2 * 128 * 2 * (11 - 10)


def test_config_of_refuses_a_shape_that_is_not_nanochats():
    shape = bridge.shape_of({**STOCK, "vocab_size": 128})
    for changes, message in (
        (
            {"activation": "gelu"},
            "activation of a nanochat model of these sizes is 'relu2', got 'gelu'",
        ),
        ({"tied": True}, "tied of a nanochat model of these sizes is False, got True"),
        (
            {"windows": (0, 129, 129)},
            "nanochat's windows are 0 or 129 at sequence_len 160, 0 in the last layer",
        ),
        ({"windows": (0, 7, 0)}, "nanochat's windows are 0 or 129"),
        (
            {"qk_rope_head_dim": 4},
            "qk_rope_head_dim of a nanochat model of these sizes is 10, got 4",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            bridge.config_of(shape.replace(**changes), 160)
    held = shape.replace(logit_scale=None, max_logit=3.0)
    assert bridge.config_of(held, 160)["logit_scale"] == 0.3


# ---- the command

SCRIPT = """
import json, sys
from dataclasses import asdict
from nanochat.gpt import GPT, GPTConfig
import torch
sizes = {"n_head": 2, "n_kv_head": 2, "n_embd": 40, "sequence_len": 8, "vocab_size": 64}
with torch.device("meta"):
    model = GPT(GPTConfig(n_layer=int(sys.argv[2]), **sizes))
model.to_empty(device="cpu")
model.init_weights()
compiled = torch.compile(model, backend="eager", dynamic=False)
loss = compiled(torch.zeros(1, 8, dtype=torch.long), torch.ones(1, 8, dtype=torch.long)).item()
about = {"argv": sys.argv[1:], "name": __name__, "config": asdict(model.config), "loss": loss}
print(json.dumps(about))
"""


@needs_nanochat
def test_command_runs_a_module_with_its_own_arguments(tmp_path: Path):
    (tmp_path / "probe.py").write_text(SCRIPT, encoding="utf-8")
    paths = [str(Path(bridge.__file__).parents[3]), CHECKOUT, os.environ.get("PYTHONPATH", "")]
    words = [
        "--num-heads",
        "6",
        "--head-dim",
        "300",
        "--num-kv-heads",
        "3",
        "--max-logit",
        "150",
        "--",
        "-m",
        "probe",
        "--depth",
        "2",
        "--",
        "x",
    ]
    told = subprocess.run(
        [sys.executable, "-m", "headwise.integrations.nanochat", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert told.returncode == 0, told.stderr
    answer = json.loads(told.stdout.splitlines()[-1])
    assert (answer["argv"], answer["name"]) == (["--depth", "2", "--", "x"], "__main__")
    c = answer["config"]
    assert (
        c["n_head"],
        c["head_dim"],
        c["n_kv_head"],
        c["v_head_dim"],
        c["logit_scale"],
        c["n_layer"],
    ) == (6, 300, 3, 300, 0.5, 2)
    assert answer["loss"] == pytest.approx(
        4.1589, abs=0.01
    )  # ln 64: at its start nanochat's logits are small


@needs_nanochat
def test_command_in_this_process(nano, tmp_path, monkeypatch, capsys):
    (tmp_path / "probe_here.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "probe_empty.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    before = sys.argv
    assert main(["--head-dim", "8", "--", "-m", "probe_here", "--depth", "1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["config"]["head_dim"] == 8
    assert sys.argv is before
    assert main(["--head-dim", "8", "--", "-m", "probe_empty"]) == 2
    assert "error: no GPT was built, so none got head_dim 8" in capsys.readouterr().err
    assert main(["--", "-m", "probe_empty"]) == 0


@pytest.mark.parametrize(
    "words", [[], ["--head-dim", "4"], ["--", "scripts.base_train"], ["--", "-m"]]
)
def test_command_states_what_comes_behind_the_dashes(words, capsys):
    assert main(words) == 2
    assert "error: behind -- comes -m and a module of nanochat's" in capsys.readouterr().err


def test_use_without_nanochat_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "nanochat.gpt", None)
    monkeypatch.setitem(sys.modules, "nanochat", None)
    with (
        pytest.raises(UsageError, match="nanochat must be importable: run this in its checkout"),
        bridge.use(),
    ):
        pass
