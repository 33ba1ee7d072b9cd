"""Settings that experiments share, their checks, and `key=value` as it is typed.

A setting named like a field of `Recipe` goes into the recipe of every run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.errors import UsageError, nearest, shown
from headwise.experiments.base import Experiment, S, Settings
from headwise.shape import Shape
from headwise.training.run import Recipe, Run

if TYPE_CHECKING:
    from typing import Self

    from headwise.model.own import Model
    from headwise.tasks.task import Task

CHOICES = ("farthest", "recall", "text", "images", "listops", "sentences")
SOURCED = ("text", "images", "sentences")  # those that read data from `source`
BY_OPTION = {"model": "--model FILE", "task": "a name or a file behind the experiment"}
MEANINGS = {
    "dim": "width of the model",
    "depth": "layers",
    "depths": "numbers of layers",
    "heads": "numbers of heads",
    "ranks": "ranks of a head",
    "ffn_dim": "width of the feed-forward",
    "points": "points of the farthest-neighbour task",
    "seeds": "seeds per point",
    "steps": "training steps",
    "batch": "sequences per step",
    "lr": "learning rate",
    "lrs": "learning rates that are tried on seed 0",
    "further": "rates tried beyond them where the best is the last to a side",
    "warmup": "share of the steps with a rising rate",
    "schedule": "cosine, published (the paper's, by epoch) or constant",
    "protocols": "stream (fresh data), replay (one epoch again and again), original",
    "init": "how weights start: library, published, original, normal, spectral, orthogonal",
    "precision": "of the operands of products: fp32, tf32, fp16 or bf16",
    "epoch": "steps over which the training loss is averaged",
    "held_out": "sequences that the held-out error is measured on",
    "evals": "how often it is measured",
    "beta2": "of AdamW",
    "weight_decay": "of AdamW",
    "tasks": f"{', '.join(CHOICES)}; your own file goes behind the experiment",
    "task": "farthest; your own file goes behind the experiment",
    "model": "a file with your own model, by --model",
    "tokens": "tokens per sequence",
    "head_dim": "rank of a head",
    "weights": "standard deviations of weights, or 1/sqrt(D)",
    "policies": "split (rank falls), widen (rank kept)",
    "gaussian_heads": "numbers of heads of the Gaussian matrices",
    "small_tokens": "tokens of the layer whose Jacobian is written out",
    "small_dim": "width of that layer",
    "small_head_dim": "rank of a head of that layer",
    "small_heads": "numbers of heads of that layer",
    "pairs": "pairs of the recall task",
    "length": "tokens of text, listops and sentences",
    "source": "a file or data set for text, images or sentences; generated where empty",
}


def meaning_of(experiment: Experiment[Any, Any], setting: str) -> str:
    """What a setting of an experiment is, in one line; empty where nothing is said."""
    return experiment.meanings.get(setting) or MEANINGS.get(setting, "")


@dataclass(frozen=True, kw_only=True)
class Training(Settings):
    """What every training experiment holds."""

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
    model: Model | None = None  # of one's own, in the place of headwise's

    def with_model(self, model: Model) -> Self:
        """The same settings with this model in every run."""
        return dataclasses.replace(self, model=model)

    def recipe(self, **changes: Any) -> Recipe:
        """The recipe from the settings of the same names, with changes. A model of one's own draws
        its own initial weights."""
        # Settings that have the name of a recipe's field go into it as they are.
        names = {f.name for f in dataclasses.fields(Recipe)}
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in names}
        values: dict[str, Any] = {**own, **changes}
        if self.model is not None and "init" not in changes:
            values["init"] = "library"
        return Recipe(**values)

    def run(self, shape: Shape, task: Task, seed: int, **changes: Any) -> Run:
        """One model to train by the settings' recipe with changes."""
        return Run(shape, task, self.recipe(**changes), seed, self.model)


@dataclass(frozen=True, kw_only=True)
class OverTasks(Training):
    """What experiments over several tasks hold besides. Every shape is tuned over the same
    rates."""

    tasks: tuple[str | Task, ...]  # built-in ones by name
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
        """Sizes of tasks that are not among those chosen."""
        of = {
            "points": ("farthest",),
            "pairs": ("recall",),
            "length": ("text", "listops", "sentences"),
        }
        return without_effect(of, [task_name(task) for task in self.tasks], "tasks")

    def with_tasks(self, tasks: Sequence[str | Task]) -> Self:
        """The same settings for these tasks."""
        return dataclasses.replace(self, tasks=tuple(tasks))

    def __post_init__(self) -> None:
        check_lists(self, (), ("tasks", "lrs"))
        check_fresh(self)
        names = [task_name(task) for task in self.tasks]
        specs = [task if isinstance(task, str) else repr(task.spec()) for task in self.tasks]
        if len(set(specs)) < len(specs):
            raise UsageError(
                f"tasks must differ in their names or fields, got {', '.join(names)}; for another "
                "setting of a task of your own: my_task.py:MyTask(field=value)"
            )
        for task in self.tasks:
            if isinstance(task, str) and task not in CHOICES:
                raise UsageError(f"unknown task {task!r}; {_task_choices(task, CHOICES)}")
        if self.source and not set(names) <= set(SOURCED):
            raise UsageError(
                f"source goes with the tasks {', '.join(SOURCED)}, got {', '.join(names)}"
            )

    def task(self, chosen: str | Task) -> Task:
        """One of the tasks: a built-in one in the sizes of the settings, one's own as it is."""
        from headwise import tasks

        match chosen:
            case "farthest":
                return tasks.Farthest(self.dim, self.points)
            case "recall":
                return tasks.Recall(self.pairs, 4 * self.pairs, 2 * self.pairs)
            case "text":
                return tasks.Text(self.length, self.source)
            case "images":
                return tasks.Images(4, self.source)
            case "sentences":
                return tasks.Sentences(self.length, self.source, "word")
            case "listops":
                return tasks.ListOps(length=self.length)
            case str():
                raise UsageError(f"unknown task {chosen!r}; {_task_choices(chosen, CHOICES)}")
            case _:
                return chosen


def _task_choices(task: str, choices: Sequence[str]) -> str:
    """The tail of an error about a task that is none of these."""
    if ".py" in task:
        return f"a file of your own goes behind the experiment: headwise run map {task}"
    return f"{nearest(task, choices)}, or a Python file behind the experiment"


def task_name(task: str | Task) -> str:
    """A task's name in rows."""
    return task if isinstance(task, str) else task.spec()["name"]


# ---- checks


def check_lists(settings: Any, numbers: Sequence[str], words: Sequence[str] = ()) -> None:
    """Refuse empty lists, repeated entries, and numbers below 1."""
    for name in (*numbers, *words):
        values = getattr(settings, name)
        if not values:
            raise UsageError(f"{name} must not be empty")
        if len(set(values)) < len(values):
            raise UsageError(
                f"{name} must differ from each other, got {', '.join(map(str, values[:20]))}"
            )
    for name in numbers:
        bad = [v for v in getattr(settings, name) if v < 1]
        if bad:
            raise UsageError(f"{name} must be at least 1, got {shown(bad[0])}")
    if settings.seeds < 1:
        raise UsageError(f"seeds must be at least 1, got {settings.seeds}")
    if isinstance(settings, Training) and settings.schedule == "constant" and settings.warmup:
        raise UsageError(
            f"schedule constant has no warm-up: warmup must be 0, got {settings.warmup:g}"
        )


def check_fresh(settings: Training) -> None:
    """Refuse other protocols than fresh data at every step."""
    if settings.protocols != ("stream",):
        raise UsageError(
            "protocols must be stream here: every step has fresh data, got "
            f"{', '.join(settings.protocols) or 'none'}"
        )


def without_effect(
    of: Mapping[str, Sequence[str]], chosen: Iterable[str], name: str
) -> dict[str, str]:
    """Which settings go with nothing of what is chosen, and why."""
    chosen = list(chosen)
    reason = f"{name} is {', '.join(chosen)}"
    return {
        key: f"it goes with {' and '.join(these)}, {reason}"
        for key, these in of.items()
        if not {*these} & {*chosen}
    }


# ---- settings as they are typed


def settings_of(
    experiment: Experiment[S, Any],
    preset: str,
    typed: Sequence[str] = (),
    seeds: int | None = None,
    tasks: Sequence[str | Task] = (),
    model: Model | None = None,
) -> S:
    """A preset with other tasks, a model of one's own, and `key=value` words as they are typed
    after --set."""
    base = experiment.preset(preset)
    if tasks:
        base = base.with_tasks(tasks)
    if model is not None:
        base = base.with_model(model)
    known = [f.name for f in dataclasses.fields(base)]
    values: dict[str, Any] = {} if seeds is None else {"seeds": seeds}
    for word in typed:
        key, equals, text = word.partition("=")
        if not equals:
            raise UsageError(f"--set takes key=value, got {shown(word)}")
        if key not in known:
            raise UsageError(f"unknown setting {shown(key)}; {nearest(key, known)}")
        if key in BY_OPTION:
            raise UsageError(f"{key} is given by {BY_OPTION[key]}, not by --set")
        values[key] = text
    return base.changed(**values)
