"""What is trained and how: `Recipe`, `Run`, and the data a run sees, which is a pure function of
its seed and the step."""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from headwise.errors import LARGEST, UsageError, check_seed, nearest, shown
from headwise.model import INITS
from headwise.rows import Row, Work, columns_of, id_of
from headwise.shape import Shape, not_built
from headwise.tasks import PACKAGE, TASKS, task_of

if TYPE_CHECKING:
    from headwise.model.own import Model
    from headwise.tasks.task import Task

SCHEDULES = ("cosine", "published", "constant")
AFTER = "run:"  # an init that begins so, with a run's id behind, starts from that run's weights
PROTOCOLS = ("stream", "replay", "original")
REPLAYED = ("replay", "original")  # one epoch again and again
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
MOST = 10**9  # steps, sequences
MOST_EVALS = 100_000  # each is a point of a row's curve
# fields of shapes that came after the first runs, before those that `Shape.spec` leaves out: left
# out where unused, so that older ids stay
ADDED = ("input_dim", "output_dim")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a run is trained. The defaults are the rank paper's optimiser on fresh data."""

    steps: int
    batch: int = 256
    lr: float = 0.01
    # after a linear warm-up; "published": the same by epoch, the first at 0; "constant"
    schedule: str = "cosine"
    warmup: float = 0.05  # share of the steps
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    # fresh data at every step; "replay": one epoch again and again; "original": the published one
    protocol: str = "stream"
    epoch: int = 100  # steps over which the training loss is averaged
    init: str = "library"  # or "run:" and the id of a run of the same store whose weights were kept
    precision: str = "fp32"  # of the operands of products; "fp16": TF32's 11 bits in half the bytes
    # fresh sequences on which the held-out error is measured, rounded up to batches of 128
    held_out: int = 12_800
    evals: int = 10  # how often it is measured along the way

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "epoch", "held_out", "evals"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1, got {shown(value)}")
            if value > MOST:
                raise UsageError(f"{name} must be at most {MOST:,}, got {shown(value)}")
        for name, low, high in (
            ("lr", 0, LARGEST),
            ("warmup", 0, 1),
            ("weight_decay", 0, LARGEST),
            ("beta1", 0, 1),
            ("beta2", 0, 1),
            ("eps", 0, 1),
        ):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not low <= value <= high
            ):
                raise UsageError(
                    f"{name} must be a number from {low} to {high:g}, got {shown(value)}"
                )
            object.__setattr__(self, name, float(value))  # 1 and 1.0 are one run
        if str(self.init).startswith(AFTER) and not re.fullmatch("[0-9a-f]{16}", self.parent):
            raise UsageError(
                f"init {AFTER} must be followed by a run's id, 16 digits and letters a to f, got "
                f"{self.init!r}"
            )
        for name, choices in (
            ("schedule", SCHEDULES),
            ("protocol", PROTOCOLS),
            ("init", (self.init,) if self.parent else INITS),
            ("precision", PRECISIONS),
        ):
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"unknown {name} {getattr(self, name)!r}; "
                    f"{nearest(str(getattr(self, name)), choices)}"
                )
        for name in ("beta1", "beta2"):
            if getattr(self, name) == 1:
                raise UsageError(f"{name} must be below 1, got {getattr(self, name)}")
        if self.evals > MOST_EVALS:
            raise UsageError(f"evals must be at most {MOST_EVALS:,}, got {self.evals:,}")
        if self.steps % self.epoch:
            raise UsageError(
                f"steps must be a multiple of epoch, got steps {self.steps}, epoch {self.epoch}"
            )

    @property
    def parent(self) -> str:
        """The id of the run whose weights this one starts from; empty: none."""
        return self.init.removeprefix(AFTER) if str(self.init).startswith(AFTER) else ""

    @property
    def epochs(self) -> int:
        return self.steps // self.epoch

    def rates(self) -> Any:
        """The learning rate of every step (numpy, float64)."""
        import numpy as np

        if self.schedule == "constant":
            return np.full(self.steps, self.lr)
        if self.schedule == "published":
            # constant within an epoch; epoch 0 at rate 0 where w is 2 or more; peak at w - 1
            e, total = np.arange(self.epochs), self.epochs
            w = int(self.epochs * self.warmup + 1e-9)
            rise = e / max(w - 1, 1)
            fall = 0.5 * (1 + np.cos(np.pi * (e - w) / max(total - w, 1)))
            return np.repeat(self.lr * np.where(e < w, rise, fall), self.epoch)
        step, w = np.arange(self.steps), max(1, round(self.warmup * self.steps))
        fall = 0.5 * (1 + np.cos(np.pi * (step - w) / max(self.steps - w, 1)))
        return self.lr * np.where(step < w, (step + 1) / w, fall)


@dataclass(frozen=True)
class Run:
    """One model to train. `run.id` is a hash of all of it."""

    work: ClassVar[Work] = "train"
    shape: Shape
    task: Task
    recipe: Recipe
    seed: int = 0
    model: Model | None = None  # a model of one's own in the place of headwise's

    def __post_init__(self) -> None:
        shape, task = self.shape, self.task
        vocab, name = task.vocab, task.spec()["name"]
        if name in TASKS and not type(task).__module__.startswith(PACKAGE):
            raise UsageError(
                f"a task of one's own needs a name of its own, {type(task).__name__} has that of "
                f"the built-in task {name}"
            )
        if self.model is not None and self.recipe.init != "library":
            raise UsageError(
                "a model of one's own draws its own initial weights, so init must be library, got "
                f"{self.recipe.init}"
            )
        check_seed(self.seed)
        if self.model is None and (missing := not_built(shape)):
            raise UsageError(missing)
        if self.recipe.protocol == "original" and not task.has_original:
            raise UsageError(
                "protocol original is the rank paper's own data: farthest of uniform points; "
                "choices: stream, replay"
            )
        if bool(shape.vocab_size) != bool(vocab) or shape.vocab_size < vocab:
            needs = (
                f"tokens, so a vocab_size of at least {vocab}"
                if vocab
                else "vectors, so vocab_size 0"
            )
            raise UsageError(f"this task's inputs are {needs}, got vocab_size {shape.vocab_size}")
        if not vocab and shape.in_dim != task.in_dim:
            what = "input_dim" if shape.input_dim else "dim"
            beside = (
                f" beside {shape.position_dim} of positions"
                if shape.position_dim and not shape.input_dim
                else ""
            )
            raise UsageError(
                f"a shape's {what} must be its task's dim{beside}, got {what} "
                f"{getattr(shape, what)}, task dim {task.in_dim}"
            )
        if shape.output_dim and shape.output_dim != task.answer_dim:
            raise UsageError(
                f"output_dim must be the width of the task's answers, {task.answer_dim}, got "
                f"{shape.output_dim}"
            )
        if shape.out_dim < task.answer_dim:
            raise UsageError(
                f"outputs must be at least as wide as the task's answers, {task.answer_dim}, got "
                f"{shape.out_dim}"
            )
        if task.causal and not shape.causal:
            raise UsageError(
                "a shape for this task must be causal, because later tokens hold the answers; got "
                "causal False"
            )
        if shape.positions in ("additive", "concatenated") and shape.num_positions < task.tokens:
            raise UsageError(
                f"num_positions must be at least the task's {task.tokens} tokens, got "
                f"{shape.num_positions}"
            )

    def spec(self) -> dict[str, Any]:
        """The run as plain values; `Run.of` is its inverse."""
        return {
            "shape": self.shape.spec(ADDED),
            "task": self.task.spec(),
            **({} if self.model is None else {"model": self.model.spec()}),
            "recipe": dataclasses.asdict(self.recipe),
            "seed": self.seed,
        }

    @classmethod
    def of(cls, spec: dict[str, Any]) -> Run:
        """A run from `spec()`, also after a round trip through JSON."""
        if "model" in spec:
            raise UsageError(
                f"model {spec['model']['name']} is one of one's own: build it and pass it to Run"
            )
        task = dict(spec["task"])
        return cls(
            Shape.of(spec["shape"]),
            task_of(task.pop("name"), task),
            Recipe(**spec["recipe"]),
            spec["seed"],
        )

    def columns(self) -> Row:
        """The same as the columns of a row, and its size."""
        return {**columns_of(self.spec()), "params": self.params}

    @functools.cached_property
    def params(self) -> int:
        """How many numbers the run trains."""
        return self.model.params(self.shape, self.task) if self.model else self.shape.params

    @functools.cached_property
    def id(self) -> str:
        return id_of(self.spec())


def ensemble_key(run: Run) -> Any:
    """Runs with equal keys can form an ensemble: they may differ in seed, rate, schedule, protocol
    and start, and in how they cut the same width into heads. A model of a user's own is alone."""
    static = dataclasses.replace(
        run.recipe,
        lr=1.0,
        schedule="constant",
        warmup=0.0,
        weight_decay=0.0,
        protocol="stream",
        init="library",
    )
    own = None if run.model is None else run.id  # one of its own is alone
    return run.shape.widths_key(), run.task, static, own
