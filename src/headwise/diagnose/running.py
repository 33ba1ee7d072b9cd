"""Models that run on data, with every layer's attention in our hands: our own modules for runs of
headwise, transformers' classes for Hugging Face folders.

The attention of every layer is written out in plain PyTorch, so that a watcher sees queries, keys,
values and mask, and may put other queries in their place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.diagnose.checkpoints import Checkpoint
from headwise.diagnose.config_layouts import OURS
from headwise.diagnose.vectors import Wanted, samples_of, wanted_images
from headwise.errors import UsageError, one_line, shown
from headwise.files import read_file, read_json

NAME = "headwise_inspect"  # of the attention function while a model is watched
MOST_IDS = 50_000_000


@dataclass
class Call:
    """One layer's attention of one batch: q (B, H, N, R), k and v by KV head, what is seen."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor | None  # (N, N) or (B, 1, N, N) true where a key is seen
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def scores(self) -> Tensor:
        """(B, H, N, N) before the mask."""
        group = self.q.shape[1] // self.k.shape[1]
        scores = self.q @ self.k.repeat_interleave(group, 1).mT * self.scale
        return self.softcap * (scores / self.softcap).tanh() if self.softcap else scores

    def weights(self, scores: Tensor) -> Tensor:
        """Attention weights."""
        if self.seen is not None:
            scores = scores.masked_fill(~self.seen, torch.finfo(scores.dtype).min)
        if self.sinks is not None:
            sinks = self.sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        return scores.softmax(-1)

    def output(self, weights: Tensor) -> Tensor:
        """(B, H, N, V)."""
        group = self.q.shape[1] // self.v.shape[1]
        return weights @ self.v.repeat_interleave(group, 1)


Watcher = Callable[[Call], Tensor]  # returns the heads' outputs


def plainly(call: Call) -> Tensor:
    """What attention does."""
    return call.output(call.weights(call.scores()))


@dataclass
class Running:
    """A model that takes ids, or images or vectors where it says what is `wanted`. `run(rows,
    watcher)` returns logits, or the last states of an encoder, in float32."""

    run: Callable[[Tensor, Watcher], Tensor]
    causal: bool  # whether its outputs are logits of the next token
    vocab_size: int
    most_tokens: int | None
    encode: Callable[[str], list[int]] | None  # its tokenizer, where there is one
    wanted: Wanted | None = None  # of models that read no tokens


def running(checkpoint: Checkpoint) -> Running:
    """The model of a checkpoint, ready to run on a CPU."""
    if checkpoint.family == OURS:
        return _ours(checkpoint)
    folder = checkpoint.path
    if not (folder.is_dir() and (folder / "config.json").is_file()):
        raise UsageError(
            "on data runs of headwise and Hugging Face folders are measured, got "
            f"{checkpoint.source.kind} at {str(folder)!r}"
        )
    return _public(folder)


# ---- runs of ours


def _ours(checkpoint: Checkpoint) -> Running:
    from headwise.model.transformer import build

    shape = checkpoint.shape
    if shape is None:
        raise UsageError("the run says no shape")
    model = build(shape)
    names = {n.removeprefix("weights."): n for n in checkpoint.source.entries}
    try:
        state = {n: checkpoint.source.read(names[n]) for n, _ in model.named_parameters()}
        model.load_state_dict(state, strict=False)
    except (KeyError, RuntimeError) as error:
        raise UsageError(f"the weights do not fit their run: {one_line(error)}") from None
    model.eval()
    watchers: list[Watcher] = [plainly]
    for i, block in enumerate(model.blocks):
        attention: Any = block.attention
        attention.attend_heads = _heads_of_ours(attention, i, watchers)

    def run(ids: Tensor, watcher: Watcher) -> Tensor:
        watchers[0] = watcher
        with torch.inference_mode():
            return model(ids)[0].float()

    most = shape.num_positions if shape.positions in ("additive", "concatenated") else None
    if not shape.vocab_size:
        return Running(run, False, 0, most, None, Wanted((None, shape.in_dim)))
    is_bytes = shape.vocab_size >= 256
    encode = (lambda text: list(text.encode())) if is_bytes else None
    return Running(run, shape.causal and shape.lm_head, shape.vocab_size, most, encode)


def _heads_of_ours(attention: Any, layer: int, watchers: list[Watcher]) -> Callable[..., Tensor]:
    from headwise.model.reference import mask_of

    def attend_heads(s: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        seen = mask_of(q.shape[-2], k.shape[-2], s.causal, attention.window, q.device)
        out = watchers[0](Call(layer, q, k, v, seen, s.scale))
        return out.transpose(1, 2).flatten(-2)

    return attend_heads


# ---- transformers


def _public(folder: Path) -> Running:
    try:
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise UsageError(f"a Hugging Face model runs with transformers: {error}") from None
    transformers.logging.set_verbosity_error()
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(folder, **local)
        names = list(getattr(config, "architectures", None) or [])
        causal = any("CausalLM" in n or "LMHead" in n for n in names)
        kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
        with _quiet():
            model = kind.from_pretrained(
                folder, attn_implementation="eager", dtype=torch.float32, **local
            )
    except Exception as error:  # transformers raises nearly anything
        raise UsageError(f"transformers cannot load {str(folder)!r}: {one_line(error)}") from None
    model.eval()
    with contextlib.suppress(AttributeError, ValueError):  # fused experts want sizes of 16 bytes
        model.set_experts_implementation("eager")
    watchers: list[Watcher] = [plainly]
    calls = [0]  # of this run: layers in order, also where they share one module (ALBERT)

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        scale = more.get("scaling")
        seen = _seen(mask)
        causal = more.get("is_causal")
        if causal is None:
            causal = getattr(module, "is_causal", True)
        if seen is None and causal:  # a mask that says no more is left out
            seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        call = Call(
            calls[0], q, k, v, seen,
            q.shape[-1] ** -0.5 if scale is None else scale, more.get("softcap"), more.get("s_aux"),
        )  # fmt: skip
        calls[0] += 1
        return watchers[0](call).transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)

    pixels = getattr(model, "main_input_name", "") == "pixel_values"

    def run(ids: Tensor, watcher: Watcher) -> Tensor:
        watchers[0], calls[0] = watcher, 0
        AttentionInterface.register(NAME, attend)  # of this model, where several are open
        with torch.inference_mode():
            out = model(pixel_values=ids) if pixels else model(input_ids=ids)
        found = out.logits if hasattr(out, "logits") else out.last_hidden_state
        return found.float()

    if pixels:
        return Running(run, False, 0, None, None, wanted_images(config, folder))
    vocab = getattr(config.get_text_config(), "vocab_size", 0)
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    return Running(run, causal, vocab, most, _tokenizer(folder, local))


def _seen(mask: Tensor | None) -> Tensor | None:
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask > torch.finfo(mask.dtype).min / 2


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _tokenizer(folder: Path, local: dict[str, Any]) -> Callable[[str], list[int]] | None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **local)
    except Exception:  # a folder without one
        return None
    encode: Any = tokenizer
    return lambda text: encode(text, add_special_tokens=False)["input_ids"]


# ---- data


def rows_of(data: Any, model: Running, tokens: int, sequences: int) -> Tensor:
    """Sequences of ids (count, tokens), or images or vectors with their own axes; two at least."""
    if model.wanted is not None:
        rows = samples_of(data, model.wanted, sequences)
        if len(rows) < 2:
            raise UsageError(f"at least two samples are needed, got {len(rows)}")
        if model.most_tokens is not None and rows.shape[1] > model.most_tokens:
            raise UsageError(f"at most {model.most_tokens} vectors fit the model's positions, got "
                             f"{rows.shape[1]}")  # fmt: skip
        return rows
    tokens = min(tokens, model.most_tokens or tokens)
    ids = ids_of(data, model)
    count = min(sequences, len(ids) // tokens)
    if count < 2:
        raise UsageError(
            f"at least two sequences of {tokens} tokens are needed, got {len(ids):,} tokens"
        )
    return ids[: count * tokens].view(count, tokens)


def ids_of(data: str | Path | Sequence[int] | Tensor, model: Running) -> Tensor:
    """Token ids in a row: given, a JSON list of them, or a text for the model's tokenizer."""
    if isinstance(data, str | Path):
        try:
            raw = read_file(data, links=True)
        except OSError as error:
            raise UsageError(f"cannot read {str(data)!r}: {error}") from None
        if str(data).endswith(".json"):
            try:
                found = read_json(raw)
            except ValueError as error:
                raise UsageError(f"{str(data)!r} is not JSON: {one_line(error)}") from None
        elif model.encode is None:
            raise UsageError("the model has no tokenizer here: give token ids as a JSON list")
        else:
            found = model.encode(raw.decode("utf-8", "replace"))
    else:
        found = data.flatten().tolist() if isinstance(data, Tensor) else list(data)
    if not isinstance(found, list) or not all(type(n) is int for n in found):
        raise UsageError(f"token ids must be a list of whole numbers, got {shown(found)}")
    if not 0 < len(found) <= MOST_IDS or not 0 <= min(found) <= max(found) < model.vocab_size:
        raise UsageError(
            f"token ids must be from 0 to {model.vocab_size - 1}, at most {MOST_IDS:,} of them, "
            f"got {len(found):,}" + (f" from {min(found)} to {max(found)}" if found else "")
        )
    return torch.tensor(found)
