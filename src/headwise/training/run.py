"""What is trained and how: `Recipe`, `Run`, and the data a run sees, which is a pure function of
its seed and the step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.errors import LARGEST, UsageError, nearest
from headwise.model.transformer import INITS, split_key
from headwise.shape import Shape
from headwise.tasks import Task, task_name, task_of

SCHEDULES = ("cosine", "published", "constant")
CHECKPOINT_FILE = "checkpoint.safetensors"  # in the folder of a run that is under way
WEIGHTS_FILE = "weights.safetensors"  # in the folder of a run whose weights were kept
AFTER = "run:"  # an init that begins so, with a run's id behind, goes on from that run's weights
PROTOCOLS = ("stream", "replay", "original")
REPLAYED = ("replay", "original")  # one epoch again and again
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
MOST = 10**9  # steps, sequences
MEASURED = frozenset(  # what differs when the same run is made again
    {
        "seconds",
        "finished",
        "memory_bytes",
        "models",
        "commit",
        "headwise",
        "torch",
        "python",
        "device",
        "host_cpus",
        "resumed",
    }
)

ADDED = (
    "input_dim",
    "output_dim",
)  # fields of shapes that came later: left out where unused, so that older ids stay

Row = dict[str, Any]


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
                raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")
            if value > MOST:
                raise UsageError(f"{name} must be at most {MOST:,}, got {value}")
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
                raise UsageError(f"{name} must be a number from {low} to {high:g}, got {value!r}")
            object.__setattr__(self, name, float(value))  # 1 and 1.0 are one run
        for name, choices in (
            ("schedule", SCHEDULES),
            ("protocol", PROTOCOLS),
            ("init", INITS),
            ("precision", PRECISIONS),
        ):
            if getattr(self, name) not in choices and not (
                name == "init" and self._checked_parent()
            ):
                raise UsageError(
                    f"unknown {name} {getattr(self, name)!r}; "
                    f"{nearest(str(getattr(self, name)), choices)}"
                )
        for name in ("beta1", "beta2"):
            if getattr(self, name) == 1:
                raise UsageError(f"{name} must be below 1, got {getattr(self, name)}")
        if self.steps % self.epoch:
            raise UsageError(
                f"steps must be a multiple of epoch, got steps {self.steps}, epoch {self.epoch}"
            )

    def _checked_parent(self) -> bool:
        if not isinstance(self.init, str) or not self.init.startswith(AFTER):
            return False
        if not re.fullmatch("[0-9a-f]{16}", self.parent):
            raise UsageError(
                f"init {AFTER} must be followed by a run's id, 16 digits and letters a to f, got "
                f"{self.init!r}"
            )
        return True

    @property
    def parent(self) -> str:
        """The id of the run whose weights this one starts from; empty: none."""
        return self.init.removeprefix(AFTER) if self.init.startswith(AFTER) else ""

    @property
    def epochs(self) -> int:
        return self.steps // self.epoch

    def rates(self) -> Any:
        """The learning rate of every step (numpy, float64)."""
        if self.schedule == "constant":
            return np.full(self.steps, self.lr)
        if (
            self.schedule == "published"
        ):  # constant within an epoch; epoch 0 at rate 0 where w is 2 or more; peak at w - 1; floor 0
            e, total, w = np.arange(self.epochs), self.epochs, int(self.epochs * self.warmup + 1e-9)
            rise = e / max(w - 1, 1)
            fall = 0.5 * (1 + np.cos(np.pi * (e - w) / max(total - w, 1)))
            return np.repeat(self.lr * np.where(e < w, rise, fall), self.epoch)
        step, w = np.arange(self.steps), max(1, round(self.warmup * self.steps))
        fall = 0.5 * (1 + np.cos(np.pi * (step - w) / max(self.steps - w, 1)))
        return self.lr * np.where(step < w, (step + 1) / w, fall)


@dataclass(frozen=True)
class Run:
    """One model to train. `run.id` is a hash of all of it."""

    shape: Shape
    task: Task
    recipe: Recipe
    seed: int = 0

    def __post_init__(self) -> None:
        shape, task = self.shape, self.task
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise UsageError(f"seed must be a whole number, got {self.seed!r}")
        if self.recipe.protocol == "original" and not task.has_original:
            raise UsageError(
                "protocol original is the rank paper's own data: farthest of uniform points; "
                "choices: stream, replay"
            )
        if bool(shape.vocab_size) != bool(task.vocab) or shape.vocab_size < task.vocab:
            needs = (
                f"tokens, so a vocab_size of at least {task.vocab}"
                if task.vocab
                else "vectors, so vocab_size 0"
            )
            raise UsageError(f"this task's inputs are {needs}, got vocab_size {shape.vocab_size}")
        if not task.vocab and shape.in_dim != task.in_dim:
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
        if shape.positions not in ("none", "room") and shape.num_positions < task.tokens:
            raise UsageError(
                f"num_positions must be at least the task's {task.tokens} tokens, got "
                f"{shape.num_positions}"
            )

    def spec(self) -> dict[str, Any]:
        """The run as plain values; `Run.of` is its inverse."""
        shape = dataclasses.asdict(self.shape)
        for name in ADDED:
            if not shape[name]:
                del shape[name]
        return {
            "shape": shape,
            "task": {"name": task_name(self.task), **dataclasses.asdict(self.task)},
            "recipe": dataclasses.asdict(self.recipe),
            "seed": self.seed,
        }

    @classmethod
    def of(cls, spec: dict[str, Any]) -> Run:
        """A run from `spec()`, also after a round trip through JSON."""
        task = dict(spec["task"])
        return cls(
            Shape.of(spec["shape"]),
            task_of(task.pop("name"), task),
            Recipe(**spec["recipe"]),
            spec["seed"],
        )

    def columns(self) -> Row:
        """The same as the columns of a row, and its size. `held_out` is the error there, so the
        recipe's count has another name."""
        spec = self.spec()
        task = {
            "task" if key == "name" else f"task_{key}": value for key, value in spec["task"].items()
        }
        recipe = {
            "held_out_sequences" if key == "held_out" else key: value
            for key, value in spec["recipe"].items()
        }
        shape = {key: value for key, value in spec["shape"].items() if key != "extras"}
        return {**shape, **task, **recipe, "seed": self.seed, "params": self.shape.params}

    @functools.cached_property
    def id(self) -> str:
        text = json.dumps(self.spec(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value <= sys.float_info.max
    )


def fault(row: Row, run: Any = None) -> str:
    """What is wrong with a row that comes from a file, and, with a run, why it cannot be that
    run's; empty: nothing."""
    if row.get("status") not in ("done", "diverged"):
        return f"status must be done or diverged, got {row.get('status')!r}"
    if not isinstance(row.get("commit"), str):
        return f"commit must be a name, got {row.get('commit')!r}"
    for key, value in row.items():
        if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
            return f"{key} must be a finite number, got {str(value)[:20]}"
    if run is None:
        return ""
    for key, value in json.loads(json.dumps(run.columns())).items():
        if key in row and row[key] != value:
            return f"{key} is {value!r} in that run, got {row[key]!r}"
    return _unfit(row, TRAINED if isinstance(run, Run) else SHOWN)


SHOWN: dict[str, Callable[[Any], bool]] = {
    "seconds": _number,
    "device": lambda value: isinstance(value, str),
}
TRAINED = {
    **dict.fromkeys(
        ("dim", "depth", "num_heads", "head_dim", "average", "protocol", "steps", "seed", "params"),
        lambda value: True,
    ),
    **SHOWN,
    "zero_error": _number,
    "held_out": lambda value: value is None or _number(value),
    "train_best": lambda value: value is None or _number(value),
    "curve": lambda value: isinstance(value, list) and all(v is None or _number(v) for v in value),
    "held_out_curve": lambda value: (
        isinstance(value, list) and all(isinstance(v, list) and len(v) == 2 for v in value)
    ),
}


def _unfit(row: Row, needs: dict[str, Callable[[Any], bool]]) -> str:
    """Which value of a row is missing, or is none that tables and pages can show."""
    if missing := [key for key in needs if key not in row]:
        return f"it has no {missing[0]}"
    if row["status"] == "done" and row.get("held_out", 0.0) is None:
        return "held_out must be a number of at least 0, got None"
    for key, fits in needs.items():
        if not fits(row[key]):
            kind = (
                "a list of numbers"
                if "curve" in key
                else "a name"
                if key == "device"
                else "a number of at least 0"
            )
            return f"{key} must be {kind}, got {repr(row[key])[:40]}"
    return ""


def stack_key(run: Run) -> Any:
    """Runs with equal keys can be stacked: they may differ in seed, rate, schedule, protocol and
    start, and in how they cut the same width into heads."""
    static = dataclasses.replace(
        run.recipe,
        lr=1.0,
        schedule="constant",
        warmup=0.0,
        weight_decay=0.0,
        protocol="stream",
        init="library",
    )
    return split_key(run.shape), run.task, static


def derive(seed: int, *purpose: str | int) -> int:
    """A seed for one purpose, independent of every other purpose's."""
    text = json.dumps([seed, *purpose])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator_of(device: torch.device, seed: int) -> torch.Generator:
    """A generator that starts from a seed."""
    return torch.Generator(device).manual_seed(seed)


# ---- data: a pure function of (seed, block)


def block_steps(task: Task, recipe: Recipe) -> int:
    """How many steps' data are drawn at once: a divisor of the epoch and of a stage of the task, at
    most 25 and at most 64 MiB."""
    per_step = 8 * recipe.batch * task.tokens * max(1, task.in_dim)
    most = max(1, min(25, (64 << 20) // per_step))
    return max(k for k in range(1, most + 1) if math.gcd(recipe.epoch, task.stage) % k == 0)


def draw_block(
    run: Run, block: int, device: torch.device, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one block of steps of one run: (steps, batch, tokens, dim); written to
    tensors of that size, if there are."""
    recipe, steps = run.recipe, block_steps(run.task, run.recipe)
    first = block * steps
    if recipe.protocol == "replay":
        block %= recipe.epoch // steps
    if recipe.protocol == "original":
        drawn = run.task.original(
            run.seed, recipe.batch, recipe.epoch, first % recipe.epoch, steps, device
        )
    else:
        generator = generator_of(device, derive(run.seed, "data", block))
        if into is not None:
            run.task.fill(*into, generator, first)
            return into
        drawn = run.task.sample(generator, steps * recipe.batch, first)
    x, target = (t.unflatten(0, (steps, -1)) for t in drawn)
    return (x, target) if into is None else (into[0].copy_(x), into[1].copy_(target))
