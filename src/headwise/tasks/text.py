"""Predict the next character or byte of a text.

The text is a file, or a folder of `.txt` files taken in order of name, or the column `text` of a
data set of the hub (`hf:NAME`); the last tenth is held out. Without one, `source` "" is a text that
is generated: short scenes whose people and things come back, so that there is something to look up.
Levels: `char` gives every character of the text an id (rare ones, beyond the `most` commonest,
share one), `byte` has 256.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headwise.errors import UsageError, check_texts, check_whole_numbers, nearest
from headwise.files import NotReadableError, read_file
from headwise.tasks import hub
from headwise.tasks.generated_text import generated_text
from headwise.tasks.task import Classified

LEVELS = ("char", "byte")
HELD_OUT = 0.1  # share of the text, at its end
MOST_BYTES = 256 << 20  # read at once; headwise pretrain reads larger texts part by part
GENERATED = 400_000  # characters


@dataclass(frozen=True)
class Text(Classified):
    """The next of `length` characters.

    >>> Text(length=64).vocab
    28
    """

    name = "text"
    length: int
    source: str = ""  # a file, a folder of .txt files, hf:NAME, or "" for a generated text
    level: str = "char"
    most: int = 255  # ids of characters; the rest share one more
    digest: str = ""  # of the text; found when not given, checked when given
    causal = True

    def __post_init__(self) -> None:
        check_whole_numbers(self, 2, "length", "most")
        check_texts(self, "source", "digest")
        if self.level not in LEVELS:
            raise UsageError(f"unknown level {self.level!r}; {nearest(str(self.level), LEVELS)}")
        found = _read(self.source, self.level, self.most)
        if self.digest and self.digest != found.digest:
            raise UsageError(
                f"{_name(self.source)} is not the text it was: digest {found.digest}, expected "
                f"{self.digest}"
            )
        object.__setattr__(self, "digest", found.digest)
        held = len(found.ids) - _cut(len(found.ids))
        if held < self.length + 1:
            raise UsageError(
                f"the held-out tenth of {_name(self.source)} must be longer than length "
                f"{self.length}, got {held} of {len(found.ids)} ids"
            )

    @property
    def tokens(self) -> int:
        """Length of a sequence."""
        return self.length

    @property
    def vocab(self) -> int:
        """Ids of characters or bytes."""
        return _read(self.source, self.level, self.most).vocab

    @property
    def classes(self) -> int:
        """Every id may come next."""
        return self.vocab

    def logits(self, outputs: Tensor) -> Tensor:
        """Every token is evaluated."""
        return outputs[..., : self.classes]

    def sample(
        self, generator: torch.Generator, batch: int, step: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Ids (batch, length) and the ids that follow them."""
        # A sequence begins anywhere in the part; its answers are the same ids one place on.
        ids = _part(self.source, self.level, self.most, step is None, generator.device)
        at = torch.randint(
            len(ids) - self.length, (batch, 1), generator=generator, device=generator.device
        )
        places = at + torch.arange(self.length, device=generator.device)
        return ids[places], ids[places + 1]

    def baselines(self) -> dict[str, float]:
        """Equal odds, and the odds of single characters and of pairs as counted in the training
        part, held out."""
        return {**super().baselines(), **_counted(self.source, self.level, self.most)}


@dataclass(frozen=True)
class _Read:
    ids: Tensor  # all of the text
    vocab: int
    digest: str


@functools.lru_cache(8)
def _read(source: str, level: str, most: int) -> _Read:
    data = _bytes(source)
    digest = hashlib.sha256(data).hexdigest()[:12]
    if level == "byte":
        return _Read(torch.frombuffer(bytearray(data), dtype=torch.uint8).long(), 256, digest)
    try:
        text = data.decode()
    except UnicodeDecodeError as e:
        raise UsageError(
            f"{source} is not text in UTF-8 (byte {e.start}); level=byte takes any file"
        ) from None
    # The commonest characters get ids in the order of characters; all rarer ones share the id
    # behind.
    by_count = sorted(Counter(text).items(), key=lambda item: (-item[1], item[0]))
    common = sorted(c for c, _ in by_count[:most])
    known = {c: i for i, c in enumerate(common)}
    return _Read(
        torch.tensor([known.get(c, len(common)) for c in text]),
        len(common) + (len(set(text)) > len(common)),
        digest,
    )


def _name(source: str) -> str:
    return source or "the generated text"


def _bytes(source: str) -> bytes:
    if not source:
        return generated_text(GENERATED).encode()
    if hub.on_hub(source):
        data = "\n".join(map(str, hub.column(source, hub.part(source, "train"), "text"))).encode()
    else:
        data = _file_bytes(source)
    if not data.strip():
        raise UsageError(f"the text at {source} is empty")
    return data


def _file_bytes(source: str) -> bytes:
    path = Path(source)
    try:
        if not path.exists():
            raise UsageError(
                f'there is no text at {source}; give a file, a folder of .txt files, or "" for a '
                "generated text"
            )
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise UsageError(f"the folder {source} holds no .txt files")
        most = MOST_BYTES
        parts = []
        for file in files:
            parts.append(read_file(file, most, links=True))
            most -= len(parts[-1])
        return b"\n".join(parts)
    except NotReadableError as e:
        raise UsageError(f"{source} cannot be read: {e}") from None
    except OSError as e:
        raise UsageError(f"{source} cannot be read: {e.strerror}") from None


def _cut(length: int) -> int:
    """Where the held-out part begins."""
    return length - int(length * HELD_OUT)


@functools.lru_cache(8)
def _part(source: str, level: str, most: int, held_out: bool, device: torch.device) -> Tensor:
    ids = _read(source, level, most).ids
    return (ids[_cut(len(ids)) :] if held_out else ids[: _cut(len(ids))]).to(device)


@functools.lru_cache(8)
def _counted(source: str, level: str, most: int) -> dict[str, float]:
    cpu, vocab = torch.device("cpu"), _read(source, level, most).vocab
    train, held = (_part(source, level, most, part, cpu) for part in (False, True))
    # Counts of the training part, half a count more each, so that what never occurred has odds too.
    single = _log_odds(torch.bincount(train, minlength=vocab))
    pairs = _log_odds(
        torch.bincount(train[:-1] * vocab + train[1:], minlength=vocab * vocab).view(vocab, vocab)
    )
    return {
        "single": -single[held[1:]].mean().item(),
        "pairs": -pairs[held[:-1], held[1:]].mean().item(),
    }


def _log_odds(counts: Tensor) -> Tensor:
    smoothed = counts.double() + 0.5
    return (smoothed / smoothed.sum(-1, keepdim=True)).log()
