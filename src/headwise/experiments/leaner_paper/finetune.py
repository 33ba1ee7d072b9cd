"""Does the number of heads that is best in pre-training stay best after fine-tuning?

    headwise run finetune
    headwise run finetune --preset paper --set text=book.txt source=SST-2

quick: width 32, 1 to 8 heads; 2 CPU cores, about 3 minutes. paper: width 64, 1 to 16 heads; one
GPU, minutes.

One width is cut into several numbers of heads, all models with the same parameters. Each is
pre-trained to find masked bytes of a text and then fine-tuned to classify sentences, seed by seed;
beside it the same model learns the sentences from scratch, in as many steps. Positions are rotary,
so that no parameter depends on the length; a head of rank r turns by r/2 angles. Without `text` and
`source` both are generated, of one small language. Learning rates are the preset's, not tuned per
cut: `lr` (pre-training), `tune_lr` and `scratch_lr` change them; quick's were the best of three or
four tried with 1, 2 and 8 heads, paper's have not been tried.

Expected of quick, 3 seeds: 4 heads of rank 8 are best after fine-tuning (before, not told apart
from 2 of 16), 1 and 8 heads worst; the former reach a loss of 0.17 and 94 % of the sentences, 0.57
and 68 % from scratch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.errors import UsageError
from headwise.experiments.base import Experiment, Note
from headwise.experiments.best import best_in_words, ranking
from headwise.experiments.figure_parts import error_line
from headwise.experiments.points import (
    Measured,
    check_one_model,
    gap_in_words,
    groups,
    interval,
)
from headwise.experiments.settings import Training, check_fresh, check_lists
from headwise.experiments.shapes import shape_for
from headwise.experiments.tuning import losses_of
from headwise.rows import Row
from headwise.shape import Shape
from headwise.show.figure import Line, LineFigure, LinePanel
from headwise.stats import difference, group, rank_correlation
from headwise.training.run import AFTER, Recipe, Run

if TYPE_CHECKING:
    from typing import Self

    from headwise.model.own import Model
    from headwise.tasks import Sentences
    from headwise.tasks.task import Task

PRETRAINED, SCRATCH = "pre-trained", "from scratch"
STOPS_EARLY = "quick stops early: it shows how such models start, not where they end"


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(Training):
    """The width and its cuts, and both trainings; `steps` and `lr` are those of pre-training."""

    dim: int
    depth: int
    heads: tuple[int, ...]
    length: int
    text: str = ""  # what is pre-trained on
    source: str = ""  # the sentences
    examples: int  # labelled sentences; 0: all
    lr: float
    tune_steps: int
    tune_lr: float
    scratch_lr: float
    beta2: float

    def __post_init__(self) -> None:
        check_lists(self, ("heads",))
        check_fresh(self)
        for heads in self.heads:
            if self.dim % (2 * heads):
                raise UsageError(
                    f"heads must cut dim into even ranks, got heads {heads}, dim {self.dim}"
                )

    def with_model(self, model: Model) -> Self:
        """Refused: fine-tuning starts from weights that headwise's own model has."""
        raise UsageError(
            "finetune starts from the weights of headwise's own model; models go with fig1, "
            "leaner, map"
        )


PRESETS = {
    "quick": FinetuneSettings(
        dim=32,
        depth=2,
        heads=(1, 2, 4, 8),
        ffn_dim=64,
        length=48,
        examples=2000,
        seeds=3,
        steps=800,
        batch=16,
        lr=0.005,
        tune_steps=400,
        tune_lr=0.003,
        scratch_lr=0.003,
        beta2=0.99,
        warmup=0.1,
        schedule="cosine",
        protocols=("stream",),
        init="normal",
        held_out=1024,
        evals=1,
    ),
    "paper": FinetuneSettings(
        dim=64,
        depth=4,
        heads=(1, 2, 4, 8, 16),
        ffn_dim=256,
        length=128,
        examples=0,
        seeds=5,
        steps=10_000,
        batch=64,
        lr=0.003,
        tune_steps=2000,
        tune_lr=0.001,
        scratch_lr=0.001,
        beta2=0.99,
        warmup=0.1,
        schedule="cosine",
        protocols=("stream",),
        init="normal",
        precision="bf16",
        epoch=500,
        evals=4,
    ),
}


# ---- runs in two rounds: pre-training, then fine-tuning and training from scratch


def shapes(s: FinetuneSettings, task: Task) -> list[Shape]:
    """The cuts of the width, as they take a task."""
    # Rotary positions have no parameters, so one set of weights fits sequences of any length.
    made = (shape_for(task, s.dim, s.depth, heads, s.dim // heads, s.ffn_dim) for heads in s.heads)
    return [
        shape.replace(positions="none", num_positions=0, qk_rope_head_dim=shape.head_dim)
        for shape in made
    ]


def _sentences(s: FinetuneSettings) -> Sentences:
    from headwise.tasks import Sentences

    return Sentences(s.length, s.source, "byte", examples=s.examples)


def _recipes(s: FinetuneSettings) -> tuple[Recipe, Recipe]:
    """How sentences are learned after pre-training, and from scratch."""
    steps = s.tune_steps
    return s.recipe(steps=steps, lr=s.tune_lr), s.recipe(steps=steps, lr=s.scratch_lr)


def runs(s: FinetuneSettings) -> list[Run]:
    """The pre-training: every cut, every seed."""
    from headwise.tasks import Masked

    # What the second round needs is checked before the first one trains.
    _sentences(s)
    _recipes(s)

    task = Masked(s.length, s.text, "byte")
    return [s.run(shape, task, seed) for shape in shapes(s, task) for seed in range(s.seeds)]


def then(s: FinetuneSettings, rows: list[Row]) -> list[Run]:
    """The fine-tuning: every cut from each of its pre-trained seeds, and from scratch."""
    task = _sentences(s)
    tuned, scratch = _recipes(s)
    # A pre-training that diverged has no weights to start from.
    done = {row["id"] for row in rows if row["status"] == "done"}
    parents = [run for run in runs(s) if run.id in done]
    out = []
    for shape in shapes(s, task):
        for parent in parents:
            # The child starts from the parent's weights and has its seed, so both losses belong to
            # one model.
            if parent.shape.num_heads == shape.num_heads:
                recipe = dataclasses.replace(tuned, init=AFTER + parent.id)
                out.append(Run(shape, task, recipe, parent.seed))
        out += [Run(shape, task, scratch, seed) for seed in range(s.seeds)]
    return out


def later(s: FinetuneSettings) -> tuple[int, int]:
    """How many runs that will be: from scratch all, from a pre-training those that did not
    diverge."""
    return len(runs(s)), 2 * len(runs(s))


# ---- points


@dataclass(frozen=True, kw_only=True)
class Cut(Measured):
    """One number of heads from one start: the loss on sentences, and before it in pre-training."""

    start: str  # PRETRAINED or SCRATCH
    heads: int
    rank: int
    params: int
    pre: float | None  # loss of the pre-training, over the models that were fine-tuned
    pre_low: float | None
    pre_high: float | None
    pre_values: list[float]
    both: list[tuple[float, float]]  # of every model: loss in pre-training, and after fine-tuning
    lr: float | None
    seeds: list[int]
    accuracy: float | None
    gain: str | None = None  # against training from scratch
    change: str | None = None  # against the fewest heads

    @property
    def name(self) -> str:
        """Heads and their rank, as 4 x 8."""
        return f"{self.heads} x {self.rank}"


def summary(rows: list[Row]) -> list[Cut]:
    """One point per number of heads and start."""
    # Rows of both rounds come together: masked bytes are the parents, sentences the children.
    parents = {row["id"]: row for row in rows if row["task"] == "masked"}
    sentences = [row for row in rows if row["task"] == "sentences"]
    out = []
    for (heads,), of_heads in group(sentences, "num_heads").items():
        for start in (PRETRAINED, SCRATCH):
            of_point = [
                row for row in of_heads if row["init"].startswith(AFTER) == (start == PRETRAINED)
            ]
            of_point.sort(key=lambda row: row["seed"])
            if not of_point:
                continue
            check_one_model(of_point, "init")
            out.append(
                Cut(
                    start=start,
                    heads=heads,
                    rank=of_point[0]["head_dim"],
                    params=of_point[0]["params"],
                    **_before(of_point, parents),
                    **losses_of(of_point),
                )
            )
    compared = [_compared(p, out) for p in out]
    return sorted(compared, key=lambda p: (p.start != PRETRAINED, p.heads))


def _before(rows: list[Row], parents: dict[str, Row]) -> dict[str, Any]:
    """The pre-training's loss over the models that were fine-tuned, and both losses of each."""
    # A child's init names its parent's id.
    pairs = [
        (parents[row["init"].removeprefix(AFTER)], row)
        for row in rows
        if row["init"].removeprefix(AFTER) in parents
    ]
    values = [parent["held_out"] for parent, _ in pairs]
    both = [
        (parent["held_out"], row["held_out"]) for parent, row in pairs if row["status"] == "done"
    ]
    names = ("pre", "pre_low", "pre_high")
    return {**interval(values, names), "pre_values": values, "both": both}


def _compared(p: Cut, points: list[Cut]) -> Cut:
    """The point with its differences from scratch and from the fewest heads."""
    # Two comparisons: with the same heads from scratch, and with the fewest heads from the same
    # start.
    alike = [q for q in points if q.start == p.start]
    fewest = min(alike, key=lambda q: q.heads)
    scratch = [q for q in points if q.start == SCRATCH and q.heads == p.heads]
    return dataclasses.replace(
        p,
        gain=_gap(p, scratch[0]) if scratch and p.start == PRETRAINED else None,
        change=_gap(p, fewest) if p.heads != fewest.heads else None,
    )


def _gap(p: Cut, other: Cut) -> str | None:
    if not p.values or not other.values:
        return None
    return gap_in_words(difference(p.values, other.values))


# ---- the claim in numbers


def headline(points: Sequence[Cut]) -> list[str]:
    """What is best before and after, whether pre-training helps, and whether the models that did
    well in it do well afterwards."""
    known = [p for p in points if p.held_out is not None]
    tuned = [p for p in known if p.start == PRETRAINED]
    scratch = [p for p in known if p.start == SCRATCH]
    trained = [p for p in tuned if p.pre is not None]
    lines = []
    if len(trained) > 1:
        lines.append("pre-training: " + _best(_before_tuning(trained)))
    if len(tuned) > 1:
        lines.append("after fine-tuning: " + _best(tuned))
    if len(trained) > 1:
        lines.append(_verdict(trained))
    if len(scratch) > 1:
        lines.append("from scratch: " + _best(scratch))
    if gains := [f"{p.name} {p.gain}" for p in tuned if p.gain]:
        lines.append("loss against scratch: " + "; ".join(gains))
    pairs = [pair for p in trained for pair in p.both]
    rho = rank_correlation([before for before, _ in pairs], [after for _, after in pairs])
    if rho.low is not None and rho.high is not None:
        lines.append(
            "rank correlation of a model's loss in pre-training with its loss after fine-tuning: "
            f"{rho.mean:+.2f} ({rho.low:+.2f} to {rho.high:+.2f}), {rho.n} models"
        )
    return lines


def answer(points: Sequence[Cut]) -> str:
    """Whether the best stays the best."""
    trained = [p for p in points if p.start == PRETRAINED and p.held_out is not None and p.pre]
    return _verdict(trained) if len(trained) > 1 else ""


def _best(points: list[Cut]) -> str:
    return best_in_words(points, lambda p: p.name, "cuts", "loss")


def _before_tuning(points: list[Cut]) -> list[Cut]:
    """The points with their losses in pre-training in the place of those on sentences."""
    return [
        dataclasses.replace(p, **interval(p.pre_values), values=p.pre_values, n=len(p.pre_values))
        for p in points
    ]


def _verdict(points: list[Cut]) -> str:
    """Whether the best in pre-training is the best afterwards, as far as they can be told apart
    from others."""
    found = {"before": ranking(_before_tuning(points)), "after": ranking(points)}
    if missing := [when for when, places in found.items() if places.best is None]:
        return f"no best {' and '.join(missing)}, so that none can stay best"
    first, last = (places.best for places in found.values())
    assert first is not None
    assert last is not None
    names = {when: [p.name for p in places.alike] for when, places in found.items()}
    if first.name == last.name:
        close = " and ".join(when for when, alike in names.items() if alike)
        doubt = f"; not told apart from all others {close}" if close else ""
        return f"the best in pre-training, {first.name}, is the best after fine-tuning{doubt}"
    other = {"before": last.name, "after": first.name}
    close = " and ".join(when for when in names if other[when] in names[when])
    doubt = f"; not told apart {close}" if close else ""
    ends = f"the best in pre-training, {first.name}, is not the best after fine-tuning, {last.name}"
    return ends + doubt


# ---- the figure


def figure(points: Sequence[Cut]) -> LineFigure:
    """Two panels: the loss of pre-training against heads; that of the sentences, fine-tuned and
    from scratch."""
    known = [p for p in points if p.held_out is not None]
    trained = [p for p in known if p.pre is not None]
    before = []
    if trained:
        before.append(
            Line(
                label="pre-training",
                colour=2,
                x=[p.heads for p in trained],
                y=[p.pre for p in trained],
                low=[p.pre_low for p in trained],
                high=[p.pre_high for p in trained],
            )
        )
    after = []
    for colour, start in enumerate((PRETRAINED, SCRATCH)):
        along = groups(known, "start").get((start,), [])
        if along:
            after.append(error_line(start, colour, [p.heads for p in along], along))
    return LineFigure(
        title="Heads before and after fine-tuning",
        x_label="heads",
        y_label="held-out loss",
        y_scale="linear",
        share_y=False,
        panels=[
            LinePanel(title="masked bytes", lines=before),
            LinePanel(title="sentences", lines=after),
        ],
        columns=2,
    )


EXPERIMENT = Experiment(
    name="finetune",
    question=("Does the number of heads that is best in pre-training stay best after fine-tuning?"),
    about="heads before and after fine-tuning, at equal parameters",
    presets=PRESETS,
    columns=(
        ("start", "start"),
        ("heads", "heads"),
        ("rank", "rank"),
        ("params", "parameters"),
        ("pre", "pre-training loss"),
        ("lr", "rate"),
        ("held_out", "held-out loss"),
        ("n", "n"),
        ("diverged", "diverged"),
        ("accuracy", "accuracy"),
        ("gain", "loss against scratch"),
        ("change", "loss against fewest heads"),
    ),
    main_columns=("heads", "held_out", "rank", "accuracy", "gain", "start"),
    caption=(
        "Held-out loss against the number of heads at equal parameters, mean over seeds with its "
        "95 % interval: left of finding masked bytes, right of classifying sentences afterwards, "
        "and from scratch in as many steps."
    ),
    notes={"quick": Note(STOPS_EARLY, ("steps", "tune_steps"))},
    runs=runs,
    then=then,
    later=later,
    keep_weights=True,
    summary=summary,
    headline=headline,
    answer=answer,
    figure=figure,
    meanings={
        "text": "a file to pre-train on; generated where empty",
        "examples": "labelled sentences; 0: all",
        "lr": "learning rate of pre-training",
        "tune_steps": "steps of fine-tuning",
        "tune_lr": "learning rate of fine-tuning",
        "scratch_lr": "learning rate from scratch",
        "length": "bytes per sequence",
    },
)
