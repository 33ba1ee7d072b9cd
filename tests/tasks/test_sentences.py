"""`Sentences`: files of GLUE's kind, words and bytes, generated sentences."""

import collections
import math

import numpy as np
import pytest
from support.data import forget, letters, refused, written
from support.sentences import GOOD, HELD, tsv
from support.tolerance import STANDARD_ERRORS, seeded

from headwise.tasks import Sentences
from headwise.tasks.ids import BLANK, BYTE_IDS, SEPARATOR
from headwise.tasks.sentences import WORDS, encoded, generated, split_words

pytestmark = pytest.mark.usefixtures("no_network")


def everything(task, step):
    """All that a task draws from one part: (ids, class) pairs."""
    ids, labels = task.sample(seeded(0), 4001, step)
    return {(tuple(row), label) for row, label in zip(ids.tolist(), labels.tolist(), strict=True)}


def padded(ids, length, blank):
    return tuple((list(ids) + [blank] * length)[:length])


# ---- files


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_bytes_of_a_folder_are_its_sentences(tmp_path, end):
    task = Sentences(11, tsv(tmp_path, GOOD, HELD, end=end))
    assert (task.vocab, task.classes, task.tokens) == (BYTE_IDS, 2, 11)
    for step, rows in ((0, GOOD), (None, HELD)):
        assert everything(task, step) == {
            (padded(text.encode(), 11, BLANK), label) for text, label in rows
        }


def test_byte_order_mark_and_quotes_and_odd_line_ends_are_no_part_of_the_table(tmp_path):
    rows = [('he said "yes', 1), ("a\x85b\u2028c", 0)]
    folder = tsv(
        tmp_path,
        b"\xef\xbb\xbf" + ("sentence\tlabel\n" + "".join(f"{a}\t{b}\n" for a, b in rows)).encode(),
        rows,
    )
    assert everything(Sentences(20, folder), 0) == {
        (padded(text.encode(), 20, BLANK), label) for text, label in rows
    }


PAIRS = [("a b c", "d", "yes"), ("a", "b c d e f", "no"), ("a b c d e", "f g h i j", "maybe")]


@pytest.mark.parametrize(
    "names",
    [
        ("sentence1", "sentence2"),
        ("question", "sentence"),
        ("premise", "hypothesis"),
        ("question1", "question2"),
    ],
)
@pytest.mark.parametrize("label", ["label", "gold_label"])
def test_pairs_are_joined_by_a_separator_and_classes_sorted_by_name(tmp_path, names, label):
    rows = [(i, *row) for i, row in enumerate(PAIRS)]
    task = Sentences(
        30,
        tsv(
            tmp_path,
            rows,
            rows,
            f"index\t{names[0]}\t{names[1]}\t{label}",
            dev_name="dev_matched.tsv",
        ),
    )
    expected = {
        (
            padded([*a.encode(), SEPARATOR, *b.encode()], 30, BLANK),
            ["maybe", "no", "yes"].index(name),
        )
        for a, b, name in PAIRS
    }
    assert everything(task, 0) == everything(task, None) == expected


def test_colas_columns_have_no_names(tmp_path):
    rows = [
        ("gj04", 1, "", "it is good"),
        ("gj04", 0, "*", "it good is"),
        ("bc01", 1, "", "so be it"),
    ]
    task = Sentences(12, tsv(tmp_path, rows, rows[:2], header=None))
    assert everything(task, 0) == {
        (padded(text.encode(), 12, BLANK), label) for _, label, _, text in rows
    }, "the first line is one too"


def test_numbers_as_classes_are_in_order_of_value(tmp_path):
    rows = [(f"s{i}", i) for i in (10, 9, -1, 2)]
    task = Sentences(5, tsv(tmp_path, rows, rows))
    named = {
        "".join(map(chr, (i for i in ids if i < 256))): label for ids, label in everything(task, 0)
    }
    assert named == {"s-1": 0, "s2": 1, "s9": 2, "s10": 3}


@pytest.mark.parametrize("length", [3, 4, 5, 8, 11, 12])
@pytest.mark.parametrize(
    ("first", "second"), [(1, 9), (9, 1), (5, 5), (2, 3), (0, 4), (4, 0), (0, 0)]
)
def test_pair_that_is_too_long_has_its_longer_part_cut(first, second, length):
    """As if ids were taken off the end of the longer one, one at a time."""
    a, b = list(range(100, 100 + first)), list(range(200, 200 + second))
    got = encoded([a, b], length, 0, 1)
    while len(a) + len(b) + 1 > length:
        (b if len(b) >= len(a) else a).pop()
    assert len(got) == length
    kept = [i for i in got if i]
    assert kept.count(1) == 1
    assert kept.index(1) + len(kept) - kept.index(1) == len(a) + len(b) + 1
    assert abs(kept.index(1) - len(a)) <= 1, "equal halves but for one"
    assert kept[: kept.index(1)] == list(range(100, 100 + kept.index(1)))
    assert kept[kept.index(1) + 1 :] == list(range(200, 200 + len(kept) - kept.index(1) - 1))


def test_words_are_the_commonest_of_the_training_part_and_the_rest_share_an_id(tmp_path):
    folder = tsv(tmp_path, [*GOOD, ("So GOOD, so odd", 1)], [("so strange", 0), ("good", 1)])
    counts = collections.Counter(
        word for text, _ in [*GOOD, ("so good , so odd", 1)] for word in text.split()
    )
    for most in (1, 3, 5, 100):
        common = sorted(
            word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]
        )
        task = Sentences(6, folder, "word", most=most)
        other, blank = len(common), len(common) + 1
        assert task.vocab == len(common) + 3
        expected = {
            (
                padded([common.index(w) if w in common else other for w in text.split()], 6, blank),
                label,
            )
            for text, label in (("so strange", 0), ("good", 1))
        }
        assert everything(task, None) == expected


def test_examples_are_drawn_once_from_all_classes(tmp_path):
    rows = [(f"a{i}", 0) for i in range(100)] + [(f"b{i}", 1) for i in range(100)]
    folder = tsv(tmp_path, rows, rows)
    few, all_of_them = (
        everything(Sentences(4, folder, examples=20), 0),
        everything(Sentences(4, folder), 0),
    )
    assert len(few) == 20
    assert few < all_of_them
    assert {label for _, label in few} == {0, 1}, "not the first ones, which are of one class"
    assert everything(Sentences(4, folder, examples=20), 0) == few
    assert len(everything(Sentences(4, folder, examples=20), None)) > 150, (
        "what is held out is held out whole"
    )
    assert (
        refused(Sentences, 4, folder, examples=201)
        == f"examples must be at most the 200 of the sentences of {folder}, got 201"
    )


BAD = [
    (
        "no folder",
        lambda at: None,
        (
            "there is no folder of sentences at {}; give one with train.tsv and dev.tsv, "
            "hf:NAME/CONFIG, or"
        ),
    ),
    ("a file", lambda at: written(at, "x"), "there is no folder of sentences at {}; "),
    ("no training file", lambda at: tsv(at, None, HELD), "{} lacks train.tsv"),
    ("no held-out file", lambda at: tsv(at, GOOD, None), "{} lacks dev.tsv or dev_matched.tsv"),
    ("empty", lambda at: tsv(at, b"", HELD), "{}/train.tsv is empty"),
    ("empty held out", lambda at: tsv(at, GOOD, b"\n\n"), "{}/dev.tsv is empty"),
    ("a header alone", lambda at: tsv(at, [], HELD), "{} holds no training sentences"),
    ("a held-out header alone", lambda at: tsv(at, GOOD, []), "{} holds no held-out sentences"),
    (
        "binary",
        lambda at: tsv(at, b"sentence\tlabel\nabc\xff\t1\n", HELD),
        ("{}/train.tsv is not text in UTF-8 (byte 18)"),
    ),
    (
        "zeros",
        lambda at: tsv(at, b"sentence\tlabel\na\0b\t1\n", HELD),
        ("{}/train.tsv is not text: it holds a zero byte"),
    ),
    (
        "truncated",
        lambda at: tsv(at, b"sentence\tlabel\na b\t1\nc d\t0\ne f", HELD),
        ("line 4 of {}/train.tsv should have 2 columns, got 1"),
    ),
    (
        "an empty line",
        lambda at: tsv(at, b"sentence\tlabel\na\t1\n\nc\t0\n", HELD),
        ("line 3 of {}/train.tsv should have 2 columns, got 1"),
    ),
    (
        "too many columns",
        lambda at: tsv(at, GOOD, [("so", "so", 1)]),
        ("line 2 of {}/dev.tsv should have 2 columns, got 3"),
    ),
    (
        "no class in a line",
        lambda at: tsv(at, GOOD, [("so", " ")]),
        ("line 2 of {}/dev.tsv has no label"),
    ),
    (
        "no class at all",
        lambda at: tsv(at, GOOD, HELD, "sentence\tscore"),
        (
            "{}/train.tsv needs a column named label or gold_label or is_duplicate or Quality, it "
            "has "
            "sentence, score"
        ),
    ),
    (
        "no sentence",
        lambda at: tsv(at, GOOD, HELD, "passage\tlabel"),
        (
            "{}/train.tsv needs a column named sentence, or two named sentence1 and sentence2, it "
            "has "
            "passage, label"
        ),
    ),
    (
        "one class",
        lambda at: tsv(at, GOOD[:1], HELD[:1]),
        ("sentences must be of at least two classes, got one, '1', in {}"),
    ),
    (
        "an unknown class",
        lambda at: tsv(at, GOOD, [("so", 2)]),
        ("held-out classes must be among the training part's, 0, 1, got '2' in {}"),
    ),
    (
        "no test labels",
        lambda at: tsv(at, GOOD, [("so", -1)]),
        ("held-out classes must be among the training part's, 0, 1, got '-1' in {}"),
    ),
    (
        "single ones against pairs",
        lambda at: (tsv(at, GOOD, None), tsv(at, None, PAIRS, "sentence1\tsentence2\tlabel"))[0],
        "one part of {} holds pairs of sentences and the other does not",
    ),
]


@pytest.mark.parametrize(
    ("make", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_bad_sentences_die_with_one_line(tmp_path, make, message):
    at = tmp_path / "data"
    make(at)
    assert refused(Sentences, 8, str(at)).startswith(message.format(at))


def test_mistakes_of_sentences(tmp_path):
    assert refused(Sentences, level="char") == "unknown level 'char'; choices: byte, word"
    assert (
        refused(Sentences, level="words")
        == "unknown level 'words'; did you mean word? choices: byte, word"
    )
    assert refused(Sentences, source=5) == "source must be text, got 5"
    assert refused(Sentences, 8, letters(3000)).endswith("cannot be read: File name too long")
    assert refused(Sentences, digest="0" * 12) == (
        f"the generated sentences are not what they were: digest {Sentences().digest}, "
        f"expected {'0' * 12}"
    )
    folder = tsv(tmp_path, GOOD, HELD)
    task = Sentences(8, folder)
    assert Sentences(8, folder, digest=task.digest) == task
    tsv(tmp_path, GOOD, [*HELD, ("so", 1)])
    forget()
    assert refused(Sentences, 8, folder, digest=task.digest).startswith(
        f"the sentences of {folder} are not what they were: digest "
    )


def test_digest_is_of_sentences_and_classes_in_both_parts(tmp_path):
    tables = [
        (GOOD, HELD),
        (HELD, GOOD),
        (GOOD[::-1], HELD),
        (GOOD, [("so good", 0), ("so so bad", 0)]),
        ([("it is good!", 1), *GOOD[1:]], HELD),
    ]
    digests = {
        Sentences(8, tsv(tmp_path / str(i), *table)).digest for i, table in enumerate(tables)
    }
    assert len(digests) == len(tables)
    again = tsv(tmp_path / "again", *tables[0], end="\r\n")
    assert Sentences(8, again).digest == Sentences(8, str(tmp_path / "0")).digest, (
        "how lines end is nothing"
    )


# ---- generated ones


def test_generated_sentences_are_always_the_same_and_no_held_out_one_is_trained_on():
    train, held = generated()
    assert (len(train), len(held)) == (8000, 2000)
    assert not set(train) & set(held)
    assert not {text for text, _ in train} & {text for text, _ in held}
    assert (train, held) == generated()
    assert Sentences().digest == "e13efb6a6f73"
    assert train != generated(seed=1)[0]


def kinds(text):
    """A sentence with its words' kinds in their place."""
    of = {word: kind for kind, some in WORDS.items() for word in some}
    return " ".join(
        of.get(word.strip("."), word) + "." * word.endswith(".") for word in text.split()
    )


def test_sentence_is_right_exactly_if_each_word_has_its_place():
    right = {
        "person took the colour thing to the place.",
        "person has the colour thing.",
        "the thing of person is in the place.",
    }
    seen = collections.Counter()
    for part in generated():
        for (text,), label in part:
            assert (kinds(text) in right) == (label == "1"), text
            assert any(
                sorted(kinds(text).strip(".").split()) == sorted(form.strip(".").split())
                for form in right
            )
            seen[kinds(text)] += 1
    assert right < set(seen)
    assert len(seen) == 3 + 6 + 3 + 3, "every two kinds change places"


def test_words_alone_never_tell_the_class_of_a_sentence():
    """For every word, as often right as wrong, within chance; n is how often it stands."""
    train, _ = generated()
    counts = collections.defaultdict(list)
    for (text,), label in train:
        for word in set(split_words(text)):
            counts[word].append(int(label))
    assert len(counts) > 50
    for word, labels in counts.items():
        n = len(labels)
        assert abs(np.mean(labels) - 0.5) <= STANDARD_ERRORS * 0.5 / math.sqrt(n), f"{word}, n {n}"


def test_baselines_of_sentences_are_plain_counts(tmp_path):
    rows, held = [("a", 0)] * 6 + [("b", 1)] * 2, [("c", 0), ("d", 1), ("e", 1)]
    odds = [6.5 / 9, 2.5 / 9]
    expected = -(math.log(odds[0]) + 2 * math.log(odds[1])) / 3
    baselines = Sentences(4, tsv(tmp_path, rows, held)).baselines()
    assert baselines == {"zero": pytest.approx(math.log(2)), "class": pytest.approx(expected)}
