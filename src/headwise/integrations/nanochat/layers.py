"""nanochat's classes with free sizes, built from its own parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.integrations.nanochat.configs import SHARP
from headwise.model.dispatch import attend

GATE = 12  # channels that nanochat's gates of value embeddings read
# nanochat's methods that count operations or bytes, linear in one width of queries, keys and values
COSTS = (
    "estimate_flops",
    "estimate_decode_flops",
    "estimate_prefill_flops",
    "kv_bytes_per_token",
    "kv_read_bytes",
)


def model_class(base: type, config_class: type) -> type:
    """GPT for the configs of a class."""

    class GPT(base):  # type: ignore[misc, valid-type]
        """nanochat's GPT; value embeddings, rotary tables and costs follow the heads."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            config = config if isinstance(config, config_class) else config_class(**vars(config))
            super().__init__(config, *args, **kwargs)
            width = config.n_kv_head * config.v_head_dim
            for name, table in self.value_embeds.items():
                if table.embedding_dim != width:
                    self.value_embeds[name] = nn.Embedding(table.num_embeddings, width)

        def _precompute_rotary_embeddings(
            self, seq_len: int, head_dim: int, *args: Any, **kwargs: Any
        ) -> Any:
            return super()._precompute_rotary_embeddings(
                seq_len, self.config.head_dim, *args, **kwargs
            )

    for name in COSTS:
        if name in vars(base):  # older versions lack some
            setattr(GPT, name, _mean_over_widths(vars(base)[name]))
    return GPT


def _mean_over_widths(cost: Callable[..., int]) -> Callable[..., int]:
    """A cost that nanochat takes as linear in one width of queries, keys and values: the mean of
    what each width gives."""

    @functools.wraps(cost)
    def mean(self: Any, *args: Any, **kwargs: Any) -> int:
        config, total = self.config, 0
        try:
            for width in (config.head_dim, config.v_head_dim):
                self.config = SimpleNamespace(**{**vars(config), "n_embd": config.n_head * width})
                total += cost(self, *args, **kwargs)
        finally:
            self.config = config
        return total // 2

    return mean


def attention_class(gpt: Any) -> type:
    """CausalSelfAttention with the parts of nanochat's module `gpt`."""

    class CausalSelfAttention(nn.Module):
        """Causal attention of free sizes between nanochat's projections: values and their gated
        embedding, rotation, norms, window."""

        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__()
            D, H, KV = config.n_embd, config.n_head, config.n_kv_head
            R, V = config.head_dim, config.v_head_dim
            self.layer_idx = layer_idx
            self.n_head = H
            self.n_kv_head = KV
            self.head_dim = R
            self.v_head_dim = V
            # Queries and keys carry a factor each, which the given scale includes.
            self.scale = R**-0.5 if config.logit_scale is None else config.logit_scale / SHARP**2
            self.c_q = gpt.Linear(D, H * R, bias=False)
            self.c_k = gpt.Linear(D, KV * R, bias=False)
            self.c_v = gpt.Linear(D, KV * V, bias=False)
            self.c_proj = gpt.Linear(H * V, D, bias=False)
            self.ve_gate = None
            if gpt.has_ve(layer_idx, config.n_layer):
                self.ve_gate = gpt.Linear(GATE, KV, bias=False)

        def forward(
            self,
            x: Tensor,
            ve: Tensor | None,
            cos_sin: Any,
            window_size: tuple[int, int],
            kv_cache: Any,
        ) -> Tensor:
            q = self.c_q(x).unflatten(-1, (-1, self.head_dim))
            k = self.c_k(x).unflatten(-1, (-1, self.head_dim))
            v = self.c_v(x).unflatten(-1, (-1, self.v_head_dim))
            if ve is not None and self.ve_gate is not None:
                gate = 3 * self.ve_gate(x[..., :GATE]).sigmoid()
                v = v + gate.unsqueeze(-1) * ve.view(v.shape)
            q, k = (gpt.norm(gpt.apply_rotary_emb(t, *cos_sin)) * SHARP for t in (q, k))
            if kv_cache is not None:
                k, v = _append(kv_cache, self.layer_idx, k, v)
            y = _attend(q, k, v, self.scale, window_size[0] + 1)
            return self.c_proj(y.transpose(1, 2).flatten(-2))

    return CausalSelfAttention


def _attend(q_BQHR: Tensor, k_BNKR: Tensor, v_BNKV: Tensor, scale: float, window: int) -> Tensor:
    """Causal attention over the last `window` keys (0: all).

    Operands come in nanochat's order of axes, the output is (batch, heads, tokens, width).
    """
    if q_BQHR.shape[1] == 1 and window:
        k_BNKR, v_BNKV = k_BNKR[:, -window:], v_BNKV[:, -window:]
    q, k, v = (t.transpose(1, 2) for t in (q_BQHR, k_BNKR, v_BNKV))
    causal = q.shape[2] > 1
    return attend(q, k, v, causal=causal, window=window if causal else 0, scale=scale)


def _append(cache: Any, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Write new keys and values into nanochat's cache and return all of them so far; the last layer
    advances the cache."""
    _fit_widths(cache, k.shape[-1], v.shape[-1])
    start, new = cache.get_pos(), k.shape[1]
    keys, values = cache.get_layer_cache(layer)
    keys[:, start : start + new], values[:, start : start + new] = k, v
    if layer == cache.n_layers - 1:
        cache.advance(new)
    return keys[:, : start + new], values[:, : start + new]


def _fit_widths(cache: Any, rank: int, width: int) -> None:
    """Replace the tables of an empty cache by tables of these widths."""
    for name, wanted in (("k_cache", rank), ("v_cache", width)):
        table = getattr(cache, name)
        if table.shape[-1] != wanted:
            setattr(cache, name, table.new_zeros(*table.shape[:-1], wanted))


def cache_class(base: type) -> type:
    """KVCache that takes any width."""

    class KVCache(base):  # type: ignore[misc, valid-type]
        """nanochat's cache; prefill takes the widths of the cache that it copies."""

        def prefill(self, other: Any) -> None:
            _fit_widths(self, other.k_cache.shape[-1], other.v_cache.shape[-1])
            super().prefill(other)

    return KVCache


# ---- is this the nanochat that is known here?


def check_same_attention(gpt: Any) -> None:
    """Refuse a nanochat whose attention layer differs from ours of the same weights in outputs."""
    stock = gpt.GPTConfig(
        sequence_len=8, vocab_size=64, n_layer=1, n_head=6, n_kv_head=2, n_embd=60
    )
    ours_config = SimpleNamespace(**vars(stock), head_dim=10, v_head_dim=10, logit_scale=None)
    flash_attn = gpt.flash_attn

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int]
    ) -> Tensor:
        operands = (t.transpose(1, 2) for t in (q, k, v))
        return attend(*operands, causal=causal, window=window_size[0] + 1).transpose(1, 2)

    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        theirs, ours = gpt.CausalSelfAttention(stock, 0), attention_class(gpt)(ours_config, 0)
        ours.load_state_dict(theirs.state_dict())
        angle = torch.randn(1, 7, 1, 5)
        inputs = (
            torch.randn(2, 7, 60),
            torch.randn(2, 7, 20),
            (angle.cos(), angle.sin()),
            (3, 0),  # window
            None,
        )
        gpt.flash_attn = SimpleNamespace(flash_attn_func=kernel)
        try:
            off = (theirs(*inputs) - ours(*inputs)).abs().max().item()
        finally:
            gpt.flash_attn = flash_attn
    if not off < 1e-4:
        raise ValueError(f"outputs differ by {off:.3g}")
