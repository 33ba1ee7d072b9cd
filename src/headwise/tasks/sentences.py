"""Classify a sentence, or a pair of sentences, as GLUE's tasks do.

A source is a folder with GLUE's files, `train.tsv` and `dev.tsv` (or `dev_matched.tsv`), whose
first line names the columns, CoLA's four columns without names, or a data set of the hub
(`hf:NAME/CONFIG`). Without one, `source` "" is a set that is generated: is a sentence well formed,
or have two of its words changed places, such as who did it and to what? Both have the same words,
so that none of them tells. The second part is what is held out.

Levels: `byte` has 256 ids, `word` the `most` commonest words of the training part, in small
letters, and one that the others share; behind them come a blank that fills what is shorter than
`length` and a separator between the sentences of a pair.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.errors import UsageError, check_texts, check_whole_numbers, nearest
from headwise.files import NotReadableError, read_file
from headwise.tasks import hub
from headwise.tasks.generated_text import COLOURS, PEOPLE, PLACES, THINGS
from headwise.tasks.ids import BLANK, BYTE_IDS, SEPARATOR
from headwise.tasks.task import Classified

LEVELS = ("byte", "word")
FILES = (("train.tsv",), ("dev.tsv", "dev_matched.tsv"))
SPLITS = (("train",), ("validation", "validation_matched", "dev", "test"))
LABELS = ("label", "gold_label", "is_duplicate", "Quality")
COLUMNS = (  # the first that are all there
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("#1 String", "#2 String"),
    ("sentence",),
    ("text",),
)
MOST_BYTES = 256 << 20  # of a file, read at once
GENERATED = (8000, 2000)  # sentences in training and held out


@dataclass(frozen=True)
class Sentences(Classified):
    """Which class does a sentence belong to?

    >>> task = Sentences(length=48)
    >>> task.vocab, task.classes
    (259, 2)
    """

    name = "sentences"
    length: int = 48
    source: str = ""  # a folder with GLUE's files, hf:NAME/CONFIG, or "" for generated sentences
    level: str = "byte"
    most: int = 1000  # ids of words; the rest share one more
    examples: int = 0  # sentences that are trained on, drawn once; 0: all
    digest: str = ""  # of both parts; found when not given, checked when given

    def __post_init__(self) -> None:
        check_whole_numbers(self, 3, "length")
        check_whole_numbers(self, 1, "most")
        check_whole_numbers(self, 0, "examples")
        check_texts(self, "source", "digest")
        if self.level not in LEVELS:
            raise UsageError(f"unknown level {self.level!r}; {nearest(str(self.level), LEVELS)}")
        data = _load(self.source)
        if self.digest and self.digest != data.digest:
            raise UsageError(
                f"{_name(self.source)} are not what they were: digest {data.digest}, expected "
                f"{self.digest}"
            )
        object.__setattr__(self, "digest", data.digest)
        if self.examples > len(data.train):
            raise UsageError(
                f"examples must be at most the {len(data.train):,} of {_name(self.source)}, got "
                f"{self.examples}"
            )

    @property
    def tokens(self) -> int:
        """Length of a sequence, blanks included."""
        return self.length

    @property
    def vocab(self) -> int:
        """Ids of bytes or of words, with those of the blank and the separator."""
        return BYTE_IDS if self.level == "byte" else len(_vocabulary(self.source, self.most)) + 3

    @property
    def classes(self) -> int:
        """Classes of the training part."""
        return len(_load(self.source).labels)

    def sample(
        self, generator: torch.Generator, batch: int, step: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Ids (batch, length) and classes (batch,)."""
        ids, labels = _part(self, step is None, generator.device)
        rows = torch.randint(len(ids), (batch,), generator=generator, device=generator.device)
        return ids[rows].long(), labels[rows]

    def baselines(self) -> dict[str, float]:
        """Equal odds, and the odds of the classes as counted in the training part, held out."""
        # Counts of the classes in training, half a count more each, are the odds; held-out
        # sentences are evaluated by them.
        data = _load(self.source)
        train, held = (
            torch.tensor([row.label for row in part]) for part in (data.train, data.held)
        )
        counts = torch.bincount(train, minlength=self.classes).double() + 0.5
        return {**super().baselines(), "class": -(counts / counts.sum()).log()[held].mean().item()}


class Row(NamedTuple):
    """A sentence or two, and the class."""

    texts: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class _Data:
    train: list[Row]
    held: list[Row]
    labels: tuple[str, ...]  # names of the classes
    digest: str


Raw = list[tuple[tuple[str, ...], str]]  # sentences and the name of their class


def _name(source: str) -> str:
    return f"the sentences of {source}" if source else "the generated sentences"


@functools.lru_cache(4)
def _load(source: str) -> _Data:
    train, held = _raw(source)
    for what, part in (("training", train), ("held-out", held)):
        if not part:
            raise UsageError(f"{source} holds no {what} sentences")
    if (sizes := {len(texts) for texts, _ in train}) != {len(texts) for texts, _ in held}:
        raise UsageError(
            f"one part of {source} holds pairs of sentences and the other does not; training has "
            f"{max(sizes)} a line"
        )
    # A class's number is its place in the order of names, of the training part alone.
    names = sorted({label for _, label in train}, key=_order)
    if len(names) < 2:
        raise UsageError(
            f"sentences must be of at least two classes, got one, {names[0]!r}, in {source}"
        )
    known = {name: i for i, name in enumerate(names)}
    strange = sorted({label for _, label in held} - set(names), key=_order)
    if strange:
        raise UsageError(
            f"held-out classes must be among the training part's, {', '.join(names[:9])}, got "
            f"{strange[0]!r} in {source}"
        )
    digest = hashlib.sha256(json.dumps([train, held]).encode()).hexdigest()[:12]
    rows, held_rows = (
        [Row(texts, known[label]) for texts, label in part] for part in (train, held)
    )
    return _Data(rows, held_rows, tuple(names), digest)


def _order(label: str) -> tuple[bool, int, str]:
    """Numbers by their value, before other names."""
    number = re.fullmatch(r"-?\d{1,9}", label) is not None
    return not number, int(label) if number else 0, label


def _raw(source: str) -> tuple[Raw, Raw]:
    if not source:
        return generated()
    if hub.on_hub(source):
        train, held = (_from_hub(source, splits) for splits in SPLITS)
        return train, held
    folder = Path(source)
    try:
        if not folder.is_dir():
            raise UsageError(
                f"there is no folder of sentences at {source}; give one with train.tsv and "
                "dev.tsv, hf:NAME/CONFIG, "
                'or "" for generated ones'
            )
        train, held = (_from_file(folder, names) for names in FILES)
    except OSError as e:
        raise UsageError(f"{source} cannot be read: {e.strerror or e}") from None
    return train, held


# ---- reading


def _chosen(names: Sequence[str], where: str) -> tuple[list[int], int]:
    """Which columns hold the sentences, and which the class."""
    label = next((names.index(name) for name in LABELS if name in names), None)
    if label is None:
        raise UsageError(
            f"{where} needs a column named {' or '.join(LABELS)}, it has {_some(names)}"
        )
    for columns in COLUMNS:
        if all(name in names for name in columns):
            return [names.index(name) for name in columns], label
    raise UsageError(
        f"{where} needs a column named sentence, or two named sentence1 and sentence2, it has "
        f"{_some(names)}"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(name[:40] for name in names[:12])


def _from_hub(source: str, splits: Sequence[str]) -> Raw:
    table = hub.part(source, *splits)
    texts, label = _chosen(table.column_names, source)
    columns = [hub.column(source, table, table.column_names[i]) for i in (*texts, label)]
    return [(tuple(map(str, row[:-1])), str(row[-1])) for row in zip(*columns, strict=True)]


def _from_file(folder: Path, names: Sequence[str]) -> Raw:
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise UsageError(f"{folder} lacks {' or '.join(names)}")
    try:
        text = read_file(path, MOST_BYTES, links=True).decode("utf-8-sig")
    except NotReadableError as e:
        raise UsageError(f"{path} cannot be read: {e}") from None
    except UnicodeDecodeError as e:
        raise UsageError(f"{path} is not text in UTF-8 (byte {e.start})") from None
    if "\0" in text:
        raise UsageError(f"{path} is not text: it holds a zero byte")
    # GLUE's tables have no quoting: a tab always separates.
    lines = [line.rstrip("\r").split("\t") for line in text.rstrip("\r\n").split("\n")]
    if lines == [[""]]:
        raise UsageError(f"{path} is empty")
    # CoLA has no line of names: its columns are source, label, mark, sentence.
    first, at = lines[0], 1
    if _as_cola(first):
        texts, label, at = [3], 1, 0
    else:
        texts, label = _chosen(first, str(path))
    return list(_rows(lines, at, texts, label, path))


def _as_cola(fields: list[str]) -> bool:
    return len(fields) == 4 and fields[1] in ("0", "1")


def _rows(
    lines: list[list[str]], at: int, texts: list[int], label: int, path: Path
) -> Iterator[tuple[tuple[str, ...], str]]:
    for number, fields in enumerate(lines[at:], at + 1):
        if len(fields) != len(lines[0]):
            raise UsageError(
                f"line {number} of {path} should have {len(lines[0])} columns, got {len(fields)}"
            )
        if not fields[label].strip():
            raise UsageError(f"line {number} of {path} has no {lines[0][label] if at else 'label'}")
        yield tuple(fields[i] for i in texts), fields[label].strip()


# ---- ids


def split_words(text: str) -> list[str]:
    """Words and marks, in small letters.

    >>> split_words("It isn't Ben's.")
    ['it', 'isn', "'", 't', 'ben', "'", 's', '.']
    """
    return re.findall(r"\w+|[^\w\s]", text.lower())


@functools.lru_cache(4)
def _vocabulary(source: str, most: int) -> dict[str, int]:
    """Ids of the commonest words of the training part; then follow that of all others, the blank
    and the separator."""
    counts = Counter(
        word for row in _load(source).train for text in row.texts for word in split_words(text)
    )
    common = sorted(
        word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]
    )
    return {word: i for i, word in enumerate(common)}


def _coder(task: Sentences) -> tuple[Callable[[str], list[int]], int, int]:
    """How a sentence becomes ids, the blank, and the separator."""
    if task.level == "byte":
        return lambda text: list(text.encode()), BLANK, SEPARATOR
    known = _vocabulary(task.source, task.most)
    return (
        lambda text: [known.get(word, len(known)) for word in split_words(text)],
        len(known) + 1,
        len(known) + 2,
    )


def encoded(texts: Sequence[list[int]], length: int, blank: int, separator: int) -> list[int]:
    """One sentence or two as `length` ids: of two that are too long together the longer is cut
    first.

    >>> encoded([[1, 2, 3, 4], [5]], 5, 0, 9)
    [1, 2, 3, 9, 5]
    """
    ids = list(texts[0])
    if len(texts) == 2:
        # The separator takes one place. The second sentence gets half of the rest, or what the
        # first leaves.
        room = length - 1
        second = texts[1][: max(room // 2, room - len(ids))]
        ids = [*ids[: room - len(second)], separator, *second]
    return ids[:length] + [blank] * (length - len(ids))


@functools.lru_cache(8)
def _ids(task: Sentences, held_out: bool) -> tuple[Tensor, Tensor]:
    data, (code, blank, separator) = _load(task.source), _coder(task)
    rows = data.held if held_out else data.train
    # The same examples in every process and every run: the draw does not depend on the run's seed.
    if task.examples and not held_out:
        rows = random.Random("examples").sample(rows, task.examples)
    ids = np.empty((len(rows), task.length), np.int32)
    for i, row in enumerate(rows):
        ids[i] = encoded([code(text) for text in row.texts], task.length, blank, separator)
    return torch.from_numpy(ids), torch.tensor([row.label for row in rows])


@functools.lru_cache(8)
def _part(task: Sentences, held_out: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    ids, labels = _ids(task, held_out)
    return ids.to(device), labels.to(device)


# ---- sentences where there are none


FORMS = (
    "{person} took the {colour} {thing} to the {place}.",
    "{person} has the {colour} {thing}.",
    "the {thing} of {person} is in the {place}.",
)
WORDS = {"person": PEOPLE, "colour": COLOURS, "thing": THINGS, "place": PLACES}


def generated(seed: int = 0) -> tuple[Raw, Raw]:
    """Sentences of the generated text's kind, half of them with two words of different kinds in
    each other's place; none is in both parts."""
    rng = random.Random(f"sentences {seed}")
    held = [_drawn(rng) for _ in range(GENERATED[1])]
    known, train = set(held), []
    while len(train) < GENERATED[0]:
        one = _drawn(rng)
        if one not in known:
            train.append(one)
    return train, held


def _drawn(rng: random.Random) -> tuple[tuple[str, ...], str]:
    form, right = rng.choice(FORMS), rng.random() < 0.5
    chosen = {kind: rng.choice(some) for kind, some in WORDS.items()}
    if not right:
        # Two words that the form has change places, so a wrong sentence has the same words as a
        # right one.
        a, b = rng.sample([kind for kind in WORDS if f"{{{kind}}}" in form], 2)
        chosen[a], chosen[b] = chosen[b], chosen[a]
    return (form.format(**chosen),), str(int(right))
