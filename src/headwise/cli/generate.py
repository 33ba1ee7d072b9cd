"""`headwise generate` and `headwise chat`: what a decoder of a store writes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli.output import say
from headwise.errors import UsageError, shown
from headwise.rows import WEIGHTS_FILE
from headwise.store import MARK, Store

if TYPE_CHECKING:
    import torch

    from headwise.lm.writing import Writer

LISTED = 5  # ids in an error


# ---- which run


def find_decoder(name: str, store: str | Path) -> Path:
    """The folder of a decoder whose weights are there: by the beginning of its run's id in a store,
    by its folder, or by a store with a single decoder."""
    given = Path(name)
    if (given / WEIGHTS_FILE).is_file():
        return given
    if (given / MARK).exists():
        return _only(Store(given, create=False), "")
    if not (Path(store) / MARK).exists():
        raise UsageError(
            f"{shown(name)} is no folder of a run and no store, and {store}, where its id would be "
            "looked for, is no store: add --store DIR"
        )
    return _only(Store(store, create=False), name)


def _only(store: Store, beginning: str) -> Path:
    """The one decoder of a store whose id begins so."""
    found = sorted(path.parent for path in store.runs_path.glob(f"*/{WEIGHTS_FILE}"))
    if not found:
        raise UsageError(
            f"{store.path} has no decoder with weights; headwise pretrain leaves one there"
        )
    named = [path for path in found if path.name.startswith(beginning)]
    if len(named) == 1:
        return named[0]
    ids = ", ".join(path.name for path in (named or found)[:LISTED])
    ids += ", ..." if len(named or found) > LISTED else ""
    if not named:
        raise UsageError(f"no decoder of {store.path} begins with {shown(beginning)}; it has {ids}")
    raise UsageError(f"RUN must be one decoder of {store.path}, got {len(named)} of them: {ids}")


# ---- generate


def generate(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.lm.writing import load_writer

    writer = load_writer(find_decoder(args.run, args.store), args.device, args.tokenizer)
    texts = []
    for number in range(args.samples):
        if args.samples > 1:
            print(f"--- seed {args.seed + number}")
        texts.append(_printed(args.prompt, _pieces(writer, args.prompt, args, number)))
    return {
        "run": writer.id,
        "prompt": args.prompt,
        "texts": texts,
        **{key: getattr(args, key) for key in ("tokens", "temperature", "top_k", "seed")},
    }


def _pieces(
    writer: Writer, prompt: str, args: argparse.Namespace, number: int = 0
) -> Iterator[str]:
    return writer.write(
        prompt,
        tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        generator=_generator(writer, args.seed + number),
    )


def _generator(writer: Writer, seed: int) -> torch.Generator:
    import torch

    from headwise.errors import check_seed

    check_seed(seed)
    return torch.Generator(next(writer.model.parameters()).device).manual_seed(seed)


def _printed(prompt: str, pieces: Iterator[str]) -> str:
    """Print text as it comes; returns what is the decoder's own."""
    print(_harmless(prompt), end="", flush=True)
    text = ""
    for piece in pieces:
        print(_harmless(piece), end="", flush=True)
        text += piece
    print()
    return text


def _harmless(text: str) -> str:
    """Text without what a terminal would take for a command: a decoder may write any byte."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)


# ---- chat


def chat(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.lm.writing import load_writer

    writer = load_writer(find_decoder(args.run, args.store), args.device, args.tokenizer)
    asks = sys.stdin.isatty()
    if asks:
        say(
            f"{writer.id} continues what you write, a line at a time: it was trained on a text and "
            "not to answer. An empty line ends."
        )
    turns: list[dict[str, str]] = []
    text = ""
    while line := _line(asks):
        # All that was said so far is its context, as far back as it was trained to look.
        text += line + "\n"
        reply = _until_line_ends(_pieces(writer, text, args, len(turns)))
        print(_harmless(reply), flush=True)
        text += reply + "\n"
        turns.append({"you": line, "decoder": reply})
    return {"run": writer.id, "turns": turns}


def _line(asks: bool) -> str:
    """What is typed, or the next line of a file; empty: that was all."""
    if asks:
        print("> ", end="", flush=True)
    return sys.stdin.readline().strip()


def _until_line_ends(pieces: Iterator[str]) -> str:
    """The first line that is not blank."""
    text = ""
    for piece in pieces:
        text = (text + piece).lstrip("\n")
        if "\n" in text:
            break
    return text.partition("\n")[0]
