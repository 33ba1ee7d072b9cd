"""Recall, ListOps, text and images: answers by brute force, files read back, every fault of the data one line, training."""

import collections
import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import socket
import statistics
import struct
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tolerance import STANDARD_ERRORS, close, examples, same, seeded

from headwise import fused, stack
from headwise.engine import train
from headwise.models import build, paper_shape
from headwise.runs import MEASURED, Recipe, Run, derive, stack_key
from headwise.shape import Shape, UsageError
from headwise.stack import HELD_OUT_BATCH, HELD_OUT_SEED, Stack, begin, fused_refusal, trunk_refusal
from headwise.tasks import Farthest, Images, ListOps, Recall, Regression, Text, task_of
from headwise.tasks import images as images_module
from headwise.tasks import listops as listops_module
from headwise.tasks import text as text_module
from headwise.tasks.images import patches
from headwise.tasks.listops import BLANK, CLOSE, OPERATIONS, evaluate, expression
from headwise.tasks.task import Classified
from headwise.tasks.text import generated


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Whatever a task lacks, it never fetches."""

    def refuse(*given, **named):
        raise AssertionError("a task opened a connection")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


def refused(make, *given, **named):
    """The message of a user's mistake: one line, and no other error behind it."""
    with pytest.raises(UsageError) as caught:
        make(*given, **named)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) > 20
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__, "another traceback is shown before it"
    return message


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
    close(Bare().loss(torch.zeros(11, 3, 5, dtype=torch.float64), targets), torch.tensor(Bare().baselines()["zero"], dtype=torch.float64))
    assert not Bare().squared
    huge = torch.full((11, 3, 5), -1e4)
    huge[torch.arange(11), :, targets] = 1e4
    assert Bare().loss(huge, targets) == 0.0
    assert Bare().measures(huge, targets)["accuracy"] == 1.0
    assert Bare().measures(-huge, targets)["accuracy"] == 0.0


# ---- recall


RECALLS = [Recall(5, 11, 3), Recall(7, 7, 2), Recall(1, 1, 2), Recall(5, 13, 17, queries=3), Recall(3, 5, 4, queries=1)]


@pytest.mark.parametrize("task", RECALLS, ids=str)
def test_every_query_asks_for_the_value_behind_its_key(task):
    """Values are ids below `values`, keys those behind; pairs, then queries; every answer stands behind its key, one at a time."""
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
        fixed = [(ids[:, 1 + 2 * pair] == answers[:, place]).float().mean().item() for pair in range(task.pairs)]
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
        assert (counts - n / size).abs().max() < STANDARD_ERRORS * spread, f"{counts.tolist()}, n {n}, seed 5"


@pytest.mark.parametrize("task", RECALLS, ids=str)
def test_recall_judges_the_queries_alone(task):
    _, answers = task.sample(seeded(4), 13)
    outputs = torch.randn(2, 13, task.tokens, task.vocab, generator=seeded(5))
    asked = answers.shape[1]
    logits = outputs[..., 2 * task.pairs :, : task.values].double().numpy()
    wanted = np.broadcast_to(answers.numpy(), (2, *answers.shape))
    close(task.loss(outputs, answers), torch.from_numpy(softmax_losses(logits, wanted).mean((-1, -2))).float())
    close(task.measures(outputs, answers)["accuracy"], torch.from_numpy((logits.argmax(-1) == wanted).mean((-1, -2))).float())
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
    assert abs(statistics.fmean(losses) - told["one of the values shown"]) <= STANDARD_ERRORS * spread + 1e-12


def test_the_baseline_of_recall_in_closed_form():
    assert Recall(1, 1, 2).baselines()["one of the values shown"] == 0.0
    assert Recall(2, 2, 2).baselines()["one of the values shown"] == pytest.approx(math.log(2) / 2)  # equal or not, evenly
    assert Recall(2, 2, 7).baselines()["one of the values shown"] == pytest.approx(math.log(2) * 6 / 7)
    assert Recall(128, 2000, 10**9).baselines()["one of the values shown"] == pytest.approx(math.log(128), abs=1e-5)


def test_mistakes_of_recall():
    assert refused(Recall, 8, 7, 3) == "keys must be at least as many as pairs, got keys 7, pairs 8"
    assert refused(Recall, 5, 7, 3, queries=6) == "queries must be at most as many as pairs, got queries 6, pairs 5"


# ---- ListOps


def value_of(tree):
    """An independent evaluator: a digit, or (operation, arguments)."""
    if isinstance(tree, int):
        return tree
    operation, given = tree[0], [value_of(argument) for argument in tree[1]]
    # the median of an even number is the mean of the middle two, rounded down
    return {"MIN": min, "MAX": max, "MED": lambda v: math.floor(statistics.median(v)), "SUM": lambda v: sum(v) % 10}[operation](given)


def ids_of(tree):
    if isinstance(tree, int):
        return [tree]
    return [10 + OPERATIONS.index(tree[0]), *itertools.chain.from_iterable(ids_of(argument) for argument in tree[1]), CLOSE]


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
    st.integers(0, 9), lambda inner: st.tuples(st.sampled_from(OPERATIONS), st.lists(inner, min_size=1, max_size=6)), max_leaves=40
).filter(lambda tree: not isinstance(tree, int))


@examples(300)
@given(TREES, st.integers(0, 5))
def test_expressions_evaluate_as_an_independent_evaluator_says(tree, blanks):
    assert evaluate([*ids_of(tree), *[BLANK] * blanks]) == value_of(tree)


def test_hand_written_expressions():
    words = {**{name: 10 + i for i, name in enumerate(("MIN", "MAX", "MED", "SUM"))}, "]": 14, "_": 15, **{str(d): d for d in range(10)}}
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
@given(st.integers(1, 4), st.integers(2, 5), st.sampled_from((0, 0.3, 0.7, 1)), st.integers(0, 10**6))
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
        assert abs(seen[name] - count) < STANDARD_ERRORS * math.sqrt(500 * 0.25 * 0.75), (name, seen[name])
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
    assert refused(ListOps, length=64, depth=60, arguments=9, nested=1).startswith("expressions of depth 60 hardly ever fit length 64")
    crowded = ListOps(length=5, depth=1, arguments=2, examples=500)  # 400 expressions in all
    assert refused(crowded.sample, seeded(0), 1, 0) == "hardly any expression of length 5 is left when 2,000 are held out; make it longer"
    for bad in (-0.1, 1.5, "0.5", None, True, math.nan):
        assert refused(ListOps, nested=bad) == f"nested must be a number from 0 to 1, got {bad!r}"


# ---- text


def letters(count, seed=0, alphabet="abcdefghijklmnopqrstuvwxyz"):
    """A text in which nearly every few characters stand once."""
    return "".join(random.Random(seed).choices(alphabet, k=count))


def written(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def decoded(ids, alphabet):
    return ["".join(alphabet[i] for i in row) for row in ids.tolist()]


@pytest.mark.parametrize("step", [None, 0, 12345])
@pytest.mark.parametrize("level", ["char", "byte"])
def test_windows_are_of_their_part_and_targets_follow_them(tmp_path, level, step):
    """Every training window and its targets lie before the cut, every held-out one behind it; each place of the part is drawn."""
    text = letters(1009, alphabet="abcdefghijklmnopqrstuvwxyzäöü€\U0001f600") if level == "char" else letters(1009)
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
    assert refused(Text, 5, str(tmp_path / "a.bin")) == f"{tmp_path / 'a.bin'} is not text in UTF-8 (byte 128); level=byte takes any file"


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
    parts = {"b.txt": letters(300, 1), "a.txt": letters(200, 2), "c/a.txt": letters(100, 3), "notes.md": "#" * 999, "d.TXT": "!" * 999}
    for name, text in parts.items():
        written(tmp_path / "texts" / name, text)
    task = Text(7, str(tmp_path / "texts"), "byte")
    whole = "\n".join(parts[name] for name in ("a.txt", "b.txt", "c/a.txt")).encode()
    assert bytes(text_module._read(task.source, "byte", 255).ids.tolist()) == whole
    assert task.digest == hashlib.sha256(whole).hexdigest()[:12]
    assert task == Text(7, str(tmp_path / "texts"), "byte", digest=task.digest)
    assert Text(7, written(tmp_path / "one.txt", whole), "byte").digest == task.digest, "a folder is the text in it"


def forget():
    """What a new process knows of files."""
    for module, names in ((text_module, ("_read", "_part", "_counted")), (images_module, ("_load", "_part"))):
        for name in names:
            getattr(module, name).cache_clear()


def test_a_text_that_changed_is_refused(tmp_path):
    source = written(tmp_path / "a.txt", letters(500))
    task = Text(7, source)
    forget()
    assert task_of("text", dataclasses.asdict(task)) == task
    written(tmp_path / "a.txt", letters(499) + "!")
    forget()
    now = hashlib.sha256((letters(499) + "!").encode()).hexdigest()[:12]
    assert refused(task_of, "text", dataclasses.asdict(task)) == f"{source} is not the text it was: digest {now}, expected {task.digest}"
    assert refused(Text, 7, digest="0" * 12).startswith("the generated text is not the text it was: digest ")


def plain_counts(train, held, vocab):
    """Cross-entropy of single and of pairs of characters by counting, half a count added to each."""
    singles, pairs, firsts = collections.Counter(train), collections.Counter(itertools.pairwise(train)), collections.Counter(train[:-1])
    single = [-math.log((singles[b] + 0.5) / (len(train) + 0.5 * vocab)) for _, b in itertools.pairwise(held)]
    both = [-math.log((pairs[a, b] + 0.5) / (firsts[a] + 0.5 * vocab)) for a, b in itertools.pairwise(held)]
    return statistics.fmean(single), statistics.fmean(both)


@pytest.mark.parametrize("level", ["char", "byte"])
def test_baselines_of_text_are_plain_counts(tmp_path, level):
    text = "".join(random.Random(4).choices("aaaabbcdé", k=997)) + "new!" * 30
    task = Text(5, written(tmp_path / "a.txt", text), level)
    ids = list(text) if level == "char" else list(text.encode())
    cut = len(ids) - int(0.1 * len(ids))
    vocab = len(set(text)) if level == "char" else 256
    single, pairs = plain_counts(ids[:cut], ids[cut:], vocab)
    assert task.baselines() == pytest.approx({"zero": math.log(vocab), "single": single, "pairs": pairs}, rel=1e-9)


def test_the_generated_text_is_always_the_same():
    """A literal: the ids of runs hold it."""
    task = Text(7)
    assert task.digest == "d946d7c3c4db"
    assert task.vocab == 28
    text = generated(text_module.GENERATED)
    assert len(text) == text_module.GENERATED
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == task.digest
    assert generated(5000) == text[:5000]
    assert generated(5000, seed=1) != text[:5000]
    told = task.baselines()
    assert told["pairs"] < told["single"] < told["zero"]


def test_what_the_generated_text_says_is_true():
    """Every fact follows from the sentences before it in its scene: there is something to look up."""
    has, seen = {}, collections.Counter()
    patterns = {
        "took": r"(\w+) took the (\w+) (\w+) to the (\w+)",
        "went": r"then (\w+) went to the (\w+)",
        "has": r"(\w+) has the (\w+) (\w+)",
        "in": r"the (\w+) of (\w+) is in the (\w+)",
        "is": r"the (\w+) is (\w+)",
    }
    for scene in generated(60_000).split("\n")[:-1]:
        has.clear()
        for sentence in scene.removesuffix(".").split(". "):
            kind, found = next((k, m.groups()) for k, p in patterns.items() if (m := re.fullmatch(p, sentence)))
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
    ("gone.txt", None, {}, 'there is no text at {}; give a file, a folder of .txt files, or "" for a generated text'),
    ("empty.txt", "", {}, "the text at {} is empty"),
    ("empty.txt", "", {"level": "byte"}, "the text at {} is empty"),
    ("blank.txt", " \n\t \n" * 99, {}, "the text at {} is empty"),
    ("binary.txt", b"abc\xff\xfe" * 99, {}, "{} is not text in UTF-8 (byte 3); level=byte takes any file"),
    ("latin.txt", ("x" * 200 + "ü").encode("latin-1"), {}, "{} is not text in UTF-8 (byte 200); level=byte takes any file"),
    ("short.txt", letters(79), {}, "the held-out tenth of {} must be longer than length 7, got 7 of 79 ids"),
    ("short.txt", letters(79), {"level": "byte"}, "the held-out tenth of {} must be longer than length 7, got 7 of 79 ids"),
    ("folder/a.md", letters(999), {}, "the folder {} holds no .txt files"),
    ("folder/a.txt", "", {}, "the text at {} is empty"),
    ("a.txt", letters(999), {"level": "words"}, "unknown level 'words'; choices: byte, char"),
    ("a.txt", letters(999), {"level": "bytes"}, "unknown level 'bytes'; did you mean byte? choices: byte, char"),
    ("a.txt", letters(999), {"level": None}, "unknown level None; choices: byte, char"),
    ("a.txt", letters(999), {"digest": 5}, "digest must be text, got 5"),
]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"), BAD_TEXTS, ids=[f"{name} {options}" for name, _, options, _ in BAD_TEXTS]
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
    assert refused(Text, 7, str(tmp_path / "folder")) == f"{tmp_path / 'folder'} cannot be read: Is a directory"


# ---- images


def test_patches_equal_nested_loops():
    x = torch.randn(3, 5, 14, 21, generator=seeded(1))
    found = patches(x, 7)
    assert found.shape == (3, 2 * 3, 7 * 7 * 5)
    for b, i, j in itertools.product(range(3), range(2), range(3)):
        cut = [x[b, c, 7 * i + v, 7 * j + u].item() for v in range(7) for u in range(7) for c in range(5)]
        assert found[b, 3 * i + j].tolist() == cut
    same(patches(x, 1), x.permute(0, 2, 3, 1).flatten(1, 2))


def idx(array):
    """MNIST's format."""
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def digits(size=6, train=11, held=7, classes=3, seed=0):
    """Images and labels of both parts; every class is among the training ones."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 256, (train, size, size), dtype=np.uint8),
        np.concatenate((np.arange(classes), rng.integers(0, classes, train - classes))).astype(np.uint8),
        rng.integers(0, 256, (held, size, size), dtype=np.uint8),
        rng.integers(0, classes, held).astype(np.uint8),
    ]


def mnist(folder, arrays, gz=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(NAMES, arrays, strict=True):
        data = array if isinstance(array, bytes) else idx(array)
        (folder / (name + ".gz" * gz)).write_bytes(gzip.compress(data) if gz else data)
    return str(folder)


def check_sampled(task, step, images, labels, training):
    """Every sample is one of these images, scaled by the training part's mean and spread by channel and cut into patches."""
    mean = training.mean((0, 2, 3), keepdims=True, dtype=np.float64)
    spread = training.astype(np.float64).std((0, 2, 3), keepdims=True)
    known = patches(torch.from_numpy((images - mean) / spread), task.patch).flatten(1)
    x, y = task.sample(seeded(1), 40 * len(images), step)
    assert x.dtype == torch.float32
    assert x.shape == (40 * len(images), task.tokens, task.in_dim)
    far, which = torch.cdist(x.flatten(1).double(), known).min(1)
    assert far.max() < 1e-4
    assert set(which.tolist()) == set(range(len(images))), "every image is drawn"
    same(y, torch.from_numpy(labels.astype(np.int64))[which])


@pytest.mark.parametrize("gz", [False, True])
def test_files_of_mnist_are_read_exactly(tmp_path, gz):
    arrays = digits()
    task = Images(3, mnist(tmp_path / "m", arrays, gz))
    assert (task.tokens, task.in_dim, task.classes, task.answer_dim, task.vocab) == (4, 9, 3, 3, 0)
    data = images_module._load(task.source)
    for found, expected in zip((data.images, data.labels, data.held_images, data.held_labels), arrays, strict=True):
        assert np.array_equal(found.numpy().squeeze(), expected)
    check_sampled(task, 0, arrays[0][:, None], arrays[1], arrays[0][:, None])
    check_sampled(task, None, arrays[2][:, None], arrays[3], arrays[0][:, None])
    assert Images(2, task.source).tokens == 9
    assert Images(6, task.source).tokens == 1


def test_plain_and_gzipped_files_may_stand_side_by_side(tmp_path):
    arrays = digits()
    mnist(tmp_path / "a", arrays)
    mnist(tmp_path / "a", [*arrays[:2], *arrays[2:]], gz=True)
    (tmp_path / "a" / NAMES[0]).unlink()
    (tmp_path / "a" / f"{NAMES[3]}.gz").unlink()
    assert Images(3, str(tmp_path / "a")).digest == Images(3, mnist(tmp_path / "b", arrays)).digest


def test_images_are_scaled_by_the_whole_training_part(tmp_path):
    """Also where images are sorted by class, and there are more than thousands of them."""
    arrays = digits(size=2, train=6007, held=3, classes=2)
    arrays[0][:5003] //= 8
    task = Images(1, mnist(tmp_path / "m", arrays))
    check_scale = images_module._part(task.source, False, torch.device("cpu"))
    close(check_scale[2].flatten().double(), torch.tensor([arrays[0].mean(dtype=np.float64)]).float().double())
    close(check_scale[3].flatten().double(), torch.tensor([1 / arrays[0].astype(np.float64).std()]).float().double())


def test_images_of_one_grey_are_no_numbers_beyond_reach(tmp_path):
    arrays = digits()
    arrays[0][:], arrays[2][:] = 77, 77
    x, _ = Images(3, mnist(tmp_path / "m", arrays)).sample(seeded(0), 5)
    same(x, torch.zeros(5, 4, 9))


def test_images_that_changed_are_refused(tmp_path):
    """Training or held-out, pixels or labels."""
    arrays = digits()
    source = mnist(tmp_path / "m", arrays)
    task = Images(3, source)
    forget()
    assert task_of("images", dataclasses.asdict(task)) == task
    for i in range(4):
        changed = [a.copy() for a in arrays]
        changed[i].flat[-1] = (changed[i].flat[-1] + 1) % 3
        mnist(tmp_path / "m", changed)
        forget()
        message = refused(task_of, "images", dataclasses.asdict(task))
        assert re.fullmatch(rf"{source} are not what they were: digest \w{{12}}, expected {task.digest}", message)
    assert refused(Images, digest="0" * 12).startswith("the drawn images are not what they were: digest ")


class Python2Pickler(pickle._Pickler):
    """CIFAR-10's batches were written by Python 2: protocol 2, byte strings as strings, numpy's old module."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_bytes(self, obj):
        self.write(b"T" + struct.pack("<i", len(obj)) + obj)
        self.memoize(obj)

    dispatch[bytes] = save_bytes


def pickled(batch, protocol):
    if protocol != "python 2":
        return pickle.dumps(batch, protocol)
    out = io.BytesIO()
    Python2Pickler(out, 2).dump(batch)
    return out.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def cifar_arrays(seed=0):
    rng = np.random.default_rng(seed)
    counts = (2, 3, 1, 2, 4, 5)
    labels = [np.arange(10)[:2], *(rng.integers(0, 10, n) for n in counts[1:4]), np.array([9, 1, 5, 7]), rng.integers(0, 10, 5)]
    return [(rng.integers(0, 256, (n, 3072), dtype=np.uint8), y) for n, y in zip(counts, labels, strict=True)]


def cifar_batch(data, labels):
    return {
        b"batch_label": b"testing batch 1 of 1",
        b"labels": [int(n) for n in labels],
        b"data": data,
        b"filenames": [b"a.png"] * len(data),
    }


def cifar(folder, protocol="python 2", **changes):
    """Batches of a few images; a change is the bytes of a file, or None for none."""
    folder.mkdir(parents=True)
    for name, (data, labels) in zip(BATCHES, cifar_arrays(), strict=True):
        if protocol == "bin":
            path, content = folder / f"{name}.bin", np.concatenate((labels[:, None].astype(np.uint8), data), 1).tobytes()
        else:
            path, content = folder / name, pickled(cifar_batch(data, labels), protocol)
        content = changes.get(name, content)
        if content is not None:
            path.write_bytes(content)
    return str(folder)


@pytest.mark.parametrize("protocol", ["python 2", 3, 4, "bin"])
def test_batches_of_cifar_are_read_exactly(tmp_path, protocol):
    task = Images(16, cifar(tmp_path / "c", protocol))
    assert (task.tokens, task.in_dim, task.classes) == (4, 16 * 16 * 3, 10)
    data, arrays = images_module._load(task.source), cifar_arrays()
    planes = [np.stack([row.reshape(3, 32, 32) for row in x]) for x, _ in arrays]  # red, green, blue, each from the top left
    train, labels = np.concatenate(planes[:5]), np.concatenate([y for _, y in arrays[:5]])
    assert np.array_equal(data.images.numpy(), train)
    assert np.array_equal(data.labels.numpy(), labels)
    assert np.array_equal(data.held_images.numpy(), planes[5])
    assert np.array_equal(data.held_labels.numpy(), arrays[5][1])
    check_sampled(task, 0, train, labels, train)
    check_sampled(task, None, planes[5], arrays[5][1], train)


def test_gzipped_batches_of_cifar_are_read_too(tmp_path):
    for protocol, suffix in (("bin", ".bin"), ("python 2", "")):
        plain, folder = cifar(tmp_path / f"plain {protocol}", protocol), tmp_path / f"gz {protocol}"
        cifar(folder, protocol)
        for name in BATCHES:
            path = folder / (name + suffix)
            (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
        assert Images(16, str(folder)).digest == Images(16, plain).digest


class Runs:
    """A pickle that calls something when it is read."""

    def __init__(self, function, *given):
        self.function, self.given = function, given

    def __reduce__(self):
        return self.function, self.given


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("place", ["alone", "data", "labels", "another key"])
def test_a_pickle_that_runs_code_is_refused_before_it_runs(tmp_path, protocol, place):
    mark = tmp_path / "it ran"
    for evil in (
        Runs(os.system, f"touch '{mark}'"),
        Runs(eval, f"open({str(mark)!r}, 'w')"),
        Runs(open, str(mark), "w"),
        Runs(np.save, str(mark), 1),
        Runs(np.zeros(3).tofile, str(mark)),
    ):
        batch = cifar_batch(*cifar_arrays()[0])
        key = {"data": b"data", "labels": b"labels", "another key": b"more"}.get(place)
        content = pickle.dumps(batch | {key: evil} if key else evil, protocol)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        message = refused(Images, 16, cifar(folder, 4, data_batch_1=content))
        assert message == f"{folder / 'data_batch_1'} is not one of CIFAR-10's batches (UnpicklingError)"
        assert not mark.exists()
        assert not list(tmp_path.glob("it ran*"))


def test_a_damaged_pickle_is_refused_or_another_one(tmp_path):
    """400 times a few bytes of it changed or cut off, seed 0: whatever that makes pickle do, it is one line."""
    rng, good, folder = random.Random(0), pickled(cifar_batch(*cifar_arrays()[0]), "python 2"), tmp_path / "c"
    folder.mkdir()
    head = good.index(b"T" + struct.pack("<i", 2 * 3072))  # pixels may be anything
    refusals = 0
    for _ in range(400):
        damaged = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(good) - 6144)
            damaged[at if at < head else at + 6144] = rng.randrange(256)
        (folder / "a").write_bytes(damaged[: rng.randrange(len(damaged))] if rng.random() < 0.2 else damaged)
        try:
            images_module._cifar_batch(folder, "a")
        except UsageError as e:
            refusals += 1
            assert str(e).startswith(f"{folder / 'a'} ")  # noqa: PT017
            assert "\n" not in str(e)  # noqa: PT017
    assert refusals > 200


def edited(change):
    """MNIST's files with one of the four arrays, or files, changed."""
    return lambda folder: mnist(folder, change(digits()))


def without(name):
    def make(folder):
        mnist(folder, digits())
        (folder / name).unlink()

    return make


def cut_gzip(folder):
    mnist(folder, digits(), gz=True)
    path = folder / f"{NAMES[0]}.gz"
    path.write_bytes(path.read_bytes()[:-20])


def scrambled_gzip(folder):
    mnist(folder, digits(), gz=True)
    path = folder / f"{NAMES[0]}.gz"
    data = bytearray(path.read_bytes())
    data[10:14] = b"\xff\xff\xff\xff"  # the kind of block
    path.write_bytes(data)


def no_gzip(folder):
    mnist(folder, digits(), gz=True)
    (folder / f"{NAMES[1]}.gz").write_bytes(idx(digits()[1]))


def several(**changes):
    """The first, second, third or fourth file of MNIST replaced."""
    places = ("images", "labels", "held_images", "held_labels")
    return edited(lambda arrays: [changes.get(place, array) for place, array in zip(places, arrays, strict=True)])


def batch_of(**changes):
    """One of CIFAR-10's batches with something else in it."""
    batch = {k.decode(): v for k, v in cifar_batch(*cifar_arrays()[0]).items()} | changes
    return pickle.dumps({k.encode(): v for k, v in batch.items() if v is not None}, 4)


PIXELS, LABELS = cifar_arrays()[0]
NOT_IDX = "{}/train-images-idx3-ubyte is not a file of bytes with 3 axes in MNIST's format"
NO_BATCH = "{}/data_batch_1 is not one of CIFAR-10's batches "
NO_ROWS = "{}/data_batch_1 should hold rows of 3,072 bytes and whole numbers as labels, got "
BAD_SOURCES = {
    "no folder": (lambda folder: None, "there is no folder of images at {}; give one with MNIST's or CIFAR-10's files or train and test"),
    "a file": (lambda folder: folder.write_bytes(b"x"), "there is no folder of images at {}; "),
    "an empty folder": (lambda folder: folder.mkdir(), "{} holds neither MNIST's files (train-images-idx3-ubyte), nor CIFAR-10's "),
    **{f"without {name}": (without(name), f"{{}} lacks {name}") for name in NAMES[1:]},
    "without the first": (without(NAMES[0]), "{} holds neither MNIST's files"),
    "truncated": (several(images=idx(digits()[0])[:-1]), "{}/train-images-idx3-ubyte should hold 396 bytes for 11 x 6 x 6, got 395"),
    "too long": (several(held_labels=idx(digits()[3]) + b"!"), "{}/t10k-labels-idx1-ubyte should hold 7 bytes for 7, got 8"),
    "cut in its head": (several(images=idx(digits()[0])[:9]), NOT_IDX),
    "empty file": (several(images=b""), NOT_IDX),
    "wrong magic": (several(images=b"\0\0\x09" + idx(digits()[0])[3:]), NOT_IDX),
    "another format": (several(images=b"PK\3\4" + bytes(200)), NOT_IDX),
    "labels as images": (several(images=digits()[1]), NOT_IDX),
    "no axes": (several(images=b"\0\0\x08\0\x07"), NOT_IDX),
    "images as labels": (several(labels=digits()[0]), "{}/train-labels-idx1-ubyte is not a file of bytes with 1 axes in MNIST's format"),
    "gzip cut off": (cut_gzip, "{}/train-images-idx3-ubyte.gz is cut off or not gzip"),
    "gzip scrambled": (scrambled_gzip, "{}/train-images-idx3-ubyte.gz is cut off or not gzip"),
    "not gzip": (no_gzip, "{}/train-labels-idx1-ubyte.gz is cut off or not gzip"),
    "fewer labels": (several(labels=digits()[1][:-1]), "{} holds 11 training images and 10 labels"),
    "more labels": (several(held_labels=np.zeros(9)), "{} holds 7 held-out images and 9 labels"),
    "no images": (several(images=digits()[0][:0], labels=digits()[1][:0]), "{} holds no training images"),
    "none held out": (several(held_images=digits()[2][:0], held_labels=digits()[3][:0]), "{} holds no held-out images"),
    "images of no size": (several(images=digits()[0][:, :0, :0]), "{} holds no training images"),
    "not square": (several(images=digits()[0][:, :, :4], held_images=digits()[2][:, :, :4]), "images must be square, got 4 x 6 in {}"),
    "two sizes": (
        several(held_images=digits()[2][:, :4, :4]), "training and held-out images differ in size: 6 x 6 x 1 and 4 x 4 x 1 in {}"
    ),
    "a class more": (several(held_labels=np.full(7, 3)), "held-out labels must be among the training part's, 0 to 2, got 3 in {}"),
    "one class": (several(labels=np.zeros(11), held_labels=np.zeros(7)), "images must be of at least two classes, got one in {}"),
    "a batch too few": (lambda folder: cifar(folder, 4, data_batch_3=None), "{} lacks data_batch_3"),
    "no test batch": (lambda folder: cifar(folder, "bin", test_batch=None), "{} lacks test_batch"),
    "half a record": (
        lambda folder: cifar(folder, "bin", data_batch_2=bytes(3 * 3073 - 1)),
        "{}/data_batch_2.bin should hold whole records of 3,073 bytes, got 9,218 bytes",
    ),
    "no record": (
        lambda folder: cifar(folder, "bin", data_batch_2=b""), "{}/data_batch_2.bin should hold whole records of 3,073 bytes, got 0 bytes"
    ),
    "records of CIFAR-100": (
        lambda folder: cifar(folder, "bin", data_batch_1=bytes([11]) * 3073),
        "{}/data_batch_1.bin should hold labels from 0 to 9, got 11 to 11",
    ),
    "pickle cut off": (lambda folder: cifar(folder, 4, data_batch_1=batch_of()[:-99]), NO_BATCH),
    "no pickle": (lambda folder: cifar(folder, 4, data_batch_1=b"<html>404</html>"), NO_BATCH),
    "empty pickle": (lambda folder: cifar(folder, 4, data_batch_1=b""), NO_BATCH),
    "a list": (lambda folder: cifar(folder, 4, data_batch_1=pickle.dumps([1, 2])), NO_BATCH),
    "without data": (lambda folder: cifar(folder, 4, data_batch_1=batch_of(data=None)), NO_BATCH),
    "without labels": (lambda folder: cifar(folder, 4, data_batch_1=batch_of(labels=None)), NO_BATCH),
    "other rows": (lambda folder: cifar(folder, 4, data_batch_1=batch_of(data=PIXELS[:, :-1])), NO_ROWS),
    "one number": (lambda folder: cifar(folder, 4, data_batch_1=batch_of(data=np.array(7, np.uint8))), NO_ROWS + "uint8 and "),
    "floats": (lambda folder: cifar(folder, 4, data_batch_1=batch_of(data=PIXELS / 255)), NO_ROWS + "float64 and "),
    "large numbers": (lambda folder: cifar(folder, 4, data_batch_1=batch_of(data=PIXELS.astype(np.int64) + 256)), NO_ROWS + "int64 and "),
    "words as labels": (lambda folder: cifar(folder, 4, data_batch_1=batch_of(labels=["cat", "dog"])), NO_ROWS),
    "a label too few": (
        lambda folder: cifar(folder, 4, data_batch_1=batch_of(labels=[1])),
        "{}/data_batch_1 should hold a label for each of its 2 images, got 1",
    ),
    "labels below 0": (
        lambda folder: cifar(folder, 4, data_batch_1=batch_of(labels=[-1, 9])),
        "{}/data_batch_1 should hold labels from 0 to 9, got -1 to 9",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_bad_images_die_with_one_line(tmp_path, name):
    make, message = BAD_SOURCES[name]
    make(tmp_path / "source")
    assert refused(Images, 2, str(tmp_path / "source")).startswith(message.format(tmp_path / "source"))


def test_mistakes_of_images(tmp_path):
    source = mnist(tmp_path / "m", digits())
    assert refused(Images, 4, source) == f"patch must divide the size 6 of {source}, got 4"
    assert refused(Images, 5) == "patch must divide the size 16 of the drawn images, got 5"
    assert refused(Images, 7, source) == f"patch must divide the size 6 of {source}, got 7"
    assert refused(Images, source=5) == "source must be text, got 5"
    assert refused(Images, source=letters(3000)) == f"{letters(3000)} cannot be read: File name too long"


# ---- folders of images


def picture(path, array, **options):
    image = pytest.importorskip("PIL.Image", reason="folders of images are read with pillow, which is not installed")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(array).save(path, **options)


def pictures(folder, size=6, held="test"):
    """Two parts of three classes, four and two images a class; their arrays and labels in order of name."""
    rng, parts = np.random.default_rng(3), {}
    for part, count in (("train", 4), (held, 2)):
        found = []
        for label, name in enumerate(("cat", "dog", "eel")):
            for i in range(count):
                array = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
                picture(folder / part / name / f"{i}.{('png', 'bmp')[i % 2]}", array)
                found.append((array.transpose(2, 0, 1), label))
        parts[part] = np.stack([a for a, _ in found]), np.array([y for _, y in found])
    return parts["train"], parts[held]


@pytest.mark.parametrize("held", ["test", "val"])
def test_folders_of_images_are_read_exactly(tmp_path, held):
    (train, labels), (test, test_labels) = pictures(tmp_path / "f", held=held)
    (tmp_path / "f" / "train" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "f" / "README").write_text("nor this")
    task = Images(3, str(tmp_path / "f"))
    assert (task.tokens, task.in_dim, task.classes) == (4, 27, 3)
    data = images_module._load(task.source)
    assert np.array_equal(data.images.numpy(), train)
    assert np.array_equal(data.labels.numpy(), labels)
    assert np.array_equal(data.held_images.numpy(), test)
    assert np.array_equal(data.held_labels.numpy(), test_labels)
    check_sampled(task, 0, train, labels, train)
    check_sampled(task, None, test, test_labels, train)


def test_grey_images_have_three_equal_channels_and_test_comes_before_val(tmp_path):
    pictures(tmp_path / "f")
    pictures(tmp_path / "f", held="val")
    grey = np.arange(36, dtype=np.uint8).reshape(6, 6)
    picture(tmp_path / "f" / "train" / "cat" / "0.png", grey)
    picture(tmp_path / "f" / "test" / "cat" / "0.png", grey)
    data = images_module._load(str(tmp_path / "f"))
    for images in (data.images, data.held_images):
        assert np.array_equal(images[0].numpy(), np.stack([grey] * 3))


def spoil(what):
    """Folders of images with one fault."""

    def make(folder):
        pictures(folder)
        what(folder)

    return make


def remove(folder):
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def square(size):
    return np.zeros((size, size, 3), np.uint8)


BAD_FOLDERS = {
    "no test": (lambda f: remove(f / "test"), "{0} has a folder train but neither test nor val"),
    "one class": (
        lambda f: [remove(f / part / name) for part in ("train", "test") for name in ("dog", "eel")],
        "{0}/train must hold a folder a class, at least two, got 1",
    ),
    "a class of test alone": (
        lambda f: picture(f / "test" / "fox" / "0.png", square(6)), "{0}/test has the class fox, which {0}/train has not"
    ),
    "a class without images": (
        lambda f: [path.rename(path.with_suffix(".tiff")) for path in (f / "train" / "dog").iterdir()],
        "{0}/train/dog holds no images; their names must end in .png, .jpg, .jpeg, .bmp, .webp",
    ),
    "several sizes": (
        lambda f: picture(f / "train" / "eel" / "1.bmp", np.zeros((5, 7, 3), np.uint8)),
        "images must have one size: {0}/train/cat/0.png is 6 x 6, {0}/train/eel/1.bmp is 7 x 5",
    ),
    "another size in test": (
        lambda f: [picture(p, square(4)) for p in sorted((f / "test").rglob("*.*"))],
        "training and held-out images differ in size: 6 x 6 x 3 and 4 x 4 x 3 in {0}",
    ),
    "not square": (
        lambda f: [picture(p, np.zeros((6, 4, 3), np.uint8)) for p in sorted(f.rglob("*.*"))], "images must be square, got 4 x 6 in {0}"
    ),
    "no image": (
        lambda f: (f / "train" / "dog" / "0.png").write_text("<html>"),
        "{0}/train/dog/0.png is not an image that can be read (UnidentifiedImageError)",
    ),
    "an empty one": (lambda f: (f / "test" / "dog" / "1.bmp").write_bytes(b""), "{0}/test/dog/1.bmp is not an image that can be read "),
    "cut off": (
        lambda f: (f / "train" / "dog" / "0.png").write_bytes((f / "train" / "dog" / "0.png").read_bytes()[:90]),
        "{0}/train/dog/0.png is not an image that can be read (OSError)",
    ),
    "a folder as an image": (lambda f: (f / "train" / "dog" / "9.png").mkdir(), "{0}/train/dog/9.png is not an image that can be read "),
    "nothing in test": (lambda f: [p.unlink() for p in (f / "test").rglob("*.*")], "{0} holds no held-out images"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_bad_folders_of_images_die_with_one_line(tmp_path, name):
    what, message = BAD_FOLDERS[name]
    spoil(what)(tmp_path / "source")
    assert refused(Images, 3, str(tmp_path / "source")).startswith(message.format(tmp_path / "source"))


def test_damaged_images_are_one_line_whatever_pillow_raises(tmp_path):
    """300 times a few bytes changed or cut off, seed 0; among them a size of billions of pixels."""
    rng, good = random.Random(0), {}
    for kind in ("png", "bmp", "jpg"):
        picture(tmp_path / f"good.{kind}", np.random.default_rng(0).integers(0, 256, (6, 6, 3), dtype=np.uint8))
        good[kind] = (tmp_path / f"good.{kind}").read_bytes()
    bomb = bytearray(good["bmp"])
    bomb[18:26] = struct.pack("<ii", 60_000, 60_000)
    cases = [("bmp", bytes(bomb))]
    for _ in range(300):
        kind = rng.choice(list(good))
        damaged = bytearray(good[kind])
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        cases.append((kind, bytes(damaged[: rng.randrange(len(damaged))] if rng.random() < 0.3 else damaged)))
    seen = collections.Counter()
    for kind, content in cases:
        path = tmp_path / kind / "a" / f"x.{kind}"
        written(path, content)
        try:
            images_module._class_images(tmp_path / kind, ["a"])
        except UsageError as e:
            found = re.fullmatch(rf"{path} is not an image that can be read \((\w+)\)", str(e))
            assert found, e  # noqa: PT017
            seen[found[1]] += 1
    assert seen["DecompressionBombError"] >= 1
    assert sum(seen.values()) > 150


def test_without_pillow_folders_are_refused_with_the_remedy(tmp_path, monkeypatch):
    for part, name in itertools.product(("train", "test"), ("cat", "dog")):
        written(tmp_path / "f" / part / name / "0.png", b"")
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert refused(Images, 3, str(tmp_path / "f")) == "folders of images need pillow: pip install pillow"


# ---- drawn images


def test_the_drawn_images_are_always_the_same():
    """A literal: the ids of runs hold it. Both parts have every class, and patterns differ from noise."""
    task = Images()
    assert task.digest == "f7f1a67dec59"
    data = images_module._load("")
    assert (data.images.shape, data.held_images.shape) == ((20_000, 1, 16, 16), (4000, 1, 16, 16))
    for labels in (data.labels, data.held_labels):
        counts = torch.bincount(labels, minlength=10)
        spread = math.sqrt(len(labels) * 0.09)
        assert (counts - len(labels) / 10).abs().max() < STANDARD_ERRORS * spread
    held = {row.tobytes() for row in data.held_images.numpy()}
    assert not held & {row.tobytes() for row in data.images.numpy()}, "no image is in both parts"
    brightness = data.images.double().mean((1, 2, 3))
    assert len({round(brightness[data.labels == c].mean().item()) for c in range(10)}) > 3, "patterns differ"


# ---- runs


def shape_for(task, heads=2, dim=16, **changes):
    """A small model that takes the task: tokens or patches in, classes out."""
    ends = {"vocab_size": task.vocab} if task.vocab else {"input_dim": task.in_dim, "output_dim": task.answer_dim}
    sizes = {"dim": dim, "depth": 1, "num_heads": heads, "head_dim": 16 // heads, "ffn_dim": 32, "norm": "layer"}
    placed = {"positions": "additive", "num_positions": task.tokens, "causal": task.causal}
    return Shape(**sizes | placed | ends | changes)


def together(runs, **options):
    return train(runs, device="cpu", advance=lambda n: None, **options)


def bits(row):
    return json.dumps({k: v for k, v in row.items() if k not in MEASURED}, allow_nan=False)


TINY = {
    "recall": (Recall(2, 4, 4), {}),
    "text": (Text(16), {}),
    "images": (Images(4), {}),
    "listops": (ListOps(length=24, depth=2, examples=500), {"output_dim": 10}),
}


def tiny(name, heads=2, seed=0, **recipe):
    task, changes = TINY[name]
    settings = {"steps": 100, "epoch": 20, "batch": 16, "held_out": 256, "evals": 1, "lr": 0.01, "init": "normal"} | recipe
    return Run(shape_for(task, heads, **changes), task, Recipe(**settings), seed)


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_learns_something_of_the_task(name, tmp_path):
    """Better than equal odds on held-out data; the accuracy and the error of its row are those of the kept weights."""
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
        x, target = run.task.sample(seeded(derive(HELD_OUT_SEED, "held out", batch)), HELD_OUT_BATCH)
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
    runs += [tiny(name, 2, 5, steps=20, epoch=10, lr=0.03), tiny(name, 2, 0, steps=20, epoch=10, protocol="replay")]
    assert len({stack_key(run) for run in runs}) == 1
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
    runs = [Run(shape_for(task, heads, dim=12, **changes), task, recipe, heads) for heads in (1, 2, 4)]
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
    (Recall(2, 4, 4), {"vocab_size": 0}, "this task's inputs are tokens, so a vocab_size of at least 8, got vocab_size 0"),
    (Recall(2, 4, 4), {"vocab_size": 7}, "this task's inputs are tokens, so a vocab_size of at least 8, got vocab_size 7"),
    (Recall(2, 4, 4), {"vocab_size": 0, "input_dim": 16}, "this task's inputs are tokens, so a vocab_size of at least 8, got vocab_size 0"),
    (Recall(2, 4, 4), {"output_dim": 8}, "output_dim must be the width of the task's answers, 4, got 8"),
    (Recall(2, 4, 4), {"num_positions": 5}, "num_positions must be at least the task's 6 tokens, got 5"),
    (Text(16), {"vocab_size": 27}, "this task's inputs are tokens, so a vocab_size of at least 28, got vocab_size 27"),
    (Text(16), {"output_dim": 27}, "output_dim must be the width of the task's answers, 28, got 27"),
    (Text(16), {"causal": False}, "a shape for this task must be causal, because later tokens hold the answers; got causal False"),
    (ListOps(), {"vocab_size": 15}, "this task's inputs are tokens, so a vocab_size of at least 16, got vocab_size 15"),
    (ListOps(), {"output_dim": 11}, "output_dim must be the width of the task's answers, 10, got 11"),
    (Images(4), {"vocab_size": 16, "input_dim": 0}, VECTORS + "16"),
    (Images(4), {"input_dim": 15}, "a shape's input_dim must be its task's dim, got input_dim 15, task dim 16"),
    (Images(2), {"input_dim": 0}, "a shape's dim must be its task's dim, got dim 16, task dim 4"),
    (Images(4), {"output_dim": 9}, "output_dim must be the width of the task's answers, 10, got 9"),
    (Images(4), {"dim": 8, "output_dim": 0}, "outputs must be at least as wide as the task's answers, 10, got 8"),
    (Farthest(16, 5), {"input_dim": 0, "output_dim": 0, "vocab_size": 9}, VECTORS + "9"),
    (Regression(16, 5), {"input_dim": 0, "vocab_size": 9}, VECTORS + "9"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "changes", "message"), REFUSED, ids=[f"{type(t).__name__} {c}" for t, c, _ in REFUSED])
def test_a_shape_that_does_not_fit_the_task_is_refused(task, changes, message):
    shape, recipe = shape_for(task), Recipe(steps=100)
    Run(shape, task, recipe)
    assert refused(Run, shape.replace(**changes), task, recipe) == message


def test_a_wider_vocabulary_or_a_vector_as_wide_as_the_model_fits():
    Run(shape_for(Recall(2, 4, 4), vocab_size=50), Recall(2, 4, 4), Recipe(steps=100))
    run = Run(shape_for(Images(4), input_dim=0, output_dim=0), Images(4), Recipe(steps=2, epoch=2, batch=16, held_out=16, evals=1))
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
    """The same path with another text is another run, so no row of the one is taken for the other's."""
    ids = []
    for seed in (0, 1):
        task = Text(7, written(tmp_path / "a.txt", letters(500, seed)))
        ids.append(Run(shape_for(task, vocab_size=26), task, Recipe(steps=100)).id)
        forget()
    assert ids[0] != ids[1]


# ---- kernels that know one loss


def test_the_fused_step_takes_no_task_but_squared_errors(monkeypatch):
    """Of a shape that it takes, only the task decides; the blocks alone leave the loss to the task."""
    monkeypatch.setattr(stack, "has_triton", lambda: True)
    shape, gpu = paper_shape(16, 1, 16, 1, ffn_dim=64), torch.device("cuda")
    recipe = Recipe(steps=100, batch=256, precision="fp16")
    assert fused.refusal(shape, 16, 256, "fp16") == ""
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


BLOCKS = {"qkv_bias": True, "out_bias": True, "ffn_bias": True, "activation": "gelu", "norm_at": "pre"}


@pytest.mark.parametrize("output_dim", [0, 28])
def test_text_trains_on_the_blocks_as_on_the_modules(output_dim, monkeypatch):
    """Pre-norm blocks as kernels, without a GPU in Triton's interpreter; the table, which is used at both ends, and the loss
    around them are the modules' own."""
    pytest.importorskip("triton", reason="the kernels are written in triton")
    from gpu import DEVICE

    from headwise import trunk

    task, forward, used, rows = Text(32), trunk.Trunk.forward, [], []
    recipe = Recipe(steps=2, epoch=1, batch=2, held_out=2, evals=1, lr=0.03, schedule="constant", init="normal")
    run = Run(shape_for(task, 2, **BLOCKS, output_dim=output_dim), task, recipe, 3)
    assert trunk.refusal(run.shape, 32, 2, "fp32") == ""
    for blocks in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(stack, "HELD_OUT_BATCH", 2)
            patch.setattr(stack, "trunk_refusal", lambda run, device, blocks=blocks: "" if blocks else "not now")
            patch.setattr(trunk.Trunk, "forward", lambda *given: used.append(1) or forward(*given))
            rows += train([run], device=DEVICE.type, advance=lambda n: None)
        assert bool(used) == blocks
    plain, ours = rows
    assert ours["curve"] == pytest.approx(plain["curve"], rel=1e-5)
    assert ours["held_out"] == pytest.approx(plain["held_out"], rel=1e-5)
    assert ours["held_out_accuracy"] == pytest.approx(plain["held_out_accuracy"], abs=0.02)
    assert abs(plain["held_out"] - plain["curve"][0]) > 0.05, "it learns too little to be compared"
