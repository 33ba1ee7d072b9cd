"""A model without attention: the tokens are mixed by one matrix per layer."""

from dataclasses import dataclass

from torch import nn

import headwise


@dataclass(frozen=True)
class Mixer(headwise.Model):
    """As wide and deep as the shape says; its heads are of no account."""

    def build(self, shape, task):
        blocks = [Block(shape, task.tokens) for _ in range(shape.depth)]
        enter, leave = nn.Linear(task.in_dim, shape.dim), nn.Linear(shape.dim, task.answer_dim)
        return nn.Sequential(enter, *blocks, nn.LayerNorm(shape.dim), leave)


class Block(nn.Module):
    def __init__(self, shape, tokens):
        super().__init__()
        self.mix = nn.Linear(tokens, tokens)
        wide, narrow = nn.Linear(shape.dim, shape.ffn_dim), nn.Linear(shape.ffn_dim, shape.dim)
        self.feed = nn.Sequential(nn.LayerNorm(shape.dim), wide, nn.GELU(), narrow)

    def forward(self, x):
        x = x + self.mix(x.mT).mT
        return x + self.feed(x)
