"""A limit on time: with a clock of the test's own."""

import signal

import pytest

from headwise.choosing.clock import Deadline, Pace, end_of, slowness, times
from headwise.signals import Stop, Stopped, saving


def test_deadline_asks_for_a_stop_when_time_is_up() -> None:
    now = [0.0]
    deadline = Deadline(Stop(lambda number: None), 10.0, lambda: now[0])
    assert not deadline.asked()

    def train() -> None:
        with saving(deadline) as heard:
            assert deadline.signals.saving
            now[0] = 10.0
            assert heard.asked()

    with pytest.raises(Stopped) as caught:
        train()
    assert caught.value.number == signal.SIGALRM
    assert not deadline.signals.asked()


def test_deadline_hands_on_signals_of_the_command() -> None:
    left: list[int] = []
    command = Stop(left.append)
    deadline = Deadline(command, 10.0, lambda: 0.0)

    def train() -> None:
        with saving(deadline):
            command.handle(signal.SIGTERM)
            assert deadline.asked()

    with pytest.raises(Stopped) as caught:
        train()
    assert caught.value.number == signal.SIGTERM
    assert left == []


def test_pace_is_the_slower_of_the_last_two_rounds() -> None:
    pace = Pace()
    assert pace.seconds(5.0) is None
    for seconds in (9.0, 2.0, 4.0):
        pace.note(2.0, seconds)
    assert pace.seconds(5.0) == 10.0
    assert Pace(3.0).seconds(2.0) == 6.0


def test_report_has_a_part_of_the_time() -> None:
    assert end_of(None, 5.0) == float("inf")
    assert end_of(100.0, 5.0) == 5.0 + 95.0
    assert end_of(2.0, 0.0) == 1.5
    assert end_of(100.0, 5.0, slow=4.0) == 5.0 + 86.0
    assert end_of(10.0, 0.0, slow=4.0) == 7.5


def test_machine_is_slow_by_what_a_process_gets_of_it() -> None:
    assert slowness(6.0, 1.5) == 4.0
    assert slowness(1.0, 2.0) == 1.0, "several threads"
    assert slowness(9.0, 0.1) == 1.0, "too little was done to tell"
    assert slowness(900.0, 1.0) == 10.0


def test_times_are_said_in_their_largest_unit() -> None:
    assert [times(s) for s in (7.25, 90, 9000)] == ["7.25 seconds", "1.5 minutes", "2.5 hours"]
