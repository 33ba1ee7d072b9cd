"""`ListOps`: expressions against an independent evaluator, and none held out is trained on."""

import collections
import hashlib
import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data import refused
from support.tolerance import STANDARD_ERRORS, examples, same, seeded

from headwise.tasks import ListOps
from headwise.tasks import listops as listops_module
from headwise.tasks.listops import BLANK, CLOSE, OPERATIONS, evaluate, expression

pytestmark = pytest.mark.usefixtures("no_network")


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
def test_expression_that_cannot_fit_is_left_unfinished(most, seed):
    """What fits is whole; what is given up is too long, so that nothing else is ever refused."""
    found = expression(random.Random(seed), 4, 5, 0.5, most)
    if len(found) <= most:
        assert depth_of(tree_of(found)) <= 4
    assert len(found) <= most + 2 + 4, "it keeps growing"
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


def test_held_out_expressions_are_never_trained_on():
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
