"""`check_meaning`, and rules that newcomers break: refused before anything is trained."""

from dataclasses import dataclass

import pytest
import torch
from support.checked_tasks import Copies, GlobalTorch, Largest, wrong

import headwise
from headwise.errors import UsageError
from headwise.experiments.shapes import shape_for
from headwise.tasks.check import check
from headwise.tasks.check_data import check_meaning
from headwise.tasks.first_check import check_baselines

RECIPE = headwise.Recipe(steps=2, epoch=1, batch=4, held_out=128, evals=1)


@dataclass(frozen=True)
class OneSeed(Largest):
    """It ignores the generator."""

    def sample(self, generator, batch, step=None):
        return super().sample(torch.Generator().manual_seed(0), batch)


@dataclass(frozen=True)
class Unsplit(Largest):
    """301 sequences, none of them kept apart."""

    def sample(self, generator, batch, step=None):
        rows = torch.arange(301.0).view(-1, 1, 1).expand(-1, 5, 3)
        at = torch.randint(len(rows), (batch,), generator=generator)
        return rows[at].clone(), rows[at][:, :1].clone()


@dataclass(frozen=True)
class FewIds(Copies):
    """2^14 sequences of ids, where 7^23 could be."""

    def sample(self, generator, batch, step=None):
        ids = torch.randint(2, (batch, 14), generator=generator)
        ids = torch.cat((ids, ids[:, :9]), 1)
        return ids, ids.flip(1)


@dataclass(frozen=True)
class RareNaN(Largest):
    def sample(self, generator, batch, step=None):
        inputs, targets = super().sample(generator, batch, step)
        return inputs, targets.where(inputs.sum((1, 2), keepdim=True) < 11, torch.nan)


@pytest.mark.parametrize(
    ("task", "line"),
    [
        (GlobalTorch(), "sample uses the global generator of torch"),
        (OneSeed(), "other seeds must give other data"),
        (Unsplit(), r"1,024 of 1,024 held-out sequences occur among 4,096 training ones"),
    ],
)
def test_train_refuses_meaningless_data_with_the_line_of_check(task, line):
    shape = shape_for(task, 8, 1, 2, 4, 8)
    with pytest.raises(UsageError, match=line) as refusal:
        headwise.train([headwise.Run(shape, task, RECIPE)], device="cpu")
    assert str(refusal.value).removeprefix(f"task {type(task).__name__}: ") in wrong(task).values()


def test_check_meaning_gives_the_global_generators_back_and_is_done_once(monkeypatch):
    drawn = []

    @dataclass(frozen=True)
    class Counted(Largest):
        def sample(self, generator, batch, step=None):
            drawn.append(batch)
            return super().sample(generator, batch, step)

    before = torch.get_rng_state()
    check_meaning(Counted())
    assert torch.equal(torch.get_rng_state(), before)
    assert 4096 < sum(drawn) < 8192
    count = len(drawn)
    check_meaning(Counted())
    assert len(drawn) == count


def test_small_space_of_ids_is_named_with_the_way_out():
    line = wrong(FewIds())["held out"]
    assert "there seem to be some 1" in line, line  # 16,384, within what 1,024 draws say
    assert "every eighth by a sum of its ids" in line
    assert "Keep" not in wrong(Unsplit())["held out"], "vectors come from rows, which are split"


def test_rule_that_follows_from_the_generator_is_no_fault_of_its_own():
    found = {finding.rule: finding for finding in check(GlobalTorch(), elsewhere=False)}
    assert found["generator"].level == "wrong"
    assert found["fill"].level == "note"
    assert found["fill"].text.startswith("follows from generator: ")
    assert "fill" not in wrong(Largest())


def test_rare_nan_is_named_where_it_is():
    with pytest.raises(UsageError, match=r"targets must be finite, got nan or inf in \d+ of 4,096"):
        check_baselines(RareNaN())


def test_findings_come_one_by_one():
    seen: list[str] = []
    found = check(Largest(), elsewhere=False, found_one=lambda finding: seen.append(finding.rule))
    assert seen == [finding.rule for finding in found]


def test_sample_without_a_step_says_how_it_is_written():
    @dataclass(frozen=True)
    class NoStep(Largest):
        def sample(self, generator, batch):
            return super().sample(generator, batch)

    assert wrong(NoStep())["sample"].startswith(
        "sample must be written sample(self, generator, batch, step=None), got sample(self, "
        "generator, batch)"
    )


def test_ids_without_vocab_name_vocab():
    @dataclass(frozen=True)
    class Ids(Largest):
        def sample(self, generator, batch, step=None):
            return torch.randint(7, (batch, 5), generator=generator), torch.zeros(batch, 1, 3)

    assert "for token ids write vocab" in wrong(Ids())["sample"]
