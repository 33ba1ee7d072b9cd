"""Recall, ListOps and text: answers by brute force, files read back, every fault of the data one
line, and training on all tasks."""

import collections
import dataclasses
import hashlib
import itertools
import json
import math
import random
import re
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.data import digits, forget, letters, mnist, refused, written
from support.small_runs import bits
from support.tolerance import STANDARD_ERRORS, close, examples, same, seeded

from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.model.transformer import build
from headwise.seeds import derive
from headwise.shape import Shape
from headwise.tasks import Farthest, Images, ListOps, Recall, Regression, Text, task_of
from headwise.tasks import listops as listops_module
from headwise.tasks import text as text_module
from headwise.tasks.generated_text import generated_text
from headwise.tasks.listops import BLANK, CLOSE, OPERATIONS, evaluate, expression
from headwise.tasks.task import Classified
from headwise.training import ensemble, fused_encoder
from headwise.training.engine import train
from headwise.training.ensemble import (
    HELD_OUT_BATCH,
    HELD_OUT_SEED,
    Stack,
    begin,
    fused_refusal,
    trunk_refusal,
)
from headwise.training.run import Recipe, Run, ensemble_key

pytestmark = pytest.mark.usefixtures("no_network")


def softmax_losses(logits, targets):
    """-log softmax at the targets, in numpy."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_odds = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(log_odds, targets[..., None], -1)[..., 0]


# ---- a task with classes


@dataclasses.dataclass(frozen=True)
class Bare(Classified):
    """Five classes, and all that a task of this kind inherits."""

    @property
    def tokens(self):
        return 3

    @property
    def classes(self):
        return 5


def test_loss_and_accuracy_of_classes_equal_numpy():
    outputs = torch.randn(2, 7, 11, 3, 8, generator=seeded(1), dtype=torch.float64)
    targets = torch.randint(5, (11,), generator=seeded(2))
    logits = outputs[..., :5].numpy().mean(-2)
    losses = softmax_losses(logits, np.broadcast_to(targets.numpy(), (2, 7, 11)))
    right = logits.argmax(-1) == targets.numpy()
    assert Bare().answer_dim == 5
    close(Bare().loss(outputs, targets), torch.from_numpy(losses.mean(-1)))
    close(Bare().measures(outputs, targets)["accuracy"], torch.from_numpy(right.mean(-1)).float())
    assert set(Bare().measures(outputs, targets)) == {"accuracy"}
    close(
        Bare().loss(torch.zeros(11, 3, 5, dtype=torch.float64), targets),
        torch.tensor(Bare().baselines()["zero"], dtype=torch.float64),
    )
    assert not Bare().squared
    huge = torch.full((11, 3, 5), -1e4)
    huge[torch.arange(11), :, targets] = 1e4
    assert Bare().loss(huge, targets) == 0.0
    assert Bare().measures(huge, targets)["accuracy"] == 1.0
    assert Bare().measures(-huge, targets)["accuracy"] == 0.0


# ---- recall


RECALLS = [
    Recall(5, 11, 3),
    Recall(7, 7, 2),
    Recall(1, 1, 2),
    Recall(5, 13, 17, queries=3),
    Recall(3, 5, 4, queries=1),
]


@pytest.mark.parametrize("task", RECALLS, ids=str)
def test_every_query_asks_for_the_value_behind_its_key(task):
    """Values are ids below `values`, keys those behind; pairs, then queries; every answer stands
    behind its key, one at a time."""
    ids, answers = task.sample(seeded(3), 211)
    asked = task.queries or task.pairs
    assert ids.shape == (211, 2 * task.pairs + asked) == (211, task.tokens)
    assert answers.shape == (211, asked)
    for row, answer in zip(ids.tolist(), answers.tolist(), strict=True):
        pairs = row[: 2 * task.pairs]
        keys, values, queries = pairs[::2], pairs[1::2], row[2 * task.pairs :]
        assert len(set(keys)) == task.pairs, "keys are distinct"
        assert all(task.values <= key < task.values + task.keys == task.vocab for key in keys)
        assert all(0 <= value < task.values for value in values)
        assert len(set(queries)) == asked, "no key is asked for twice"
        table = dict(zip(keys, values, strict=True))
        assert answer == [table[query] for query in queries]


@pytest.mark.parametrize("task", RECALLS, ids=str)
def test_recall_leaks_no_answer_behind_its_query(task):
    """Behind the pairs stand keys alone, and the values are drawn apart from them."""
    ids, answers = task.sample(seeded(3), 211)
    assert (ids[:, 2 * task.pairs :] >= task.values).all()
    assert not task.causal, "so a model that sees all tokens may be trained on it"
    for place in range(answers.shape[1] if task.pairs > 1 else 0):
        fixed = [
            (ids[:, 1 + 2 * pair] == answers[:, place]).float().mean().item()
            for pair in range(task.pairs)
        ]
        assert max(fixed) < 0.8, "the answer is not the value of one place"


def test_recall_draws_every_key_value_and_order():
    task, n = Recall(3, 5, 4), 6000
    ids, answers = task.sample(seeded(5), n)
    for counts, size in (
        (torch.bincount(ids[:, 0] - 4, minlength=5), 5),
        (torch.bincount(ids[:, 4] - 4, minlength=5), 5),
        (torch.bincount(ids[:, 3], minlength=4), 4),
        (torch.bincount(answers[:, 2], minlength=4), 4),
        (torch.bincount((ids[:, :6:2] == ids[:, 6:7]).int().argmax(1), minlength=3), 3),
    ):
        spread = math.sqrt(n * (1 / size) * (1 - 1 / size))
        assert (counts - n / size).abs().max() < STANDARD_ERRORS * spread, (
            f"{counts.tolist()}, n {n}, seed 5"
        )


@pytest.mark.parametrize("task", RECALLS, ids=str)
def test_recall_judges_the_queries_alone(task):
    _, answers = task.sample(seeded(4), 13)
    outputs = torch.randn(2, 13, task.tokens, task.vocab, generator=seeded(5))
    asked = answers.shape[1]
    logits = outputs[..., 2 * task.pairs :, : task.values].double().numpy()
    wanted = np.broadcast_to(answers.numpy(), (2, *answers.shape))
    close(
        task.loss(outputs, answers),
        torch.from_numpy(softmax_losses(logits, wanted).mean((-1, -2))).float(),
    )
    close(
        task.measures(outputs, answers)["accuracy"],
        torch.from_numpy((logits.argmax(-1) == wanted).mean((-1, -2))).float(),
    )
    spoiled = outputs.clone()
    spoiled[..., : task.tokens - asked, :] = math.nan
    spoiled[..., task.values :] = math.nan
    same(task.loss(spoiled, answers), task.loss(outputs, answers))
    perfect = torch.zeros(13, task.tokens, task.vocab)
    perfect[:, -asked:].scatter_(2, answers.unsqueeze(2), 1e4)
    assert task.loss(perfect, answers) == 0.0
    assert task.measures(perfect, answers)["accuracy"] == 1.0


@pytest.mark.parametrize("task", [*RECALLS, Recall(16, 64, 32)], ids=str)
def test_the_baseline_of_recall_agrees_with_monte_carlo(task):
    """Answer with the values shown, by how often each was; n = 4000, seed 17."""
    n = 4000
    ids, answers = task.sample(seeded(17), n)
    losses = []
    for row, answer in zip(ids.tolist(), answers.tolist(), strict=True):
        values = row[1 : 2 * task.pairs : 2]
        losses.append(sum(-math.log(values.count(a) / task.pairs) for a in answer) / len(answer))
    told = task.baselines()
    assert told["zero"] == math.log(task.values)
    assert set(told) == {"zero", "one of the values shown"}
    spread = statistics.stdev(losses) / math.sqrt(n)
    assert (
        abs(statistics.fmean(losses) - told["one of the values shown"])
        <= STANDARD_ERRORS * spread + 1e-12
    )


def test_the_baseline_of_recall_in_closed_form():
    assert Recall(1, 1, 2).baselines()["one of the values shown"] == 0.0
    assert Recall(2, 2, 2).baselines()["one of the values shown"] == pytest.approx(
        math.log(2) / 2
    )  # equal or not, evenly
    assert Recall(2, 2, 7).baselines()["one of the values shown"] == pytest.approx(
        math.log(2) * 6 / 7
    )
    assert Recall(128, 2000, 10**9).baselines()["one of the values shown"] == pytest.approx(
        math.log(128), abs=1e-5
    )


def test_mistakes_of_recall():
    assert refused(Recall, 8, 7, 3) == "keys must be at least as many as pairs, got keys 7, pairs 8"
    assert (
        refused(Recall, 5, 7, 3, queries=6)
        == "queries must be at most as many as pairs, got queries 6, pairs 5"
    )


# ---- ListOps


def value_of(tree):
    """An independent evaluator: a digit, or (operation, arguments)."""
    if isinstance(tree, int):
        return tree
    operation, given = tree[0], [value_of(argument) for argument in tree[1]]
    # the median of an even number is the mean of the middle two, rounded down
    return {
        "MIN": min,
        "MAX": max,
        "MED": lambda v: math.floor(statistics.median(v)),
        "SUM": lambda v: sum(v) % 10,
    }[operation](given)


def ids_of(tree):
    if isinstance(tree, int):
        return [tree]
    return [
        10 + OPERATIONS.index(tree[0]),
        *itertools.chain.from_iterable(ids_of(argument) for argument in tree[1]),
        CLOSE,
    ]


def tree_of(ids):
    """Parse ids back, by recursive descent; every argument must be there and nothing left."""
    ids = list(ids)

    def read():
        token = ids.pop(0)
        if token < 10:
            return token
        assert token < CLOSE, "an argument was expected"
        arguments = []
        while ids[0] != CLOSE:
            arguments.append(read())
        ids.pop(0)
        return OPERATIONS[token - 10], arguments

    tree = read()
    assert not ids, "something behind the expression"
    return tree


def depth_of(tree):
    return 0 if isinstance(tree, int) else 1 + max(depth_of(argument) for argument in tree[1])


TREES = st.recursive(
    st.integers(0, 9),
    lambda inner: st.tuples(st.sampled_from(OPERATIONS), st.lists(inner, min_size=1, max_size=6)),
    max_leaves=40,
).filter(lambda tree: not isinstance(tree, int))


@examples(300)
@given(TREES, st.integers(0, 5))
def test_expressions_evaluate_as_an_independent_evaluator_says(tree, blanks):
    assert evaluate([*ids_of(tree), *[BLANK] * blanks]) == value_of(tree)


def test_hand_written_expressions():
    words = {
        **{name: 10 + i for i, name in enumerate(("MIN", "MAX", "MED", "SUM"))},
        "]": 14,
        "_": 15,
        **{str(d): d for d in range(10)},
    }
    assert (CLOSE, BLANK) == (14, 15)
    for text, value in {
        "MAX 4 MIN 8 2 ] 0 ]": 4,
        "MIN 4 MAX 8 2 ] 7 ] _ _": 4,
        "MED 1 9 2 ]": 2,
        "MED 9 1 ]": 5,
        "MED 0 9 ]": 4,  # 4.5, rounded down
        "MED 7 1 8 2 ]": 4,
        "MED 3 3 3 8 9 ]": 3,
        "SUM 9 8 7 ]": 4,
        "SUM 5 5 ]": 0,
        "SUM MIN 9 3 ] MED 2 4 ] MAX SUM 6 6 ] 1 ] ]": 8,
    }.items():
        assert evaluate([words[w] for w in text.split()]) == value, text


@examples(200)
@given(
    st.integers(1, 4), st.integers(2, 5), st.sampled_from((0, 0.3, 0.7, 1)), st.integers(0, 10**6)
)
def test_expressions_respect_depth_and_arguments(depth, arguments, nested, seed):
    tree = tree_of(expression(random.Random(seed), depth, arguments, nested))

    def check(node, level):
        if isinstance(node, int):
            assert 0 <= node <= 9
            assert nested < 1 or level == depth, "every argument is nested while the depth allows"
            return
        assert 2 <= len(node[1]) <= arguments
        for argument in node[1]:
            check(argument, level + 1)

    check(tree, 0)
    assert 1 <= depth_of(tree) <= (depth if nested else 1)


@examples(100)
@given(st.integers(1, 60), st.integers(0, 10**6))
def test_an_expression_that_cannot_fit_is_left_unfinished(most, seed):
    """What fits is whole; what is given up is too long, so that nothing else is ever refused."""
    found = expression(random.Random(seed), 4, 5, 0.5, most)
    if len(found) <= most:
        assert depth_of(tree_of(found)) <= 4
    assert len(found) <= most + 2 + 4, "it goes on growing"
    whole = expression(random.Random(seed), 4, 5, 0.5)
    assert (found == whole) if len(whole) <= most else len(found) > most


def test_expressions_have_every_operation_digit_size_and_depth():
    rng, seen = random.Random(1), collections.Counter()
    for _ in range(500):
        tree = tree_of(expression(rng, 3, 5, 0.3))
        seen[tree[0]] += 1
        seen[len(tree[1])] += 1
        seen["depth", depth_of(tree)] += 1
        seen.update(("digit", a) for a in tree[1] if isinstance(a, int))
    for name, count in (*((o, 125) for o in OPERATIONS), *((n, 125) for n in (2, 3, 4, 5))):
        assert abs(seen[name] - count) < STANDARD_ERRORS * math.sqrt(500 * 0.25 * 0.75), (
            name,
            seen[name],
        )
    assert all(seen["digit", d] > 0 for d in range(10))
    assert all(seen["depth", d] > 50 for d in (1, 2, 3))


SMALL_LISTOPS = ListOps(length=17, depth=2, arguments=3, nested=0.4, examples=301)


@pytest.mark.parametrize("step", [None, 0])
def test_listops_samples_are_expressions_with_their_values_and_blanks_behind(step):
    ids, values = SMALL_LISTOPS.sample(seeded(1), 400, step)
    assert ids.shape == (400, 17)
    lengths = set()
    for row, value in zip(ids.tolist(), values.tolist(), strict=True):
        length = row.index(BLANK) if BLANK in row else 17
        assert row[length:] == [BLANK] * (17 - length), "blanks stand at the end"
        assert value_of(tree_of(row[:length])) == value
        lengths.add(length)
    assert {4, 17} <= lengths, "from the shortest to those that just fit"


def test_no_held_out_expression_is_trained_on():
    """Short ones would be, if the two parts were only drawn apart."""
    pools = {}
    for part, step, size in (("held", None, 2000), ("train", 0, 301)):
        rows = SMALL_LISTOPS.sample(seeded(2), 30_000, step)[0].tolist()
        pools[part] = {tuple(row) for row in rows}
        assert 0.5 * size < len(pools[part]) <= size
    assert not pools["held"] & pools["train"]
    shorts = sum(row[4] == BLANK for row in pools["held"])
    assert shorts > 100, "the held-out part follows the law, short ones and all"
    train, held = (listops_module._drawn(SMALL_LISTOPS, part)[0] for part in (False, True))
    assert (len(train), len(held)) == (301, 2000)


def test_listops_are_the_same_in_every_process():
    """Literals: rows on disk were made with these expressions."""
    ids, values = SMALL_LISTOPS.sample(seeded(0), 2)
    again = ListOps(length=17, depth=2, arguments=3, nested=0.4, examples=301)
    listops_module._pool.cache_clear()
    listops_module._drawn.cache_clear()
    for a, b in zip((ids, values), again.sample(seeded(0), 2), strict=True):
        same(a, b)
    shown = hashlib.sha256(listops_module._drawn(again, True)[0].numpy().tobytes()).hexdigest()[:12]
    assert shown == "7744eea9d792"


def test_mistakes_of_listops():
    fits = "expressions of depth 3 hardly ever fit length 9; make it longer or less nested"
    assert refused(ListOps, length=9, depth=3, nested=1) == fits
    assert refused(ListOps, length=64, depth=60, arguments=9, nested=1).startswith(
        "expressions of depth 60 hardly ever fit length 64"
    )
    crowded = ListOps(length=5, depth=1, arguments=2, examples=500)  # 400 expressions in all
    assert (
        refused(crowded.sample, seeded(0), 1, 0)
        == "hardly any expression of length 5 is left when 2,000 are held out; make it longer"
    )
    for bad in (-0.1, 1.5, "0.5", None, True, math.nan):
        assert refused(ListOps, nested=bad) == f"nested must be a number from 0 to 1, got {bad!r}"


# ---- text


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


def test_a_folder_is_its_texts_in_order_of_name(tmp_path):
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


def test_a_text_that_changed_is_refused(tmp_path):
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


def test_the_generated_text_is_always_the_same():
    """A literal: the ids of runs hold it."""
    task = Text(7)
    assert task.digest == "d946d7c3c4db"
    assert task.vocab == 28
    text = generated_text(text_module.GENERATED)
    assert len(text) == text_module.GENERATED
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == task.digest
    assert generated_text(5000) == text[:5000]
    assert generated_text(5000, seed=1) != text[:5000]
    told = task.baselines()
    assert told["pairs"] < told["single"] < told["zero"]


def test_what_the_generated_text_says_is_true():
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


def test_a_text_that_just_fits_and_one_that_cannot_be_read(tmp_path):
    Text(7, written(tmp_path / "a.txt", letters(80))).sample(seeded(0), 1)
    assert refused(Text, 7, source=5) == "source must be text, got 5"
    assert refused(Text, 7, source=tmp_path).startswith("source must be text, got ")
    given_itself = letters(3000)
    assert refused(Text, 7, given_itself) == f"{given_itself} cannot be read: File name too long"
    (tmp_path / "folder" / "a.txt").mkdir(parents=True)
    assert (
        refused(Text, 7, str(tmp_path / "folder"))
        == f"{tmp_path / 'folder'} cannot be read: Is a directory"
    )


# ---- runs


def shape_for(task, heads=2, dim=16, **changes):
    """A small model that takes the task: tokens or patches in, classes out."""
    ends = (
        {"vocab_size": task.vocab}
        if task.vocab
        else {"input_dim": task.in_dim, "output_dim": task.answer_dim}
    )
    sizes = {
        "dim": dim,
        "depth": 1,
        "num_heads": heads,
        "head_dim": 16 // heads,
        "ffn_dim": 32,
        "norm": "layer",
    }
    placed = {"positions": "additive", "num_positions": task.tokens, "causal": task.causal}
    return Shape(**sizes | placed | ends | changes)


def together(runs, **options):
    return train(runs, device="cpu", advance=lambda n: None, **options)


TINY = {
    "recall": (Recall(2, 4, 4), {}),
    "text": (Text(16), {}),
    "images": (Images(4), {}),
    "listops": (ListOps(length=24, depth=2, examples=500), {"output_dim": 10}),
}


def tiny(name, heads=2, seed=0, **recipe):
    task, changes = TINY[name]
    settings = {
        "steps": 100,
        "epoch": 20,
        "batch": 16,
        "held_out": 256,
        "evals": 1,
        "lr": 0.01,
        "init": "normal",
    } | recipe
    return Run(shape_for(task, heads, **changes), task, Recipe(**settings), seed)


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_learns_something_of_the_task(name, tmp_path):
    """Better than equal odds on held-out data; the accuracy and the error of its row are those of
    the kept weights."""
    run = tiny(name)
    (row,) = together([run], folder=tmp_path, keep_weights=True)
    assert row["status"] == "done"
    assert row["zero_error"] == pytest.approx(math.log(run.task.classes))
    assert row["held_out"] < row["zero_error"] - 0.02
    assert row["curve"][-1] < row["curve"][0]
    assert 1.1 / run.task.classes < row["held_out_accuracy"] <= 1.0
    assert row["task"] == name
    assert row["task_digest" if "digest" in dataclasses.asdict(run.task) else "task"]
    json.dumps(row, allow_nan=False)
    model = build(run.shape)
    model.load_state_dict(load_file(tmp_path / run.id / "weights.safetensors"))
    losses, right = [], []
    for batch in range(2):  # 256 sequences
        x, target = run.task.sample(
            seeded(derive(HELD_OUT_SEED, "held out", batch)), HELD_OUT_BATCH
        )
        with torch.no_grad():
            outputs = model(x)[0].double().numpy()[..., : run.task.classes]
        logits = {"recall": outputs[:, -2:], "text": outputs}.get(name, outputs.mean(1))
        losses.append(softmax_losses(logits, target.numpy()).mean())
        right.append((logits.argmax(-1) == target.numpy()).mean())
    assert row["held_out"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert row["held_out_accuracy"] == pytest.approx(np.mean(right), abs=1e-6)


@pytest.mark.parametrize("name", TINY)
def test_models_of_several_head_counts_train_as_if_alone(name):
    """Bit by bit, with different seeds and rates beside each other, under both protocols."""
    runs = [tiny(name, heads, seed, steps=20, epoch=10) for heads in (1, 2, 4) for seed in (0, 1)]
    runs += [
        tiny(name, 2, 5, steps=20, epoch=10, lr=0.03),
        tiny(name, 2, 0, steps=20, epoch=10, protocol="replay"),
    ]
    assert len({ensemble_key(run) for run in runs}) == 1
    rows = together(runs)
    assert {row["models"] for row in rows} == {len(runs)}
    assert len({bits(row) for row in rows}) == len(rows)
    for run, row in zip(runs, rows, strict=True):
        assert bits(together([run])[0]) == bits(row)


@pytest.mark.parametrize("task", [Recall(2, 11, 7), Recall(4, 5, 2)], ids=str)
@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"output_dim": 7}], ids=str)
def test_odd_vocabularies_stack_bit_by_bit(task, changes):
    """Tables whose size is no whole number of cache lines."""
    changes = {k: task.classes if k == "output_dim" else v for k, v in changes.items()}
    recipe = Recipe(steps=6, epoch=3, batch=16, held_out=128, evals=1)
    runs = [
        Run(shape_for(task, heads, dim=12, **changes), task, recipe, heads) for heads in (1, 2, 4)
    ]
    assert task.vocab * 12 % 16
    rows = together(runs)
    assert {row["models"] for row in rows} == {3}
    for run, row in zip(runs, rows, strict=True):
        assert bits(together([run])[0]) == bits(row)


def test_a_run_that_diverges_says_no_accuracy():
    wild, sane = tiny("recall", steps=20, lr=1e6, schedule="constant"), tiny("recall", steps=20)
    lost, row = together([wild, sane])
    assert lost["status"] == "diverged"
    assert "held_out_accuracy" not in lost
    assert bits(row) == bits(together([sane])[0])


VECTORS = "this task's inputs are vectors, so vocab_size 0, got vocab_size "
REFUSED = [
    (Recall(2, 4, 4), {"vocab_size": 0}, (
        "this task's inputs are tokens, so a vocab_size of at least 8, got vocab_size 0"
    )),
    (Recall(2, 4, 4), {"vocab_size": 7}, (
        "this task's inputs are tokens, so a vocab_size of at least 8, got vocab_size 7"
    )),
    (Recall(2, 4, 4), {"vocab_size": 0, "input_dim": 16}, (
        "this task's inputs are tokens, so a vocab_size of at least 8, got vocab_size 0"
    )),
    (Recall(2, 4, 4), {"output_dim": 8}, (
        "output_dim must be the width of the task's answers, 4, got 8"
    )),
    (Recall(2, 4, 4), {"num_positions": 5}, (
        "num_positions must be at least the task's 6 tokens, got 5"
    )),
    (Text(16), {"vocab_size": 27}, (
        "this task's inputs are tokens, so a vocab_size of at least 28, got vocab_size 27"
    )),
    (Text(16), {"output_dim": 27}, (
        "output_dim must be the width of the task's answers, 28, got 27"
    )),
    (Text(16), {"causal": False}, (
        "a shape for this task must be causal, because later tokens hold the answers; got causal "
        "False"
    )),
    (ListOps(), {"vocab_size": 15}, (
        "this task's inputs are tokens, so a vocab_size of at least 16, got vocab_size 15"
    )),
    (ListOps(), {"output_dim": 11}, (
        "output_dim must be the width of the task's answers, 10, got 11"
    )),
    (Images(4), {"vocab_size": 16, "input_dim": 0}, VECTORS + "16"),
    (Images(4), {"input_dim": 15}, (
        "a shape's input_dim must be its task's dim, got input_dim 15, task dim 16"
    )),
    (Images(2), {"input_dim": 0}, "a shape's dim must be its task's dim, got dim 16, task dim 4"),
    (Images(4), {"output_dim": 9}, "output_dim must be the width of the task's answers, 10, got 9"),
    (Images(4), {"dim": 8, "output_dim": 0}, (
        "outputs must be at least as wide as the task's answers, 10, got 8"
    )),
    (Farthest(16, 5), {"input_dim": 0, "output_dim": 0, "vocab_size": 9}, VECTORS + "9"),
    (Regression(16, 5), {"input_dim": 0, "vocab_size": 9}, VECTORS + "9"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("task", "changes", "message"), REFUSED, ids=[f"{type(t).__name__} {c}" for t, c, _ in REFUSED]
)
def test_a_shape_that_does_not_fit_the_task_is_refused(task, changes, message):
    shape, recipe = shape_for(task), Recipe(steps=100)
    Run(shape, task, recipe)
    assert refused(Run, shape.replace(**changes), task, recipe) == message


def test_a_wider_vocabulary_or_a_vector_as_wide_as_the_model_fits():
    Run(shape_for(Recall(2, 4, 4), vocab_size=50), Recall(2, 4, 4), Recipe(steps=100))
    run = Run(
        shape_for(Images(4), input_dim=0, output_dim=0),
        Images(4),
        Recipe(steps=2, epoch=2, batch=16, held_out=16, evals=1),
    )
    assert together([run])[0]["status"] == "done"


def test_specs_of_runs_round_trip_with_what_their_data_were(tmp_path):
    source = written(tmp_path / "a.txt", letters(500))
    tasks = [
        Recall(2, 4, 4, queries=1),
        ListOps(length=24, nested=0.5),
        Text(16),
        Images(8),
        Text(7, source, "byte"),
        Text(7, source, most=9),
    ]
    tasks.append(Images(3, mnist(tmp_path / "m", digits())))
    for task in tasks:
        run = Run(shape_for(task), task, Recipe(steps=100), 3)
        spec = json.loads(json.dumps(run.spec()))
        again = Run.of(spec)
        assert again == run
        assert again.id == run.id
        if "digest" in spec["task"]:
            assert re.fullmatch(r"[0-9a-f]{12}", spec["task"]["digest"])
            spec["task"]["digest"] = "0" * 12
            assert "expected 000000000000" in refused(Run.of, spec)
            del spec["task"]["digest"]
            assert Run.of(spec) == run, "without one it is found"
    assert len({Run(shape_for(task), task, Recipe(steps=100)).id for task in tasks}) == len(tasks)


def test_the_id_of_a_run_follows_the_text(tmp_path):
    """The same path with another text is another run, so no row of the one is taken for the
    other's."""
    ids = []
    for seed in (0, 1):
        task = Text(7, written(tmp_path / "a.txt", letters(500, seed)))
        ids.append(Run(shape_for(task, vocab_size=26), task, Recipe(steps=100)).id)
        forget()
    assert ids[0] != ids[1]


# ---- kernels that know one loss


def test_the_fused_step_takes_no_task_but_squared_errors(monkeypatch):
    """Of a shape that it takes, only the task decides; the blocks alone leave the loss to the
    task."""
    monkeypatch.setattr(ensemble, "has_triton", lambda: True)
    shape, gpu = paper_shape(16, 1, 16, 1, ffn_dim=64), torch.device("cuda")
    recipe = Recipe(steps=100, batch=256, precision="fp16")
    assert fused_encoder.refusal(shape, 16, 256, "fp16") == ""
    assert fused_refusal(Run(shape, Farthest(16, 16), recipe), gpu) == ""
    run = Run(shape, Images(4), recipe)
    assert isinstance(run.task, Classified)
    assert fused_refusal(run, gpu) == "its loss is the squared error"
    made = Stack([begin(run)], torch.device("cpu"))
    made.device = gpu
    assert trunk_refusal(run, gpu)
    assert made._kernels(256) is None
    for task in (Recall(2, 4, 4), Text(16), ListOps(), Images(4), Regression(16, 8)):
        other = Run(shape_for(task), task, recipe)
        assert not task.squared
        assert fused_refusal(other, gpu) == "its loss is the squared error"


BLOCKS = {
    "qkv_bias": True,
    "out_bias": True,
    "ffn_bias": True,
    "activation": "gelu",
    "norm_at": "pre",
}


@pytest.mark.parametrize("output_dim", [0, 28])
def test_text_trains_on_the_blocks_as_on_the_modules(output_dim, monkeypatch):
    """Pre-norm blocks as kernels, without a GPU in Triton's interpreter; the table, which is used
    at both ends, and the loss around them are the modules' own."""
    pytest.importorskip("triton", reason="the kernels are written in triton")
    from support.gpu import DEVICE

    from headwise.training import fused_decoder

    task, forward, used, rows = Text(32), fused_decoder.Trunk.forward, [], []
    recipe = Recipe(
        steps=2, epoch=1, batch=2, held_out=2, evals=1, lr=0.03, schedule="constant", init="normal"
    )
    run = Run(shape_for(task, 2, **BLOCKS, output_dim=output_dim), task, recipe, 3)
    assert fused_decoder.refusal(run.shape, 32, 2, "fp32") == ""
    for blocks in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(ensemble, "HELD_OUT_BATCH", 2)
            patch.setattr(
                ensemble,
                "trunk_refusal",
                lambda run, device, blocks=blocks: "" if blocks else "not now",
            )
            patch.setattr(
                fused_decoder.Trunk, "forward", lambda *given: used.append(1) or forward(*given)
            )
            rows += train([run], device=DEVICE.type, advance=lambda n: None)
        assert bool(used) == blocks
    plain, ours = rows
    assert ours["curve"] == pytest.approx(plain["curve"], rel=1e-5)
    assert ours["held_out"] == pytest.approx(plain["held_out"], rel=1e-5)
    assert ours["held_out_accuracy"] == pytest.approx(plain["held_out_accuracy"], abs=0.02)
    assert abs(plain["held_out"] - plain["curve"][0]) > 0.05, "it learns too little to be compared"
