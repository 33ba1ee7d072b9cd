"""`headwise plan`: every shape that meets limits; returns what --json prints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli.output import print_prose, print_table, say, width_for
from headwise.errors import UsageError, shown

if TYPE_CHECKING:
    from headwise.planning.result import Plan

MOST_ON_PAGE = 5000  # rows


def plan(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """Shapes of a budget."""
    from headwise.planning.costs import COSTS, MEASURED
    from headwise.planning.limits import limit_of
    from headwise.planning.plan import plan as planned

    given = {name: getattr(args, name) for name in COSTS}
    times = {name: getattr(args, name) for name in MEASURED if getattr(args, name) is not None}
    limits = [limit_of(name, text, kind="time", flag=name) for name, text in times.items()]
    if limits and not args.measure:
        raise UsageError(f"a limit on {limits[0].cost} needs --measure: milliseconds are of here")
    if args.measure:
        _check_columns(args)
    found = planned(
        args.like,
        keep=args.keep,
        context=args.context,
        batch=args.batch,
        dtype=args.dtype,
        tolerance=args.tolerance,
        multiple=args.multiple,
        sort=args.sort,
        pareto=args.pareto,
        columns=args.columns,
        fields=_fields(args.changes),
        **given,
    )
    if args.only_pareto:
        found = found.only_pareto()
    if args.backends:
        from headwise.planning.backends import with_backends

        found = with_backends(found, args.rows, args.device)
    if args.measure:
        from headwise.planning.measure import with_times

        found = with_times(
            found,
            rows=args.rows,
            seconds=args.measure_seconds,
            device=args.device,
            limits=limits,
        )
    _print(found, args)
    return _answer(found, args) | _files(found, args, words)


def _check_columns(args: argparse.Namespace) -> None:
    """Refuse what --measure cannot do before anything is measured."""
    if args.measure_seconds <= 0:
        raise UsageError(f"--measure-seconds must be above 0, got {args.measure_seconds:g}")


def _fields(changes: Sequence[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals or not text:
            raise UsageError(f"--set takes field=choices, got {shown(change)}")
        if name in fields:
            raise UsageError(f"{name} is set twice: {shown(fields[name])} and {shown(text)}")
        fields[name] = text
    return fields


def _print(found: Plan, args: argparse.Namespace) -> None:
    width = width_for(args.wide)
    lines = found.summary()
    for line in lines:
        print_prose(line, width, 2)
    if found.like is not None:
        from headwise.planning.costs import COSTS
        from headwise.planning.units import written

        costs = ", ".join(
            f"{COSTS[name].heading} {written(value, COSTS[name].kind)}"
            for name, value in found.like_costs.items()
        )
        print_prose(f"like: {costs}", width, 2)
    if not len(found):
        return
    cells = found.cells(rows=args.rows)
    names = found.column_names()
    main = [
        names.index(name)
        for name in ("number", *names[1:7], *(limit.cost for limit in found.limits))
        if name in names
    ]
    print_table(cells, width, list(dict.fromkeys(main)))
    if len(found) > args.rows:
        print_prose(f"{len(found) - args.rows:,} more rows: --rows {len(found)} or --csv", width)


def _answer(found: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """What --json prints: costs are exact."""
    import dataclasses

    return {
        "considered": found.considered,
        "removed": [{"limit": text, "candidates": count} for text, count in found.removed],
        "meeting": len(found.found),
        "listed": len(found),
        **dataclasses.asdict(found.at),
        "limits": [dataclasses.asdict(limit) for limit in found.limits],
        "pareto": list(found.pareto_costs),
        "sorted_by": found.sorted_by,
        **({"like": dict(found.like_costs)} if found.like is not None else {}),
        "relax": [
            {
                "limit": one.limit and one.limit.cost,
                "outside": one.outside,
                "costs": one.costs,
            }
            for one in found.relax
        ],
        "notes": list(found.notes),
        "rows": [row.values() for row in found.rows[: args.rows]],
        **({} if len(found) else {"failed": "no shape meets the limits"}),
    }


def _files(found: Plan, args: argparse.Namespace, words: Sequence[str]) -> dict[str, str]:
    """Write what was asked for; the shape of a row first, which may be refused."""
    from headwise.files import write_whole

    written = {}
    if args.write:
        from headwise.planning.exports import write_settings

        if not len(found):
            raise UsageError("there is no row to write: no shape meets the limits")
        row = found.row(args.row)
        refused = write_settings(row.shape, args.write, args.context)
        for name, why in refused.items():
            say(f"headwise: no {name}: {why}")
        print(f"settings of row {args.row}: {args.write}")
        written["settings"] = args.write
    if args.csv:
        write_whole(Path(args.csv), found.to_csv())
        print(f"csv: {args.csv}")
        written["csv"] = args.csv
    if args.page:
        from headwise.show.plan_page import write_plan_page

        rows = found.to_dicts(MOST_ON_PAGE)
        write_plan_page(Path(args.page), _page_values(found, rows, words))
        print(f"page: {args.page}")
        written["page"] = args.page
    return written


def _page_values(found: Plan, rows: list[dict[str, Any]], words: Sequence[str]) -> dict[str, Any]:
    """What the page shows, as plain values."""
    import shlex

    from headwise.planning.costs import COSTS
    from headwise.planning.result import HEADINGS

    names = list(dict.fromkeys(name for row in rows for name in row))
    same = {
        name: rows[0][name]
        for name in names
        if name not in COSTS and len(rows) > 1 and len({str(row.get(name)) for row in rows}) == 1
    }
    columns = [
        {
            "name": name,
            "heading": HEADINGS.get(name, name),
            "kind": COSTS[name].kind if name in COSTS else "",
            "about": COSTS[name].about if name in COSTS else "",
        }
        for name in names
        if (name in HEADINGS or name in found.space.choices) and name not in same
    ]
    first = [name for name in found.pareto_costs if name in names]
    return {
        "command": shlex.join(["headwise", *words]),
        "lines": found.summary(),
        "columns": columns,
        "rows": [[_plain(row.get(column["name"])) for column in columns] for row in rows],
        "axes": (first + [c for c in COSTS if c in names and c not in first])[:2],
        "same": ", ".join(f"{HEADINGS.get(n, n)} {_plain(v)}" for n, v in same.items()),
        "total": len(found),
        "like": dict(found.like_costs),
    }


def _plain(value: Any) -> Any:
    return "/".join(map(str, value)) if isinstance(value, tuple) else value
