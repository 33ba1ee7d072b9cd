"""The colours of figures: what a number means, and the same colour on a dark page.

A colour means one thing through a page. So lines that mean something else than those of the figure
above, as layers do beside budgets, take their numbers from another part of the list. Standard
library only.
"""

from __future__ import annotations

import colorsys

COLOURS = (
    *("#3b6fb6", "#c8701a", "#2f8a54", "#a4509b", "#8a6d3b", "#c0392b", "#1f8585", "#6c5ce0"),
    *("#1d3557", "#b5176e", "#5f6f00", "#5b3a1e", "#0b7285", "#862e9c"),  # from SECOND
    *("#3b0f70", "#5c167f", "#7e2482", "#a3307e", "#c83e73", "#e2505e", "#e8604c"),  # from ORDERED
)
SECOND = 8  # where the second thing that a page tells apart begins
ORDERED = 14  # where colours from dark to light begin, for values that have an order
GREY = "#6b727d"
FRAME = "#d6006c"  # around the best cells of a heat panel
GROUND, DARK_GROUND = "#ffffff", "#14181f"
GRID, DARK_GRID = "#e6e9ed", "#323a46"
INK, DARK_INK = "#1d2430", "#e7eaef"
READABLE = 4.5  # contrast of text, and of every colour on a dark page


def colour_of(number: int) -> str:
    """A colour by its number, counted around.

    >>> colour_of(0) == colour_of(len(COLOURS))
    True
    """
    return COLOURS[number % len(COLOURS)]


def channels(colour: str) -> tuple[float, float, float]:
    """Red, green and blue from 0 to 1."""
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))  # type: ignore[return-value]


def contrast(one: str, other: str) -> float:
    """The contrast of two colours as WCAG 2 defines it, from 1 to 21.

    >>> round(contrast("#000000", "#ffffff"), 1)
    21.0
    """
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def on_dark(colour: str) -> str:
    """The colour with the same hue that can be read on the dark ground: as much lighter as that
    takes, so that what is lighter on white stays lighter."""
    hue, lightness, saturation = colorsys.rgb_to_hls(*channels(colour))
    for step in range(101):
        lighter = 0.35 * lightness + 0.45 + step / 100
        made = colorsys.hls_to_rgb(hue, min(1.0, lighter), saturation)
        found = "#" + "".join(f"{round(255 * c):02x}" for c in made)
        if contrast(found, DARK_GROUND) >= READABLE:
            return found
    return DARK_INK


def dark_colours() -> dict[str, str]:
    """Every colour of a figure on a light page, and what stands for it on a dark one."""
    same = {colour: on_dark(colour) for colour in (*COLOURS, GREY, FRAME)}
    return same | {GROUND: DARK_GROUND, GRID: DARK_GRID, INK: DARK_INK}
