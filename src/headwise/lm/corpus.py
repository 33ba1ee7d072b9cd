"""Text -> token ids -> packed batches.

Ids are the bytes and one more at the end of a document, or what a `tokenizers` JSON file makes of
the text. What a step sees is a pure function of the seed and of the numbers of its rows. So it
depends neither on how many processes share a step nor on how often a run was killed.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.digests import read_signed, signed
from headwise.errors import UsageError
from headwise.files import locked, whole_file, write_whole
from headwise.lm.text_files import TextFiles, chunks, end_of, vocab_of
from headwise.seeds import derive, generator_of

CHUNKS_AT_ONCE = 32  # that are tokenized together
COUNTED_IDS = 1 << 26  # whose pairs are counted
PAIR_CLASSES = 16_777_213  # into which pairs are hashed
RARE = 1_000_000  # a pair is rare that is at most one in so many
FORMAT = 1  # of the files of ids


@dataclass(frozen=True)
class Corpus:
    """A text as ids, the training part first."""

    ids: np.ndarray
    cut: int  # the first id that is held out
    bytes_to: np.ndarray  # for each held-out id: bytes of the held-out part up to its end
    vocab: int
    end: int | None  # the id that ends a document


# ---- tokenization


def encode(
    tokenizer: Any, texts: Sequence[bytes]
) -> Iterator[tuple[np.ndarray, Callable[[], np.ndarray]]]:
    """For each chunk of text its ids, and a function that counts the chunk's bytes up to the end of
    each id. All cores work on the chunks at once.

    A character that is cut into several ids counts for the first of them; what a tokenizer skips
    counts for the next id.

    >>> [bytes_to().tolist() for _, bytes_to in encode(None, [b"abc"])]
    [[1, 2, 3]]
    """
    # Bytes are ids already: id i ends at byte i + 1.
    if tokenizer is None:
        for data in texts:
            yield np.frombuffer(data, np.uint8), functools.partial(np.arange, 1, len(data) + 1)
        return
    # Bits per byte need to know how many bytes each id stands for, so a tokenizer must give back
    # every character of the text.
    decoded = [data.decode() for data in texts]
    try:
        encodings = tokenizer.encode_batch(decoded, add_special_tokens=False)
    except Exception as e:  # it raises Exception itself
        reason = " ".join(str(e).split())
        raise UsageError(f"the tokenizer does not fit this text: {reason}") from None
    ids = [encoding.ids for encoding in encodings]
    round_trips = tokenizer.decode_batch(ids, skip_special_tokens=False)
    for text, encoding, back in zip(decoded, encodings, round_trips, strict=True):
        if back != text or not encoding.ids:
            _refuse_round_trip(text, back)
        yield np.asarray(encoding.ids), functools.partial(_bytes_to, text, encoding.offsets)


def _refuse_round_trip(text: str, back: str) -> None:
    differing = (i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b)
    first = next(differing, min(len(text), len(back)))
    stretch = slice(first, first + 12)
    raise UsageError(
        "the tokenizer does not fit this text, it must give every character back: "
        f"{text[stretch]!r} became {back[stretch]!r}"
    )


def _bytes_to(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Bytes of a text up to the end of each id, from the characters that each id spans."""
    # UTF-8 takes 1 to 4 bytes for a character, by the size of its code point.
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    bytes_to_character = np.concatenate(([0], np.cumsum(widths)))
    # An id that spans no characters of its own ends where the one before it does; the last id takes
    # what is left.
    stops = [stop for _, stop in offsets]
    ends = np.maximum.accumulate(bytes_to_character[stops])
    ends[-1] = bytes_to_character[-1]
    return ends


def _encode_chunks(
    text: TextFiles, tokenizer: Any
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Chunk by chunk: ids, and for held-out ones the chunk's bytes up to the end of each id."""
    # A group of chunks is tokenized at once, on all cores; no more of the text is in memory.
    end, dtype, rest = end_of(tokenizer), _id_dtype(tokenizer), chunks(text)
    while group := list(itertools.islice(rest, CHUNKS_AT_ONCE)):
        encoded = encode(tokenizer, [chunk.data for chunk in group])
        for chunk, (ids, count_bytes) in zip(group, encoded, strict=True):
            bytes_to = count_bytes() if chunk.held_out else None
            if chunk.ends_document and end is not None:
                ids = np.append(ids, end)
                bytes_to = None if bytes_to is None else np.append(bytes_to, bytes_to[-1])
            yield ids.astype(dtype), bytes_to


def _id_dtype(tokenizer: Any) -> Any:
    return np.uint16 if vocab_of(tokenizer) <= 1 << 16 else np.uint32


def _from_start(counts: list[np.ndarray]) -> np.ndarray:
    """Counts within chunks as counts from the start of the first one."""
    if not counts:
        return np.zeros(0, np.int64)
    before = np.cumsum([0, *(int(count[-1]) for count in counts)])
    return np.concatenate([c + start for c, start in zip(counts, before, strict=False)])


# ---- ids, in memory or in files


def load(text: TextFiles, tokenizer: Any, folder: Path | None = None, key: str = "") -> Corpus:
    """The ids of a text.

    With a folder they are kept there under a key and memory-mapped. One process makes the files,
    others wait for them.
    """
    # In memory: all ids at once.
    if folder is None:
        encoded = list(_encode_chunks(text, tokenizer))
        ids = np.concatenate([ids for ids, _ in encoded])
        cut = sum(len(ids) for ids, bytes_to in encoded if bytes_to is None)
        held_out = [bytes_to for _, bytes_to in encoded if bytes_to is not None]
        return Corpus(ids, cut, _from_start(held_out), vocab_of(tokenizer), end_of(tokenizer))
    # In files: looked for again under the lock, since another process may have made them meanwhile.
    about = folder / f"{key}.json"
    if not about.exists():
        with locked(folder / f"{key}.lock"):
            if not about.exists():
                _write(text, tokenizer, folder, key)
    # Files that a full disk or a killed copy left short are refused here, and not when a row is cut
    # from them.
    count, cut, digest = _read_sizes(about)
    ids = _memory_map(folder / f"{key}.ids", _id_dtype(tokenizer))
    bytes_to = _memory_map(folder / f"{key}.behind", np.int64)
    if len(ids) != count or len(bytes_to) != count - cut:
        raise UsageError(
            f"{folder / key}.ids is not complete, {len(ids)} of {count} ids: remove {about}"
        )
    if digest and digest != _digest_of(ids, bytes_to):
        raise UsageError(
            f"{folder / key}.ids is damaged, its content does not have its digest: remove {about}"
        )
    return Corpus(ids, cut, bytes_to, vocab_of(tokenizer), end_of(tokenizer))


def _read_sizes(about: Path) -> tuple[int, int, str]:
    """How many ids are kept, the first that is held out, and the digest of the files; those of
    before have none."""
    try:
        saved = read_signed(about)
        found = saved["format"]
        count, cut = (int(saved["ids"]), int(saved["cut"])) if found == FORMAT else (0, 0)
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{about} cannot be read: remove it") from None
    if found != FORMAT:
        raise UsageError(f"{about} has format {found}, this headwise reads {FORMAT}: remove it")
    return count, cut, str(saved.get("content", ""))


def _digest_of(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        data: Any = np.ascontiguousarray(array).view(np.uint8)
        digest.update(data)
    return digest.hexdigest()[:16]


def _memory_map(path: Path, dtype: Any) -> np.ndarray:
    """A file of numbers; none where it is empty or gone."""
    count = path.stat().st_size // np.dtype(dtype).itemsize if path.exists() else 0
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.zeros(0, dtype)


def _write(text: TextFiles, tokenizer: Any, folder: Path, key: str) -> None:
    """Write ids as they come, never all of them in memory. The description comes last: the files
    count from then on."""
    for left in folder.glob(f".{key}.*"):  # by a process that was killed
        left.unlink()
    count = cut = 0
    held_out = []
    with whole_file(folder / f"{key}.ids") as temporary, temporary.open("wb") as f:
        for ids, bytes_to in _encode_chunks(text, tokenizer):
            f.write(ids.tobytes())
            count += len(ids)
            if bytes_to is None:
                cut += len(ids)
            else:
                held_out.append(bytes_to)
        if not held_out or not cut:
            raise UsageError(f"{text.name} is too short to hold a tenth of it out, got {count} ids")
    bytes_to = _from_start(held_out).astype(np.int64)
    write_whole(folder / f"{key}.behind", bytes_to.tobytes())
    ids = _memory_map(folder / f"{key}.ids", _id_dtype(tokenizer))
    content = _digest_of(ids, bytes_to)
    about = {"format": FORMAT, "text": text.name, "ids": count, "cut": cut, "content": content}
    write_whole(folder / f"{key}.json", json.dumps(signed(about)) + "\n")


def check_length(corpus: Corpus, length: int, name: str) -> None:
    """Both parts must be longer than a sequence."""
    sizes = {"training part": corpus.cut, "held-out tenth": len(corpus.ids) - corpus.cut}
    for part, count in sizes.items():
        if count < length + 1:
            raise UsageError(
                f"the {part} of {name} must be longer than length {length}, got {count} ids"
            )
    if corpus.bytes_to[-1] == corpus.bytes_to[0]:
        raise UsageError(
            f"the held-out tenth of {name} must hold text, got the end of a document alone"
        )


# ---- training rows


def rows_at(corpus: Corpus, length: int, seed: int, first: int, count: int) -> Tensor:
    """Training rows first, first + 1, ... of a run: (count, length + 1) ids, the inputs and the one
    that follows.

    Rows are adjacent windows that cover the training part in random order, once per epoch, each
    epoch from another offset.
    """
    # Rows count on from epoch to epoch. A request may cross the end of one, so it is served in
    # stretches.
    windows = max(1, (corpus.cut - length) // length)
    starts: list[np.ndarray] = []
    while count:
        epoch, begin = divmod(first, windows)
        starts.append(
            _epoch_starts(seed, epoch, length, windows, corpus.cut)[begin : begin + count]
        )
        first += len(starts[-1])
        count -= len(starts[-1])
    return _windows(corpus.ids, np.concatenate(starts), length)


@functools.lru_cache(2)
def _epoch_starts(seed: int, epoch: int, length: int, windows: int, ids: int) -> np.ndarray:
    # A random offset shifts all windows, so that epochs cut the text at other places. The
    # permutation orders them.
    generator = generator_of(torch.device("cpu"), derive(seed, "windows", epoch))
    slack = min(length, ids - windows * length)
    offset = torch.randint(slack, (), generator=generator).item()
    return torch.randperm(windows, generator=generator).numpy() * length + offset


def _windows(ids: np.ndarray, starts: np.ndarray, length: int) -> Tensor:
    return torch.from_numpy(ids[starts[:, None] + np.arange(length + 1)].astype(np.int64))


# ---- rows for evaluation


def held_out_starts(corpus: Corpus, length: int, limit: int, evaluated_on: str = "") -> np.ndarray:
    """Where windows of the held-out part begin: adjacent, or `limit` of them, evenly spread. All of
    it, or of its first half ("validation") or second half ("test")."""
    # Where there are more windows than wanted, every (windows / count)-th is taken.
    windows = (len(corpus.ids) - corpus.cut - 1) // length
    first = 0
    if evaluated_on:
        half = windows // 2
        if not half:
            raise UsageError(
                f"the held-out tenth must hold two windows of length {length} where rates are "
                f"chosen on one half of it, got {len(corpus.ids) - corpus.cut} ids"
            )
        first, windows = (0, half) if evaluated_on == "validation" else (half, windows - half)
    count = min(windows, limit)
    return corpus.cut + (first + np.arange(count) * windows // count) * length


def held_out_rows(corpus: Corpus, length: int, starts: np.ndarray) -> tuple[Tensor, Tensor]:
    """Ids (rows, length + 1), and how many bytes the last `length` of each row stand for."""
    # Bytes up to the end of the last id of a row, less those up to the end of its first, which is
    # input only.
    first = starts - corpus.cut
    sizes = corpus.bytes_to[first + length] - corpus.bytes_to[first]
    return _windows(corpus.ids, starts, length), torch.from_numpy(sizes)


def bigrams(corpus: Corpus) -> np.ndarray:
    """How often pairs of neighbouring ids occur in the training part, by hash: an upper bound.

    Of a long text only the first COUNTED_IDS are counted.
    """
    ids = np.asarray(corpus.ids[: min(corpus.cut, COUNTED_IDS)], np.int64)
    return np.bincount((ids[:-1] * corpus.vocab + ids[1:]) % PAIR_CLASSES, minlength=PAIR_CLASSES)


def repeated(corpus: Corpus, counts: np.ndarray, ids: Tensor) -> Tensor:
    """Which ids of rows (rows, length + 1), without the first, could be recalled from the row:
    (rows, length).

    The pair that ends there occurred in the row before. It is rare in the training part, at most
    one in RARE, so that a model hardly knows it by heart.
    """
    # A pair of neighbouring ids (a, b) as one number, a vocab + b.
    pairs = ids[:, :-1].numpy() * corpus.vocab + ids[:, 1:].numpy()
    # All but a pair's first place in its row are repeats.
    again = np.ones(pairs.shape, bool)
    for row, mask in zip(pairs, again, strict=True):
        mask[np.unique(row, return_index=True)[1]] = False
    limit = min(corpus.cut, COUNTED_IDS) / RARE
    return torch.from_numpy(again & (counts[pairs % PAIR_CLASSES] <= limit))


def recall_rows(corpus: Corpus, pairs: int, rows: int, seed: int) -> Tensor:
    """Associative recall in ids drawn at random: (rows, 4 pairs).

    A row has `pairs` distinct keys, each followed by its value, then all pairs again in another
    order. So the first half determines each value of the second.
    """
    # Keys are distinct within a row; values may repeat.
    generator = generator_of(torch.device("cpu"), derive(seed, "recall"))
    ids = torch.tensor([i for i in range(corpus.vocab) if i != corpus.end])
    keys = torch.stack(
        [ids[torch.randperm(len(ids), generator=generator)[:pairs]] for _ in range(rows)]
    )
    values = ids[torch.randint(len(ids), (rows, pairs), generator=generator)]
    once = torch.stack((keys, values), -1)
    # The second half shows the same pairs in an order of its own.
    order = torch.stack([torch.randperm(pairs, generator=generator) for _ in range(rows)])
    again = once.gather(1, order.unsqueeze(-1).expand(-1, -1, 2))
    return torch.cat((once, again), 1).flatten(1)
