"""`headwise.inspect`: a checkpoint's attention by layer, beside random weights of its sizes."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headwise.diagnose.changes import FormChange, change_of
from headwise.diagnose.checkpoints import Checkpoint, open_checkpoint
from headwise.diagnose.control import control_key
from headwise.diagnose.layouts import Layout, heads_of
from headwise.diagnose.measures import (
    DISTANCES,
    SHARES,
    WITHIN,
    FormMeasures,
    LayerMeasures,
    control_of,
    measure,
)
from headwise.errors import UsageError, shown

if TYPE_CHECKING:
    from headwise.diagnose.on_data import OnData

FORMAT = 1  # of what `to_json` gives
SPREADS = 5.0  # standard errors between a layer's mean and its control's
MOSTLY = 0.8  # share of layers that look untrained where a model does
LEAST = 0.005  # of the control's own figure, where its heads hardly differ


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a checkpoint's attention uses, by its weights.

    `control[i]` are the figures of random weights of layer i's sizes, and `untrained[i]` whether
    layer i cannot be told apart from them.
    """

    path: str
    kind: str  # of file
    family: str
    bytes: int
    notes: tuple[str, ...]
    layers: tuple[LayerMeasures, ...]
    controls: tuple[LayerMeasures, ...]  # one per size
    control_index: tuple[int, ...]  # which of them belongs to each layer
    untrained: tuple[bool, ...]
    seconds: float
    data: OnData | None = None  # what data say, where there were some
    changes: tuple[Changes, ...] = ()  # of other checkpoints against this one

    def control(self, i: int) -> LayerMeasures:
        """The control of the i-th layer here."""
        return self.controls[self.control_index[i]]

    @property
    def looks_untrained(self) -> bool:
        """Whether most layers cannot be told apart from random weights."""
        return sum(self.untrained) >= MOSTLY * len(self.untrained)

    @property
    def sentences(self) -> list[str]:
        """What was found, each with its numbers."""
        from headwise.diagnose.sentences import sentences_of

        return sentences_of(self)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A flat row per layer and head."""
        return [row for i in range(len(self.layers)) for row in _rows(self, i)]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "format": FORMAT,
            "path": self.path,
            "kind": self.kind,
            "family": self.family,
            "bytes": self.bytes,
            "notes": list(self.notes),
            "sentences": self.sentences,
            "looks_untrained": self.looks_untrained,
            "untrained": list(self.untrained),
            "shares": list(SHARES),
            "within": WITHIN,
            "layers": [layer.to_json() for layer in self.layers],
            "controls": [layer.to_json() for layer in self.controls],
            "control_index": list(self.control_index),
            "seconds": round(self.seconds, 3),
            "data": None if self.data is None else self.data.to_json(),
            "changes": [one.to_json() for one in self.changes],
        }


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Another checkpoint against the first one: its own figures, and how far its forms moved."""

    other: Inspection
    moved: tuple[FormChange | None, ...]  # per layer; None where sizes differ

    def to_json(self) -> dict[str, Any]:
        moved = [None if one is None else dataclasses.asdict(one) for one in self.moved]
        return {"other": self.other.to_json(), "moved": moved}


def inspect(
    path: str | Path,
    *others: str | Path,
    mapping: str | Path | None = None,
    config: str | Path | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    prefix: str | None = None,
    layers: Sequence[int] | None = None,
    distances: Sequence[int] = DISTANCES,
    data: str | Path | Sequence[int] | Tensor | None = None,
    tokens: int = 128,
    sequences: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Inspection:
    """What the attention of a checkpoint uses: ranks, conditioning and redundancy of every head,
    beside random weights of the same sizes.

    `path` is a Hugging Face folder, safetensors, a PyTorch state dict, nanochat's folder, a GGUF
    file, a TensorFlow.js model.json or the folder of a run of ours; nothing in it is executed.
    `others` are compared with it, in order. `mapping` names the tensors of a code base that is not
    known, `num_heads` stands in for a config, and `layers` picks some. `progress` is called with
    how many layers are done, and of how many.

    `data` is a text file or token ids (a list, or a JSON file of one) for runs of ours and Hugging
    Face folders: then the model runs on `sequences` of `tokens` tokens, and the result has what the
    data say beside what the weights say, and the loss when each layer's scores are cut to lower
    rank.

        found = headwise.inspect("path/to/checkpoint")
        found.sentences, found.rows, found.layers[0].qk.effective
    """
    for distance in distances:
        if type(distance) is not int or not 0 <= distance < 2**31:
            raise UsageError(f"a distance must be a whole number, got {shown(distance)}")
    if not distances or distances[0] != 0:
        raise UsageError(f"distances must begin with 0, got {shown(tuple(distances))}")

    def opened(one: str | Path) -> Checkpoint:
        return open_checkpoint(one, mapping=mapping, config=config, num_heads=num_heads,
                               num_kv_heads=num_kv_heads, prefix=prefix)  # fmt: skip

    # All are opened before anything is computed, so that a wrong path is heard of at once.
    checkpoints = [opened(one) for one in (path, *others)]
    chosen = _chosen(checkpoints[0], layers)
    controls: dict[Any, LayerMeasures] = {}  # random weights of a size are measured once
    places = [[i for i in chosen if i < one.depth] for one in checkpoints]
    ticks = iter(range(1, 1 + sum(map(len, places))))

    def tick() -> None:
        if progress is not None:
            progress(next(ticks), sum(map(len, places)))

    first = _inspected(checkpoints[0], chosen, tuple(distances), controls, tick)
    changes = []
    for checkpoint, own in zip(checkpoints[1:], places[1:], strict=True):
        other = _inspected(checkpoint, own, tuple(distances), controls, tick)
        moved = tuple(change_of(checkpoints[0], checkpoint, i) for i in own)
        changes.append(Changes(other=other, moved=moved))
    on_data = None
    if data is not None:
        from headwise.diagnose.on_data import measure_on_data

        on_data = measure_on_data(checkpoints[0], data, tokens=tokens, sequences=sequences)
    return dataclasses.replace(first, changes=tuple(changes), data=on_data)


def _chosen(checkpoint: Checkpoint, layers: Sequence[int] | None) -> list[int]:
    """Places among the layers with attention."""
    numbers = [layer.index for layer in checkpoint.layers]
    if layers is None:
        return list(range(len(numbers)))
    for layer in layers:
        if layer not in numbers:
            raise UsageError(
                f"no attention in layer {shown(layer)}; there: {numbers[0]} to {numbers[-1]}"
            )
    return sorted({numbers.index(layer) for layer in layers})


def _inspected(
    checkpoint: Checkpoint,
    chosen: Sequence[int],
    distances: tuple[int, ...],
    controls: dict[Any, LayerMeasures],
    tick: Callable[[], None],
) -> Inspection:
    start = time.perf_counter()
    found, keys = [], []
    for parts, layout, index in _read(checkpoint, chosen):
        key = control_key(parts, layout)
        if key not in controls:
            controls[key] = control_of(parts, layout, distances)
        heads = heads_of(parts, layout, f"layer {index}: ")
        del parts  # before the products, which are the largest things here
        found.append(measure(heads, index, distances))
        keys.append(key)
        tick()
    order = list(dict.fromkeys(keys))
    return Inspection(
        path=str(checkpoint.path), kind=checkpoint.source.kind, family=checkpoint.family,
        bytes=checkpoint.bytes(), notes=checkpoint.notes, layers=tuple(found),
        controls=tuple(controls[key] for key in order),
        control_index=tuple(order.index(key) for key in keys),
        untrained=tuple(
            looks_untrained(one, controls[key]) for one, key in zip(found, keys, strict=True)
        ),
        seconds=time.perf_counter() - start,
    )  # fmt: skip


def _read(
    checkpoint: Checkpoint, chosen: Sequence[int]
) -> Iterator[tuple[dict[str, Tensor], Layout, int]]:
    for i in chosen:
        yield checkpoint.parts(i), checkpoint.layouts[i], checkpoint.layers[i].index


# ---- trained or not


def looks_untrained(layer: LayerMeasures, control: LayerMeasures) -> bool:
    """Whether a layer's forms cannot be told apart from those of random weights of its sizes: the
    means of its effective, stable and 90 % ranks lie within the spread of the control's heads, and
    its heads are as independent. A form that is zero says nothing."""
    forms = [(layer.qk, control.qk)]
    if layer.vo is not None and control.vo is not None:
        forms.append((layer.vo, control.vo))
    forms = [(a, b) for a, b in forms if any(a.norm)]
    return bool(forms) and all(_alike(a, b, layer.num_kv_heads) for a, b in forms)


def _alike(form: FormMeasures, control: FormMeasures, kv_heads: int) -> bool:
    for name, floor in (("effective", 0.0), ("stable", 0.0), ("r90", 0.5)):
        values, others = getattr(form, name), getattr(control, name)
        mean = fmean(others)
        spread = max(pstdev(others), LEAST * mean, floor)
        # Heads that share keys are not independent, so KV heads are counted.
        if abs(fmean(values) - mean) > SPREADS * spread * math.sqrt(2 / kv_heads):
            return False
    if pstdev(form.effective) > 3 * max(pstdev(control.effective), 0.02 * fmean(control.effective)):
        return False
    if abs(form.effective_heads - control.effective_heads) > 0.05 * control.effective_heads:
        return False
    symmetric = [value for value in form.symmetric if value is not None]
    return not symmetric or abs(fmean(symmetric) - 0.5) < 0.05


# ---- rows


def _rows(inspection: Inspection, i: int) -> Iterator[dict[str, Any]]:
    layer, control = inspection.layers[i], inspection.control(i)
    group = layer.num_heads // layer.num_kv_heads
    said = None if inspection.data is None else inspection.data.of_layer(layer.layer)
    for h in range(layer.num_heads):
        row: dict[str, Any] = {"layer": layer.layer, "head": h, "kv_head": h // group}
        for name, form, other in (("qk", layer.qk, control.qk), ("vo", layer.vo, control.vo)):
            if form is None or other is None:
                continue
            row |= {
                f"{name}_width": form.width,
                f"{name}_effective": form.effective[h],
                f"{name}_effective_random": fmean(other.effective),
                f"{name}_stable": form.stable[h],
                f"{name}_r90": form.r90[h],
                f"{name}_r90_random": fmean(other.r90),
                f"{name}_r99": form.r99[h],
                f"{name}_r999": form.r999[h],
                f"{name}_condition": form.condition[h],
                f"{name}_symmetric": form.symmetric[h],
                f"{name}_angle": form.angle[h],
                f"{name}_trace": form.trace[h],
                f"{name}_nearest": _nearest(form.cosines, h),
                f"{name}_sharing": _least(form.sharing, h // group),
            }
        if layer.pairs90:
            row |= {"pairs": layer.pairs, "pairs90": layer.pairs90[h]}
            for distance, values in zip(layer.distances, layer.effective_at, strict=True):
                row[f"qk_effective_at_{distance}"] = values[h]
        if layer.bias_share:
            row["bias_share"] = layer.bias_share[h]
        if said is not None:
            for name in ("r90", "r99", "effective", "entropy", "first", "largest", "share"):
                row[f"data_{name}"] = getattr(said, name)[h]
        yield row


def _nearest(cosines: list[list[float]], h: int) -> float | None:
    """The cosine to the head whose form is most like its own, or its negative."""
    others = [value for j, value in enumerate(cosines[h]) if j != h]
    return max(others, key=abs) if others else None


def _least(losses: list[list[float | None]], k: int) -> float | None:
    found = [value for value in (losses[k] if losses else []) if value is not None]
    return min(found) if found and not math.isnan(min(found)) else None
