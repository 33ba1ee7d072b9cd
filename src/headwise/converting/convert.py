"""`headwise.convert`: a checkpoint written at another shape, with what that costs."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.converting.formats import FORMATS, NewHeads, Output, output_of
from headwise.converting.joining import (
    Rotated,
    by_index,
    by_similarity,
    join,
    pair_energies,
)
from headwise.converting.latent import to_latent
from headwise.converting.maps import padded, spread
from headwise.converting.moments import Moments, moments_of_weights
from headwise.converting.parts import raw_heads
from headwise.converting.target import (
    Target,
    slots,
    steps_of,
    target_of,
    wanted_sizes,
    with_base,
)
from headwise.converting.trial import Trial
from headwise.converting.turning import gains, turning_of
from headwise.converting.writing import check_place, new_folder
from headwise.diagnose.checkpoints import Checkpoint, open_checkpoint
from headwise.diagnose.layouts import rotation
from headwise.errors import UsageError, nearest
from headwise.shape import Shape

FORMAT = 1  # of what `to_json` gives
NOTE = "conversion.json"  # in the new folder: what was done, and what it cost


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What one layer's change loses: shares of the energy of scores and of what heads write, and
    the loss of the model when it alone is changed."""

    layer: int
    scores_lost: float
    outputs_lost: float
    groups: list[list[int]]  # old KV heads by new one
    loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Of a decoder in nats per token; of an encoder the relative change of its last states.

    `predicted` adds up what every layer costs when it alone is changed. `controls` are the same
    conversion by plain means: without data, or KV heads joined by index.
    """

    unit: str
    sequences: int
    tokens: int
    before: float
    predicted: float
    measured: float  # of the written checkpoint, loaded again; of a dry run, in place
    error: float | None  # standard error of measured - before, over sequences
    controls: dict[str, float]

    @property
    def miss(self) -> float | None:
        """How far the predicted change is from the measured one, as a share of it; None where that
        is within two standard errors of nothing."""
        change = self.measured - self.before
        if abs(change) <= 2 * (self.error or 0.0):
            return None
        return (self.predicted - self.measured) / change


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A checkpoint at another shape, and what that costs."""

    path: str
    out: str | None  # None: nothing was written
    format: str
    source: Shape
    target: Shape
    exact: bool  # whether the function is the same
    calibrated: bool
    layers: tuple[LayerCost, ...]
    kept_pairs: tuple[int, ...]  # of rotary positions; all where nothing is dropped
    pairs: int
    pairs_energy: float  # share of the energy of rotating scores in what is kept
    losses: Losses | None
    notes: tuple[str, ...]
    seconds: float
    curve: tuple[tuple[int, float], ...] = ()  # of a finetuning: step, held-out loss

    @property
    def sentences(self) -> list[str]:
        """What was done, each with its numbers."""
        from headwise.converting.sentences import sentences_of

        return sentences_of(self)

    @property
    def costs(self) -> list[tuple[str, int, int]]:
        """What a shape costs, before and after: parameters, cache, FLOPs of a token."""
        tokens = self.losses.tokens if self.losses else 1024
        old, new = self.source, self.target
        return [
            ("parameters", old.params, new.params),
            ("KV bytes per token (16 bits)", old.kv_bytes(1), new.kv_bytes(1)),
            (f"FLOPs of {tokens:,} tokens", old.flops(tokens), new.flops(tokens)),
        ]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A flat row per layer."""
        return [dataclasses.asdict(layer) for layer in self.layers]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        losses = None if self.losses is None else dataclasses.asdict(self.losses)
        if losses is not None and self.losses is not None:
            losses["miss"] = self.losses.miss
        return {
            "format": FORMAT,
            "path": self.path,
            "out": self.out,
            "as": self.format,
            "source": self.source.spec(),
            "target": self.target.spec(),
            "exact": self.exact,
            "calibrated": self.calibrated,
            "sentences": self.sentences,
            "costs": {name: [before, after] for name, before, after in self.costs},
            "layers": self.rows,
            "kept_pairs": list(self.kept_pairs),
            "pairs": self.pairs,
            "pairs_energy": self.pairs_energy,
            "losses": losses,
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
            "curve": [list(point) for point in self.curve],
        }


def convert(
    path: str | Path,
    *,
    out: str | Path | None = None,
    rank: int | None = None,
    to: str = "same",
    data: str | Path | Sequence[int] | Tensor | None = None,
    tokens: int = 128,
    sequences: int = 32,
    finetune: int = 0,
    lr: float = 1e-3,
    seed: int = 0,
    controls: bool = True,
    progress: Callable[[int, int], None] | None = None,
    **sizes: int,
) -> Conversion:
    """Write a checkpoint at another shape, with the loss that it costs.

    `sizes` are fields of `Shape`: head_dim, v_head_dim, num_kv_heads, kv_lora_rank, num_heads, and
    beside a latent qk_rope_head_dim;
    `rank` is head_dim and v_head_dim at once. Smaller ones are the best approximation of every
    head's products on `data` (a text, or token ids), or of its weights where there are none; larger
    ones are exact. Without `out` nothing is written. `to` is "hf" or "headwise", or "same" as the
    source. `finetune` steps train the result on the data behind those it is measured on.

        done = headwise.convert("run", out="narrow", rank=16, data="book.txt")
        done.losses.measured, done.target.kv_bytes()
    """
    start = time.perf_counter()
    if to not in FORMATS:
        raise UsageError(f"unknown format {to!r}; {nearest(to, FORMATS)}")
    if rank is not None:
        sizes = {"head_dim": rank, "v_head_dim": rank, **sizes}
    if finetune and (data is None or out is None):
        raise UsageError("finetune needs data, and a folder to write to")
    place = None if out is None else Path(out)
    if place is not None:
        check_place(place)
    checkpoint = open_checkpoint(path)
    target = target_of(checkpoint, wanted_sizes(sizes))
    _output(checkpoint, target, to, 1)  # what cannot be written is heard of at once
    trial = (
        None if data is None else Trial(checkpoint, data, tokens, sequences, unturned=target.latent)
    )
    plan = _planned(checkpoint, target, to, trial)
    power, found = plan.power, plan.found
    output = _output(checkpoint, target, to, power)
    losses, layers = None, [layer for _, layer in found]
    heads = [new for new, _ in found]
    if trial is not None:
        alone = trial.one_by_one(heads, target.same, progress)
        layers = [dataclasses.replace(x, loss=y) for x, y in zip(layers, alone, strict=True)]
        now = trial.losses(dict(enumerate(heads)))
        predicted = trial.before + sum(loss - trial.before for loss in alone)
        losses = Losses(
            unit=trial.unit, sequences=trial.held_out, tokens=trial.tokens, before=trial.before,
            predicted=predicted, measured=float(now.mean()), error=trial.error(now),
            controls=_controls(checkpoint, target, trial, plan) if controls else {},
        )  # fmt: skip
    done = Conversion(
        path=str(path), out=None, format=output.name, source=_shape(checkpoint),
        target=output.shape, exact=target.exact, calibrated=trial is not None,
        layers=tuple(layers), kept_pairs=tuple(plan.kept), pairs=plan.pairs,
        pairs_energy=plan.energy, losses=losses, notes=checkpoint.notes,
        seconds=time.perf_counter() - start,
    )  # fmt: skip
    if place is None:
        return done
    with new_folder(place) as folder:
        output.write(folder, lambda i: heads[i])
        curve: Sequence[tuple[int, float]] = ()
        if trial is not None and losses is not None:
            now = trial.written(folder)
            losses = dataclasses.replace(losses, measured=float(now.mean()), error=trial.error(now))
            if finetune:
                from headwise.converting.finetune import finetune as train

                curve = train(folder, trial, steps=finetune, lr=lr, seed=seed, progress=progress)
        done = dataclasses.replace(
            done, out=str(place), losses=losses, curve=tuple(curve),
            seconds=time.perf_counter() - start,
        )  # fmt: skip
        (folder / NOTE).write_text(json.dumps(done.to_json(), indent=1) + "\n")
    return done


def _shape(checkpoint: Checkpoint) -> Shape:
    assert checkpoint.shape is not None
    return checkpoint.shape


def _output(checkpoint: Checkpoint, target: Target, to: str, power: float) -> Output:
    shape = with_base(target.shape, power)
    old = _shape(checkpoint)
    ours = checkpoint.family == "headwise" and to != "hf"
    if ours and target.exact and shape.head_dim != old.head_dim and old.max_logit is None:
        shape = dataclasses.replace(shape, logit_scale=old.scale)  # then zeros change no bit
    return output_of(checkpoint, shape, to, power)


# ---- the maps of every layer


@dataclass(frozen=True, kw_only=True)
class Plan:
    """New heads of every layer, and what rotary positions keep."""

    found: list[tuple[NewHeads, LayerCost]]
    kept: list[int]
    places: list[int]
    power: float
    pairs: int
    energy: float


def _moments(checkpoint: Checkpoint, i: int, trial: Trial | None) -> Moments:
    where = f"layer {checkpoint.layers[i].index}: "
    shape = _shape(checkpoint)
    heads = raw_heads(checkpoint.parts(i), checkpoint.layouts[i], shape, where)
    scale = shape.scale
    return moments_of_weights(heads, scale) if trial is None else trial.moments(i, heads, scale)


def _planned(checkpoint: Checkpoint, target: Target, to: str, trial: Trial | None) -> Plan:
    kept, places, power, pairs, energy = _pairs(checkpoint, target, trial)
    found = [
        _layer(checkpoint, i, target, kept, places, None if target.same else trial)
        for i in range(checkpoint.depth)
    ]
    return Plan(found=found, kept=kept, places=places, power=power, pairs=pairs, energy=energy)


def _pairs(
    checkpoint: Checkpoint, target: Target, trial: Trial | None
) -> tuple[list[int], list[int], float, int, float]:
    """Which rotating pairs stay: of the steps that a head's own frequencies allow the one that
    keeps most energy, over all layers."""
    old = _shape(checkpoint)
    pairs, new = old.qk_rope_head_dim // 2, target.shape.qk_rope_head_dim // 2
    if pairs and target.latent:
        return _latent_pairs(checkpoint, pairs, new, trial)
    if new >= pairs or not pairs:
        return (*slots(pairs, new, 1), pairs, 1.0) if pairs else ([], [], 1.0, 0, 1.0)
    layer_pairs = rotation(checkpoint.layouts[0], old.head_dim)[0]
    energies = sum(
        pair_energies(_moments(checkpoint, i, trial), layer_pairs) for i in range(checkpoint.depth)
    ) / checkpoint.depth  # fmt: skip
    assert isinstance(energies, Tensor)
    step = max(steps_of(pairs, new), key=lambda s: float(energies[slots(pairs, new, s)[0]].sum()))
    kept, places, power = slots(pairs, new, step)
    return kept, places, power, pairs, float(energies[kept].sum())


def _latent_pairs(
    checkpoint: Checkpoint, pairs: int, new: int, trial: Trial | None
) -> tuple[list[int], list[int], float, int, float]:
    """Which pairs rotate beside a latent: of the steps the one without which most would be lost."""
    layout = checkpoint.layouts[0]
    layer_pairs, frequencies = rotation(layout, _shape(checkpoint).head_dim)
    found = [
        gains(_moments(checkpoint, i, trial), layer_pairs, frequencies)
        for i in range(checkpoint.depth)
    ]
    carried, saved = (sum(one) / checkpoint.depth for one in zip(*found, strict=True))
    assert isinstance(carried, Tensor)
    assert isinstance(saved, Tensor)
    step = max(steps_of(pairs, new), key=lambda s: float(saved[slots(pairs, new, s)[0]].sum()))
    kept, places, power = slots(pairs, new, step)
    return kept, places, power, pairs, float(carried[kept].sum())


def _layer(
    checkpoint: Checkpoint,
    i: int,
    target: Target,
    kept: Sequence[int],
    places: Sequence[int],
    trial: Trial | None,
    similar: bool = True,
) -> tuple[NewHeads, LayerCost]:
    """One layer's maps: more heads, then fewer dimensions, then a latent, then zeros."""
    old, new, layout = _shape(checkpoint), target.shape, checkpoint.layouts[i]
    H, K, R, V = old.num_heads, old.num_kv_heads, old.head_dim, old.v_head_dim
    maps = spread(H, K, R, V, target.more, target.more_kv)
    H, K = H * target.more, K * target.more_kv
    number = checkpoint.layers[i].index
    new_K = H if target.latent else new.num_kv_heads
    new_K = new_K if new_K < K else K
    groups = by_index(K, new_K)
    lost = 0.0, 0.0
    latent = None
    inner = target.inner
    rotated = _rotated(layout, R, min(R, inner), kept, places)
    if target.joined or target.latent:
        moments = _moments(checkpoint, i, trial).through(maps)
        if target.joined:
            groups = by_similarity(moments, new_K, rotated) if similar else groups
            joined = join(moments, groups, min(R, inner), min(V, new.v_head_dim), rotated)
            maps, lost = maps.then(joined.maps), (joined.scores_lost, joined.outputs_lost)
            if target.latent:
                moments = moments.through(joined.maps)
        if target.latent:
            turning = None
            if new.qk_rope_head_dim:
                pairs, frequencies = rotation(layout, R)
                turning = turning_of(moments, pairs, frequencies, kept, new.qk_rope_head_dim)
            latent = to_latent(moments, new.kv_lora_rank, turning)
            lost = max(lost[0], latent.lost), max(lost[1], latent.lost)
    R, V = min(R, inner), min(V, new.v_head_dim)
    if target.padded:
        spots = _spots(layout, R, new.head_dim, places)
        maps = maps.then(padded(H, new_K, spots, new.head_dim, V, new.v_head_dim))
    cost = LayerCost(layer=number, scores_lost=lost[0], outputs_lost=lost[1], groups=groups)
    return NewHeads(maps=maps, latent=latent), cost


def _rotated(layout: Any, R: int, new: int, kept: Sequence[int], places: Sequence[int]) -> Rotated:
    """The pairs of old heads, and where those that stay lie in heads of rank `new`."""
    pairs, still = _coordinates(layout, R)
    if new == R:
        kept = range(len(pairs))
        return Rotated(pairs=pairs, still=still, kept=kept, new_pairs=pairs, new_still=still)
    new_layout = dataclasses.replace(layout, rope_dim=min(layout.rope_dim, 2 * len(places)))
    new_pairs, new_still = _coordinates(new_layout, new)
    return Rotated(pairs=pairs, still=still, kept=kept, new_pairs=new_pairs, new_still=new_still)


def _coordinates(layout: Any, R: int) -> tuple[Tensor, Tensor]:
    import torch

    pairs = rotation(layout, R)[0]
    moved = set(pairs.flatten().tolist())
    return pairs, torch.tensor([i for i in range(R) if i not in moved], dtype=torch.long)


def _spots(layout: Any, R: int, new: int, places: Sequence[int]) -> Tensor:
    """Where each coordinate lies in a wider head."""
    import torch

    if new == R:
        return torch.arange(R)
    pairs, still = _coordinates(layout, R)
    whole = layout.rope_dim >= R
    wide = dataclasses.replace(layout, rope_dim=new if whole else layout.rope_dim)
    new_pairs, new_still = _coordinates(wide, new)
    spots = torch.zeros(R, dtype=torch.long)
    order = torch.tensor(list(places) if whole else list(range(len(pairs))), dtype=torch.long)
    spots[pairs] = new_pairs[order]
    spots[still] = new_still[: len(still)]
    return spots


def _controls(checkpoint: Checkpoint, target: Target, trial: Trial, plan: Plan) -> dict[str, float]:
    """The loss of the same conversion by plainer means."""
    found: dict[str, float] = {}
    if target.exact and not target.latent:
        return found

    def loss(calibrated: Trial | None, similar: bool) -> float:
        every = range(checkpoint.depth)
        heads = [
            _layer(checkpoint, i, target, plan.kept, plan.places, calibrated, similar)[0]
            for i in every
        ]
        return trial.loss(heads)

    found["weights alone"] = loss(None, True)
    if target.shape.num_kv_heads < _shape(checkpoint).num_kv_heads and not target.latent:
        found["by index"] = loss(trial, False)
    return found
