"""Texts and tokenizers on disk: found, checked and described; neither torch nor numpy.

A text is a file, or a folder of `.txt` files in order of name, each a document; "" is a generated
one. The last tenth of its bytes is held out, whatever the tokenizer. A tokenizer is a `tokenizers`
JSON file; "" stands for bytes, with one more id at the end of a document.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import io
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from headwise.errors import UsageError
from headwise.files import NotReadableError, read_file
from headwise.tasks.generated_text import generated_text

HELD_OUT = 10  # one part in this many, at the end of the text
CHUNK_BYTES = 1 << 20
GENERATED = 1_000_000  # characters
BYTE_IDS = 257  # ids of the byte tokenizer; the last one ends a document
# what tokenizers call the end of a document
END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|bos|>",
    "</s>",
    "<eos>",
    "[SEP]",
)

Document = Path | bytes


# ---- texts


@dataclass(frozen=True)
class TextFiles:
    """A text that was checked: it is there, not empty, and UTF-8."""

    name: str
    documents: tuple[Document, ...]
    size: int  # bytes
    digest: str

    @property
    def cut(self) -> int:
        """The byte at which the held-out part begins: the first byte of a character."""
        # The document that holds the cut is found by its size. Within it the cut moves on to the
        # next byte that begins a character: in UTF-8 all others are 10xxxxxx.
        cut = self.size - self.size // HELD_OUT
        before = cut  # bytes between the start of the document and the cut
        for document in self.documents:
            size = _size(document)
            if before < size:
                with _open(document) as f:
                    f.seek(before)
                    after = f.read(3)
                starts = (i for i, byte in enumerate(after) if byte & 0xC0 != 0x80)
                return cut + next(starts, len(after))
            before -= size
        return cut


class Chunk(NamedTuple):
    """A stretch of a document, all of it before or all of it behind the cut."""

    data: bytes
    held_out: bool
    ends_document: bool


def find_text(source: str) -> TextFiles:
    """The text at a path, read once from end to end; "" generates one.

    >>> find_text("").size
    1000000
    """
    if not source:
        documents: tuple[Document, ...] = (_generated(),)
        return TextFiles("the generated text", documents, GENERATED, _check_text(documents))
    # A folder's documents are its .txt files by name; sizes and times of change tell whether they
    # must be read again.
    path = Path(source)
    try:
        if not path.exists():
            raise UsageError(
                f"there is no text at {source}; give a file, a folder of .txt files, or none for "
                "a generated text"
            )
        files = (path,)
        if path.is_dir():
            files = tuple(p for p in sorted(path.rglob("*.txt")) if p.is_file())
        if not files:
            raise UsageError(f"the folder {source} holds no .txt files")
        stats = [p.stat() for p in files]
        if not stat.S_ISREG(stats[0].st_mode):
            raise UsageError(
                f"a text is a file or a folder of .txt files, got {source}: it is neither"
            )
        return _checked(source, files, tuple((found.st_size, found.st_mtime_ns) for found in stats))
    except OSError as e:
        raise UsageError(f"{source} cannot be read: {e.strerror}") from None


def chunks(text: TextFiles) -> Iterator[Chunk]:
    """The text in order, in chunks of at most CHUNK_BYTES.

    A chunk ends where its document or the training part does, else behind its last line, or behind
    its last whole character where it has no line's end.
    """
    # `before` counts bytes of earlier documents, `done` those of this one.
    before, cut = 0, text.cut
    for document in text.documents:
        done, size = 0, _size(document)
        with _open(document) as f:
            while done < size:
                stop = min(done + CHUNK_BYTES, size)
                # No chunk crosses the cut.
                if before + done < cut < before + stop:
                    stop = cut - before
                f.seek(done)
                data = f.read(stop - done)
                # A chunk in the middle of a document ends behind a line, or at least behind a whole
                # character.
                if stop != size and before + stop != cut:
                    data = data[: data.rfind(b"\n") + 1] or _complete_characters(data)
                yield Chunk(data, before + done >= cut, done + len(data) == size)
                done += len(data)
        before += size


@functools.lru_cache(4)
def _checked(source: str, files: tuple[Path, ...], stats: tuple[tuple[int, int], ...]) -> TextFiles:
    """Read once, and again only when a size or a time of change is another."""
    return TextFiles(source, files, sum(size for size, _ in stats), _check_text(files, source))


@functools.lru_cache(1)
def _generated() -> bytes:
    return generated_text(GENERATED).encode()


def _size(document: Document) -> int:
    return len(document) if isinstance(document, bytes) else document.stat().st_size


def _open(document: Document) -> BinaryIO:
    return io.BytesIO(document) if isinstance(document, bytes) else document.open("rb")


def _check_text(documents: tuple[Document, ...], source: str = "") -> str:
    """The digest of a text; refuses documents that are not text, and texts that are blank."""
    # Each document's size is hashed before its bytes, so that the same bytes cut into other
    # documents give another digest.
    digest = hashlib.sha256()
    blank = True
    for document in documents:
        digest.update(_size(document).to_bytes(8, "big"))
        decoder = codecs.getincrementaldecoder("utf-8")()
        offset = 0
        with _open(document) as f:
            while data := f.read(CHUNK_BYTES):
                if b"\0" in data:
                    zero = offset + data.index(0)
                    raise UsageError(f"{document} is not text: byte {zero} is 0")
                _decode(decoder, data, offset, document)
                digest.update(data)
                blank = blank and not data.strip()
                offset += len(data)
            _decode(decoder, b"", offset, document)
    if blank:
        raise UsageError(f"the text at {source} is empty")
    return digest.hexdigest()[:16]


def _decode(
    decoder: codecs.IncrementalDecoder, data: bytes, offset: int, document: Document
) -> None:
    """Refuse bytes that are not UTF-8; the decoder keeps the beginning of a cut character."""
    kept = len(decoder.getstate()[0])
    try:
        decoder.decode(data, final=not data)
    except UnicodeDecodeError as e:
        byte = offset - kept + e.start
        raise UsageError(f"{document} is not text in UTF-8 (byte {byte})") from None


def _complete_characters(data: bytes) -> bytes:
    return data.decode(errors="ignore").encode()


# ---- tokenizers


def find_tokenizer(path: str) -> tuple[Any, str]:
    """The tokenizer of a `tokenizers` JSON file and its digest; None and "" for bytes."""
    if not path:
        return None, ""
    try:
        data = read_file(path, links=True)
    except NotReadableError as e:
        raise UsageError(f"the tokenizer {path} cannot be read: {e}") from None
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
        reason = " ".join(str(e).split())
        raise UsageError(f"{path} is not a tokenizers JSON file: {reason}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, hashlib.sha256(data).hexdigest()[:16]


def vocab_of(tokenizer: Any) -> int:
    """How many ids a tokenizer has.

    >>> vocab_of(None)
    257
    """
    if tokenizer is None:
        return BYTE_IDS
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def end_of(tokenizer: Any) -> int | None:
    """The id that ends a document, if there is one."""
    if tokenizer is None:
        return BYTE_IDS - 1
    ids = (tokenizer.token_to_id(name) for name in END_TOKENS)
    return next((i for i in ids if i is not None), None)
