"""What a trained decoder writes: the decoder, its tokenizer, and text as it comes.

writer = load_writer(Path("headwise-store/runs/3f2a90c1b5d7e846"))
for piece in writer.write("It was", tokens=100, temperature=0.8):
    print(piece, end="")
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import UsageError, shown
from headwise.files import write_whole
from headwise.lm.text_files import chunks, end_of, find_text, find_tokenizer, vocab_of
from headwise.rows import SAMPLE_FILE

if TYPE_CHECKING:
    import torch

    from headwise.model.transformer import Decoder

SAMPLE_TOKENS, SAMPLE_PROMPT = 300, 60  # of the sample that training leaves; characters given
MOST_SAMPLED = 200_000_000  # parameters of a decoder that training lets write a sample


# ---- a decoder and its tokenizer


@dataclass
class Writer:
    """A decoder that takes and gives text."""

    model: Decoder
    tokenizer: Any  # None for bytes
    length: int  # of the sequences it was trained on
    id: str

    @property
    def ids(self) -> int:
        """How many ids mean something; the model has some more, so that its table is even."""
        return vocab_of(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """The ids of a text; nothing at all is the end of the document before."""
        if text and self.tokenizer is None:
            return list(text.encode("utf-8", "surrogateescape"))
        if text:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        end = end_of(self.tokenizer)
        if end is None:
            raise UsageError(
                "this decoder's tokenizer has no token that ends a document, so it needs a prompt"
            )
        return [end]

    def write(
        self,
        prompt: str,
        *,
        tokens: int,
        temperature: float = 0.8,
        top_k: int = 0,
        generator: torch.Generator | None = None,
    ) -> Iterator[str]:
        """What follows the prompt, in pieces as they come, until a document ends or there are so
        many tokens. At temperature 0 it is the likeliest token each time."""
        pieces = _Pieces(self.tokenizer)
        for one in self._continued(self.encode(prompt), tokens, temperature, top_k, generator):
            if one == end_of(self.tokenizer):
                break
            if piece := pieces.add(one):
                yield piece
        if rest := pieces.end():
            yield rest

    def _continued(
        self,
        ids: list[int],
        tokens: int,
        temperature: float,
        top_k: int,
        generator: torch.Generator | None,
    ) -> Iterator[int]:
        """One id after the other. The decoder looks back over as many tokens as it was trained on;
        when those are full, it begins anew with the newer half."""
        import torch

        from headwise.model.cache import Cache
        from headwise.model.generate import check_sampling, decode, pick, prefill

        check_sampling(self.model, tokens, temperature, top_k)
        weight = next(self.model.parameters())
        cache, logits = None, None
        ids = list(ids)
        for _ in range(tokens):
            if cache is None or cache.layers[0].length >= self.length:
                kept = self.length - 1 if cache is None else self.length // 2
                seen = ids[-max(1, kept) :]
                room = {"dtype": weight.dtype, "device": weight.device}
                cache = Cache(self.model.shape, 1, self.length, **room)
                logits = prefill(self.model, torch.tensor([seen], device=weight.device), cache)
            else:
                newest = torch.tensor(ids[-1:], device=weight.device)
                logits = decode(self.model, newest, cache)
            # Ids behind the tokenizer's have no meaning.
            known = logits[:, : self.ids].float()
            ids.append(int(pick(known, temperature, min(top_k, self.ids), generator)))
            yield ids[-1]


class _Pieces:
    """Ids to text, each character when it is complete."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.ids: list[int] = []
        self.said = 0  # characters that were given already

    def add(self, one: int) -> str:
        if self.tokenizer is None:
            return self.decoder.decode(bytes([one]))
        self.ids.append(one)
        text = self.tokenizer.decode(self.ids, skip_special_tokens=False)
        if text.endswith("\ufffd"):  # in the middle of a character
            return ""
        piece, self.said = text[self.said :], len(text)
        return piece

    def end(self) -> str:
        if self.tokenizer is None:
            return self.decoder.decode(b"", final=True)
        return self.tokenizer.decode(self.ids, skip_special_tokens=False)[self.said :]


def load_writer(folder: Path, device: str = "cpu", tokenizer: str = "") -> Writer:
    """The decoder of a run's folder, with the tokenizer it was trained with, or the same one from
    where it lies now."""
    from headwise.device import pick_device
    from headwise.lm.checkpoint import read_decoder

    where = pick_device(device)
    model, spec = read_decoder(folder)
    if not model.shape.vocab_size or "batch_tokens" not in spec:
        raise UsageError(f"{folder} is not a decoder that headwise pretrain trained on a text")
    if spec.get("tokenizer") and not (tokenizer or Path(spec["tokenizer"]).is_file()):
        raise UsageError(
            f"this decoder needs its tokenizer, which was at {spec['tokenizer']}: give "
            "--tokenizer FILE"
        )
    if tokenizer and not spec.get("tokenizer"):
        raise UsageError(f"this decoder was trained on bytes, got --tokenizer {shown(tokenizer)}")
    known, _ = find_tokenizer(tokenizer or spec.get("tokenizer") or "")
    if vocab_of(known) > model.shape.vocab_size:
        raise UsageError(
            f"the decoder has {model.shape.vocab_size} ids, this tokenizer {vocab_of(known)}: it "
            "is another one"
        )
    return Writer(model.to(where), known, int(spec["length"]), folder.name)


# ---- the sample that training leaves


def write_sample(folder: Path, source: str, device: str = "cpu") -> None:
    """Let a decoder continue the beginning of its held-out text, and keep that beside its weights
    for the store's page."""
    import torch

    writer = load_writer(folder, device)
    if writer.model.shape.params > MOST_SAMPLED:
        return
    prompt = _held_out_words(source)
    generator = torch.Generator(next(writer.model.parameters()).device).manual_seed(0)
    pieces = writer.write(prompt, tokens=SAMPLE_TOKENS, temperature=0.8, generator=generator)
    sample = {"prompt": prompt, "text": "".join(pieces), "temperature": 0.8, "seed": 0}
    write_whole(folder / SAMPLE_FILE, json.dumps(sample) + "\n")


def _held_out_words(source: str) -> str:
    """The first whole words of a text's held-out part."""
    held_out = next((c.data for c in chunks(find_text(source)) if c.held_out and c.data), b"")
    text = held_out[: 4 * SAMPLE_PROMPT].decode(errors="ignore")
    first = text.partition("\n")[2].lstrip() or text  # the cut is seldom between two lines
    return first[:SAMPLE_PROMPT].rpartition(" ")[0] or first[:SAMPLE_PROMPT]
