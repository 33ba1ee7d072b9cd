"""Train one decoder on a text: `pretrain(Pretraining(...)) -> row`.

The other regime than `engine`: one model of any size instead of hundreds of tiny ones, on one
device or, started by torchrun, on many. A step sees the same rows however many processes share it
and in however many parts its gradient is added up, and a run killed anywhere goes on from its last
checkpoint as if nothing had happened; on a CPU bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.device import memory, numerics, pick_device, provenance
from headwise.errors import UsageError, nearest
from headwise.files import whole_file
from headwise.lm.corpus import (
    Corpus,
    bigrams,
    check_length,
    find_text,
    find_tokenizer,
    held_out_rows,
    held_out_starts,
    load,
    recall_rows,
    repeated,
    rows_at,
)
from headwise.lm.distributed import (
    SHARDS,
    Ranks,
    add_up,
    all_of,
    from_first,
    mine,
    part_of,
    place,
    sending,
    sent,
    shared,
)
from headwise.lm.optim import Optimiser, rate
from headwise.lm.spec import Pretraining
from headwise.model.init import initialise
from headwise.model.transformer import Decoder
from headwise.progress import Progress
from headwise.rows import CHECKPOINT_FILE, MEASURED, WEIGHTS_FILE, Row
from headwise.seeds import derive, generator_of
from headwise.shape import Shape

JUDGED = 8  # held-out windows that count together, over which the standard error is taken
AT_ONCE = 1 << 15  # held-out tokens of a forward pass
PAIRS, RECALLED = 32, 256  # key-value pairs of a row of the recall test, and its rows
CURVE = 1000  # points of a row's loss curve at most
FORMAT = 1  # of checkpoints
COMPILED = ("model", "blocks")
EXECUTION = frozenset(
    {
        "tokens_per_second",
        "mfu",
        "peak_flops",
        "processes",
        "shard",
        "accumulate",
        "compiled",
        "source",
        "tokenizer",
    }
)
UNLIKE = (
    MEASURED | EXECUTION | {"command"}
)  # what differs when the same run is made again, elsewhere or by more processes

# bf16 products without sparsity, operations a second, by what is in a card's name; makers' figures
PEAKS = {
    "B200": 2250e12,
    "H200": 989.5e12,
    "GH200": 989.5e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.5e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX A6000": 154.8e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
}


# ---- one model in training


class Sent:
    """Numbers on their way from a device: reading them waits for them, not for all that was started
    since."""

    def __init__(self, numbers: Tensor) -> None:
        self.here, self.come = numbers, None
        if numbers.is_cuda:
            self.here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.here.copy_(numbers, non_blocking=True)
            self.come = torch.cuda.current_stream(numbers.device).record_event()

    def read(self) -> list[float]:
        if self.come is not None:
            self.come.synchronize()
        return self.here.tolist()


class Training:
    """A model, its optimiser and its loss curve between two steps."""

    def __init__(
        self,
        run: Pretraining,
        corpus: Corpus,
        device: torch.device,
        ranks: Ranks,
        accumulate: int,
        shard: str,
        compiled: str,
    ) -> None:
        self.run, self.corpus, self.device, self.ranks, self.accumulate, self.compiled = (
            run,
            corpus,
            device,
            ranks,
            accumulate,
            compiled,
        )
        with torch.random.fork_rng(devices=[]):
            self.model = Decoder(run.shape)
        initialise(
            self.model, "normal", generator_of(torch.device("cpu"), derive(run.seed, "init"))
        )
        self.model.to(device)
        self.model.prepare(run.length)
        self.nats, self.loss = _nats, _loss
        match compiled:
            case "model":
                self.loss = torch.compile(_loss, dynamic=False)
            case "blocks":
                self.nats = torch.compile(_nats, dynamic=False)
                for block in self.model.blocks:
                    block.compile(dynamic=False)
        self.module = shared(self.model, shard, ranks, device)
        self.named = dict(self.model.named_parameters())
        dtype = torch.bfloat16 if run.precision == "bf16" else torch.float32
        self.optimiser = Optimiser(
            self.named, run.shape, run.optimiser, run.weight_decay, ranks, dtype
        )
        self.losses: list[float] = []
        self.pending: Sent | None = (
            # a step's loss that is not read yet, so that the device need not wait for the host
            None
        )
        self.counts: np.ndarray | None = None  # of pairs of ids
        self.judged: list[tuple[int, float | None]] = []  # steps and bits per byte
        self.seconds, self.timed, self.resumed = (
            0.0,
            0,
            0,
        )  # timed: steps, all but the first after a start
        self.peak: float | None = None  # operations a second that one device can do

    def speed(self) -> tuple[float | None, float | None]:
        """Tokens a second, and the share of what the devices can do."""
        if not self.timed:
            return None, None
        steps = self.timed / self.seconds
        return steps * self.run.batch_tokens, steps * self.run.flops / (
            self.peak * self.ranks.world
        ) if self.peak else None

    @property
    def steps(self) -> int:
        """Steps made, the one whose loss is not read yet among them."""
        return len(self.losses) + (self.pending is not None)

    @property
    def diverged(self) -> bool:
        """Whether the last loss that was read is none."""
        return bool(self.losses) and not math.isfinite(self.losses[-1])

    def step(self, flag: bool = False) -> bool:
        """One step; whether the flag is raised, of many processes any of theirs in the step before,
        whose loss is read now."""
        run, number = self.run, self.steps
        each = run.rows // (self.ranks.world * self.accumulate)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        total[1] = float(flag)
        for part in range(self.accumulate):
            first = number * run.rows + (self.ranks.rank * self.accumulate + part) * each
            ids = self._here(rows_at(self.corpus, run.length, run.seed, first, each))
            with sending(self.module, last=part == self.accumulate - 1):
                nats = self.loss(self, ids)
                (
                    nats.sum() * (self.ranks.world / run.batch_tokens)
                ).backward()  # what is sent is averaged
            total[0] += nats.detach().sum(dtype=torch.float64)
        self.optimiser.step(
            run.lr * rate(run.schedule, number, run.steps, run.warmup, run.warmdown), self._over()
        )
        self.model.zero_grad()
        raised = self.settle()
        self.pending = Sent(add_up(self.ranks, total))
        return raised if self.ranks.world > 1 else flag

    def settle(self) -> bool:
        """Read the loss of the last step; whether any process raised its flag in it."""
        if self.pending is None:
            return False
        loss, flags = self.pending.read()
        self.pending = None
        self.losses.append(loss / self.run.batch_tokens)
        return flags > 0

    @torch.no_grad()
    def _over(self) -> Tensor | None:
        """How many times the gradient's norm is what it may be, at least 1."""
        if not self.run.clip:
            return None
        norm: Any = nn.utils.get_total_norm(
            [p.grad for p in self.named.values() if p.grad is not None]
        )
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return (whole / self.run.clip).clamp_min(1.0).float()  # torch's fused AdamW takes no other

    def _here(self, ids: Tensor) -> Tensor:
        return (
            ids.pin_memory().to(self.device, non_blocking=True)
            if self.device.type == "cuda"
            else ids
        )

    def _logits(self, module: nn.Module, ids: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.run.precision == "bf16"):
            logits, _ = module(ids[:, :-1])
        return logits

    @torch.no_grad()
    def judge(self) -> Tensor:
        """What became of the held-out windows, JUDGED at a time (batches, 6): nats, bytes and ids
        of all, and of those that could be recalled (`tokens.repeated`) how many, how many the model
        has right, and nats. The ends of documents do not count."""
        run, world = self.run, self.ranks.world
        starts = held_out_starts(self.corpus, run.length, max(1, run.eval_tokens // run.length))
        count, size = -(-len(starts) // JUDGED), max(1, AT_ONCE // (run.length * JUDGED))
        found = torch.zeros(count, 6, dtype=torch.float64)
        self.counts = bigrams(self.corpus) if self.counts is None else self.counts
        for i in range(
            0, count, size * world
        ):  # every process makes as many calls: they exchange shards
            first = i + self.ranks.rank * size
            at = min(first, (count - 1) // size * size)
            some = self._judge(starts[at * JUDGED : (at + size) * JUDGED])
            if at == first:
                found[at : at + size] = some
        return add_up(self.ranks, found.to(self.device)).cpu()

    def _judge(self, starts: np.ndarray) -> Tensor:
        assert self.counts is not None
        ids, size = held_out_rows(self.corpus, self.run.length, starts)
        hits, counts = (
            repeated(self.corpus, self.counts, ids),
            torch.ones_like(ids[:, 1:], dtype=torch.bool),
        )
        if self.corpus.end is not None:
            counts = ids[:, 1:] != self.corpus.end
        here = self._here(ids)
        with self._as_it_is():
            logits = self._logits(self.model, here)
            nats, right = (
                _nats(logits, here[:, 1:]).double().cpu(),
                (logits.argmax(-1) == here[:, 1:]).cpu(),
            )
        hits = hits & counts
        of_rows = torch.stack(
            [x.double().sum(1) for x in (nats * counts, counts, hits, hits & right, nats * hits)], 1
        )
        each = torch.cat((of_rows[:, :1], size.double().unsqueeze(1), of_rows[:, 1:]), 1)
        return torch.stack([part.sum(0) for part in each.split(JUDGED)])

    @contextlib.contextmanager
    def _as_it_is(self) -> Iterator[None]:
        """Not compiled: batches of another size would be compiled anew."""
        if not self.compiled:
            yield
            return
        with torch.compiler.set_stance("force_eager"):
            yield

    @torch.no_grad()
    def recall(self) -> dict[str, float | int | None]:
        """How often the model, shown pairs of random ids, tells the second of a pair from the
        first; every process does all of it."""
        pairs = min(PAIRS, self.run.length // 4, (self.corpus.vocab - 1) // 2)
        if not pairs:
            return {"recall": None, "recall_se": None, "recall_pairs": 0}
        ids, right = self._here(recall_rows(self.corpus, pairs, RECALLED, self.run.seed)), []
        for some in ids.split(JUDGED * 4):
            with self._as_it_is():
                logits = self._logits(self.model, some)
            right.append(
                (logits[:, 2 * pairs :: 2].argmax(-1) == some[:, 2 * pairs + 1 :: 2])
                .double()
                .mean(1)
            )
        each = torch.cat(right)
        return {
            "recall": each.mean().item(),
            "recall_se": each.std().item() / math.sqrt(len(each)),
            "recall_pairs": pairs,
        }


def _loss(training: Training, ids: Tensor) -> Tensor:
    """Of each token."""
    return training.nats(training._logits(training.module, ids), ids[:, 1:])


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    """-log of the odds that were given to each target, in float32."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none").view(
        targets.shape
    )


def ratio(over: Tensor, under: Tensor) -> tuple[float, float | None]:
    """A ratio of sums and its standard error over the parts (linearised)."""
    mean, n = (over.sum() / under.sum()).item(), len(over)
    spread = over - mean * under
    return mean, math.sqrt(
        spread.square().sum().item() * n / (n - 1)
    ) / under.sum().item() if n > 1 else None


# ---- checkpoints


def _parts(training: Training, moments: bool) -> dict[str, tuple[Tensor, nn.Parameter]]:
    """What lies here of every parameter, and of its moments, beside the parameter itself."""
    parts = {f"weights.{name}": (mine(p.detach()), p) for name, p in training.named.items()}
    owner = training.optimiser.owner
    return (
        parts | {name: (m, owner(name)) for name, m in training.optimiser.moments.items()}
        if moments
        else parts
    )


def _tensors(training: Training, moments: bool) -> dict[str, Tensor]:
    """The same, whole and on the CPU; every process takes part, the first one keeps them."""
    whole = {}
    for name, (part, like) in _parts(training, moments).items():
        full = all_of(part, like)
        if training.ranks.first:
            whole[name] = full.cpu().contiguous()
    return whole


def _save(training: Training, path: Path) -> None:
    from safetensors.torch import save_file

    tensors = _tensors(training, moments=True)
    if not training.ranks.first:
        return
    about = {name: getattr(training, name) for name in ("judged", "seconds", "timed", "resumed")}
    told = {
        "format": str(FORMAT),
        "run": json.dumps(training.run.spec()),
        "state": json.dumps(about),
    }
    tensors["losses"] = torch.tensor(training.losses, dtype=torch.float64)
    with whole_file(path) as temporary:
        save_file(tensors, temporary, told)


def _read(
    path: Path, run: Pretraining, sizes: dict[str, torch.Size]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a run's checkpoint, its losses among them, and the rest of its state; refuses
    what is not this run's."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as f:
            told = f.metadata() or {}
            if told["format"] != str(FORMAT):
                raise ValueError(f"format {told['format']}, this headwise reads {FORMAT}")
            _check_same(json.loads(told["run"]), run, path)
            tensors = {name: f.get_tensor(name) for name in (*sizes, "losses")}
        wrong = [name for name, size in sizes.items() if tensors[name].shape != size]
        if wrong:
            raise ValueError(
                f"{wrong[0]} is {tuple(tensors[wrong[0]].shape)}, not {tuple(sizes[wrong[0]])}"
            )
        return tensors, json.loads(told["state"])
    except UsageError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as e:
        why = " ".join(f"{type(e).__name__}: {e}".split())
        raise UsageError(
            f"the checkpoint {path} cannot be used ({why}); remove it to start again"
        ) from None


def _load(training: Training, path: Path) -> None:
    """Go on from a checkpoint, if there is one: the first process reads it, the others get their
    parts."""
    ranks, parts, read = training.ranks, _parts(training, moments=True), dict[str, Tensor]()

    def about() -> dict[str, Any] | None:
        if not path.exists():
            return None
        tensors, told = _read(
            path, training.run, {name: like.shape for name, (_, like) in parts.items()}
        )
        read.update(tensors)
        return {**told, "losses": read.pop("losses").tolist()}

    state = from_first(ranks, about)
    if state is None:
        return
    with torch.no_grad():
        for name, (part, like) in parts.items():
            part.copy_(part_of(sent(ranks, read.pop(name, None), like), like))
    training.losses, training.judged = (
        state["losses"],
        [(step, bits) for step, bits in state["judged"]],
    )
    training.seconds, training.timed, training.resumed = (
        state["seconds"],
        state["timed"],
        state["resumed"] + 1,
    )
    training.optimiser.set_step(len(training.losses))


def _check_same(saved: dict[str, Any], run: Pretraining, path: Path) -> None:
    """Refuse the checkpoint of another run, with what differs."""
    ours, theirs = (
        {**spec["shape"], **spec} for spec in (json.loads(json.dumps(run.spec())), saved)
    )
    differs = [
        k for k in ours if k not in ("shape", "source", "tokenizer") and ours[k] != theirs.get(k)
    ]
    if differs:
        what = ", ".join(f"{k} {theirs.get(k)} for {ours[k]}" for k in differs[:4])
        raise UsageError(
            f"the checkpoint {path} is of another run: {what}; remove it or use another store"
        )


# ---- the whole run


def peak_of(name: str, precision: str) -> float | None:
    """What a card can do a second with bf16 operands, if it is known; the longest name that fits
    counts."""
    fitting = [card for card in PEAKS if card in name] if precision == "bf16" else []
    return PEAKS[max(fitting, key=len)] if fitting else None


ANSWERS = (
    "held_out",
    "held_out_se",
    "bits_per_byte",
    "bits_per_byte_se",
    "repeats",
    "repeats_se",
    "repeats_share",
    "repeats_nats",
)


def row_of(training: Training, judged: Tensor | None, recalled: Row, how: Row) -> Row:
    """A finished run as one flat row: what it was, what came out, how fast, and where it ran."""
    run, spec, losses = training.run, training.run.spec(), training.losses
    per_second, share = training.speed()
    every = -(-run.steps // CURVE)
    curve = [float(np.mean(losses[i : i + every])) for i in range(0, len(losses), every)]
    answers: Row = dict.fromkeys(ANSWERS)
    if judged is not None:
        nats, size, ids, hits, right, hit_nats = judged.unbind(1)
        answers["held_out"], answers["held_out_se"] = ratio(nats, ids)
        answers["bits_per_byte"], answers["bits_per_byte_se"] = ratio(nats / math.log(2), size)
        if hits.sum():
            answers["repeats_share"], _ = ratio(hits, ids)
            answers["repeats"], answers["repeats_se"] = ratio(right, hits)
            answers["repeats_nats"], _ = ratio(hit_nats, hits)
    return {
        "id": run.id,
        "status": "done" if judged is not None else "diverged",
        "task": "language",
        **{k: v for k, v in spec.pop("shape").items() if k != "extras"},
        "params": run.shape.params,
        "flops": run.flops,
        **spec,
        **answers,
        **recalled,
        "train_best": min((x for x in losses if math.isfinite(x)), default=None),
        "train_last": losses[-1] if judged is not None else None,
        "steps_done": len(losses),
        "curve": [x if math.isfinite(x) else None for x in curve],
        "curve_every": every,
        "held_out_curve": training.judged,
        "tokens": len(losses) * run.batch_tokens,
        "tokens_per_second": per_second,
        "mfu": share,
        "peak_flops": training.peak,
        "seconds": round(training.seconds, 3),
        "memory_bytes": memory(training.device),
        "processes": training.ranks.world,
        "accumulate": training.accumulate,
        **how,
        "resumed": training.resumed,
        **provenance(training.device),
    }


def check_way(
    run: Pretraining, ranks: Ranks, accumulate: int, shard: str, compiled: str, peak: float | None
) -> None:
    """Refuse a way to train a run that there is not."""
    if accumulate < 1 or run.rows % (ranks.world * accumulate):
        raise UsageError(
            f"processes times accumulate must divide the {run.rows} rows of a step, got "
            f"{ranks.world} processes, accumulate {accumulate}"
        )
    if shard not in SHARDS:
        raise UsageError(f"unknown shard {shard!r}; {nearest(shard, SHARDS)}")
    if compiled not in ("", *COMPILED):
        raise UsageError(f"unknown compilation {compiled!r}; {nearest(compiled, COMPILED)}")
    if peak is not None and not 0 < peak < math.inf:
        raise UsageError(f"peak-tflops must be above 0, got {peak / 1e12:g}")
    if shard != SHARDS[0] and ranks.world == 1:
        raise UsageError(f"shard {shard} is for several processes, started by torchrun; got one")


def pretrain(
    run: Pretraining,
    *,
    device: str = "auto",
    folder: Path | None = None,
    cache: Path | None = None,
    ranks: Ranks | None = None,
    accumulate: int = 1,
    shard: str = "ddp",
    compiled: str = "",
    peak: float | None = None,
    checkpoint_every: float = 60.0,
    keep: bool = True,
    done: Callable[[Row], None] | None = None,
    quiet: bool = False,
) -> Row:
    """Train a decoder and judge it on the part of the text that it has not seen.

    With `folder`, the run leaves a checkpoint in folder/<id> every `checkpoint_every` seconds, goes
    on from it, and with `keep` leaves its weights there; token ids are kept in `cache`. `compiled`:
    as a whole ("model", the fastest), or "blocks", soon done where many shapes are trained and
    where processes share a run. Each of those calls this; the first one writes.
    """
    ranks = ranks or Ranks()
    where = place(ranks, pick_device(device))
    check_way(run, ranks, accumulate, shard, compiled, peak)
    compiled = "blocks" if compiled and ranks.world > 1 else compiled
    with numerics(run.precision, where), many_shapes():
        corpus = _corpus(run, cache, ranks)
        training = Training(run, corpus, where, ranks, accumulate, shard, compiled)
        training.peak = (
            peak
            if peak is not None or where.type != "cuda"
            else peak_of(torch.cuda.get_device_name(where), run.precision)
        )
        path = None if folder is None else folder / run.id / CHECKPOINT_FILE
        if path is not None:
            _load(training, path)
        judged = _go_on(training, path, checkpoint_every, ranks.first and not quiet)
        recalled = (
            training.recall()
            if judged is not None
            else dict.fromkeys(("recall", "recall_se", "recall_pairs"))
        )
        row = row_of(
            training,
            judged,
            recalled,
            {"shard": shard if ranks.world > 1 else None, "compiled": compiled},
        )
        if path is not None and judged is not None and keep:
            _keep(training, path.with_name(WEIGHTS_FILE))
    if ranks.first:
        if done is not None:
            done(row)
        if path is not None:
            path.unlink(missing_ok=True)
    return row


@contextlib.contextmanager
def many_shapes() -> Iterator[None]:
    """A sweep compiles more shapes in one process than torch expects, which else gives up compiling
    after eight."""
    from torch._dynamo import config

    with config.patch(recompile_limit=256, accumulated_recompile_limit=1024):
        yield


def prepared(run: Pretraining, cache: Path | None) -> Corpus:
    """The ids that a run learns from, long enough for it."""
    tokenizer, _ = find_tokenizer(run.tokenizer)
    text = find_text(run.source)
    corpus = load(text, tokenizer, cache, run.digest)
    check_length(corpus, run.length, text.name)
    return corpus


def _corpus(run: Pretraining, cache: Path | None, ranks: Ranks) -> Corpus:
    """The first process makes the ids, the others map them."""
    if cache is not None and ranks.world > 1:
        from_first(ranks, lambda: len(prepared(run, cache).ids))
    return prepared(run, cache)


def trained(folder: str | Path) -> Decoder:
    """The decoder that a run left in its folder (`runs/<id>` of a store), ready to be asked."""
    from safetensors import SafetensorError, safe_open

    path = Path(folder) / WEIGHTS_FILE
    try:
        with safe_open(path, "pt") as f:
            run, tensors = (
                json.loads(f.metadata()["run"]),
                {name: f.get_tensor(name) for name in f.keys()},
            )
    except (OSError, SafetensorError) as e:
        raise UsageError(
            f"{folder} holds no weights of a finished run ({' '.join(str(e).split())})"
        ) from None
    model = Decoder(Shape.of(run["shape"]))
    model.load_state_dict(tensors)
    return model.eval()


def _go_on(
    training: Training, path: Path | None, checkpoint_every: float, show: bool
) -> Tensor | None:
    """Train to the end; the held-out batches, or none when it diverged."""
    run, begun = training.run, len(training.losses)
    often = min(run.evals, run.steps)
    evals = {round(run.steps * (i + 1) / often) for i in range(often)} - {0, run.steps}
    bar = Progress(run.steps, f"pretrain {run.id}", begun=begun) if show else None
    saved = time.monotonic()
    for number in range(begun, run.steps):
        start = time.monotonic()
        due = training.step(
            training.ranks.first and path is not None and start - saved >= checkpoint_every
        )
        wanted = (
            due or number == begun or number + 1 in evals or number + 1 == run.steps
        )  # the first: it is not timed
        if wanted and not training.diverged:
            due = training.settle() or due
        if number > begun:
            training.seconds, training.timed = (
                training.seconds + time.monotonic() - start,
                training.timed + 1,
            )
        if training.diverged:
            return None
        if number + 1 in evals:
            _, bits = _judge(training, number + 1)
            if bits is None:
                return None
        if due and path is not None and number + 1 < run.steps:
            _save(training, path)
            saved = time.monotonic()
        if bar:
            bar.advance(1, _note(training))
    judged, bits = _judge(training, run.steps)
    if bar and bits is not None:
        bar.close(f"{_note(training)}, held out {bits:.4f} bits per byte")
    return judged if bits is not None else None


def _judge(training: Training, step: int) -> tuple[Tensor, float | None]:
    """The held-out batches and bits per byte, which are noted; none where they are not a number:
    that run has diverged."""
    judged = training.judge()
    bits = ratio(judged[:, 0] / math.log(2), judged[:, 1])[0]
    found = bits if math.isfinite(bits) else None
    training.judged.append((step, found))
    return judged, found


def _note(training: Training) -> str:
    recent, (tokens, share) = training.losses[-20:], training.speed()
    speed = (f", {tokens:,.0f} tokens/s" if tokens else "") + (
        f", {share:.1%} of peak" if share else ""
    )
    loss = f", loss {sum(recent) / len(recent):.4f}" if recent else ""
    return f"step {training.steps} of {training.run.steps}{loss}{speed}"


def _keep(training: Training, path: Path) -> None:
    """The trained weights, by the names of the model's parameters."""
    from safetensors.torch import save_file

    tensors = {
        name.removeprefix("weights."): full
        for name, full in _tensors(training, moments=False).items()
    }
    if training.ranks.first:
        with whole_file(path) as temporary:
            save_file(tensors, temporary, {"run": json.dumps(training.run.spec())})
