"""`Recall`: every query's answer, what is evaluated, baselines."""

import math
import statistics

import numpy as np
import pytest
import torch
from support.data import refused
from support.tasks import softmax_losses
from support.tolerance import STANDARD_ERRORS, close, same, seeded

from headwise.tasks import Recall

pytestmark = pytest.mark.usefixtures("no_network")


RECALLS = [
    Recall(5, 11, 3),
    Recall(7, 7, 2),
    Recall(1, 1, 2),
    Recall(5, 13, 17, queries=3),
    Recall(3, 5, 4, queries=1),
]


@pytest.mark.parametrize("task", RECALLS, ids=str)
def test_queries_ask_for_the_value_behind_their_key(task):
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
def test_recall_evaluates_the_queries_alone(task):
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
def test_baseline_of_recall_agrees_with_monte_carlo(task):
    """Answer with the values shown, by how often each was; n = 4000, seed 17."""
    n = 4000
    ids, answers = task.sample(seeded(17), n)
    losses = []
    for row, answer in zip(ids.tolist(), answers.tolist(), strict=True):
        values = row[1 : 2 * task.pairs : 2]
        losses.append(sum(-math.log(values.count(a) / task.pairs) for a in answer) / len(answer))
    baselines = task.baselines()
    assert baselines["zero"] == math.log(task.values)
    assert set(baselines) == {"zero", "one of the values shown"}
    spread = statistics.stdev(losses) / math.sqrt(n)
    assert (
        abs(statistics.fmean(losses) - baselines["one of the values shown"])
        <= STANDARD_ERRORS * spread + 1e-12
    )


def test_baseline_of_recall_in_closed_form():
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
