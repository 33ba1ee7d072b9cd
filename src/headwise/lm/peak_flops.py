"""What a GPU can do at most: the denominator of the model FLOPs utilisation (MFU)."""

from __future__ import annotations

# Makers' figures by what is in a card's name: operations per second, bf16 without sparsity.
PEAKS = {
    "B200": 2250e12,
    "H200": 989.5e12,
    "GH200": 989.5e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.5e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX A6000": 154.8e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
}


def peak_flops(name: str, precision: str) -> float | None:
    """Operations per second of a card with bf16 operands, if known; the longest name that fits
    counts.

    >>> peak_flops("NVIDIA H100 PCIe", "bf16")
    756000000000000.0
    """
    if precision != "bf16":
        return None
    fitting = [card for card in PEAKS if card in name]
    return PEAKS[max(fitting, key=len)] if fitting else None
