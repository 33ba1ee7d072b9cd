"""What a transformer stack is, and what it costs. Standard library only.

A `Shape` is a value. Its names follow Hugging Face; the papers' letters are
d = `dim`, H = `num_heads`, r = `head_dim` (the query/key rank of one head), L = `depth`.
`num_heads * head_dim == dim` is a special case and is never assumed. A `Layer` is what one layer
has that differs.
"""

from headwise.shape.built import beyond_plain, not_built
from headwise.shape.costs import DTYPE_BITS
from headwise.shape.fields import LATER, Shape
from headwise.shape.layers import SIZES as BY_LAYER
from headwise.shape.layers import Layer
from headwise.shape.names import ALIASES, field_of
from headwise.shape.parameters import LAYER_PARTS
from headwise.shape.rules import (
    ACTIVATIONS,
    ATTN_GATES,
    GATED,
    NORM_PLACES,
    NORMS,
    POSITIONS,
    QK_NORMS,
    ROPE_PLACES,
    WIDENING,
)

__all__ = [
    "ACTIVATIONS",
    "ALIASES",
    "ATTN_GATES",
    "BY_LAYER",
    "DTYPE_BITS",
    "GATED",
    "LATER",
    "LAYER_PARTS",
    "NORMS",
    "NORM_PLACES",
    "POSITIONS",
    "QK_NORMS",
    "ROPE_PLACES",
    "WIDENING",
    "Layer",
    "Shape",
    "beyond_plain",
    "field_of",
    "not_built",
]
