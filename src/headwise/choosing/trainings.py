"""What is trained: one task, or one text, at one recipe. It makes the run of a shape at a rate and
seed, and reads the loss from its row. No torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import UsageError, nearest, one_line, shown
from headwise.experiments.leaner_paper.budget_map_shapes import PRESETS
from headwise.experiments.runner import model_of, tasks_of
from headwise.experiments.settings import CHOICES
from headwise.lm.spec import STYLE, Pretraining
from headwise.lm.text_files import find_tokenizer, vocab_of
from headwise.rows import Row
from headwise.shape import Shape
from headwise.store import Store
from headwise.training.run import Recipe, Run

if TYPE_CHECKING:
    from headwise.execute.engine import Engine
    from headwise.model.own import Model
    from headwise.signals import Stop
    from headwise.tasks.task import Task

TUNING_SEED = 0  # rates are chosen on it, and no shape is compared on it
STEPS, BATCH, EVALS = 1000, 64, 10
AnyRun = Run | Pretraining


# ---- of a task


@dataclass(frozen=True, kw_only=True)
class OnTask:
    """Models of a task, trained together in ensembles. The loss is the held-out error."""

    task: Task
    recipe: Recipe
    model: Model | None = None  # of one's own, in the place of headwise's

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task.spec()["name"]

    @property
    def tokens(self) -> int:
        """Length of a sequence."""
        return self.task.tokens

    @property
    def steps(self) -> int:
        """Of a full training."""
        return self.recipe.steps

    @property
    def causal(self) -> bool:
        """Whether a cache of keys and values is of use."""
        return self.task.causal

    def run(self, shape: Shape, lr: float, seed: int) -> Run:
        """One training: on the tuning's seed evaluated on validation data, on others on the data
        that shapes are compared on."""
        evaluated_on = "validation" if seed == TUNING_SEED else ""
        recipe = dataclasses.replace(self.recipe, lr=lr, evaluated_on=evaluated_on)
        return Run(shape, self.task, recipe, seed, self.model)

    def loss(self, row: Row) -> float:
        """Infinite where the run diverged."""
        return row["held_out"] if row["status"] == "done" else math.inf

    def work(self, run: AnyRun) -> float:
        """A number that goes with the time of a run."""
        assert isinstance(run, Run)
        size = run.params if run.model else run.shape.flops(self.tokens, training=True)
        return float(size) * self.recipe.batch * self.steps

    def spec(self) -> dict[str, Any]:
        """As plain values."""
        recipe = dataclasses.asdict(self.recipe)
        own = {} if self.model is None else {"model": self.model.spec()}
        return {"task": self.task.spec(), **own, "recipe": {**recipe, "lr": None}}

    def make(self, runs: Sequence[Any], store: Store, **how: Any) -> None:
        """Have every run's row in the store."""
        from headwise.execute.sources import check_tasks
        from headwise.execute.sweep import sweep

        check_tasks(store, runs, runs)
        sweep(runs, store, label=f"choose {self.name}", **how)


# ---- of a text


@dataclass(frozen=True, kw_only=True)
class OnText:
    """Decoders of one text, trained one after the other. The loss is in bits per byte; rates are
    chosen on the first half of the held-out tenth, shapes are compared on the second."""

    pretraining: Pretraining
    model: None = None

    @property
    def name(self) -> str:
        """What its rows say."""
        return "text"

    @property
    def tokens(self) -> int:
        """Length of a sequence."""
        return self.pretraining.length

    @property
    def steps(self) -> int:
        """Of a full training."""
        return self.pretraining.steps

    @property
    def causal(self) -> bool:
        """Decoders have a cache."""
        return True

    def run(self, shape: Shape, lr: float, seed: int) -> Pretraining:
        """One training; see `OnTask.run`."""
        part = "validation" if seed == TUNING_SEED else "test"
        return dataclasses.replace(
            self.pretraining, shape=shape, lr=lr, seed=seed, evaluated_on=part
        )

    def loss(self, row: Row) -> float:
        """Infinite where the run diverged."""
        return row["bits_per_byte"] if row["status"] == "done" else math.inf

    def work(self, run: AnyRun) -> float:
        """A number that goes with the time of a run."""
        assert isinstance(run, Pretraining)
        return float(run.flops) * run.steps

    def spec(self) -> dict[str, Any]:
        """As plain values."""
        spec = self.pretraining.spec()
        return {"text": {**spec, "shape": None, "lr": None, "seed": None, "evaluated_on": None,
                         "source": None, "tokenizer": None}}  # fmt: skip

    def make(
        self,
        runs: Sequence[Any],
        store: Store,
        *,
        device: str = "auto",
        workers: int | None = None,
        checkpoint_every: float = 30.0,
        stop: Stop | None = None,
        engine: Engine | None = None,
    ) -> None:
        """Have every run's row in the store."""
        from headwise.execute.sweep import pretrain_all

        pretrain_all(
            runs, store, device=device, checkpoint_every=checkpoint_every,
            label="choose text", stop=stop, engine=engine,
        )  # fmt: skip


Training = OnTask | OnText


def training_of(
    given: str | Task | Pretraining,
    model: str | Model | None = None,
    recipe: Recipe | None = None,
    steps: int | None = None,
    batch: int | None = None,
) -> Training:
    """What is to be trained: a task by name, file or value, or a `Pretraining` whose shape, rate
    and seed are replaced."""
    if isinstance(given, Pretraining):
        for name, value in (("model", model), ("recipe", recipe), ("batch", batch)):
            if value is not None:
                raise UsageError(f"{name} does not go with a text, whose Pretraining says it")
        if steps is not None:
            given = dataclasses.replace(given, steps=steps)
        return OnText(pretraining=given)
    tasks = tasks_of(given)
    if len(tasks) != 1:
        raise UsageError(f"choose takes one task, got {len(tasks)}")
    task = tasks[0]
    if isinstance(task, str):
        if task not in CHOICES:
            raise UsageError(f"unknown task {shown(task)}; {nearest(task, CHOICES)}, or a file")
        task = PRESETS["quick"].task(task)
    own = None if model is None else model_of(model)
    if recipe is not None and (steps is not None or batch is not None):
        raise UsageError("a recipe says its own steps and batch: give one or the other")
    return OnTask(task=task, recipe=recipe or _recipe(steps, batch, own), model=own)


def _recipe(steps: int | None, batch: int | None, model: Model | None) -> Recipe:
    """The recipe of the budget map; its rate is replaced."""
    steps = STEPS if steps is None else steps
    if steps < 1:
        raise UsageError(f"steps must be at least 1, got {steps}")
    # Evaluations lie between epochs, so an epoch is at most a tenth of the steps.
    epoch = max(k for k in range(1, max(1, steps // EVALS) + 1) if steps % k == 0)
    return Recipe(
        steps=steps,
        batch=BATCH if batch is None else batch,
        epoch=epoch,
        schedule="cosine",
        warmup=0.1,
        beta2=0.99,
        init="normal" if model is None else "library",
        held_out=2048,
        evals=EVALS,
    )


def text(
    source: str | Path = "",
    *,
    steps: int = 500,
    length: int = 256,
    batch_tokens: int = 16_384,
    tokenizer: str = "",
    precision: str = "fp32",
    **more: Any,
) -> Pretraining:
    """A text to choose a shape for: the `Pretraining` of a small decoder, whose shape is replaced.

    >>> text(steps=10, length=32, batch_tokens=64).steps
    10
    """
    kept: dict[str, Any] = {"evals": min(EVALS, steps), **more}
    try:
        shape = decoder(tokenizer, dim=32, depth=1, heads=2, rank=16, ffn_dim=64)
        return Pretraining(
            shape=shape, source=str(source), steps=steps, length=length,
            batch_tokens=batch_tokens, tokenizer=tokenizer, precision=precision,
            **kept,
        )  # fmt: skip
    except TypeError as e:
        raise UsageError(f"a text cannot be described so: {one_line(e)}") from None


def decoder(tokenizer: str, *, dim: int, depth: int, heads: int, rank: int, ffn_dim: int) -> Shape:
    """A decoder in nanochat's style over the ids of a tokenizer, every head rotated; an odd rank
    has no positions to rotate."""
    vocab = -(-vocab_of(find_tokenizer(tokenizer)[0]) // 64) * 64
    style: dict[str, Any] = dict(STYLE)
    return Shape(
        dim=dim, depth=depth, num_heads=heads, head_dim=rank, ffn_dim=ffn_dim, causal=True,
        vocab_size=vocab, qk_rope_head_dim=rank // 2 * 2, **style,
    )  # fmt: skip
