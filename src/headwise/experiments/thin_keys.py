"""Thin keys (arXiv 2603.04427): how much query/key rank does selecting among N candidates need, and
how much does comparing whole vectors need?

    headwise run thin_keys                    quick: d = 16, N = 8, 16, 32, about 200 models;
                                              2 idle CPU cores, about 8 minutes
    headwise run thin_keys --preset paper     d = 64, N = 16 to 4,096, about 600 models; one GPU,
                                              about 45 minutes (dev/gpu_queue.py has it in parts)

`lookup` selects: which of N learned keys is this one? `farthest` compares: which of N vectors of
R^d has the smallest product with this one? One head, values as wide as the model, and queries and
keys of every rank. Each point's learning rate is tuned on seed 0 and on a held-out draw of its own,
which are not counted. The number of tokens per step is the same for every N.

Three laws say which rank is enough: log2 N (thin keys), a quarter of d (thin keys), d (the rank
paper). A rank is enough where it loses at most a tenth of what full rank gains over an answer of
zero.

Expected, quick: `lookup` is solved at rank 2, below log2 N, for every N; `farthest` loses more than
a tenth at every rank below d.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwise.errors import UsageError, nearest
from headwise.experiments.base import Experiment
from headwise.experiments.points import Tuned, gap_in_words, groups, plural
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.experiments.settings import Training, check_fresh, check_lists
from headwise.experiments.shapes import shape_for
from headwise.experiments.thin_keys_figure import LAWS, SELECTS, figure
from headwise.experiments.tuning import edge_warning, gap_between, later_runs, next_round, tuned
from headwise.rows import Row
from headwise.shape import Shape
from headwise.stats import Mean, group
from headwise.training.run import Run

if TYPE_CHECKING:
    from typing import Self

    from headwise.model.own import Model
    from headwise.tasks.task import Task

COMPARES = "farthest"
TASKS = (SELECTS, COMPARES)
SHARE = 0.1  # of full rank's gain over an answer of zero, which a rank that is enough may lose


# ---- settings


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """What the sweep varies and what it holds."""

    tasks: tuple[str, ...]
    dim: int
    candidates: tuple[int, ...]
    ranks: tuple[int, ...]  # log2 N and d/4 are added to them
    values: int  # of a key in lookup
    queries: int  # that a sequence of lookup asks at most
    lookup_lrs: tuple[float, ...]  # rates that are tried; the two tasks want other ones
    farthest_lrs: tuple[float, ...]
    further: int = 0

    def __post_init__(self) -> None:
        check_lists(self, ("candidates", "ranks"), ("tasks", "lookup_lrs", "farthest_lrs"))
        check_fresh(self)
        for task in self.tasks:
            if task not in TASKS:
                raise UsageError(f"unknown task {task!r}; {nearest(task, TASKS)}")
        for name, of in (("candidates", self.candidates), ("values", (self.values,))):
            if min(of) < 2:
                raise UsageError(f"{name} must be at least 2, got {min(of)}")
        if self.dim < 4 or max(self.ranks) > self.dim:
            raise UsageError(
                f"ranks must be at most dim, which is at least 4, got rank {max(self.ranks)} and "
                f"dim {self.dim}"
            )

    def idle(self) -> dict[str, str]:
        out = {"init": "every task has its own: lookup normal, farthest published"}
        if SELECTS not in self.tasks:
            reason = f"it goes with {SELECTS}, tasks is {', '.join(self.tasks)}"
            out |= dict.fromkeys(("values", "queries", "lookup_lrs"), reason)
        if COMPARES not in self.tasks:
            out["farthest_lrs"] = f"it goes with {COMPARES}, tasks is {', '.join(self.tasks)}"
        return out

    def with_model(self, model: Model) -> Self:
        """Refused: the rank of queries and keys is what is asked about."""
        raise UsageError(
            "this experiment varies the rank of queries and keys, which a model of one's own sets "
            "for itself"
        )

    def task(self, name: str, candidates: int) -> Task:
        """One of the tasks with N candidates."""
        from headwise.tasks import Farthest, Lookup

        if name == SELECTS:
            return Lookup(candidates, self.values, min(candidates, self.queries))
        return Farthest(self.dim, candidates)

    def shape(self, task: Task, rank: int) -> Shape:
        """One layer with one head: queries and keys of this rank, values as wide as the model.
        Vectors go through the rank paper's encoder, ids through a pre-norm one."""
        if task.vocab:
            whole = shape_for(task, self.dim, 1, 1, self.dim, self.ffn_dim)
        else:
            whole = paper_shape(dim=self.dim, rank=self.dim, ffn_dim=self.ffn_dim)
        return whole.replace(head_dim=rank, v_head_dim=self.dim)

    def ranks_of(self, candidates: int) -> list[int]:
        """The ranks of the sweep, and those that the laws name."""
        return sorted({*self.ranks, *law_ranks(candidates, self.dim).values()})

    def sequences(self, candidates: int) -> int:
        """Per step: `batch` with the fewest candidates, and fewer with more of them, so that a step
        has as many candidates."""
        return max(1, self.batch * min(self.candidates) // candidates)


def law_ranks(candidates: int, dim: int) -> dict[str, int]:
    """The rank that each law calls enough.

    >>> law_ranks(4096, 64)
    {'log2 N': 12, 'd/4': 16, 'd': 64}
    """
    bits = min(dim, math.ceil(math.log2(candidates)))
    return dict(zip(LAWS, (bits, dim // 4, dim), strict=True))


PRESETS = {
    "quick": Settings(
        tasks=TASKS,
        dim=16,
        candidates=(8, 16, 32),
        ranks=(1, 2, 4, 8, 16),
        values=4,
        queries=16,
        lookup_lrs=(0.003, 0.01, 0.03),
        farthest_lrs=(0.03, 0.1, 0.3),
        further=1,
        ffn_dim=64,
        seeds=3,
        steps=1000,
        batch=32,
        warmup=0.3,
        schedule="cosine",
        protocols=("stream",),
        held_out=1024,
        evals=2,
    ),
    "paper": Settings(
        tasks=TASKS,
        dim=64,
        candidates=(16, 64, 256, 1024, 4096),
        ranks=(1, 2, 4, 8, 16, 32, 64),
        values=4,
        queries=512,
        lookup_lrs=(0.001, 0.003, 0.01),
        farthest_lrs=(0.01, 0.03, 0.1),
        further=3,
        ffn_dim=256,
        seeds=4,
        steps=3000,
        batch=1024,
        warmup=0.3,
        schedule="cosine",
        protocols=("stream",),
        held_out=1024,
        evals=5,
    ),
}


# ---- runs in two rounds


def runs(s: Settings) -> list[Run]:
    """The tuning: every rank at every rate, one seed, evaluated on a draw that is not counted."""
    out = []
    for name in s.tasks:
        for candidates in s.candidates:
            task = s.task(name, candidates)
            for rank in s.ranks_of(candidates):
                changes = {
                    "batch": s.sequences(candidates),
                    "protocol": "stream",
                    "init": "normal" if task.vocab else "published",
                    "evaluated_on": "validation",
                }
                shape = s.shape(task, rank)
                rates = s.lookup_lrs if name == SELECTS else s.farthest_lrs
                out += [s.run(shape, task, 0, lr=lr, **changes) for lr in rates]
    return out


def then(s: Settings, rows: list[Row]) -> list[Run]:
    """The measurement: every rank at its best rate, `seeds` other seeds, evaluated on the draw that
    counts."""
    return [
        _counted(run) if run.seed else run for run in next_round(runs(s), rows, s.seeds, s.further)
    ]


def _counted(run: Run) -> Run:
    return dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, evaluated_on=""))


def later(s: Settings) -> tuple[int, int]:
    """How many runs that will be, at least and at most."""
    return later_runs(runs(s), s.seeds, s.further)


# ---- points


@dataclass(frozen=True, kw_only=True)
class Point(Tuned):
    """One task, number of candidates, and rank of queries and keys."""

    task: str
    candidates: int
    rank: int
    dim: int
    params: int
    zero: float  # the error of an answer of zero
    law: str | None = None  # which laws call this rank enough
    cost: Mean | None = None  # what it errs more than full rank
    lost: float | None = None  # the same as a share of what full rank gains over zero
    enough: str | None = None  # yes, no, or open where the seeds cannot say

    @property
    def gain(self) -> float:
        """What it gains over an answer of zero."""
        return 0.0 if self.held_out is None else self.zero - self.held_out

    @property
    def visible(self) -> float | None:
        """About the smallest difference from full rank that the seeds would have shown."""
        if self.cost is None or self.cost.low is None or self.cost.high is None:
            return None
        return (self.cost.high - self.cost.low) / 2

    def cell(self, key: str) -> str:
        """As `Measured.cell`; the cost in words, and a rate that ends the grid marked."""
        if key == "cost":
            return "-" if self.cost is None else gap_in_words(self.cost)
        if key == "lr" and self.edge:
            return f"{super().cell(key)} (edge)"
        return super().cell(key)


def summary(rows: list[Row]) -> list[Point]:
    """One point per task, number of candidates and rank, beside full rank's."""
    counts = [
        {**row, "candidates": row["task_keys" if row["task"] == SELECTS else "task_points"]}
        for row in rows
    ]
    out = []
    for (task, candidates), same in group(counts, "task", "candidates").items():
        by_rank = {rank: of_rank for (rank,), of_rank in group(same, "head_dim").items()}
        dim = same[0]["dim"]
        laws = law_ranks(candidates, dim)
        full = by_rank.get(dim)
        points = [
            Point(
                task=task,
                candidates=candidates,
                rank=rank,
                dim=dim,
                params=of_rank[0]["params"],
                zero=_zero(task, of_rank[0]),
                law=", ".join(law for law in LAWS if laws[law] == rank) or None,
                **tuned(of_rank),
            )
            for rank, of_rank in by_rank.items()
        ]
        out += [_beside(p, by_rank[p.rank], full, points[-1]) for p in points]
    return out


def _zero(task: str, row: Row) -> float:
    return math.log(row["task_values"]) if task == SELECTS else 1.0


def _beside(point: Point, rows: list[Row], full: list[Row] | None, last: Point) -> Point:
    """The point with what it costs against full rank, and whether it is enough."""
    if full is None or last.held_out is None or point.rank == point.dim:
        return point
    cost, _ = gap_between(rows, full)
    if cost is None:
        return point
    gain = last.gain
    if gain < SHARE * last.zero:  # full rank has learned nothing either, so nothing is compared
        return dataclasses.replace(point, cost=cost)
    enough = "open"
    if cost.high is not None and cost.high <= SHARE * gain:
        enough = "yes"
    elif cost.low is not None and cost.low > SHARE * gain:
        enough = "no"
    return dataclasses.replace(point, cost=cost, lost=cost.mean / gain, enough=enough)


def needed(points: Sequence[Point]) -> Point | None:
    """Of one task and number of candidates the smallest rank from which on all are enough; full
    rank is enough by definition. None where it has learned nothing, or is not there."""
    full = next((p for p in points if p.rank == p.dim), None)
    if full is None or full.gain < SHARE * full.zero:
        return None
    found = None
    for point in sorted(points, key=lambda p: -p.rank):
        if point.rank < point.dim and point.enough != "yes":
            break
        found = point
    return found


# ---- words


def headline(points: Sequence[Point]) -> list[str]:
    """For each task and number of candidates: the rank that is enough, and what every law's rank
    costs against full rank."""
    lines = []
    for (task, candidates), same in groups(_measured(points), "task", "candidates").items():
        full = next((p for p in same if p.rank == p.dim), None)
        least = needed(same)
        if full is None:
            continue
        if least is None:
            lines.append(
                f"{task}, N={candidates}: full rank learned nothing ({full.error} where zero "
                f"scores {full.zero:.3g}), so this compares nothing"
            )
            continue
        laws = [p for p in same if p.law and p.rank < p.dim]
        costs = [
            f"rank {p.rank} ({p.law}) costs {p.cell('cost')}, enough: {p.enough or 'open'}"
            for p in laws
            if p.cost
        ]
        lines.append(
            f"{task}, N={candidates}: full rank {full.error} where zero scores {full.zero:.3g}; "
            f"enough from rank {least.rank} on; " + "; ".join(costs)
        )
    known = _measured(points)
    visible = [p.visible for p in known if p.visible is not None and p.enough == "yes"]
    if visible:
        lines.append(
            "the smallest visible difference from full rank, where a rank is enough, is "
            f"{min(visible):.2g} to {max(visible):.2g}; {plural(len(known), 'interval')} of 95 % "
            "each, not corrected for their number"
        )
    return [*lines, *edge_warning(known, "points")]


def answer(points: Sequence[Point]) -> str:
    """The ranks that are enough to select and to compare."""
    said = []
    for (task,), of_task in groups(_measured(points), "task").items():
        found = {n: needed(same) for (n,), same in groups(of_task, "candidates").items()}
        ranks = {n: p.rank for n, p in found.items() if p is not None}
        if not ranks:
            continue
        what = "selecting one of N keys" if task == SELECTS else "comparing whole vectors"
        dim, lengths = of_task[0].dim, ", ".join(map(str, ranks))
        of = ", ".join(map(str, ranks.values()))
        same = len(set(ranks.values())) == 1
        rank = f"rank {next(iter(ranks.values()))}" if same else f"ranks {of}"
        said.append(f"{what} takes {rank} of {dim} at N = {lengths}")
    seeds = sorted({p.n for p in _measured(points)})
    edges = sum(p.edge for p in _measured(points))
    note = f", {edges} at the edge of their rates" if edges else ""
    tail = f" ({plural(seeds[0], 'seed')} per point{note})" if seeds else ""
    return f"{'; '.join(said)}{tail}" if said else ""


def _measured(points: Sequence[Point]) -> list[Point]:
    """Points of seeds that chose no rate."""
    return [p for p in points if p.held_out is not None and not p.tuning]


EXPERIMENT: Experiment[Settings, Point] = Experiment(
    name="thin_keys",
    question="How much query/key rank does selecting among N candidates need?",
    about="error against query/key rank: tasks that select, that compare",
    presets=PRESETS,
    columns=(
        ("task", "task"),
        ("candidates", "N"),
        ("rank", "rank"),
        ("law", "enough by"),
        ("held_out", "held-out error"),
        ("n", "n"),
        ("diverged", "diverged"),
        ("accuracy", "accuracy"),
        ("cost", "against full rank"),
        ("lost", "share of the gain lost"),
        ("enough", "enough"),
        ("lr", "tuned rate"),
        ("params", "parameters"),
    ),
    main_columns=("rank", "held_out", "candidates", "task", "enough", "lr", "cost"),
    runs=runs,
    then=then,
    later=later,
    summary=summary,
    headline=headline,
    answer=answer,
    figure=figure,
    caption=(
        "Error on fresh data that no run has seen, mean over seeds with its 95 % interval, against "
        "the rank of queries and keys; one layer, one head, values as wide as the model. Crosses: "
        "the rank that each law calls enough, on the line of its N. Every point's learning rate is "
        "tuned on a seed and a held-out draw that are not counted. Models of lower rank have fewer "
        "parameters."
    ),
    meanings={
        "tasks": "lookup (selects one of N learned keys), farthest (compares N vectors)",
        "candidates": "numbers of keys or points, N",
        "ranks": "of queries and keys; log2 N, d/4 and d are added",
        "values": "values that a key of lookup may have",
        "queries": "keys that a sequence of lookup asks for, at most",
        "lookup_lrs": "learning rates that are tried on seed 0 of lookup",
        "farthest_lrs": "the same of farthest",
        "batch": "sequences per step with the fewest candidates; fewer with more",
        "init": "every task has its own",
    },
)
