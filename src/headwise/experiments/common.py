"""What the experiments share: published values, recipes, tasks and shapes, tuning, and a point's
errors over its seeds."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, ClassVar, TypeVar

from headwise.errors import UsageError, nearest
from headwise.lm.spec import Pretraining
from headwise.rows import Row, Work
from headwise.seeds import derive
from headwise.shape import Shape
from headwise.stats import Mean, difference, mean
from headwise.tasks import Farthest, Images, ListOps, Recall, Sentences, Task, Text
from headwise.training.run import Recipe, Run

CHOICES = ("farthest", "recall", "text", "images", "listops", "sentences")
SOURCED = ("text", "images", "sentences")  # those that take data from a source
PROBED = ("kappa", "kappa_centred", "stable_rank", "effective_rank")
R = TypeVar("R", Run, Pretraining)
SEEDS_MAY = (
    "seed",
    "held_out",
    "evals",
)  # differ in rows of one point, whose count of judged sequences has another name
ONE_MODEL = [
    f.name
    for kind in (Shape, Recipe, Pretraining)
    for f in dataclasses.fields(kind)
    if f.name not in SEEDS_MAY
]
COLLAPSED = 2e-3  # a run this close to the zero predictor's error has learned to answer nothing


@dataclass(frozen=True, kw_only=True)
class Training:
    """What every training experiment holds; a setting named like one of a recipe's goes into it."""

    ffn_dim: int
    seeds: int
    steps: int
    batch: int
    warmup: float
    schedule: str
    protocols: tuple[str, ...]
    init: str = "published"
    precision: str = "fp32"
    epoch: int = 100
    held_out: int = 12_800
    evals: int = 10


@dataclass(frozen=True, kw_only=True)
class OverTasks(Training):
    """What experiments over several tasks hold beside; every shape is tuned over the same rates."""

    tasks: tuple[str, ...]
    dim: int
    lrs: tuple[float, ...]
    further: int = 0  # rates that a shape may try beyond them, where its best is the last to a side
    beta2: float
    weight_decay: float
    points: int  # of the farthest-neighbour task
    pairs: int  # of recall
    length: int  # of text, ListOps and sentences
    source: str = ""  # data of text, images or sentences

    def idle(self) -> dict[str, str]:
        """Settings that would have no effect, and why."""
        of = {
            "points": ("farthest",),
            "pairs": ("recall",),
            "length": ("text", "listops", "sentences"),
        }
        return unused(of, self.tasks, "tasks")

    def __post_init__(self) -> None:
        check_lists(self, (), ("tasks", "lrs"))
        check_fresh(self)
        for task in self.tasks:
            if task not in CHOICES:
                raise UsageError(f"unknown task {task!r}; {nearest(task, CHOICES)}")
        if self.source and not set(self.tasks) <= set(SOURCED):
            raise UsageError(
                f"source goes with the tasks {', '.join(SOURCED)}, got {', '.join(self.tasks)}"
            )


def unused(of: Mapping[str, Sequence[str]], chosen: tuple[str, ...], name: str) -> dict[str, str]:
    """Which settings go with nothing of what is chosen, and why."""
    told = f"{name} is {', '.join(chosen)}"
    return {
        key: f"it goes with {' and '.join(some)}, {told}"
        for key, some in of.items()
        if not {*some} & {*chosen}
    }


@dataclass(frozen=True)
class Computed:
    """A value whose row is computed, not trained; a subclass names its experiment and adds the
    fields."""

    work: ClassVar[Work] = "compute"
    experiment: ClassVar[str]

    def spec(self) -> dict[str, Any]:
        """It as plain values."""
        return {"experiment": self.experiment, **dataclasses.asdict(self)}

    def columns(self) -> dict[str, Any]:
        """The same as the columns of its row."""
        return dataclasses.asdict(self)

    @property
    def id(self) -> str:
        return hashlib.sha256(json.dumps(self.spec(), sort_keys=True).encode()).hexdigest()[:16]


def published(name: str) -> list[dict[str, str]]:
    """The rows of one of the package's files of published values."""
    text = resources.files("headwise").joinpath(f"experiments/published/{name}.csv").read_text()
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def recipe_of(settings: Any, **changes: Any) -> Recipe:
    """A recipe from the settings of the same names, with changes."""
    names = {f.name for f in dataclasses.fields(Recipe)} & {
        f.name for f in dataclasses.fields(settings)
    }
    return Recipe(**{name: getattr(settings, name) for name in names} | changes)


def check_alike(rows: list[Row], *but: str) -> None:
    """Refuse rows of one point that differ in more than seeds, and what `but` names: files of
    several experiments, given together."""
    task = sorted({key for row in rows for key in row if key == "task" or key.startswith("task_")})
    for key in (*ONE_MODEL, *task):
        found = sorted({str(row[key]) for row in rows if key in row}) if key not in but else []
        if len(found) > 1:
            raise UsageError(
                f"runs of one point may differ in their seeds only, these differ in {key}: "
                f"{', '.join(found)}"
            )


def interval(
    values: list[float], names: tuple[str, str, str] = ("held_out", "low", "high")
) -> dict[str, float | None]:
    """The mean and its interval under three names; nothing of no values."""
    return dict(zip(names, mean(values)[:3] if values else (None, None, None), strict=True))


def errors_of(rows: list[Row]) -> dict[str, Any]:
    """Held-out mean with its interval over seeds, the paper's statistic, and how many runs failed,
    of one point's rows."""
    check_alike(rows)
    good = [r["held_out"] for r in rows if r["status"] == "done"]
    trained = [r["train_best"] for r in rows if r["train_best"] is not None]
    return {
        "n": len(good),
        "diverged": len(rows) - len(good),
        "zero": sum(
            abs(r["held_out"] - r["zero_error"]) < COLLAPSED for r in rows if r["status"] == "done"
        ),
        **interval(good),
        "train_best": min(trained) if trained else None,
    }


def task_of(name: str, s: OverTasks) -> Task:
    """One of the tasks, in the sizes of the settings."""
    match name:
        case "farthest":
            return Farthest(s.dim, s.points)
        case "recall":
            return Recall(s.pairs, 4 * s.pairs, 2 * s.pairs)
        case "text":
            return Text(s.length, s.source)
        case "images":
            return Images(4, s.source)
        case "sentences":
            return Sentences(s.length, s.source, "word")
        case _:
            return ListOps(length=s.length)


def shape_of(task: Task, dim: int, depth: int, heads: int, rank: int, ffn_dim: int) -> Shape:
    """A pre-norm model for a task: a decoder where it is causal or looks tokens up, else an
    encoder."""
    decodes = task.causal or isinstance(task, Recall)
    ends: dict[str, Any] = {"vocab_size": -(-task.vocab // 16) * 16} if task.vocab else {}
    if not task.vocab and task.in_dim != dim:
        ends["input_dim"] = task.in_dim
    if not (task.vocab and decodes):
        ends["output_dim"] = task.answer_dim
    positions: dict[str, Any] = (
        {} if task.squared else {"positions": "additive", "num_positions": task.tokens}
    )
    return Shape(
        dim=dim,
        depth=depth,
        num_heads=heads,
        head_dim=rank,
        ffn_dim=ffn_dim,
        activation="gelu",
        norm="layer",
        norm_at="pre",
        causal=decodes,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        **ends,
        **positions,
    )


def shape_in(row: Row) -> Shape:
    """The shape that a row is about."""
    return Shape.of({name: row[name] for name in Shape.__dataclass_fields__ if name in row})


def name_of(s: Shape) -> str:
    """A decoder's heads in words."""
    if s.latent:
        return f"latent {s.kv_lora_rank}"
    if s.num_kv_heads != s.num_heads:
        return f"{s.num_heads} x {s.head_dim}, {s.num_kv_heads} KV"
    return f"{s.num_heads} x {s.head_dim}" + (
        f" / {s.v_head_dim}" if s.v_head_dim != s.head_dim else ""
    )


def merit(row: Row) -> tuple[float, float]:
    """By which a learning rate is chosen: held-out loss, then the rate, the smaller one where
    losses are equal or all diverged."""
    return (row["held_out"] if row["status"] == "done" else math.inf), row["lr"]


def next_round(first: list[R], rows: list[Row], seeds: int, further: int = 0) -> list[R]:
    """After tuning on seed 0: every shape of every task, from every start, at its best rate,
    `seeds` other seeds; before that, where the best is the smallest or the largest rate that was
    tried, the next one to that side, `further` times at most."""
    found, tried, out = {row["id"]: row for row in rows}, dict[R, list[R]](), list[R]()
    for run in first:
        tried.setdefault(at_rate(run, 1.0), []).append(run)
    for runs in tried.values():
        best, more = min(runs, key=lambda run: merit(found[run.id])), None
        for _ in range(further):
            more = _beyond(best, runs)
            if more is None or more.id not in found:
                break
            runs.append(more)
            best, more = min(runs, key=lambda run: merit(found[run.id])), None
        out += (
            [dataclasses.replace(best, seed=seed) for seed in range(1, seeds + 1)]
            if more is None
            else [more]
        )
    return out


def at_rate(run: R, lr: float) -> R:
    """The same run at another rate."""
    if isinstance(run, Run):
        return dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, lr=lr))
    return dataclasses.replace(run, lr=lr)


def _beyond(best: R, runs: list[R]) -> R | None:
    """The run at the next rate to the side at which the best one is the last, in the same steps."""
    rates = sorted(_rate(run) for run in runs)
    if len(rates) < 2 or rates[0] <= 0 or rates[0] < _rate(best) < rates[-1]:
        return None
    low = _rate(best) == rates[0]
    return at_rate(
        best, float(f"{rates[0] ** 2 / rates[1] if low else rates[-1] ** 2 / rates[-2]:.6g}")
    )


def _rate(run: Run | Pretraining) -> float:
    return run.recipe.lr if isinstance(run, Run) else run.lr


def counted(rows: list[Row]) -> list[Row]:
    """One shape's rows at its tuned rate: of the seeds it was not tuned on, or of that one where
    there are no others."""
    tuning = [r for r in rows if r["seed"] == 0]
    rate = min(tuning, key=merit)["lr"] if tuning else None
    return [r for r in rows if r["seed"] > 0 and r["lr"] == rate] or [
        r for r in tuning if r["lr"] == rate
    ]


def measured(rows: list[Row]) -> dict[str, Any]:
    """A tuned shape's rate, and its held-out loss over the rows that are `counted`."""
    good = sorted((r for r in rows if r["status"] == "done"), key=lambda r: r["seed"])
    right = [r["held_out_accuracy"] for r in good if r.get("held_out_accuracy") is not None]
    return {
        "lr": rows[0]["lr"] if rows else None,
        "n": len(good),
        "diverged": len(rows) - len(good),
        "values": [r["held_out"] for r in good],
        "seeds": [r["seed"] for r in good],
        **interval([r["held_out"] for r in good]),
        "accuracy": mean(right).mean if right else None,
    }


def tuned(rows: list[Row]) -> dict[str, Any]:
    """One shape's measurement, and whether its best rate is the smallest or the largest of those
    tried; of two, one always is."""
    check_alike(rows, "lr")
    kept, rates = counted(rows), sorted({r["lr"] for r in rows if r["seed"] == 0})
    return {
        **measured(kept),
        "edge": len(rates) > 2 and bool(kept) and kept[0]["lr"] in (rates[0], rates[-1]),
    }


def edges(points: list[dict[str, Any]], what: str) -> list[str]:
    """How many shapes might do better at a rate that was not tried."""
    count = sum(p["edge"] for p in points)
    told = (
        f"the best rate is the smallest or the largest tried in {count} of {len(points)} {what}: "
        "a wider range may change them"
    )
    return [told] if count else []


def logmean(values: list[float | None]) -> float | None:
    """The geometric mean of those that are there and finite."""
    good = [math.log(v) for v in values if v is not None and 0 < v < math.inf]
    return math.exp(math.fsum(good) / len(good)) if good else None


def change(gap: Mean) -> str:
    """A difference with its interval; where that covers zero, none is found."""
    if gap.low is None or gap.high is None:
        return f"{signed(gap.mean)} (one seed)"
    told = f"{signed(gap.mean)} ± {signed((gap.high - gap.low) / 2)[1:]}"
    return f"none found ({told})" if gap.low <= 0 <= gap.high else told


def against(
    rows: list[Row], base: list[Row], key: str = "held_out"
) -> tuple[Mean | None, str | None]:
    """How one tuned shape differs from another, as numbers and in words. Where only the tuning's
    seed is there, by which the rate was chosen, it is set beside the other's on that seed, in words
    alone."""
    ours, theirs = counted(rows), counted(base)
    tuning = all(r["seed"] == 0 for r in ours)
    if tuning:
        theirs = sorted((r for r in base if r["seed"] == 0), key=merit)[:1]
    values = [
        [r[key] for r in some if r["status"] == "done" and r[key] is not None]
        for some in (ours, theirs)
    ]
    if not all(values):
        return None, None
    gap = difference(*values)
    return (None, f"{signed(gap.mean)} (the tuning's seed)") if tuning else (gap, change(gap))


def signed(x: float) -> str:
    """A difference to four places, or to two digits where those would all be zero."""
    return f"{x:+.4f}" if abs(x) >= 0.001 or x == 0 else f"{x:+.1e}"


def trained(run: Run, weights: Mapping[str, Any], count: int) -> tuple[Any, Any, Any]:
    """A run's model with these weights, and inputs and targets to try it on, the same for every run
    of a task."""
    import torch

    from headwise.model.transformer import build

    model = build(run.shape)
    model.load_state_dict(weights)
    return model, *run.task.sample(torch.Generator().manual_seed(derive(0, "probe")), count)


def how_conditioned(run: Run, weights: dict[str, Any]) -> Row:
    """How well conditioned the heads' outputs are before and after training, on eight sequences:
    means over the layers. Of one seed a cell, the first that is counted: cells differ by orders of
    magnitude, seeds do not."""
    if run.seed != 1 or run.recipe.parent:
        return {}
    import torch

    from headwise.model.init import fresh
    from headwise.theory.conditioning import attention_spectra

    first = fresh(
        run.shape,
        run.recipe.init,
        [run.seed],
        lambda seed: torch.Generator().manual_seed(derive(seed, "init")),
    )
    out: Row = {}
    for when, state in (
        ("start", {name: p[0] for name, p in first.named_parameters()}),
        ("end", weights),
    ):
        model, inputs, _ = trained(run, state, 8)
        average = attention_spectra(model, inputs)[-1]
        values = {name: float(average[name]) for name in PROBED}
        out |= {
            f"{name}_{when}": value if math.isfinite(value) else None
            for name, value in values.items()
        }
    return out


def check_lists(settings: Any, numbers: tuple[str, ...], words: tuple[str, ...] = ()) -> None:
    """Refuse empty lists, repeated entries, and numbers below 1."""
    for name in (*numbers, *words):
        values = getattr(settings, name)
        if not values:
            raise UsageError(f"{name} must not be empty")
        if len(set(values)) < len(values):
            raise UsageError(
                f"{name} must differ from each other, got {', '.join(map(str, values))}"
            )
    for name in numbers:
        bad = [v for v in getattr(settings, name) if v < 1]
        if bad:
            raise UsageError(f"{name} must be at least 1, got {bad[0]}")
    if settings.seeds < 1:
        raise UsageError(f"seeds must be at least 1, got {settings.seeds}")
    if isinstance(settings, Training) and settings.schedule == "constant" and settings.warmup:
        raise UsageError(
            f"schedule constant has no warm-up: warmup must be 0, got {settings.warmup:g}"
        )


def check_fresh(settings: Training) -> None:
    """Refuse protocols that an experiment does not have: some draw fresh data at every step,
    always."""
    if settings.protocols != ("stream",):
        raise UsageError(
            "protocols must be stream here: every step has fresh data, got "
            f"{', '.join(settings.protocols) or 'none'}"
        )


def plural(n: int, word: str) -> str:
    """A number of things.

    >>> plural(1, "layer"), plural(3, "head")
    ('1 layer', '3 heads')
    """
    return f"{n} {word}" + "s" * (n != 1)


def whole(
    line: list[dict[str, Any]], places: list[int], along: str = "rank"
) -> list[dict[str, Any]]:
    """A line's points along an axis with gaps at the places it lacks, so that nothing is drawn
    where nothing was run."""
    there = {p[along]: p for p in line}
    gap = {"held_out": None, "low": None, "high": None, "train_best": None, "n": 0}
    return [there.get(place, gap) for place in places]


def beside(
    name: str,
    colour: int,
    shares: list[float],
    line: list[dict[str, Any]],
    theirs: Sequence[tuple[float, float]],
) -> list[Any]:
    """Held-out errors, the paper's statistic of the same runs, and what was published, as lines of
    one colour."""
    ours = {
        "label": f"the paper's statistic, {name}",
        "colour": colour,
        "style": "dots",
        "x": shares,
        "y": [p["train_best"] for p in line],
    }
    there = {"x": [x for x, _ in theirs], "y": [y for _, y in theirs]}
    published = (
        [{"label": f"published, {name}", "colour": colour, "style": "dashed", **there}]
        if theirs
        else []
    )
    return [solid(f"held out, {name}", colour, shares, line), ours, *published]


def solid(label: str, colour: int, xs: list[float], points: list[dict[str, Any]]) -> dict[str, Any]:
    """A line of held-out errors with its band."""
    values = {
        key: [p[of] for p in points]
        for key, of in (("y", "held_out"), ("low", "low"), ("high", "high"))
    }
    return {"label": label, "colour": colour, "style": "solid", "x": xs, **values}
