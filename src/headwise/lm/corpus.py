"""Text -> token ids -> packed batches.

A text is a file, or a folder of `.txt` files in order of name, each a document; "" is a generated
one. Its last tenth, counted in bytes, is held out, whatever the tokenizer. Ids are the bytes and
one more at the end of a document, or what a `tokenizers` JSON file makes of the text. What a step
sees is a pure function of the seed and of the numbers of its rows, so it depends neither on how
many processes share a step nor on how often a run was killed.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from headwise.errors import UsageError
from headwise.files import locked, whole_file, write_whole
from headwise.seeds import derive, generator_of
from headwise.tasks.generated_text import generated_text

HELD_OUT = 10  # one part in this many, at the end of the text
PIECE, AT_ONCE = 1 << 20, 32  # bytes of a piece, and how many are tokenized at once
GENERATED = 1_000_000  # characters
COUNTED, HASHED, RARE = (
    1 << 26,
    16_777_213,
    1_000_000,
)  # ids whose pairs are counted, in so many classes; one in so many is rare
FORMAT = 1  # of the files of ids
BYTES = 257  # ids of the byte tokenizer; the last one ends a document
ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|bos|>",
    "</s>",
    "<eos>",
    "[SEP]",
)  # what tokenizers call the end of a document


# ---- texts


@dataclass(frozen=True)
class Text:
    """A text that was looked through: it is there, not empty, and UTF-8."""

    name: str
    documents: tuple[Path | bytes, ...]
    size: int  # bytes
    digest: str

    @property
    def cut(self) -> int:
        """The byte at which the held-out part begins: the first of a character."""
        cut = before = self.size - self.size // HELD_OUT
        for document in self.documents:
            size = _size(document)
            if before < size:
                with _opened(document) as f:
                    f.seek(before)
                    after = f.read(3)
                return cut + next(
                    (i for i, byte in enumerate(after) if byte & 0xC0 != 0x80), len(after)
                )
            before -= size
        return cut


def find_text(source: str) -> Text:
    """The text at a path, read once from end to end; "" generates one.

    >>> find_text("").size
    1000000
    """
    if not source:
        documents: tuple[Path | bytes, ...] = (_generated(),)
        return Text("the generated text", documents, GENERATED, _look_through(documents))
    path = Path(source)
    try:
        if not path.exists():
            raise UsageError(
                f"there is no text at {source}; give a file, a folder of .txt files, or none for "
                "a generated text"
            )
        files = (
            tuple(p for p in sorted(path.rglob("*.txt")) if p.is_file())
            if path.is_dir()
            else (path,)
        )
        if not files:
            raise UsageError(f"the folder {source} holds no .txt files")
        stats = [p.stat() for p in files]
        return _found(source, files, tuple((found.st_size, found.st_mtime_ns) for found in stats))
    except OSError as e:
        raise UsageError(f"{source} cannot be read: {e.strerror}") from None


@functools.lru_cache(4)
def _found(source: str, files: tuple[Path, ...], stats: tuple[tuple[int, int], ...]) -> Text:
    """Looked through once, until a size or a time of change is another."""
    return Text(source, files, sum(size for size, _ in stats), _look_through(files, source))


@functools.lru_cache(1)
def _generated() -> bytes:
    return generated_text(GENERATED).encode()


def _size(document: Path | bytes) -> int:
    return len(document) if isinstance(document, bytes) else document.stat().st_size


def _opened(document: Path | bytes) -> BinaryIO:
    return io.BytesIO(document) if isinstance(document, bytes) else document.open("rb")


def _look_through(documents: tuple[Path | bytes, ...], source: str = "") -> str:
    """The digest of a text; refuses what is not one."""
    digest, blank = hashlib.sha256(), True
    for document in documents:
        digest.update(_size(document).to_bytes(8, "big"))
        decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
        with _opened(document) as f:
            while data := f.read(PIECE):
                if b"\0" in data:
                    raise UsageError(f"{document} is not text: byte {at + data.index(0)} is 0")
                _decode(decoder, data, at, document)
                digest.update(data)
                blank, at = blank and not data.strip(), at + len(data)
            _decode(decoder, b"", at, document)
    if blank:
        raise UsageError(f"the text at {source} is empty")
    return digest.hexdigest()[:16]


def _decode(
    decoder: codecs.IncrementalDecoder, data: bytes, at: int, document: Path | bytes
) -> None:
    begun = len(decoder.getstate()[0])
    try:
        decoder.decode(data, final=not data)
    except UnicodeDecodeError as e:
        raise UsageError(f"{document} is not text in UTF-8 (byte {at - begun + e.start})") from None


def _pieces(text: Text) -> Iterator[tuple[bytes, bool, bool]]:
    """The text in order, a line's end last in each piece where there is one: (bytes, held out?,
    last of its document?)."""
    before, cut = 0, text.cut
    for document in text.documents:
        done, size = 0, _size(document)
        with _opened(document) as f:
            while done < size:
                stop = min(done + PIECE, size)
                if before + done < cut < before + stop:
                    stop = cut - before
                f.seek(done)
                data = f.read(stop - done)
                if stop != size and before + stop != cut:
                    data = data[: data.rfind(b"\n") + 1] or _whole_characters(data)
                yield data, before + done >= cut, done + len(data) == size
                done += len(data)
        before += size


def _whole_characters(data: bytes) -> bytes:
    return data.decode(errors="ignore").encode()


# ---- tokenizers


def find_tokenizer(path: str) -> tuple[Any, str]:
    """The tokenizer of a `tokenizers` JSON file and its digest; none and "" for bytes."""
    if not path:
        return None, ""
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise UsageError(f"the tokenizer {path} cannot be read: {e.strerror}") from None
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise UsageError(
            "a tokenizer's file needs tokenizers: pip install 'headwise[text]'"
        ) from None
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception as e:  # it raises Exception itself
        raise UsageError(
            f"{path} is not a tokenizers JSON file: {' '.join(str(e).split())}"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, hashlib.sha256(data).hexdigest()[:16]


def vocab_of(tokenizer: Any) -> int:
    """How many ids there are."""
    return (
        BYTES
        if tokenizer is None
        else max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    )


def end_of(tokenizer: Any) -> int | None:
    """The id that ends a document, if there is one."""
    return (
        BYTES - 1
        if tokenizer is None
        else next((i for name in ENDS if (i := tokenizer.token_to_id(name)) is not None), None)
    )


def encode(
    tokenizer: Any, pieces: Sequence[bytes]
) -> Iterator[tuple[np.ndarray, Callable[[], np.ndarray]]]:
    """Ids of pieces of text, all cores at it, and on demand how many of a piece's bytes are behind
    each of its ids.

    A character that is cut into several ids counts for the first of them, what a tokenizer skips
    for the next.

    >>> [behind().tolist() for _, behind in encode(None, [b"abc"])]
    [[1, 2, 3]]
    """
    if tokenizer is None:
        for data in pieces:
            yield np.frombuffer(data, np.uint8), functools.partial(np.arange, 1, len(data) + 1)
        return
    texts = [data.decode() for data in pieces]
    try:
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    except Exception as e:  # it raises Exception itself
        raise UsageError(
            f"the tokenizer does not fit this text: {' '.join(str(e).split())}"
        ) from None
    ids = [one.ids for one in encoded]
    for text, one, some, back in zip(
        texts, encoded, ids, tokenizer.decode_batch(ids, skip_special_tokens=False), strict=True
    ):
        if back != text or not some:
            at = next(
                (i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b),
                min(len(text), len(back)),
            )
            was, became = text[at : at + 12], back[at : at + 12]
            raise UsageError(
                "the tokenizer does not fit this text, it must give every character back: "
                f"{was!r} became {became!r}"
            )
        yield np.asarray(some), functools.partial(_behind, text, one.offsets)


def _behind(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Bytes of a text up to the end of each id, from the characters that are behind them."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    behind = np.concatenate(([0], np.cumsum(widths)))
    ends = np.maximum.accumulate(behind[[stop for _, stop in offsets]])
    ends[-1] = behind[-1]
    return ends


# ---- ids


@dataclass(frozen=True)
class Corpus:
    """A text as ids, the training part first."""

    ids: np.ndarray
    cut: int  # the first id that is held out
    behind: np.ndarray  # for each held-out id: bytes of the held-out part up to its end
    vocab: int
    end: int | None  # the id that ends a document


def load(text: Text, tokenizer: Any, folder: Path | None = None, key: str = "") -> Corpus:
    """The ids of a text; with a folder they are kept in it under a key, and mapped from there
    rather than read."""
    if folder is None:
        parts = list(_encoded(text, tokenizer))
        ids, cut = (
            np.concatenate([ids for ids, _ in parts]),
            sum(len(ids) for ids, behind in parts if behind is None),
        )
        held_out = [behind for _, behind in parts if behind is not None]
        return Corpus(ids, cut, _joined(held_out), vocab_of(tokenizer), end_of(tokenizer))
    about = folder / f"{key}.json"
    if not about.exists():
        with locked(folder / f"{key}.lock"):  # one process makes them, others wait
            if not about.exists():
                _write(text, tokenizer, folder, key)
    count, cut = _told(about)
    ids, behind = (
        _mapped(folder / f"{key}.ids", _kind(tokenizer)),
        _mapped(folder / f"{key}.behind", np.int64),
    )
    if len(ids) != count or len(behind) != count - cut:
        raise UsageError(
            f"{folder / key}.ids is not whole, {len(ids)} of {count} ids: remove {about}"
        )
    return Corpus(ids, cut, behind, vocab_of(tokenizer), end_of(tokenizer))


def _told(about: Path) -> tuple[int, int]:
    """How many ids are kept, and the first that is held out."""
    try:
        told = json.loads(about.read_text())
        found = told["format"]
        sizes = (int(told["ids"]), int(told["cut"])) if found == FORMAT else (0, 0)
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{about} cannot be read: remove it") from None
    if found != FORMAT:
        raise UsageError(f"{about} has format {found}, this headwise reads {FORMAT}: remove it")
    return sizes


def _mapped(path: Path, kind: Any) -> np.ndarray:
    """A file of numbers; none where it is empty or gone."""
    whole = path.stat().st_size // np.dtype(kind).itemsize if path.exists() else 0
    return np.memmap(path, kind, "r", shape=(whole,)) if whole else np.zeros(0, kind)


def _kind(tokenizer: Any) -> Any:
    return np.uint16 if vocab_of(tokenizer) <= 1 << 16 else np.uint32


def _encoded(text: Text, tokenizer: Any) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Piece by piece: ids, and of what is held out the bytes behind each within its piece."""
    end, kind, rest = end_of(tokenizer), _kind(tokenizer), _pieces(text)
    while pieces := list(itertools.islice(rest, AT_ONCE)):
        for (_, held, last), (ids, bytes_behind) in zip(
            pieces, encode(tokenizer, [data for data, _, _ in pieces]), strict=True
        ):
            behind = bytes_behind() if held else None
            if last and end is not None:
                ids, behind = (
                    np.append(ids, end),
                    None if behind is None else np.append(behind, behind[-1]),
                )
            yield ids.astype(kind), behind


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """Counts within pieces as counts from the start."""
    before = np.cumsum([0, *(int(part[-1]) for part in parts)])
    return (
        np.concatenate([part + start for part, start in zip(parts, before, strict=False)])
        if parts
        else np.zeros(0, np.int64)
    )


def _write(text: Text, tokenizer: Any, folder: Path, key: str) -> None:
    """Ids as they come, never all of them in memory; the description last, which makes them
    count."""
    for left in folder.glob(f".{key}.*"):  # by somebody who was killed
        left.unlink()
    count = cut = 0
    held_out = []
    with whole_file(folder / f"{key}.ids") as temporary, temporary.open("wb") as f:
        for ids, behind in _encoded(text, tokenizer):
            f.write(ids.tobytes())
            count, cut = count + len(ids), cut + (len(ids) if behind is None else 0)
            held_out += [] if behind is None else [behind]
        if not held_out or not cut:
            raise UsageError(f"{text.name} is too short to hold a tenth of it out, got {count} ids")
    write_whole(folder / f"{key}.behind", _joined(held_out).astype(np.int64).tobytes())
    write_whole(
        folder / f"{key}.json",
        json.dumps({"format": FORMAT, "text": text.name, "ids": count, "cut": cut}) + "\n",
    )


def check_length(corpus: Corpus, length: int, name: str) -> None:
    """Both parts must be longer than a sequence."""
    for part, count in (
        ("training part", corpus.cut),
        ("held-out tenth", len(corpus.ids) - corpus.cut),
    ):
        if count < length + 1:
            raise UsageError(
                f"the {part} of {name} must be longer than length {length}, got {count} ids"
            )
    if corpus.behind[-1] == corpus.behind[0]:
        raise UsageError(
            f"the held-out tenth of {name} must hold text, got the end of a document alone"
        )


# ---- batches


def rows_at(corpus: Corpus, length: int, seed: int, first: int, count: int) -> Tensor:
    """Training rows first, first + 1, ... of a run: (count, length + 1) ids, the inputs and the one
    that follows.

    Rows are windows side by side that cover the training part in random order, once an epoch, each
    epoch from another start.
    """
    windows = max(1, (corpus.cut - length) // length)
    starts: list[np.ndarray] = []
    while count:
        epoch, at = divmod(first, windows)
        some = _starts(seed, epoch, length, windows, corpus.cut)[at : at + count]
        starts.append(some)
        first, count = first + len(some), count - len(some)
    return _cut_out(corpus.ids, np.concatenate(starts), length)


@functools.lru_cache(2)
def _starts(seed: int, epoch: int, length: int, windows: int, ids: int) -> np.ndarray:
    generator = generator_of(torch.device("cpu"), derive(seed, "windows", epoch))
    slack = min(length, ids - windows * length)
    shift = torch.randint(slack, (), generator=generator).item()
    return torch.randperm(windows, generator=generator).numpy() * length + shift


def held_out_starts(corpus: Corpus, length: int, most: int) -> np.ndarray:
    """Where windows of the held-out part begin: side by side, or at most `most`, evenly spread."""
    windows = (len(corpus.ids) - corpus.cut - 1) // length
    count = min(windows, most)
    return corpus.cut + np.arange(count) * windows // count * length


def held_out_rows(corpus: Corpus, length: int, starts: np.ndarray) -> tuple[Tensor, Tensor]:
    """Ids (rows, length + 1), and how many bytes the last `length` of each row stand for."""
    at = starts - corpus.cut
    return _cut_out(corpus.ids, starts, length), torch.from_numpy(
        corpus.behind[at + length] - corpus.behind[at]
    )


def bigrams(corpus: Corpus) -> np.ndarray:
    """How often pairs of neighbouring ids occur in (the beginning of) the training part, at most:
    counted by a hash."""
    ids = np.asarray(corpus.ids[: min(corpus.cut, COUNTED)], np.int64)
    return np.bincount((ids[:-1] * corpus.vocab + ids[1:]) % HASHED, minlength=HASHED)


def repeated(corpus: Corpus, counts: np.ndarray, ids: Tensor) -> Tensor:
    """Which ids of rows (rows, length + 1), but the first, could be recalled from the row: the pair
    that ends there occurred in it before, and is rare in the training part, at most one of a
    million, so that it is hardly known by heart; (rows, length)."""
    pairs = ids[:, :-1].numpy() * corpus.vocab + ids[:, 1:].numpy()
    again = np.ones(pairs.shape, bool)
    for row, mask in zip(pairs, again, strict=True):
        mask[np.unique(row, return_index=True)[1]] = False
    return torch.from_numpy(again & (counts[pairs % HASHED] <= min(corpus.cut, COUNTED) / RARE))


def recall_rows(corpus: Corpus, pairs: int, rows: int, seed: int) -> Tensor:
    """Associative recall in ids drawn at random: `pairs` keys, each followed by its value, then all
    of them again in another order; (rows, 4 pairs). Keys of a row are distinct, so each value of
    the second half is told by the first."""
    generator = generator_of(torch.device("cpu"), derive(seed, "recall"))
    known = torch.tensor([i for i in range(corpus.vocab) if i != corpus.end])
    keys = torch.stack(
        [known[torch.randperm(len(known), generator=generator)[:pairs]] for _ in range(rows)]
    )
    values = known[torch.randint(len(known), (rows, pairs), generator=generator)]
    once = torch.stack((keys, values), -1)
    order = torch.stack([torch.randperm(pairs, generator=generator) for _ in range(rows)])
    again = once.gather(1, order.unsqueeze(-1).expand(-1, -1, 2))
    return torch.cat((once, again), 1).flatten(1)


def _cut_out(ids: np.ndarray, starts: np.ndarray, length: int) -> Tensor:
    return torch.from_numpy(ids[starts[:, None] + np.arange(length + 1)].astype(np.int64))
