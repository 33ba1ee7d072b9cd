"""A conversion in sentences, each with its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.shape import Shape

if TYPE_CHECKING:
    from headwise.converting.convert import Conversion

WORDS = {
    "num_heads": "{} heads for {}",
    "num_kv_heads": "{} KV heads for {}",
    "head_dim": "queries and keys of rank {} for {}",
    "v_head_dim": "values of width {} for {}",
    "kv_lora_rank": "keys and values through a latent of width {}",
}


def sentences_of(done: Conversion) -> list[str]:
    """What changed, what it saves, what it costs."""
    out = [_what(done.source, done.target)]
    if done.exact:
        out.append("The function is the same.")
    elif not done.calibrated:
        worst = max(done.layers, key=lambda layer: layer.scores_lost + layer.outputs_lost)
        out.append(
            "By the weights alone, of what layers do at inputs of unit variance, at most "
            f"{worst.scores_lost:.2%} of the scores' energy and {worst.outputs_lost:.2%} of the "
            f"outputs' is lost (layer {worst.layer}). The loss was not measured: --data FILE does."
        )
    if done.target.latent and done.pairs:
        out.append(_rotating(done))
    elif len(done.kept_pairs) < done.pairs:
        out.append(
            f"Of {done.pairs} pairs of coordinates that rotate, {len(done.kept_pairs)} stay "
            f"({_kept(done)}): of all choices whose frequencies are those of a head of its own, "
            f"they hold the most energy, {done.pairs_energy:.1%} of the rotating scores'. The "
            f"others are dropped; the base of the rotation is {done.target.rope_theta:,.6g}."
        )
    if done.losses is not None:
        out += _losses(done)
    if done.curve:
        step, loss = done.curve[-1]
        out.append(
            f"Finetuned for {step:,} steps: {loss:.4f} on the sequences held out, from "
            f"{done.curve[0][1]:.4f}."
        )
    return out


def _kept(done: Conversion) -> str:
    """Which pairs of coordinates keep rotating."""
    step = done.kept_pairs[1] - done.kept_pairs[0] if len(done.kept_pairs) > 1 else 1
    every = "all of them" if step == 1 else f"every {step} of them"
    return f"{done.kept_pairs[0]} to {done.kept_pairs[-1]}, {every}"


def _rotating(done: Conversion) -> str:
    """What keeps its rotary positions beside a latent."""
    width, count = done.target.qk_rope_head_dim, len(done.kept_pairs)
    which = "" if count == done.pairs else f" ({_kept(done)})"
    one = (
        f"One key of {width} coordinates rotates for all heads, with {count} of {done.pairs} pairs"
        f"{which}: it carries {done.pairs_energy:.1%} of the rotating scores' energy."
    )
    if done.pairs_energy > 1 - 1e-9:
        return one
    return (
        f"{one} Rotary positions of the other pairs, and of what heads have beside that key, are "
        "dropped: an approximation however wide the latent is."
    )


def _what(old: Shape, new: Shape) -> str:
    rope = new.qk_rope_head_dim  # beside a latent it adds to head_dim
    changed = [
        words.format(getattr(new, name), getattr(old, name))
        for name, words in WORDS.items()
        if getattr(new, name) != getattr(old, name)
        and not (new.latent and (name == "num_kv_heads" or (name == "head_dim" and rope)))
    ]
    what = " and ".join(changed)
    if not what:
        return "Nothing changes."
    return what[0].upper() + what[1:] + "."


def _losses(done: Conversion) -> list[str]:
    losses = done.losses
    assert losses is not None
    where = f"{losses.unit}, {losses.sequences} sequences of {losses.tokens} tokens held out"
    if done.exact:
        return [f"Measured: {losses.measured:.6f} for {losses.before:.6f} ({where})."]
    miss, change = losses.miss, losses.measured - losses.before
    error = "" if losses.error is None else f" with a standard error of {losses.error:.5f}"
    off = "" if miss is None else f"{abs(miss):.0%} {'more' if miss > 0 else 'less'}"
    predicted = losses.predicted - losses.before
    out = [
        f"The loss is {losses.measured:.5f} for {losses.before:.5f}, {change:+.5f}{error} "
        f"({where}). Layers changed one at a time and added up predict {predicted:+.5f}"
        + (f", {off} than measured." if miss is not None else ": too little to be compared.")
    ]
    if losses.controls:
        others = ", ".join(
            f"{name} {loss - losses.before:+.5f}" for name, loss in losses.controls.items()
        )
        out.append(f"The same by plainer means: {others}.")
    return out
