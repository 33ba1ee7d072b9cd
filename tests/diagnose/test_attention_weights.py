"""One layer's weights from other code bases: the same outputs as theirs, and back to the bit."""

import pytest
import torch
from support.cached import filled
from support.tolerance import close, seeded
from torch import nn

from headwise.diagnose.attention_weights import (
    from_attention,
    from_litgpt,
    from_multihead,
    layout_of,
    to_attention,
    to_litgpt,
    to_multihead,
)
from headwise.errors import UsageError
from headwise.model.attention import Attention
from headwise.shape import Shape


@pytest.mark.parametrize("bias", [False, True])
def test_multihead_attention_is_carried_over_and_back(bias):
    theirs = filled(nn.MultiheadAttention(12, 3, bias=bias, batch_first=True)).double()
    shape = Shape(dim=12, depth=1, num_heads=3, qkv_bias=bias, out_bias=bias)
    ours = Attention(shape).double()
    ours.load_state_dict(from_multihead(theirs.state_dict()))
    x = torch.randn(2, 5, 12, generator=seeded(1), dtype=torch.float64)
    y, kept = ours(x, keep=True)
    expected, weights = theirs(x, x, x, average_attn_weights=False)
    close(y, expected)
    close(kept["weights"], weights)
    back = to_multihead(ours.state_dict())
    assert back.keys() == theirs.state_dict().keys()
    for name, t in theirs.state_dict().items():
        assert torch.equal(back[name], t), name


def test_multihead_attention_refuses_other_sizes():
    odd = nn.MultiheadAttention(12, 3, kdim=5, vdim=7)
    with pytest.raises(UsageError, match="keys and values of its own width"):
        from_multihead(odd.state_dict())
    wide = Attention(Shape(dim=12, depth=1, num_heads=3, head_dim=5))
    with pytest.raises(UsageError, match="heads that cut its width"):
        to_multihead(wide.state_dict())


class Litgpt(nn.Module):
    """litgpt's CausalSelfAttention as its code has it: rows of queries, keys and values in order,
    the first `rope` coordinates of a head rotated by halves, keys repeated for groups."""

    def __init__(self, dim, heads, groups, rank, rope, bias):
        super().__init__()
        self.qkv = nn.Linear(dim, (heads + 2 * groups) * rank, bias=bias)
        self.proj = nn.Linear(heads * rank, dim, bias=bias)
        self.sizes = heads, groups, rank, rope

    def forward(self, x):
        H, G, R, rope = self.sizes
        q, k, v = self.qkv(x).split((H * R, G * R, G * R), -1)
        q, k, v = (t.unflatten(-1, (-1, R)).transpose(1, 2) for t in (q, k, v))
        theta = 10_000.0 ** (-torch.arange(0, rope, 2).double() / rope)
        angles = torch.outer(torch.arange(x.shape[1]).double(), theta).repeat(1, 2)

        def turned(t):
            a, b = t[..., : rope // 2], t[..., rope // 2 : rope]
            other = torch.cat((-b, a), -1)
            return torch.cat(
                (t[..., :rope] * angles.cos() + other * angles.sin(), t[..., rope:]), -1
            )

        q, k = turned(q), turned(k).repeat_interleave(H // G, 1)
        y = nn.functional.scaled_dot_product_attention(
            q, k, v.repeat_interleave(H // G, 1), is_causal=True
        )
        return self.proj(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(("groups", "rope", "bias"), [(2, 10, False), (6, 4, True), (3, 6, True)])
def test_litgpts_attention_is_carried_over_and_back(groups, rope, bias, old):
    theirs = filled(Litgpt(22, 6, groups, 10, rope, bias)).double()
    shape = Shape(
        dim=22, depth=1, num_heads=6, num_kv_heads=groups, head_dim=10, qk_rope_head_dim=rope,
        rope_at="first", causal=True, qkv_bias=bias, out_bias=bias,
    )  # fmt: skip
    state = theirs.state_dict()
    if old:  # per KV head: its queries, its key, its value
        for kind in ("weight", "bias") if bias else ("weight",):
            q, k, v = state.pop(f"qkv.{kind}").split((60, groups * 10, groups * 10))
            parts = [t.unflatten(0, (groups, -1)) for t in (q, k, v)]
            state[f"attn.{kind}"] = torch.cat(parts, 1).flatten(0, 1)
    ours = Attention(shape).double()
    ours.load_state_dict(from_litgpt(state, shape))
    x = torch.randn(2, 7, 22, generator=seeded(1), dtype=torch.float64)
    close(ours(x), theirs(x))
    back = to_litgpt(ours.state_dict(), shape, state)
    for name, t in state.items():
        assert torch.equal(back[name], t), name


def test_parts_go_to_a_layer_and_back():
    """Queries, keys and values apart, from a layer that has them as one."""
    shape = Shape(dim=12, depth=1, num_heads=4, num_kv_heads=2, head_dim=5, v_head_dim=7,
                  qkv_bias=True, qk_norm="head")  # fmt: skip
    state, layout = filled(Attention(shape)).state_dict(), layout_of(shape)
    like = {
        "q": torch.zeros(20, 12), "k": torch.zeros(10, 12), "v": torch.zeros(14, 12),
        "o": torch.zeros(12, 28), "q_bias": torch.zeros(20), "k_bias": torch.zeros(10),
        "v_bias": torch.zeros(14), "q_norm": torch.zeros(5), "k_norm": torch.zeros(5),
    }  # fmt: skip
    parts = from_attention(state, layout, shape, like)
    assert {name: t.shape for name, t in parts.items()} == {n: t.shape for n, t in like.items()}
    again = to_attention(parts, layout, shape)
    for name, t in state.items():
        assert torch.equal(again[name], t), name
    with pytest.raises(UsageError, match="the layer has no q_a"):
        from_attention(state, layout, shape, like | {"q_a": torch.zeros(1)})
