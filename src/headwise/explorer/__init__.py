"""The explorer: one page on which a shape is moved by sliders, with its exact costs, its neighbours
at equal budget and its place on a measured map."""

from headwise.explorer.explore import explore

__all__ = ["explore"]
