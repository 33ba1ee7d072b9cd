"""Bridges to other packages: each imports the one it serves when it is used, and nothing else
imports them."""
