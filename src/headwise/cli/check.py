"""`headwise check`: does a task or a model of one's own keep its contract?"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from headwise.cli.output import print_prose, width_for

SIGNS = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}
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
        answer["task"] = _told(answer, task.spec()["name"], check_task(task, args.file))
    if model is not None:
        on = load_task(args.task) if args.task else task or Farthest(dim=16, points=5)
        shape = shape_for(on, **SIZES)
        name = f"{model.spec()['name']} on {on.spec()['name']}"
        answer["model"] = _told(answer, name, check_model(model, shape, on))
    return answer


def _told(answer: dict[str, Any], name: str, found: Sequence[Any]) -> list[dict[str, str]]:
    """Print the findings, and count those that are wrong."""
    width = max(len(finding.rule) for finding in found)
    columns = width_for(False)
    print(f"{name}:")
    for finding in found:
        line = f"  {SIGNS[finding.level]}  {finding.rule.ljust(width)}  {finding.text}"
        print_prose(line, columns, width + 9)
    answer["failed"] += sum(finding.level == "wrong" for finding in found)
    return [dataclasses.asdict(finding) for finding in found]
