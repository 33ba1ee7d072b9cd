"""What an inspection found, in sentences with the numbers behind them. Weights alone never say
"used": that is measured on data."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from headwise.diagnose.measures import WITHIN

if TYPE_CHECKING:
    from headwise.diagnose.inspection import Changes, Inspection
    from headwise.diagnose.on_data import OnData

QUARTER = 0.25
RESTING = 0.9  # weight on the first token that is worth a sentence
ALIKE = 0.5  # a cosine between two heads' forms that is worth a sentence


def sentences_of(found: Inspection) -> list[str]:
    """The sentences, the most telling first."""
    out = [*_untrained(found), _ranks(found), *_low(found), *_values(found), *_condition(found)]
    out += [*_redundant(found), *_sharing(found), *_latent(found), *_rotary(found)]
    for changes in found.changes:
        out += _changed(found, changes)
    if found.data is not None:
        bare = _untrained(found)
        return [*bare, *_on_data(found, found.data), *out[len(bare) :]]
    out.append(
        "This is what the weights say. What a model uses on data is less: published, 38 to 75 "
        "dimensions hold 90 % of a head's form, and 2 to 11 hold 90 % of its scores on text. "
        "--data FILE measures it here."
    )
    return out


def layers_in_words(numbers: Sequence[int]) -> str:
    """Numbers of layers with runs joined.

    >>> layers_in_words([3, 4, 5, 9])
    'layers 3 to 5 and 9'
    """
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    words = [str(r[0]) if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in runs]
    joined = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"layer {joined}" if len(set(numbers)) == 1 else f"layers {joined}"


def _untrained(found: Inspection) -> list[str]:
    bare = [layer.layer for layer, is_bare in zip(found.layers, found.untrained, strict=True)
            if is_bare]  # fmt: skip
    if not bare:
        return []
    if found.looks_untrained:
        count, depth = len(bare), len(found.layers)
        return [
            f"It looks untrained: the forms of {count} of {depth} layers cannot be told apart from "
            "those of random weights of the same sizes. Were the weights loaded?"
        ]
    where = layers_in_words(bare)
    verb = "look" if len(bare) > 1 else "looks"
    return [f"{where[0].upper()}{where[1:]} {verb} untrained: as random weights of the same sizes."]


def _ranks(found: Inspection) -> str:
    r90 = [v for layer in found.layers for v in layer.qk.r90]
    effective = [v for layer in found.layers for v in layer.qk.effective]
    random = fmean(v for i in range(len(found.layers)) for v in found.control(i).qk.r90)
    return (
        f"{fmean(r90):.1f} of {_width(found)} dimensions hold 90 % of a head's query-key form on "
        f"average ({min(r90)} to {max(r90)} over {len(r90)} heads); random weights need "
        f"{random:.1f}. Effective rank {fmean(effective):.1f} ({min(effective):.1f} to "
        f"{max(effective):.1f})."
    )


def _width(found: Inspection) -> str:
    widths = sorted({layer.head_dim for layer in found.layers})
    return str(widths[0]) if len(widths) == 1 else f"{widths[0]} to {widths[-1]}"


def _low(found: Inspection) -> list[str]:
    heads = [(layer.layer, h) for layer in found.layers for h, v in enumerate(layer.qk.r90)
             if v <= QUARTER * layer.head_dim]  # fmt: skip
    if not heads:
        return []
    count = sum(layer.num_heads for layer in found.layers)
    where = layers_in_words([layer for layer, _ in heads])
    return [f"{len(heads)} of {count} heads hold 90 % of their query-key form in a quarter of the "
            f"dimensions that are paid for, in {where}."]  # fmt: skip


def _values(found: Inspection) -> list[str]:
    r90 = [v for layer in found.layers if layer.vo for v in layer.vo.r90]
    if not r90:
        return []
    random = fmean(v for c in found.controls if c.vo for v in c.vo.r90)
    widths = sorted({layer.v_head_dim for layer in found.layers})
    width = str(widths[0]) if len(widths) == 1 else f"{widths[0]} to {widths[-1]}"
    mean, span = fmean(r90), f"{min(r90)} to {max(r90)}"
    return [f"What heads write takes {mean:.1f} of {width} dimensions for 90 % ({span}); random "
            f"weights {random:.1f}."]  # fmt: skip


def _condition(found: Inspection) -> list[str]:
    worst = max(
        ((v if v is not None else float("inf"), layer.layer, h, i)
         for i, layer in enumerate(found.layers) for h, v in enumerate(layer.qk.condition)),
    )  # fmt: skip
    value, layer, head, i = worst
    usual = [v for v in found.control(i).qk.condition if v is not None]
    if not usual or value < 3 * fmean(usual):
        return []
    said = "is singular" if value == float("inf") else f"has condition number {value:,.0f}"
    return [f"The worst-conditioned query-key form {said} (layer {layer}, head {head}); random "
            f"weights of its size have {fmean(usual):.1f}."]  # fmt: skip


def _redundant(found: Inspection) -> list[str]:
    best = min(found.layers, key=lambda layer: layer.qk.effective_heads / layer.num_heads)
    out = []
    if best.num_heads > 1 and best.qk.effective_heads < 0.9 * best.num_heads:
        out.append(
            f"The heads of layer {best.layer} compare as {best.qk.effective_heads:.1f} independent "
            f"ones would, of {best.num_heads}."
        )
    pairs = [
        (abs(layer.qk.cosines[i][j]), layer.layer, i, j)
        for layer in found.layers
        for i in range(layer.num_heads)
        for j in range(i)
    ]
    alike = [pair for pair in pairs if pair[0] >= ALIKE]
    if alike:
        value, layer, i, j = max(alike)
        out.append(
            f"{len(alike)} pair{'s' * (len(alike) > 1)} of heads within a layer have query-key "
            f"forms with a cosine beyond {ALIKE}; most alike are heads {j} and {i} of layer "
            f"{layer}, {value:.2f}."
        )
    return out


def _sharing(found: Inspection) -> list[str]:
    out = []
    for name, what, of in (("qk", "keys", "query-key"), ("vo", "values", "value-output")):
        best = None
        for i, layer in enumerate(found.layers):
            form, control = getattr(layer, name), getattr(found.control(i), name)
            if form is None or not form.shareable or control.shareable:
                continue
            if best is None or form.shareable > best[0]:
                losses = sorted(min(v for v in row if v is not None) for row in form.sharing
                                if any(v is not None for v in row))  # fmt: skip
                best = form.shareable, layer, losses[form.shareable - 1]
        if best is not None:
            count, layer, loss = best
            which = "heads" if layer.num_heads == layer.num_kv_heads else "KV heads"
            out.append(
                f"{count} of {layer.num_kv_heads} {which} in layer {layer.layer} could share "
                f"{what} with another one within {100 * max(loss, 0.0001):.2g} % of the energy of "
                f"their {of} forms; counted within {100 * WITHIN:g} %, none of random weights can."
            )
    return out


def _latent(found: Inspection) -> list[str]:
    rows = [(layer.kv_ranks[1], layer.kv_width, found.control(i).kv_ranks[1], layer.layer)
            for i, layer in enumerate(found.layers)]  # fmt: skip
    least, most = min(rows), max(rows)
    span = f"{least[0]} (layer {least[3]})"
    if most[0] > least[0]:
        span += f" to {most[0]} (layer {most[3]})"
    widths = sorted({row[1] for row in rows})
    paid = str(widths[0]) if len(widths) == 1 else f"{widths[0]} to {widths[-1]}"
    return [
        f"A latent of {span} would hold 99 % "
        f"of the energy of a layer's keys and values, which are {paid} wide; random weights need "
        f"{least[2]}."
    ]


def _rotary(found: Inspection) -> list[str]:
    rows = [(n, layer.pairs) for layer in found.layers for n in layer.pairs90]
    if not rows:
        return []
    far = [layer for layer in found.layers if len(layer.effective_at) > 1]
    near = fmean(v for layer in far for v in layer.effective_at[0])
    last = fmean(v for layer in far for v in layer.effective_at[-1])
    return [
        f"Over all distances {fmean(n for n, _ in rows):.1f} of {rows[0][1]} rotating pairs hold "
        f"90 % of a head's energy. The effective rank of its form is {near:.1f} at distance 0 and "
        f"{last:.1f} at {far[0].distances[-1]}."
    ]


def _on_data(found: Inspection, data: OnData) -> list[str]:
    """What data say, beside what weights say."""
    r90 = sorted(v for layer in data.layers for v in layer.r90)
    weights = sorted(v for layer in found.layers for v in layer.qk.r90)
    what = f"{data.sequences} sequences of {data.tokens} tokens"
    out = [
        f"Data say: 90 % of a head's scores lie in {r90[0]:.0f} to {r90[-1]:.0f} dimensions "
        f"(median {median(r90):.1f}, {what}). Weights say: {weights[0]} to {weights[-1]} (median "
        f"{median(weights):g})."
    ]
    unit = "loss changes" if data.loss is not None else "last states change"
    base = data.loss or 0.0
    cuts = [(layer.losses[0] - base, layer) for layer in data.layers if layer.losses]
    if cuts:
        least, most = (pick(cuts, key=lambda one: one[0]) for pick in (min, max))
        rank, by = most[1].ranks[0], "nats" if data.loss is not None else "of their norm"
        out.append(
            f"Cut to rank {rank}, one layer at a time, the {unit} by {least[0]:+.3f} {by} "
            f"(layer {least[1].layer}) to {most[0]:+.3f} (layer {most[1].layer})"
            + (f"; uncut it is {base:.3f}." if data.loss is not None else ".")
        )
    dead = [(layer.layer, h) for layer in data.layers for h in layer.dead]
    if dead:
        out.append(
            f"{len(dead)} heads add less than a thousandth of their layer's output on these data, "
            f"the first in layer {dead[0][0]} (head {dead[0][1]})."
        )
    resting = [layer.layer for layer in data.layers for v in layer.first if v > RESTING]
    if resting:
        out.append(
            f"{len(resting)} heads give the first token more than {RESTING:.0%} of their weight, "
            f"in {layers_in_words(resting)}."
        )
    return out


def _changed(found: Inspection, changes: Changes) -> list[str]:
    other, out = changes.other, []
    before = fmean(v for layer in found.layers for v in layer.qk.effective)
    after = fmean(v for layer in other.layers for v in layer.qk.effective)
    name = other.path.rstrip("/").rpartition("/")[2]
    out.append(f"In {name} the effective rank of query-key forms is {after:.1f}, from "
               f"{before:.1f}.")  # fmt: skip
    moved = [(v, layer.layer, h) for one, layer in zip(changes.moved, other.layers, strict=True)
             if one is not None for h, v in enumerate(one.qk)]  # fmt: skip
    if moved:
        value, layer, head = max(moved)
        mean = fmean(v for v, _, _ in moved)
        out.append(
            f"Its query-key forms moved by {100 * mean:.3g} % of their norm on average, most in "
            f"layer {layer}, head {head}: {100 * value:.3g} %."
        )
    return out
