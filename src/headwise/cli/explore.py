"""`headwise explore`: one page on which a shape is moved by sliders; returns what --json prints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from headwise.cli.output import print_prose, width_for


def explore(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """Write the explorer."""
    from headwise.cli.shapes import shape_of
    from headwise.explorer import explore as written

    start = None
    if args.config or args.changes or args.part is not None:
        start = shape_of(args.changes, args.config, args.part)
    page = written(
        start,
        rows=args.rows,
        store=args.store,
        output=args.output,
        context=args.context,
        batch=args.batch,
        dtype=args.dtype,
        name=args.config or "",
    )
    print_prose(f"explorer: {page} (open it in a browser; it needs no network)", width_for(False))
    return {"page": str(page)}
