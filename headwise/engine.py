"""Train many models at once: `train(runs) -> rows`.

Runs that share a shape, a task and the static part of a recipe are stacked: every parameter has a leading model axis
and one step moves them all, each with its own seed, data, learning rate and schedule. What a run sees is a pure
function of its seed and the step, so a run killed anywhere goes on as if nothing had happened, and on a CPU its bits
do not depend on the runs beside it.

Imports the standard library, torch, numpy and safetensors only, so that it runs wherever torch does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import headwise
from headwise.files import write_whole
from headwise.models import INITS, build, fresh, split_key
from headwise.progress import Progress
from headwise.shape import Shape, UsageError, nearest
from headwise.tasks import Task, task_name, task_of

SCHEDULES = ("cosine", "published", "constant")
PROTOCOLS = ("stream", "replay")
PRECISIONS = ("fp32", "tf32", "bf16")
DIVERGED = 100.0  # an epoch's mean loss above this many times the zero predictor's, or not a number
ALIGN = 16  # floats: a model's numbers start on a 64-byte line, so that products take the same path at any place in a stack
HELD_OUT_SEED = 0x48454C44  # one held-out set a task, the same for every run
HELD_OUT_BATCH = 128  # sequences of it at a time; a multiple of ALIGN, whatever the run trains on
CHECKPOINT = 1  # format; any other is not read
MEASURED = frozenset(  # what differs when the same run is made again
    {"seconds", "finished", "memory_bytes", "models", "commit", "headwise", "torch", "python", "device", "host_cpus", "resumed"}
)

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a run is trained. The defaults are the rank paper's optimiser on fresh data."""

    steps: int
    batch: int = 256
    lr: float = 0.01
    schedule: str = "cosine"  # after a linear warm-up; "published": by epoch, the first at 0; "constant"
    warmup: float = 0.05  # share of the steps
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    protocol: str = "stream"  # fresh data at every step; "replay": the same epoch again and again
    epoch: int = 100  # steps over which the training loss is averaged
    init: str = "library"
    precision: str = "fp32"
    held_out: int = 12_800  # fresh sequences on which the held-out error is measured, rounded up to batches of 128
    evals: int = 10  # how often it is measured along the way

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "epoch", "held_out", "evals"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name, low, high in (
            ("lr", 0, math.inf),
            ("warmup", 0, 1),
            ("weight_decay", 0, math.inf),
            ("beta1", 0, 1),
            ("beta2", 0, 1),
            ("eps", 0, 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or math.isinf(value):
                raise UsageError(f"{name} must be a number from {low} to {high}, got {value!r}")
            object.__setattr__(self, name, float(value))  # 1 and 1.0 are one run
        for name, choices in (("schedule", SCHEDULES), ("protocol", PROTOCOLS), ("init", INITS), ("precision", PRECISIONS)):
            if getattr(self, name) not in choices:
                raise UsageError(f"unknown {name} {getattr(self, name)!r}; {nearest(str(getattr(self, name)), choices)}")
        for name in ("beta1", "beta2"):
            if getattr(self, name) == 1:
                raise UsageError(f"{name} must be below 1, got {getattr(self, name)}")
        if self.steps % self.epoch:
            raise UsageError(f"steps must be a multiple of epoch, got steps {self.steps}, epoch {self.epoch}")

    @property
    def epochs(self) -> int:
        return self.steps // self.epoch

    def rates(self) -> Any:
        """The learning rate of every step (numpy, float64)."""
        if self.schedule == "constant":
            return np.full(self.steps, self.lr)
        if self.schedule == "published":  # constant within an epoch; epoch 0 at rate 0; peak at w - 1; floor 0
            e, total, w = np.arange(self.epochs), self.epochs, self.epochs // 20
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
        if not shape.vocab_size and shape.dim - shape.position_dim != task.dim:
            beside = f" beside {shape.position_dim} of positions" if shape.position_dim else ""
            raise UsageError(f"a shape's dim must be its task's{beside}, got dim {shape.dim}, task dim {task.dim}")
        if shape.positions != "none" and shape.num_positions < task.tokens:
            raise UsageError(f"num_positions must be at least the task's {task.tokens} tokens, got {shape.num_positions}")

    def spec(self) -> dict[str, Any]:
        """The run as plain values; `Run.of` is its inverse."""
        return {
            "shape": dataclasses.asdict(self.shape),
            "task": {"name": task_name(self.task), **dataclasses.asdict(self.task)},
            "recipe": dataclasses.asdict(self.recipe),
            "seed": self.seed,
        }

    @classmethod
    def of(cls, spec: dict[str, Any]) -> Run:
        """A run from `spec()`, also after a round trip through JSON."""
        task = dict(spec["task"])
        return cls(Shape.of(spec["shape"]), task_of(task.pop("name"), task), Recipe(**spec["recipe"]), spec["seed"])

    @functools.cached_property
    def id(self) -> str:
        text = json.dumps(self.spec(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def stack_key(run: Run) -> Any:
    """Runs with equal keys can be stacked: they may differ in seed, rate, schedule, protocol and start, and in how
    they cut the same width into heads."""
    static = dataclasses.replace(run.recipe, lr=1.0, schedule="constant", warmup=0.0, weight_decay=0.0, protocol="stream", init="library")
    return split_key(run.shape), run.task, static


def derive(seed: int, *purpose: str | int) -> int:
    """A seed for one purpose, independent of every other purpose's."""
    text = json.dumps([seed, *purpose])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def pick_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:1 as a device that is there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise UsageError(f"unknown device {name!r}; {nearest(name, ('auto', 'cpu', 'cuda'))}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {name} is not there: torch {torch.__version__} sees no GPU; choices: auto, cpu")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {name} is not there: torch sees {torch.cuda.device_count()} GPUs")
    return torch.device(name)


# ---- data: a pure function of (seed, block)


def block_steps(task: Task, recipe: Recipe) -> int:
    """How many steps' data are drawn at once: a divisor of the epoch, at most 25 and at most 64 MiB."""
    per_step = 8 * recipe.batch * task.tokens * task.dim
    most = max(1, min(25, (64 << 20) // per_step))
    return max(k for k in range(1, most + 1) if recipe.epoch % k == 0)


def draw_block(run: Run, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one block of steps of one run: (steps, batch, tokens, dim)."""
    recipe, steps = run.recipe, block_steps(run.task, run.recipe)
    if recipe.protocol == "replay":
        block %= recipe.epoch // steps
    generator = _generator(device, derive(run.seed, "data", block))
    x, target = run.task.sample(generator, steps * recipe.batch)
    return x.unflatten(0, (steps, -1)), target.unflatten(0, (steps, -1))


# ---- a stack of models in training


@dataclass
class State:
    """One run between two epochs: everything that is needed to go on."""

    run: Run
    weights: Tensor  # (parameters,), each parameter padded to ALIGN
    mean: Tensor
    square: Tensor
    epoch: int = 0
    curve: list[float] = dataclasses.field(default_factory=list)
    held_out_curve: list[tuple[int, float | None]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    resumed: int = 0


def _layout(shape_of: Sequence[Tensor]) -> tuple[list[tuple[int, int]], int]:
    """Where each parameter of one model lies in its flat row: (start, length), and the row's length."""
    places, at = [], 0
    for p in shape_of:
        length = p[0].numel()
        places.append((at, length))
        at += -(-length // ALIGN) * ALIGN
    return places, at


class _Stack:
    """The runs of one stack on one device: flat weights and moments, and the step."""

    def __init__(self, states: list[State], device: torch.device) -> None:
        self.runs, self.device = [s.run for s in states], device
        self.recipe, self.task = self.runs[0].recipe, self.runs[0].task
        with torch.device("meta"):
            splits = [(len(list(same)), shape) for shape, same in itertools.groupby(run.shape for run in self.runs)]
            self.model = build(self.runs[0].shape, models=len(states), splits=splits)
        self.places, _ = _layout(list(self.model.parameters()))
        self.weights, self.mean, self.square = (
            torch.stack([getattr(s, name) for s in states]).to(device) for name in ("weights", "mean", "square")
        )
        self._bind()
        self.params = list(self.model.parameters())
        self.steps = block_steps(self.task, self.recipe)
        self.rates = torch.zeros(self.steps, 3, len(states), 1, device=device)  # step size, 1/sqrt(1 - b2^t), decay
        self.losses = torch.zeros(self.steps, len(states), device=device)
        self.inputs: Tensor | None = None
        self.targets: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.tables = [_rate_table(run.recipe) for run in self.runs]

    def _bind(self) -> None:
        """Make the module's parameters views of the flat rows."""
        views = {
            name: torch.nn.Parameter(self.weights[:, at : at + length].view(p.shape))
            for (name, p), (at, length) in zip(self.model.named_parameters(), self.places, strict=True)
        }
        for name, view in views.items():
            module, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(module), leaf, view)

    # -- one block of steps

    def run_block(self, block: int) -> Tensor:
        """Train through one block; returns the losses before each update, (steps, models)."""
        drawn = [draw_block(run, block, self.device) for run in self.runs]
        self._load("inputs", torch.stack([x for x, _ in drawn], 1))
        self._load("targets", torch.stack([t for _, t in drawn], 1))
        now = slice(block * self.steps, (block + 1) * self.steps)
        self.rates.copy_(torch.from_numpy(np.stack([t[now] for t in self.tables], -1)[..., None]))
        if self.device.type == "cuda":
            if self.graph is None:
                self._capture()
            assert self.graph is not None
            self.graph.replay()
        else:
            self._steps()
        return self.losses

    def _load(self, name: str, value: Tensor) -> None:
        buffer = getattr(self, name)
        if buffer is None or self.device.type == "cpu":
            setattr(self, name, value)
        else:
            buffer.copy_(value)

    def _steps(self) -> None:
        for i in range(self.steps):
            self._step(i)

    def _gradient(self, i: int) -> Tensor:
        assert self.inputs is not None
        assert self.targets is not None
        with _autocast(self.recipe.precision, self.device):
            outputs, _ = self.model(self.inputs[i])
        losses_M = self.task.loss(outputs.float(), self.targets[i])
        self.losses[i].copy_(losses_M.detach())
        return _flatten(torch.autograd.grad(losses_M.sum(), self.params), self.places, self.weights)

    def _step(self, i: int) -> None:
        r = self.recipe
        size_M1, correct_M1, decay_M1 = self.rates[i]
        grad = self._gradient(i)
        self.mean.lerp_(grad, 1 - r.beta1)
        self.square.mul_(r.beta2).addcmul_(grad, grad, value=1 - r.beta2)
        update = self.mean / (self.square.sqrt().mul_(correct_M1).add_(r.eps))
        if any(run.recipe.weight_decay for run in self.runs):
            self.weights.mul_(decay_M1)
        self.weights.sub_(update.mul_(size_M1))

    def _capture(self) -> None:
        """The whole block of steps as one CUDA graph; gradients are tried first so that nothing is set up inside it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._gradient(0)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._steps()

    # -- measuring and taking apart

    @torch.no_grad()
    def held_out(self) -> Tensor:
        """The error on fresh sequences, batch by batch: (models, batches). The same sequences for every run of a task."""
        count = math.ceil(self.recipe.held_out / HELD_OUT_BATCH)
        errors = []
        for batch in range(count):
            generator = _generator(self.device, derive(HELD_OUT_SEED, "held out", batch))
            x, target = self.task.sample(generator, HELD_OUT_BATCH)
            wide = (len(self.runs), *(-1,) * x.ndim)
            with _autocast(self.recipe.precision, self.device):
                outputs, _ = self.model(x.expand(wide))
            errors.append(self.task.loss(outputs.float(), target.expand(wide)))
        return torch.stack(errors, 1).double().cpu()

    def parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Weights and moments of each run, on the CPU."""
        yield from zip(self.weights.cpu().clone(), self.mean.cpu().clone(), self.square.cpu().clone(), strict=True)

    def named_weights(self, m: int) -> dict[str, Tensor]:
        """Model m's parameters by name."""
        return {name: p.detach()[m].cpu().contiguous() for name, p in self.model.named_parameters()}


def _flatten(grads: Sequence[Tensor], places: list[tuple[int, int]], like: Tensor) -> Tensor:
    """Gradients in the layout of the flat rows, zeros in the gaps."""
    pieces, models, end = [], like.shape[0], like.shape[1]
    ends = [at for at, _ in places[1:]] + [end]
    for grad, (at, length), stop in zip(grads, places, ends, strict=True):
        pieces.append(grad.reshape(models, -1))
        if stop > at + length:
            pieces.append(like.new_zeros(models, stop - at - length))
    return torch.cat(pieces, 1)


def _rate_table(recipe: Recipe) -> Any:
    """(steps, 3) float32: lr/(1 - b1^t), 1/sqrt(1 - b2^t), 1 - lr * weight decay, computed in float64."""
    t = np.arange(1, recipe.steps + 1)
    lr = recipe.rates()
    table = lr / (1 - recipe.beta1**t), 1 / np.sqrt(1 - recipe.beta2**t), 1 - lr * recipe.weight_decay
    with np.errstate(over="ignore"):  # an absurd rate diverges, as it should
        return np.stack(table, 1).astype(np.float32)


def _autocast(precision: str, device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


@contextlib.contextmanager
def _numerics(precision: str, device: torch.device) -> Iterator[None]:
    """One thread on a CPU, so that bits depend on no core count, and no denormals, which sharp softmaxes are full of
    and which cost a hundred times a normal number; TF32 products on a GPU only where asked for."""
    threads, tf32 = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    try:
        if device.type == "cpu":
            torch.set_num_threads(1)
            torch.set_flush_denormal(True)
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
        torch.backends.cuda.matmul.allow_tf32 = tf32


# ---- starting, saving, finishing one run


def _begin(run: Run) -> State:
    model = fresh(run.shape, run.recipe.init, [run.seed], lambda seed: _generator(torch.device("cpu"), derive(seed, "init")))
    params = list(model.parameters())
    places, length = _layout(params)
    weights = torch.zeros(length)
    for p, (at, size) in zip(params, places, strict=True):
        weights[at : at + size] = p.detach().flatten()
    return State(run, weights, torch.zeros(length), torch.zeros(length))


def _checkpoint_path(folder: Path, run: Run) -> Path:
    return folder / run.id / "checkpoint.safetensors"


def _save(folder: Path, state: State) -> None:
    from safetensors.torch import save

    about = {name: getattr(state, name) for name in ("epoch", "curve", "held_out_curve", "seconds", "resumed")}
    tensors = {"weights": state.weights, "mean": state.mean, "square": state.square}
    told = {"format": str(CHECKPOINT), "run": state.run.id, "state": json.dumps(about)}
    write_whole(_checkpoint_path(folder, state.run), save(tensors, told))


def _load(folder: Path | None, run: Run) -> State:
    """The run's state from its checkpoint, else from the start: the row is the same, so what cannot be read costs only time."""
    start = _begin(run)
    if folder is None or not _checkpoint_path(folder, run).exists():
        return start
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(_checkpoint_path(folder, run), "pt") as f:
            told = f.metadata() or {}
            if (told["format"], told["run"]) != (str(CHECKPOINT), run.id):
                raise ValueError(f"format {told['format']} of run {told['run']}")
            state = State(run, *(f.get_tensor(name) for name in ("weights", "mean", "square")), **json.loads(told["state"]))
        if not 0 < state.epoch < run.recipe.epochs or len(state.curve) != state.epoch:
            raise ValueError(f"epoch {state.epoch} of {run.recipe.epochs}")
        if any(t.shape != start.weights.shape or t.dtype != torch.float32 for t in (state.weights, state.mean, state.square)):
            raise ValueError("sizes of another model")
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as e:
        why = " ".join(f"{type(e).__name__}: {e}".split())
        print(f"headwise: run {run.id} starts again, its checkpoint cannot be used ({why})", file=sys.stderr, flush=True)
        return start
    state.held_out_curve = [(e, v) for e, v in state.held_out_curve]
    state.resumed += 1
    return state


@functools.cache
def commit() -> str:
    """The commit of the code that runs, with a + if the tree differs from it; HEADWISE_COMMIT where there is no checkout."""
    if "HEADWISE_COMMIT" in os.environ:
        return os.environ["HEADWISE_COMMIT"]
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return ""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=False).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "headwise")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except OSError:
        return ""


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def row_of(state: State, errors: Tensor | None, models: int, device: torch.device) -> Row:
    """A finished run as one flat row: what it was, what came out, and where it ran."""
    run, spec = state.run, state.run.spec()
    shape, task = spec["shape"], spec["task"]
    finite = [x for x in state.curve if math.isfinite(x)]
    spread = errors.std().item() / math.sqrt(len(errors)) if errors is not None and len(errors) > 1 else None
    return {
        "id": run.id,
        "status": "done" if errors is not None else "diverged",
        **{k: v for k, v in shape.items() if k != "extras"},
        "params": run.shape.params,
        "flops": run.shape.flops(run.task.tokens, batch=run.recipe.batch, training=True),
        "task": task.pop("name"),
        **{f"task_{k}": v for k, v in task.items()},
        **spec["recipe"],
        "seed": run.seed,
        # the recipe's count of sequences, then the error on them
        "held_out_sequences": run.recipe.held_out,
        "held_out": errors.mean().item() if errors is not None else None,
        "held_out_se": spread,
        "train_best": min(finite) if finite else None,
        "train_last": state.curve[-1] if errors is not None else None,
        "zero_error": run.task.baselines()["zero"],
        "epochs_done": state.epoch,
        "curve": [x if math.isfinite(x) else None for x in state.curve],
        "held_out_curve": state.held_out_curve,
        "seconds": round(state.seconds, 3),
        "models": models,
        "memory_bytes": _memory(device),
        "device": _device_name(device),
        "host_cpus": os.cpu_count(),
        "resumed": state.resumed,
        "commit": commit(),
        "headwise": headwise.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


# ---- train


def train(
    runs: Sequence[Run],
    *,
    device: str = "auto",
    folder: Path | None = None,
    done: Callable[[Row], None] | None = None,
    advance: Callable[[int], None] | None = None,
    checkpoint_every: float = 30.0,
    keep_weights: bool = False,
) -> list[Row]:
    """Train every run, stacked where their shapes agree; rows in the order of the runs.

    With `folder`, each run leaves a checkpoint in folder/<id> at the end of an epoch, at most every
    `checkpoint_every` seconds, and goes on from it. `done` gets each row as soon as it is there, `advance` the
    number of model-steps just made (a progress bar is shown when it is not given).
    """
    where = pick_device(device)
    rows: dict[str, Row] = {}

    unique = {run.id: run for run in runs}

    def finish(row: Row) -> None:
        rows[row["id"]] = row
        if done is not None:
            done(row)
        if folder is not None:
            _checkpoint_path(folder, unique[row["id"]]).unlink(missing_ok=True)

    bar = None if advance else Progress(sum(r.recipe.steps for r in unique.values()), f"{len(unique)} runs")
    forward = advance or (bar.advance if bar else lambda n: None)
    for stack in stacks([_load(folder, run) for run in unique.values()], where):
        with _numerics(stack[0].run.recipe.precision, where):
            _train_stack(stack, where, folder, finish, forward, checkpoint_every, keep_weights)
    if bar:
        bar.close()
    return [rows[run.id] for run in runs]


def most_models(run: Run, device: torch.device) -> int:
    """How many models of this kind are stacked at most.

    On a CPU as many as keep a step's activations near the cache, and one alone when its bits would depend on its
    place; on a GPU as many as fit a third of the memory.
    """
    recipe, tokens = run.recipe, run.task.tokens
    step = run.shape.activation_bytes(tokens, batch=recipe.batch) + 20 * run.shape.params
    if device.type == "cpu":
        return max(1, min(64, (32 << 20) // step)) if _fills_lines(run) else 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(64, int(free / 3) // (4 * step)))


def _fills_lines(run: Run) -> bool:
    """Whether one model's activations and gradients fill whole cache lines, so that its neighbours' start on one: the
    matrix library takes another path, with other bits, where they do not, and for a matrix of one row or column."""
    with torch.device("meta"):
        matrices = [p for name, p in build(run.shape).named_parameters() if name.endswith("weight") and p.ndim == 2]
    sizes = [run.recipe.batch * run.task.tokens, *(p.numel() for p in matrices)]
    return not any(size % ALIGN for size in sizes) and all(min(p.shape) > 1 for p in matrices)


def stacks(states: Sequence[State], device: torch.device) -> list[list[State]]:
    """States that can be trained together: equal keys, equal epochs, no more than fit."""
    groups: dict[Any, list[State]] = {}
    for state in states:
        groups.setdefault((stack_key(state.run), state.epoch), []).append(state)
    out = []
    for group in groups.values():
        group.sort(key=lambda state: state.run.shape.num_heads)  # equal shapes side by side
        most = most_models(group[0].run, device)
        parts = math.ceil(len(group) / most)
        size = math.ceil(len(group) / parts)
        out += [group[i : i + size] for i in range(0, len(group), size)]
    return out


def _train_stack(
    states: list[State],
    device: torch.device,
    folder: Path | None,
    finish: Callable[[Row], None],
    advance: Callable[[int], None],
    checkpoint_every: float,
    keep_weights: bool,
) -> None:
    recipe, models = states[0].run.recipe, len(states)
    stack, saved, began = _Stack(states, device), time.monotonic(), time.monotonic()
    blocks = recipe.epoch // stack.steps
    limit = DIVERGED * states[0].run.task.baselines()["zero"]
    eval_epochs = {round(recipe.epochs * (i + 1) / recipe.evals) for i in range(recipe.evals)} - {0, recipe.epochs}
    advance(states[0].epoch * recipe.epoch * models)
    for epoch in range(states[0].epoch, recipe.epochs):
        total = torch.zeros(len(states), dtype=torch.float64)
        for block in range(epoch * blocks, (epoch + 1) * blocks):
            total += stack.run_block(block).double().sum(0).cpu()
        advance(recipe.epoch * len(states))
        now = time.monotonic()
        for state, loss in zip(states, (total / recipe.epoch).tolist(), strict=True):
            state.epoch, state.seconds = epoch + 1, state.seconds + (now - began) / len(states)
            state.curve.append(loss)
        began = now
        lost = [i for i, s in enumerate(states) if not s.curve[-1] <= limit]
        if lost:
            stack, states = _drop(stack, states, lost, models, device, finish)
            advance(len(lost) * (recipe.epochs - epoch - 1) * recipe.epoch)
            if not states:
                return
        if epoch + 1 in eval_epochs:
            for state, error in zip(states, stack.held_out().mean(1).tolist(), strict=True):
                state.held_out_curve.append((epoch + 1, error if math.isfinite(error) else None))
        if folder is not None and now - saved >= checkpoint_every and epoch + 1 < recipe.epochs:
            _take(stack, states)
            for state in states:
                _save(folder, state)
            saved = time.monotonic()
    errors = stack.held_out()
    for m, state in enumerate(states):
        error = errors[m].mean().item()
        state.held_out_curve.append((recipe.epochs, error if math.isfinite(error) else None))
        if folder is not None and keep_weights:
            _keep(folder, state, stack.named_weights(m))
        finish(row_of(state, errors[m] if error <= limit else None, models, device))


def _take(stack: _Stack, states: list[State]) -> None:
    for state, (weights, mean, square) in zip(states, stack.parts(), strict=True):
        state.weights, state.mean, state.square = weights, mean, square


def _drop(
    stack: _Stack, states: list[State], lost: list[int], models: int, device: torch.device, finish: Callable[[Row], None]
) -> tuple[_Stack, list[State]]:
    """Record the runs that diverged and go on without them; the others' numbers are copied as they are."""
    _take(stack, states)
    for i in lost:
        finish(row_of(states[i], None, models, device))
    rest = [s for i, s in enumerate(states) if i not in lost]
    return (_Stack(rest, device) if rest else stack), rest


def _keep(folder: Path, state: State, weights: dict[str, Tensor]) -> None:
    from safetensors.torch import save

    write_whole(folder / state.run.id / "weights.safetensors", save(weights, {"run": json.dumps(state.run.spec())}))
