"""The loop from rows to a recommendation: resumed anywhere, kept within its time, and honest."""

import dataclasses
import html
import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.data import refused
from support.planted import SHAPES, Planted

from headwise.choosing.choice import Choice
from headwise.choosing.question import Question, standing
from headwise.choosing.race import Rule
from headwise.choosing.recommend import answer, choose
from headwise.execute.engine import Place
from headwise.experiments.pages import write_report
from headwise.signals import Stop
from headwise.store import Store

RATES, TRIALS = (0.001, 0.003, 0.01), 5


def ask(path: Path, training: Any = None, seconds: float | None = None, **rule: Any) -> Choice:
    question = Question(training or Planted(), SHAPES, RATES, TRIALS)
    found, _ = answer(
        question, Rule(**{"seeds": 12, **rule}), Store(path), began=time.monotonic(),
        seconds=seconds,
        how={"device": "cpu", "workers": None, "checkpoint_every": 30.0},
        report=False, say=lambda line: None, stop=Stop(lambda number: None), command="ask",
    )  # fmt: skip
    return found


def answers(choice: Choice) -> str:
    """All but the clock and the folder."""
    spent = dataclasses.replace(choice.spent, seconds=0.0)
    same = dataclasses.replace(choice, spent=spent, store=Path())
    return json.dumps(same.to_json())


def test_planted_answer_is_tuned_with_equal_effort_and_clear(tmp_path: Path) -> None:
    training = Planted()
    found = ask(tmp_path, training)
    assert found.best == SHAPES[0]
    assert found.spent.tuning == TRIALS * len(SHAPES)
    assert len(training.made) == found.spent.tuning + found.spent.race
    assert all(0.0015 < arm.lr < 0.0026 for arm in found.arms if arm.lr)
    assert {arm.name for arm in found.ruled_out} >= {"4 x 4 in 1 layer", "8 x 2 in 1 layer"}
    assert found.within == 0 if len(found.band) == 1 else found.within > 0


def test_seeds_and_rows_of_the_tuning_are_not_compared(tmp_path: Path) -> None:
    ask(tmp_path)
    store = Store(tmp_path)
    at = standing(Question(Planted(), SHAPES, RATES, TRIALS), Rule(seeds=12), store)
    tuned = {row["id"] for row in store.rows() if row["seed"] == 0}
    raced = {row["id"] for rows in at.rows.values() for row in rows.values()}
    assert not tuned & raced
    assert tuned | raced == {row["id"] for row in store.rows()} == set(at.asked)


class Interrupted(Exception):
    pass


def test_answer_after_interruptions_is_that_of_an_undisturbed_search(tmp_path: Path) -> None:
    """Interrupted before every third row it makes no row twice, and says the same."""
    whole = ask(tmp_path / "whole")

    def interrupt(made: int) -> None:
        if made == 3:
            raise Interrupted

    made: list[str] = []
    while True:
        training = Planted(interrupt)
        try:
            found = ask(tmp_path / "parts", training)
            break
        except Interrupted:
            made += training.made
    made += training.made
    assert len(made) == len(set(made)) == whole.spent.tuning + whole.spent.race
    assert answers(found) == answers(whole)


def test_more_seeds_resume_from_the_rows_that_are_there(tmp_path: Path) -> None:
    training = Planted()
    few = ask(tmp_path, seeds=3)
    many = ask(tmp_path, training, seeds=20)
    assert many.spent.race >= few.spent.race
    assert len(training.made) == many.spent.race - few.spent.race


def test_search_on_workers_of_an_engine_says_what_one_here_says(tmp_path: Path) -> None:
    """And where nothing has been learned, that."""
    given: dict[str, Any] = {"params": "2k", "dim": 8, "depths": [1], "heads": [1, 2], "steps": 20}
    given |= {"batch": 8, "rates": [0.01], "seeds": 2, "report": False, "say": lambda line: None}
    here = choose("farthest", **given, store=tmp_path / "here", command="ask")
    there = choose(
        "farthest", **given, store=tmp_path / "there", command="ask", on=Place(devices="cpu:1")
    )
    assert answers(there) == answers(here)
    assert here.spent.race == 4
    assert any(
        "no shape beats the best answer without attention (zero: 1)" in line
        for line in here.changes
    )


# ---- time


def test_round_that_would_not_end_in_time_is_not_begun(tmp_path: Path) -> None:
    slow = Planted(lambda made: time.sleep(0.02))
    found = ask(tmp_path, slow, seconds=0.5)
    assert found.ended == "time"
    assert found.spent.tuning < TRIALS * len(SHAPES) or found.spent.race < 4 * 12
    assert "time was up" in str(found)
    assert "more time" in found.changes[0]
    # The same call resumes where it stopped.
    assert answers(ask(tmp_path)) == answers(ask(tmp_path / "whole"))


def test_answer_without_a_look_names_nothing(tmp_path: Path) -> None:
    found = ask(tmp_path, Planted(lambda made: time.sleep(0.02)), seconds=0.1)
    assert (found.best, found.leader, found.band) == (None, None, ())
    assert found.sentence.startswith("Nothing can be said about planted yet: time was up after ")
    assert found.statement == ""
    assert found.to_json()["best"] is None
    assert len(found.table) == 1 + len(SHAPES)


# ---- sentences


def test_tie_is_one_band_and_the_cheapest_is_named(tmp_path: Path) -> None:
    found = ask(tmp_path, seeds=3)
    names = [arm.name for arm in found.band]
    assert len(names) > 1
    assert "cannot be told apart" in found.sentence
    assert found.band == tuple(sorted(found.band, key=lambda arm: (arm.cost, arm.name)))
    assert "Seeds to tell the others" in str(found)
    assert found.within is not None
    assert f"is within {found.within:.4f} of the best of these 4 shapes" in found.statement
    assert found._repr_html_().startswith("<b>On planted these")
    assert json.loads(json.dumps(found.to_json()))["band"] == names


def test_page_has_every_look(tmp_path: Path) -> None:
    found = ask(tmp_path)
    about = Store(tmp_path).experiments()["choose-planted"]
    looks = about["page"]["figures"][1]["panels"]
    assert [panel["title"] for panel in looks] == [
        f"{look.seeds} seeds" for look in found.race.looks
    ]
    assert about["page"]["headline"] == found.lines
    assert about["later"] == [0, 0]
    page = write_report(Store(tmp_path)).read_text()
    assert html.escape(found.sentence) in page
    assert "Every look" in page


# ---- mistakes


def test_store_of_another_question_is_refused_and_keeps_its_rows(tmp_path: Path) -> None:
    ask(tmp_path)
    before = len(Store(tmp_path).rows())
    other = Question(Planted(), SHAPES[:2], RATES, TRIALS)
    message = refused(
        answer, other, Rule(), Store(tmp_path), began=0.0, seconds=None,
        how={"device": "cpu", "workers": None, "checkpoint_every": 30.0}, report=False,
        say=lambda line: None, stop=None, command="",
    )  # fmt: skip
    assert "holds another question about planted: shapes was '4 others', now '2 others'" in message
    assert len(Store(tmp_path).rows()) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "choose needs shapes, or the parameters that they are to have (params)"),
        ({"shapes": SHAPES, "params": "300k"}, "shapes are given, so params has nothing to limit"),
        ({"shapes": SHAPES[:1]}, "at least 2 shapes can be compared, got 1"),
        ({"shapes": SHAPES[:1] * 2}, "shapes must differ from each other"),
        ({"params": "300q"}, "unknown unit 'q' of params; "),
        ({"params": "many"}, "params must be "),
        ({"params": "9k", "limits": {"activation_bytes": "<=9"}}, "no shape of width 24 meets "),
        ({"params": "300k", "hours": 1, "seconds": 3}, "time is given in seconds or in hours"),
        ({"params": "300k", "hours": -1}, "time must be above 0, got -3600 seconds"),
        ({"params": "300k", "on": "mars"}, "unknown engine 'mars'; choices: local, "),
        ({"params": "300k", "trials": 2}, "trials must be at least as many as rates, got 2"),
        ({"params": 900, "dim": 64}, "fewer than two shapes of 900 parameters, width 64"),
        ({"params": "300k", "most": 1}, "at least 2 shapes can be compared, got 1"),
        ({"params": "300k", "steps": 0}, "steps must be at least 1, got 0"),
    ],
)
def test_choose_refuses(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert refused(choose, "farthest", store=tmp_path / "new", **given).startswith(message)
    assert not (tmp_path / "new").exists()
