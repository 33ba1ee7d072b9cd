"""Figures and pages from what experiments describe."""
