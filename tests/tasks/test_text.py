"""`Text`: windows of each part, vocabularies, files, baselines, and the generated text."""

import collections
import dataclasses
import hashlib
import itertools
import math
import random
import re
import statistics

import pytest
from support.data import forget, letters, refused, written
from support.tolerance import same, seeded

from headwise.errors import bounded
from headwise.tasks import Text, task_of
from headwise.tasks import text as text_module
from headwise.tasks.generated_text import generated_text

pytestmark = pytest.mark.usefixtures("no_network")


def decoded(ids, alphabet):
    return ["".join(alphabet[i] for i in row) for row in ids.tolist()]


@pytest.mark.parametrize("step", [None, 0, 12345])
@pytest.mark.parametrize("level", ["char", "byte"])
def test_windows_are_of_their_part_and_targets_follow_them(tmp_path, level, step):
    """Every training window and its targets lie before the cut, every held-out one behind it; each
    place of the part is drawn."""
    text = (
        letters(1009, alphabet="abcdefghijklmnopqrstuvwxyzäöü€\U0001f600")
        if level == "char"
        else letters(1009)
    )
    task = Text(7, written(tmp_path / "a.txt", text), level)
    alphabet = sorted(set(text)) if level == "char" else [chr(i) for i in range(256)]
    assert task.vocab == task.classes == len(alphabet)
    x, y = (decoded(t, alphabet) for t in task.sample(seeded(3), 20_000, step))
    cut, starts = 1009 - 100, set()
    for window, follows in zip(x, y, strict=True):
        at = text.find(window + follows[-1])
        assert follows == text[at + 1 : at + 8]
        starts.add(at)
    assert starts == (set(range(cut, 1009 - 7)) if step is None else set(range(cut - 7)))


def test_bytes_are_the_file(tmp_path):
    data = bytes(range(256)) * 40
    task = Text(5, written(tmp_path / "a.bin", data), "byte")
    assert task.vocab == 256
    x, y = task.sample(seeded(1), 500)
    assert ((x[:, 1:] - x[:, :-1]) % 256 == 1).all()
    same(y, (x + 1) % 256)
    assert (
        refused(Text, 5, str(tmp_path / "a.bin"))
        == f"{tmp_path / 'a.bin'} is not text in UTF-8 (byte 128); level=byte takes any file"
    )


def test_characters_and_bytes_of_one_text_differ(tmp_path):
    source = written(tmp_path / "a.txt", "zß" * 300)
    for level, first, vocab in (("char", "zß", 2), ("byte", "zß".encode(), 256)):
        ids = text_module._read(source, level, 255).ids.tolist()
        alphabet = sorted("zß") if level == "char" else range(256)
        assert [alphabet[i] for i in ids] == list(first) * 300
        assert Text(3, source, level).vocab == vocab


@pytest.mark.parametrize("most", [2, 3, 4, 5, 6])
def test_rare_characters_share_the_last_id(tmp_path, most):
    text = "".join(random.Random(0).sample("e" * 100 + "t" * 80 + "b" * 7 + "a" * 7 + "c" * 6, 200))
    task = Text(3, written(tmp_path / "a.txt", text), most=most)
    kept = sorted("etabc"[:most])  # of equally common ones the first by code
    expected = [kept.index(c) if c in kept else len(kept) for c in text]
    assert text_module._read(task.source, "char", most).ids.tolist() == expected
    assert task.vocab == (most + 1 if most < 5 else 5)
    assert max(expected) == task.vocab - 1
    x, y = task.sample(seeded(1), 50, 0)
    assert max(x.max(), y.max()) == task.vocab - 1


def test_folder_is_its_texts_in_order_of_name(tmp_path):
    parts = {
        "b.txt": letters(300, 1),
        "a.txt": letters(200, 2),
        "c/a.txt": letters(100, 3),
        "notes.md": "#" * 999,
        "d.TXT": "!" * 999,
    }
    for name, text in parts.items():
        written(tmp_path / "texts" / name, text)
    task = Text(7, str(tmp_path / "texts"), "byte")
    whole = "\n".join(parts[name] for name in ("a.txt", "b.txt", "c/a.txt")).encode()
    assert bytes(text_module._read(task.source, "byte", 255).ids.tolist()) == whole
    assert task.digest == hashlib.sha256(whole).hexdigest()[:12]
    assert task == Text(7, str(tmp_path / "texts"), "byte", digest=task.digest)
    assert Text(7, written(tmp_path / "one.txt", whole), "byte").digest == task.digest, (
        "a folder is the text in it"
    )


def test_text_that_changed_is_refused(tmp_path):
    source = written(tmp_path / "a.txt", letters(500))
    task = Text(7, source)
    forget()
    assert task_of("text", dataclasses.asdict(task)) == task
    written(tmp_path / "a.txt", letters(499) + "!")
    forget()
    now = hashlib.sha256((letters(499) + "!").encode()).hexdigest()[:12]
    assert (
        refused(task_of, "text", dataclasses.asdict(task))
        == f"{source} is not the text it was: digest {now}, expected {task.digest}"
    )
    assert refused(Text, 7, digest="0" * 12).startswith(
        "the generated text is not the text it was: digest "
    )


def plain_counts(train, held, vocab):
    """Cross-entropy of single and of pairs of characters by counting, half a count added to
    each."""
    singles, pairs, firsts = (
        collections.Counter(train),
        collections.Counter(itertools.pairwise(train)),
        collections.Counter(train[:-1]),
    )
    single = [
        -math.log((singles[b] + 0.5) / (len(train) + 0.5 * vocab))
        for _, b in itertools.pairwise(held)
    ]
    both = [
        -math.log((pairs[a, b] + 0.5) / (firsts[a] + 0.5 * vocab))
        for a, b in itertools.pairwise(held)
    ]
    return statistics.fmean(single), statistics.fmean(both)


@pytest.mark.parametrize("level", ["char", "byte"])
def test_baselines_of_text_are_plain_counts(tmp_path, level):
    text = "".join(random.Random(4).choices("aaaabbcdé", k=997)) + "new!" * 30
    task = Text(5, written(tmp_path / "a.txt", text), level)
    ids = list(text) if level == "char" else list(text.encode())
    cut = len(ids) - int(0.1 * len(ids))
    vocab = len(set(text)) if level == "char" else 256
    single, pairs = plain_counts(ids[:cut], ids[cut:], vocab)
    assert task.baselines() == pytest.approx(
        {"zero": math.log(vocab), "single": single, "pairs": pairs}, rel=1e-9
    )


def test_generated_text_is_always_the_same():
    """A literal: the ids of runs hold it."""
    task = Text(7)
    assert task.digest == "d946d7c3c4db"
    assert task.vocab == 28
    text = generated_text(text_module.GENERATED)
    assert len(text) == text_module.GENERATED
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == task.digest
    assert generated_text(5000) == text[:5000]
    assert generated_text(5000, seed=1) != text[:5000]
    baselines = task.baselines()
    assert baselines["pairs"] < baselines["single"] < baselines["zero"]


def test_generated_text_says_what_is_true():
    """Every fact follows from the sentences before it in its scene: there is something to look
    up."""
    has, seen = {}, collections.Counter()
    patterns = {
        "took": r"(\w+) took the (\w+) (\w+) to the (\w+)",
        "went": r"then (\w+) went to the (\w+)",
        "has": r"(\w+) has the (\w+) (\w+)",
        "in": r"the (\w+) of (\w+) is in the (\w+)",
        "is": r"the (\w+) is (\w+)",
    }
    for scene in generated_text(60_000).split("\n")[:-1]:
        has.clear()
        for sentence in scene.removesuffix(".").split(". "):
            kind, found = next(
                (k, m.groups()) for k, p in patterns.items() if (m := re.fullmatch(p, sentence))
            )
            seen[kind] += 1
            if kind == "took":
                has[found[0]] = list(found[1:])
            elif kind == "went":
                has[found[0]][2] = found[1]
            elif kind == "has":
                assert has[found[0]][:2] == list(found[1:])
            elif kind == "in":
                assert has[found[1]][1:] == [found[0], found[2]]
            else:
                assert [found[1], found[0]] in [held[:2] for held in has.values()]
    assert all(seen[kind] > 100 for kind in patterns)


BAD_TEXTS = [
    (
        "gone.txt",
        None,
        {},
        'there is no text at {}; give a file, a folder of .txt files, or "" for a generated text',
    ),
    ("empty.txt", "", {}, "the text at {} is empty"),
    ("empty.txt", "", {"level": "byte"}, "the text at {} is empty"),
    ("blank.txt", " \n\t \n" * 99, {}, "the text at {} is empty"),
    (
        "binary.txt",
        b"abc\xff\xfe" * 99,
        {},
        "{} is not text in UTF-8 (byte 3); level=byte takes any file",
    ),
    (
        "latin.txt",
        ("x" * 200 + "ü").encode("latin-1"),
        {},
        "{} is not text in UTF-8 (byte 200); level=byte takes any file",
    ),
    (
        "short.txt",
        letters(79),
        {},
        "the held-out tenth of {} must be longer than length 7, got 7 of 79 ids",
    ),
    (
        "short.txt",
        letters(79),
        {"level": "byte"},
        "the held-out tenth of {} must be longer than length 7, got 7 of 79 ids",
    ),
    ("folder/a.md", letters(999), {}, "the folder {} holds no .txt files"),
    ("folder/a.txt", "", {}, "the text at {} is empty"),
    ("a.txt", letters(999), {"level": "words"}, "unknown level 'words'; choices: byte, char"),
    (
        "a.txt",
        letters(999),
        {"level": "bytes"},
        "unknown level 'bytes'; did you mean byte? choices: byte, char",
    ),
    ("a.txt", letters(999), {"level": None}, "unknown level None; choices: byte, char"),
    ("a.txt", letters(999), {"digest": 5}, "digest must be text, got 5"),
]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    BAD_TEXTS,
    ids=[f"{name} {options}" for name, _, options, _ in BAD_TEXTS],
)
def test_bad_texts_die_with_one_line(tmp_path, name, content, options, message):
    path = tmp_path / name
    if content is not None:
        written(path, content)
    source = str(path.parent if name.startswith("folder") else path)
    assert refused(Text, 7, source, **options) == message.format(source)


def test_text_that_just_fits_and_one_that_cannot_be_read(tmp_path):
    Text(7, written(tmp_path / "a.txt", letters(80))).sample(seeded(0), 1)
    assert refused(Text, 7, source=5) == "source must be text, got 5"
    assert refused(Text, 7, source=tmp_path).startswith("source must be text, got ")
    given_itself = letters(3000)
    assert refused(Text, 7, given_itself) == bounded(
        f"{given_itself} cannot be read: File name too long"
    )
    (tmp_path / "folder" / "a.txt").mkdir(parents=True)
    assert (
        refused(Text, 7, str(tmp_path / "folder"))
        == f"{tmp_path / 'folder'} cannot be read: it is not a regular file"
    )
