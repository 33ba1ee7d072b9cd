"""`headwise check`: does a task or a model of one's own keep its contract?"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

from headwise.cli.output import print_prose, width_for
from headwise.errors import Finding

SIGNS = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}
WIDEST = {"task": 9, "model": 10}  # letters of the longest rule
SIZES = {"dim": 16, "depth": 2, "heads": 2, "rank": 8, "ffn_dim": 32}  # models are built for


def check(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """One line per rule of the task and the model that a file holds."""
    from headwise.experiments.shapes import shape_for
    from headwise.model.check import check_model
    from headwise.tasks import Farthest
    from headwise.tasks.check import check as check_task
    from headwise.tasks.own import load_task, load_task_and_model

    task, model = load_task_and_model(args.file)
    answer: dict[str, Any] = {"failed": 0}
    if task is not None:
        print(f"{task.spec()['name']}:")
        answer["task"] = _told(
            answer, check_task(task, args.file, found_one=functools.partial(_tell, WIDEST["task"]))
        )
    if model is not None:
        on = load_task(args.task) if args.task else task or Farthest(dim=16, points=5)
        shape = shape_for(on, **SIZES)
        print(f"{model.spec()['name']} on {on.spec()['name']}:")
        found = check_model(model, shape, on)
        for finding in found:
            _tell(WIDEST["model"], finding)
        answer["model"] = _told(answer, found)
    return answer


def _tell(width: int, finding: Finding) -> None:
    """Print a finding as soon as it is there, since a slow task may take a while to the next."""
    line = f"  {SIGNS[finding.level]}  {finding.rule.ljust(width)}  {finding.text}"
    print_prose(line, width_for(False), width + 9)
    sys.stdout.flush()


def _told(answer: dict[str, Any], found: Sequence[Finding]) -> list[dict[str, str]]:
    """The findings as plain values; those that are wrong are counted."""
    answer["failed"] += sum(finding.level == "wrong" for finding in found)
    return [dataclasses.asdict(finding) for finding in found]
