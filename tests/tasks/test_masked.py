"""`Masked`: what is masked, what the targets say, and that nothing else is evaluated."""

import math

import pytest
import torch
from support.data import letters, refused, written
from support.tolerance import STANDARD_ERRORS, close, same, seeded

from headwise.tasks import Masked, Sentences, Text
from headwise.tasks.ids import BLANK, BYTE_IDS, MASK, SEPARATOR

pytestmark = pytest.mark.usefixtures("no_network")


def tsv(folder, train, dev, header="sentence\tlabel", dev_name="dev.tsv", end="\n"):
    """A folder with both parts; a part is rows, or bytes as they are."""
    for name, part in (("train.tsv", train), (dev_name, dev)):
        if part is not None:
            lines = (
                [header, *("\t".join(map(str, row)) for row in part)]
                if not isinstance(part, bytes)
                else []
            )
            written(
                folder / name,
                part
                if isinstance(part, bytes)
                else end.join(line for line in lines if line is not None) + end,
            )
    return str(folder)


@pytest.mark.parametrize("level", ["char", "byte"])
@pytest.mark.parametrize("step", [0, None])
@pytest.mark.parametrize("share", [0.15, 0.01, 1])
def test_masked_places_are_of_the_text_and_the_targets_say_what_and_where(
    tmp_path, level, step, share
):
    source = written(tmp_path / "a.txt", letters(3000))
    task, text = Masked(13, source, level, share=share), Text(13, source, level)
    expected = {0.15: 2, 0.01: 1, 1: 13}[share]
    assert task.masks == expected == max(1, round(share * 13))
    assert (task.mask, task.vocab, task.classes) == (
        (MASK, BYTE_IDS, 256) if level == "byte" else (26, 27, 26)
    )
    assert not task.causal
    windows, _ = text.sample(seeded(3), 211, step)
    ids, targets = task.sample(seeded(3), 211, step)
    assert targets.shape == (211, expected, 2)
    for row, window, target in zip(ids.tolist(), windows.tolist(), targets.tolist(), strict=True):
        places = [place for _, place in target]
        assert len(set(places)) == expected, "no place twice"
        assert [i for i, token in enumerate(row) if token == task.mask] == sorted(places)
        assert all(window[place] == answer for answer, place in target)
        assert [token for i, token in enumerate(row) if i not in places] == [
            token for i, token in enumerate(window) if i not in places
        ]


def test_places_are_masked_equally_often():
    n, task = 4001, Masked(13, level="byte")
    counts = (
        torch.bincount(task.sample(seeded(5), n, 0)[1][..., 1].flatten(), minlength=13).double() / n
    )
    share = 2 / 13
    assert (counts - share).abs().max() <= STANDARD_ERRORS * math.sqrt(share * (1 - share) / n), (
        f"n {n}, seed 5"
    )


def test_loss_is_of_masked_places_alone():
    task = Masked(13, level="byte")
    _, targets = task.sample(seeded(1), 5)
    outputs = torch.randn(3, 5, 13, 259, generator=seeded(2), dtype=torch.float64)
    losses, right = torch.zeros(3, dtype=torch.float64), torch.zeros(3)
    for m in range(3):
        for b in range(5):
            for answer, place in targets[b].tolist():
                logits = outputs[m, b, place, :256]
                losses[m] += (logits.exp().sum().log() - logits[answer]) / 10
                right[m] += (logits.argmax() == answer) / 10
    close(task.loss(outputs, targets), losses)
    close(task.measures(outputs, targets)["accuracy"], right)
    other = outputs.clone()
    for b in range(5):
        unjudged = [i for i in range(13) if i not in targets[b, :, 1].tolist()]
        other[:, b, unjudged] = 1e9
    same(task.loss(other, targets), task.loss(outputs, targets))
    each = torch.stack([targets, targets.flip(0), targets])
    close(task.loss(outputs, each)[1], task.loss(outputs[1], targets.flip(0)))
    huge = torch.zeros(5, 13, 256)
    for b in range(5):
        for answer, place in targets[b].tolist():
            huge[b, place, answer] = 1e4
    assert task.measures(huge, targets)["accuracy"] == 1.0
    assert task.loss(huge, targets) == 0.0


def test_mistakes_of_masked_text(tmp_path):
    for bad in (0, -0.1, 1.5, "x", True, None, math.nan):
        assert (
            refused(Masked, 13, share=bad)
            == f"share must be a number above 0 and at most 1, got {bad!r}"
        )
    gone = tmp_path / "gone.txt"
    assert refused(Masked, 13, str(gone)).startswith(f"there is no text at {gone}; ")
    assert refused(Masked, 13, level="word") == "unknown level 'word'; choices: byte, char"
    assert Masked(13).digest == Text(13).digest
    assert set(Masked(13).baselines()) == {"zero", "single"}
    assert Masked(13).baselines()["single"] == Text(13).baselines()["single"]


def test_tasks_over_bytes_have_the_same_ids():
    assert Masked(16, level="byte").vocab == Sentences(16).vocab == BYTE_IDS == 259
    assert len({BLANK, MASK, SEPARATOR} | set(range(256))) == BYTE_IDS
