"""Held-out sums against a loop by hand in float64, and their ratios."""

import itertools
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.data import refused
from support.lm_runs import SHAPE, make_run
from support.tokenizer import trained_tokenizer

from headwise.lm import corpus as lm_corpus
from headwise.lm import evaluate
from headwise.lm.corpus import load
from headwise.lm.evaluate import GROUP, Evaluator, ratio
from headwise.lm.launch import World
from headwise.lm.text_files import find_text, find_tokenizer
from headwise.lm.trainer import Trainer
from headwise.model.transformer import Decoder

CPU = torch.device("cpu")


def test_halves_of_the_held_out_part_are_apart_and_all_of_it(book: str) -> None:
    """Rates are chosen on the first half, shapes are compared on the second."""
    found = load(find_text(book), None)
    for length, limit in ((11, 10**6), (11, 7), (13, 3)):
        halves = [
            set(lm_corpus.held_out_starts(found, length, limit, part).tolist())
            for part in ("validation", "test")
        ]
        assert max(halves[0]) + length <= min(halves[1])
        if limit == 10**6:
            whole = set(lm_corpus.held_out_starts(found, length, limit).tolist())
            assert halves[0] | halves[1] == whole
        else:
            assert [len(half) for half in halves] == [limit, limit]
    assert "must hold two windows" in refused(
        lm_corpus.held_out_starts, found, len(found.ids) - found.cut - 1, 1, "test"
    )


@pytest.mark.parametrize("coded", [False, True])
def test_held_out_by_hand(
    book: str, coded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every held-out id on its own, in float64; ends of documents do not count."""
    monkeypatch.setattr(lm_corpus, "RARE", 500)
    monkeypatch.setattr(evaluate, "TOKENS_AT_ONCE", 3 * GROUP * 11)
    path = trained_tokenizer(tmp_path / "tokenizer.json", 300) if coded else ""
    run = make_run(book, shape=SHAPE.replace(vocab_size=307), tokenizer=path)
    corpus = load(find_text(book), find_tokenizer(path)[0])
    training = Trainer(run, corpus, CPU)
    held_out = Evaluator(run, corpus, training.model, CPU, World()).held_out()
    sums = (held_out.nats, held_out.sizes, held_out.ids)
    sums += (held_out.repeats, held_out.right, held_out.repeats_nats)
    model = Decoder(run.shape).double()
    model.load_state_dict(training.model.state_dict())
    nats = size = count = hits = right = hit_nats = 0.0
    seen, most = Counter(itertools.pairwise(corpus.ids[: corpus.cut].tolist())), corpus.cut / 500
    ids, ends = corpus.ids[corpus.cut :].astype(int).tolist(), [0, *corpus.bytes_to.tolist()]
    with torch.no_grad():
        for start in range(0, len(ids) - run.length, run.length):
            window = torch.tensor(ids[start : start + run.length + 1])
            logits, _ = model(window[None, :-1])
            before = set()
            for place, (last, target) in enumerate(itertools.pairwise(window.tolist())):
                cost = -logits[0, place].log_softmax(-1)[target].item()
                if target != corpus.end:
                    nats, count = nats + cost, count + 1
                    if (last, target) in before and seen[last, target] <= most:
                        hits, hit_nats = hits + 1, hit_nats + cost
                        right += logits[0, place].argmax().item() == target
                before.add((last, target))
            size += ends[start + run.length + 1] - ends[start + 1]
    assert [column.sum().item() for column in sums] == pytest.approx(
        [nats, size, count, hits, right, hit_nats], rel=1e-5
    )
    assert 0 < hits < count
    windows = (len(ids) - 1) // run.length
    groups = len(held_out.nats)
    assert groups == -(-windows // GROUP)
    assert windows * run.length - count == 1, "no document ends in the held-out part"
    assert (size == count) is not coded
    assert coded or groups % 2 == 1
    columns = held_out.columns()
    mean, error = columns["bits_per_byte"], columns["bits_per_byte_se"]
    assert mean == held_out.bits_per_byte == pytest.approx(nats / size / math.log(2), rel=1e-5)
    assert columns["repeats"] == pytest.approx(right / hits)
    assert columns["repeats_share"] == pytest.approx(hits / count)
    assert columns["repeats_nats"] == pytest.approx(hit_nats / hits, rel=1e-5)
    each = held_out.nats / held_out.sizes / math.log(2)
    assert error == pytest.approx(each.std().item() / math.sqrt(len(each)), rel=0.3)


def test_ratio_and_its_error() -> None:
    over, under = torch.tensor([2.0, 3.0, 7.0]), torch.tensor([1.0, 2.0, 3.0])
    mean, error = ratio(over, under)
    assert mean == 2
    assert error == pytest.approx(math.sqrt((0 + 1 + 1) * 3 / 2) / 6)
    assert ratio(over[:1], under[:1]) == (2, None)


def test_bits_per_byte_of_equal_odds(book: str) -> None:
    """A model whose table is 0 says nothing: log2 of the number of ids per byte."""
    run = make_run(book)
    corpus = load(find_text(book), None)
    training = Trainer(run, corpus, CPU)
    with torch.no_grad():
        training.named["embedding"].zero_()
    held_out = Evaluator(run, corpus, training.model, CPU, World()).held_out()
    assert held_out.bits_per_byte == pytest.approx(math.log2(263), rel=1e-6)
