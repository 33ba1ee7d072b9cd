"""Token ids that tasks over bytes have in common, so that a model trained on one can continue on
another: bytes are themselves, then come a blank behind what is shorter, a mask over what is to be
found, and a separator between two sentences."""

from __future__ import annotations

BYTES = 256
BLANK, MASK, SEPARATOR = BYTES, BYTES + 1, BYTES + 2
BYTE_IDS = BYTES + 3
