"""`Lookup`: every key once, what is asked and evaluated, and that two numbers per key suffice."""

import math

import pytest
import torch
from support.tolerance import STANDARD_ERRORS, close, same, seeded

from headwise.errors import UsageError
from headwise.tasks import Lookup

LOOKUPS = [Lookup(5, 3), Lookup(7, 2, queries=3), Lookup(2, 11, queries=1)]


@pytest.mark.parametrize("task", LOOKUPS, ids=str)
def test_queries_ask_for_the_value_in_the_pair_of_their_key(task):
    ids, answers = task.sample(seeded(3), 101)
    assert ids.shape == (101, task.tokens) == (101, task.keys + task.asked)
    assert answers.shape == (101, task.asked)
    for row, answer in zip(ids.tolist(), answers.tolist(), strict=True):
        pairs, queries = row[: task.keys], row[task.keys :]
        table = {pair // task.values: pair % task.values for pair in pairs}
        assert sorted(table) == list(range(task.keys)), "every key stands there once"
        keys = [query - task.keys * task.values for query in queries]
        assert len(set(keys)) == task.asked, "no key is asked for twice"
        assert answer == [table[key] for key in keys]


def test_lookup_draws_every_order_value_and_query():
    task, n = Lookup(3, 5, queries=2), 6000
    ids, answers = task.sample(seeded(5), n)
    for counts, size in (
        (torch.bincount(ids[:, 0] // 5, minlength=3), 3),
        (torch.bincount(ids[:, 2] % 5, minlength=5), 5),
        (torch.bincount(ids[:, 3] - 15, minlength=3), 3),
        (torch.bincount(answers[:, 1], minlength=5), 5),
        (torch.bincount((ids[:, :3] // 5 == ids[:, 4:5] - 15).int().argmax(1), minlength=3), 3),
    ):
        spread = math.sqrt(n * (1 / size) * (1 - 1 / size))
        assert (counts - n / size).abs().max() < STANDARD_ERRORS * spread, counts.tolist()


@pytest.mark.parametrize("task", LOOKUPS, ids=str)
def test_lookup_evaluates_the_queries_alone(task):
    _, answers = task.sample(seeded(4), 13)
    outputs = torch.randn(2, 13, task.tokens, task.vocab, generator=seeded(5))
    spoiled = outputs.clone()
    spoiled[..., : task.keys, :] = math.nan
    spoiled[..., task.values :] = math.nan
    same(task.loss(spoiled, answers), task.loss(outputs, answers))
    odds = outputs[..., task.keys :, : task.values].log_softmax(-1)
    wanted = odds.gather(-1, answers.expand(2, *answers.shape).unsqueeze(-1))
    close(task.loss(outputs, answers), -wanted.flatten(1).mean(1))


def test_two_numbers_per_key_select_among_many():
    """Keys on a circle: rank 2 answers without error however many there are, if scores may grow
    with the square of their number. The law of log2 N is no lower bound for learned keys."""
    task = Lookup(keys=509, values=3, queries=17)
    ids, answers = task.sample(seeded(6), 7)
    angles = 2 * math.pi * torch.arange(task.keys, dtype=torch.float64) / task.keys
    circle = torch.stack((angles.cos(), angles.sin()), 1)
    shown, asked = ids[:, : task.keys], ids[:, task.keys :] - task.keys * task.values
    scores = 3.0 * task.keys**2 * circle[asked] @ circle[shown // task.values].mT
    values = torch.nn.functional.one_hot(shown % task.values, task.values).double()
    close(scores.softmax(-1) @ values, torch.nn.functional.one_hot(answers, 3).double())


def test_mistakes_of_lookup():
    with pytest.raises(UsageError) as caught:
        Lookup(keys=3, values=2, queries=4)
    assert str(caught.value) == "queries must be at most as many as keys, got queries 4, keys 3"
