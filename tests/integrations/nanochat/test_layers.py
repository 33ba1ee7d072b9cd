"""nanochat's own GPT under the hook: its own sizes bit for bit, free sizes by the formula."""

import types

import pytest
import torch
from support.nanochat_model import FREE, LENGTH, STOCK, build, count, needs_nanochat, tokens
from support.tolerance import close, close_all, same

from headwise.integrations import nanochat as bridge
from headwise.integrations.nanochat.layers import COSTS


def loss_of(model, ids):
    return model(ids[:, :-1], targets=ids[:, 1:].contiguous())


def step(model, ids):
    """Logits, and the gradients of every parameter."""
    logits = model(ids)
    loss_of(model, ids).backward()
    return logits, [p.grad for p in model.parameters()]


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
