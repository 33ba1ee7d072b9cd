"""Train one decoder on a text: `pretrain(Pretraining(...)) -> row`.

The other regime than `headwise.training`: one model of any size instead of hundreds of small ones,
on one device or, started by torchrun, on many. A step sees the same rows however many processes
share it and however many micro-batches its gradient is summed over. A run that was killed resumes
from its last checkpoint; on a CPU its numbers are those of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.device import memory, numerics, pick_device, provenance
from headwise.errors import UsageError, nearest
from headwise.lm import checkpoint
from headwise.lm.checkpoint import TrainingState
from headwise.lm.corpus import Corpus, check_length, held_out_starts, load, rows_at
from headwise.lm.distributed import (
    all_reduce,
    broadcast_result,
    gradient_sync,
    is_sharded,
    local_device,
    parallelise,
    wait_for_all,
)
from headwise.lm.evaluate import (
    COLUMNS,
    RECALL_COLUMNS,
    AsyncNumbers,
    Evaluator,
    HeldOut,
    logits_of,
    nats_of,
    to_device,
)
from headwise.lm.launch import World
from headwise.lm.optim import Optimiser, lr_multiplier
from headwise.lm.peak_flops import peak_flops
from headwise.lm.spec import COMPILED, SHARDS, Pretraining
from headwise.lm.text_files import find_text, find_tokenizer
from headwise.model.init import initialise
from headwise.model.transformer import Decoder
from headwise.progress import Progress
from headwise.rows import CHECKPOINT_FILE, WEIGHTS_FILE, Row
from headwise.seeds import derive, generator_of
from headwise.signals import Stop, Stopped, hand_on, saving

CURVE_POINTS = 1000  # of a row's loss curve, at most
# Flags that processes sum: one process asks for a checkpoint, any number of them for a stop.
SAVE, STOP = 1.0, 2.0


# ---- one run, from start to row


def pretrain(
    run: Pretraining,
    *,
    device: str = "auto",
    folder: Path | None = None,
    cache: Path | None = None,
    world: World | None = None,
    accumulate: int = 1,
    shard: str = "ddp",
    compiled: str = "",
    peak: float | None = None,
    checkpoint_every: float = 60.0,
    keep: bool = True,
    done: Callable[[Row], None] | None = None,
    quiet: bool = False,
    stop: Stop | None = None,
    advance: Callable[[int], None] | None = None,
) -> Row:
    """Train a decoder, evaluate it on the part of the text that it has not seen; returns its row.

    folder            the run leaves a checkpoint in folder/<id> every `checkpoint_every` seconds,
                      resumes from it, and with `keep` leaves its weights there
    cache             a folder that keeps token ids
    world             this process among several; each of them calls this, and the first one writes
    accumulate        micro-batches per step and process
    shard             how several processes share the model: "ddp" or "fsdp"
    compiled          "model": as a whole, the fastest; "blocks": block by block, soon compiled
                      where many shapes are trained, and what several processes use
    peak              what one device can do, operations per second; known for common GPUs
    done              called with the row before the checkpoint is removed
    stop              asked after every step. Ctrl-C, and whatever else it hears, has a checkpoint
                      written after the step that is under way and raises `Stopped`, a
                      KeyboardInterrupt; several processes agree on the step
    advance           called with the number of steps that were just made
    """
    world = world or World()
    place = local_device(world, pick_device(device))
    check_execution(run, world, accumulate, shard, compiled, peak)
    if compiled and world.size > 1:
        compiled = "blocks"
    path = None if folder is None else folder / run.id / CHECKPOINT_FILE

    # Without a folder nothing can be saved, so a signal does what it always does.
    unheard = contextlib.nullcontext(Stop(hand_on))
    listening = unheard if path is None else saving(stop)
    with numerics(run.precision, place), allow_many_shapes(), listening as heard:
        # ---- data, model, and the state of an earlier start
        corpus = _load_shared(run, cache, world)
        trainer = Trainer(run, corpus, place, world, accumulate, shard, compiled)
        evaluator = Evaluator(run, corpus, trainer.model, place, world, bool(compiled))
        if peak is None and place.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(place), run.precision)
        # A checkpoint of an earlier start replaces parameters, moments and the state; without one
        # the run begins at step 0.
        if path is not None:
            saved = checkpoint.resume(path, run, trainer.optimiser, world)
            trainer.state = saved or trainer.state
        state = trainer.state
        first_step = len(state.losses)
        bar = None
        if world.is_main and not quiet:
            bar = Progress(run.steps, f"pretrain {run.id}", begun=first_step)

        # ---- train, and evaluate now and then
        held_out: HeldOut | None = None
        eval_steps = _eval_steps(run)
        last_saved = time.monotonic()
        while trainer.steps < run.steps:
            start = time.monotonic()
            overdue = path is not None and start - last_saved >= checkpoint_every
            flags = trainer.step(STOP * heard.asked() + SAVE * (world.is_main and overdue))
            if world.size == 1:
                flags = max(flags, STOP * heard.asked())
            made = trainer.steps
            evaluation_due = made in eval_steps
            # The first step compiles and is not timed, so it must end before the clock starts.
            must_read = flags or evaluation_due or made == first_step + 1
            if must_read and not trainer.diverged:
                flags = max(flags, trainer.read_loss())
            if made > first_step + 1:
                state.seconds += time.monotonic() - start
                state.timed_steps += 1
            if trainer.diverged:
                break
            # An evaluation is part of the state that a checkpoint holds, so it comes first.
            if evaluation_due:
                held_out = evaluator.held_out()
                state.evaluations.append((made, held_out.bits_per_byte))
                if trainer.diverged:
                    break
            if flags and path is not None and made < run.steps:
                checkpoint.save(path, run, trainer.optimiser, state, world)
                last_saved = time.monotonic()
                if flags >= STOP:
                    wait_for_all(world)
                    raise Stopped(heard.number or signal.SIGTERM, [(run.id, made)])
            if bar is not None:
                bar.advance(1, _note(trainer, peak))
            if advance is not None:
                advance(1)

        # ---- the finished model
        # A run that diverged has a row, but no results and no weights.
        recall: Row = dict.fromkeys(RECALL_COLUMNS)
        if trainer.diverged:
            held_out = None
        else:
            assert held_out is not None
            recall = evaluator.recall()
            if bar is not None:
                bits = f"held out {held_out.bits_per_byte:.4f} bits per byte"
                bar.close(f"{bits}, {_note(trainer, peak)}")
        execution = {
            "peak_flops": peak,
            "processes": world.size,
            "accumulate": accumulate,
            "shard": shard if world.size > 1 else None,
            "compiled": compiled,
        }
        row = _row(trainer, held_out, recall, execution)
        if held_out is not None and path is not None and keep:
            weights = path.with_name(WEIGHTS_FILE)
            checkpoint.save_weights(weights, run, trainer.optimiser, world)
        # The row is kept by `done` before the checkpoint goes, so that a kill in between loses
        # nothing.
        if world.is_main:
            if done is not None:
                done(row)
            if path is not None:
                checkpoint.remove(path)
    return row


def check_execution(
    run: Pretraining, world: World, accumulate: int, shard: str, compiled: str, peak: float | None
) -> None:
    """Refuse a way to carry out a run that does not exist."""
    if accumulate < 1 or run.rows % (world.size * accumulate):
        raise UsageError(
            f"processes times accumulate must divide the {run.rows} rows of a step, got "
            f"{world.size} processes, accumulate {accumulate}"
        )
    if shard not in SHARDS:
        raise UsageError(f"unknown shard {shard!r}; {nearest(shard, SHARDS)}")
    if compiled not in ("", *COMPILED):
        raise UsageError(f"unknown compilation {compiled!r}; {nearest(compiled, COMPILED)}")
    if peak is not None and not 0 < peak < math.inf:
        raise UsageError(f"peak-tflops must be above 0, got {peak / 1e12:g}")
    if shard != SHARDS[0] and world.size == 1:
        raise UsageError(f"shard {shard} is for several processes, started by torchrun; got one")


@contextlib.contextmanager
def allow_many_shapes() -> Iterator[None]:
    """A sweep compiles more shapes in one process than torch expects. By default torch gives up
    compiling after eight."""
    from torch._dynamo import config

    with config.patch(recompile_limit=256, accumulated_recompile_limit=1024):
        yield


def load_corpus(run: Pretraining, cache: Path | None) -> Corpus:
    """The ids that a run learns from; refuses a text that is too short for it."""
    tokenizer, _ = find_tokenizer(run.tokenizer)
    text = find_text(run.source)
    corpus = load(text, tokenizer, cache, run.digest)
    check_length(corpus, run.length, text.name)
    held_out_starts(corpus, run.length, 1, run.evaluated_on)
    return corpus


def _load_shared(run: Pretraining, cache: Path | None, world: World) -> Corpus:
    """With a cache the main process makes the ids first, and the others map them."""
    if cache is not None and world.size > 1:
        broadcast_result(world, lambda: len(load_corpus(run, cache).ids))
    return load_corpus(run, cache)


def _eval_steps(run: Pretraining) -> set[int]:
    """After which steps the model is evaluated: evenly spread, the last one among them."""
    count = min(run.evals, run.steps)
    return {round(run.steps * (i + 1) / count) for i in range(count)} - {0}


# ---- one model in training


class Trainer:
    """A model, its optimiser and its state between two steps.

    The host runs one step ahead of the device: a step's loss is read while the next one is under
    way, so `state.losses` may lack the last step's until `read_loss`.
    """

    def __init__(
        self,
        run: Pretraining,
        corpus: Corpus,
        device: torch.device,
        world: World | None = None,
        accumulate: int = 1,
        shard: str = "ddp",
        compiled: str = "",
    ) -> None:
        self.run = run
        self.corpus = corpus
        self.device = device
        self.world = world or World()
        self.accumulate = accumulate
        self.state = TrainingState()
        self.pending: AsyncNumbers | None = None  # of the last step, not read yet

        # What the constructor draws is overwritten. Every process draws the same weights from the
        # run's own seed.
        with torch.random.fork_rng(devices=[]):
            self.model = Decoder(run.shape)
        generator = generator_of(torch.device("cpu"), derive(run.seed, "init"))
        initialise(self.model, "normal", generator)
        self.model.to(device)
        self.model.prepare(run.length)

        # As a whole: one graph of model and loss. By blocks: all blocks have one graph, which is
        # compiled once.
        self.nats_of: Callable[[Tensor, Tensor], Tensor] = nats_of
        self.loss_of: Callable[[Trainer, Tensor], Tensor] = _loss_of
        if compiled == "model":
            self.loss_of = torch.compile(_loss_of, dynamic=False)
        elif compiled == "blocks":
            self.nats_of = torch.compile(nats_of, dynamic=False)
            for block in self.model.blocks:
                block.compile(dynamic=False)

        self.module = parallelise(self.model, shard, self.world, device)
        self.named = dict(self.model.named_parameters())
        # Muon's products run in the precision of training.
        dtype = torch.bfloat16 if run.precision == "bf16" else torch.float32
        self.optimiser = Optimiser(
            self.named, run.shape, run.optimiser, run.weight_decay, self.world, dtype
        )

    @property
    def steps(self) -> int:
        """Steps made, also the one whose loss is not read yet."""
        return len(self.state.losses) + (self.pending is not None)

    @property
    def diverged(self) -> bool:
        """Whether the last loss that was read, or the last evaluation, is not finite."""
        losses, evaluations = self.state.losses, self.state.evaluations
        if evaluations and evaluations[-1][1] is None:
            return True
        return bool(losses) and not math.isfinite(losses[-1])

    def step(self, flag: float = 0.0) -> float:
        """Make one step, and read the loss of the step before.

        Processes agree on what to do next by a flag that is summed with the loss. With one process
        the flag is returned at once; with several, the sum of all flags of the step before.
        """
        # The loss and the flag travel in one tensor, so that processes agree with one reduction.
        run, number = self.run, self.steps
        rows = run.rows // (self.world.size * self.accumulate)  # of a micro-batch
        loss_and_flags = torch.zeros(2, dtype=torch.float64, device=self.device)
        loss_and_flags[1] = flag

        # ---- forward and backward, micro-batch by micro-batch
        for i in range(self.accumulate):
            # Rows of the step are dealt out by process and micro-batch. So any number of either
            # sees the same rows.
            first = number * run.rows + (self.world.rank * self.accumulate + i) * rows
            ids = to_device(rows_at(self.corpus, run.length, run.seed, first, rows), self.device)
            with gradient_sync(self.module, self.world, enabled=i == self.accumulate - 1):
                nats = self.loss_of(self, ids)
                # DDP and FSDP average gradients over the processes; the step wants their sum.
                loss = nats.sum() * (self.world.size / run.batch_tokens)
                loss.backward()
            loss_and_flags[0] += nats.detach().sum(dtype=torch.float64)

        # ---- optimiser
        lr = run.lr * lr_multiplier(run.schedule, number, run.steps, run.warmup, run.warmdown)
        self.optimiser.step(lr, self._clip_scale())
        self.model.zero_grad()

        # ---- the loss of the step before, while the device works on this one
        raised = self.read_loss()
        self.pending = AsyncNumbers(all_reduce(self.world, loss_and_flags))
        return raised if self.world.size > 1 else flag

    def read_loss(self) -> float:
        """Wait for the loss of the last step; returns the sum of all processes' flags in it."""
        if self.pending is None:
            return 0.0
        loss, flags = self.pending.read()
        self.pending = None
        self.state.losses.append(loss / self.run.batch_tokens)
        return flags

    @torch.no_grad()
    def _clip_scale(self) -> Tensor | None:
        """How many times the gradient's norm exceeds the bound, at least 1: gradients are divided
        by it."""
        if not self.run.clip:
            return None
        # The norm of all gradients, over all processes where they lie in shards.
        grads = [p.grad for p in self.named.values() if p.grad is not None]
        norm: Any = nn.utils.get_total_norm(grads)
        if is_sharded(norm):
            norm = norm.full_tensor()
        return (norm / self.run.clip).clamp_min(1.0).float()  # torch's fused AdamW wants float32

    def tokens_per_second(self) -> float | None:
        """Training throughput of all processes, once a step was timed."""
        if not self.state.timed_steps:
            return None
        return self.state.timed_steps / self.state.seconds * self.run.batch_tokens

    def utilisation(self, peak: float | None) -> float | None:
        """MFU: the share of what the devices can do."""
        if not self.state.timed_steps or not peak:
            return None
        steps_per_second = self.state.timed_steps / self.state.seconds
        return steps_per_second * self.run.flops / (peak * self.world.size)


def _loss_of(trainer: Trainer, ids: Tensor) -> Tensor:
    """-log p of each token; a function, so that a compiled one does not keep its trainer alive."""
    return trainer.nats_of(logits_of(trainer.run, trainer.module, ids), ids[:, 1:])


# ---- what is reported


def _row(trainer: Trainer, held_out: HeldOut | None, recall: Row, execution: Row) -> Row:
    """A finished run as one flat row: what it was, its results, its speed, and where it ran."""
    # The curve has at most CURVE_POINTS points, each the mean of `every` steps.
    run, state, losses = trainer.run, trainer.state, trainer.state.losses
    spec = run.spec()
    shape = spec.pop("shape")
    del shape["extras"]
    every = -(-run.steps // CURVE_POINTS)
    curve = [float(np.mean(losses[i : i + every])) for i in range(0, len(losses), every)]
    finished = held_out is not None
    return {
        "id": run.id,
        "status": "done" if finished else "diverged",
        "task": "language",
        **shape,
        "params": run.shape.params,
        "flops": run.flops,
        **spec,
        **(held_out.columns() if finished else dict.fromkeys(COLUMNS)),
        **recall,
        "train_best": min((x for x in losses if math.isfinite(x)), default=None),
        "train_last": losses[-1] if finished else None,
        "steps_done": len(losses),
        "curve": [x if math.isfinite(x) else None for x in curve],
        "curve_every": every,
        "held_out_curve": state.evaluations,
        "tokens": len(losses) * run.batch_tokens,
        "tokens_per_second": trainer.tokens_per_second(),
        "mfu": trainer.utilisation(execution["peak_flops"]),
        "seconds": round(state.seconds, 3),
        "memory_bytes": memory(trainer.device),
        **execution,
        "resumed": state.resumed,
        **provenance(trainer.device),
    }


def _note(trainer: Trainer, peak: float | None) -> str:
    """Beside the progress bar: recent loss, step, speed; a narrow terminal shows the first."""
    recent = trainer.state.losses[-20:]
    note = f"loss {sum(recent) / len(recent):.4f}, " if recent else ""
    note += f"step {trainer.steps} of {trainer.run.steps}"
    if tokens := trainer.tokens_per_second():
        note += f", {tokens:,.0f} tokens/s"
    if share := trainer.utilisation(peak):
        note += f", {share:.1%} of peak"
    return note
