"""Settings given in Python are read by the rules of `--set`, and every mistake is one line."""

import pytest
from support.checked_tasks import Largest

import headwise
from headwise.errors import UsageError
from headwise.experiments import find
from headwise.experiments.leaner_paper.budget_map import PRESETS
from headwise.experiments.settings import settings_of

QUICK = PRESETS["quick"]


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ({"lrs": 0.01}, "lrs=0.01"),
        ({"depths": 1}, "depths=1"),
        ({"ranks": "4,8"}, "ranks=4,8"),
        ({"ranks": [4, 8]}, "ranks=4,8"),
        ({"ranks": range(4, 6)}, "ranks=4,5"),
        ({"steps": 1e2}, "steps=100"),
        ({"steps": "1_400"}, "steps=1_400"),
        ({"lrs": (1,)}, "lrs=1"),
        ({"tasks": "recall"}, "tasks=recall"),
        ({"source": "book.txt", "tasks": ("text",)}, "source=book.txt tasks=text"),
    ],
)
def test_settings_in_python_equal_those_typed(given, typed):
    expected = settings_of(find("map"), "quick", typed.split())
    assert QUICK.changed(**given) == expected
    assert QUICK.changed(**given).plain() == expected.plain()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"steps": 1.5}, "steps must be a whole number, got 1.5"),
        ({"steps": [100]}, r"steps must be a whole number, not a list, got \[100\]"),
        ({"steps": True}, "steps must be a whole number, got True"),
        ({"steps": None}, "steps must be a whole number, got None"),
        ({"lrs": "fast"}, "lrs must be a number, got 'fast'"),
        ({"ranks": (4, "x")}, "ranks must be a whole number, got 'x'"),
        ({"init": 3}, "init must be text, got 3"),
        ({"tasks": Largest}, r"tasks must be a value: pass Largest\(...\), got the class"),
        ({"tasks": "mine.py"}, "a file of your own goes behind the experiment: headwise run map"),
    ],
)
def test_settings_of_a_wrong_type_are_one_line(given, line):
    with pytest.raises(UsageError, match=line):
        QUICK.changed(**given)


def test_classes_in_the_place_of_values_are_refused(tmp_path):
    class Mine(headwise.Model):
        pass

    shape = headwise.Shape(dim=8, depth=1, num_heads=2, input_dim=3, output_dim=3)
    recipe = headwise.Recipe(steps=100)
    options = {"store": tmp_path / "s"}
    with pytest.raises(UsageError, match=r"task must be a value: pass Largest\(...\)"):
        headwise.run("map", task=Largest, **options)
    with pytest.raises(UsageError, match=r"model must be a value: pass Mine\(...\)"):
        headwise.run("map", task=Largest(), model=Mine, **options)
    with pytest.raises(UsageError, match=r"task must be a value"):
        headwise.Run(shape, Largest, recipe)
    with pytest.raises(UsageError, match=r"model must be a value"):
        headwise.Run(shape, Largest(), recipe, model=Mine)
    assert not (tmp_path / "s").exists()


def test_train_of_one_run_and_of_something_else():
    shape = headwise.Shape(dim=8, depth=1, num_heads=2, input_dim=3, output_dim=3)
    run = headwise.Run(shape, Largest(), headwise.Recipe(steps=100))
    with pytest.raises(UsageError, match=r"train\(\[run\]\), got one run"):
        headwise.train(run)
    with pytest.raises(UsageError, match="a list of runs, got 3 in it"):
        headwise.train([run, 3])


def test_recipe_with_an_unknown_field_names_the_nearest():
    with pytest.raises(UsageError, match="unknown field 'learning_rate' of Recipe; choices: "):
        headwise.Recipe(steps=100, learning_rate=0.1)
    with pytest.raises(UsageError, match=r"unknown field 'batches'.* did you mean batch"):
        headwise.Recipe(steps=100, batches=8)


def test_nothing_to_show_names_both_ways_to_ask(tmp_path):
    with pytest.raises(UsageError, match=r"only what is there was asked for \(--no-train, train="):
        headwise.run("map", train=False, store=tmp_path / "s")
