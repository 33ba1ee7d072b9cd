"""`Plan`: the shapes that meet the limits, as a value with rows, a table, CSV and pandas."""

from __future__ import annotations

import csv
import dataclasses
import html
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from headwise.errors import UsageError, nearest, shown
from headwise.planning.costs import COSTS, MEASURED, At
from headwise.planning.limits import Limit
from headwise.planning.search import Found, Nearest
from headwise.planning.space import Space, said
from headwise.planning.units import written
from headwise.shape import Shape

if TYPE_CHECKING:
    from headwise.planning.backends import Backend
    from headwise.planning.measure import Measured

SIZES = (
    *("dim", "depth", "num_heads", "num_kv_heads", "head_dim", "v_head_dim"),
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"),
)
HEADINGS = {
    "number": "#",
    "pareto": "Pareto",
    "dim": "dim",
    "depth": "layers",
    "num_heads": "heads",
    "num_kv_heads": "KV heads",
    "head_dim": "rank",
    "v_head_dim": "value",
    "kv_lora_rank": "latent",
    "q_lora_rank": "query latent",
    "qk_rope_head_dim": "rotary",
    "ffn_dim": "feed-forward",
    "expert_ffn_dim": "expert width",
    "backend": "backend",
    "waste": "padded",
    "train_ms": "train ms",
    "decode_ms": "decode ms",
} | {cost.name: cost.heading for cost in COSTS.values()}
SHOWN = 20  # rows of a table unless asked for more


@dataclass(frozen=True, kw_only=True)
class Row:
    """One shape of a plan: its costs, whether it is on the Pareto front, and how each cost differs
    from the model of --like, as a share."""

    number: int  # counted from 1 in the order of the plan
    shape: Shape
    costs: Mapping[str, float]
    pareto: bool
    change: Mapping[str, float] = field(default_factory=dict)
    backend: Backend | None = None
    measured: Measured | None = None

    def values(self) -> dict[str, Any]:
        """All of it as plain values, as --json has it."""
        found: dict[str, Any] = {"number": self.number, "pareto": self.pareto, **self.costs}
        if self.change:
            found["change"] = dict(self.change)
        for part in (self.backend, self.measured):
            if part is not None:
                found |= dataclasses.asdict(part)
        return found | {"shape": self.shape.spec()}


class Rows(Sequence[Row]):
    """The rows of a plan; each is made when it is looked at."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __len__(self) -> int:
        return len(self._plan.order)

    @overload
    def __getitem__(self, i: int) -> Row: ...
    @overload
    def __getitem__(self, i: slice) -> list[Row]: ...
    def __getitem__(self, i: int | slice) -> Row | list[Row]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(f"a plan of {len(self)} rows has no row {i}")
        return self._plan.row(i % len(self) + 1)

    def __iter__(self) -> Iterator[Row]:
        return (self._plan.row(i + 1) for i in range(len(self)))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every shape of a space that meets all limits, with exact costs.

    `rows` has them in order. `removed` says how many candidates each limit removed, in order, of
    `considered`. Where none is left `relax` names the candidates that come nearest.
    """

    space: Space
    at: At
    limits: tuple[Limit, ...]
    found: Found = field(repr=False)
    order: np.ndarray = field(repr=False)  # places in `found`, in the order of the rows
    marks: np.ndarray = field(repr=False)  # of the Pareto front, by place in `found`
    pareto_costs: tuple[str, ...]
    sorted_by: str
    columns: tuple[str, ...]
    relax: tuple[Nearest, ...] = ()
    like_costs: Mapping[str, float] = field(default_factory=dict)
    backends: Mapping[int, Backend] = field(default_factory=dict, repr=False)  # by place
    times: Mapping[int, Measured] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()

    # ---- rows

    @property
    def rows(self) -> Rows:
        """The shapes in order, as `Row`."""
        return Rows(self)

    @property
    def considered(self) -> int:
        """How many candidates there were."""
        return self.found.considered

    @property
    def removed(self) -> tuple[tuple[str, int], ...]:
        """Each limit in words, in order, with the number of candidates that it removed."""
        return self.found.removed

    @property
    def like(self) -> Shape | None:
        """The model that the plan starts from."""
        return self.space.like

    def __len__(self) -> int:
        return len(self.order)

    def row(self, number: int) -> Row:
        """A row by its number, counted from 1."""
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= len(self):
            raise UsageError(f"row must be from 1 to {len(self)}, got {shown(number)}")
        place = int(self.order[number - 1])
        costs = self._costs(place)
        return Row(
            number=number,
            shape=Shape.of(self.found.fields(place, self.space.solved)),
            costs=costs,
            pareto=bool(self.marks[place]),
            change=_change(costs, self.like_costs),
            backend=self.backends.get(place),
            measured=self.times.get(place),
        )

    def _costs(self, place: int) -> dict[str, float]:
        return {
            name: COSTS[name].value(column[place], self.at)
            for name, column in self.found.totals.items()
            if column[place] >= 0
        }

    def only_pareto(self) -> Plan:
        """The same without the rows that another row beats."""
        return dataclasses.replace(self, order=self.order[self.marks[self.order]])

    def where(self, **values: Any) -> Plan:
        """The rows whose fields have these values, such as `plan.where(head_dim=128)`."""
        from headwise.planning.fields import choices_of

        kept = np.ones(len(self.order), bool)
        for name, given in values.items():
            if name not in (*SIZES, self.space.solved):
                known = (*SIZES, self.space.solved)
                raise UsageError(f"unknown column {name!r}; {nearest(name, known)}")
            kept &= np.isin(self.column(name), choices_of(name, given))
        return dataclasses.replace(self, order=self.order[kept])

    def column(self, name: str) -> np.ndarray:
        """One size or cost of every row, in order; a cost as its exact total."""
        if name in self.found.totals:
            return self.found.totals[name][self.order]
        sizes = self.found.sizes["ffn" if name == self.space.solved else name]
        return sizes[self.order]

    # ---- in words

    def summary(self) -> list[str]:
        """What was considered, and what each limit removed."""
        lines = [f"space: {said(self.space)}"]
        at = f"context {self.at.context:,}, batch {self.at.batch}, {self.at.dtype}"
        lines.append(f"costs at {at}; --set changes the space, --set vocab_size=N its vocabulary")
        lines.append(f"{self.considered:,} candidates")
        lines += [f"  {count:,} removed by {limit}" for limit, count in self.removed]
        kept = (
            f"{len(self.found):,} meet the limits" if self.limits else f"{len(self.found):,} left"
        )
        if len(self) < len(self.found) and not self.times:
            kept += f", {len(self):,} of them chosen"
        if len(self):
            kept += f", sorted by {self.sorted_by}; Pareto: {', '.join(self.pareto_costs)}"
        lines.append(kept)
        if self.like is not None and self.like.extras:
            names = ", ".join(name for name, _ in self.like.extras)
            lines.append(f"parameters beside the stack stay those of the model: {names}")
        return [*lines, *self.advice(), *self.notes]

    def advice(self) -> list[str]:
        """Which limit to relax where no shape is left."""
        lines = []
        for one in self.relax[:4]:
            shape = _short(one.fields, self.space.solved)
            if one.limit is None:
                costs = ", ".join(
                    f"{name} {written(value, COSTS[name].kind)}"
                    for name, value in one.costs.items()
                )
                lines.append(
                    f"no single limit can be relaxed; the nearest shape misses them together by "
                    f"{one.outside:.2%}: {shape} with {costs}"
                )
                continue
            name = one.limit.cost
            value = written(one.costs[name], COSTS[name].kind)
            lines.append(
                f"relax {one.limit} by {one.outside:.2%}, to {value} ({one.costs[name]:,}): {shape}"
            )
        return lines

    def table(self, columns: Iterable[str] | None = None, rows: int | None = SHOWN) -> str:
        """The first rows as text, all of them with `rows=None`."""
        lines = self.cells(columns, rows)
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        texts = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
        return "\n".join(text.rstrip() for text in texts)

    def cells(
        self, columns: Iterable[str] | None = None, rows: int | None = SHOWN
    ) -> list[list[str]]:
        """Headings and rows of the table, as text."""
        names = self.column_names(columns)
        lines = [[HEADINGS[name] for name in names]]
        last = len(self) if rows is None else min(rows, len(self))
        lines += [[_cell(row, name) for name in names] for row in self.rows[:last]]
        return lines

    def column_names(self, columns: Iterable[str] | None = None) -> tuple[str, ...]:
        """The columns of the table: those asked for, or the default ones."""
        if columns is None:
            measured = [name for name in MEASURED if self.times]
            return (*self.columns, *measured, *(("backend", "waste") if self.backends else ()))
        names = tuple(columns)
        for name in names:
            if name not in HEADINGS:
                raise UsageError(f"unknown column {shown(name)}; {nearest(str(name), HEADINGS)}")
        return names

    # ---- elsewhere

    def to_dicts(self, rows: int | None = None) -> list[dict[str, Any]]:
        """Rows as flat plain values: sizes and exact costs."""
        count = len(self) if rows is None else min(rows, len(self))
        names = (*SIZES, self.space.solved)
        sizes = {name: self.column(name)[:count].tolist() for name in names}
        places = self.order[:count].tolist()
        found = []
        for i, place in enumerate(places):
            family = self.found.families[int(self.found.family[place])]
            varied = {name: family[name] for name in self.space.choices if name in family}
            row = {"number": i + 1, **{name: sizes[name][i] for name in names}, **varied}
            row |= self._costs(place) | {"pareto": bool(self.marks[place])}
            for part in (self.backends.get(place), self.times.get(place)):
                if part is not None:
                    row |= dataclasses.asdict(part)
            found.append(row)
        return found

    def to_pandas(self) -> Any:
        """All rows as a pandas data frame."""
        import pandas

        return pandas.DataFrame(self.to_dicts())

    def to_csv(self) -> str:
        """All rows as CSV."""
        rows, text = self.to_dicts(), io.StringIO()
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(text, names or ["number"], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: _plain(v) for k, v in row.items()})
        return text.getvalue()

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        head, *lines = self.cells()
        cells = "".join(f"<th>{html.escape(text)}</th>" for text in head)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in line)}</tr>"
            for line in lines
        )
        said_first = html.escape("; ".join(line.strip() for line in self.summary()[2:]))
        return f"<p>{said_first}</p><table><tr>{cells}</tr>{body}</table>"


def _change(costs: Mapping[str, float], like: Mapping[str, float]) -> dict[str, float]:
    return {name: costs[name] / like[name] - 1 for name in costs if like.get(name)}


def _cell(row: Row, name: str) -> str:
    """One value as the table has it."""
    if name == "number":
        return str(row.number)
    if name == "pareto":
        return "*" if row.pareto else ""
    if name in COSTS:
        if name not in row.costs:
            return "-"
        text = written(row.costs[name], COSTS[name].kind)
        return f"{text} {_percent(row.change[name])}" if name in row.change else text
    if name in ("backend", "waste"):
        if row.backend is None:
            return "-"
        return row.backend.backend if name == "backend" else f"{row.backend.waste:.0%}"
    if name in MEASURED:
        value = None if row.measured is None else getattr(row.measured, name)
        return "-" if value is None else f"{value:.3g}"
    return str(getattr(row.shape, name))


def _percent(change: float) -> str:
    if not change:
        return "="
    if abs(change) < 0.0005:
        return "~"
    return f"{change:+.0%}" if abs(change) >= 0.0095 else f"{change:+.1%}"


def _short(fields: Mapping[str, Any], solved: str) -> str:
    parts = [f"dim {fields['dim']}", f"{fields['depth']} layers"]
    parts.append(f"{fields['num_heads']} heads of rank {fields['head_dim']}")
    if fields.get("kv_lora_rank"):
        parts.append(f"latent {fields['kv_lora_rank']}")
    else:
        parts.append(f"{fields['num_kv_heads']} KV heads")
    return ", ".join([*parts, f"{solved} {fields[solved]}"])


def _plain(value: Any) -> Any:
    return "/".join(map(str, value)) if isinstance(value, tuple) else value
