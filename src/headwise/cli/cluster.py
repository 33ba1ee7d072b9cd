"""`headwise worker` and `headwise cancel`: groups of runs, by whatever engine. None loads torch
before it trains."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.errors import UsageError


def worker(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.execute.worker import CODES, end_with_parent, work_on

    end_with_parent()
    outcome = work_on(
        Path(args.folder), args.attempt, code=args.code, probe=args.probe, stop=args.stop
    )
    if outcome.cause:
        print(f"headwise: {outcome.state}: {outcome.cause}", file=sys.stderr, flush=True)
    if outcome.state == "refused":
        raise SystemExit(CODES["refused"])
    if outcome.state == "stopped":
        raise SystemExit(CODES["stopped"])
    return {"state": outcome.state, "cause": outcome.cause, "failed": outcome.state != "done"}


def cancel(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.execute.engine import cancel_jobs
    from headwise.execute.live import cancel_groups
    from headwise.store import Store

    store = Store(args.store, create=False)
    unknown = [name for name in args.groups if not (store.path / "groups" / name).is_dir()]
    if unknown:
        raise UsageError(
            f"there is no group {unknown[0]} in {store.path}; headwise list --store {store.path} "
            "--live shows them"
        )
    if args.on == "ray":
        raise UsageError(
            "--on ray would start a Ray, in which nothing runs: give ray:auto or ray://HOST:PORT"
        )
    cancelled = cancel_groups(store, args.groups)
    if args.on and cancelled:
        cancel_jobs(store, cancelled, args.on)
    print(f"{len(cancelled)} groups are asked to save and end")
    return {"cancelled": cancelled}
