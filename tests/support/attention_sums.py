"""Attention written out: loops over heads, sums in float64, nothing shared with the package."""

import math

import torch


def sees(queries, keys, causal, window):
    """(queries, keys) truth table: the last query stands at the last key."""

    def one(i, j):
        return (not causal or j <= i) and (window == 0 or abs(i - j) < window)

    return torch.tensor([[one(i, j) for j in range(keys)] for i in range(keys - queries, keys)])


def mix(q, k, v, scale, seen, hard=False):
    """One head: (B, Q, r), (B, N, r), (B, N, v) -> (B, Q, v)."""
    scores = scale * torch.einsum("bqr,bnr->bqn", q, k)
    scores = scores.masked_fill(~seen, -math.inf)
    if hard:
        weights = torch.nn.functional.one_hot(scores.argmax(-1), k.shape[1]).to(v)
    else:
        e = (scores - scores.amax(-1, keepdim=True).detach()).exp()
        weights = e / e.sum(-1, keepdim=True)
    return torch.einsum("bqn,bnv->bqv", weights, v)


def reference_attend(q, k, v, scale, causal=False, window=0, hard=False):
    group = q.shape[1] // k.shape[1]
    seen = sees(q.shape[2], k.shape[2], causal, window)
    return torch.stack(
        [
            mix(q[:, h], k[:, h // group], v[:, h // group], scale, seen, hard)
            for h in range(q.shape[1])
        ],
        1,
    )


def turned(x, width, theta):
    """Rotary positions as complex numbers: coordinate j of the first half with coordinate j of the
    second."""
    if not width:
        return x
    rest, re, im = (
        x[..., :-width],
        x[..., -width : x.shape[-1] - width // 2],
        x[..., x.shape[-1] - width // 2 :],
    )
    angle = torch.tensor(
        [[n * theta ** (-2 * j / width) for j in range(width // 2)] for n in range(x.shape[-2])],
        dtype=torch.float64,
    )
    z = torch.complex(re, im) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((rest, z.real, z.imag), -1)


def rms(x, gain=None):
    y = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    return y if gain is None else y * gain


def affine(x, weight, bias=None):
    y = torch.einsum("bni,oi->bno", x, weight)
    return y if bias is None else y + bias


def reference_layer(layer, x, hard=False):
    """The formula in `Attention`'s docstring, head by head."""
    s, w = layer.shape, dict(layer.named_parameters())
    H, R, V, rope = s.num_heads, s.head_dim, s.v_head_dim, s.qk_rope_head_dim
    qs, ks, vs = [], [], []
    if s.latent:
        deep = (
            rms(affine(x, w["q_down.weight"], w.get("q_down.bias")), w["q_norm.weight"])
            if s.q_lora_rank
            else x
        )
        down = affine(x, w["kv_down.weight"], w.get("kv_down.bias"))
        shared = turned(down[..., s.kv_lora_rank :], rope, s.rope_theta)
        grown = affine(rms(down[..., : s.kv_lora_rank], w["kv_norm.weight"]), w["kv.weight"])
        for h in range(H):
            both = grown[..., h * (R - rope + V) : (h + 1) * (R - rope + V)]
            q, k = (
                turned(affine(deep, w["q.weight"][h * R : (h + 1) * R]), rope, s.rope_theta),
                torch.cat((both[..., : R - rope], shared), -1),
            )
            qs.append(q if s.qk_norm == "none" else rms(q))
            ks.append(k if s.qk_norm == "none" else rms(k))
            vs.append(both[..., R - rope :])
    else:
        KV = s.num_kv_heads
        all_ = affine(x, w["qkv.weight"], w.get("qkv.bias"))
        for h in range(H):
            g = h // (H // KV)
            q, k = all_[..., h * R : (h + 1) * R], all_[..., (H + g) * R : (H + g + 1) * R]
            if s.qk_norm != "none":
                q, k = rms(q, w.get("q_norm.weight")), rms(k, w.get("k_norm.weight"))
            qs.append(turned(q, rope, s.rope_theta))
            ks.append(turned(k, rope, s.rope_theta))
            start = (H + KV) * R + g * V
            vs.append(all_[..., start : start + V])
    scale = 1 / math.sqrt(R) if s.logit_scale is None else s.logit_scale
    scale = scale if s.max_logit is None else s.max_logit / R
    seen = sees(x.shape[1], x.shape[1], s.causal, layer.window)
    modules = []
    for m in range(s.average):
        y = 0 if layer.out_bias is None else w["out_bias"][m]
        for h in range(m * H // s.average, (m + 1) * H // s.average):
            y = y + affine(
                mix(qs[h], ks[h], vs[h], scale, seen, hard), w["out.weight"][:, h * V : (h + 1) * V]
            )
        modules.append(y)
    return sum(modules) / s.average
