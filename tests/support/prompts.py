"""The error of a prompt, written out."""

import numpy as np


def loop(outputs: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The error of each query of one model's (batch, tokens, width) outputs, one prompt and one
    pair at a time."""
    batch, points = target.shape[:2]
    out = np.zeros(points)
    for b in range(batch):
        for i in range(points):
            answer, weight = target[b, i]
            out[i] += weight * (outputs[b, 2 * i, 0] - answer) ** 2 / batch
    return out
