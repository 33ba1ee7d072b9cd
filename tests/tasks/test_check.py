"""`tasks.check`: built-in tasks pass; notes, other processes, checks before training."""

import dataclasses
import random
from dataclasses import dataclass

import pytest
import torch
from support.checked_tasks import Copies, Doubles, GlobalTorch, Largest, OneLoss, wrong
from support.tasks import EXAMPLES
from torch import Tensor

from headwise.errors import UsageError
from headwise.tasks import TASKS, task_of
from headwise.tasks.check import check
from headwise.tasks.check_data import fingerprint, fingerprints_elsewhere
from headwise.tasks.first_check import check_first_sample
from headwise.tasks.task import Classified


def test_tasks_without_a_fault_pass():
    assert wrong(Largest()) == wrong(Copies()) == {}
    assert [finding.level for finding in check(Largest())] == ["ok"] * 16


@pytest.mark.parametrize("name", sorted(TASKS))
def test_built_in_tasks_pass(name):
    found = check(EXAMPLES[name].long, elsewhere=False)
    assert [finding for finding in found if finding.level != "ok"] == []


# ---- notes: what is wrong, and the line that says so


@dataclass(frozen=True)
class Addition(Classified):
    """49 sequences in all, of which none can be new."""

    tokens: int = 2
    vocab = 7
    classes = 7

    def sample(self, generator, batch, step=None):
        ids = torch.randint(7, (batch, 2), generator=generator, device=generator.device)
        return ids, ids.sum(-1) % 7


def test_small_space_is_a_note_and_no_fault():
    notes = {f.rule: f.text for f in check(Addition(), elsewhere=False) if f.level != "ok"}
    assert notes == {
        "held out": "1,024 of 1,024 held-out sequences occur among 4,096 training ones: there are "
        "at most 49. Keep some for step None to see what is learned rather than remembered"
    }


class Wide(Largest):
    answer_dim = 7

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[..., -1:, :3] - targets).square().sum(-1).flatten(-2).mean(-1)


def test_answer_that_is_not_evaluated_is_a_note():
    notes = {f.rule: f.text for f in check(Wide(), elsewhere=False) if f.level == "note"}
    assert notes == {
        "gradient": "answer_dim is 7, but the loss depends on the first 3 coordinates only"
    }


# ---- other processes


def test_built_in_tasks_are_the_same_in_another_process():
    tasks = [EXAMPLES[name].task for name in sorted(TASKS)]
    assert fingerprints_elsewhere(tasks) == [fingerprint(task) for task in tasks]


HASHES = """
from dataclasses import dataclass
import torch
from headwise import Classified


@dataclass(frozen=True)
class Words(Classified):
    tokens: int = 3
    vocab = 1000
    classes = 1000
    {field}

    def sample(self, generator, batch, step=None):
        ids = torch.randint(9, (batch, 3), generator=generator, device=generator.device)
        return ids + {shift}, ids[:, 0]
"""
DRAWN_FIELD = "import random\n    seed: int = random.SystemRandom().randrange(10**9)"


@pytest.mark.parametrize(
    ("field", "shift", "line"),
    [
        ("", "0", ""),
        ("", "hash('a word') % 900", "hash(), id() or the order of a set may be in it"),
        (DRAWN_FIELD, "0", "seed must be the same in every process, got "),
    ],
)
def test_difference_between_processes_is_reported(tmp_path, field, shift, line):
    from headwise.tasks.own import load_task

    path = tmp_path / "words.py"
    path.write_text(HASHES.format(field=field, shift=shift))
    found = {f.rule: f for f in check(load_task(str(path)), str(path))}
    assert found["process"].level == ("wrong" if line else "ok")
    assert line in found["process"].text


# ---- before training


def test_check_first_sample_refuses_the_cheap_faults():
    check_first_sample(Largest())
    with pytest.raises(UsageError, match=r"^task Doubles: inputs must be float32, got float64$"):
        check_first_sample(Doubles())
    with pytest.raises(UsageError, match=r"^task OneLoss: loss must give one number per model"):
        check_first_sample(OneLoss())


def test_check_leaves_the_global_generators_alone():
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    check(GlobalTorch(), elsewhere=False)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_examples_are_of_every_task():
    assert set(EXAMPLES) == set(TASKS)
    for name, example in EXAMPLES.items():
        assert example.task == task_of(name, dataclasses.asdict(example.task))
