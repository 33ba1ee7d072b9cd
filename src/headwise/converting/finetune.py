"""Training of a converted model on a text, with the held-out loss along the way.

A run of headwise is trained as our decoder, a Hugging Face folder by transformers: AdamW, a cosine,
one batch of sequences per step. The result takes the place of the converted weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.converting.trial import Trial
from headwise.converting.writing import NAMES, made, write_pieces
from headwise.diagnose.checkpoints import open_checkpoint
from headwise.diagnose.config_layouts import OURS
from headwise.errors import UsageError, one_line
from headwise.rows import WEIGHTS_FILE

BATCH = 16  # sequences of a step
POINTS = 8  # of the curve
CLIP = 1.0


def finetune(
    folder: Path,
    trial: Trial,
    *,
    steps: int,
    lr: float,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[int, float]]:
    """Train the model in a folder on what a trial does not measure on; the held-out loss by
    step."""
    if not trial.model.causal:
        raise UsageError("finetune trains decoders, this model is none")
    ours = open_checkpoint(folder).family == OURS
    model = _ours(folder) if ours else _public(folder)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    marks = {round(i * steps / POINTS) for i in range(POINTS + 1)}
    curve = [(0, _held_out(model, trial.test))]
    model.train()
    for step in range(1, steps + 1):
        share = 0.5 + 0.5 * math.cos(math.pi * (step - 1) / steps)
        for group in optimiser.param_groups:
            group["lr"] = lr * share * min(1.0, step / max(1, steps // 20))
        rows = torch.randint(len(trial.train), (BATCH,), generator=generator)
        loss = _loss(model, trial.train[rows])
        if not math.isfinite(loss.item()):
            raise UsageError(f"the loss is not finite at step {step}; a smaller lr than {lr:g}")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step in marks:
            model.eval()
            curve.append((step, _held_out(model, trial.test)))
            model.train()
        if progress is not None:
            progress(step, steps)
    _write(folder, model, ours)
    return curve


def _loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Nats per token that follows another."""
    out: Any = model(rows)
    logits = out.logits if hasattr(out, "logits") else out[0]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def _held_out(model: nn.Module, rows: Tensor) -> float:
    parts = [(len(part), float(_loss(model, part))) for part in rows.split(BATCH)]
    return sum(count * loss for count, loss in parts) / len(rows)


def _ours(folder: Path) -> nn.Module:
    from headwise.model.transformer import build

    checkpoint = open_checkpoint(folder)
    assert checkpoint.shape is not None
    model = build(checkpoint.shape)
    names = [name for name, _ in model.named_parameters()]
    model.load_state_dict({name: checkpoint.source.read(name).float() for name in names})
    return model


def _public(folder: Path) -> nn.Module:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise UsageError(f"a Hugging Face model is finetuned with transformers: {error}") from None
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, dtype=torch.float32
        )
    except Exception as error:  # transformers raises nearly anything
        raise UsageError(f"transformers cannot load the result: {one_line(error)}") from None


def _write(folder: Path, model: nn.Module, ours: bool) -> None:
    """The trained weights in the place of the converted ones, in their precision."""
    source = open_checkpoint(folder).source
    trained = dict(model.state_dict())
    pieces = []
    for name, entry in source.entries.items():
        old = source.reader(name)
        new = trained.get(name, old).detach().to(old.dtype)
        pieces.append(made(name, NAMES[new.dtype], entry.shape, lambda t=new: t))
    new_name = folder / "finetuned.safetensors"
    about = {key: str(value) for key, value in source.about.items() if key != "digest"}
    write_pieces(new_name, pieces, about)
    files = {entry.path for entry in source.entries.values()}
    for path in files:
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    new_name.rename(folder / (WEIGHTS_FILE if ours else "model.safetensors"))
